// SlidingWindowAllocator beside a model that knows pages one by one.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "pool/sliding_window_allocator.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

using Slots = std::vector<int32_t>;
using Counts = std::vector<int64_t>;

constexpr auto kOk = absl::StatusCode::kOk;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

// Small pools, so that they are full and empty often.
constexpr int64_t kFullPages = 14, kWindowPages = 9;

class WindowsAgainstModel : public testing::TestWithParam<int64_t> {
 protected:
  using Sequence = Slots;  // Full slots of its tokens.

  int64_t Upto(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool OneIn(int64_t n) { return Upto(n) == 0; }
  int64_t Pages(int64_t tokens) const { return (tokens + size_ - 1) / size_; }
  int64_t free_full() const { return kFullPages - static_cast<int64_t>(window_of_.size()); }
  int64_t free_window() const {
    return kWindowPages - std::count_if(window_of_.begin(), window_of_.end(),
                                        [](const auto& entry) { return entry.second != 0; });
  }

  // A sequence's next tokens: first what its last page has room for, then pages that are new in
  // both pools.
  void Append(Sequence* sequence, std::span<const int32_t> slots) {
    for (const int32_t slot : slots) {
      if (slot % size_ != 0) {
        ASSERT_FALSE(sequence->empty());
        ASSERT_EQ(slot, sequence->back() + 1);
      } else {
        const auto page = static_cast<int32_t>(slot / size_);
        ASSERT_TRUE(page > 0 && page <= kFullPages);
        ASSERT_FALSE(window_of_.contains(page)) << "page " << page << " is in use";
        const int32_t window_page = allocator_.window_pages()[page];
        ASSERT_TRUE(window_page > 0 && window_page <= kWindowPages);
        for (const auto& entry : window_of_) ASSERT_NE(entry.second, window_page);
        window_of_[page] = window_page;
      }
      sequence->push_back(slot);
    }
  }

  void Allocate() {
    const int64_t tokens = Upto(5) * size_ + (OneIn(8) ? 1 : 0);
    const auto got = allocator_.Allocate(tokens);
    const bool valid = tokens > 0 && tokens % size_ == 0;
    const bool fits = tokens <= size_ * std::min(free_full(), free_window());
    ASSERT_EQ(got.status().code(), !valid ? kInvalid : fits ? kOk : kExhausted) << got.status();
    if (!got.ok()) return;
    live_.emplace_back();
    Append(&live_.back(), *got);
  }

  // Some of the live sequences, and perhaps a new one.
  void Grow(bool decode) {
    std::vector<Sequence> batch;
    std::vector<Sequence> rest;
    for (Sequence& sequence : live_) (OneIn(2) ? batch : rest).push_back(sequence);
    if (!decode && OneIn(2)) batch.emplace_back();
    Counts from, to;
    Slots last;
    int64_t pages = 0;
    bool has_left = false;
    for (const Sequence& sequence : batch) {
      from.push_back(static_cast<int64_t>(sequence.size()));
      to.push_back(from.back() + (decode ? 1 : Upto(2 * size_ + 3)));
      last.push_back(sequence.empty() ? 0 : sequence.back());
      pages += Pages(to.back()) - Pages(from.back());
      has_left |= !sequence.empty() && window_of_.at(PageOf(sequence.back())) == 0;
    }
    const auto got = decode ? allocator_.Decode(to, last) : allocator_.Extend(from, to, last);
    const bool fits = pages <= std::min(free_full(), free_window());
    ASSERT_EQ(got.status().code(), has_left ? kPrecondition
                                   : fits   ? kOk
                                            : kExhausted)
        << got.status();
    if (!got.ok()) return;
    size_t at = 0;
    for (size_t i = 0; i < batch.size(); ++i) {
      const auto count = static_cast<size_t>(to[i] - from[i]);
      ASSERT_LE(at + count, got->size());
      Append(&batch[i], std::span(*got).subspan(at, count));
      at += count;
    }
    ASSERT_EQ(at, got->size());
    live_ = std::move(rest);
    for (Sequence& sequence : batch) {
      if (!sequence.empty()) live_.push_back(std::move(sequence));
    }
  }

  // Whole pages and parts of pages, some twice, and perhaps a slot that is nobody's.
  void FreeWindow() {
    Slots slots;
    std::vector<int32_t> whole;
    for (const auto& [page, window_page] : window_of_) {
      if (!OneIn(4)) continue;
      const bool all = OneIn(2);
      if (all) whole.push_back(page);
      for (int64_t i = 0; i < size_; ++i) {
        if (all || i > 0) slots.push_back(static_cast<int32_t>(page * size_ + i));
      }
      if (size_ > 1 && OneIn(3)) slots.push_back(slots.back());
    }
    absl::StatusCode want = kOk;
    if (OneIn(6)) {
      const auto slot = static_cast<int32_t>(Upto((kFullPages + 3) * size_) - 1);
      slots.push_back(slot);
      if (slot < 0 || slot >= (kFullPages + 1) * size_) {
        want = absl::StatusCode::kOutOfRange;
      } else if (!window_of_.contains(PageOf(slot))) {
        want = kInvalid;
      } else if (size_ == 1) {
        whole.push_back(slot);
      } else {
        slots.pop_back();  // It may make a page whole.
      }
    }
    std::shuffle(slots.begin(), slots.end(), random_);
    ASSERT_EQ(allocator_.FreeWindow(slots).code(), want);
    if (want != kOk) return;
    for (const int32_t page : whole) window_of_[page] = 0;
  }

  // Of one sequence: all its slots, or one of each page, which does as well; or with a slot too
  // much.
  void Free() {
    if (live_.empty()) return;
    std::swap(live_[Upto(static_cast<int64_t>(live_.size()))], live_.back());
    Slots slots = live_.back();
    if (OneIn(2)) std::erase_if(slots, [&](int32_t slot) { return slot % size_ != 0; });
    std::shuffle(slots.begin(), slots.end(), random_);
    if (OneIn(5)) {
      Slots wrong = slots;
      wrong.insert(wrong.begin() + Upto(static_cast<int64_t>(wrong.size()) + 1), NobodysSlot());
      ASSERT_EQ(allocator_.Free(wrong).code(), kInvalid);
      return;
    }
    if (size_ == 1 && OneIn(5)) {
      slots.push_back(slots[0]);  // Twice in one list.
      ASSERT_EQ(allocator_.Free(slots).code(), kInvalid);
      return;
    }
    const auto half = slots.begin() + Upto(static_cast<int64_t>(slots.size()) + 1);
    if (in_group_ && half != slots.begin()) {  // Pages in two calls.
      ASSERT_EQ(allocator_.Free(Slots(slots.begin(), half)).code(), kOk);
      if (size_ > 1) {
        ASSERT_EQ(allocator_.Free(slots).code(), kOk);
      } else if (half != slots.end()) {
        ASSERT_EQ(allocator_.Free(Slots(half, slots.end())).code(), kOk);
      }
    } else {
      ASSERT_EQ(allocator_.Free(slots).code(), kOk);
    }
    for (const int32_t slot : slots) noted_.insert(PageOf(slot));
    live_.pop_back();
    if (!in_group_) GiveNoted();
    // Again, which only a group of pages of several tokens puts up with.
    ASSERT_EQ(allocator_.Free(slots).code(), in_group_ && size_ > 1 ? kOk : kInvalid);
  }

  // Of the padding, of a page that is free, or beyond both.
  int32_t NobodysSlot() {
    for (;;) {
      const auto slot = static_cast<int32_t>(Upto((kFullPages + 3) * size_) - 1);
      if (slot < 0 || !window_of_.contains(PageOf(slot))) return slot;
    }
  }
  int32_t PageOf(int32_t slot) const { return static_cast<int32_t>(slot / size_); }
  void GiveNoted() {
    for (const int32_t page : std::exchange(noted_, {})) window_of_.erase(page);
  }

  void Step() {
    const int64_t what = Upto(1000);
    if (what < 100) return Allocate();
    if (what < 350) return Grow(/*decode=*/true);
    if (what < 550) return Grow(/*decode=*/false);
    if (what < 700) return FreeWindow();
    if (what < 900) return Free();
    if (what < 940) {
      allocator_.BeginFreeGroup();
      in_group_ = true;
    } else if (what < 999) {
      allocator_.EndFreeGroup();
      in_group_ = false;
      GiveNoted();
    } else {
      allocator_.Clear();
      in_group_ = false;
      noted_.clear();
      window_of_.clear();
      live_.clear();
    }
  }

  void Compare() {
    ASSERT_EQ(allocator_.full().num_free(), free_full() * size_);
    ASSERT_EQ(allocator_.window().num_free(), free_window() * size_);
    const std::span<const int32_t> map = allocator_.window_pages();
    ASSERT_EQ(map.size(), static_cast<size_t>(kFullPages + 1));
    for (int32_t page = 0; page <= kFullPages; ++page) {
      const auto known = window_of_.find(page);
      ASSERT_EQ(map[page], known == window_of_.end() ? 0 : known->second) << "of page " << page;
    }
    if (live_.empty()) return;
    const Sequence& any = live_[Upto(static_cast<int64_t>(live_.size()))];
    const Slots window = Must(allocator_.ToWindow(any));
    for (size_t i = 0; i < any.size(); ++i) {
      const int32_t page = window_of_.at(PageOf(any[i]));
      ASSERT_EQ(window[i], page == 0 ? 0 : page * size_ + any[i] % size_);
    }
  }

  const int64_t size_ = GetParam();
  SlidingWindowAllocator allocator_ =
      Must(SlidingWindowAllocator::Create(kFullPages * size_, kWindowPages* size_, size_));
  std::map<int32_t, int32_t> window_of_;  // Of full pages in use: their window pages, or 0.
  std::vector<Sequence> live_;
  std::set<int32_t> noted_;  // Pages that a group frees.
  bool in_group_ = false;
  std::mt19937_64 random_{static_cast<uint64_t>(GetParam())};
};

TEST_P(WindowsAgainstModel, RandomOperations) {
  constexpr int kOperations = 350000;
  for (int i = 0; i < kOperations; ++i) {
    Step();
    if (!HasFatalFailure()) Compare();
    if (HasFatalFailure()) FAIL() << "operation " << i;
  }
}

// A million operations in all.
INSTANTIATE_TEST_SUITE_P(PageSizes, WindowsAgainstModel, testing::Values(1, 4, 5));

}  // namespace
}  // namespace kvferry
