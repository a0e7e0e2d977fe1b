#include "pool/layer_counter.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

Deadline Now() { return Clock::now(); }

TEST(LayerCounters, EveryLayerIsReadyBetweenLoads) {
  LayerCounter counter(3);
  EXPECT_TRUE(IsOk(counter.WaitFor(2, Now())));
  const int64_t load = Must(counter.Begin());
  EXPECT_TRUE(
      Fails(counter.WaitFor(0, Now()), absl::StatusCode::kDeadlineExceeded, "layer 0", "0 of 3"));
  EXPECT_TRUE(Fails(counter.Begin().status(), absl::StatusCode::kFailedPrecondition, "under way"));
  ASSERT_TRUE(IsOk(counter.Ready(load, 2)));
  ASSERT_TRUE(IsOk(counter.Ready(load, 1)));  // Late news changes nothing.
  EXPECT_EQ(counter.ready(), 2);
  EXPECT_TRUE(IsOk(counter.WaitFor(1, Now())));
  EXPECT_FALSE(counter.WaitFor(2, Now()).ok());
  ASSERT_TRUE(IsOk(counter.Ready(load, 3)));
  EXPECT_TRUE(IsOk(counter.WaitFor(2, Now())));
  EXPECT_TRUE(IsOk(counter.Begin().status()));
}

TEST(LayerCounters, ALoadWhoseLoaderIsGoneCanBeGivenUp) {
  LayerCounter counter(2);
  EXPECT_EQ(counter.last_load(), 0);
  for (const std::string number : {"load 1 is under way", "load 2 is under way"}) {
    ASSERT_TRUE(IsOk(counter.Begin().status()));  // And the number is lost.
    EXPECT_TRUE(Fails(counter.Begin().status(), absl::StatusCode::kFailedPrecondition, number));
    counter.Fail(counter.last_load(), absl::AbortedError("given up"));
  }
  EXPECT_EQ(Must(counter.Begin()), 3);
}

// Who has not looked yet when the next load begins hears of the one that it waited for.
TEST(LayerCounters, WaitersHearOfTheirOwnLoad) {
  for (int round = 0; round < 300; ++round) {
    LayerCounter counter(2);
    for (const bool fails : {true, false}) {
      const int64_t load = Must(counter.Begin());
      absl::Status first, last;
      std::thread first_layer([&] { first = counter.WaitFor(0, Soon()); });
      std::thread last_layer([&] { last = counter.WaitFor(1, Soon()); });
      while (counter.num_waiting() < 2) std::this_thread::yield();
      ASSERT_TRUE(IsOk(counter.Ready(load, fails ? 1 : 2)));
      if (fails) counter.Fail(load, absl::DataLossError("lost"));
      const int64_t next = Must(counter.Begin());
      if (fails) {
        ASSERT_TRUE(IsOk(counter.Ready(next, 2)));
      } else {
        counter.Fail(next, absl::AbortedError("the next"));
      }
      first_layer.join();
      last_layer.join();
      EXPECT_TRUE(IsOk(first));
      EXPECT_EQ(last.code(), fails ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk) << last;
    }
  }
}

TEST(LayerCounters, LayersThatDoNotExist) {
  LayerCounter counter(3);
  constexpr auto kRange = absl::StatusCode::kOutOfRange;
  EXPECT_TRUE(Fails(counter.WaitFor(3, Now()), kRange, "layer 3", "there are 3"));
  EXPECT_TRUE(Fails(counter.WaitFor(-1, Now()), kRange, "layer -1"));
  EXPECT_TRUE(Fails(counter.Ready(0, 4), kRange, "4 layers"));
  EXPECT_TRUE(Fails(counter.Ready(0, -1), kRange, "-1 layers"));
}

TEST(LayerCounters, LoadsThatHaveNotBegun) {
  LayerCounter counter(3);
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_TRUE(Fails(counter.Ready(0, 3), kInvalid, "load 0 has not begun"));
  const int64_t load = Must(counter.Begin());
  for (const int64_t other : {INT64_MIN, int64_t{-1}, int64_t{0}, load + 1, INT64_MAX}) {
    EXPECT_TRUE(
        Fails(counter.Ready(other, 3), kInvalid, "has not begun", "the last that has is 1"));
  }
  EXPECT_EQ(counter.ready(), 0);
}

// What has happened in loads, and what a counter does about it, in plain words.
struct LayersModel {
  int64_t layers, load = 0, ready = layers;
  bool failed = false;

