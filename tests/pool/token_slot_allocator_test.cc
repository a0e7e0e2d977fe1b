#include "pool/token_slot_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <new>
#include <random>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/pool/scarce_memory.h"
#include "tests/support/failing_new.h"
#include "tests/support/sanitized.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

using Slots = std::vector<int32_t>;
using Counts = std::vector<int64_t>;

TEST(TokenSlots, BadSizes) {
  for (const auto& [tokens, page] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 1},
                                                {-4, 4},
                                                {6, 4},
                                                {8, 0},
                                                {8, -1},
                                                {int64_t{1} << 31, 1},
                                                {INT32_MAX - 1, 3},  // Its last slot is 2^31.
                                                {std::numeric_limits<int64_t>::max(), 1},
                                                {8, std::numeric_limits<int64_t>::max()}}) {
    EXPECT_TRUE(
        Fails(TokenSlotAllocator::Create(tokens, page), absl::StatusCode::kInvalidArgument));
  }
  EXPECT_TRUE(Fails(TokenSlotAllocator::Create(int64_t{1} << 30, 1),
                    absl::StatusCode::kInvalidArgument, "num_tokens is 1073741824",
                    "at most 1073741823"));
}

TEST(TokenSlots, PageZeroIsPadding) {
  TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(8, 4));
  EXPECT_EQ(Must(allocator.Allocate(8)), (Slots{4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_TRUE(Fails(allocator.Free(Slots{0}), absl::StatusCode::kInvalidArgument,
                    "slot 0 is outside [4, 12)"));
  EXPECT_TRUE(Fails(allocator.Free(Slots{3, 4}), absl::StatusCode::kInvalidArgument, "slot 3"));
  EXPECT_EQ(allocator.num_free(), 0);
}

TEST(TokenSlots, SlotsAreWrittenToTheCallersList) {
  TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(24, 4));
  ASSERT_TRUE(IsOk(allocator.Allocate(24)));
  ASSERT_TRUE(IsOk(allocator.Free(Slots{4, 12, 20})));
  Slots row(14, -1);
  const std::span<int32_t> places = std::span(row).subspan(1);
  for (const size_t tokens : {0, 3, 13}) {
    EXPECT_TRUE(Fails(allocator.AllocateInto(places.first(tokens)),
                      absl::StatusCode::kInvalidArgument, absl::StrCat("num_tokens is ", tokens)));
  }
  {
    const FailingNew failing(0);  // It needs none.
    ASSERT_TRUE(IsOk(allocator.AllocateInto(places.first(12))));
  }
  EXPECT_EQ(row, (Slots{-1, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, -1}));
  EXPECT_TRUE(Fails(allocator.AllocateInto(places.first(4)), absl::StatusCode::kResourceExhausted,
                    "1 pages asked, 0 of 7 free"));
  EXPECT_TRUE(Fails(allocator.CheckRoom(4), absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(row[1], 4);
}

TEST(TokenSlots, SlotsOfAPageCountOnce) {
  TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(16, 4));
  ASSERT_TRUE(IsOk(allocator.Allocate(16)));
  EXPECT_TRUE(IsOk(allocator.Free(Slots{4, 9, 5, 4, 7, 11})));
  EXPECT_EQ(allocator.num_free(), 8);
  EXPECT_TRUE(Fails(allocator.Free(Slots{12, 6}), absl::StatusCode::kInvalidArgument, "slot 6"));
  EXPECT_EQ(allocator.num_free(), 8);
}

TEST(TokenSlots, SingleSlotsAreFreedOnce) {
  TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(4, 1));
  ASSERT_TRUE(IsOk(allocator.Allocate(4)));
  EXPECT_TRUE(Fails(allocator.Free(Slots{1, 2, 1}), absl::StatusCode::kInvalidArgument,
                    "slot 1 is freed twice"));
  EXPECT_EQ(allocator.num_free(), 0);
}

TEST(TokenSlots, AListThatFindsNoMemoryTakesNoPages) {
#ifdef KVFERRY_SANITIZED
  GTEST_SKIP() << "a sanitizer's malloc does not fail";
#endif
  constexpr int64_t kPage = 1 << 20;
  TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(64 * kPage, kPage));
  {
    const ScarceMemory scarce(64 << 20);
    EXPECT_THROW((void)allocator.Allocate(60 * kPage), std::bad_alloc);
    // More than there is, is too much as ever.
    EXPECT_TRUE(Fails(allocator.Allocate(65 * kPage), absl::StatusCode::kResourceExhausted));
  }
  EXPECT_EQ(allocator.num_free(), 64 * kPage);
  EXPECT_TRUE(IsOk(allocator.Allocate(kPage)));
}

