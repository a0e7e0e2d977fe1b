#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/kv_layout.h"
#include "pool/kv_pool.h"
#include "pool/pool_memory.h"
#include "pool/token_view.h"

namespace kvferry {

// What one request's state is in the gated delta net layers of a model (Qwen3-Next). It does not
// grow with the request, unlike a KV cache.
struct GdnShape {
  int64_t num_layers = 0;  // Linear attention layers only, counted from 0.
  int64_t num_v_heads = 0;
  int64_t head_k_dim = 0;
  int64_t head_v_dim = 0;
  int64_t conv_dim = 0;                 // Channels of the convolution: Q, K and V side by side.
  int64_t conv_kernel_size = 0;         // The state keeps conv_kernel_size - 1 columns.
  DType conv_dtype = DType::kBFloat16;  // The model's.

  // Every count within its limit, item sizes within KvLayout::kMaxItemBytes, conv_dtype a float of
  // 2 or 4 bytes. The message names the field.
  absl::Status Validate() const;

  // The rest need a valid shape. Bytes of one slot in one layer:
  int64_t recurrent_item_bytes() const;
  int64_t conv_item_bytes() const;

  bool operator==(const GdnShape&) const = default;

  static constexpr int64_t kMaxConvDim = 1 << 24;
  static constexpr int64_t kMaxConvKernelSize = 1 << 16;
};

// The states of all requests in the gated delta net layers. For each layer and slot
//
//   recurrent  [num_v_heads, head_k_dim, head_v_dim]  float32
//   conv       [conv_dim, conv_kernel_size - 1]       conv_dtype
//
// with all slots of a layer, and all layers of a kind, one behind the other. Slots are
//
//   0                      padding: what engines write for the padded rows of a batch
//   1 .. max_requests      one a running request, numbered by the caller (slot r of a
//                          ReqToTokenPool, which counts from 0, is r + 1 here)
//   behind these           track slots, handed out here: checkpoints of a request's state
//
// What pymllm calls GDNPool. Not thread-safe; engines drive it from their scheduler thread.
class GdnPool {
 public:
  // Zeroed memory of the given kind; null stands for HostMemory(). Where it is not on_host(), the
  // addresses below are the device's, and states change through PoolMemory::Run() alone.
  // INVALID_ARGUMENT for a bad shape, max_requests outside [1, kMaxSlots], max_track_slots outside
  // [0, kMaxSlots] or more than kMaxBytes in all; errors of memory->Allocate(), RESOURCE_EXHAUSTED
  // in host memory, when it cannot be had.
  static absl::StatusOr<GdnPool> Create(const GdnShape& shape, int64_t max_requests,
                                        int64_t max_track_slots = 0,
                                        const std::shared_ptr<const PoolMemory>& memory = nullptr);
  // Uses an engine's memory: all states of each kind, as above, padding and track slots included;
  // as many slots as there are beyond those of max_requests are track slots. Nothing is copied or
  // zeroed, and `owner` is kept alive as long as the pool and what is taken from it.
  // INVALID_ARGUMENT as for Create(), or naming the kind whose bytes are no whole slots, or as many
  // as the other's, or where the two overlap; `memory` as for KvPool::Adopt(). Zeros are allocated
  // in it, with its errors.
  static absl::StatusOr<GdnPool> Adopt(const GdnShape& shape, int64_t max_requests,
                                       std::span<std::byte> recurrent, std::span<std::byte> conv,
                                       std::shared_ptr<const void> owner,
                                       const std::shared_ptr<const PoolMemory>& memory = nullptr);
  // The INVALID_ARGUMENT of Create(), for who takes other memory first.
  static absl::Status Check(const GdnShape& shape, int64_t max_requests, int64_t max_track_slots);
  GdnPool(GdnPool&&) = default;  // A copy would share the memory but not the list of track slots.
  GdnPool& operator=(GdnPool&&) = default;

  const GdnShape& shape() const { return shape_; }
  int64_t max_requests() const { return max_requests_; }
  int64_t max_track_slots() const { return num_slots() - 1 - max_requests_; }
  int64_t num_slots() const { return states_.num_slots; }  // Padding and track slots included.
  int64_t num_free_track_slots() const { return static_cast<int64_t>(free_.size()); }
  // Bytes of the states, of both kinds. Zeros as large as the larger of a layer's two states of one
  // slot, which Reset() copies, lie beside them.
  int64_t bytes() const;
  const PoolMemory& memory() const { return *memory_; }

