#include "connector/store/tiered_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "connector/store/host_store.h"
#include "tests/connector/fake_store.h"
#include "tests/connector/store_values.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kDeadline = absl::StatusCode::kDeadlineExceeded;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kUnavailable = absl::StatusCode::kUnavailable;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

int64_t Exists(KvStore& store, const std::vector<std::string_view>& keys) {
  return Must(store.Exists(keys, Soon()));
}

std::vector<bool> Each(KvStore& store, const std::vector<std::string_view>& keys) {
  return Must(store.ExistsEach(keys, Soon()));
}

std::shared_ptr<HostStore> MakeHost(int64_t bytes) {
  return Must(HostStore::Create({Must(HostStore::FlatLayout(10)), bytes, 0}));
}

class TieredStores : public testing::Test {
 protected:
  const std::shared_ptr<FakeStore> upper_ = std::make_shared<FakeStore>(1000);
  const std::shared_ptr<FakeStore> lower_ = std::make_shared<FakeStore>(10000);
  const std::unique_ptr<TieredStore> store_ = Must(TieredStore::Create(upper_, lower_));
  const Bytes old_ = ValueOf(1, 1, 100);
  const Bytes new_ = ValueOf(1, 2, 100);

  testing::AssertionResult Is(KvStore& store, std::string_view key, const Bytes& want) {
    const auto got = store.GetBytes(key, Soon());
    if (!got.ok()) return testing::AssertionFailure() << got.status();
    return *got == want ? testing::AssertionSuccess()
                        : testing::AssertionFailure() << "other bytes";
  }
  bool Misses(KvStore& store, std::string_view key) {
    return absl::IsNotFound(store.GetBytes(key, Soon()).status());
  }
};

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

TEST_F(TieredStores, AnUpperTierThatIsDown) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  ASSERT_TRUE(IsOk(Put(*upper_, "b", old_)));
  upper_->down = true;
  EXPECT_TRUE(Is(*store_, "a", old_));
  EXPECT_TRUE(Fails(store_->GetBytes("b", Soon()), kUnavailable));  // It may be there.
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

// It would be waited for again, key by key.
TEST_F(TieredStores, ATierThatDidNotAnswerToABatchIsNotAskedAboutItsKeys) {
  const std::span<const std::byte> in[] = {old_, new_};
  const std::vector<std::string> names = {"a", "b", "c", "d"};
  std::vector<KvStore::PutItem> first, second;
  for (const std::string& name : names) {
    first.push_back({name, {&in[0], 1}});
    second.push_back({name, {&in[1], 1}});
  }
  for (const auto& status : store_->PutBatch(first, Soon())) ASSERT_TRUE(IsOk(status));
  lower_->down = true;
  lower_->num_calls = 0;
  for (const auto& status : store_->PutBatch(second, Soon())) EXPECT_TRUE(IsOk(status));
  EXPECT_EQ(lower_->num_calls, 4);  // The puts.
  lower_->down = false;
  for (const std::string& name : names) {
    EXPECT_TRUE(Is(*lower_, name, old_));
    ASSERT_TRUE(IsOk(upper_->Erase(name, Soon())));  // As when it is evicted.
    EXPECT_TRUE(Misses(*store_, name));
  }
}

TEST_F(TieredStores, ATierThatHangsCostsOneDeadlineInAWhile) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  ASSERT_TRUE(IsOk(Put(*lower_, "b", old_)));
  lower_->hangs = true;
  lower_->num_calls = 0;
  const std::vector<std::string_view> keys = {"a", "b"};
  const Deadline begin = Clock::now();
  EXPECT_EQ(Must(store_->Exists(keys, DeadlineIn(2 * TieredStore::kPatience))), 1);
  EXPECT_EQ(lower_->num_calls, 1);
  // From here on its answers would come at once, but it is not asked for any.
  lower_->hangs = false;
  EXPECT_EQ(Exists(*store_, {"a", "b"}), 1);
  EXPECT_TRUE(Fails(store_->GetBytes("b", Soon()), kUnavailable, "lower tier (fake)", "not asked"));
  EXPECT_TRUE(IsOk(Put(*store_, "a", new_)));
  EXPECT_TRUE(Is(*store_, "a", new_));
  EXPECT_TRUE(Fails(store_->Erase("b", Soon()), kUnavailable));
  EXPECT_TRUE(Fails(store_->Pin("b", Soon()), kUnavailable));
  EXPECT_EQ(lower_->num_calls, 1);
  EXPECT_EQ(store_->stats().errors, 5);

  EXPECT_TRUE(WaitFor([&] { return Is(*store_, "b", old_); }, Soon()));
  EXPECT_GE(Clock::now(), begin + TieredStore::kSilence);
  ASSERT_TRUE(Is(*lower_, "a", old_));
  ASSERT_TRUE(IsOk(upper_->Erase("a", Soon())));  // As when it is evicted.
  EXPECT_TRUE(Misses(*store_, "a"));
  EXPECT_TRUE(IsOk(store_->Erase("b", Soon())));
}