// Every second page is free, so that lists of pages are long.
TEST(TokenSlots, CallsThatFindNoMemoryForTheirListsChangeNothing) {
  constexpr int32_t kPages = 200;
  TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(kPages, 1));
  ASSERT_TRUE(IsOk(allocator.Allocate(kPages)));
  Slots even;
  for (int32_t slot = 2; slot <= kPages; slot += 2) even.push_back(slot);
  const auto none_is_free = [&] { ASSERT_EQ(allocator.num_free(), 0); };
  const auto half_is_free = [&] { ASSERT_EQ(allocator.num_free(), kPages / 2); };
  absl::Status freed;
  allocator.BeginFreeGroup();
  CallWithoutMemory([&] { freed = allocator.Free(even); }, none_is_free);
  EXPECT_TRUE(IsOk(freed));
  {
    const FailingNew failing(0);
    allocator.EndFreeGroup();  // Needs none.
  }
  half_is_free();
  absl::StatusOr<Slots> got;
  CallWithoutMemory([&] { got = allocator.Allocate(kPages / 2); }, half_is_free);
  std::sort(got->begin(), got->end());
  EXPECT_EQ(*got, even);
  CallWithoutMemory([&] { freed = allocator.Free(even); }, none_is_free);
  EXPECT_TRUE(IsOk(freed));
  const std::vector<int64_t> none = {0, 0}, tokens = {40, kPages / 2 - 40};
  const Slots last = {0, 0};
  CallWithoutMemory([&] { got = allocator.Extend(none, tokens, last); }, half_is_free);
  std::sort(got->begin(), got->end());
  EXPECT_EQ(*got, even);
}

TEST(TokenSlots, ListsOfAnyLengthAreFreedWholeOrNotAtAll) {
  for (const int32_t page_size : {1, 3, 4}) {
    TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(100 * page_size, page_size));
    for (int64_t pages = 1; pages <= 40; ++pages) {
      const Slots slots = Must(allocator.Allocate(pages * page_size));
      for (size_t i = 0; i < slots.size(); ++i) {
        Slots wrong = slots;
        wrong[i] = 100 * page_size;  // In the last page, which is free.
        ASSERT_TRUE(Fails(allocator.Free(wrong), absl::StatusCode::kInvalidArgument,
                          "slot " + std::to_string(wrong[i])));
      }
      ASSERT_EQ(allocator.num_free(), (100 - pages) * page_size);
      ASSERT_TRUE(IsOk(allocator.Free(slots)));
      ASSERT_EQ(allocator.num_free(), 100 * page_size);
    }
    constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
    constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
    EXPECT_TRUE(Fails(allocator.Free(Slots{kMax, kMin}), absl::StatusCode::kInvalidArgument));
    EXPECT_TRUE(Fails(allocator.Free(Slots{-1, 0, 1}), absl::StatusCode::kInvalidArgument,
                      "slot -1 is outside ["));
  }
}