  absl::StatusCode Begin() {
    if (!failed && ready < layers) return absl::StatusCode::kFailedPrecondition;
    failed = false;
    ready = 0;
    ++load;
    return absl::StatusCode::kOk;
  }
  absl::StatusCode Ready(int64_t of, int64_t count) {
    if (count < 0 || count > layers) return absl::StatusCode::kOutOfRange;
    if (of < 1 || of > load) return absl::StatusCode::kInvalidArgument;
    if (of < load || failed) return absl::StatusCode::kFailedPrecondition;
    if (count > ready) ready = count;
    return absl::StatusCode::kOk;
  }
  void Fail(int64_t of) { failed |= of == load && ready < layers; }
  absl::StatusCode Wait(int64_t layer) const {
    if (layer < 0 || layer >= layers) return absl::StatusCode::kOutOfRange;
    if (layer < ready) return absl::StatusCode::kOk;
    return failed ? absl::StatusCode::kAborted : absl::StatusCode::kDeadlineExceeded;
  }
};

TEST(LayerCounters, AMillionRandomCallsAgainstAModel) {
  constexpr int64_t kLayers = 5;
  std::mt19937_64 random(1);
  const auto upto = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  LayerCounter counter(kLayers);
  LayersModel model{kLayers};
  int64_t begun = 0;
  for (int i = 0; i < 1'000'000; ++i) {
    // Mostly of the load that is under way.
    const int64_t load = upto(8) > 0 ? model.load : model.load + 1 - upto(3);
    const int64_t what = upto(16);
    if (what < 3) {
      const auto got = counter.Begin();
      ASSERT_EQ(got.status().code(), model.Begin());
      if (got.ok()) ASSERT_EQ(*got, model.load);
      begun += got.ok() ? 1 : 0;
    } else if (what < 12) {
      const int64_t count = upto(kLayers + 3) - 1;
      ASSERT_EQ(counter.Ready(load, count).code(), model.Ready(load, count));
    } else if (what < 13) {
      counter.Fail(load, absl::AbortedError("gone"));
      model.Fail(load);
    } else {
      const int64_t layer = upto(kLayers + 2) - 1;
      ASSERT_EQ(counter.WaitFor(layer, Now()).code(), model.Wait(layer)) << layer;
    }
    ASSERT_EQ(counter.ready(), model.ready);
    ASSERT_EQ(counter.last_load(), model.load);
  }
  EXPECT_GT(begun, 50'000);
}

TEST(LayerCounters, AFailedLoadWakesItsWaiters) {
  LayerCounter counter(2);
  const int64_t load = Must(counter.Begin());
  absl::Status seen;
  std::thread waiter([&] { seen = counter.WaitFor(1, Soon()); });
  ASSERT_TRUE(IsOk(counter.Ready(load, 1)));
  counter.Fail(load, absl::UnavailableError("the host is gone"));
  waiter.join();
  EXPECT_TRUE(Fails(seen, absl::StatusCode::kUnavailable, "the host is gone"));
  EXPECT_TRUE(IsOk(counter.WaitFor(0, Now())));  // What had come before stays.
  EXPECT_FALSE(counter.WaitFor(1, Now()).ok());
  ASSERT_TRUE(IsOk(counter.Begin().status()));
  EXPECT_TRUE(Fails(counter.WaitFor(0, Now()), absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(counter.num_waiting(), 0);  // Nobody is told of what has gone.
}

// Its loader may not know yet that somebody else has given it up.
TEST(LayerCounters, AFailedLoadCountsNothingUpForTheNext) {
  LayerCounter counter(2);
  const int64_t failed = Must(counter.Begin());
  counter.Fail(failed, absl::AbortedError("its request is gone"));
  EXPECT_TRUE(Fails(counter.Ready(failed, 2), absl::StatusCode::kFailedPrecondition,
                    "its request is gone"));
  EXPECT_TRUE(Fails(counter.WaitFor(0, Now()), absl::StatusCode::kAborted));
  const int64_t next = Must(counter.Begin());
  EXPECT_TRUE(Fails(counter.Ready(failed, 2), absl::StatusCode::kFailedPrecondition,
                    "another one has begun"));
  counter.Fail(failed, absl::AbortedError("late"));
  EXPECT_TRUE(Fails(counter.WaitFor(0, Now()), absl::StatusCode::kDeadlineExceeded));
  ASSERT_TRUE(IsOk(counter.Ready(next, 1)));
  EXPECT_TRUE(IsOk(counter.WaitFor(0, Now())));
}

// A reader computes with each layer as soon as it is there, and never sooner.
TEST(LayerCounters, ReadersFollowTheLoader) {
  constexpr int64_t kLayers = 64;
  LayerCounter counter(kLayers);
  for (int load = 1; load <= 200; ++load) {
    std::vector<int> layers(kLayers, 0);
    const int64_t number = Must(counter.Begin());
    int64_t wrong = 0;
    std::thread reader([&] {
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        if (!counter.WaitFor(layer, Soon()).ok() || layers[layer] != load) ++wrong;
      }
    });
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      layers[layer] = load;
      EXPECT_TRUE(IsOk(counter.Ready(number, layer + 1)));
    }
    reader.join();
    ASSERT_EQ(wrong, 0);
  }
}

}  // namespace
}  // namespace kvferry