// Or those who have much time would wait all of it, again and again.
TEST_F(TieredStores, ATierThatWasSilentIsTriedForAShortTime) {
  ASSERT_TRUE(IsOk(Put(*lower_, "b", old_)));
  lower_->hangs = true;
  EXPECT_TRUE(Fails(store_->GetBytes("b", DeadlineIn(TieredStore::kPatience)), kDeadline));
  lower_->num_calls = 0;
  const auto tried = [&] {
    const Deadline deadline = DeadlineIn(10 * TieredStore::kSilence);
    const absl::Status put = Put(*store_, "a", new_, deadline);
    EXPECT_TRUE(IsOk(put));
    EXPECT_LT(Clock::now(), deadline - 8 * TieredStore::kSilence);
    return lower_->num_calls > 0;
  };
  EXPECT_TRUE(WaitFor(tried, Soon()));
  EXPECT_TRUE(Fails(store_->GetBytes("b", Soon()), kUnavailable, "not asked"));
  lower_->hangs = false;
  EXPECT_TRUE(WaitFor([&] { return Is(*store_, "b", old_); }, Soon()));
  // It answers: from here on it has the time that its callers have.
  lower_->hangs = true;
  const Deadline deadline = DeadlineIn(2 * TieredStore::kPatience);
  EXPECT_TRUE(IsOk(Put(*store_, "c", new_, deadline)));
  EXPECT_GE(Clock::now(), deadline);
}

TEST_F(TieredStores, ADeadlineThatIsNearlyOverSilencesNoTier) {
  ASSERT_TRUE(IsOk(Put(*lower_, "b", old_)));
  for (int i = 0; i < 40; ++i) {
    lower_->hangs = true;
    EXPECT_TRUE(Fails(store_->GetBytes("b", DeadlineInMs(-1000)), kDeadline));
    EXPECT_TRUE(Fails(store_->GetBytes("b", DeadlineInMs(20)), kDeadline));
    lower_->hangs = false;
    EXPECT_TRUE(Is(*store_, "b", old_));
    ASSERT_TRUE(IsOk(upper_->Erase("b", Soon())));
  }
}

// What is above has to be found by those who have not much time either.
TEST_F(TieredStores, ATierThatAnswersToNoneOfMoreShortDeadlinesIsSilent) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  lower_->hangs = true;
  lower_->num_calls = 0;
  const std::vector<std::string_view> keys = {"a", "b"};
  const auto in_time = [&] {
    const Deadline deadline = DeadlineInMs(50);
    return Must(store_->Exists(keys, deadline)) == 1 && Clock::now() < deadline;
  };
  EXPECT_TRUE(WaitFor(in_time, Soon()));
  EXPECT_LE(lower_->num_calls, 15);
}

TEST_F(TieredStores, ATierThatHasTiersDoesWithoutTheSilentOneByItself) {
  const auto bottom = std::make_shared<FakeStore>(1000);
  const std::shared_ptr<TieredStore> below = Must(TieredStore::Create(lower_, bottom));
  const auto store = Must(TieredStore::Create(upper_, below));
  ASSERT_TRUE(IsOk(Put(*lower_, "a", old_)));
  bottom->hangs = true;
  EXPECT_TRUE(Fails(store->GetBytes("b", DeadlineIn(2 * TieredStore::kPatience)), kDeadline));
  EXPECT_TRUE(Fails(store->GetBytes("b", Soon()), kUnavailable, "not asked"));
  EXPECT_TRUE(Is(*store, "a", old_));
}

