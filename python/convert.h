#pragma once

// What the faces of the pools share: results as Python expects them.

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pool/kv_layout.h"
#include "pool/kv_pool.h"
#include "python/gil.h"
#include "python/given_array.h"
#include "python/status_error.h"

namespace kvferry {

// OUT_OF_RANGE naming the argument and its limit unless `index` lies in [0, end).
inline void CheckIndex(const char* name, int64_t index, int64_t end) {
  if (index >= 0 && index < end) return;
  throw StatusError(absl::OutOfRangeError(
      absl::StrCat(name, " is ", index, " but must lie in [0, ", std::max<int64_t>(end, 0), ")")));
}

// Keeps a copy of `owner` alive with an array.
template <typename Owner>
nanobind::capsule KeepAlive(Owner owner) {
  auto held = std::make_unique<Owner>(std::move(owner));
  nanobind::capsule capsule(held.get(),
                            [](void* object) noexcept { delete static_cast<Owner*>(object); });
  held.release();  // Only now: making the capsule may fail.
  return capsule;
}

template <typename T, int ndim = 1>
using NumpyArray = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<ndim>>;
using Int32Array = NumpyArray<int32_t>;

// Values of a numpy array to be, which owns them from then on. They begin with any value.
template <typename T>
class OwnedArray {
 public:
  explicit OwnedArray(size_t size)
      : values_(std::make_unique_for_overwrite<T[]>(size)), size_(size) {}

  std::span<T> values() const { return {values_.get(), size_}; }
  template <int ndim>
  NumpyArray<T, ndim> ToNumpy(const size_t (&shape)[ndim]) && {
    T* const data = values_.get();
    return NumpyArray<T, ndim>(data, ndim, shape, KeepAlive(std::move(values_)));
  }

 private:
  std::unique_ptr<T[]> values_;
  size_t size_;
};

// A numpy array that owns the values of a vector, seen as numbers of type T.
template <typename T, typename Held>
NumpyArray<T> ToNumpy(std::vector<Held> values) {
  static_assert(sizeof(T) == sizeof(Held));
  auto* const data = reinterpret_cast<T*>(values.data());
  const size_t size = values.size();
  return NumpyArray<T>(data, {size}, KeepAlive(std::move(values)));
}
inline Int32Array ToArray(std::vector<int32_t> values) {
  return ToNumpy<int32_t>(std::move(values));
}

// How long the free runs of a PageAllocator are, which is pages(pool).
template <typename Pool, typename Pages>
void DefineFreeRuns(nanobind::class_<Pool>& pool, const std::string& prefix, Pages pages) {
  pool.def_prop_ro((prefix + "num_free_runs").c_str(),
                   [pages](const Pool& self) { return pages(self).num_free_runs(); });
  pool.def_prop_ro((prefix + "longest_free_run").c_str(),
                   [pages](const Pool& self) { return pages(self).longest_free_run(); },
                   "In pages.");
  pool.def((prefix + "free_run_histogram").c_str(),
           [pages](const Pool& self) { return pages(self).free_run_histogram(); },
           "Element i counts the free runs of [2^i, 2^(i + 1)) pages.");
}

// == of values. What is no T is just another thing; equal ones hash alike, by text(value), which
// needs not tell all others apart.
template <typename T, typename Text>
void DefineEquality(nanobind::class_<T>& type, Text text) {
  type.def(
          "__eq__", [](const T& a, const T& b) { return a == b; }, nanobind::is_operator())
      .def("__hash__", [text](const T& self) { return std::hash<std::string>()(text(self)); });
}

// What read() gives: the Metrics() of an object. It is let go of before Python's garbage collection
// may run, which may close it.
template <typename Read>
nanobind::dict MetricsDict(const Read& read) {
  const std::vector<std::pair<std::string, int64_t>> metrics = read();
  nanobind::dict dict;
  for (const auto& [name, value] : metrics) dict[name.c_str()] = value;
  return dict;
}

// Integers as engines keep them: an array or tensor of int32 or int64, or where it says so a list.
template <typename... Shape>
using IntegerInput = GivenArray<nanobind::ro, Shape..., nanobind::device::cpu>;
using SlotInput = IntegerInput<nanobind::ndim<1>>;
using SlotsInput = IntegerInput<>;  // In any number of dimensions, the last index running fastest.
using IntegersInput = std::variant<SlotInput, std::vector<int64_t>>;

// They are converted here, and not by nanobind, which would let large ones wrap around and cut
// fractions off; and copied, since what is called checks them before it uses them, while their
// owner may change them. `what` each of them is, for errors.
template <typename T>
class IntegerList {
 public:
  template <typename... Args>
  explicit IntegerList(const GivenArray<Args...>& array, const char* what = "slot") : what_(what) {
    values_.resize(array.size());
    T* to = values_.data();
    const bool is_empty = array.size() == 0;  // Also where a dimension is huge, and another one 0.
    if (array.dtype() == nanobind::dtype<int32_t>()) {
      if (!is_empty) Take(array, 0, static_cast<const int32_t*>(array.data()), to);
    } else if (array.dtype() == nanobind::dtype<int64_t>()) {
      if (!is_empty) Take(array, 0, static_cast<const int64_t*>(array.data()), to);
    } else {
      throw StatusError(absl::InvalidArgumentError(absl::StrCat(
          "an array of integers (", what, "s) is neither int32 nor int64; convert it first")));
    }
  }
  explicit IntegerList(const IntegersInput& given, const char* what = "slot") : what_(what) {
    if (const auto* array = std::get_if<SlotInput>(&given)) {
      values_ = IntegerList(*array, what).values_;
    } else {
      const auto& list = std::get<std::vector<int64_t>>(given);
      values_.resize(list.size());
      T* to = values_.data();
      TakeRow(list.data(), list.size(), 1, to);
    }
  }
  IntegerList(const IntegerList&) = delete;
  IntegerList& operator=(const IntegerList&) = delete;

