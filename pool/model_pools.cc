#include "pool/model_pools.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check_range.h"
#include "base/status.h"
#include "pool/block_quant.h"
#include "pool/rows_aside.h"
#include "pool/token_copy.h"

namespace kvferry {
namespace {

// How a model's layers share pools.
struct Split {
  int64_t num_kv_layers = 0;      // In kv().
  int64_t num_window_layers = 0;  // In window_kv().
  bool mixed() const { return num_window_layers > 0; }
};

Split SplitOf(const ModelConfig& model) {
  const auto count = [&model](LayerKind kind) {
    return static_cast<int64_t>(model.LayersOf(kind).size());
  };
  const int64_t full = count(LayerKind::kFull), sliding = count(LayerKind::kSliding);
  // Where all slide, one pool is enough: the engine frees what left the window.
  if (full == 0 || sliding == 0) return {full + sliding, 0};
  return {full, sliding};
}

absl::Status CheckOptions(const ModelPoolsOptions& options, const Split& split) {
  if (split.num_kv_layers > 0 && (options.num_tokens != 0) == (options.kv_bytes != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("model pools: num_tokens is ", options.num_tokens, " and kv_bytes ",
                     options.kv_bytes, "; give one of them and leave the other 0"));
  }
  if (!(options.window_ratio > 0 && options.window_ratio <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model pools: window_ratio is ", options.window_ratio, " but must lie in (0, 1]"));
  }
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("model pools", "page_size", options.page_size, 1, KvLayout::kMaxPageSize));
  return CheckRange("model pools", "max_track_slots", options.max_track_slots, 0,
                    GdnPool::kMaxSlots);
}

// Whole pages of tokens for both pools, without the padding page that each has besides.
struct Tokens {
  int64_t kv = 0;
  int64_t window = 0;
};

int64_t WholePages(double tokens, int64_t page_size) {
  return static_cast<int64_t>(tokens / static_cast<double>(page_size)) * page_size;
}

absl::StatusOr<Tokens> TokensFor(const ModelPoolsOptions& options, const Split& split,
                                 const KvLayout& kv, const std::optional<KvLayout>& window) {
  const double ratio = split.mixed() ? options.window_ratio : 0;
  double tokens = static_cast<double>(options.num_tokens);
  if (options.kv_bytes != 0) {
    const int64_t padding = kv.page_bytes() + (window ? window->page_bytes() : 0);
    const double page_bytes = static_cast<double>(kv.page_bytes()) +
                              (window ? ratio * static_cast<double>(window->page_bytes()) : 0.0);
    tokens = (static_cast<double>(options.kv_bytes) - static_cast<double>(padding)) / page_bytes *
             static_cast<double>(options.page_size);
  }
  if (!(tokens < static_cast<double>(INT32_MAX))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model pools: ", tokens, " tokens, but slots are 32 bits: at most ", INT32_MAX));
  }
  const Tokens result = {WholePages(tokens, options.page_size),
                         WholePages(tokens * ratio, options.page_size)};
  if (result.kv > 0 && (!split.mixed() || result.window > 0)) return result;
  return absl::InvalidArgumentError(absl::StrCat(
      "model pools: num_tokens ", options.num_tokens, " or kv_bytes ", options.kv_bytes,
      " is less than a page of ", options.page_size, " tokens in each pool"));
}

absl::StatusOr<ReqToTokenPool> RequestsFor(const ModelConfig& model,
                                           const ModelPoolsOptions& options) {
  const int64_t context =
      options.max_context_tokens != 0 ? options.max_context_tokens : model.max_position_embeddings;
  if (context == 0) {
    return absl::InvalidArgumentError(
        "model pools: max_context_tokens is needed, as the model names no "
        "max_position_embeddings");
  }
  return ReqToTokenPool::Create(options.max_requests, context, options.memory);
}

// Of KvPartsOf(), those that kv_dtype and kv_blocks are about.
size_t NumKvTensors(const ModelConfig& model) {
  return model.attention == AttentionKind::kMla ? 1 : 2;
}

// Of a latent's values or, with blocks, codes.
absl::StatusOr<int64_t> LatentValueDim(const ModelConfig& model) {
  if (!model.kv_blocks) return model.kv_lora_rank;
  const BlockFormatInfo info = InfoOf(*model.kv_blocks);
  if (model.kv_lora_rank % info.block_values == 0) {
    return info.CodesIn(model.kv_lora_rank);
  }
  return absl::InvalidArgumentError(absl::StrCat("model pools: kv_lora_rank ", model.kv_lora_rank,
                                                 " is no multiple of a block of ",
                                                 info.block_values));
}

void Append(const std::vector<KvTensor>& tensors, std::vector<KvTensor>* all) {
  all->insert(all->end(), tensors.begin(), tensors.end());
}

// Copies that set all rows of a layer, the first few of them quantised.
struct SetCopies {
  std::vector<QuantizedCopy> quantized;
  std::vector<TokenCopy> others;
};

absl::StatusOr<SetCopies> PlanSetInBlocks(BlockFormat format, size_t num_in_blocks,
                                          std::span<const TokenView> parts,
                                          std::span<const int32_t> slots,
                                          std::span<const TokenView> rows) {
  if (rows.size() != parts.size() - num_in_blocks) {
    return absl::InvalidArgumentError(absl::StrCat("model pools: ", rows.size(),
                                                   " tensors given, but a layer has ",
                                                   parts.size() - num_in_blocks, " parts"));
  }
  SetCopies copies;
  for (size_t i = 0; i < num_in_blocks; ++i) {
    KVFERRY_ASSIGN_OR_RETURN(
        const QuantizedCopy copy,
        QuantizedCopy::PlanStore(format, rows[i], parts[2 * i], parts[2 * i + 1], slots));
    copies.quantized.push_back(copy);
  }
  for (size_t i = num_in_blocks; i < rows.size(); ++i) {
    KVFERRY_ASSIGN_OR_RETURN(const TokenCopy copy,
                             TokenCopy::PlanScatter(rows[i], parts[num_in_blocks + i], slots));
    copies.others.push_back(copy);
  }
  return copies;
}

absl::Status Run(const SetCopies& copies, const TokenKvPool& pool) {
  KVFERRY_RETURN_IF_ERROR(pool.memory().RunQuantized(copies.quantized, pool.threads()));
  return pool.memory().Run(copies.others, pool.threads());
}

// Sets all rows, the first `num_in_blocks` of them quantised.
absl::Status SetInBlocks(BlockFormat format, size_t num_in_blocks, TokenKvPool& pool, int64_t layer,
                         std::span<const int32_t> slots, std::span<const TokenView> rows) {
  const std::vector<TokenView> parts = pool.Parts(layer);
  KVFERRY_ASSIGN_OR_RETURN(const SetCopies copies,
                           PlanSetInBlocks(format, num_in_blocks, parts, slots, rows));
  if (!Meet(rows, parts)) return Run(copies, pool);
  // Rows are a view of this pool's own.
  KVFERRY_ASSIGN_OR_RETURN(const RowsAside aside, PutAside(rows, pool.memory(), pool.threads()));
  KVFERRY_ASSIGN_OR_RETURN(const SetCopies from_aside,
                           PlanSetInBlocks(format, num_in_blocks, parts, slots, aside.rows));
  return Run(from_aside, pool);
}

// What memory is asked for once all that is wrong with the options has been found: it may be much,
// and takes its room at once.
struct Plan {
  int64_t value_dim = 0;
  std::optional<KvLayout> kv, window;
  Tokens tokens;
};

absl::StatusOr<Plan> PlanFor(const ModelConfig& model, const ModelPoolsOptions& options,
                             const Split& split) {
  Plan plan;
  if (model.linear) {
    KVFERRY_RETURN_IF_ERROR(
        GdnPool::Check(*model.linear, options.max_requests, options.max_track_slots));
  }
  if (split.num_kv_layers == 0) return plan;
  KVFERRY_ASSIGN_OR_RETURN(plan.value_dim, LatentValueDim(model));
  KVFERRY_ASSIGN_OR_RETURN(plan.kv, LayoutFor(model, split.num_kv_layers, options.page_size));
  if (split.mixed()) {
    KVFERRY_ASSIGN_OR_RETURN(plan.window,
                             LayoutFor(model, split.num_window_layers, options.page_size));
  }
  KVFERRY_ASSIGN_OR_RETURN(plan.tokens, TokensFor(options, split, *plan.kv, plan.window));
  return plan;
}

}  // namespace

absl::StatusOr<std::vector<KvTensor>> KvPartsOf(const ModelConfig& model) {
  std::vector<KvTensor> parts = {{"latent", 1, model.head_dim}};
  if (model.attention == AttentionKind::kMha) {
    parts = {{"k", model.num_kv_heads, model.head_dim},
             {"v", model.num_kv_heads, model.v_head_dim}};
  }
  if (model.indexer) {
    KVFERRY_ASSIGN_OR_RETURN(
        const std::vector<KvTensor> keys,
        QuantizedTensors(BlockFormat::kFp8Block128, "index_k", 1, model.indexer->head_dim));
    Append(keys, &parts);
  }
  return parts;
}

absl::StatusOr<KvLayout> LayoutFor(const ModelConfig& model, int64_t num_layers,
                                   int64_t page_size) {
  KVFERRY_RETURN_IF_ERROR(LatentValueDim(model).status());
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<KvTensor> parts, KvPartsOf(model));
  KvLayout layout = {num_layers, page_size, model.kv_dtype, "NHD", {}};
  for (size_t i = 0; i < parts.size(); ++i) {
    std::vector<KvTensor> stored = {parts[i]};
    if (model.kv_blocks && i < NumKvTensors(model)) {
      KVFERRY_ASSIGN_OR_RETURN(stored, QuantizedTensors(*model.kv_blocks, parts[i].name,
                                                        parts[i].num_heads, parts[i].head_dim));
    }
    Append(stored, &layout.tensors);
  }
  KVFERRY_RETURN_IF_ERROR(layout.Validate());
  return layout;
}