// What a group has noted is freed without a look.
TEST(TokenSlots, SlotsBehindTheLastPageAreRefusedAsSuch) {
  for (const int32_t page_size : {1, 4}) {
    SCOPED_TRACE(page_size);
    TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(100 * page_size, page_size));
    ASSERT_TRUE(IsOk(allocator.Allocate(100 * page_size)));
    const int32_t behind = 101 * page_size;
    const std::string message =
        absl::StrCat("slot ", behind, " is outside [", page_size, ", ", behind, ")");
    for (const bool in_group : {false, true}) {
      if (in_group) allocator.BeginFreeGroup();
      for (const Slots& slots : {Slots{behind - 1, behind}, Slots{behind}}) {
        EXPECT_TRUE(Fails(allocator.Free(slots), absl::StatusCode::kInvalidArgument, message));
      }
    }
    allocator.EndFreeGroup();
    EXPECT_EQ(allocator.num_free(), 0);
  }
}

TEST(TokenSlots, FreeGroups) {
  TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(16, 4));
  ASSERT_TRUE(IsOk(allocator.Allocate(16)));
  allocator.EndFreeGroup();  // None is open.
  allocator.BeginFreeGroup();
  EXPECT_TRUE(IsOk(allocator.Free(Slots{4, 5})));
  EXPECT_TRUE(IsOk(allocator.Free(Slots{6, 8})));  // The same page again, and another.
  EXPECT_EQ(allocator.num_free(), 0);
  EXPECT_TRUE(Fails(allocator.Allocate(4), absl::StatusCode::kResourceExhausted));
  allocator.EndFreeGroup();
  EXPECT_EQ(allocator.num_free(), 8);
  EXPECT_TRUE(IsOk(allocator.Free(Slots{12})));  // At once again.
  EXPECT_EQ(allocator.num_free(), 12);

  TokenSlotAllocator single = Must(TokenSlotAllocator::Create(4, 1));
  ASSERT_TRUE(IsOk(single.Allocate(2)));
  single.BeginFreeGroup();
  EXPECT_TRUE(IsOk(single.Free(Slots{1})));
  EXPECT_TRUE(Fails(single.Free(Slots{2, 1}), absl::StatusCode::kInvalidArgument, "slot 1"));
  single.Clear();
  EXPECT_EQ(single.num_free(), 4);
  ASSERT_TRUE(IsOk(single.Allocate(1)));
  EXPECT_TRUE(IsOk(single.Free(Slots{1})));
  EXPECT_EQ(single.num_free(), 4);
}

// What it would get behind its last slot is another's once the group ends.
TEST(TokenSlots, WhatIsFreedInAnOpenGroupDoesNotGrow) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  for (const int64_t page_size : {1, 12, 16}) {
    SCOPED_TRACE(page_size);
    TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(8 * page_size, page_size));
    const Slots other = Must(allocator.Extend(Counts{0}, Counts{1}, Slots{0}));
    const Slots gone = Must(allocator.Extend(Counts{0}, Counts{3}, Slots{0}));
    allocator.BeginFreeGroup();
    ASSERT_TRUE(IsOk(allocator.Free(gone)));
    const int64_t free = allocator.num_free();
    const Slots last = {other.back(), gone.back()};
    const std::string message = absl::StrCat("its last slot, ", gone.back(), ", is not allocated");
    EXPECT_TRUE(Fails(allocator.Decode(Counts{2, 4}, last), kInvalid, message));
    EXPECT_TRUE(Fails(allocator.Extend(Counts{1, 3}, Counts{2, 40}, last), kInvalid, message));
    EXPECT_EQ(allocator.num_free(), free);
    // All others go on as ever, also afterwards.
    EXPECT_TRUE(IsOk(allocator.Decode(Counts{2}, Slots{other.back()})));
    allocator.EndFreeGroup();
    EXPECT_TRUE(Fails(allocator.Decode(Counts{4}, Slots{gone.back()}), kInvalid, message));
  }
}

