#pragma once

// Calls that wait on their caller's thread, and whose caller may lose patience: Python's main
// thread, which hears of Ctrl-C only while it looks.

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace kvferry {

// Whether the calls of a thread are to end, of whoever has set it there (SetInterrupter). They end
// then as if their deadline had come: what has not arrived does not arrive any more.
class Interrupter {
 public:
  // Whoever waits looks so often.
  static constexpr auto kLook = std::chrono::milliseconds(200);

  Interrupter() = default;
  Interrupter(const Interrupter&) = delete;
  Interrupter& operator=(const Interrupter&) = delete;

  Deadline next_look() const { return next_look_; }
  // Once true it stays so.
  bool Interrupted() {
    if (interrupted_ || Clock::now() < next_look_) return interrupted_;
    interrupted_ = Look();
    if (!interrupted_) next_look_ = Clock::now() + kLook;  // Else nobody is to wait any more.
    return interrupted_;
  }

 protected:
  ~Interrupter() = default;

 private:
  // Called on its thread, with no lock held. May take long, and call what is waiting again.
  virtual bool Look() noexcept = 0;

  bool interrupted_ = false;
  Deadline next_look_ = Clock::now() + kLook;
};

namespace internal {
inline thread_local Interrupter* interrupter = nullptr;
}  // namespace internal

// Of this thread's calls from now on; null is none. Returns the one before.
inline Interrupter* SetInterrupter(Interrupter* interrupter) {
  return std::exchange(internal::interrupter, interrupter);
}

// For who waits until `deadline`: how long before he asks whether he is Interrupted().
inline Deadline NextLook(Deadline deadline) {
  Interrupter* const interrupter = internal::interrupter;
  return interrupter == nullptr ? deadline : std::min(deadline, interrupter->next_look());
}
// With no lock held.
inline bool Interrupted() {
  Interrupter* const interrupter = internal::interrupter;
  return interrupter != nullptr && interrupter->Interrupted();
}
// The same for who holds this one, which is let go of meanwhile if there is anybody to ask.
inline bool Interrupted(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
  if (internal::interrupter == nullptr) return false;
  mutex->Unlock();
  const bool interrupted = Interrupted();
  mutex->Lock();
  return interrupted;
}
// Waits for a notification, no longer than until the next look. False: the deadline has come, or
// the caller was interrupted. What is waited for may have come all the same, while the mutex was
// let go of: loop over it, and look at it first.
inline bool WaitOrLook(CondVar& changed, Mutex* mutex, Deadline deadline)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
  return changed.WaitUntil(mutex, NextLook(deadline)) ||
         (Clock::now() < deadline && !Interrupted(mutex));
}

}  // namespace kvferry
