#pragma once

// What the faces of the pools share: results as Python expects them.

#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "python/status_error.h"

namespace kvferry {

using Int32Array = nanobind::ndarray<nanobind::numpy, int32_t, nanobind::ndim<1>>;

// A numpy array that owns the values.
inline Int32Array ToArray(std::vector<int32_t> values) {
  auto* owned = new std::vector<int32_t>(std::move(values));
  const nanobind::capsule owner(
      owned, [](void* pointer) noexcept { delete static_cast<std::vector<int32_t>*>(pointer); });
  return {owned->data(), {owned->size()}, owner};
}

// What engines expect of alloc(): None when there is not enough, and nothing has changed.
template <typename T>
std::optional<T> OrNone(absl::StatusOr<T> result) {
  if (absl::IsResourceExhausted(result.status())) return std::nullopt;
  return Value(std::move(result));
}

}  // namespace kvferry
