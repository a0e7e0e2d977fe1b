#include "connector/push_handle.h"

namespace kvferry {

bool PushHandle::done() const {
  const MutexLock lock(&mutex_);
  return done_;
}

absl::Status PushHandle::status() const {
  const MutexLock lock(&mutex_);
  return status_;
}

absl::Status PushHandle::Wait(Deadline deadline) const {
  const MutexLock lock(&mutex_);
  while (!done_) {
    if (!changed_.WaitUntil(&mutex_, deadline) && !done_ && Clock::now() >= deadline) {
      return absl::DeadlineExceededError("the push is still under way");
    }
  }
  return status_;
}

void PushHandle::Cancel() {
  // Under the lock, so that the endpoint, which has to finish this first, is still there.
  const MutexLock lock(&mutex_);
  if (!done_ && cancel_) cancel_();
}

void PushHandle::SetCancel(std::function<void()> cancel) {
  const MutexLock lock(&mutex_);
  cancel_ = std::move(cancel);
}

void PushHandle::Finish(const absl::Status& status) {
  const MutexLock lock(&mutex_);
  done_ = true;
  status_ = status;
  changed_.NotifyAll();
}

}  // namespace kvferry
