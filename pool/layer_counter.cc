#include "pool/layer_counter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/interrupt.h"

namespace kvferry {

absl::StatusOr<int64_t> LayerCounter::Begin() {
  const MutexLock lock(&mutex_);
  if (ready_ < num_layers_ && failure_.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer counter: load ", load_, " is under way (", ready_, " of ", num_layers_,
                     " layers ready); whoever has lost it can still make it fail"));
  }
  ready_ = 0;
  failure_ = absl::OkStatus();
  return ++load_;
}

absl::Status LayerCounter::Ready(int64_t load, int64_t count) {
  if (count < 0 || count > num_layers_) {
    return absl::OutOfRangeError(
        absl::StrCat("layer counter: ", count, " layers but there are ", num_layers_));
  }
  const MutexLock lock(&mutex_);
  if (load < 1 || load > load_) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer counter: load ", load, " has not begun; the last that has is ", load_));
  }
  if (load != load_ || !failure_.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "layer counter: load ", load,
        " was given up: ", load != load_ ? "another one has begun" : failure_.message()));
  }
  ready_ = std::max(ready_, count);
  TellWaiters();
  return absl::OkStatus();
}

void LayerCounter::Fail(int64_t load, absl::Status why) {
  const MutexLock lock(&mutex_);
  if (load != load_ || ready_ == num_layers_ || !failure_.ok()) return;
  failure_ = std::move(why);
  TellWaiters();
}

void LayerCounter::TellWaiters() {
  std::erase_if(waiters_, [&](Waiter* waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    waiter->is_told = ready_ > waiter->layer || !failure_.ok();
    if (ready_ <= waiter->layer) waiter->status = failure_;
    return waiter->is_told;
  });
  told_.NotifyAll();
}

absl::Status LayerCounter::WaitFor(int64_t layer, Deadline deadline) {
  if (layer < 0 || layer >= num_layers_) {
    return absl::OutOfRangeError(
        absl::StrCat("layer counter: layer ", layer, " but there are ", num_layers_));
  }
  const MutexLock lock(&mutex_);
  if (ready_ > layer) return absl::OkStatus();
  if (!failure_.ok()) return failure_;
  Waiter self{layer};
  waiters_.push_back(&self);
  while (!self.is_told && WaitOrLook(told_, &mutex_, deadline)) {
  }
  if (self.is_told) return self.status;
  std::erase(waiters_, &self);
  return absl::DeadlineExceededError(absl::StrCat("layer counter: layer ", layer,
                                                  " was not loaded in time; ", ready_, " of ",
                                                  num_layers_, " are"));
}

int64_t LayerCounter::last_load() const {
  const MutexLock lock(&mutex_);
  return load_;
}

int64_t LayerCounter::num_waiting() const {
  const MutexLock lock(&mutex_);
  return static_cast<int64_t>(waiters_.size());
}

int64_t LayerCounter::ready() const {
  const MutexLock lock(&mutex_);
  return ready_;
}

}  // namespace kvferry
