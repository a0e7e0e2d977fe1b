#include "pool/model_pools.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/convert.h"
#include "python/gil.h"
#include "python/model_pools.h"
#include "python/pool_memory.h"
#include "python/rows.h"
#include "python/status_error.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {

void BindModelPools(nb::module_& module) {
  nb::class_<ModelPools>(module, "ModelPools",
                         "All pools and allocators of a model; see pool/model_pools.h.")
      .def_static(
          "create",
          [](const ModelConfig& model, int64_t page_size, int64_t num_tokens, int64_t kv_bytes,
             double window_ratio, int64_t max_requests, int64_t max_context_tokens,
             int64_t max_track_slots, const std::string& kv_cache_dtype,
             const std::string& memory) {
            return Value(ModelPools::Create(
                model, {page_size, num_tokens, kv_bytes, window_ratio, max_requests,
                        max_context_tokens, max_track_slots, kv_cache_dtype, MemoryNamed(memory)}));
          },
          "model"_a, nb::kw_only(), "page_size"_a = ModelPoolsOptions().page_size,
          "num_tokens"_a = 0, "kv_bytes"_a = 0, "window_ratio"_a = ModelPoolsOptions().window_ratio,
          "max_requests"_a = ModelPoolsOptions().max_requests, "max_context_tokens"_a = 0,
          "max_track_slots"_a = 0, "kv_cache_dtype"_a = "auto", "memory"_a = "host",
          nb::call_guard<ReleasedGil>(),
          "Sized by num_tokens or kv_bytes; max_context_tokens 0 is the model's "
          "max_position_embeddings; kv_cache_dtype, other than 'auto', replaces the model's; "
          "memory is "
          "the host's, or a GPU's as 'cuda:0', for keys, values, states and the table of requests.")
      .def_prop_ro("model", &ModelPools::model)
      .def_prop_ro("requests", &ModelPools::requests, nb::rv_policy::reference_internal)
      .def_prop_ro("kv", &ModelPools::kv,
                   "TokenKvPool of the layers that share all slots, None where all are linear.")
      .def_prop_ro("window_kv", &ModelPools::window_kv,
                   "TokenKvPool of the sliding layers beside full ones, or None.")
      .def_prop_ro("states", &ModelPools::states, nb::rv_policy::reference_internal,
                   "GdnPool of linear layers, or None; request slot r has state slot r + 1.")
      .def_prop_ro("slots", &ModelPools::slots, nb::rv_policy::reference_internal,
                   "TokenSlotAllocator, or None when there is a window_kv, or no kv.")
      .def_prop_ro("window_slots", &ModelPools::window_slots, nb::rv_policy::reference_internal,
                   "SlidingWindowAllocator when there is a window_kv, or None.")
      .def(
          "place_of",
          [](const ModelPools& self, int64_t model_layer) {
            const ModelPools::Place place = Value(self.PlaceOf(model_layer));
            return std::pair(std::string(LayerKindName(place.kind)), place.layer);
          },
          "model_layer"_a, "('full' | 'sliding' | 'linear', its layer in kv, window_kv or states).")
      .def(
          "set_kv_buffer",
          [](ModelPools& self, int64_t model_layer, const SlotsInput& slots,
             const std::vector<RowInput>& rows, const std::vector<float>& scales) {
            const ModelPools::Place place = Value(self.PlaceOf(model_layer));
            const auto& pool = place.kind == LayerKind::kSliding ? self.window_kv() : self.kv();
            if (pool == nullptr) return Check(self.Set(model_layer, {}, {}));  // It is linear.
            const GivenRows given =
                RowsFor(Value(KvPartsOf(self.model())), slots, rows, pool->memory());
            const ReleasedGil nogil;
            Check(self.Set(model_layer, SlotList(slots), given.views(), scales));
          },
          "model_layer"_a, "slots"_a, "rows"_a, "scales"_a = std::vector<float>(),
          "TokenKvPool.set_kv_buffer() on a layer of the model; slots are kv's in every layer. "
          "With kv_cache_dtype fp4, rows are quantised, and no scales are given.")
      .def_prop_ro("bytes", &ModelPools::bytes);
}

}  // namespace kvferry