  // NOLINTNEXTLINE(google-explicit-constructor): it is handed to functions that take a span.
  operator std::span<const T>() const { return values_; }

 private:
  // What lies from `at` on in the dimensions from `dim` on, to where `to` points, which moves on.
  template <typename Given, typename Array>
  void Take(const Array& array, size_t dim, const Given* at, T*& to) {
    if (array.ndim() == 0) return TakeRow(at, 1, 1, to);
    const size_t size = array.shape(dim);
    const int64_t stride = array.stride(dim);
    if (dim + 1 == array.ndim()) return TakeRow(at, size, stride, to);
    for (size_t i = 0; i < size; ++i) {
      Take(array, dim + 1, at + static_cast<int64_t>(i) * stride, to);
    }
  }
  // Each is read once: it may be another one next time. They are checked behind the loop, which
  // holds up no call then: a batch may free 10^5 slots.
  template <typename Given>
  void TakeRow(const Given* at, size_t size, int64_t stride, T*& to) {
    Given lowest = 0, highest = 0;
    const auto take = [&](size_t i, Given value) {
      lowest = std::min(lowest, value);
      highest = std::max(highest, value);
      to[i] = static_cast<T>(value);
    };
    if (stride == 1) {  // A loop of its own, which the compiler makes of vectors.
      for (size_t i = 0; i < size; ++i) take(i, at[i]);
    } else {
      for (size_t i = 0; i < size; ++i) take(i, at[static_cast<int64_t>(i) * stride]);
    }
    CheckFits(lowest);
    CheckFits(highest);
    to += size;
  }
  void CheckFits(int64_t value) const {
    if (value >= std::numeric_limits<T>::min() && value <= std::numeric_limits<T>::max()) return;
    throw StatusError(
        absl::OutOfRangeError(absl::StrCat(what_, " ", value, " does not fit in 32 bits")));
  }

  const char* const what_;
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

// The exception that a failed status would be raised as, None for OK. Defined in bindings.cc.
nanobind::object ExceptionOf(const absl::Status& status);

// The object as what keeps other memory alive, whose last owner may be any thread.
inline std::shared_ptr<const void> OwnerOf(nanobind::object object) {
  return {object.release().ptr(), [](const void* held) {
            if (const HeldGil gil; gil) {
              nanobind::handle(static_cast<PyObject*>(const_cast<void*>(held))).dec_ref();
            }
          }};
}

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
