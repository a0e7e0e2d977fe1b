#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "pool/kv_layout.h"
#include "pool/kv_pool.h"
#include "pool/pool_memory.h"
#include "pool/token_view.h"

namespace kvferry {

// The dimensions of one layer's block cache, [2, num_blocks, block_size, num_kv_heads, head_dim].
enum class BlockDim : uint8_t { kKv, kBlock, kToken, kHead, kValue };

struct BlockCacheShape {
  int64_t num_layers = 0;
  int64_t block_size = 0;  // Tokens.
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  DType dtype = DType::kBFloat16;
  bool mla = false;  // One latent vector a token instead of a key and a value: kKv has size 1.
  // Dimensions as they lie in memory, outermost first: each once. The default is vLLM's
  // FlashAttention, NHD; {kBlock, kKv, kHead, kToken, kValue} its FlashInfer, HND.
  std::array<BlockDim, 5> order = {BlockDim::kKv, BlockDim::kBlock, BlockDim::kToken,
                                   BlockDim::kHead, BlockDim::kValue};

  bool operator==(const BlockCacheShape&) const = default;
  // INVALID_ARGUMENT naming the count that is not positive or too large, or what is wrong with the
  // order.
  absl::Status Validate() const;
  // The rest need a valid shape. Of one block over all layers.
  int64_t block_bytes() const;
  // Indices of a dimension, and bytes from one to the next, in a layer of that many blocks.
  int64_t SizeOf(BlockDim dim, int64_t num_blocks) const;
  int64_t StrideOf(BlockDim dim, int64_t num_blocks) const;
  // A layer as the engine sees it, whatever the order in memory: [2, num_blocks, block_size,
  // num_kv_heads, head_dim], without the first of them where there is one latent.
  std::vector<ArrayDim> LayerDims(int64_t num_blocks) const;
};

// {block to read, block to write}.
using BlockPair = std::pair<int64_t, int64_t>;

// The block cache of an engine on one device, in whatever order of dimensions its attention kernels
// want it: what vLLM's CacheEngine calls gpu_cache or cpu_cache. Two of them and CopyBlocks() make
// swap_in, swap_out and copy.
//
// Immutable but for PinFor() and the bytes of blocks, which belong to whoever holds the block;
// thread-compatible.
class BlockCache {
 public:
  // Zeroed memory of its own, of the given kind (null: the host's), whose errors are passed on:
  // RESOURCE_EXHAUSTED when the machine will not give it. INVALID_ARGUMENT for a bad shape, or a
  // num_blocks that is not positive or makes more than 2^44 bytes.
  static absl::StatusOr<std::shared_ptr<BlockCache>> Create(
      const BlockCacheShape& shape, int64_t num_blocks,
      const std::shared_ptr<const PoolMemory>& memory = HostMemory());

  // Uses an engine's memory: layers[i] is all of layer i, of as many blocks as the others. Nothing
  // is copied, and `owner` is kept alive. INVALID_ARGUMENT as above, or naming the layer that does
  // not fit, or two that overlap in part; layers may share all of one. `memory` as for
  // KvPool::Adopt().
  static absl::StatusOr<std::shared_ptr<BlockCache>> Adopt(
      const BlockCacheShape& shape, std::span<const std::span<std::byte>> layers,
      std::shared_ptr<const void> owner,
      const std::shared_ptr<const PoolMemory>& memory = HostMemory());

  const BlockCacheShape& shape() const { return shape_; }
  // What kind of memory the blocks lie in; addresses below are good where that says.
  const PoolMemory& memory() const { return *memory_; }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t bytes() const { return num_blocks_ * shape_.block_bytes(); }
  // All of a layer, which must be in range, as shape().LayerDims() has it.
  std::byte* layer(int64_t layer) const { return layers_[layer]; }
  // The memory of all layers in as few pieces as there are.
  std::span<const std::span<std::byte>> pieces() const { return pieces_; }
  // The keys (kv = 0) or values (1) of a layer; slot = block * block_size + place in the block.
  // OUT_OF_RANGE when there are none.
  absl::StatusOr<TokenView> View(int64_t layer, int64_t kv) const;
  // Layer after layer, and within a layer one for each combination of the dimensions outside of
  // the block: a buffer of num_blocks() items. K and V of a layer in the default order.
  std::vector<BufferInfo> buffer_infos() const;
  // Of a cache in the host's memory: the device of that memory reaches the blocks where they lie as
  // long as this lives, so that CopyBlocks() between them is faster. Takes the room of all blocks.
  // Errors of PoolMemory::Pin(). Nothing to do where that is the host's too, nor where somebody, as
  // an engine, has pinned all of them already: then they are reached for as long as he says.
  absl::Status PinFor(const PoolMemory& device);

 private:
  BlockCache(const BlockCacheShape& shape, int64_t num_blocks,
             std::shared_ptr<const PoolMemory> memory, std::vector<std::byte*> layers,
             std::shared_ptr<const void> owner);

  int64_t layer_bytes() const { return bytes() / shape_.num_layers; }

  const BlockCacheShape shape_;
  const int64_t num_blocks_;
  const std::shared_ptr<const PoolMemory> memory_;
  const std::shared_ptr<const void> owner_;
  const std::vector<std::byte*> layers_;
  std::vector<std::span<std::byte>> pieces_;
  std::shared_ptr<const void> pin_;  // Of the pieces.
};

// The pairs in as few runs as there are, in order of `from`: what any copy of blocks checks first.
// Errors as for CopyBlocks(), of any kind of memory.
absl::StatusOr<std::vector<ItemsMove>> PlanBlockCopy(const BlockCache& from, const BlockCache& to,
                                                     std::span<const BlockPair> pairs);

// Block pair.second of `to` becomes block pair.first of `from`, in every layer, for all pairs.
// Neighbouring blocks that go to neighbouring blocks move in one piece, in whatever order the pairs
// come. `from` and `to` may be the same cache, or have adopted the same layers.
//
// INVALID_ARGUMENT when the caches differ in shape, a block is written twice, a block of one cache
// is both read and written, or caches share memory but not all layers; OUT_OF_RANGE naming a block
// that does not exist. Nothing is written then. `threads`, which may be null, help. Where a cache
// is not on_host() its device copies (PoolMemory::RunBlocks()) and is done when this returns; what
// a device that fails has written is not known. cuda/block_copy_cuda.h has the same on a stream.
absl::Status CopyBlocks(const BlockCache& from, BlockCache& to, std::span<const BlockPair> pairs,
                        ThreadPool* threads = nullptr);

}  // namespace kvferry
