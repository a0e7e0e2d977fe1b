#pragma once

// What handles of something under way have in common: whether, and how, it has ended.

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace kvferry {

class Ending {
 public:
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;

  bool done() const {
    const MutexLock lock(&mutex_);
    return done_;
  }
  // While under way: UNAVAILABLE "still under way"; ask done() first.
  absl::Status status() const {
    const MutexLock lock(&mutex_);
    return status_;
  }
  // Waits until done() and returns status(); DEADLINE_EXCEEDED when `deadline` comes first: what is
  // under way then goes on, to its own deadline. Needs no memory.
  absl::Status Wait(Deadline deadline) const {
    const MutexLock lock(&mutex_);
    while (!done_) {
      if (!ended_.WaitUntil(&mutex_, deadline) && !done_ && Clock::now() >= deadline) {
        return too_early_;
      }
    }
    return status_;
  }
  // Waits until done(), which what is under way comes to by its own deadline: for who may go on
  // only then, whatever else fails. Needs no memory and throws nothing.
  void WaitUntilDone() const noexcept {
    const MutexLock lock(&mutex_);
    while (!done_) ended_.WaitAwhile(&mutex_);
  }

 protected:
  // "the fetch", for messages.
  explicit Ending(const char* what)
      : status_(absl::UnavailableError(absl::StrCat(what, " is still under way"))),
        too_early_(absl::DeadlineExceededError(status_.message())) {}
  ~Ending() = default;

  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    done_ = true;
    status_ = status;
    ended_.NotifyAll();
  }

  mutable Mutex mutex_;  // Also of what else a handle has.
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  // What waits say whose deadline comes first. Made before there is one, as a copy needs no memory.
  const absl::Status too_early_;

 private:
  mutable CondVar ended_;
};

}  // namespace kvferry
