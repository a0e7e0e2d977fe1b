#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace kvferry {

// One push under way. Made by PrefillEndpoint::Push; all methods are thread-safe.
//
// Its pages are leased until done(): they keep their bytes until then, and are the caller's again
// from then on, whatever the status. PrefillEndpoint::TakeEnded() reports the lease too.
class PushHandle {
 public:
  // For LayerReady(), AllLayersReady() and Release().
  uint64_t lease_id() const { return lease_id_; }

  bool done() const;
  // OK: the decode side has every byte. While under way: UNAVAILABLE "still under way"; ask done()
  // first.
  absl::Status status() const;
  // Waits until done() and returns status(); DEADLINE_EXCEEDED when `deadline` comes first: the
  // push then goes on, to its own deadline.
  absl::Status Wait(Deadline deadline) const;
  // Asks for the end, on both sides; done() follows shortly, with CANCELLED unless the push ended
  // before.
  void Cancel();

  // For the endpoint, which ends every push before it is gone.
  explicit PushHandle(uint64_t lease_id) : lease_id_(lease_id) {}
  void SetCancel(std::function<void()> cancel);
  void Finish(const absl::Status& status);

 private:
  const uint64_t lease_id_;

  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::function<void()> cancel_ ABSL_GUARDED_BY(mutex_);
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_) =
      absl::UnavailableError("the push is still under way");
};

}  // namespace kvferry
