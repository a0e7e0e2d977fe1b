#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "connector/attached_node.h"
#include "connector/lease_table.h"
#include "transport/calls.h"
#include "transport/fields.h"

namespace kvferry {

// What a decode side calls at a prefill side whose leases it will come for, but not yet
// (docs/wire_protocol.md, Functions).
namespace keep_call {
inline constexpr char kKeep[] = "keep";
inline constexpr char kLeases[] = "leases";
inline constexpr char kKept[] = "kept";
inline constexpr int64_t kMaxLeases = 4096;  // Of a call.

// At most kMaxLeases ids.
Fields ArgsFor(absl::Span<const uint64_t> lease_ids);
// INVALID_ARGUMENT for what ArgsFor() does not make.
absl::StatusOr<std::vector<uint64_t>> LeasesOf(const Fields& args);
}  // namespace keep_call

// Serves that call: leases that are asked to be kept last lease_ms from then on. Thread-safe.
class LeaseKeeper : public CallHandler {
 public:
  // `leases` outlives this.
  LeaseKeeper(LeaseTable* leases, int64_t lease_ms) : leases_(leases), lease_ms_(lease_ms) {}

  // As AttachedNode's.
  void Attach(Node* node) { node_.Attach(node); }

  // CallHandler.
  void OnCall(const CallKey& call, const std::string& function, const Fields& args,
              Deadline deadline) override;
  void OnCallDropped(const CallKey& /*call*/) override {}
  bool MayWait(const std::string& /*function*/) const override { return false; }

 private:
  absl::StatusOr<Fields> Keep(const Fields& args);

  LeaseTable* const leases_;
  const int64_t lease_ms_;
  AttachedNode node_;
};

}  // namespace kvferry
