#pragma once

#include <cstdlib>
#include <iostream>
#include <utility>

#include "absl/status/statusor.h"

namespace kvferry::bench {

// The value, or the end of the benchmark with what went wrong.
inline void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << std::endl;
  std::exit(1);
}

template <typename T>
T Must(absl::StatusOr<T> result) {
  Must(result.status());
  return *std::move(result);
}

}  // namespace kvferry::bench
