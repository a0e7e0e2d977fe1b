#pragma once

// What the faces of the pools share: results as Python expects them.

#include <nanobind/ndarray.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pool/kv_layout.h"
#include "pool/kv_pool.h"
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

// The numbers of whatever has Metrics(), by name.
template <typename Endpoint>
nanobind::dict MetricsDict(const Endpoint& endpoint) {
  nanobind::dict metrics;
  for (const auto& [name, value] : endpoint.Metrics()) metrics[name.c_str()] = value;
  return metrics;
}

// Integers as engines keep them: a contiguous array or tensor of int32 or int64.
template <typename... Shape>
using IntegerInput =
    nanobind::ndarray<nanobind::ro, Shape..., nanobind::c_contig, nanobind::device::cpu>;
using SlotInput = IntegerInput<nanobind::ndim<1>>;

// They are converted here, and not by nanobind, which would let large ones wrap around and cut fractions off; and
// copied, since what is called checks them before it uses them, while their owner may change them.
template <typename T>
class IntegerList {
 public:
  template <typename Input>
  explicit IntegerList(const Input& array) {
    if (array.dtype() == nanobind::dtype<int32_t>()) {
      Take(static_cast<const int32_t*>(array.data()), array.size());
    } else if (array.dtype() == nanobind::dtype<int64_t>()) {
      Take(static_cast<const int64_t*>(array.data()), array.size());
    } else {
      throw StatusError(absl::InvalidArgumentError(
          "an array of integers is neither int32 nor int64; convert it first"));
    }
  }
  IntegerList(const IntegerList&) = delete;
  IntegerList& operator=(const IntegerList&) = delete;

  // NOLINTNEXTLINE(google-explicit-constructor): it is handed to functions that take a span.
  operator std::span<const T>() const { return values_; }

 private:
  template <typename Given>
  void Take(const Given* given, size_t count) {
    values_.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const Given value = given[i];  // Once: it may be another one next time.
      if (value < std::numeric_limits<T>::min() || value > std::numeric_limits<T>::max()) {
        throw StatusError(
            absl::OutOfRangeError(absl::StrCat("slot ", value, " does not fit in 32 bits")));
      }
      values_.push_back(static_cast<T>(value));
    }
  }

  std::vector<T> values_;
};
using SlotList = IntegerList<int32_t>;
using CountList = IntegerList<int64_t>;

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

// Keeps a copy of `owner` alive with an array.
template <typename Owner>
nanobind::capsule KeepAlive(Owner owner) {
  return nanobind::capsule(new Owner(std::move(owner)),
                           [](void* held) noexcept { delete static_cast<Owner*>(held); });
}

// The exception that a failed status would be raised as, None for OK. Defined in bindings.cc.
nanobind::object ExceptionOf(const absl::Status& status);

// What engines expect of alloc(): None when there is not enough, and nothing has changed.
template <typename T>
std::optional<T> OrNone(absl::StatusOr<T> result) {
  if (absl::IsResourceExhausted(result.status())) return std::nullopt;
  return Value(std::move(result));
}

inline std::optional<Int32Array> ArrayOrNone(absl::StatusOr<std::vector<int32_t>> slots) {
  std::optional<std::vector<int32_t>> got = OrNone(std::move(slots));
  if (!got) return std::nullopt;
  return ToArray(*std::move(got));
}

// (address, bytes, item bytes) of each buffer.
inline std::vector<std::tuple<uintptr_t, int64_t, int64_t>> ToTuples(
    std::span<const BufferInfo> buffers) {
  std::vector<std::tuple<uintptr_t, int64_t, int64_t>> tuples;
  for (const BufferInfo& info : buffers) {
    tuples.emplace_back(reinterpret_cast<uintptr_t>(info.address), info.bytes, info.item_bytes);
  }
  return tuples;
}

}  // namespace kvferry
