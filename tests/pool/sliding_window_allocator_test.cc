#include "pool/sliding_window_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <new>
#include <random>
#include <vector>

#include "tests/pool/scarce_memory.h"
#include "tests/support/failing_new.h"
#include "tests/support/sanitized.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

using Slots = std::vector<int32_t>;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

TEST(SlidingWindows, BothPoolsOrNone) {
  auto allocator = Must(SlidingWindowAllocator::Create(16, 8, 4));
  EXPECT_EQ(allocator.num_free(), 8);
  EXPECT_TRUE(Fails(allocator.Allocate(12), kExhausted));
  EXPECT_TRUE(Fails(allocator.Extend({{0}}, {{12}}, Slots{0}), kExhausted,
                    "3 pages needed but the window pool has 2"));
  EXPECT_EQ(allocator.window().num_free(), 8);
  EXPECT_EQ(allocator.full().num_free(), 16);
  const Slots first = Must(allocator.Allocate(8));
  EXPECT_TRUE(Fails(allocator.Allocate(4), kExhausted));
  ASSERT_TRUE(IsOk(allocator.FreeWindow(first)));
  EXPECT_EQ(allocator.num_free(), 8);
  ASSERT_TRUE(IsOk(allocator.Allocate(8)));
  // Now it is the full pool that has nothing.
  ASSERT_TRUE(IsOk(allocator.FreeWindow(Slots{12, 13, 14, 15})));
  EXPECT_TRUE(Fails(allocator.Allocate(4), kExhausted));
  EXPECT_EQ(allocator.window().num_free(), 4);
  EXPECT_TRUE(Fails(allocator.Extend(std::vector<int64_t>{0}, std::vector<int64_t>{4}, Slots{0}),
                    kExhausted));
  EXPECT_EQ(allocator.window().num_free(), 4);
}

TEST(SlidingWindows, SlotsAreWrittenToTheCallersList) {
  auto allocator = Must(SlidingWindowAllocator::Create(8, 4, 2));
  Slots row(6, -1);
  // The window has fewer.
  EXPECT_TRUE(Fails(allocator.AllocateInto(row), absl::StatusCode::kResourceExhausted,
                    "3 pages asked, 2 of 3 free"));
  EXPECT_EQ(row, Slots(6, -1));
  EXPECT_EQ(allocator.full().num_free(), 8);
  ASSERT_TRUE(IsOk(allocator.AllocateInto(std::span(row).first(4))));
  EXPECT_EQ(row, (Slots{2, 3, 4, 5, -1, -1}));
  EXPECT_EQ(Must(allocator.ToWindow(std::span(row).first(4))), (Slots{2, 3, 4, 5}));
  EXPECT_EQ(allocator.num_free(), 0);
}

TEST(SlidingWindows, ListsThatFindNoMemoryTakeNoPages) {
#ifdef KVFERRY_SANITIZED
  GTEST_SKIP() << "a sanitizer's malloc does not fail";
#endif
  constexpr int64_t kPage = 1 << 20;
  auto allocator = Must(SlidingWindowAllocator::Create(20 * kPage, 20 * kPage, kPage));
  const Slots first = Must(allocator.Allocate(kPage));
  const int64_t free = allocator.num_free();
  // Enough for the list of one pool, and not for both.
  constexpr int64_t kTokens = 16 * kPage, kRoom = kTokens * 4 * 3 / 2;
  {
    const ScarceMemory scarce(kRoom);
    EXPECT_THROW((void)allocator.Allocate(kTokens), std::bad_alloc);
  }
  EXPECT_EQ(allocator.window().num_free(), free);
  EXPECT_EQ(allocator.full().num_free(), free);
  // Grows into its own page first, which stays its own.
  const std::vector<int64_t> prefix = {kPage / 2}, tokens = {kPage / 2 + kTokens};
  const Slots last = {first[kPage / 2 - 1]};
  {
    const ScarceMemory scarce(kRoom);
    EXPECT_THROW((void)allocator.Extend(prefix, tokens, last), std::bad_alloc);
  }
  EXPECT_EQ(allocator.window().num_free(), free);
  EXPECT_EQ(allocator.full().num_free(), free);
  EXPECT_TRUE(IsOk(allocator.Extend(prefix, tokens, last)));
  EXPECT_EQ(allocator.num_free(), free - kTokens);
}

