// What two tiers answer together: what is in either counts, and an old value never does.

#include "connector/store/tiered_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <utility>

#include "tests/connector/tiered_stores.h"
#include "tests/support/captured_log.h"

namespace kvferry {
namespace {

constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnavailable = absl::StatusCode::kUnavailable;

TEST_F(TieredStores, BadTiersAreNamed) {
  EXPECT_TRUE(Fails(TieredStore::Create(nullptr, lower_), kInvalid, "upper is null"));
  EXPECT_TRUE(Fails(TieredStore::Create(upper_, nullptr), kInvalid, "lower is null"));
  EXPECT_TRUE(Fails(TieredStore::Create(upper_, upper_), kInvalid, "same"));
}

TEST_F(TieredStores, PutsGoToBothAndGetsBringUp) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  EXPECT_TRUE(Is(*upper_, "a", old_));
  EXPECT_TRUE(Is(*lower_, "a", old_));
  ASSERT_TRUE(IsOk(upper_->Erase("a", Soon())));  // As when it is evicted.
  Bytes out(100);
  const std::span<std::byte> part = out;
  ASSERT_TRUE(IsOk(store_->Get("a", {&part, 1}, Soon())));
  EXPECT_TRUE(out == old_);
  EXPECT_TRUE(Is(*upper_, "a", old_));
  ASSERT_TRUE(IsOk(upper_->Erase("a", Soon())));
  EXPECT_TRUE(Is(*store_, "a", old_));
  EXPECT_TRUE(Is(*upper_, "a", old_));
  EXPECT_EQ(store_->stats().hits, 2);
  EXPECT_EQ(store_->stats().errors, 0);
}

TEST_F(TieredStores, WhatCannotBeBroughtUpIsStillAnswered) {
  ASSERT_TRUE(IsOk(Put(*lower_, "a", old_)));
  upper_->full = true;
  EXPECT_TRUE(Is(*store_, "a", old_));
  EXPECT_EQ(store_->stats().errors, 0);
  EXPECT_TRUE(Misses(*upper_, "a"));
}

TEST_F(TieredStores, AnEntryCountsWhenEitherTierHasIt) {
  for (const std::string_view key : {"a", "b", "e"}) ASSERT_TRUE(IsOk(Put(*upper_, key, old_)));
  for (const std::string_view key : {"c", "d", "g"}) ASSERT_TRUE(IsOk(Put(*lower_, key, old_)));
  EXPECT_EQ(Exists(*store_, {"a", "b", "c", "d", "e", "f", "g"}), 5);
  EXPECT_EQ(Exists(*store_, {"c", "a", "g"}), 3);
  EXPECT_EQ(Exists(*store_, {"f", "a"}), 0);
  EXPECT_EQ(Each(*store_, {"f", "a", "c", "f", "b"}),
            std::vector<bool>({false, true, true, false, true}));
}

TEST_F(TieredStores, AValueTooLargeForATierIsKeptInTheOther) {
  EXPECT_EQ(store_->max_value_bytes(), 10000);
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  ASSERT_TRUE(IsOk(Put(*store_, "a", ValueOf(1, 3, 5000))));
  EXPECT_TRUE(Is(*store_, "a", ValueOf(1, 3, 5000)));
  EXPECT_TRUE(Misses(*upper_, "a"));  // Above all the old value is gone.
  EXPECT_EQ(store_->stats().errors, 0);
}

TEST_F(TieredStores, ALowerTierThatIsDown) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  ASSERT_TRUE(IsOk(Put(*lower_, "b", old_)));
  lower_->down = true;
  EXPECT_TRUE(Is(*store_, "a", old_));
  EXPECT_EQ(store_->stats().errors, 0);
  EXPECT_TRUE(Fails(store_->GetBytes("b", Soon()), kUnavailable, "down"));
  EXPECT_EQ(store_->stats().errors, 1);
  EXPECT_EQ(Exists(*store_, {"a", "b"}), 1);
  EXPECT_EQ(Each(*store_, {"b", "a"}), std::vector<bool>({false, true}));
  EXPECT_TRUE(IsOk(Put(*store_, "c", old_)));
  EXPECT_TRUE(Is(*store_, "c", old_));
  EXPECT_TRUE(Fails(store_->Erase("a", Soon()), kUnavailable));
  lower_->down = false;
  EXPECT_TRUE(Is(*store_, "b", old_));
  EXPECT_TRUE(Is(*store_, "a", old_));  // The erasure had failed, and said so.
  EXPECT_TRUE(IsOk(store_->Erase("a", Soon())));
  EXPECT_TRUE(Misses(*store_, "a"));
}

