#pragma once

// Arrays and tensors that callers give.

#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>

namespace kvferry {

// What an object's __dlpack__ gives, where that may be Python code, as torch's and jax's are: nanobind
// calls it in functions that are noexcept, in which a thread cannot stay at exit (gil.h). Nothing for
// other objects, and where it raises; those are left to nanobind.
nanobind::object DlpackCapsule(nanobind::handle object);

// nanobind's array, with that. It is what the caller has, and never a copy of it: with strides of its own
// where c_contig is not asked for.
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
    const auto capsule = kvferry::DlpackCapsule(object);
    if (capsule.is_valid()) object = capsule;
    ArrayCaster array;
    flags &= ~static_cast<uint32_t>(cast_flags::convert);
    if (!array.from_python(object, flags, cleanup)) return false;
    value = kvferry::GivenArray<Args...>(std::move(array.value));
    return true;
  }
};

}  // namespace nanobind::detail
