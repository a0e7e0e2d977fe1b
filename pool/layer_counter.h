#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace kvferry {

// Which layers of a KV cache are loaded: a loader counts layers up while the engine already
// computes, and the reader of a layer waits for just that one. What SGLang calls the layer transfer
// counter. Thread-safe.
class LayerCounter {
 public:
  explicit LayerCounter(int64_t num_layers) : num_layers_(num_layers), ready_(num_layers) {}

  // A load begins: no layer is ready. FAILED_PRECONDITION while another load is under way.
  absl::Status Begin();
  // Layers [0, count) are ready; a smaller count than before changes nothing. OUT_OF_RANGE beyond
  // the number of layers.
  absl::Status Ready(int64_t count);
  // The load ends with an error, which waiters for layers that are not ready get at once, and later
  // ones until the next Begin().
  void Fail(absl::Status why);

  // OK when `layer` is ready; between loads every layer is. DEADLINE_EXCEEDED naming the layer and
  // how far the load is, OUT_OF_RANGE when there is no such layer, or the load's own error.
  absl::Status WaitFor(int64_t layer, Deadline deadline);

  int64_t num_layers() const { return num_layers_; }
  int64_t ready() const;

 private:
  const int64_t num_layers_;
  mutable Mutex mutex_;
  CondVar changed_;
  int64_t ready_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
