#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "transport/calls.h"
#include "transport/control_plane.h"

namespace kvferry {

// A thread that does one thing after another for calls: of each peer in the order in which they
// came, and one of each in turn, so that who wants much done does not keep others waiting.
// Thread-safe. Whoever posts bounds how many wait.
class TaskThread {
 public:
  using Task = std::function<void()>;

  TaskThread() = default;
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;
  ~TaskThread() { Stop(); }

  absl::Status Start(const std::string& name);
  // UNAVAILABLE when it was stopped: the task is gone then. Tasks posted before the start wait for
  // it.
  absl::Status Post(const CallKey& call, Task task);
  // What waits for that call, and what it holds, is gone; what is being done goes on. Steps are as
  // many as tasks of the peer wait before it.
  void Drop(const CallKey& call);
  // Finishes what it is doing; what waits is dropped, and what that holds.
  void Stop();

 private:
  struct Waiting {
    uint64_t call;
    Task task;
  };
  using Queues = std::map<PeerKey, std::list<Waiting>>;

  void Run();
  // The first one of the peer whose turn it is, which is the last to have another.
  Task TakeNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  CondVar changed_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  Queues queues_ ABSL_GUARDED_BY(mutex_);  // None is empty.
  std::list<Queues::iterator> turns_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace kvferry
