#include "base/clock.h"

#include <gtest/gtest.h>

#include <chrono>

namespace kvferry {
namespace {

TEST(Clocks, ADeadlineIsThatFarAway) {
  const Deadline begin = Clock::now();
  const Deadline in_an_hour = DeadlineInMs(3600 * 1000);
  const Deadline a_second_ago = DeadlineInMs(-1000);
  const auto took = Clock::now() - begin;
  EXPECT_GE(in_an_hour - begin, std::chrono::hours(1));
  EXPECT_LE(in_an_hour - begin, std::chrono::hours(1) + took);
  EXPECT_GE(a_second_ago - begin, -std::chrono::seconds(1));
  EXPECT_LE(a_second_ago - begin, -std::chrono::seconds(1) + took);
}

// What callers give who mean no limit: their largest number, whatever it is.
TEST(Clocks, DeadlinesBeyondTheClockStayOnTheirSide) {
  const Deadline now = Clock::now();
  constexpr int64_t kNsInMs = 1000 * 1000;
  for (const int64_t ms :
       {INT64_MAX / kNsInMs, INT64_MAX / kNsInMs + 1, int64_t{1} << 50, INT64_MAX}) {
    EXPECT_GT(DeadlineInMs(ms) - now, std::chrono::years(99)) << ms;
    EXPECT_LT(DeadlineInMs(-ms) - now, -std::chrono::years(99)) << ms;
  }
  EXPECT_LT(DeadlineInMs(INT64_MIN), now);
  EXPECT_GT(MsUntil(DeadlineInMs(INT64_MAX), now), 0);
  EXPECT_EQ(MsUntil(DeadlineInMs(INT64_MIN), now), 0);
}

}  // namespace
}  // namespace kvferry