TEST_F(TieredStores, ACallThatHangsBesideAnswersSilencesNoTier) {
  ASSERT_TRUE(IsOk(Put(*lower_, "a", old_)));
  lower_->hangs = true;
  lower_->num_calls = 0;
  auto hanging = std::async(std::launch::async, [&] {
    return store_->GetBytes("b", DeadlineIn(2 * TieredStore::kPatience));
  });
  ASSERT_TRUE(WaitFor([&] { return lower_->num_calls == 1; }, Soon()));
  lower_->hangs = false;
  while (hanging.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    ASSERT_EQ(Exists(*store_, {"a"}), 1);
  }
  EXPECT_TRUE(Fails(hanging.get(), kDeadline));
  EXPECT_EQ(Exists(*store_, {"a"}), 1);
}

// Those who wait for somebody else at the same key do not wait for the tier.
TEST_F(TieredStores, WaitingForATurnSilencesNoTier) {
  const auto lower = std::make_shared<GatedStore>(1000);
  const auto store = Must(TieredStore::Create(upper_, lower));
  for (const std::string_view key : {"a", "b"}) ASSERT_TRUE(IsOk(Put(*lower, key, old_)));
  auto slow = std::async(std::launch::async, [&] { return store->GetBytes("a", Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  EXPECT_TRUE(Fails(store->GetBytes("a", DeadlineIn(2 * TieredStore::kPatience)), kDeadline));
  lower->go_on.Open();
  EXPECT_TRUE(Is(*store, "b", old_));
  EXPECT_TRUE(IsOk(slow.get()));
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

TEST_F(TieredStores, AFullTierDropsTheOldValue) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  lower_->full = true;
  ASSERT_TRUE(IsOk(Put(*store_, "a", new_)));
  EXPECT_TRUE(Misses(*lower_, "a"));
  EXPECT_TRUE(Is(*store_, "a", new_));
  EXPECT_EQ(store_->stats().errors, 1);
}

TEST_F(TieredStores, ATierThatFindsNoMemoryIsDoneWithout) {
  const auto lower = std::make_shared<ScarceStore>(1000);
  const auto store = Must(TieredStore::Create(upper_, lower));
  ASSERT_TRUE(IsOk(Put(*store, "a", old_)));
  ASSERT_TRUE(IsOk(Put(*store, "b", old_)));
  lower->scarce = true;
  EXPECT_TRUE(IsOk(Put(*store, "a", new_)));
  EXPECT_TRUE(Fails(store->GetBytes("below", Soon()), kExhausted));
  EXPECT_EQ(Exists(*store, {"b", "below"}), 1);
  EXPECT_EQ(store->stats().errors, 3);
  lower->scarce = false;
  ASSERT_TRUE(IsOk(upper_->Erase("a", Soon())));  // As when it is evicted.
  EXPECT_TRUE(Misses(*store, "a"));
}

// What is shown above fails after the lower tier took it.
TEST_F(TieredStores, WhatCannotBeShownDoesNotLeaveTheOldValueAbove) {
  const auto pool = Must(KvPool::Create(Must(HostStore::FlatLayout(100)), 1));
  const std::vector<std::string_view> keys = {"a"};
  const std::vector<int64_t> pages = {0};
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  std::ranges::copy(new_, pool->page(0, 0, 0).begin());
  const auto show = [](size_t) -> absl::Status { throw std::bad_alloc(); };
  EXPECT_TRUE(Fails(store_->PutShown(keys, *pool, pages, show, Soon())[0], kExhausted));
  EXPECT_TRUE(Is(*store_, "a", new_));
}

TEST_F(TieredStores, PinsWhereTheyCan) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  EXPECT_TRUE(Fails(store_->Pin("a", Soon()), kUnimplemented));
  const auto host = MakeHost(200);
  const auto store = Must(TieredStore::Create(host, lower_));
  EXPECT_TRUE(IsOk(store->Pin("a", Soon())));  // Brought up.
  EXPECT_EQ(host->stats().pinned, 1);
  EXPECT_TRUE(IsOk(store->Pin("a", Soon())));
  EXPECT_TRUE(Fails(store->Pin("b", Soon()), kNotFound));
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(host->stats().pinned, 1);
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(host->stats().pinned, 0);
  EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kPrecondition));
}

