#include "transport/byte_ranges.h"

#include <gtest/gtest.h>

#include <random>

namespace kvferry {
namespace {

// The same, a byte at a time.
class Bitmap {
 public:
  explicit Bitmap(int64_t total) : there_(total, false) {}
  bool Add(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (there_[i]) return false;
    }
    for (int64_t i = begin; i < end; ++i) there_[i] = true;
    return true;
  }
  int64_t prefix() const {
    int64_t i = 0;
    while (i < static_cast<int64_t>(there_.size()) && there_[i]) ++i;
    return i;
  }
  int64_t num_bytes() const { return std::count(there_.begin(), there_.end(), true); }
  std::vector<std::pair<int64_t, int64_t>> Gaps() const {
    std::vector<std::pair<int64_t, int64_t>> gaps;
    for (int64_t i = 0; i < static_cast<int64_t>(there_.size()); ++i) {
      if (there_[i]) continue;
      if (gaps.empty() || gaps.back().second != i) gaps.emplace_back(i, i);
      gaps.back().second = i + 1;
    }
    return gaps;
  }

 private:
  std::vector<bool> there_;
};

TEST(ByteRanges, AgainstABitmap) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    const int64_t total = 1 + static_cast<int64_t>(random() % 300);
    ByteRanges ranges;
    Bitmap bitmap(total);
    for (int step = 0; step < 120; ++step) {
      const int64_t begin = static_cast<int64_t>(random() % total);
      const int64_t end =
          begin + 1 + static_cast<int64_t>(random() % std::min<int64_t>(total - begin, 20));
      if (end > total) continue;
      ASSERT_EQ(ranges.Add(begin, end), bitmap.Add(begin, end)) << begin << ".." << end;
      ASSERT_EQ(ranges.prefix(), bitmap.prefix());
      ASSERT_EQ(ranges.num_bytes(), bitmap.num_bytes());
      ASSERT_EQ(ranges.Gaps(total), bitmap.Gaps());
    }
  }
}

TEST(ByteRanges, RangesAheadAreBounded) {
  ByteRanges ranges;
  const auto max = static_cast<int64_t>(ByteRanges::kMaxAhead);
  for (int64_t i = 1; i <= max; ++i) ASSERT_TRUE(ranges.Add(2 * i, 2 * i + 1));
  EXPECT_FALSE(ranges.Add(2 * max + 2, 2 * max + 3));
  EXPECT_EQ(ranges.num_bytes(), max);
  EXPECT_TRUE(ranges.Add(0, 2));  // What extends the prefix needs no room, and makes some.
  EXPECT_EQ(ranges.prefix(), 3);
  EXPECT_TRUE(ranges.Add(2 * max + 2, 2 * max + 3));
}

}  // namespace
}  // namespace kvferry
