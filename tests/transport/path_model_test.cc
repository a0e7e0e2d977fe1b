#include "transport/path_model.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace kvferry {
namespace {

using Work = PathModel::Work;

constexpr double kNanosecond = 1e-9;
// Of a machine where both ways cost 0.1 ns a byte and nothing a piece.
constexpr CopyCost kCopy{0.1 * kNanosecond, 0};
constexpr CopyCosts kAlike{kCopy, kCopy, kCopy};
constexpr int64_t kMiB = 1 << 20;

int ChoicesOf(PathModel* model, PageWay way, const Work& work, int rounds) {
  int count = 0;
  for (int i = 0; i < rounds; ++i) count += model->Choose(work) == way ? 1 : 0;
  return count;
}

// What a transfer really takes: ns a byte in place and through the arena.
struct Truth {
  double in_place;
  double arena;

  double Of(PageWay way) const { return way == PageWay::kInPlace ? in_place : arena; }
};

void Live(PathModel* model, const Work& work, const Truth& truth, int transfers) {
  for (int i = 0; i < transfers; ++i) {
    const PageWay way = model->Choose(work);
    model->Observe(way, work, truth.Of(way) * kNanosecond * static_cast<double>(work.bytes));
  }
}

TEST(PathModel, InPlaceWhereBothAreAlike) {
  PathModel model(kAlike);
  const int rounds = 320;
  EXPECT_EQ(ChoicesOf(&model, PageWay::kArena, {512 * kMiB, 32 << 10}, rounds),
            rounds / PathModel::kTryEvery);
}

TEST(PathModel, NothingIsTriedThatTellsNothing) {
  PathModel model(kAlike);
  for (int i = 0; i < 10 * PathModel::kTryEvery; ++i) {
    EXPECT_EQ(model.Choose({512 * kMiB, 32 << 10}, /*can_tell=*/false), PageWay::kInPlace);
  }
}

TEST(PathModel, CopiesOfSmallPiecesArePredicted) {
  CopyCosts costs = kAlike;
  costs.page_to_page.piece_seconds = 200 * kNanosecond;
  PathModel model(costs);
  EXPECT_EQ(model.Choose({512 * kMiB, 1152}), PageWay::kArena);
  EXPECT_EQ(model.Choose({512 * kMiB, 64 << 10}), PageWay::kInPlace);
}

TEST(PathModel, CopiesAloneAreNotBelievedAtOnce) {
  CopyCosts costs = kAlike;
  costs.page_to_page.byte_seconds = 0.15 * kNanosecond;
  PathModel model(costs);
  const Work work{64 * kMiB, 2048};
  EXPECT_EQ(model.Choose(work), PageWay::kInPlace);
  model.Observe(PageWay::kInPlace, work, 64 * kMiB * 0.15e-9);
  EXPECT_EQ(model.Choose(work), PageWay::kInPlace);
  model.Observe(PageWay::kArena, work, 64 * kMiB * 0.1e-9);
  EXPECT_EQ(model.Choose(work), PageWay::kArena);
}

// The slower of the two sides decides.
TEST(PathModel, TheArenaIsAsSlowAsItsSlowerSide) {
  CopyCosts costs = kAlike;
  costs.page_to_page.byte_seconds = 0.3 * kNanosecond;
  costs.scatter.byte_seconds = 0.2 * kNanosecond;
  const PathModel model(costs);
  EXPECT_DOUBLE_EQ(model.ExpectedSeconds(PageWay::kArena, {100, 1024}), 100 * 0.2e-9);
  costs.scatter.byte_seconds = 0;
  costs.gather.byte_seconds = 0.25 * kNanosecond;
  EXPECT_DOUBLE_EQ(PathModel(costs).ExpectedSeconds(PageWay::kArena, {100, 1024}), 100 * 0.25e-9);
}

// Requests of 4,096 and of 128 tokens whose pages lie together one by one, in eights and all.
std::vector<Work> WorkOfBench() {
  std::vector<Work> works;
  const Work pages[] = {{512 * kMiB, 32 << 10},
                        {512 * kMiB, 2048},
                        {274 * kMiB, 72 << 10},
                        {274 * kMiB, 1152},
                        {16 * kMiB, 32 << 10}};
  for (const auto& [bytes, page_bytes] : pages) {
    for (const int64_t together : {page_bytes, 8 * page_bytes, bytes / 64}) {
      works.push_back({bytes, together});
    }
  }
  return works;
}

bool UsuallyGathers(PathModel* model, const Work& work) {
  return ChoicesOf(model, PageWay::kArena, work, 2 * PathModel::kTryEvery) > PathModel::kTryEvery;
}

// Whatever was predicted, what is chosen in the end is within 15 % of the better one.
TEST(PathModel, LearnsWhatTransfersTake) {
  const Truth truths[] = {{0.1, 0.1}, {0.1, 0.4}, {0.4, 0.1}, {0.1, 0.08}, {0.2, 0.15}};
  for (const Work& work : WorkOfBench()) {
    for (const double predicted_in_place : {0.05, 0.1, 0.15}) {
      for (const Truth& truth : truths) {
        CopyCosts costs = kAlike;
        costs.page_to_page.byte_seconds = predicted_in_place * kNanosecond;
        PathModel model(costs);
        Live(&model, work, truth, 30 * PathModel::kTryEvery);
        const PageWay usual = UsuallyGathers(&model, work) ? PageWay::kArena : PageWay::kInPlace;
        EXPECT_LE(truth.Of(usual) * 0.85, std::min(truth.in_place, truth.arena))
            << work.bytes << " by " << work.piece_bytes << ", in place " << truth.in_place
            << ", arena " << truth.arena << ", predicted " << predicted_in_place;
      }
    }
  }
}

TEST(PathModel, WhatIsFarWorseIsTriedSeldom) {
  for (const double times_worse : {2.1, 3.0, 10.0, 100.0, 1e9}) {
    PathModel model(kAlike);
    const Work work{64 * kMiB, 2048};
    Live(&model, work, {0.1, 0.1}, 2);
    for (int i = 0; i < 200; ++i) {
      model.Observe(PageWay::kArena, work, 64 * kMiB * 0.1 * kNanosecond * times_worse);
    }
    EXPECT_EQ(ChoicesOf(&model, PageWay::kArena, work, 200), 0);
    const int rounds = 1 << 18;
    EXPECT_LE(ChoicesOf(&model, PageWay::kArena, work, rounds) * std::min(times_worse, 8192.0),
              rounds / 100.0)
        << times_worse;
  }
}

// The processes that read in place had an eighth of a processor for a while, or stood still.
TEST(PathModel, OneSlowSpellIsNotForEver) {
  for (const bool afar : {false, true}) {
    const CopyCosts costs{kCopy, {0.3 * kNanosecond, 0}, {0.3 * kNanosecond, 0}};
    PathModel model = afar ? PathModel(costs, ReadCosts{100, 100000}) : PathModel(costs);
    const Work work{64 * kMiB, 32 << 10};
    Live(&model, work, {0.1, 0.3}, 200);
    EXPECT_EQ(model.Choose(work, /*can_tell=*/false), PageWay::kInPlace);
    Live(&model, work, {0.8, 0.3}, 500);
    EXPECT_EQ(model.Choose(work, /*can_tell=*/false), PageWay::kArena);
    Live(&model, work, {0.1, 0.3}, 1000);
    EXPECT_EQ(model.Choose(work, /*can_tell=*/false), PageWay::kInPlace);
    EXPECT_GE(ChoicesOf(&model, PageWay::kInPlace, work, 1000), 990);
  }
}

// A small request takes longer than its copies, whichever way it goes.
TEST(PathModel, WhatIsNotCopyingIsOfBothWays) {
  PathModel model(kAlike);
  const Work work{64 << 10, 2048};
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(model.Choose(work), PageWay::kInPlace);
    model.Observe(PageWay::kInPlace, work, 150e-6);
  }
  EXPECT_NEAR(model.ExpectedSeconds(PageWay::kArena, work), 150e-6, 15e-6);
  // Once it was tried, it is known for itself.
  model.Observe(PageWay::kArena, work, 300e-6);
  EXPECT_NEAR(model.ExpectedSeconds(PageWay::kInPlace, work), 150e-6, 15e-6);
}