TEST(SlidingWindows, CallsThatFindNoMemoryForTheirListsChangeNeitherPool) {
  constexpr int64_t kPages = 100;
  auto allocator = Must(SlidingWindowAllocator::Create(kPages, kPages, 1));
  Slots slots = Must(allocator.Allocate(kPages));
  std::shuffle(slots.begin(), slots.end(), std::mt19937_64(1));
  const Slots some(slots.begin(), slots.begin() + kPages / 2),
      rest(slots.begin() + kPages / 2, slots.end());
  const auto free_are = [&](int64_t count) {
    return [&allocator, count] {
      ASSERT_EQ(allocator.full().num_free(), count);
      ASSERT_EQ(allocator.window().num_free(), count);
    };
  };
  absl::Status freed;
  CallWithoutMemory([&] { freed = allocator.Free(some); }, free_are(0));
  EXPECT_TRUE(IsOk(freed));
  free_are(kPages / 2)();
  absl::StatusOr<Slots> got;
  CallWithoutMemory([&] { got = allocator.Allocate(kPages / 2); }, free_are(kPages / 2));
  EXPECT_TRUE(IsOk(got));
  ASSERT_TRUE(IsOk(allocator.Free(some)));
  const std::vector<int64_t> none = {0}, tokens = {kPages / 2};
  const Slots last = {0};
  CallWithoutMemory([&] { got = allocator.Extend(none, tokens, last); }, free_are(kPages / 2));
  EXPECT_TRUE(IsOk(got));
  allocator.BeginFreeGroup();
  CallWithoutMemory([&] { freed = allocator.Free(rest); }, free_are(0));
  ASSERT_TRUE(IsOk(allocator.Free(some)));
  {
    const FailingNew failing(0);
    allocator.EndFreeGroup();  // Needs none.
  }
  free_are(kPages)();
  for (const int32_t page : allocator.window_pages()) EXPECT_EQ(page, 0);
}

// Slots of a page may come in several calls then, and both pools have it back at the end.
TEST(SlidingWindows, FreeGroups) {
  auto allocator = Must(SlidingWindowAllocator::Create(16, 16, 4));
  const Slots slots = Must(allocator.Allocate(12));
  allocator.BeginFreeGroup();
  ASSERT_TRUE(IsOk(allocator.Free(Slots{slots[0], slots[1], slots[4]})));
  ASSERT_TRUE(IsOk(allocator.Free(Slots{slots[2], slots[3]})));
  EXPECT_TRUE(Fails(allocator.Free(Slots{16}), absl::StatusCode::kInvalidArgument));
  ASSERT_TRUE(IsOk(allocator.FreeWindow(Slots(slots.begin() + 4, slots.begin() + 8))));
  EXPECT_EQ(allocator.full().num_free(), 4);
  EXPECT_EQ(allocator.window().num_free(), 8);
  allocator.EndFreeGroup();
  EXPECT_EQ(allocator.full().num_free(), 12);
  EXPECT_EQ(allocator.window().num_free(), 12);
  EXPECT_EQ(Must(allocator.ToWindow(slots)), (Slots{0, 0, 0, 0, 0, 0, 0, 0, 12, 13, 14, 15}));
  ASSERT_TRUE(IsOk(allocator.Free(Slots{slots[8]})));  // At once again.
  EXPECT_EQ(allocator.num_free(), 16);
  // Whoever clears it clears the group.
  const Slots more = Must(allocator.Allocate(4));
  allocator.BeginFreeGroup();
  ASSERT_TRUE(IsOk(allocator.Free(more)));
  allocator.Clear();
  EXPECT_EQ(Must(allocator.Allocate(16)).size(), 16u);
  allocator.EndFreeGroup();
  EXPECT_EQ(allocator.num_free(), 0);
}

TEST(SlidingWindows, WhatIsFreedInAnOpenGroupDoesNotGrow) {
  for (const int64_t page_size : {1, 16}) {
    SCOPED_TRACE(page_size);
    auto allocator = Must(SlidingWindowAllocator::Create(4 * page_size, 4 * page_size, page_size));
    const Slots slots = Must(allocator.Extend({{0}}, {{1}}, {{0}}));
    allocator.BeginFreeGroup();
    ASSERT_TRUE(IsOk(allocator.Free(slots)));
    EXPECT_TRUE(Fails(allocator.Decode({{2}}, slots), absl::StatusCode::kInvalidArgument,
                      "is not allocated"));
    EXPECT_EQ(allocator.num_free(), 3 * page_size);
    allocator.EndFreeGroup();
    EXPECT_EQ(allocator.num_free(), 4 * page_size);
    EXPECT_EQ(allocator.window().num_free(), 4 * page_size);
  }
}

