#pragma once

#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace kvferry {

// For what several threads may close at once: one of them does, and the others return when it has.
class CloseOnce {
 public:
  // Calls `close` in the first call of all. Where that is under way on this very thread, as in what
  // it calls back, returns at once. noexcept: others would wait for ever for one that threw.
  template <typename Close>
  void Run(const Close& close) noexcept {
    if (!Begin()) return;
    close();
    const MutexLock lock(&mutex_);
    closed_ = true;
    changed_.NotifyAll();  // Under the lock: who hears of it may destroy this.
  }
  // Returns when a Run() that another thread has begun is over.
  void Wait() {
    const MutexLock lock(&mutex_);
    while (IsClosedElsewhere(std::this_thread::get_id())) changed_.WaitAwhile(&mutex_);
  }

 private:
  // False when it was closed, here or by another thread.
  bool Begin() {
    const MutexLock lock(&mutex_);
    const std::thread::id self = std::this_thread::get_id();
    if (closer_ == std::thread::id()) {
      closer_ = self;
      return true;
    }
    // As long as the closing takes, which is bounded.
    while (IsClosedElsewhere(self)) changed_.WaitAwhile(&mutex_);
    return false;
  }
  // At this moment.
  bool IsClosedElsewhere(std::thread::id self) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !closed_ && closer_ != self && closer_ != std::thread::id();
  }

  Mutex mutex_;
  CondVar changed_;
  std::thread::id closer_ ABSL_GUARDED_BY(mutex_);  // None before.
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvferry
