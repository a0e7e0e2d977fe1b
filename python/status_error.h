#pragma once

// How a Status becomes a Python exception: thrown here, translated in bindings.cc.

#include <stdexcept>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/utf8.h"

namespace kvferry {

class StatusError : public std::runtime_error {
 public:
  explicit StatusError(const absl::Status& status)
      : std::runtime_error(ValidUtf8(status.message())), code_(status.code()) {}
  absl::StatusCode code() const { return code_; }

 private:
  absl::StatusCode code_;
};

inline void Check(const absl::Status& status) {
  if (!status.ok()) throw StatusError(status);
}
template <typename T>
T Value(absl::StatusOr<T> result) {
  Check(result.status());
  return std::move(result).value();
}

}  // namespace kvferry
