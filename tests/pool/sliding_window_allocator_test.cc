#include "pool/sliding_window_allocator.h"

#include <gtest/gtest.h>

#include <map>
#include <new>
#include <random>
#include <set>
#include <vector>

#include "tests/pool/failing_new.h"
#include "tests/pool/scarce_memory.h"
#include "tests/support/sanitized.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

using Slots = std::vector<int32_t>;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

// Sequences that are prefilled, grow, slide and end. The model knows, token by token, which slots
// of the window pool are taken, and that no two live tokens share one.
class WindowModel : public testing::TestWithParam<int64_t> {
 protected:
  static constexpr int64_t kWindow = 24;  // Tokens.

  struct Sequence {
    Slots slots;       // Full slots of all its tokens.
    int64_t slid = 0;  // Tokens whose window slots were given back.
  };

  int64_t Upto(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  int64_t PagesFor(int64_t tokens) const { return (tokens + GetParam() - 1) / GetParam(); }

  void Prefill() {
    const std::vector<int64_t> none = {0}, tokens = {1 + Upto(60)};
    const bool fits = PagesFor(tokens[0]) * GetParam() <= allocator_.num_free();
    const auto slots = allocator_.Extend(none, tokens, Slots{0});
    ASSERT_EQ(slots.ok(), fits) << slots.status();
    if (fits) live_.push_back({*slots, 0});
  }

  void DecodeAll() {
    std::vector<int64_t> tokens;
    Slots last;
    int64_t pages = 0;
    for (const Sequence& sequence : live_) {
      const auto size = static_cast<int64_t>(sequence.slots.size());
      tokens.push_back(size + 1);
      last.push_back(sequence.slots.back());
      pages += PagesFor(size + 1) - PagesFor(size);
    }
    const bool fits = pages * GetParam() <= allocator_.num_free();
    const int64_t full_free = allocator_.full().num_free();
    const int64_t window_free = allocator_.window().num_free();
    const auto slots = allocator_.Decode(tokens, last);
    ASSERT_EQ(slots.ok(), fits) << slots.status();
    if (!fits) {
      ASSERT_EQ(allocator_.full().num_free(), full_free);
      ASSERT_EQ(allocator_.window().num_free(), window_free);
      return;
    }
    for (size_t i = 0; i < live_.size(); ++i) live_[i].slots.push_back((*slots)[i]);
  }

  // Tokens before the window, whole pages of them.
  void Slide(Sequence& sequence) {
    const int64_t out = static_cast<int64_t>(sequence.slots.size()) - kWindow;
    if (out <= 0) return;
    const Slots slots(sequence.slots.begin(), sequence.slots.begin() + out);
    ASSERT_TRUE(IsOk(allocator_.FreeWindow(slots)));
    sequence.slid = out / GetParam() * GetParam();
  }

  void End(size_t index) {
    ASSERT_TRUE(IsOk(allocator_.Free(live_[index].slots)));
    live_[index] = live_.back();
    live_.pop_back();
  }

  void Check() {
    std::set<int32_t> full, window;
    int64_t full_pages = 0, window_pages = 0;
    for (const Sequence& sequence : live_) {
      const Slots mapped = Must(allocator_.ToWindow(sequence.slots));
      const auto size = static_cast<int64_t>(sequence.slots.size());
      for (int64_t t = 0; t < size; ++t) {
        ASSERT_TRUE(full.insert(sequence.slots[t]).second);
        if (t < sequence.slid) {
          ASSERT_EQ(mapped[t], 0);
        } else {
          ASSERT_GE(mapped[t], GetParam());
          ASSERT_TRUE(window.insert(mapped[t]).second)
              << "two tokens share window slot " << mapped[t];
          ASSERT_EQ(mapped[t] % GetParam(), sequence.slots[t] % GetParam());
        }
      }
      full_pages += PagesFor(size);
      window_pages += PagesFor(size) - sequence.slid / GetParam();
      tokens_checked_ += size;
    }
    ASSERT_EQ(allocator_.full().num_free(), kFull * GetParam() - full_pages * GetParam());
    ASSERT_EQ(allocator_.window().num_free(), kSmall * GetParam() - window_pages * GetParam());
  }

  static constexpr int64_t kFull = 200, kSmall = 90;  // Pages.
  SlidingWindowAllocator allocator_ =
      Must(SlidingWindowAllocator::Create(kFull * GetParam(), kSmall* GetParam(), GetParam()));
  std::vector<Sequence> live_;
  int64_t tokens_checked_ = 0;
  std::mt19937_64 random_{21};
};

TEST_P(WindowModel, AgreesWithTokensKeptOneByOne) {
  while (tokens_checked_ < 600000) {
    const int64_t what = Upto(20);
    if (what < 4) Prefill();
    if (what >= 4 && what < 12) DecodeAll();
    if (what >= 12 && what < 18) {
      for (Sequence& sequence : live_) Slide(sequence);
    }
    if (what >= 18 && !live_.empty())
      End(static_cast<size_t>(Upto(static_cast<int64_t>(live_.size()))));
    if (!HasFatalFailure()) Check();
    if (HasFatalFailure()) return;
    ++tokens_checked_;
  }
  allocator_.Clear();
  live_.clear();
  Check();
}

INSTANTIATE_TEST_SUITE_P(PageSizes, WindowModel, testing::Values(1, 4));

TEST(SlidingWindows, BothPoolsOrNone) {
  auto allocator = Must(SlidingWindowAllocator::Create(16, 8, 4));
  EXPECT_EQ(allocator.num_free(), 8);
  EXPECT_TRUE(Fails(allocator.Allocate(12), kExhausted));
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
  EXPECT_TRUE(Fails(allocator.Decode(nine, Slots{77}), absl::StatusCode::kOutOfRange, "slot 77"));
  ASSERT_TRUE(IsOk(allocator.FreeWindow(Slots{8, 9, 10, 11})));
  EXPECT_TRUE(Fails(allocator.Decode(nine, Slots{11}), absl::StatusCode::kFailedPrecondition,
                    "sequence 0", "slot 11", "has left the window"));
  EXPECT_EQ(allocator.full().num_free(), 8);
  EXPECT_TRUE(Fails(SlidingWindowAllocator::Create(16, 15, 4), kInvalid));
  EXPECT_TRUE(Fails(SlidingWindowAllocator::Create(0, 16, 4), kInvalid));
}

}  // namespace
}  // namespace kvferry
