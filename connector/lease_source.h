#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/config.h"
#include "connector/lease_table.h"
#include "transport/fetch_source.h"

namespace kvferry {

// A LeaseTable whose owner acts on leases as soon as they end, on the node's progress thread,
// instead of asking for them now and then.
class LeaseSource : public FetchSource {
 public:
  explicit LeaseSource(const Config& config) : leases_(config) {}

  absl::StatusOr<LeasedMemory> BeginTransfer(uint64_t lease_id, LeaseReader reader) override {
    return leases_.BeginTransfer(lease_id, reader);
  }
  int64_t ReadyLayers(uint64_t lease_id) override { return leases_.ReadyLayers(lease_id); }
  void EndTransfer(uint64_t lease_id, LeaseReader reader, const absl::Status& outcome) override {
    leases_.EndTransfer(lease_id, reader, outcome);
    Settle();
  }
  void OnReaderGone(uint64_t lease_id, LeaseReader reader, const absl::Status& why) override {
    leases_.OnReaderGone(lease_id, reader, why);
    Settle();
  }
  void NothingNeeded(uint64_t lease_id, LeaseReader reader) override {
    leases_.NothingNeeded(lease_id, reader);
    Settle();
  }
  Deadline Tick(Deadline now) override {
    const Deadline next = leases_.Tick(now);
    Settle();
    return next;
  }

 protected:
  // Takes the leases that have ended and does what that means.
  virtual void Settle() = 0;

  LeaseTable leases_;
};

}  // namespace kvferry