class PinnedStore : public FakeStore {
 public:
  using FakeStore::FakeStore;

  int64_t pins = 0;
  absl::Status unpins;  // What it says to those.

  absl::Status Pin(std::string_view, Deadline) override {
    ++pins;
    return absl::OkStatus();
  }
  absl::Status Unpin(std::string_view, Deadline) override {
    if (unpins.ok()) --pins;
    return unpins;
  }
};

TEST_F(TieredStores, AnUnpinThatATierHasNotDoneIsAskedAgain) {
  for (const bool upper_fails : {false, true}) {
    SCOPED_TRACE(upper_fails);
    const auto upper = std::make_shared<PinnedStore>(1000);
    const auto lower = std::make_shared<PinnedStore>(1000);
    const auto store = Must(TieredStore::Create(upper, lower));
    PinnedStore& fails = upper_fails ? *upper : *lower;
    ASSERT_TRUE(IsOk(Put(*store, "a", old_)));
    ASSERT_TRUE(IsOk(store->Pin("a", Soon())));
    fails.unpins = absl::UnavailableError("down");
    EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kUnavailable, "down"));
    EXPECT_EQ(store->stats().pinned, 1);
    EXPECT_EQ(store->stats().errors, 1);
    fails.unpins = absl::OkStatus();
    EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
    EXPECT_EQ(store->stats().pinned, 0);
    EXPECT_EQ(upper->pins, 0);
    EXPECT_EQ(lower->pins, 0);
    EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kPrecondition));
    // A tier that has no pin any more has nothing to let go of.
    ASSERT_TRUE(IsOk(store->Pin("a", Soon())));
    fails.unpins = absl::FailedPreconditionError("not pinned");
    EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  }
}

// Its pins may have been carried out when they fail.
class UnsurePinnedStore : public PinnedStore {
 public:
  using PinnedStore::PinnedStore;
  bool pins_for_sure() const override { return false; }
};

TEST_F(TieredStores, PinsThatAreNotForSureAreNotUsed) {
  const auto lower = std::make_shared<UnsurePinnedStore>(1000);
  const auto host = MakeHost(200);
  const auto store = Must(TieredStore::Create(host, lower));
  EXPECT_FALSE(store->pins_for_sure());
  ASSERT_TRUE(IsOk(Put(*lower, "a", old_)));
  EXPECT_TRUE(IsOk(store->Pin("a", Soon())));  // Brought up.
  EXPECT_EQ(host->stats().pinned, 1);
  EXPECT_EQ(lower->pins, 0);
  lower->unpins = absl::UnavailableError("it may have been carried out");
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(host->stats().pinned, 0);
  EXPECT_TRUE(Must(TieredStore::Create(upper_, host))->pins_for_sure());
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

// There is no room beside the old value, and the lower tier has no pins.
TEST_F(TieredStores, APinnedEntryIsReplacedWhereItIsPinned) {
  const auto host = MakeHost(100);
  const auto store = Must(TieredStore::Create(host, lower_));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 60))));
  ASSERT_TRUE(IsOk(store->Pin("a", Soon())));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 2, 60))));
  EXPECT_EQ(host->stats().pinned, 1);
  EXPECT_TRUE(Is(*host, "a", ValueOf(1, 2, 60)));
  {
    const HostStore::ReadLease read = Must(host->Acquire("a"));
    EXPECT_TRUE(
        Fails(Put(*store, "a", ValueOf(1, 3, 60)), kExhausted, "keeps it pinned", "leased"));
  }
  EXPECT_TRUE(Is(*store, "a", ValueOf(1, 3, 60)));
  // What neither tier has taken leaves the old one where it was.
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 4, 60))));
  EXPECT_EQ(host->stats().pinned, 1);
  lower_->down = true;
  EXPECT_TRUE(Fails(Put(*store, "a", ValueOf(1, 5, 60)), kUnavailable, "neither tier"));
  EXPECT_TRUE(Is(*host, "a", ValueOf(1, 4, 60)));
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(host->stats().pinned, 0);
}

