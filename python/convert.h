#pragma once

// What the faces of the pools share: results as Python expects them.

#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pool/kv_layout.h"
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

// Token slots as engines keep them: a contiguous array or tensor of int32 or int64.
using SlotInput =
    nanobind::ndarray<nanobind::ro, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// They become int32 here, and not by nanobind, which would let large ones wrap around.
class SlotList {
 public:
  explicit SlotList(const SlotInput& array) {
    if (array.dtype() == nanobind::dtype<int32_t>()) {
      slots_ = {static_cast<const int32_t*>(array.data()), array.shape(0)};
      return;
    }
    if (array.dtype() != nanobind::dtype<int64_t>()) {
      throw StatusError(
          absl::InvalidArgumentError("slots are neither int32 nor int64; convert them first"));
    }
    const auto* values = static_cast<const int64_t*>(array.data());
    for (size_t i = 0; i < array.shape(0); ++i) narrowed_.push_back(Narrow(values[i]));
    slots_ = narrowed_;
  }
  SlotList(const SlotList&) = delete;
  SlotList& operator=(const SlotList&) = delete;

  // NOLINTNEXTLINE(google-explicit-constructor): it is handed to functions that take a span.
  operator std::span<const int32_t>() const { return slots_; }

 private:
  static int32_t Narrow(int64_t slot) {
    if (slot >= INT32_MIN && slot <= INT32_MAX) return static_cast<int32_t>(slot);
    throw StatusError(
        absl::OutOfRangeError(absl::StrCat("slot ", slot, " does not fit in 32 bits")));
  }

  std::vector<int32_t> narrowed_;
  std::span<const int32_t> slots_;
};

// An array in memory of ours, neither numpy's nor torch's: numpy knows no bfloat16, and both take
// it by DLPack.
using DlpackArray = nanobind::ndarray<nanobind::array_api>;

// DLPack's name for a dtype; fp8 goes as uint8, which every framework has.
inline nanobind::dlpack::dtype ToDlpack(DType dtype) {
  using Code = nanobind::dlpack::dtype_code;
  const Code code = DTypeBytes(dtype) == 1      ? Code::UInt
                    : dtype == DType::kBFloat16 ? Code::Bfloat
                                                : Code::Float;
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * DTypeBytes(dtype)), 1};
}

// Keeps `owner`, a shared_ptr, alive with an array.
template <typename Owner>
nanobind::capsule KeepAlive(Owner owner) {
  return nanobind::capsule(new Owner(std::move(owner)),
                           [](void* held) noexcept { delete static_cast<Owner*>(held); });
}

// What engines expect of alloc(): None when there is not enough, and nothing has changed.
template <typename T>
std::optional<T> OrNone(absl::StatusOr<T> result) {
  if (absl::IsResourceExhausted(result.status())) return std::nullopt;
  return Value(std::move(result));
}

}  // namespace kvferry
