#pragma once

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace kvferry {

// For threads whose next piece of work is likely to come at once: looking for it for some
// microseconds is cheaper than to sleep and be woken, which in a virtual machine takes tens of them
// and as much of whoever wakes. But the processors are the engine's: a yield that comes back late
// says that somebody else wants this one, and then there is no lingering for a while, because who
// wakes from a sleep gets a processor sooner than who has yielded it. One thread's alone.
class Linger {
 public:
  static constexpr auto kMost = std::chrono::microseconds(50);
  // Far more than a yield to nobody takes (1 us).
  static constexpr auto kLate = std::chrono::microseconds(50);
  // One yield in this time may cost a time slice (3 ms).
  static constexpr auto kPause = std::chrono::milliseconds(100);

  explicit Linger(std::function<void()> yield = &std::this_thread::yield)
      : yield_(std::move(yield)) {}

  // Returns true as soon as until() does; false without asking it while others want the processor,
  // or after kMost.
  template <typename Until>
  bool Await(const Until& until) {
    Deadline now = Clock::now();
    if (now < paused_until_) return false;
    const Deadline end = now + kMost;
    while (now < end) {
      if (until()) return true;
      const Deadline before = Clock::now();
      yield_();
      now = Clock::now();
      if (now - before < kLate) continue;
      paused_until_ = now + kPause;
      return until();
    }
    return false;
  }

 private:
  const std::function<void()> yield_;
  Deadline paused_until_ = Deadline::min();
};

}  // namespace kvferry