TEST(PathModel, OneStallChangesNothing) {
  PathModel model(kAlike);
  const Work work{64 * kMiB, 2048};
  model.Observe(PageWay::kInPlace, work, 40);
  EXPECT_LT(model.ExpectedSeconds(PageWay::kInPlace, work), 2 * 64 * kMiB * 0.1e-9);
}

TEST(PathModel, ClassesLearnApart) {
  PathModel model(kAlike);
  const Work small{kMiB, 2048};
  const Work large{64 * kMiB, 2048};
  const Work coarse{kMiB, 32 << 10};
  const double before = model.ExpectedSeconds(PageWay::kInPlace, large);
  model.Observe(PageWay::kInPlace, small, 1);
  EXPECT_DOUBLE_EQ(model.ExpectedSeconds(PageWay::kInPlace, large), before);
  EXPECT_DOUBLE_EQ(model.ExpectedSeconds(PageWay::kInPlace, coarse), kMiB * 0.1e-9);
  // Pieces below the smallest class and above the largest one have classes too.
  EXPECT_GT(model.ExpectedSeconds(PageWay::kArena, {1, 1}), 0);
  EXPECT_GT(model.ExpectedSeconds(PageWay::kArena, {int64_t{1} << 50, int64_t{1} << 40}), 0);
}