// Nobody else hears of it.
TEST_F(TieredStores, ATierThatFailsIsSaidOnceInAWhile) {
  const CapturedLog log;
  lower_->full = true;
  for (const std::string_view key : {"a", "b", "c"}) EXPECT_TRUE(IsOk(Put(*store_, key, old_)));
  EXPECT_EQ(store_->stats().errors, 3);
  const std::vector<std::string> lines = log.lines();
  EXPECT_EQ(
      std::ranges::count_if(
          lines, [](const std::string& line) { return line.find("a tier failed") != line.npos; }),
      1);
  EXPECT_TRUE(log.Has({"tiered store: a tier failed: RESOURCE_EXHAUSTED"}));
}

TEST_F(TieredStores, AnUpperTierThatIsDown) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  ASSERT_TRUE(IsOk(Put(*upper_, "b", old_)));
  upper_->down = true;
  EXPECT_TRUE(Is(*store_, "a", old_));
  EXPECT_TRUE(Fails(store_->GetBytes("b", Soon()), kUnavailable));  // It may be there.
  Bytes out(100);
  const std::span<std::byte> part = out;
  EXPECT_TRUE(Fails(store_->Get("b", {&part, 1}, Soon()), kUnavailable));
  EXPECT_EQ(Exists(*store_, {"a", "b"}), 1);
  EXPECT_EQ(Each(*store_, {"b", "a"}), std::vector<bool>({false, true}));
  EXPECT_TRUE(IsOk(Put(*store_, "c", old_)));
  lower_->down = true;
  EXPECT_TRUE(Fails(Put(*store_, "c", new_), kUnavailable, "neither tier"));
  EXPECT_TRUE(Fails(store_->GetBytes("c", Soon()), kUnavailable));
  const std::vector<std::string_view> keys = {"a"};
  EXPECT_TRUE(Fails(store_->Exists(keys, Soon()), kUnavailable));
  EXPECT_TRUE(Fails(store_->ExistsEach(keys, Soon()), kUnavailable));
  lower_->down = false;
  EXPECT_TRUE(Is(*store_, "c", old_));  // Not replaced.
}

// The tier that was down still has the value before: it must not answer with it.
TEST_F(TieredStores, AnOldValueIsNeverAnswered) {
  for (const bool upper_fails : {false, true}) {
    SCOPED_TRACE(upper_fails);
    FakeStore& fails = upper_fails ? *upper_ : *lower_;
    FakeStore& works = upper_fails ? *lower_ : *upper_;
    ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
    fails.down = true;
    ASSERT_TRUE(IsOk(Put(*store_, "a", new_)));
    fails.down = false;
    ASSERT_TRUE(Is(fails, "a", old_));
    EXPECT_TRUE(Is(*store_, "a", new_));
    ASSERT_TRUE(IsOk(Put(*store_, "a", new_)));
    EXPECT_TRUE(Is(fails, "a", new_));

    fails.down = true;
    ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
    fails.down = false;
    ASSERT_TRUE(IsOk(works.Erase("a", Soon())));  // As when it is evicted.
    EXPECT_TRUE(Misses(*store_, "a"));
    EXPECT_EQ(Exists(*store_, {"a"}), 0);
    EXPECT_EQ(Each(*store_, {"a"}), std::vector<bool>({false}));
    ASSERT_TRUE(IsOk(store_->Erase("a", Soon())));
    EXPECT_TRUE(Misses(fails, "a"));
  }
}

// A put moves it up while it is got: between the looks at the two tiers, neither of which has it
// then.
TEST_F(TieredStores, WhatMovesUpWhileItIsGotIsFound) {
  for (const bool batch : {false, true}) {
    for (const bool full : {false, true}) {
      SCOPED_TRACE(testing::Message() << batch << full);
      const auto upper = std::make_shared<GatedStore>(1000);
      const auto lower = std::make_shared<FakeStore>(1000);
      const auto store = Must(TieredStore::Create(upper, lower));
      ASSERT_TRUE(IsOk(Put(*lower, "a", old_)));
      Bytes out(100);
      auto get = std::async(std::launch::async, [&]() -> absl::Status {
        const std::span<std::byte> part = out;
        if (batch) return store->Get("a", {&part, 1}, Soon());
        KVFERRY_ASSIGN_OR_RETURN(out, store->GetBytes("a", Soon()));
        return absl::OkStatus();
      });
      ASSERT_TRUE(upper->asked.Wait(Soon()));  // It has not got it.
      (full ? lower->full : lower->down) = true;
      EXPECT_TRUE(IsOk(Put(*store, "a", new_)));
      upper->go_on.Open();
      EXPECT_TRUE(IsOk(get.get()));
      EXPECT_TRUE(out == new_);
    }
  }
}

