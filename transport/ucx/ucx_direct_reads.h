#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "base/config.h"
#include "transport/direct_reads.h"

namespace kvferry {

// One-sided reads over the transports that config.direct_tls names, by a context and a worker of
// their own, so that the worker that speaks TCP takes no remote memory access at all. UCX is told
// not to emulate any: where the transports have none, probes fail and nothing is read.
//
// FAILED_PRECONDITION before UCX 1.22, which cannot be told so; else what UCX says.
absl::StatusOr<std::unique_ptr<DirectReads>> MakeUcxDirectReads(
    const Config& config, const DirectReads::Readable& readable);

}  // namespace kvferry
