#include "transport/path_model.h"

#include <gtest/gtest.h>

namespace kvferry {
namespace {

using Work = PathModel::Work;

constexpr double kNanosecond = 1e-9;
// Of a machine where both ways cost 0.1 ns a byte and nothing a piece.
constexpr CopyCost kCopy{0.1 * kNanosecond, 0};
constexpr CopyCosts kAlike{kCopy, kCopy, kCopy};
constexpr int64_t kMiB = 1 << 20;

int ChoicesOf(PathModel* model, MappedWay way, const Work& work, int rounds) {
  int count = 0;
  for (int i = 0; i < rounds; ++i) count += model->Choose(work) == way ? 1 : 0;
  return count;
}

// What a transfer really takes: ns a byte in place and through the arena.
struct Truth {
  double in_place;
  double arena;

  double Of(MappedWay way) const { return way == MappedWay::kInPlace ? in_place : arena; }
};

void Live(PathModel* model, const Work& work, const Truth& truth, int transfers) {
  for (int i = 0; i < transfers; ++i) {
    const MappedWay way = model->Choose(work);
    model->Observe(way, work, truth.Of(way) * kNanosecond * static_cast<double>(work.bytes));
  }
}

TEST(PathModel, InPlaceWhereBothAreAlike) {
  PathModel model(kAlike);
  const int rounds = 320;
  EXPECT_EQ(ChoicesOf(&model, MappedWay::kArena, {512 * kMiB, 32 << 10}, rounds),
            rounds / PathModel::kTryEvery);
}

TEST(PathModel, CopiesOfSmallPiecesArePredicted) {
  CopyCosts costs = kAlike;
  costs.page_to_page.piece_seconds = 200 * kNanosecond;
  PathModel model(costs);
  EXPECT_EQ(model.Choose({512 * kMiB, 1152}), MappedWay::kArena);
  EXPECT_EQ(model.Choose({512 * kMiB, 64 << 10}), MappedWay::kInPlace);
}

TEST(PathModel, CopiesAloneAreNotBelievedAtOnce) {
  CopyCosts costs = kAlike;
  costs.page_to_page.byte_seconds = 0.15 * kNanosecond;
  PathModel model(costs);
  const Work work{64 * kMiB, 2048};
  EXPECT_EQ(model.Choose(work), MappedWay::kInPlace);
  model.Observe(MappedWay::kInPlace, work, 64 * kMiB * 0.15e-9);
  EXPECT_EQ(model.Choose(work), MappedWay::kInPlace);
  model.Observe(MappedWay::kArena, work, 64 * kMiB * 0.1e-9);
  EXPECT_EQ(model.Choose(work), MappedWay::kArena);
}

// The slower of the two sides decides.
TEST(PathModel, TheArenaIsAsSlowAsItsSlowerSide) {
  CopyCosts costs = kAlike;
  costs.page_to_page.byte_seconds = 0.3 * kNanosecond;
  costs.scatter.byte_seconds = 0.2 * kNanosecond;
  const PathModel model(costs);
  EXPECT_DOUBLE_EQ(model.ExpectedSeconds(MappedWay::kArena, {100, 1024}), 100 * 0.2e-9);
  costs.scatter.byte_seconds = 0;
  costs.gather.byte_seconds = 0.25 * kNanosecond;
  EXPECT_DOUBLE_EQ(PathModel(costs).ExpectedSeconds(MappedWay::kArena, {100, 1024}), 100 * 0.25e-9);
}

// Whatever was predicted, what is chosen in the end is within 15 % of the better one.
TEST(PathModel, LearnsWhatTransfersTake) {
  const Work work{64 * kMiB, 2048};
  const Truth truths[] = {{0.1, 0.1}, {0.1, 0.4}, {0.4, 0.1}, {0.1, 0.08}, {0.2, 0.15}};
  for (const double predicted_in_place : {0.05, 0.1, 0.15}) {
    for (const Truth& truth : truths) {
      CopyCosts costs = kAlike;
      costs.page_to_page.byte_seconds = predicted_in_place * kNanosecond;
      PathModel model(costs);
      Live(&model, work, truth, 30 * PathModel::kTryEvery);
      const MappedWay usual = ChoicesOf(&model, MappedWay::kArena, work, 2 * PathModel::kTryEvery) >
                                      PathModel::kTryEvery
                                  ? MappedWay::kArena
                                  : MappedWay::kInPlace;
      EXPECT_LE(truth.Of(usual) * 0.85, std::min(truth.in_place, truth.arena))
          << "in place " << truth.in_place << ", arena " << truth.arena << ", predicted "
          << predicted_in_place;
    }
  }
}

TEST(PathModel, WhatIsFarWorseIsNotTried) {
  PathModel model(kAlike);
  const Work work{64 * kMiB, 2048};
  model.Observe(MappedWay::kInPlace, work, 64e6 * 0.1 * kNanosecond);
  for (int i = 0; i < 20; ++i) model.Observe(MappedWay::kArena, work, 64e6 * 0.5 * kNanosecond);
  EXPECT_EQ(ChoicesOf(&model, MappedWay::kArena, work, 320), 0);
}

// A small request takes longer than its copies, whichever way it goes.
TEST(PathModel, WhatIsNotCopyingIsOfBothWays) {
  PathModel model(kAlike);
  const Work work{64 << 10, 2048};
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(model.Choose(work), MappedWay::kInPlace);
    model.Observe(MappedWay::kInPlace, work, 150e-6);
  }
  EXPECT_NEAR(model.ExpectedSeconds(MappedWay::kArena, work), 150e-6, 15e-6);
  // Once it was tried, it is known for itself.
  model.Observe(MappedWay::kArena, work, 300e-6);
  EXPECT_NEAR(model.ExpectedSeconds(MappedWay::kInPlace, work), 150e-6, 15e-6);
}

TEST(PathModel, OneStallChangesNothing) {
  PathModel model(kAlike);
  const Work work{64 * kMiB, 2048};
  model.Observe(MappedWay::kInPlace, work, 40);
  EXPECT_LT(model.ExpectedSeconds(MappedWay::kInPlace, work), 2 * 64 * kMiB * 0.1e-9);
}

TEST(PathModel, ClassesLearnApart) {
  PathModel model(kAlike);
  const Work small{kMiB, 2048};
  const Work large{64 * kMiB, 2048};
  const Work coarse{kMiB, 32 << 10};
  const double before = model.ExpectedSeconds(MappedWay::kInPlace, large);
  model.Observe(MappedWay::kInPlace, small, 1);
  EXPECT_DOUBLE_EQ(model.ExpectedSeconds(MappedWay::kInPlace, large), before);
  EXPECT_DOUBLE_EQ(model.ExpectedSeconds(MappedWay::kInPlace, coarse), kMiB * 0.1e-9);
  // Pieces below the smallest class and above the largest one have classes too.
  EXPECT_GT(model.ExpectedSeconds(MappedWay::kArena, {1, 1}), 0);
  EXPECT_GT(model.ExpectedSeconds(MappedWay::kArena, {int64_t{1} << 50, int64_t{1} << 40}), 0);
}

// Where memory for the measurement was refused, the first transfers say what they take.
TEST(PathModel, BeginsWithNothingKnown) {
  PathModel model(CopyCosts{});
  const Work work{64 * kMiB, 2048};
  EXPECT_EQ(model.Choose(work), MappedWay::kInPlace);
  Live(&model, work, {0.4, 0.1}, 10 * PathModel::kTryEvery);
  EXPECT_GT(ChoicesOf(&model, MappedWay::kArena, work, 32), 16);
}

TEST(PathModel, CopiesOfThisMachineAreMeasured) {
  const CopyCosts& costs = MeasuredCopyCosts();
  for (const CopyCost& cost : {costs.page_to_page, costs.gather, costs.scatter}) {
    EXPECT_GT(cost.PerByte(1024), 0);
    EXPECT_GE(cost.PerByte(1024), cost.PerByte(16 << 10));
  }
}

}  // namespace
}  // namespace kvferry
