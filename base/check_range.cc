#include "base/check_range.h"

#include "absl/strings/str_cat.h"

namespace kvferry {

absl::Status CheckRange(absl::string_view of, absl::string_view name, int64_t value, int64_t min,
                        int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(of, ": ", name, " is ", value, " but must lie in [", min, ", ", max, "]"));
}

}  // namespace kvferry
