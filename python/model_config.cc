#include "pool/model_config.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "python/convert.h"
#include "python/model_config.h"
#include "python/status_error.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

ModelConfig FromJson(const std::string& text, int64_t tensor_parallel_size,
                     const std::string& dtype, const std::string& kv_cache_dtype,
                     const std::string& hf_quant_config) {
  return Value(
      ModelConfig::FromJson(text, {tensor_parallel_size, dtype, kv_cache_dtype, hf_quant_config}));
}

std::optional<std::string> BlockName(std::optional<BlockFormat> format) {
  if (!format) return std::nullopt;
  return *format == BlockFormat::kMxfp4 ? "mxfp4" : "fp8_block128";
}

std::vector<std::string> LayerNames(const ModelConfig& config) {
  std::vector<std::string> names;
  for (const LayerKind kind : config.layers) names.emplace_back(LayerKindName(kind));
  return names;
}

void BindParts(nb::module_& module) {
  nb::class_<SparseIndexer>(module, "SparseIndexer", "See pool/model_config.h.")
      .def_ro("num_heads", &SparseIndexer::num_heads)
      .def_ro("head_dim", &SparseIndexer::head_dim)
      .def_ro("topk", &SparseIndexer::topk);
  nb::class_<GdnShape>(module, "GdnShape", "The sizes of a GdnPool; see pool/gdn_pool.h.")
      .def_ro("num_layers", &GdnShape::num_layers)
      .def_ro("num_v_heads", &GdnShape::num_v_heads)
      .def_ro("head_k_dim", &GdnShape::head_k_dim)
      .def_ro("head_v_dim", &GdnShape::head_v_dim)
      .def_ro("conv_dim", &GdnShape::conv_dim)
      .def_ro("conv_kernel_size", &GdnShape::conv_kernel_size)
      .def_prop_ro("dtype",
                   [](const GdnShape& self) { return std::string(DTypeName(self.conv_dtype)); });
}

}  // namespace

void BindModelConfig(nb::module_& module) {
  BindParts(module);
  nb::class_<ModelConfig> config(module, "ModelConfig",
                                 "The KV cache that a model needs; see pool/model_config.h.");
  config
      .def_static("from_json", &FromJson, "text"_a, nb::kw_only(), "tensor_parallel_size"_a = 1,
                  "dtype"_a = "auto", "kv_cache_dtype"_a = "auto", "hf_quant_config"_a = "",
                  "Reads the text of a config.json for one of tensor_parallel_size ranks. The "
                  "dtypes are spelt as in engines' --dtype and --kv-cache-dtype. hf_quant_config: "
                  "the text of that file, where a checkpoint has one.")
      .def_ro("architecture", &ModelConfig::architecture)
      .def_ro("model_type", &ModelConfig::model_type)
      .def_prop_ro("layers", &LayerNames, "'full', 'sliding' or 'linear' for each layer.")
      .def_prop_ro("num_attention_layers", &ModelConfig::num_attention_layers,
                   "Layers with a KV cache: full and sliding ones.")
      .def_prop_ro("num_linear_layers", &ModelConfig::num_linear_layers)
      .def_prop_ro(
          "attention",
          [](const ModelConfig& self) { return std::string(AttentionKindName(self.attention)); },
          "'mha' or 'mla'.")
      .def_ro("num_kv_heads", &ModelConfig::num_kv_heads, "Of this rank.")
      .def_ro("head_dim", &ModelConfig::head_dim)
      .def_ro("v_head_dim", &ModelConfig::v_head_dim)
      .def_ro("kv_lora_rank", &ModelConfig::kv_lora_rank)
      .def_ro("qk_rope_head_dim", &ModelConfig::qk_rope_head_dim)
      .def_prop_ro("dtype",
                   [](const ModelConfig& self) { return std::string(DTypeName(self.dtype)); })
      .def_prop_ro("kv_dtype",
                   [](const ModelConfig& self) { return std::string(DTypeName(self.kv_dtype)); })
      .def_prop_ro(
          "kv_blocks", [](const ModelConfig& self) { return BlockName(self.kv_blocks); },
          "'mxfp4' when keys and values are kept in blocks with scales, or None.")
      .def_ro("sliding_window_tokens", &ModelConfig::sliding_window_tokens, "0 without windows.")
      .def_ro("max_position_embeddings", &ModelConfig::max_position_embeddings,
              "0 when the file does not say.")
      .def_ro("indexer", &ModelConfig::indexer)
      .def_ro("linear", &ModelConfig::linear)
      .def_prop_ro("layer_kv_bytes_per_token", &ModelConfig::layer_kv_bytes_per_token)
      .def_prop_ro("kv_bytes_per_token", &ModelConfig::kv_bytes_per_token, "Over all layers.");
  DefineEquality(config, [](const ModelConfig& self) {
    return absl::StrCat(self.architecture, " ", self.kv_bytes_per_token());
  });
}

}  // namespace kvferry
