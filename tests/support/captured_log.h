#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace kvferry {

// What kvferry::Log() said since this object was made. Make it before the endpoints whose logs it
// is to hold: loggers do not like new sinks while other threads log.
class CapturedLog {
 public:
  CapturedLog();
  std::vector<std::string> lines() const;
  // A line that holds all of `parts`.
  bool Has(std::vector<absl::string_view> parts) const;
  std::string ToString() const;

 private:
  size_t first_;
};

}  // namespace kvferry
