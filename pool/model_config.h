#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "pool/block_quant.h"
#include "pool/gdn_pool.h"
#include "pool/kv_layout.h"

namespace kvferry {

enum class AttentionKind : uint8_t {
  kMha,  // K and V a head; grouped and multi-query attention are MHA with fewer KV heads.
  kMla,  // One latent vector a token, the same for all heads and ranks.
};

enum class LayerKind : uint8_t {
  kFull,     // Keeps the KV of all tokens. Sparse attention does, too.
  kSliding,  // Needs the KV of the last sliding_window_tokens only.
  kLinear,   // Keeps a state of fixed size (GdnPool) and no KV.
};

absl::string_view AttentionKindName(AttentionKind kind);  // "mha", "mla"
absl::string_view LayerKindName(LayerKind kind);          // "full", "sliding", "linear"

// DeepSeek V3.2's choice of the tokens to attend to. Its keys, one of head_dim values a token and
// layer, lie beside the KV in the engine's own format.
struct SparseIndexer {
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t topk = 0;

  bool operator==(const SparseIndexer&) const = default;
};

// What engines are told beside the model.
struct ModelConfigOptions {
  // Ranks that share the heads. Each holds at least one KV head: there are copies where a model has
  // fewer heads than ranks.
  int64_t tensor_parallel_size = 1;
  // Engines' --dtype: "auto" (the file's), "float16", "half", "bfloat16", "float32", "float".
  std::string dtype = "auto";
  // Engines' --kv-cache-dtype: "auto" (what the checkpoint was quantised for, else dtype), or a
  // name that SetKvCacheDType() knows, whatever the checkpoint says.
  std::string kv_cache_dtype = "auto";
  // The text of the checkpoint's hf_quant_config.json (ModelOpt), which counts when config.json has
  // no quantization_config; empty when there is none.
  std::string hf_quant_config;
};

// The KV cache that one rank of a model needs, read from the model's config.json. A value type.
struct ModelConfig {
  std::string architecture;  // The first one the file names; may be empty.
  std::string model_type;    // The language model's; may be empty.
  // One a layer, two a layer that attends twice (LongCat-Flash). Prediction (MTP) layers are not
  // among them.
  std::vector<LayerKind> layers;

  AttentionKind attention = AttentionKind::kMha;
  int64_t num_kv_heads = 0;  // On this rank; 1 with MLA.
  int64_t head_dim = 0;      // Of K; with MLA kv_lora_rank + qk_rope_head_dim.
  int64_t v_head_dim = 0;    // 0 with MLA: V is the first kv_lora_rank values of the latent.
  int64_t kv_lora_rank = 0;  // MLA only, like the next.
  int64_t qk_rope_head_dim = 0;

  DType dtype = DType::kBFloat16;  // The model's.
  DType kv_dtype = DType::kBFloat16;
  // Set when K and V are kept as codes, of kv_dtype, with a scale for each block of values.
  std::optional<BlockFormat> kv_blocks;
  int64_t sliding_window_tokens = 0;    // 0 when no layer is kSliding.
  int64_t max_position_embeddings = 0;  // 0 when the file does not say.
  std::optional<SparseIndexer> indexer;
  std::optional<GdnShape> linear;  // On this rank; set when a layer is kLinear.

  // Reads the text of a config.json. The language model of a multimodal model is read from its
  // "text_config" ("language_config", "llm_config"). Architectures that are not known work when
  // they have the usual fields; where public checkpoints of a known one leave a field to their
  // class in transformers, its default counts.
  //
  // With kv_cache_dtype "auto", a quantization_config (compression_config) may say how KV is
  // stored: compressed-tensors in kv_cache_scheme, ModelOpt in kv_cache_quant_algo, AutoFP8
  // (quant_method "fp8") in kv_cache_scheme as "static". All mean fp8_e4m3 when they say FP8; their
  // scales lie with the weights.
  //
  // INVALID_ARGUMENT naming the field, its value and what is allowed, or, for one that is missing,
  // the names that were looked for; also for text that is longer than kMaxJsonBytes or not JSON,
  // for heads that tensor_parallel_size does not divide, for a KV cache quantised in a way that is
  // not known unless kv_cache_dtype is given, and for bad options. UNIMPLEMENTED when the file says
  // that layers differ in a way that this type cannot express (their KV heads or dimensions, KV
  // shared among layers, other state space layers).
  static absl::StatusOr<ModelConfig> FromJson(absl::string_view json,
                                              const ModelConfigOptions& options = {});

  // Sets kv_dtype and kv_blocks: "fp8" or "fp8_e4m3", "fp8_e5m2", "bfloat16" or "bf16", "float16",
  // "float32", and "fp4" or "fp4_e2m1" (BlockFormat::kMxfp4). INVALID_ARGUMENT for other names;
  // nothing changes then.
  absl::Status SetKvCacheDType(absl::string_view name);

  std::vector<int64_t> LayersOf(LayerKind kind) const;
  // Layers with a KV cache: full and sliding ones.
  int64_t num_attention_layers() const;
  int64_t num_linear_layers() const;
  // Bytes of KV of one token on this rank, in one layer and in all that have a KV cache; sliding
  // layers count as long as the token is in their window. Scales of blocks count, an indexer's
  // keys do not.
  int64_t layer_kv_bytes_per_token() const;
  int64_t kv_bytes_per_token() const { return num_attention_layers() * layer_kv_bytes_per_token(); }

  bool operator==(const ModelConfig&) const = default;

  static constexpr int64_t kMaxJsonBytes = 16 << 20;  // Quantized models list their modules.
  static constexpr int64_t kMaxHiddenSize = 1 << 24;
  static constexpr int64_t kMaxPositions = int64_t{1} << 40;
};

}  // namespace kvferry