ModelPools::ModelPools(ModelConfig model, ReqToTokenPool requests)
    : model_(std::move(model)), requests_(std::move(requests)) {
  const bool mixed = SplitOf(model_).mixed();
  int64_t next[3] = {0, 0, 0};
  for (const LayerKind kind : model_.layers) {
    // Sliding layers that share kv() are counted with its others, of which there are none.
    const LayerKind pool = kind == LayerKind::kSliding && !mixed ? LayerKind::kFull : kind;
    places_.push_back({pool, next[static_cast<size_t>(pool)]++});
  }
}

absl::StatusOr<std::unique_ptr<ModelPools>> ModelPools::Create(const ModelConfig& given,
                                                               const ModelPoolsOptions& options) {
  ModelConfig model = given;
  if (options.kv_cache_dtype != "auto") {
    KVFERRY_RETURN_IF_ERROR(model.SetKvCacheDType(options.kv_cache_dtype));
  }
  const Split split = SplitOf(model);
  KVFERRY_RETURN_IF_ERROR(CheckOptions(options, split));
  KVFERRY_ASSIGN_OR_RETURN(const Plan plan, PlanFor(model, options, split));
  KVFERRY_ASSIGN_OR_RETURN(ReqToTokenPool requests, RequestsFor(model, options));
  std::unique_ptr<ModelPools> pools(new ModelPools(model, std::move(requests)));
  if (plan.window) {
    KVFERRY_ASSIGN_OR_RETURN(
        pools->window_slots_,
        SlidingWindowAllocator::Create(plan.tokens.kv, plan.tokens.window, options.page_size));
  } else if (plan.kv) {
    KVFERRY_ASSIGN_OR_RETURN(pools->slots_,
                             TokenSlotAllocator::Create(plan.tokens.kv, options.page_size));
  }
  // Before keys and values, for which there is only room beside them.
  if (model.linear) {
    KVFERRY_ASSIGN_OR_RETURN(pools->states_,
                             GdnPool::Create(*model.linear, options.max_requests,
                                             options.max_track_slots, options.memory));
  }
  if (plan.kv) {
    KVFERRY_ASSIGN_OR_RETURN(
        pools->kv_, TokenKvPool::Create(*plan.kv, plan.tokens.kv, plan.value_dim, options.memory));
  }
  if (plan.window) {
    KVFERRY_ASSIGN_OR_RETURN(
        pools->window_kv_,
        TokenKvPool::Create(*plan.window, plan.tokens.window, plan.value_dim, options.memory));
  }
  return pools;
}

