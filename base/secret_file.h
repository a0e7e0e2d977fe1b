#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvferry {

constexpr int64_t kMaxSecretFileBytes = 4096;

// What the file holds, for an option by that name. INVALID_ARGUMENT, with both: it cannot be read,
// is no regular file (what is in a pipe can be read once only, and may be waited for without end),
// or is longer than any key or password.
absl::StatusOr<std::string> ReadSecretFile(absl::string_view option, const std::string& path);

}  // namespace kvferry
