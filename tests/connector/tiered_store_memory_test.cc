// Where a tier or the store of both finds no memory nothing old is shown and nothing stays pinned.

#include <gtest/gtest.h>

#include <algorithm>
#include <new>

#include "absl/strings/str_cat.h"
#include "tests/connector/tiered_stores.h"
#include "tests/support/failing_new.h"

namespace kvferry {
namespace {

constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

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

}  // namespace
}  // namespace kvferry
