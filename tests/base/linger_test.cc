#include "base/linger.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace kvferry {
namespace {

TEST(Linger, EndsWhenThereIsSomethingToDo) {
  Linger linger([] {});
  int asked = 0;
  EXPECT_TRUE(linger.Await([&] { return ++asked == 3; }));
  EXPECT_EQ(asked, 3);
}

TEST(Linger, EndsWhenNothingComes) {
  Linger linger([] {});
  const Deadline begin = Clock::now();
  EXPECT_FALSE(linger.Await([] { return false; }));
  EXPECT_GE(Clock::now() - begin, Linger::kMost);
}

// The yield is somebody else's turn here.
TEST(Linger, MakesWayForOthers) {
  int late = 1;
  Linger linger([&] {
    if (late-- > 0) std::this_thread::sleep_for(2 * Linger::kLate);
  });
  int asked = 0;
  const auto nothing = [&] {
    ++asked;
    return false;
  };
  EXPECT_FALSE(linger.Await(nothing));
  EXPECT_EQ(asked, 2) << "before the yield and after it";
  const Deadline paused_for_sure = Clock::now() + Linger::kPause / 2;
  EXPECT_FALSE(linger.Await(nothing));
  if (Clock::now() < paused_for_sure) {
    EXPECT_EQ(asked, 2) << "paused";
  }
  std::this_thread::sleep_for(Linger::kPause);
  EXPECT_TRUE(linger.Await([] { return true; }));
}

TEST(Linger, WhatCameDuringALateYieldIsSeen) {
  bool there = false;
  Linger linger([&] {
    std::this_thread::sleep_for(2 * Linger::kLate);
    there = true;
  });
  EXPECT_TRUE(linger.Await([&] { return there; }));
}

}  // namespace
}  // namespace kvferry
