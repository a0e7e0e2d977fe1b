#include "connector/store/task_thread.h"

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

absl::Status TaskThread::Post(const PeerKey& peer, Task task) {
  std::list<Task> one;
  one.push_back(std::move(task));
  const MutexLock lock(&mutex_);
  if (stopped_) return absl::UnavailableError("store: the server is closing");
  std::list<Queues::iterator> turn(1);  // Before anything changes: there may be no memory.
  const auto [queue, is_new] = queues_.try_emplace(peer);
  turn.front() = queue;
  if (is_new) turns_.splice(turns_.end(), turn);
  queue->second.splice(queue->second.end(), one);
  ++num_waiting_;
  changed_.NotifyAll();
  return absl::OkStatus();
}

void TaskThread::Stop() {
  Queues dropped;  // Destroyed outside of the lock.
  {
    const MutexLock lock(&mutex_);
    stopped_ = true;
    turns_.clear();
    dropped.swap(queues_);
    num_waiting_ = 0;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

TaskThread::Task TaskThread::TakeNext() {
  const Queues::iterator queue = turns_.front();
  Task task = std::move(queue->second.front());
  queue->second.pop_front();
  --num_waiting_;
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
