#include "pool/slot_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace kvferry {
namespace {

constexpr int64_t kPages = 200;

class SlotKernelsTest : public ::testing::TestWithParam<CpuKernels> {
 protected:
  void SetUp() override {
    if (!CanRun(GetParam())) GTEST_SKIP() << "this machine has no " << CpuKernelsName(GetParam());
  }
  bool IsFree(int64_t page) const { return (free_bits_[page / 64] >> (page % 64) & 1) != 0; }

  std::mt19937_64 random_{1};
  std::vector<uint64_t> free_bits_ = std::vector<uint64_t>(kPages / 64 + 1);
};

// One sequence by the words of the header.
bool Right(int64_t tokens, int64_t last_slot, int64_t page_size, const auto& is_free) {
  const int64_t page = last_slot / page_size;
  return tokens >= 2 && tokens <= std::numeric_limits<int32_t>::max() && last_slot >= page_size &&
         page < kPages && last_slot % page_size == (tokens - 2) % page_size && !is_free(page);
}

TEST_P(SlotKernelsTest, AMillionSequencesThatDecodeOneByOne) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int32_t kLast = std::numeric_limits<int32_t>::max();
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random_() % limit); };
  const SlotsBehindFn slots_behind = SlotKernelsOf(GetParam()).slots_behind;
  int64_t right_blocks = 0;
  for (int block = 0; block < 16000; ++block) {
    const int page_shift = static_cast<int>(below(8));
    const int64_t page_size = int64_t{1} << page_shift;
    for (uint64_t& word : free_bits_) word = random_();
    free_bits_[1] = 0;
    const int64_t count = block % 4 == 0 ? below(kSlotBlock + 1) : kSlotBlock;
    std::vector<int64_t> tokens(count);
    std::vector<int32_t> last(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = below(page_size);
      last[i] = static_cast<int32_t>((64 + below(64)) * page_size + place);
      tokens[i] = below(1000) * page_size + place + 2;
    }
    if (block % 2 == 0 && count > 0) {  // One of them is perhaps wrong.
      const int64_t i = below(count);
      const int64_t counts[] = {tokens[i], 0, 1, 2, -1, kMax, -kMax, int64_t{1} << 31, below(600)};
      const int32_t slots[] = {last[i],
                               0,
                               -1,
                               kLast,
                               static_cast<int32_t>(page_size - 1),
                               -kLast,
                               kLast - 1,
                               static_cast<int32_t>(kPages * page_size),
                               static_cast<int32_t>(below(kPages * page_size))};
      tokens[i] = counts[below(std::size(counts))];
      last[i] = slots[below(std::size(slots))];
    }
    bool right = true;
    for (int64_t i = 0; i < count; ++i) {
      right &= Right(tokens[i], last[i], page_size, [&](int64_t page) { return IsFree(page); });
    }
    std::vector<int32_t> slots(count);
    uint64_t opens = 0;
    const SlotPages pages{free_bits_.data(), static_cast<uint32_t>(kPages * page_size), page_shift};
    ASSERT_EQ(slots_behind(pages, tokens.data(), last.data(), count, slots.data(), &opens), right);
    right_blocks += right;
    for (int64_t i = 0; right && i < kSlotBlock; ++i) {
      ASSERT_EQ(opens >> i & 1, i < count && (last[i] + 1) % page_size == 0);
      ASSERT_TRUE(i >= count || slots[i] == last[i] + 1);
    }
  }
  EXPECT_GT(right_blocks, 8000);
  EXPECT_LT(right_blocks, 14000);
}

TEST_P(SlotKernelsTest, NeighboursAreCountedUpAndFound) {
  constexpr int32_t kLast = std::numeric_limits<int32_t>::max();
  const SlotKernels& kernels = SlotKernelsOf(GetParam());
  for (int64_t count = 1; count < 1000; count += count < 150 ? 1 : 61) {
    for (const int32_t first : {0, 12345, -7, static_cast<int32_t>(kLast - count + 1)}) {
      std::vector<int32_t> slots(count + 1, 99);
      kernels.count_up(first, count, slots.data());
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(slots[i], first + i);
      ASSERT_EQ(slots[count], 99);
      // What lies behind the list, a neighbour too, is none of theirs.
      slots[count] = first == kLast - count + 1 ? 99 : static_cast<int32_t>(first + count);
      ASSERT_EQ(kernels.neighbours(slots.data(), count), count);
      // Two that are none: the first counts.
      const int64_t broken = count > 1 ? 1 + static_cast<int64_t>(random_() % (count - 1)) : count;
      for (int64_t i = broken; i < count; i += 3) slots[i] ^= 1 << (random_() % 32);
      ASSERT_EQ(kernels.neighbours(slots.data(), count), broken);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, SlotKernelsTest, ::testing::ValuesIn(kAllCpuKernels),
                         [](const auto& kernels) {
                           std::string name(CpuKernelsName(kernels.param));
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace kvferry