TEST(TokenSlots, ExtendFillsTheLastPageFirst) {
  TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(40, 4));
  // Six tokens and three: pages 1, 2 and 3.
  const Slots prompts = Must(allocator.Extend(Counts{0, 0}, Counts{6, 3}, Slots{-1, -1}));
  EXPECT_EQ(prompts, (Slots{4, 5, 6, 7, 8, 9, 12, 13, 14}));
  // The first fills 10 and 11 and goes on elsewhere, because page 3 is taken; the second fills 15.
  const Slots more = Must(allocator.Extend(Counts{6, 3}, Counts{9, 4}, Slots{9, 14}));
  EXPECT_EQ(Slots(more.begin(), more.begin() + 2), (Slots{10, 11}));
  EXPECT_EQ(more[2] % 4, 0);
  EXPECT_EQ(more[3], 15);
  // The second's next page is the one right behind it, if it is free.
  const bool free = !allocator.pages().IsAllocated(4);
  const Slots last = Must(allocator.Decode(Counts{5}, Slots{15}));
  EXPECT_TRUE(!free || last == Slots{16});
  EXPECT_EQ(Must(allocator.Extend(Counts{5}, Counts{5}, last)), Slots{});
}

TEST(TokenSlots, BadBatchesChangeNothing) {
  TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(12, 4));
  ASSERT_TRUE(IsOk(allocator.Extend(Counts{0}, Counts{6}, Slots{0})));  // 4..9
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_TRUE(Fails(allocator.Extend(Counts{6}, Counts{7, 8}, Slots{9}), kInvalid, "one of each"));
  EXPECT_TRUE(Fails(allocator.Extend(Counts{6}, Counts{7}, Slots{}), kInvalid, "one of each"));
  EXPECT_TRUE(Fails(allocator.Extend(Counts{6}, Counts{5}, Slots{9}), kInvalid, "from 6 to 5"));
  EXPECT_TRUE(Fails(allocator.Extend(Counts{-1}, Counts{5}, Slots{9}), kInvalid));
  EXPECT_TRUE(Fails(allocator.Extend(Counts{0, 6}, Counts{1, 7}, Slots{0, 10}), kInvalid,
                    "sequence 1 of the batch"));
  EXPECT_TRUE(Fails(allocator.Extend(Counts{6}, Counts{7}, Slots{13}), kInvalid, "13"));
  EXPECT_TRUE(Fails(allocator.Extend(Counts{6}, Counts{7}, Slots{-3}), kInvalid));
  EXPECT_TRUE(
      Fails(allocator.Extend(Counts{0}, Counts{std::numeric_limits<int64_t>::max()}, Slots{0}),
            kInvalid));
  EXPECT_TRUE(Fails(allocator.Decode(Counts{7, 0}, Slots{9, 9}), kInvalid,
                    "sequence 1 of the batch: tokens is 0"));
  EXPECT_TRUE(Fails(allocator.Decode(Counts{7, 7}, Slots{9}), kInvalid, "one of each"));
  // One wrong sequence after 70 right ones, and one that needs a page.
  const auto kBig = std::numeric_limits<int64_t>::max();
  const auto kLast = std::numeric_limits<int32_t>::max();
  for (const auto& [count, slot, words] : std::vector<std::tuple<int64_t, int32_t, const char*>>{
           {7, 8, "cannot hold token 5"},
           {2, -4, "slot, -4, is outside [4, 16)"},
           {2, 0, "slot, 0, is outside [4, 16)"},
           {2, 12, "slot, 12, is not allocated"},
           {2, 16, "slot, 16, is outside [4, 16)"},
           {4, kLast - 1, "is outside [4, 16)"},
           {5, kLast, "is outside [4, 16)"},
           {kBig, 9, "cannot grow"},
           {-kBig, 9, "sequence 71 of the batch: tokens is -9223372036854775807"}}) {
    Counts counts(71, 7);
    Slots last(71, 9);
    counts[0] = 5;
    last[0] = 7;
    counts.push_back(count);
    last.push_back(slot);
    EXPECT_TRUE(Fails(allocator.Decode(counts, last), kInvalid, words)) << count << " " << slot;
    EXPECT_EQ(allocator.num_free(), 4);
  }
  EXPECT_TRUE(Fails(allocator.Decode(Counts{5, 9}, Slots{7, 7}),
                    absl::StatusCode::kResourceExhausted, "needs 2 pages of 4 tokens, 1 are free"));
  EXPECT_TRUE(Fails(allocator.Extend(Counts{6, 0}, Counts{9, 1}, Slots{9, 0}),
                    absl::StatusCode::kResourceExhausted, "needs 2 pages of 4 tokens, 1 are free"));
  EXPECT_EQ(allocator.num_free(), 4);
}

