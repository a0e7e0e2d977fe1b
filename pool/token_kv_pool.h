#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/thread_pool.h"
#include "pool/kv_layout.h"
#include "pool/kv_pool.h"
#include "pool/layer_counter.h"
#include "pool/token_copy.h"
#include "pool/token_view.h"

namespace kvferry {

// Keys and values by token slot: what SGLang calls MHATokenToKVPool, MLATokenToKVPool and
// DoubleSparseTokenToKVPool, and pymllm KVPool. Which one it is follows from the layout's tensors:
//   "k", "v"      key and value of their own heads and dims
//   "kv"          both halves of each head of one tensor
//   "latent"      MLA: the key is all of it, the value its first latent_value_dim values
//   any further   e.g. "label" of double sparsity, "index_k" and "index_scale" of sparse attention,
//                 or "k_scale" behind "k" where k holds codes (block_quant.h)
// Slots are those of TokenSlotAllocator: page 0 is there, for the rows of padded tokens, and is
// never handed out.
//
// Thread-compatible: calls that touch different slots or layers may run at the same time. layers()
// is thread-safe.
class TokenKvPool {
 public:
  // Zeroed memory for num_tokens slots and those of page 0, of the given kind; null stands for
  // KvPool::Create(), host memory that peers on this host read in place. Where memory is not
  // on_host(), the addresses in views are the device's, and everything below goes through
  // PoolMemory::Run(), whose errors it passes on. INVALID_ARGUMENT for a bad layout, a
  // page format other than NHD and HND, num_tokens that is no positive multiple of the page size,
  // or a latent_value_dim outside [0, latent's dim] (0: all of it) or without a latent;
  // RESOURCE_EXHAUSTED when the machine will not give the memory.
  static absl::StatusOr<std::shared_ptr<TokenKvPool>> Create(
      const KvLayout& layout, int64_t num_tokens, int64_t latent_value_dim = 0,
      const std::shared_ptr<const PoolMemory>& memory = nullptr);
  // Uses the memory of `pool`, an engine's or one's own; nothing is copied. Errors as above.
  static absl::StatusOr<std::shared_ptr<TokenKvPool>> Over(std::shared_ptr<KvPool> pool,
                                                           int64_t latent_value_dim = 0);

  const KvLayout& layout() const { return pool_->layout(); }
  const PoolMemory& memory() const { return pool_->memory(); }
  // The pages, for transports and buffer infos.
  const std::shared_ptr<KvPool>& pages() const { return pool_; }
  // Slots, those of page 0 included.
  int64_t num_slots() const { return pool_->num_pages() * layout().page_size; }
  int64_t num_tokens() const { return num_slots() - layout().page_size; }
  int64_t tensor_bytes(int64_t tensor) const;
  int64_t latent_value_dim() const { return latent_value_dim_; }
  LayerCounter& layers() { return layers_; }

  // Threads that help with everything that this pool copies from now on; null (the default) for
  // none. Call it before the pool is shared between threads.
  void UseThreads(std::shared_ptr<ThreadPool> threads) { threads_ = std::move(threads); }
  ThreadPool* threads() const { return threads_.get(); }

  // A tensor of a layer, [num_slots, num_heads, head_dim]; indices must be in range.
  TokenView view(int64_t layer, int64_t tensor) const {
    return views_[layout().buffer_index(layer, tensor)];
  }
  // Of a layer that is loaded: waits for layers(). Errors as for LayerCounter::WaitFor().
  absl::StatusOr<TokenView> Key(int64_t layer, Deadline deadline);
  absl::StatusOr<TokenView> Value(int64_t layer, Deadline deadline);

  // What Set() writes of a layer, which must be in range: key and value (MLA: the latent alone),
  // then the layout's further tensors.
  std::vector<TokenView> Parts(int64_t layer) const;
  // Stores rows[t], [slots.size(), num_heads, head_dim] of Parts()[t], in `slots` of a layer,
  // divided by scales[t] and cast. Scales may be empty (1). OUT_OF_RANGE for a layer or slot that
  // does not exist, INVALID_ARGUMENT when numbers or shapes do not fit; nothing is written then.
  // The rows lie in host memory or, for a pool that is not on_host(), in that device's.
  absl::Status Set(int64_t layer, std::span<const int32_t> slots, std::span<const TokenView> rows,
                   std::span<const float> scales = {});