// The upper tier had no room for the new value of a pinned entry: the lower one keeps it.
TEST_F(TieredStores, APinMovesWithItsEntry) {
  const auto upper = MakeHost(100), lower = MakeHost(400);
  const auto store = Must(TieredStore::Create(upper, lower));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 60))));
  ASSERT_TRUE(IsOk(lower->Erase("a", Soon())));  // As when it is evicted: pinned in one only.
  ASSERT_TRUE(IsOk(store->Pin("a", Soon())));
  {
    const HostStore::ReadLease read = Must(upper->Acquire("a"));  // It leaves no room either.
    ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 2, 60))));
  }
  EXPECT_EQ(upper->stats().entries, 0);
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(IsOk(Put(*store, absl::StrCat(i), ValueOf(2, 1, 60))));
  EXPECT_TRUE(Is(*store, "a", ValueOf(1, 2, 60)));
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(upper->stats().pinned + lower->stats().pinned, 0);
}

TEST_F(TieredStores, ABatchIsAnsweredFromBothTiers) {
  const Bytes large = ValueOf(2, 1, 5000);
  const std::span<const std::byte> in[] = {old_, large, new_};
  const std::vector<KvStore::PutItem> puts = {
      {"a", {&in[0], 1}}, {"large", {&in[1], 1}}, {"b", {&in[2], 1}}, {"", {&in[0], 1}}};
  const auto put = store_->PutBatch(puts, Soon());
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(IsOk(put[i]));
  EXPECT_TRUE(Fails(put[3], kInvalid));
  EXPECT_TRUE(Misses(*upper_, "large"));
  ASSERT_TRUE(IsOk(upper_->Erase("b", Soon())));  // As when it is evicted.

  Bytes outs[] = {Bytes(100), Bytes(5000), Bytes(100), Bytes(100), Bytes(7), Bytes(1)};
  std::vector<std::span<std::byte>> out(std::begin(outs), std::end(outs));
  const auto part = [&out](size_t i) { return std::span(out).subspan(i, 1); };
  const std::vector<KvStore::GetItem> gets = {{"a", part(0)}, {"large", part(1)}, {"b", part(2)},
                                              {"c", part(3)}, {"a", part(4)},     {"", part(5)}};
  const auto got = store_->GetBatch(gets, Soon());
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(IsOk(got[i]));
  EXPECT_TRUE(outs[0] == old_ && outs[1] == large && outs[2] == new_);
  EXPECT_TRUE(Fails(got[3], kNotFound));
  EXPECT_TRUE(Fails(got[4], kPrecondition, "100", "7"));
  EXPECT_TRUE(Fails(got[5], kInvalid));
  EXPECT_TRUE(Is(*upper_, "b", new_));  // Brought up.
  EXPECT_EQ(store_->stats().hits, 3);
  EXPECT_EQ(store_->stats().misses, 1);
  EXPECT_EQ(store_->stats().errors, 0);

  // The tier that was down must not answer a batch with an old value either.
  lower_->down = true;
  const std::vector<KvStore::PutItem> again = {{"a", {&in[2], 1}}, {"c", {&in[0], 1}}};
  for (const auto& status : store_->PutBatch(again, Soon())) EXPECT_TRUE(IsOk(status));
  lower_->down = false;
  for (const auto key : {"a", "c"}) ASSERT_TRUE(IsOk(upper_->Erase(key, Soon())));
  const auto late = store_->GetBatch(std::span(gets).first(1), Soon());
  EXPECT_TRUE(Fails(late[0], kNotFound));
}

