#include "transport/byte_ranges.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/support/status.h"

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
      ASSERT_EQ(ranges.Add(begin, end).ok(), bitmap.Add(begin, end)) << begin << ".." << end;
      ASSERT_EQ(ranges.prefix(), bitmap.prefix());
      ASSERT_EQ(ranges.num_bytes(), bitmap.num_bytes());
      ASSERT_EQ(ranges.Gaps(total), bitmap.Gaps());
    }
  }
}

constexpr auto kMaxGaps = static_cast<int64_t>(ByteRanges::kMaxGaps);

TEST(ByteRanges, GapsAreBounded) {
  ByteRanges ranges;
  for (int64_t i = 1; i <= kMaxGaps; ++i) ASSERT_TRUE(IsOk(ranges.Add(3 * i, 3 * i + 1)));
  const int64_t last = 3 * kMaxGaps + 3;
  EXPECT_TRUE(Fails(ranges.Add(last, last + 1), absl::StatusCode::kDataLoss, "4096 gaps"));
  EXPECT_TRUE(Fails(ranges.Add(6, 7), absl::StatusCode::kDataLoss, "overlaps"));
  EXPECT_EQ(ranges.num_bytes(), kMaxGaps);
  // What makes no gap needs no room.
  EXPECT_TRUE(IsOk(ranges.Add(4, 5)));
  EXPECT_TRUE(IsOk(ranges.Add(8, 9)));
  EXPECT_TRUE(Fails(ranges.Add(last, last + 1), absl::StatusCode::kDataLoss));
  EXPECT_TRUE(IsOk(ranges.Add(0, 3)));  // And what closes one makes some.
  EXPECT_EQ(ranges.prefix(), 5);
  EXPECT_TRUE(IsOk(ranges.Add(last, last + 1)));
}

// As when one lane has lost a packet and the others go on.
TEST(ByteRanges, OneGapMayBeFarBehind) {
  ByteRanges ranges;
  for (int64_t i = 1; i <= 3 * kMaxGaps; ++i) ASSERT_TRUE(IsOk(ranges.Add(i, i + 1)));
  EXPECT_EQ(ranges.prefix(), 0);
  EXPECT_TRUE(IsOk(ranges.Add(0, 1)));
  EXPECT_EQ(ranges.prefix(), 3 * kMaxGaps + 1);
}

}  // namespace
}  // namespace kvferry
