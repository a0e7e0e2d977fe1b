#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace kvferry {

// Which layers of a KV cache are loaded: a loader counts layers up while the engine already
// computes, and the reader of a layer waits for just that one. What SGLang calls the layer transfer
// counter. Thread-safe.
class LayerCounter {
 public:
  explicit LayerCounter(int64_t num_layers) : num_layers_(num_layers), ready_(num_layers) {}

  // A load begins: no layer is ready. Gives its number. FAILED_PRECONDITION naming the other one while
  // another load is under way.
  absl::StatusOr<int64_t> Begin();
  // Of that load layers [0, count) are ready; a smaller count than before changes nothing.
  // OUT_OF_RANGE beyond the number of layers; FAILED_PRECONDITION, and its loader is to stop, where it
  // has failed, or another one has begun since.
  absl::Status Ready(int64_t load, int64_t count);
  // That load ends with an error, which waiters for layers that are not ready get at once, and later
  // ones until the next Begin(). Nothing happens where it has ended.
  void Fail(int64_t load, absl::Status why);

  // OK when `layer` is ready; between loads every layer is. DEADLINE_EXCEEDED naming the layer and
  // how far the load is, OUT_OF_RANGE when there is no such layer, or the load's own error.
  absl::Status WaitFor(int64_t layer, Deadline deadline);

  // What Begin() gave last, 0 before: if its loader is gone, somebody else can Fail() it.
  int64_t last_load() const;
  int64_t num_layers() const { return num_layers_; }
  int64_t ready() const;

 private:
  const int64_t num_layers_;
  mutable Mutex mutex_;
  CondVar changed_;
  int64_t ready_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  int64_t load_ ABSL_GUARDED_BY(mutex_) = 0;  // The last one's number.
};

}  // namespace kvferry
