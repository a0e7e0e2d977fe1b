#pragma once

#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/ending.h"

namespace kvferry {

// One push under way. Made by PrefillEndpoint::Push; all methods are thread-safe.
//
// Its pages are leased until done(): they keep their bytes until then, and are the caller's again
// from then on, whatever the status. PrefillEndpoint::TakeEnded() reports the lease too. OK: the
// decode side has every byte.
class PushHandle : public Ending {
 public:
  // For LayerReady(), AllLayersReady() and Release().
  uint64_t lease_id() const { return lease_id_; }

  // Asks for the end, on both sides; done() follows shortly, with CANCELLED unless the push ended
  // before.
  void Cancel();

  // For the endpoint, which ends every push before it is gone.
  explicit PushHandle(uint64_t lease_id) : Ending("the push"), lease_id_(lease_id) {}
  void SetCancel(std::function<void()> cancel);
  void Finish(const absl::Status& status);

 private:
  const uint64_t lease_id_;

  std::function<void()> cancel_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