  // Zeroes the states of these slots in all layers; a slot may stand twice. INVALID_ARGUMENT naming
  // the slot when one is out of range or a track slot that is not allocated; nothing changes then.
  // What a device answers is passed on.
  absl::Status Reset(std::span<const int64_t> slots);

  // Copies the states of sources[i] to destinations[i] in all layers, for all i at once: every
  // source is read as it was before the call, whatever the order of the list, so one batch may save
  // a slot and overwrite it, or swap two. A source may stand many times, a destination once.
  // Pairs with destination 0 are the padding of a batch: they copy nothing, and may repeat.
  //
  // INVALID_ARGUMENT naming the pair when the lists differ in length, a slot is out of range, a
  // track slot is not allocated, a destination stands twice, or padding would be copied to a slot;
  // RESOURCE_EXHAUSTED when a circle of copies needs a spare slot that the memory will not give.
  // Nothing changes then. What a device that fails has written is not known.
  absl::Status Copy(std::span<const int64_t> sources, std::span<const int64_t> destinations);

  // A track slot; it holds what its last user left. RESOURCE_EXHAUSTED when none is free.
  absl::StatusOr<int64_t> AllocateTrackSlot();
  // INVALID_ARGUMENT when `slot` is no track slot, or one that is not allocated.
  absl::Status FreeTrackSlot(int64_t slot);
  // All track slots are free again. No state changes.
  void Clear();

  // The states of one layer, all slots; `layer` must be in range. Addresses of memory().
  std::span<float> recurrent_state(int64_t layer) const;
  std::span<std::byte> conv_state(int64_t layer) const;
  // One buffer a layer and kind, first the recurrent ones, then conv; an item is one slot. With
  // them a KvPool of uint8 "pages" can adopt the states, which thus move as KV does.
  std::vector<BufferInfo> buffer_infos() const;
  // These live as long as they have an owner, also after the pool.
  std::shared_ptr<std::byte> recurrent_memory() const { return states_.recurrent; }
  std::shared_ptr<std::byte> conv_memory() const { return states_.conv; }

  // Of Copy().
  struct SlotCopy {
    int64_t destination, source;
  };

  static constexpr int64_t kMaxSlots = 1 << 24;
  static constexpr int64_t kMaxBytes = int64_t{1} << 44;  // Of each kind.

 private:
  // [num_layers, num_slots] items of each kind.
  struct States {
    std::shared_ptr<std::byte> recurrent, conv;
    int64_t num_slots = 0;
  };
  // PoolMemory::Allocate, or AllocateForNow.
  using Allocator = absl::StatusOr<std::shared_ptr<std::byte>> (PoolMemory::*)(int64_t) const;
  static absl::StatusOr<States> Allocate(const GdnShape& shape, int64_t num_slots,
                                         const PoolMemory& memory, Allocator allocate);
  static absl::StatusOr<GdnPool> Over(const GdnShape& shape, int64_t max_requests, States states,
                                      const std::shared_ptr<const PoolMemory>& memory);
  GdnPool(const GdnShape& shape, int64_t max_requests, std::shared_ptr<const PoolMemory> memory,
          States states, std::shared_ptr<std::byte> zeros);

  bool IsTrackSlot(int64_t slot) const { return slot > max_requests_ && slot < num_slots(); }
  absl::Status CheckUsable(int64_t slot) const;  // In range and, as a track slot, allocated.
  // The copies that have something to copy, by destination.
  absl::StatusOr<std::vector<SlotCopy>> CheckCopy(std::span<const int64_t> sources,
                                                  std::span<const int64_t> destinations) const;
  // As buffer_infos(): an item is a row.
  std::vector<TokenView> Rows(const States& states) const;

  GdnShape shape_;
  int64_t max_requests_;
  std::shared_ptr<const PoolMemory> memory_;
  States states_;
  std::shared_ptr<std::byte> zeros_;  // An item of either kind.
  std::vector<int64_t> free_;         // Track slots; the last one is handed out next.
  std::vector<bool> allocated_;       // By slot; only those of track slots matter.
};

}  // namespace kvferry
