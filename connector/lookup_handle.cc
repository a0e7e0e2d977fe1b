#include "connector/lookup_handle.h"

namespace kvferry {

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
    result_ = std::move(result);
    End(status);
  }
  if (const auto on_done = std::exchange(on_done_, nullptr)) on_done();
}

}  // namespace kvferry
