#include "connector/push_handle.h"

namespace kvferry {

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
  End(status);
}

}  // namespace kvferry
