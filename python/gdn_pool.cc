#include "pool/gdn_pool.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/convert.h"
#include "python/gdn_pool.h"
#include "python/gil.h"
#include "python/pool_memory.h"
#include "python/status_error.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

using Memory = std::shared_ptr<std::byte>;
DlpackArray View(const GdnPool& pool, const Memory& states, std::initializer_list<size_t> shape,
                 DType dtype) {
  const DlpackDevice device = DeviceOf(pool.memory());
  return {states.get(), shape, KeepAlive(states), {}, ToDlpack(dtype), device.type, device.id};
}

DlpackArray RecurrentStates(const GdnPool& pool) {
  const GdnShape& shape = pool.shape();
  return View(pool, pool.recurrent_memory(),
              {static_cast<size_t>(shape.num_layers), static_cast<size_t>(pool.num_slots()),
               static_cast<size_t>(shape.num_v_heads), static_cast<size_t>(shape.head_k_dim),
               static_cast<size_t>(shape.head_v_dim)},
              DType::kFloat32);
}

DlpackArray ConvStates(const GdnPool& pool) {
  const GdnShape& shape = pool.shape();
  return View(
      pool, pool.conv_memory(),
      {static_cast<size_t>(shape.num_layers), static_cast<size_t>(pool.num_slots()),
       static_cast<size_t>(shape.conv_dim), static_cast<size_t>(shape.conv_kernel_size - 1)},
      shape.conv_dtype);
}

}  // namespace

void BindGdnPool(nb::module_& module) {
  nb::class_<GdnPool> pool(module, "GdnPool",
                           "States of gated delta net layers; see pool/gdn_pool.h.");
  pool.def(
      "__init__",
      [](GdnPool* self, int64_t max_requests, int64_t num_layers, int64_t num_v_heads,
         int64_t head_k_dim, int64_t head_v_dim, int64_t conv_dim, int64_t conv_kernel_size,
         const std::string& dtype, int64_t max_track_slots, const std::string& memory) {
        const GdnShape shape{num_layers,
                             num_v_heads,
                             head_k_dim,
                             head_v_dim,
                             conv_dim,
                             conv_kernel_size,
                             Value(ParseDType(dtype))};
        new (self) GdnPool(
            Value(GdnPool::Create(shape, max_requests, max_track_slots, MemoryNamed(memory))));
      },
      nb::kw_only(), "max_requests"_a, "num_layers"_a, "num_v_heads"_a, "head_k_dim"_a,
      "head_v_dim"_a, "conv_dim"_a, "conv_kernel_size"_a, "dtype"_a = "bfloat16",
      "max_track_slots"_a = 0, "memory"_a = "host", nb::call_guard<ReleasedGil>(),
      "dtype is the conv states', float32 always the recurrent ones'. memory: the host's, or a "
      "GPU's as 'cuda:0'.");
  pool.def(
          "reset_states",
          [](GdnPool& self, const IntegersInput& slots) {
            const ReleasedGil nogil;
            Check(self.Reset(CountList(slots)));
          },
          "slots"_a.noconvert(), "Zeroes the states of these slots in all layers.")
      .def(
          "copy_states",
          [](GdnPool& self, const IntegersInput& sources, const IntegersInput& destinations) {
            const ReleasedGil nogil;
            Check(self.Copy(CountList(sources), CountList(destinations)));
          },
          "sources"_a.noconvert(), "destinations"_a.noconvert(),
          "state[destinations] = state[sources] in all layers: reads come before writes.")
      .def(
          "alloc_track_slot",
          [](GdnPool& self) -> std::optional<int64_t> { return OrNone(self.AllocateTrackSlot()); },
          "None when all are allocated.")
      .def(
          "free_track_slot", [](GdnPool& self, int64_t slot) { Check(self.FreeTrackSlot(slot)); },
          "slot"_a)
      .def("clear", &GdnPool::Clear, "All track slots are free again; no state changes.")
      .def_prop_ro("recurrent_state", &RecurrentStates, nb::rv_policy::reference,
                   "[num_layers, num_slots, num_v_heads, head_k_dim, head_v_dim] of float32, "
                   "without a copy: for numpy.from_dlpack and torch.from_dlpack.")
      .def_prop_ro("conv_state", &ConvStates, nb::rv_policy::reference,
                   "[num_layers, num_slots, conv_dim, conv_kernel_size - 1], likewise.")
      .def(
          "buffer_infos", [](const GdnPool& self) { return ToTuples(self.buffer_infos()); },
          "(address, bytes, bytes of a slot) of each layer's recurrent, then conv states.")
      .def_prop_ro(
          "memory", [](const GdnPool& self) { return NameOf(self.memory()); },
          "Where the states lie, as for the constructor.")
      .def_prop_ro("max_requests", &GdnPool::max_requests)
      .def_prop_ro("max_track_slots", &GdnPool::max_track_slots)
      .def_prop_ro("num_slots", &GdnPool::num_slots, "Padding and track slots included.")
      .def_prop_ro("available_track_slots", &GdnPool::num_free_track_slots)
      .def_prop_ro("bytes", &GdnPool::bytes);
}

}  // namespace kvferry