// The bytes of the one must not come up under the key of the other.
TEST_F(TieredStores, WhatIsReadToTheSamePlaceIsNotBroughtUp) {
  for (const std::string_view key : {"a", "b", "c", "d"}) {
    ASSERT_TRUE(IsOk(Put(*lower_, key, ValueOf(key[0], 1, 100))));
  }
  Bytes out(400);
  const auto at = [&out](size_t begin, size_t bytes) {
    return std::span<std::byte>(out).subspan(begin, bytes);
  };
  // a and b overlap by a byte of one part, d by one of its own, c lies between them.
  const std::span<std::byte> a[] = {at(0, 50), at(60, 50)}, b[] = {at(109, 100)},
                             c[] = {at(209, 30), {}, at(239, 70)},
                             d[] = {at(310, 50), at(359, 40), at(399, 1), at(50, 9)};
  const std::vector<KvStore::GetItem> items = {{"d", d}, {"b", b}, {"a", a}, {"c", c}};
  for (const auto& status : store_->GetBatch(items, Soon())) EXPECT_TRUE(IsOk(status));
  EXPECT_TRUE(Is(*upper_, "c", ValueOf('c', 1, 100)));
  for (const std::string_view key : {"a", "b", "d"}) {
    EXPECT_TRUE(Misses(*upper_, key)) << key;
    EXPECT_TRUE(Is(*store_, key, ValueOf(key[0], 1, 100))) << key;
  }
}

// All keys at each gap would be 500 times 1000.
TEST_F(TieredStores, GapsDoNotMakeTheLowerTierLookForAllKeys) {
  std::vector<std::string> names;
  for (int i = 0; i < 1000; ++i) names.push_back(absl::StrCat("key", i));
  for (size_t i = 0; i < 500; ++i) {
    ASSERT_TRUE(IsOk(Put(i % 2 == 0 ? *upper_ : *lower_, names[i], old_)));
  }
  for (size_t i = 500; i < 1000; ++i) ASSERT_TRUE(IsOk(Put(*lower_, names[i], old_)));
  lower_->num_calls = 0;
  EXPECT_EQ(Must(store_->Exists(std::vector<std::string_view>(names.begin(), names.end()), Soon())),
            1000);
  EXPECT_LE(lower_->num_keys_asked, 1000);
  EXPECT_LE(lower_->num_calls, 250 + 10);
  lower_->num_calls = 0;
  EXPECT_EQ(Each(*store_, std::vector<std::string_view>(names.begin(), names.end())),
            std::vector<bool>(1000, true));
  EXPECT_EQ(lower_->num_calls, 1);
}

// With the same keys in another order, and often in each other's way.
TEST_F(TieredStores, BatchesOfTwoThreadsDoNotWaitForEachOther) {
  const auto run = [this](bool backwards) {
    for (uint64_t round = 0; round < 2000; ++round) {
      const Bytes value = ValueOf(1, round, 100);
      const std::span<const std::byte> in = value;
      std::vector<KvStore::PutItem> puts;
      for (const std::string_view key : {"a", "b", "c", "d"}) puts.push_back({key, {&in, 1}});
      if (backwards) std::ranges::reverse(puts);
      for (const auto& status : store_->PutBatch(puts, Soon())) ASSERT_TRUE(IsOk(status));
    }
  };
  std::thread other([&] { run(true); });
  run(false);
  other.join();
  for (const std::string_view key : {"a", "b", "c", "d"}) {
    EXPECT_TRUE(*upper_->GetBytes(key, Soon()) == *lower_->GetBytes(key, Soon()));
  }
}

// So many values of ten bytes, one batch of them.
struct ManyValues {
  explicit ManyValues(int count) {
    for (int i = 0; i < count; ++i) {
      names.push_back(absl::StrCat("key", i));
      values.push_back(ValueOf(i, 1, 10));
    }
    for (int i = 0; i < count; ++i) {
      ins.emplace_back(values[i]);
      outs.emplace_back(values[i]);
    }
    for (int i = 0; i < count; ++i) {
      puts.push_back({names[i], {&ins[i], 1}});
      gets.push_back({names[i], {&outs[i], 1}});
    }
  }
  std::vector<std::string_view> keys() const { return {names.begin(), names.end()}; }

  std::vector<std::string> names;
  std::vector<Bytes> values;
  std::vector<std::span<const std::byte>> ins;
  std::vector<std::span<std::byte>> outs;
  std::vector<KvStore::PutItem> puts;
  std::vector<KvStore::GetItem> gets;
};

