#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace kvferry {

// Threads go in and out of it until it is closed; whoever closes it waits for those inside, so that
// afterwards none is and none will be. They must not stay long: here, for the copy of one chunk.
// Thread-safe.
class Gate {
 public:
  // Inside for as long as it lives, if it is `open`.
  class Pass {
   public:
    explicit Pass(Gate* gate) : gate_(gate), open_(gate->Enter()) {}
    ~Pass() {
      if (open_) gate_->Leave();
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    bool open() const { return open_; }

   private:
    Gate* const gate_;
    const bool open_;
  };

  void Close() {
    MutexLock lock(&mutex_);
    closed_ = true;
    // No bound but that of a copy would do: who asks is about to give the memory to another.
    while (inside_ > 0) changed_.WaitAwhile(&mutex_);
  }

 private:
  bool Enter() {
    MutexLock lock(&mutex_);
    inside_ += closed_ ? 0 : 1;
    return !closed_;
  }
  void Leave() {
    MutexLock lock(&mutex_);
    --inside_;
    if (closed_) changed_.NotifyAll();
  }

  Mutex mutex_;
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t inside_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvferry
