#pragma once

// How one request's keys and values lie in memory: what two peers must agree on before a byte
// moves.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvferry {

enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kUint8 };

int64_t DTypeBytes(DType dtype);
absl::string_view DTypeName(DType dtype);
// Accepts the names that torch uses, with or without "torch.": float32, bfloat16, float8_e4m3fn,
// ...
absl::StatusOr<DType> ParseDType(absl::string_view name);

// One tensor of a layer. A page of it holds [page_size, num_heads, head_dim] values (NHD) or
// [num_heads, page_size, head_dim] (HND), or an arrangement of the engine's own of the same size.
struct KvTensor {
  std::string name;  // "k", "v", "kv" (fused), "latent" (MLA), "label", "index_k", ...
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  std::optional<DType> dtype = std::nullopt;  // The layout's, unless it is set.

  bool operator==(const KvTensor&) const = default;
};

// A paged KV cache: num_layers x tensors.size() buffers, each of some number of equal pages.
// A value type; thread-compatible.
struct KvLayout {
  int64_t num_layers = 0;
  int64_t page_size = 0;  // Tokens in a page.
  DType dtype = DType::kBFloat16;
  // "NHD", "HND", or the name of an engine's private arrangement, which peers that have equal names
  // move page by page. The former two, and other page sizes of them, are made of each other
  // (pool/page_cut.h).
  std::string page_format = "NHD";
  std::vector<KvTensor> tensors;  // The same in every layer.

  // K and V in tensors of their own, as in SGLang's and vLLM's multi-head pools.
  static KvLayout Mha(int64_t num_layers, int64_t page_size, int64_t num_kv_heads, int64_t head_dim,
                      DType dtype);
  // K and V of a head side by side, [.., 2 * head_dim], as in vLLM's CPU backend.
  static KvLayout Fused(int64_t num_layers, int64_t page_size, int64_t num_kv_heads,
                        int64_t head_dim, DType dtype);
  // One latent vector a token: kv_lora_rank + qk_rope_head_dim values.
  static KvLayout Mla(int64_t num_layers, int64_t page_size, int64_t latent_dim, DType dtype);

  // Every count positive and within kMax*, sizes representable. The message names the field.
  absl::Status Validate() const;

  // The rest need a valid layout.
  DType dtype_of(const KvTensor& tensor) const { return tensor.dtype.value_or(dtype); }
  int64_t num_tensors() const { return static_cast<int64_t>(tensors.size()); }
  int64_t num_buffers() const { return num_layers * num_tensors(); }
  // Bytes of one page of tensors[tensor].
  int64_t item_bytes(int64_t tensor) const;
  // Bytes that one page id stands for: in one layer, and in all of them.
  int64_t layer_page_bytes() const;
  int64_t page_bytes() const { return num_layers * layer_page_bytes(); }
  // Buffers are listed tensor by tensor, each over all layers: K layers, then V layers.
  int64_t buffer_index(int64_t layer, int64_t tensor) const { return tensor * num_layers + layer; }

  // Of every tensor; 0 if they differ in that.
  int64_t num_heads() const;

  // Names the first difference, e.g. "dtype: float32 here, bfloat16 there"; empty when equal.
  std::string FirstDifference(const KvLayout& other) const;
  std::string ToString() const;

  bool operator==(const KvLayout&) const = default;

  static constexpr int64_t kMaxLayers = 4096;
  static constexpr int64_t kMaxTensors = 16;
  static constexpr int64_t kMaxPageSize = 1 << 20;
  static constexpr int64_t kMaxHeads = 1 << 16;
  static constexpr int64_t kMaxHeadDim = 1 << 20;
  static constexpr int64_t kMaxItemBytes = int64_t{1} << 32;
  static constexpr int64_t kMaxNameBytes = 64;
};

}  // namespace kvferry