// Also where some were above and others came up: those were used last, and are what comes after.
TEST_F(TieredStores, OfABatchThatCameUpInPartTheFirstIsDroppedLast) {
  ManyValues many(20);
  const auto upper = MakeHost(200), lower = MakeHost(1000);
  const auto store = Must(TieredStore::Create(upper, lower));
  for (const auto& status : store->PutBatch(many.puts, Soon())) ASSERT_TRUE(IsOk(status));
  for (int i = 10; i < 20; ++i) ASSERT_TRUE(IsOk(upper->Erase(many.names[i], Soon())));
  for (const auto& status : store->GetBatch(many.gets, Soon())) EXPECT_TRUE(IsOk(status));
  { const HostStore::Reservation others = Must(upper->Reserve(60)); }
  EXPECT_EQ(Exists(*upper, many.keys()), 14);
}

TEST_F(TieredStores, OfWhatIsAskedForPieceByPieceTheFirstIsDroppedLast) {
  ManyValues many(20);
  const auto upper = MakeHost(200), lower = MakeHost(1000);
  const auto store = Must(TieredStore::Create(upper, lower));
  for (const auto& status : store->PutBatch(many.puts, Soon())) ASSERT_TRUE(IsOk(status));
  for (const int gap : {5, 10}) ASSERT_TRUE(IsOk(upper->Erase(many.names[gap], Soon())));
  EXPECT_EQ(Exists(*store, many.keys()), 20);
  { const HostStore::Reservation others = Must(upper->Reserve(60)); }  // Two pages are free.
  std::vector<bool> left(20, true);
  left[5] = left[10] = left[16] = left[17] = left[18] = left[19] = false;
  EXPECT_EQ(Each(*upper, many.keys()), left);
}

// By a clock of the test's own.
TEST(TierPatience, ASilenceIsFourTimesWhatWasWaitedAndHasAnEnd) {
  using std::chrono::milliseconds;
  using std::chrono::seconds;
  TierPatience patience;
  Deadline now = Clock::now();
  // A call that may take so long, of a tier that hangs: how long it is not asked then.
  const auto silence_after = [&](milliseconds most) {
    const Deadline begin = std::max(now, patience.silent_until());
    now = patience.WaitUntil(begin, begin + most);
    patience.Heard(begin, now, /*answered=*/false);
    return std::chrono::duration_cast<milliseconds>(patience.silent_until() - now);
  };
  EXPECT_EQ(silence_after(seconds(60)), seconds(5));  // Its callers' own time, once.
  for (int i = 0; i < 3; ++i) silence_after(seconds(60));
  // Whoever has not much time waits in vain for no more than that.
  EXPECT_EQ(silence_after(seconds(2)), seconds(8));
  EXPECT_EQ(silence_after(milliseconds(600)), seconds(5));
  EXPECT_EQ(silence_after(seconds(2)), seconds(8));
  Clock::duration waited{};
  for (int i = 0; i < 20; ++i) {
    const Deadline before = std::max(now, patience.silent_until());
    EXPECT_LE(silence_after(seconds(600)), seconds(30)) << i;
    waited = now - before;
    EXPECT_LE(4 * waited, patience.silent_until() - now) << i;  // A fifth of the time at most.
  }
  EXPECT_GE(waited, seconds(7));
  patience.Heard(now, now, /*answered=*/true);
  EXPECT_LE(patience.silent_until(), now);
  EXPECT_EQ(patience.WaitUntil(now, now + seconds(60)), now + seconds(60));
}

// ---- Memory that is not there -------------------------------------------------------------------

