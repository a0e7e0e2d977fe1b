#pragma once

// What only CUDA's driver tells. Its library is not linked to: there is none where there is no GPU.

#include <cstddef>
#include <span>

#include "absl/status/statusor.h"

namespace kvferry {

// Whether this process has a context on the device: where it has none, making the device current
// would set one up. True where the driver does not tell.
bool HasContext(int device);

// The allocation that an address lies in, on a device or mapped there.
absl::StatusOr<std::span<const std::byte>> AllocationOf(const std::byte* address);

}  // namespace kvferry