// More sequences than are checked together, each in its own place of a page.
TEST(TokenSlots, DecodeOfLargeBatches) {
  for (const int64_t sequences : {1, 63, 64, 65, 200}) {
    SCOPED_TRACE(sequences);
    TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(400 * 16, 16));
    Counts tokens;
    Slots last;
    for (int64_t i = 0; i < sequences; ++i) {
      tokens.push_back(1 + i % 16);
      last.push_back(Must(allocator.Extend(Counts{0}, Counts{tokens[i]}, Slots{0})).back());
    }
    for (int step = 0; step < 16; ++step) {
      for (int64_t& count : tokens) ++count;
      const Slots got = Must(allocator.Decode(tokens, last));
      ASSERT_EQ(got.size(), tokens.size());
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i] % 16, (tokens[i] - 1) % 16);
        ASSERT_TRUE(tokens[i] % 16 == 1 || got[i] == last[i] + 1);
      }
      last = got;
    }
    EXPECT_EQ(std::set(last.begin(), last.end()).size(), last.size());
    EXPECT_EQ(allocator.num_free(), (400 - 2 * sequences) * 16);
  }
}

// Sequences that come, grow alone or in batches, and go, with every slot accounted for in a set.
class Model {
 public:
  Model(int64_t num_tokens, int64_t page_size) : page_size_(page_size) {
    for (int64_t page = 1; page <= num_tokens / page_size; ++page) free_pages_.insert(page);
  }
  int64_t num_free() const { return static_cast<int64_t>(free_pages_.size()) * page_size_; }

  struct Sequence {
    Slots slots;
  };
  std::vector<Sequence> live;

  // Whether these are the next slots of the sequence, and nobody else's.
  bool Grow(Sequence* sequence, std::span<const int32_t> slots) {
    for (const int32_t slot : slots) {
      const auto place = static_cast<int64_t>(sequence->slots.size()) % page_size_;
      if (slot % page_size_ != place) return false;
      if (place == 0) {
        if (free_pages_.erase(slot / page_size_) != 1) return false;
      } else if (slot != sequence->slots.back() + 1) {
        return false;
      }
      sequence->slots.push_back(slot);
    }
    return true;
  }
  void Give(const Slots& slots) {
    for (const int32_t slot : slots) free_pages_.insert(slot / page_size_);
  }

 private:
  int64_t page_size_;
  std::set<int64_t> free_pages_;
};

