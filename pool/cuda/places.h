#pragma once

// Where bytes lie, as a device sees them.

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"

namespace kvferry {

enum class Place : uint8_t {
  kHost,          // The device cannot address it.
  kPartlyPinned,  // Nor does CUDA copy it: all of a range has to be pinned, or none.
  kPinnedAtEnds,  // CUDA copies it if there is no gap, and does not tell whether there is one.
  kPinned,        // Host memory that it can address.
  kDevice,
};

// Whoever pinned it. `device` is the current one. INVALID_ARGUMENT for memory of another device,
// and where these bytes begin on one and end on the host, or the other way round.
absl::StatusOr<Place> PlaceOf(std::span<const std::byte> bytes, int device);

}  // namespace kvferry