absl::StatusOr<ModelPools::Place> ModelPools::PlaceOf(int64_t model_layer) const {
  if (model_layer >= 0 && model_layer < static_cast<int64_t>(places_.size())) {
    return places_[static_cast<size_t>(model_layer)];
  }
  return absl::OutOfRangeError(
      absl::StrCat("model pools: layer ", model_layer, " is not in [0, ", places_.size(), ")"));
}

absl::Status ModelPools::SetIn(TokenKvPool& pool, int64_t layer, std::span<const int32_t> slots,
                               std::span<const TokenView> rows,
                               std::span<const float> scales) const {
  if (!model_.kv_blocks) return pool.Set(layer, slots, rows, scales);
  if (scales.empty()) {
    return SetInBlocks(*model_.kv_blocks, NumKvTensors(model_), pool, layer, slots, rows);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "model pools: ", scales.size(), " scales given, but blocks have scales of their own"));
}

absl::Status ModelPools::Set(int64_t model_layer, std::span<const int32_t> slots,
                             std::span<const TokenView> rows, std::span<const float> scales) {
  KVFERRY_ASSIGN_OR_RETURN(const Place place, PlaceOf(model_layer));
  switch (place.kind) {
    case LayerKind::kFull:
      return SetIn(*kv_, place.layer, slots, rows, scales);
    case LayerKind::kSliding: {
      KVFERRY_ASSIGN_OR_RETURN(const std::vector<int32_t> window, window_slots_->ToWindow(slots));
      return SetIn(*window_kv_, place.layer, window, rows, scales);
    }
    case LayerKind::kLinear:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "model pools: layer ", model_layer, " is linear: it has a state and no keys or values"));
}

int64_t ModelPools::bytes() const {
  int64_t bytes = static_cast<int64_t>(requests_.table().size_bytes());
  for (const auto& pool : {kv_, window_kv_}) {
    if (pool != nullptr) bytes += pool->pages()->num_pages() * pool->layout().page_bytes();
  }
  return bytes + (states_ ? states_->bytes() : 0);
}

}  // namespace kvferry
