#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/unique_fd.h"

// How other threads reach a node's progress thread.

namespace kvferry {

// Wakes the progress thread from other threads.
class WakeFd {
 public:
  WakeFd() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), error_(fd_.valid() ? 0 : errno) {}
  int get() const { return fd_.get(); }
  // Why there is none: whoever asks has done other things since. 0: there is one.
  int error() const { return error_; }
  void Wake() const {
    const uint64_t one = 1;
    // Fails only when the counter is full, and then the thread is awake already.
    [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof(one));
  }
  void Drain() const {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof(count));
  }

 private:
  const UniqueFd fd_;
  const int error_;
};

// Closures from other threads, run in order on the progress thread.
class CommandQueue {
 public:
  using Command = std::function<void()>;

  void Post(Command command) {
    {
      MutexLock lock(&mutex_);
      commands_.push_back(std::move(command));
    }
    wake_.Wake();
  }
  bool Run() {
    std::vector<Command> commands;
    {
      MutexLock lock(&mutex_);
      commands.swap(commands_);
    }
    for (const Command& command : commands) command();
    return !commands.empty();
  }
  const WakeFd& wake() const { return wake_; }

 private:
  const WakeFd wake_;
  Mutex mutex_;
  std::vector<Command> commands_ ABSL_GUARDED_BY(mutex_);
};

// Lets one thread wait for another to have done something.
class Latch {
 public:
  void Open() {
    MutexLock lock(&mutex_);
    open_ = true;
    changed_.NotifyAll();
  }
  bool Wait(Deadline deadline) {
    MutexLock lock(&mutex_);
    while (!open_) {
      if (!changed_.WaitUntil(&mutex_, deadline) && !open_) return false;
    }
    return true;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvferry
