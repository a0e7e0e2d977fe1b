#pragma once

// Monotonic time. Deadlines are points on this clock and never cross a machine: messages carry
// durations.

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvferry {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

inline Deadline DeadlineIn(std::chrono::milliseconds duration) { return Clock::now() + duration; }
// A century at most, either way: callers give the largest number that they have for "no limit", and
// the clock ends after three.
inline Deadline DeadlineInMs(int64_t duration_ms) {
  constexpr std::chrono::milliseconds kMost = std::chrono::years(100);
  return DeadlineIn(
      std::chrono::milliseconds(std::clamp<int64_t>(duration_ms, -kMost.count(), kMost.count())));
}

// Milliseconds left, rounded up so that a sleep of that length does not wake early; never negative.
inline int64_t MsUntil(Deadline deadline, Deadline now) {
  return std::max<int64_t>(0, std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count());
}

inline double SecondsBetween(Deadline from, Deadline to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace kvferry
