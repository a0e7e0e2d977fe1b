#include "connector/lookup_handle.h"

namespace kvferry {

bool LookupHandle::done() const {
  const MutexLock lock(&mutex_);
  return done_;
}

absl::Status LookupHandle::status() const {
  const MutexLock lock(&mutex_);
  return status_;
}

absl::Status LookupHandle::Wait(Deadline deadline) const {
  const MutexLock lock(&mutex_);
  while (!done_) {
    if (!changed_.WaitUntil(&mutex_, deadline) && !done_ && Clock::now() >= deadline) {
      return absl::DeadlineExceededError("the lookup is still under way");
    }
  }
  return status_;
}

LookupResult LookupHandle::result() const {
  const MutexLock lock(&mutex_);
  return result_;
}

void LookupHandle::Cancel() {
  if (!done()) cancel_();
}

void LookupHandle::Finish(const absl::Status& status, LookupResult result) {
  {
    const MutexLock lock(&mutex_);
    done_ = true;
    status_ = status;
    result_ = std::move(result);
    changed_.NotifyAll();
  }
  if (const auto on_done = std::exchange(on_done_, nullptr)) on_done();
}

}  // namespace kvferry
