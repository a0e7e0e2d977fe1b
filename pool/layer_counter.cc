#include "pool/layer_counter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

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
  if (load != load_ || !failure_.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "layer counter: load ", load,
        " was given up: ", load != load_ ? "another one has begun" : failure_.message()));
  }
  ready_ = std::max(ready_, count);
  changed_.NotifyAll();
  return absl::OkStatus();
}

void LayerCounter::Fail(int64_t load, absl::Status why) {
  const MutexLock lock(&mutex_);
  if (load != load_ || !failure_.ok()) return;
  failure_ = std::move(why);
  changed_.NotifyAll();
}

absl::Status LayerCounter::WaitFor(int64_t layer, Deadline deadline) {
  if (layer < 0 || layer >= num_layers_) {
    return absl::OutOfRangeError(
        absl::StrCat("layer counter: layer ", layer, " but there are ", num_layers_));
  }
  const MutexLock lock(&mutex_);
  while (ready_ <= layer && failure_.ok()) {
    if (changed_.WaitUntil(&mutex_, deadline) || Clock::now() < deadline) continue;
    if (ready_ > layer || !failure_.ok()) break;
    return absl::DeadlineExceededError(absl::StrCat("layer counter: layer ", layer,
                                                    " was not loaded in time; ", ready_, " of ",
                                                    num_layers_, " are"));
  }
  return ready_ > layer ? absl::OkStatus() : failure_;
}

int64_t LayerCounter::last_load() const {
  const MutexLock lock(&mutex_);
  return load_;
}

int64_t LayerCounter::ready() const {
  const MutexLock lock(&mutex_);
  return ready_;
}

}  // namespace kvferry
