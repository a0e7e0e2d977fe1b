#include "connector/store/task_thread.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "base/status.h"
#include "base/thread.h"

namespace kvferry {
namespace {

constexpr int64_t kWaitMs = 60000;  // An idle thread looks this often whether it missed a notice.

}  // namespace

absl::Status TaskThread::Start(const std::string& name) {
  KVFERRY_ASSIGN_OR_RETURN(thread_, StartThread(name, [this] { Run(); }));
  return absl::OkStatus();
}

absl::Status TaskThread::Post(const CallKey& call, Task task) {
  std::list<Waiting> one;
  one.push_back({call.id, std::move(task)});
  const MutexLock lock(&mutex_);
  if (stopped_) return absl::UnavailableError("store: the server is closing");
  std::list<Queues::iterator> turn(1);  // Before anything changes: there may be no memory.
  const auto [queue, is_new] = queues_.try_emplace(call.peer);
  turn.front() = queue;
  if (is_new) turns_.splice(turns_.end(), turn);
  queue->second.splice(queue->second.end(), one);
  changed_.NotifyAll();
  return absl::OkStatus();
}

void TaskThread::Drop(const CallKey& call) {
  std::list<Waiting> dropped;  // Destroyed outside of the lock.
  const MutexLock lock(&mutex_);
  const auto queue = queues_.find(call.peer);
  if (queue == queues_.end()) return;
  std::list<Waiting>& tasks = queue->second;
  const auto found = std::ranges::find(tasks, call.id, &Waiting::call);
  if (found == tasks.end()) return;
  dropped.splice(dropped.end(), tasks, found);
  if (!tasks.empty()) return;
  turns_.remove(queue);
  queues_.erase(queue);
}

void TaskThread::Stop() {
  Queues dropped;  // Destroyed outside of the lock.
  {
    const MutexLock lock(&mutex_);
    stopped_ = true;
    turns_.clear();
    dropped.swap(queues_);
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

TaskThread::Task TaskThread::TakeNext() {
  const Queues::iterator queue = turns_.front();
  Task task = std::move(queue->second.front().task);
  queue->second.pop_front();
  if (queue->second.empty()) {
    turns_.pop_front();
    queues_.erase(queue);
  } else {
    turns_.splice(turns_.end(), turns_, turns_.begin());
  }
  return task;
}

void TaskThread::Run() {
  while (true) {
    Task task;
    {
      const MutexLock lock(&mutex_);
      while (turns_.empty() && !stopped_) changed_.WaitUntil(&mutex_, DeadlineInMs(kWaitMs));
      if (stopped_) return;
      task = TakeNext();
    }
    try {
      task();
    } catch (const std::bad_alloc&) {
      continue;  // Nor was there memory to tell the caller, whose deadline ends the call.
    }
  }
}

}  // namespace kvferry
