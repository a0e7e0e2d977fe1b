#pragma once

#include <cstdint>
#include <vector>

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

  // A load begins: no layer is ready. Gives its number. FAILED_PRECONDITION naming the other one
  // while another load is under way.
  absl::StatusOr<int64_t> Begin();
  // Of that load layers [0, count) are ready; a smaller count than before changes nothing.
  // OUT_OF_RANGE beyond the number of layers; INVALID_ARGUMENT for a number that Begin() has not
  // given; FAILED_PRECONDITION, and its loader is to stop, where
  // it has failed, or another one has begun since.
  absl::Status Ready(int64_t load, int64_t count);
  // That load ends with an error, which waiters for layers that are not ready get, also where the
  // next load begins before they have looked, and later ones until then. Nothing happens where it
  // has ended.
  void Fail(int64_t load, absl::Status why);

  // OK when `layer` is ready in the load that is under way at the call; between loads every layer
  // is. DEADLINE_EXCEEDED naming the layer and how far the load is, OUT_OF_RANGE when there is no
  // such layer, or the load's own error.
  absl::Status WaitFor(int64_t layer, Deadline deadline);

  // What Begin() gave last, 0 before: if its loader is gone, somebody else can Fail() it.
  int64_t last_load() const;
  int64_t num_layers() const { return num_layers_; }
  int64_t ready() const;
  // Calls of WaitFor() that wait.
  int64_t num_waiting() const;

 private:
  struct Waiter {
    int64_t layer;
    bool is_told = false;
    absl::Status status{};
  };
  // Tells those who wait for what has just come about: by the time they look it may be another
  // load's turn.
  void TellWaiters() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t num_layers_;
  mutable Mutex mutex_;
  CondVar told_;
  std::vector<Waiter*> waiters_ ABSL_GUARDED_BY(mutex_);
  int64_t ready_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  int64_t load_ ABSL_GUARDED_BY(mutex_) = 0;  // The last one's number.
};

}  // namespace kvferry