TEST(SlidingWindows, APageLeavesTheWindowWhole) {
  auto allocator = Must(SlidingWindowAllocator::Create(16, 16, 4));
  const Slots slots = Must(allocator.Allocate(8));
  ASSERT_TRUE(IsOk(allocator.FreeWindow(Slots{4, 5, 6, 8, 9, 10, 11, 8})));
  EXPECT_EQ(Must(allocator.ToWindow(Slots{4, 8, 11})), (Slots{4, 0, 0}));
  EXPECT_EQ(allocator.window_pages()[1], 1);
  EXPECT_EQ(allocator.window_pages()[2], 0);
  ASSERT_TRUE(IsOk(allocator.FreeWindow(slots)));  // Half of it had gone before.
  EXPECT_EQ(allocator.window().num_free(), 16);
  ASSERT_TRUE(IsOk(allocator.Free(slots)));
  EXPECT_EQ(allocator.num_free(), 16);
}

TEST(SlidingWindows, BadCallsChangeNothing) {
  auto allocator = Must(SlidingWindowAllocator::Create(16, 16, 4));
  const Slots slots = Must(allocator.Allocate(8));
  EXPECT_TRUE(Fails(allocator.FreeWindow(Slots{4, 5, 6, 7, 12}), kInvalid, "slot 12"));
  EXPECT_TRUE(Fails(allocator.FreeWindow(Slots{4, 5, 6, 7, 0}), kInvalid, "slot 0"));
  EXPECT_TRUE(Fails(allocator.FreeWindow(Slots{20}), absl::StatusCode::kOutOfRange, "slot 20"));
  EXPECT_TRUE(Fails(allocator.ToWindow(Slots{-1}), absl::StatusCode::kOutOfRange, "slot -1"));
  EXPECT_TRUE(Fails(allocator.Free(Slots{4, 12}), kInvalid, "slot 12"));
  EXPECT_EQ(allocator.window().num_free(), 8);
  const std::vector<int64_t> nine = {9}, zero = {0};
  EXPECT_TRUE(Fails(allocator.Decode(zero, Slots{7}), kInvalid, "sequence 0 has 0 tokens"));
  EXPECT_TRUE(Fails(allocator.Decode(nine, Slots{10}), kInvalid));  // No last place of a page.
  // What makes no sense is said to make none, and not to want room.
  for (const auto& [prefix, tokens] :
       {std::pair{int64_t{-1000}, int64_t{5}}, {int64_t{8}, -5}, {int64_t{0}, int64_t{1} << 40}}) {
    EXPECT_TRUE(Fails(allocator.Extend({{prefix}}, {{tokens}}, Slots{7}), kInvalid, "cannot grow"));
  }
  EXPECT_TRUE(Fails(allocator.Decode(nine, Slots{77}), absl::StatusCode::kOutOfRange, "slot 77"));
  ASSERT_TRUE(IsOk(allocator.FreeWindow(Slots{8, 9, 10, 11})));
  EXPECT_TRUE(Fails(allocator.Decode(nine, Slots{11}), absl::StatusCode::kFailedPrecondition,
                    "sequence 0", "slot 11", "has left the window"));
  EXPECT_EQ(allocator.full().num_free(), 8);
  EXPECT_TRUE(Fails(SlidingWindowAllocator::Create(16, 15, 4), kInvalid,
                    "of the window slots: slot allocator: num_tokens is 15"));
  EXPECT_TRUE(Fails(SlidingWindowAllocator::Create(0, 16, 4), kInvalid,
                    "of the full slots: slot allocator: num_tokens is 0"));
}

TEST(SlidingWindows, WhatIsWrongIsSaidAlsoWhereThereIsNoRoom) {
  auto allocator = Must(SlidingWindowAllocator::Create(16, 4, 4));
  const Slots slots = Must(allocator.Allocate(4));
  EXPECT_TRUE(Fails(allocator.Decode({{5}}, Slots{7}), kExhausted));
  EXPECT_TRUE(Fails(allocator.Decode({{5, 1}}, Slots{7}), kInvalid, "2 tokens and 1 last_slots"));
  EXPECT_TRUE(Fails(allocator.Decode({{5}}, Slots{6}), kInvalid, "cannot hold token 3"));
  EXPECT_TRUE(Fails(allocator.Extend({{4}}, {{9}}, Slots{15}), kInvalid, "15, is not allocated"));
}

}  // namespace
}  // namespace kvferry