void RandomOperations(int64_t page_size, int operations) {
  SCOPED_TRACE(page_size);
  constexpr int64_t kPages = 60;
  std::mt19937_64 random(page_size);
  TokenSlotAllocator allocator = Must(TokenSlotAllocator::Create(kPages * page_size, page_size));
  Model model(kPages * page_size, page_size);
  Slots noted;  // In a free group.
  bool in_group = false;
  for (int operation = 0; operation < operations; ++operation) {
    ASSERT_EQ(allocator.num_free(), model.num_free());
    const uint64_t choice = random() % 100;
    if (choice < 60) {  // A batch of new sequences and old ones.
      std::vector<Model::Sequence*> batch;
      for (Model::Sequence& one : model.live) {
        if (random() % 2 == 0) batch.push_back(&one);
      }
      std::vector<Model::Sequence> fresh(random() % 2);
      for (Model::Sequence& one : fresh) batch.push_back(&one);
      Counts from, to;
      Slots last;
      int64_t new_pages = 0;
      for (const Model::Sequence* one : batch) {
        from.push_back(static_cast<int64_t>(one->slots.size()));
        to.push_back(from.back() + (choice < 30 ? 1 : static_cast<int64_t>(random() % 20)));
        last.push_back(one->slots.empty() ? -7 : one->slots.back());
        new_pages +=
            (to.back() + page_size - 1) / page_size - (from.back() + page_size - 1) / page_size;
      }
      const auto got = choice < 30 ? allocator.Decode(to, last) : allocator.Extend(from, to, last);
      if (new_pages * page_size > model.num_free()) {
        ASSERT_TRUE(absl::IsResourceExhausted(got.status())) << got.status();
        continue;
      }
      ASSERT_TRUE(IsOk(got));
      size_t at = 0;
      for (size_t i = 0; i < batch.size(); ++i) {
        const auto count = static_cast<size_t>(to[i] - from[i]);
        ASSERT_LE(at + count, got->size());
        ASSERT_TRUE(model.Grow(batch[i], std::span(*got).subspan(at, count)));
        at += count;
      }
      ASSERT_EQ(at, got->size());
      for (Model::Sequence& one : fresh) {
        if (!one.slots.empty()) model.live.push_back(std::move(one));
      }
    } else if (choice < 70) {  // Whole pages.
      const auto count = static_cast<int64_t>(random() % 4) * page_size + (random() % 8 == 0);
      const auto got = allocator.Allocate(count);
      const bool valid = count > 0 && count % page_size == 0;
      ASSERT_EQ(got.ok(), valid && count <= model.num_free());
      if (!got.ok()) continue;
      Model::Sequence sequence;
      ASSERT_TRUE(model.Grow(&sequence, *got));
      model.live.push_back(std::move(sequence));
    } else if (choice < 93 && !model.live.empty()) {  // One ends.
      std::swap(model.live[random() % model.live.size()], model.live.back());
      Slots slots = std::move(model.live.back().slots);
      model.live.pop_back();
      std::shuffle(slots.begin(), slots.end(), random);
      Slots some = slots;  // One of each page does as well, several times in one list, too.
      if (random() % 2 == 0) std::erase_if(some, [&](int32_t s) { return s % page_size != 0; });
      if (random() % 4 == 0) {
        Slots doubled = some;
        doubled.push_back(some[random() % some.size()]);
        if (page_size > 1) {
          some = doubled;
        } else {
          ASSERT_TRUE(absl::IsInvalidArgument(allocator.Free(doubled)));
        }
      }
      // In a group, in several calls.
      const auto half = some.begin() + static_cast<int64_t>(random() % some.size());
      if (in_group && half != some.begin()) {
        ASSERT_TRUE(IsOk(allocator.Free(Slots(some.begin(), half))));
        some.erase(some.begin(), page_size > 1 ? some.begin() : half);
      }
      ASSERT_TRUE(IsOk(allocator.Free(some)));
      if (in_group) {
        noted.insert(noted.end(), slots.begin(), slots.end());
      } else {
        model.Give(slots);
      }
      // Again, which only a group of pages of several tokens puts up with.
      ASSERT_EQ(allocator.Free(slots).ok(), in_group && page_size > 1);
    } else if (choice < 96) {
      allocator.BeginFreeGroup();
      in_group = true;
    } else if (choice < 99) {
      allocator.EndFreeGroup();
      in_group = false;
      model.Give(std::exchange(noted, {}));
    } else if (random() % 50 == 0) {
      allocator.Clear();
      in_group = false;
      noted.clear();
      model = Model(kPages * page_size, page_size);
    }
  }
}

TEST(TokenSlots, AMillionRandomOperationsAgainstASet) {
  for (const int64_t page_size : {1, 4, 16, 7}) RandomOperations(page_size, 250000);
}

}  // namespace
}  // namespace kvferry
