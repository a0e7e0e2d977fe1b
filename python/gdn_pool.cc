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
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "python/convert.h"
#include "python/gdn_pool.h"
#include "python/gil.h"
#include "python/given_array.h"
#include "python/pool_memory.h"
#include "python/rows.h"
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

// Writable on purpose: states are copied into them.
using StatesInput = GivenArray<nb::c_contig>;

std::span<std::byte> BytesOf(const StatesInput& states) {
  return {static_cast<std::byte*>(states.data()), states.nbytes()};
}

// What such states are of.
GdnShape ShapeOf(const StatesInput& recurrent, const StatesInput& conv) {
  if (recurrent.ndim() != 5 || FromDlpack(recurrent.dtype()) != DType::kFloat32) {
    throw StatusError(absl::InvalidArgumentError(
        "gdn pool: recurrent states are a tensor [num_layers, num_slots, num_v_heads, head_k_dim, "
        "head_v_dim] of float32"));
  }
  const auto size = [](const StatesInput& states, size_t dim) {
    return static_cast<int64_t>(states.shape(dim));
  };
  if (conv.ndim() != 4 || conv.shape(0) != recurrent.shape(0) ||
      conv.shape(1) != recurrent.shape(1)) {
    throw StatusError(absl::InvalidArgumentError(absl::StrCat(
        "gdn pool: conv states are a tensor [num_layers, num_slots, conv_dim, conv_kernel_size - "
        "1], of ",
        recurrent.shape(0), " layers and ", recurrent.shape(1),
        " slots where the recurrent states are")));
  }
  return {size(recurrent, 0), size(recurrent, 2), size(recurrent, 3),      size(recurrent, 4),
          size(conv, 2),      size(conv, 3) + 1,  FromDlpack(conv.dtype())};
}

GdnPool AdoptStates(const StatesInput& recurrent, const StatesInput& conv, int64_t max_requests) {
  const GdnShape shape = ShapeOf(recurrent, conv);
  const std::shared_ptr<const PoolMemory> memory = MemoryOn(DeviceOf(recurrent));
  CheckLiesIn("gdn pool: the tensor of conv states", DeviceOf(conv), *memory);
  return Value(GdnPool::Adopt(shape, max_requests, BytesOf(recurrent), BytesOf(conv),
                              OwnerOf(KeepAlive(std::pair(recurrent, conv))), memory));
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
  pool.def_static("adopt_tensors", &AdoptStates, "recurrent"_a.noconvert(), "conv"_a.noconvert(),
                  nb::kw_only(), "max_requests"_a,
                  "An engine's states: contiguous tensors of the CPU or of a GPU, as "
                  "recurrent_state and conv_state have them; slots beyond padding and those of "
                  "max_requests are track slots. They are kept alive with the pool; nothing is "
                  "copied or zeroed.");
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
