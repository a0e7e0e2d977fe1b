#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvferry {

// INVALID_ARGUMENT "<of>: <name> is <value> but must lie in [<min>, <max>]" unless it does.
absl::Status CheckRange(absl::string_view of, absl::string_view name, int64_t value, int64_t min,
                        int64_t max);

}  // namespace kvferry
