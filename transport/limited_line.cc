#include "transport/limited_line.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvferry {

std::optional<std::string> LimitedLine::Next(Deadline now) {
  if (now >= again_at_) {
    said_ = 0;
    again_at_ = now + std::chrono::seconds(30);
  }
  if (said_ == most_) {
    ++unsaid_;
    return std::nullopt;
  }
  ++said_;
  const int64_t unsaid = std::exchange(unsaid_, 0);
  return unsaid == 0 ? "" : absl::StrCat(" (", unsaid, " more since the last such line)");
}

}  // namespace kvferry
