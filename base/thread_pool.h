#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace kvferry {

// A fixed number of threads that help their callers with work that splits into parts: copies,
// tables. The caller takes part, so that a pool of no workers is plain serial code. Idle workers
// sleep; right after a job, and callers for the last of it, they look for more as Linger says: work
// comes in bursts, and waking takes longer than many a job.
//
// ParallelFor() may be called by any number of threads at a time, also from within a part: each
// call is finished by its own caller if no worker is idle. The pool must outlive the calls, and a
// process that forks must not use it in the child.
class ThreadPool {
 public:
  // INVALID_ARGUMENT unless 0 <= num_workers <= kMaxWorkers, RESOURCE_EXHAUSTED when the system
  // refuses a thread.
  static absl::StatusOr<std::unique_ptr<ThreadPool>> Create(int64_t num_workers);
  // Waits for the workers to end.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int64_t num_workers() const { return static_cast<int64_t>(workers_.size()); }

  // Runs fn(0), ..., fn(parts - 1), each once, in any order and on any threads; returns when all
  // are done, and the caller sees what they wrote. Allocates nothing. `fn` must not throw. No part
  // runs for parts < 1.
  void ParallelFor(int64_t parts, absl::FunctionRef<void(int64_t part)> fn);

  static constexpr int64_t kMaxWorkers = 1024;

 private:
  // One call, on its caller's stack.
  struct Job {
    absl::FunctionRef<void(int64_t)> fn;
    const int64_t parts;
    std::atomic<int64_t> next_part = 0;  // Who counts it up runs it.
    std::atomic<int64_t> helpers = 0;    // Workers that hold a pointer to this job.
    Job* behind = nullptr;               // Under the pool's mutex, as changes of the above.
  };
  ThreadPool() = default;

  static void RunParts(Job* job);
  void Work();
  void Post(Job* job);
  void Finish(Job* job);
  Job* FindJob() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::vector<std::thread> workers_;  // Constant once made.
  Mutex mutex_;
  CondVar posted_;                               // Or stopping.
  CondVar finished_;                             // A job lost its last helper.
  Job* jobs_ ABSL_GUARDED_BY(mutex_) = nullptr;  // The newest first, linked by `behind`.
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<uint64_t> num_posted_ = 0;  // Changes under the mutex.
};

}  // namespace kvferry
