#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "base/config.h"
#include "transport/data_plane.h"

namespace kvferry {

// The UCX data plane: eager active messages and nothing else. Over TCP, UCX emulates remote memory
// access in software without checking addresses, and a peer that dies in the middle of one takes
// this process along; eager messages survive both (docs/decisions/0001-eager-active-messages.md).
absl::StatusOr<std::unique_ptr<AddressedPlane>> MakeUcxDataPlane(const Config& config);

}  // namespace kvferry
