#pragma once

#include <chrono>
#include <thread>

#include "base/clock.h"

namespace kvferry {

// Asks until `holds` does or the deadline has passed; returns what it said last. The only way in
// which tests wait for something that has no handle to wait on.
template <typename Predicate>
bool WaitFor(const Predicate& holds, Deadline deadline) {
  while (!holds()) {
    if (Clock::now() >= deadline) return holds();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Long enough for a machine that runs other things too; a test that gets here has failed.
inline Deadline Soon() { return DeadlineInMs(20000); }

// For what makes progress by hand: many steps without a pause, until `holds` does.
template <typename Step, typename Predicate>
bool StepUntil(const Step& step, const Predicate& holds) {
  return WaitFor(
      [&] {
        for (int i = 0; i < 100 && !holds(); ++i) step();
        return holds();
      },
      Soon());
}

}  // namespace kvferry
