#include "transport/head_share.h"

#include <gtest/gtest.h>

#include "tests/support/status.h"

namespace kvferry {
namespace {

const KvLayout kLayout = KvLayout::Mha(2, 16, 4, 8, DType::kBFloat16);

TEST(HeadShare, LiesWithinTheModel) {
  for (const HeadShare share : {HeadShare{}, {0, 4}, {4, 8}, {0, KvLayout::kMaxHeads}}) {
    EXPECT_TRUE(IsOk(CheckHeadShare(kLayout, share)));
  }
  for (const HeadShare share : {HeadShare{-1, 8},
                                {5, 8},
                                {0, 3},
                                {1, 0},
                                {0, INT64_MIN},
                                {INT64_MAX, 8},
                                {0, KvLayout::kMaxHeads + 1}}) {
    EXPECT_TRUE(Fails(CheckHeadShare(kLayout, share), absl::StatusCode::kInvalidArgument,
                      "not within the model's"));
  }
}

TEST(HeadShare, HeadsAreThoseThatThePoolHolds) {
  const HeadShare share = {4, 12};  // 4 to 7.
  EXPECT_EQ(Must(LocalHeads(kLayout, share, {})), HeadRange());
  EXPECT_EQ(Must(LocalHeads(kLayout, share, {4, 4})), (HeadRange{0, 4}));
  EXPECT_EQ(Must(LocalHeads(kLayout, share, {7, 1})), (HeadRange{3, 1}));
  for (const HeadRange heads : {HeadRange{3, 1}, {4, 5}, {7, 2}, {8, 1}, {INT64_MAX, 4}}) {
    EXPECT_TRUE(Fails(LocalHeads(kLayout, share, heads), absl::StatusCode::kOutOfRange,
                      "of pages that hold"));
  }
  // Who computes a range that turns out to be of none does not mean all.
  for (const HeadRange none : {HeadRange{4, 0}, {1, 0}, {-1, 0}, {INT64_MAX, 0}}) {
    EXPECT_TRUE(Fails(LocalHeads(kLayout, share, none), absl::StatusCode::kInvalidArgument,
                      "which are none"));
  }
}

}  // namespace
}  // namespace kvferry
