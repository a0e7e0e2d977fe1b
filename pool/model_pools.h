#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/gdn_pool.h"
#include "pool/model_config.h"
#include "pool/req_to_token_pool.h"
#include "pool/sliding_window_allocator.h"
#include "pool/token_kv_pool.h"
#include "pool/token_slot_allocator.h"

namespace kvferry {

struct ModelPoolsOptions {
  int64_t page_size = 16;  // Tokens.
  // How much KV: one of the two, the other 0.
  int64_t num_tokens = 0;  // Rounded down to whole pages.
  int64_t kv_bytes = 0;    // For everything but the request table and linear states.
  // Window slots for each full slot, in models that mix full with sliding-window layers: in (0, 1].
  double window_ratio = 0.8;  // SGLang's default swa_full_tokens_ratio.
  int64_t max_requests = 256;
  int64_t max_context_tokens = 0;  // 0: the model's max_position_embeddings.
  int64_t max_track_slots = 0;     // Of linear layers.
  // Instead of the model's: a name that ModelConfig::SetKvCacheDType() knows; "auto" keeps it.
  std::string kv_cache_dtype = "auto";
  // Where keys, values, states and the request table lie, as for TokenKvPool::Create(). Who has
  // which slots is the host's in any case.
  std::shared_ptr<const PoolMemory> memory = nullptr;
};

// All pools and allocators that a model needs, from one call: what SGLang spreads over its model
// runner and pymllm over make_full_attention_net_mem_pool and make_req_to_token_pool.
//
// Not thread-safe as a whole; each part says what it allows.
class ModelPools {
 public:
  // INVALID_ARGUMENT naming the option that is out of range, RESOURCE_EXHAUSTED when the machine
  // will not give the memory; errors of another kind of memory are passed on. Nothing is kept then.
  static absl::StatusOr<std::unique_ptr<ModelPools>> Create(const ModelConfig& model,
                                                            const ModelPoolsOptions& options);

  // The kv_cache_dtype of the options is in it.
  const ModelConfig& model() const { return model_; }
  ReqToTokenPool& requests() { return requests_; }

  // Which pool a layer of the model lies in, and at which of its layers.
  struct Place {
    LayerKind kind;
    int64_t layer;
  };
  // OUT_OF_RANGE for a layer that the model does not have.
  absl::StatusOr<Place> PlaceOf(int64_t model_layer) const;

  // KV of all layers that have the same slots: the full ones, or all when none or every one of them
  // is sliding. Null for a model of linear layers only.
  const std::shared_ptr<TokenKvPool>& kv() const { return kv_; }
  // KV of the sliding layers of a model that also has full ones; else null.
  const std::shared_ptr<TokenKvPool>& window_kv() const { return window_kv_; }
  // States of linear layers; else null. Request slot r has state slot r + 1: theirs count from 1.
  GdnPool* states() { return states_ ? &*states_ : nullptr; }

  // Hands out slots of kv(): the second one, null otherwise, for models with a window_kv(), the
  // first one, null otherwise, for all others with a kv().
  TokenSlotAllocator* slots() { return slots_ ? &*slots_ : nullptr; }
  SlidingWindowAllocator* window_slots() { return window_slots_ ? &*window_slots_ : nullptr; }

  // TokenKvPool::Set() on a layer of the model, `slots` being kv()'s: sliding layers look up their
  // own. rows[t] are those of KvPartsOf(model())[t], as floats where the pool keeps them in blocks:
  // they are quantised here, with scales that are found here. INVALID_ARGUMENT for a linear layer
  // and for scales where there are blocks, else as there and for StoreQuantized().
  absl::Status Set(int64_t model_layer, std::span<const int32_t> slots,
                   std::span<const TokenView> rows, std::span<const float> scales = {});

  // Of all pools, the request table included.
  int64_t bytes() const;

 private:
  ModelPools(ModelConfig model, ReqToTokenPool requests);

  absl::Status SetIn(TokenKvPool& pool, int64_t layer, std::span<const int32_t> slots,
                     std::span<const TokenView> rows, std::span<const float> scales) const;

  const ModelConfig model_;
  ReqToTokenPool requests_;
  std::vector<Place> places_;
  std::shared_ptr<TokenKvPool> kv_;
  std::shared_ptr<TokenKvPool> window_kv_;
  std::optional<GdnPool> states_;
  std::optional<TokenSlotAllocator> slots_;
  std::optional<SlidingWindowAllocator> window_slots_;
};

// What a layer of a model keeps of each token, as its engine has it: K and V, or an MLA latent,
// which are numbers of any dtype, and the codes and scales of a sparse indexer's keys.
// INVALID_ARGUMENT when an indexer's keys are no multiple of 128 values.
absl::StatusOr<std::vector<KvTensor>> KvPartsOf(const ModelConfig& model);

// How `num_layers` layers of a model keep it. Where the model has kv_blocks, its K, V or latent are
// each two tensors, codes and scales, as QuantizedTensors() says. INVALID_ARGUMENT when the page
// size is out of range, for an indexer's keys as above, and for rows (of an MLA model, also their
// first kv_lora_rank values) that are no multiple of a block.
absl::StatusOr<KvLayout> LayoutFor(const ModelConfig& model, int64_t num_layers, int64_t page_size);

}  // namespace kvferry