  // Flat data: the rows of `slots` as they are stored, [tensors, layers, slots.size(), heads, dim],
  // tensor after tensor when they differ in size; of one layer [tensors, slots.size(), heads, dim].
  int64_t flat_bytes(int64_t num_slots) const;
  int64_t layer_flat_bytes(int64_t num_slots) const;
  // INVALID_ARGUMENT unless `flat` has just that size, OUT_OF_RANGE for slots and layers that do
  // not exist; nothing is written then.
  absl::Status ReadFlat(std::span<const int32_t> slots, std::span<std::byte> flat) const;
  absl::Status WriteFlat(std::span<const int32_t> slots, std::span<const std::byte> flat);
  absl::Status ReadFlatLayer(int64_t layer, std::span<const int32_t> slots,
                             std::span<std::byte> flat) const;
  absl::Status WriteFlatLayer(int64_t layer, std::span<const int32_t> slots,
                              std::span<const std::byte> flat);

  // Rows from_slots of another pool's layer, or of all its layers, become rows to_slots of this
  // one, converted where dtypes or page formats differ. INVALID_ARGUMENT when the pools differ in
  // layers, tensors or their shapes, or the lists in length, OUT_OF_RANGE as above; nothing is
  // written then. One of them may lie on a device, or both on the same.
  //
  // `from` may be this pool, or share memory with it: what stands in from_slots before the call is
  // what to_slots get, as with buffer[to] = buffer[from]. Where a slot is both read and written,
  // rows wait in memory of their own meanwhile; RESOURCE_EXHAUSTED when that cannot be had, and
  // nothing is written then. Layer by layer it is less.
  absl::Status CopyLayerFrom(const TokenKvPool& from, int64_t layer,
                             std::span<const int32_t> from_slots,
                             std::span<const int32_t> to_slots);
  absl::Status CopyFrom(const TokenKvPool& from, std::span<const int32_t> from_slots,
                        std::span<const int32_t> to_slots);
  // Their INVALID_ARGUMENT and OUT_OF_RANGE without a copy, for who has something to begin before.
  absl::Status CheckCopyFrom(const TokenKvPool& from, std::span<const int32_t> from_slots,
                             std::span<const int32_t> to_slots) const;

 private:
  TokenKvPool(std::shared_ptr<KvPool> pool, std::vector<TokenView> views, int64_t latent_value_dim);

  absl::Status CheckLayer(int64_t layer) const;
  absl::Status CheckSameTensors(const TokenKvPool& other) const;
  TokenView KeyView(int64_t layer) const;
  TokenView ValueView(int64_t layer) const;

  // A flat buffer seen as packed views, buffer by buffer, of layers [first, first + count).
  absl::StatusOr<std::vector<TokenView>> FlatViews(int64_t first_layer, int64_t num_layers,
                                                   int64_t num_slots,
                                                   std::span<const std::byte> flat) const;
  absl::Status CopyFlat(int64_t first_layer, int64_t num_layers, std::span<const int32_t> slots,
                        std::span<const std::byte> flat, bool read) const;
  absl::StatusOr<std::vector<TokenCopy>> PlanLayersFrom(const TokenKvPool& from,
                                                        int64_t first_layer, int64_t num_layers,
                                                        std::span<const int32_t> from_slots,
                                                        std::span<const int32_t> to_slots) const;
  absl::Status CopyLayersFrom(const TokenKvPool& from, int64_t first_layer, int64_t num_layers,
                              std::span<const int32_t> from_slots,
                              std::span<const int32_t> to_slots);

  const std::shared_ptr<KvPool> pool_;
  const std::vector<TokenView> views_;  // As KvLayout::buffer_index().
  const int64_t latent_value_dim_;
  LayerCounter layers_;
  std::shared_ptr<ThreadPool> threads_;
};

}  // namespace kvferry