// Where memory for the measurement was refused, the first transfers say what they take.
TEST(PathModel, BeginsWithNothingKnown) {
  PathModel model(CopyCosts{});
  const Work work{64 * kMiB, 2048};
  EXPECT_EQ(model.Choose(work), PageWay::kInPlace);
  Live(&model, work, {0.4, 0.1}, 10 * PathModel::kTryEvery);
  EXPECT_GT(ChoicesOf(&model, PageWay::kArena, work, 32), 16);
}

TEST(PathModel, CopiesOfThisMachineAreMeasured) {
  const CopyCosts& costs = MeasuredCopyCosts();
  for (const CopyCost& cost : {costs.page_to_page, costs.gather, costs.scatter}) {
    EXPECT_GT(cost.PerByte(1024), 0);
    EXPECT_GE(cost.PerByte(1024), cost.PerByte(16 << 10));
  }
}

// What an engine is when its endpoints start: its own threads and its peers' take the processors.
class OnABusyProcessor {
 public:
  OnABusyProcessor() {
    sched_getaffinity(0, sizeof(before_), &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof(one), &one);  // The threads that begin here are there too.
    for (int i = 0; i < 4; ++i) {
      others_.emplace_back([this] {
        while (!done_) {
        }
      });
    }
  }
  ~OnABusyProcessor() {
    done_ = true;
    for (std::thread& other : others_) other.join();
    sched_setaffinity(0, sizeof(before_), &before_);
  }

 private:
  cpu_set_t before_;
  std::atomic<bool> done_{false};
  std::vector<std::thread> others_;
};

// A copy in whose middle another thread has its turn takes a hundred times as long by the clock,
// and one of the ways would be shut out by that.
TEST(PathModel, WhatOthersTakeOfAProcessorIsNotCopying) {
  const CopyCosts calm = MeasureCopyCosts();
  const OnABusyProcessor busy;
  const auto is_slow = [&calm](const CopyCosts& costs) {
    for (const CopyCost CopyCosts::*copy :
         {&CopyCosts::page_to_page, &CopyCosts::gather, &CopyCosts::scatter}) {
      for (const int64_t piece_bytes : {1 << 10, 16 << 10}) {
        if ((costs.*copy).PerByte(piece_bytes) > 10 * (calm.*copy).PerByte(piece_bytes))
          return true;
      }
    }
    return false;
  };
  int slow = 0;
  for (int i = 0; i < 16; ++i) slow += is_slow(MeasureCopyCosts()) ? 1 : 0;
  EXPECT_LE(slow, 2);  // A virtual processor may itself be away for a while.
}

// From afar: what one read takes decides for small pieces, what a byte takes for large ones.
TEST(PathModel, ReadsFromAfarAreForLongPieces) {
  const CopyCosts copies{kCopy, kCopy, kCopy};
  PathModel model(copies, ReadCosts{2000, 50000});
  // But for four times that the other way is tried.
  EXPECT_EQ(ChoicesOf(&model, PageWay::kInPlace, {512 * kMiB, 256 << 10}, 31), 27);
  PathModel again(copies, ReadCosts{2000, 50000});
  EXPECT_EQ(ChoicesOf(&again, PageWay::kArena, {512 * kMiB, 256}, 31), 31);
}

// A probe that was disturbed, whichever it misleads to, is corrected by the first few transfers.
TEST(PathModel, ReadsFromAfarAreJudgedByTransfers) {
  const CopyCosts copies{kCopy, kCopy, kCopy};
  const Work work{512 * kMiB, 1152};
  for (const Truth& truth : {Truth{11, 0.4}, Truth{0.2, 5}}) {
    for (const ReadCosts& told : {ReadCosts{100, 100000}, ReadCosts{300, 200000}}) {
      PathModel model(copies, told);
      Live(&model, work, truth, 8);
      const PageWay better = truth.in_place < truth.arena ? PageWay::kInPlace : PageWay::kArena;
      EXPECT_GE(ChoicesOf(&model, better, work, 20), 19) << truth.in_place << told.read_ns;
    }
  }
}

// Reads take a third of what the probe said: the one transfer that tries them is believed.
TEST(PathModel, OneTryFromAfarTellsEnough) {
  const Work work{512 * kMiB, 1152};
  PathModel model(kAlike, ReadCosts{460, 314573});
  const double reads_seconds = model.ExpectedSeconds(PageWay::kInPlace, work);
  const double packed_seconds = model.ExpectedSeconds(PageWay::kArena, work);
  EXPECT_NEAR(reads_seconds / packed_seconds, 1.6, 0.1);
  Live(&model, work, {0.25, 0.5}, 2);
  EXPECT_GE(ChoicesOf(&model, PageWay::kInPlace, work, 20), 19);
}

}  // namespace
}  // namespace kvferry