// Something happens as soon as it has answered a question.
class AskedStore : public FakeStore {
 public:
  using FakeStore::FakeStore;
  std::function<void()> next;

  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override {
    absl::StatusOr<int64_t> there = FakeStore::Exists(keys, deadline);
    if (next) std::exchange(next, nullptr)();
    return there;
  }
  absl::StatusOr<std::vector<bool>> ExistsEach(std::span<const std::string_view> keys,
                                               Deadline deadline) override {
    absl::StatusOr<std::vector<bool>> there = FakeStore::ExistsEach(keys, deadline);
    if (next) std::exchange(next, nullptr)();
    return there;
  }
};

TEST_F(TieredStores, WhatMovesUpWhileItIsAskedForIsThere) {
  for (const bool each : {false, true}) {
    SCOPED_TRACE(each);
    const auto upper = std::make_shared<AskedStore>(1000);
    const auto store = Must(TieredStore::Create(upper, lower_));
    lower_->full = false;
    for (const std::string_view key : {"a", "b"}) ASSERT_TRUE(IsOk(Put(*lower_, key, old_)));
    upper->next = [&] {
      lower_->full = true;
      EXPECT_TRUE(IsOk(Put(*store, "a", new_)));
    };
    if (each) {
      EXPECT_EQ(Each(*store, {"a", "nowhere", "b"}), std::vector<bool>({true, false, true}));
    } else {
      EXPECT_EQ(Exists(*store, {"a", "b", "nowhere"}), 2);
    }
  }
}

// Has no room for what is put, and lets go of nothing.
class StuckStore : public FakeStore {
 public:
  using FakeStore::FakeStore;
  std::atomic<bool> stuck = false;
  bool pins_for_sure() const override { return false; }
  absl::Status Erase(std::string_view key, Deadline deadline) override {
    return stuck ? absl::InternalError("it is stuck") : FakeStore::Erase(key, deadline);
  }
};

// Though the tier below keeps it for good, until it takes a newer one.
TEST_F(TieredStores, AnOldValueThatCannotBeDroppedIsNeverAnswered) {
  const auto lower = std::make_shared<StuckStore>(1000);
  const std::shared_ptr<HostStore> upper = MakeHost(1000);
  const auto store = Must(TieredStore::Create(upper, lower));
  ASSERT_TRUE(IsOk(Put(*store, "a", old_)));
  lower->full = lower->stuck = true;
  ASSERT_TRUE(IsOk(Put(*store, "a", new_)));
  EXPECT_TRUE(Is(*lower, "a", old_));
  ASSERT_TRUE(IsOk(upper->Erase("a", Soon())));  // As when it is evicted.
  EXPECT_TRUE(Misses(*store, "a"));
  EXPECT_TRUE(Fails(store->Pin("a", Soon()), absl::StatusCode::kNotFound));
  EXPECT_EQ(Exists(*store, {"a"}), 0);
  EXPECT_EQ(Each(*store, {"a"}), std::vector<bool>({false}));
  lower->full = false;
  ASSERT_TRUE(IsOk(Put(*store, "a", new_)));
  ASSERT_TRUE(IsOk(upper->Erase("a", Soon())));
  EXPECT_EQ(Exists(*store, {"a"}), 1);
  EXPECT_TRUE(Is(*store, "a", new_));
}

TEST_F(TieredStores, AFullTierDropsTheOldValue) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  lower_->full = true;
  ASSERT_TRUE(IsOk(Put(*store_, "a", new_)));
  EXPECT_TRUE(Misses(*lower_, "a"));
  EXPECT_TRUE(Is(*store_, "a", new_));
  EXPECT_EQ(store_->stats().errors, 1);
}

// It is the upper one that could take it another time.
TEST_F(TieredStores, AFullUpperTierIsWhyNeitherTookWhatTheLowerNeverTakes) {
  const auto host = MakeHost(100);
  const auto store = Must(TieredStore::Create(host, std::make_shared<FakeStore>(50)));
  ASSERT_TRUE(IsOk(Put(*host, "a", ValueOf(1, 1, 60))));
  const HostStore::ReadLease read = Must(host->Acquire("a"));
  EXPECT_TRUE(Fails(Put(*store, "b", ValueOf(1, 2, 60)), kExhausted, "neither tier"));
  EXPECT_TRUE(Fails(Put(*store, "b", ValueOf(1, 2, 101)), absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace kvferry
