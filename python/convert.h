#pragma once

// What the faces of the pools share: results as Python expects them.

#include <nanobind/ndarray.h>

#include <algorithm>
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
#include "pool/token_view.h"
#include "python/pool_memory.h"
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

// Rows of numbers, in any arrangement of their dimensions.
using RowInput = nanobind::ndarray<nanobind::ro, nanobind::c_contig, nanobind::device::cpu>;

inline DType FromDlpack(const nanobind::dlpack::dtype& dtype) {
  // The formats that DLPack 1.1 added and nanobind does not name.
  constexpr uint8_t kFloat8E4M3Fn = 10, kFloat8E5M2 = 12;
  for (const DType known : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUint8}) {
    if (ToDlpack(known) == dtype) return known;
  }
  if (dtype.code == kFloat8E4M3Fn) return DType::kFloat8E4M3;
  if (dtype.code == kFloat8E5M2) return DType::kFloat8E5M2;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("rows have a dtype (DLPack code ", dtype.code, ", ", dtype.bits,
                   " bits) that is none of float32, float16, bfloat16, float8_e4m3fn, "
                   "float8_e5m2, uint8")));
}

// The same for a pool, which may lie on a device and then takes rows of that, too.
using PoolRowInput = nanobind::ndarray<nanobind::ro, nanobind::c_contig>;

// Any array whose values are those of num_rows rows, one after the other, for a pool in `memory`.
inline TokenView RowsOf(const PoolRowInput& array, int64_t num_rows, int64_t num_heads,
                        int64_t head_dim, const PoolMemory& memory) {
  CheckRowsReach({array.device_type(), array.device_id()}, memory);
  if (static_cast<int64_t>(array.size()) != num_rows * num_heads * head_dim) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("rows have ", array.size(), " values, but ", num_rows, " slots of ", num_heads,
                     " heads x ", head_dim, " have ", num_rows * num_heads * head_dim)));
  }
  // Read only: kvferry's views do not say so.
  auto* data = static_cast<std::byte*>(const_cast<void*>(array.data()));
  return TokenView::Packed(data, FromDlpack(array.dtype()), num_rows, num_heads, head_dim);
}

// rows[i] as rows of parts[i], which have num_heads and head_dim.
template <typename Part>
std::vector<TokenView> RowsFor(const std::vector<Part>& parts, const SlotInput& slots,
                               const std::vector<PoolRowInput>& rows, const PoolMemory& memory) {
  std::vector<TokenView> views;
  for (size_t i = 0; i < rows.size(); ++i) {
    // Too many are refused by those who take them; until then any shape will do.
    const Part& part = parts[std::min(i, parts.size() - 1)];
    views.push_back(RowsOf(rows[i], static_cast<int64_t>(slots.shape(0)), part.num_heads,
                           part.head_dim, memory));
  }
  return views;
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
