#include "base/thread_pool.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check_range.h"
#include "base/linger.h"
#include "base/status.h"
#include "base/thread.h"

namespace kvferry {
namespace {

// CondVar has no wait without a deadline, and needs none for this: who wakes early looks again and
// sleeps on, which once a minute costs nothing.
Deadline LongWait() { return DeadlineInMs(60000); }

}  // namespace

absl::StatusOr<std::unique_ptr<ThreadPool>> ThreadPool::Create(int64_t num_workers) {
  KVFERRY_RETURN_IF_ERROR(CheckRange("thread pool", "num_workers", num_workers, 0, kMaxWorkers));
  std::unique_ptr<ThreadPool> pool(new ThreadPool);
  pool->workers_.reserve(num_workers);
  for (int64_t i = 0; i < num_workers; ++i) {
    KVFERRY_ASSIGN_OR_RETURN(
        std::thread worker,
        StartThread(absl::StrCat("thread pool, thread ", i + 1, " of ", num_workers),
                    [raw = pool.get()] { raw->Work(); }));
    pool->workers_.push_back(std::move(worker));
  }
  return pool;
}

ThreadPool::~ThreadPool() {
  {
    const MutexLock lock(&mutex_);
    stopping_ = true;
  }
  posted_.NotifyAll();
  for (std::thread& worker : workers_) worker.join();
}

// ---------------------------------------------------------------- callers

void ThreadPool::ParallelFor(int64_t parts, absl::FunctionRef<void(int64_t)> fn) {
  Job job{.fn = fn, .parts = parts};
  const bool share = parts > 1 && !workers_.empty();
  if (share) Post(&job);
  RunParts(&job);
  if (share) Finish(&job);
}

void ThreadPool::RunParts(Job* job) {
  // Relaxed: what the parts wrote is handed over by the mutex in Work() and Finish().
  for (;;) {
    const int64_t part = job->next_part.fetch_add(1, std::memory_order_relaxed);
    if (part >= job->parts) return;
    job->fn(part);
  }
}

void ThreadPool::Post(Job* job) {
  {
    const MutexLock lock(&mutex_);
    job->behind = jobs_;
    jobs_ = job;
    num_posted_.fetch_add(1, std::memory_order_relaxed);
  }
  posted_.NotifyAll();
}

// After RunParts(): every part has been claimed, and the helpers run the last of them.
void ThreadPool::Finish(Job* job) {
  thread_local Linger linger;
  const auto no_helpers = [job] { return job->helpers.load(std::memory_order_acquire) == 0; };
  {
    const MutexLock lock(&mutex_);
    Job** link = &jobs_;
    while (*link != job) link = &(*link)->behind;
    *link = job->behind;
  }
  if (linger.Await(no_helpers)) return;
  const MutexLock lock(&mutex_);
  while (!no_helpers()) finished_.WaitUntil(&mutex_, LongWait());
}

// ---------------------------------------------------------------- workers

ThreadPool::Job* ThreadPool::FindJob() const {
  for (Job* job = jobs_; job != nullptr; job = job->behind) {
    if (job->next_part.load(std::memory_order_relaxed) < job->parts) return job;
  }
  return nullptr;
}

void ThreadPool::Work() {
  Linger linger;
  bool worked = false;
  mutex_.Lock();
  while (!stopping_) {
    Job* const job = FindJob();
    if (job == nullptr && std::exchange(worked, false)) {
      const uint64_t seen = num_posted_;
      mutex_.Unlock();
      linger.Await([&] { return num_posted_.load(std::memory_order_relaxed) != seen; });
      mutex_.Lock();
    } else if (job == nullptr) {
      posted_.WaitUntil(&mutex_, LongWait());
    } else {
      job->helpers.fetch_add(1, std::memory_order_relaxed);
      mutex_.Unlock();
      RunParts(job);
      worked = true;
      mutex_.Lock();
      // Whoever lingers for this may be gone with the job at once.
      const bool last = job->helpers.fetch_sub(1, std::memory_order_release) == 1;
      if (last) finished_.NotifyAll();
    }
  }
  mutex_.Unlock();
}

}  // namespace kvferry