// Whichever allocation is the first to fail: once the new value was seen, the old one never is,
// whatever is evicted above. Also where the lower tier did not take it and the upper one in part.
TEST_F(TieredStores, APutThatFindsNoMemoryDoesNotShowTheOldValueAfterTheNewOne) {
  const std::vector<std::string> names = {"a key with memory of its own",
                                          "another key as long as that"};
  const std::span<const std::byte> in[] = {old_, new_};
  std::vector<KvStore::PutItem> before, after;
  for (const std::string& name : names) {
    before.push_back({name, {&in[0], 1}});
    after.push_back({name, {&in[1], 1}});
  }
  for (const bool is_full_below : {false, true}) {
    bool both_took_it = false;
    for (int number = 0; number < 200; ++number) {
      SCOPED_TRACE(absl::StrCat("full below: ", is_full_below, ", allocation ", number));
      const auto upper = MakeHost(1000);
      const auto lower = std::make_shared<FakeStore>(10000);
      const auto store = Must(TieredStore::Create(upper, lower));
      for (const auto& status : store->PutBatch(before, Soon())) ASSERT_TRUE(IsOk(status));
      lower->full = is_full_below;
      both_took_it = true;
      try {
        const FailingNew failing(number);
        (void)store->PutBatch(after, Soon());
      } catch (const std::bad_alloc&) {
        both_took_it = false;  // What is there then, below, matters as well.
      }
      for (const std::string& name : names) {
        const auto seen = store->GetBytes(name, Soon());
        both_took_it &= Is(*upper, name, new_) && (is_full_below || Is(*lower, name, new_));
        ASSERT_TRUE(IsOk(upper->Erase(name, Soon())));  // As when it is evicted.
        if (seen.ok() && *seen == new_) {
          EXPECT_FALSE(Is(*store, name, old_));
        }
      }
    }
    EXPECT_TRUE(both_took_it);  // With so many granted it went well.
  }
}

// As a server puts pages, whose upper tier is asked past this store.
TEST_F(TieredStores, APutOfWhatIsShownThatFindsNoMemoryLeavesNoOldValueAbove) {
  const auto pool = Must(KvPool::Create(Must(HostStore::FlatLayout(100)), 1));
  const std::string name = "a key with memory of its own";
  const std::string_view key = name;
  const int64_t page = 0;
  bool is_through = false;
  for (int number = 0; number < 200; ++number) {
    SCOPED_TRACE(number);
    const auto upper = MakeHost(1000);
    const auto lower = std::make_shared<FakeStore>(10000);
    const auto store = Must(TieredStore::Create(upper, lower));
    ASSERT_TRUE(IsOk(Put(*store, name, old_)));
    const auto show = [&](size_t) { return Put(*upper, name, new_); };
    std::ranges::copy(new_, pool->page(0, 0, 0).begin());
    try {
      const FailingNew failing(number);
      is_through = store->PutShown({&key, 1}, *pool, {&page, 1}, show, Soon())[0].ok();
    } catch (const std::bad_alloc&) {
      is_through = false;
    }
    if (Is(*lower, name, new_)) {
      EXPECT_FALSE(Is(*upper, name, old_));
    }
  }
  EXPECT_TRUE(is_through);
}

// Nobody would ever take it back.
TEST_F(TieredStores, APinThatFindsNoMemoryIsNone) {
  const auto upper = MakeHost(1000), lower = MakeHost(1000);
  const auto store = Must(TieredStore::Create(upper, lower));
  const std::string key = "a key with memory of its own";
  ASSERT_TRUE(IsOk(Put(*store, key, old_)));
  for (int number = 0; number < 50; ++number) {
    try {
      const FailingNew failing(number);
      (void)store->Pin(key, Soon());
    } catch (const std::bad_alloc&) {
      continue;
    }
    EXPECT_TRUE(IsOk(store->Unpin(key, Soon())));
    EXPECT_EQ(upper->stats().pinned, 0);
    EXPECT_EQ(lower->stats().pinned, 0);
  }
}

TEST(KeyTurns, WithoutMemoryNoneIsTaken) {
  KeyTurns turns;
  const std::string key(100, 'k');
  CallWithoutMemory([&] { (void)turns.Take(key, DeadlineInMs(0)); },
                    [&] { EXPECT_TRUE(IsOk(turns.Take(key, DeadlineInMs(0)))); });
}

TEST_F(TieredStores, BadTiersAreNamed) {
  EXPECT_TRUE(Fails(TieredStore::Create(nullptr, lower_), kInvalid, "upper is null"));
  EXPECT_TRUE(Fails(TieredStore::Create(upper_, nullptr), kInvalid, "lower is null"));
  EXPECT_TRUE(Fails(TieredStore::Create(upper_, upper_), kInvalid, "same"));
}

}  // namespace
}  // namespace kvferry
