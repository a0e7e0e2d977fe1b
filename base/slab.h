#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace kvferry {

// Anonymous, zeroed, page-aligned memory that takes no room until it is touched; unmapped with the
// last owner. RESOURCE_EXHAUSTED when the system refuses.
absl::StatusOr<std::shared_ptr<std::byte>> MapSlab(int64_t bytes);

}  // namespace kvferry
