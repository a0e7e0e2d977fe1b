#pragma once

// Arrays and tensors that callers give.

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace kvferry {

// Makes of an object what nanobind can read. Of one whose __dlpack__ may be Python code, as torch's
// and jax's are, what that gives: nanobind calls it in functions that are noexcept, in which a
// thread cannot stay at exit (gil.h). Of a buffer a memoryview: some, as ctypes', have no strides,
// which nanobind reads. Others stay. False where there is nothing to read.
bool MakeReadable(nanobind::object& object);

// nanobind's array, with that. It is what the caller has, and never a copy of it: with strides of
// its own where c_contig is not asked for.
template <typename... Args>
class GivenArray : public nanobind::ndarray<Args...> {
 public:
  using Array = nanobind::ndarray<Args...>;
  GivenArray() = default;
  explicit GivenArray(Array array) : Array(std::move(array)) {}
};

}  // namespace kvferry

namespace nanobind::detail {

template <typename... Args>
struct type_caster<kvferry::GivenArray<Args...>> {
  using ArrayCaster = make_caster<ndarray<Args...>>;
  NB_TYPE_CASTER(kvferry::GivenArray<Args...>, ArrayCaster::Name)

  bool from_python(handle object, uint32_t flags, cleanup_list* cleanup) noexcept {
    auto readable = borrow(object);
    if (!kvferry::MakeReadable(readable)) return false;
    ArrayCaster array;
    flags &= ~static_cast<uint32_t>(cast_flags::convert);
    if (!array.from_python(readable, flags, cleanup)) return false;
    value = kvferry::GivenArray<Args...>(std::move(array.value));
    return true;
  }
};

// Lists of them. The code of one object may change the list, or let a thread that does have its
// turn, while nanobind walks it.
template <typename... Args>
struct type_caster<std::vector<kvferry::GivenArray<Args...>>>
    : list_caster<std::vector<kvferry::GivenArray<Args...>>, kvferry::GivenArray<Args...>> {
  using ListCaster =
      list_caster<std::vector<kvferry::GivenArray<Args...>>, kvferry::GivenArray<Args...>>;

  bool from_python(handle list, uint32_t flags, cleanup_list* cleanup) noexcept {
    if (!PyList_CheckExact(list.ptr())) return ListCaster::from_python(list, flags, cleanup);
    const auto fixed = steal(PySequence_Tuple(list.ptr()));
    if (fixed.is_valid()) return ListCaster::from_python(fixed, flags, cleanup);
    PyErr_Clear();
    return false;
  }
};

}  // namespace nanobind::detail
