#include "pool/block_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check_range.h"
#include "base/status.h"
#include "pool/rows_aside.h"

namespace kvferry {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 44;

absl::Status CheckOrder(const std::array<BlockDim, 5>& order) {
  uint32_t seen = 0;
  for (const BlockDim dim : order) seen |= 1u << std::min<uint32_t>(static_cast<uint32_t>(dim), 5);
  if (seen == 0b11111) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "block cache: order must name each of the five dimensions once: kv, block, token, head, "
      "value");
}

// One layer as keys and values of pages, whose limits are KvLayout's.
KvLayout LayoutOf(const BlockCacheShape& shape) {
  KvLayout layout = KvLayout::Mha(shape.num_layers, shape.block_size, shape.num_kv_heads,
                                  shape.head_dim, shape.dtype);
  if (shape.mla) layout.tensors.pop_back();
  return layout;
}

absl::Status CheckNumBlocks(const BlockCacheShape& shape, int64_t num_blocks) {
  const int64_t max_blocks = kMaxBytes / shape.block_bytes();
  return CheckRange("block cache", "num_blocks", num_blocks, 1, max_blocks);
}

absl::Status CheckInRange(absl::string_view side, int64_t block, const BlockCache& cache) {
  if (block >= 0 && block < cache.num_blocks()) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat("block cache: ", side, " block ", block,
                                            " is not in [0, ", cache.num_blocks(), ")"));
}

bool ShareMemory(const BlockCache& a, const BlockCache& b) {
  return std::any_of(a.pieces().begin(), a.pieces().end(), [&b](const std::span<std::byte>& mine) {
    return std::any_of(b.pieces().begin(), b.pieces().end(),
                       [&mine](const std::span<std::byte>& theirs) { return Meet(mine, theirs); });
  });
}

// An engine's layers may be adopted more than once. Of caches of one shape.
bool HaveSameLayers(const BlockCache& a, const BlockCache& b) {
  if (a.num_blocks() != b.num_blocks()) return false;
  for (int64_t layer = 0; layer < a.shape().num_layers; ++layer) {
    if (a.layer(layer) != b.layer(layer)) return false;
  }
  return true;
}

// Both ends of the pairs in range, no block written twice nor, in one cache, read and written.
absl::Status CheckPairs(const BlockCache& from, const BlockCache& to, bool are_one,
                        std::span<const BlockPair> pairs) {
  std::vector<bool> written(static_cast<size_t>(to.num_blocks()), false);
  for (const auto& [source, destination] : pairs) {
    KVFERRY_RETURN_IF_ERROR(CheckInRange("source", source, from));
    KVFERRY_RETURN_IF_ERROR(CheckInRange("destination", destination, to));
    if (written[destination]) {
      return absl::InvalidArgumentError(
          absl::StrCat("block cache: block ", destination, " is written twice"));
    }
    written[destination] = true;
  }
  for (const auto& [source, destination] : pairs) {
    if (!are_one || !written[source]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("block cache: block ", source, " is both read and written"));
  }
  return absl::OkStatus();
}

std::vector<ItemsMove> Coalesce(std::span<const BlockPair> pairs) {
  std::vector<BlockPair> sorted(pairs.begin(), pairs.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<ItemsMove> runs;
  for (const auto& [from, to] : sorted) {
    if (!runs.empty() && runs.back().from + runs.back().items == from &&
        runs.back().to + runs.back().items == to) {
      ++runs.back().items;
    } else {
      runs.push_back({from, to, 1});
    }
  }
  return runs;
}

}  // namespace

absl::Status BlockCacheShape::Validate() const {
  const auto check = [](absl::string_view name, int64_t value, int64_t max) {
    return CheckRange("block cache", name, value, 1, max);
  };
  KVFERRY_RETURN_IF_ERROR(check("num_layers", num_layers, KvLayout::kMaxLayers));
  KVFERRY_RETURN_IF_ERROR(check("block_size", block_size, KvLayout::kMaxPageSize));
  KVFERRY_RETURN_IF_ERROR(check("num_kv_heads", num_kv_heads, KvLayout::kMaxHeads));
  KVFERRY_RETURN_IF_ERROR(check("head_dim", head_dim, KvLayout::kMaxHeadDim));
  KVFERRY_RETURN_IF_ERROR(LayoutOf(*this).Validate());  // Also what they make together.
  return CheckOrder(order);
}

int64_t BlockCacheShape::block_bytes() const { return LayoutOf(*this).page_bytes(); }

int64_t BlockCacheShape::SizeOf(BlockDim dim, int64_t num_blocks) const {
  switch (dim) {
    case BlockDim::kKv:
      return mla ? 1 : 2;
    case BlockDim::kBlock:
      return num_blocks;
    case BlockDim::kToken:
      return block_size;
    case BlockDim::kHead:
      return num_kv_heads;
    case BlockDim::kValue:
      return head_dim;
  }
  return 0;
}

int64_t BlockCacheShape::StrideOf(BlockDim dim, int64_t num_blocks) const {
  int64_t stride = DTypeBytes(dtype);
  for (auto inner = order.rbegin(); *inner != dim; ++inner) stride *= SizeOf(*inner, num_blocks);
  return stride;
}

std::vector<ArrayDim> BlockCacheShape::LayerDims(int64_t num_blocks) const {
  std::vector<ArrayDim> dims;
  for (const BlockDim dim :
       {BlockDim::kKv, BlockDim::kBlock, BlockDim::kToken, BlockDim::kHead, BlockDim::kValue}) {
    if (dim == BlockDim::kKv && mla) continue;
    dims.push_back({SizeOf(dim, num_blocks), StrideOf(dim, num_blocks)});
  }
  return dims;
}

absl::StatusOr<std::shared_ptr<BlockCache>> BlockCache::Create(
    const BlockCacheShape& shape, int64_t num_blocks,
    const std::shared_ptr<const PoolMemory>& memory) {
  if (memory == nullptr) return Create(shape, num_blocks, HostMemory());
  KVFERRY_RETURN_IF_ERROR(shape.Validate());
  KVFERRY_RETURN_IF_ERROR(CheckNumBlocks(shape, num_blocks));
  const int64_t bytes = num_blocks * shape.block_bytes();
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> blocks, memory->Allocate(bytes));
  std::vector<std::byte*> layers;
  for (int64_t i = 0; i < shape.num_layers; ++i) {
    layers.push_back(blocks.get() + i * (bytes / shape.num_layers));
  }
  return std::shared_ptr<BlockCache>(
      new BlockCache(shape, num_blocks, memory, std::move(layers), std::move(blocks)));
}

absl::StatusOr<std::shared_ptr<BlockCache>> BlockCache::Adopt(
    const BlockCacheShape& shape, std::span<const std::span<std::byte>> layers,
    std::shared_ptr<const void> owner, const std::shared_ptr<const PoolMemory>& memory) {
  if (memory == nullptr) return Adopt(shape, layers, std::move(owner), HostMemory());
  KVFERRY_RETURN_IF_ERROR(shape.Validate());
  if (static_cast<int64_t>(layers.size()) != shape.num_layers) {
    return absl::InvalidArgumentError(absl::StrCat(
        "block cache: ", layers.size(), " layers given, but num_layers is ", shape.num_layers));
  }
  const int64_t block_bytes = shape.block_bytes() / shape.num_layers;
  const int64_t num_blocks = static_cast<int64_t>(layers[0].size()) / block_bytes;
  KVFERRY_RETURN_IF_ERROR(CheckNumBlocks(shape, num_blocks));
  std::vector<std::byte*> addresses;
  for (const std::span<std::byte>& layer : layers) {
    const bool is_whole =
        layer.data() != nullptr && static_cast<int64_t>(layer.size()) == num_blocks * block_bytes;
    const absl::Status fits = is_whole
                                  ? memory->CheckHolds(layer)
                                  : absl::InvalidArgumentError(absl::StrCat(
                                        "it has to have ", num_blocks, " blocks of ", block_bytes));
    if (!fits.ok()) {
      return absl::Status(fits.code(), absl::StrCat("block cache: layer ", addresses.size(), " of ",
                                                    layer.size(), " bytes: ", fits.message()));
    }
    addresses.push_back(layer.data());
  }
  if (const auto met = FindMeetInPart(layers)) {
    return absl::InvalidArgumentError(absl::StrCat("block cache: layers ", met->first, " and ",
                                                   met->second,
                                                   " overlap, so that a block of one is part of "
                                                   "others of the other"));
  }
  return std::shared_ptr<BlockCache>(
      new BlockCache(shape, num_blocks, memory, std::move(addresses), std::move(owner)));
}

BlockCache::BlockCache(const BlockCacheShape& shape, int64_t num_blocks,
                       std::shared_ptr<const PoolMemory> memory, std::vector<std::byte*> layers,
                       std::shared_ptr<const void> owner)
    : shape_(shape),
      num_blocks_(num_blocks),
      memory_(std::move(memory)),
      owner_(std::move(owner)),
      layers_(std::move(layers)) {
  const auto size = static_cast<size_t>(layer_bytes());
  for (std::byte* const layer : layers_) {
    if (!pieces_.empty() && pieces_.back().data() + pieces_.back().size() == layer) {
      pieces_.back() = {pieces_.back().data(), pieces_.back().size() + size};
    } else {
      pieces_.push_back({layer, size});
    }
  }
}

absl::StatusOr<TokenView> BlockCache::View(int64_t layer, int64_t kv) const {
  if (layer < 0 || layer >= shape_.num_layers || kv < 0 ||
      kv >= shape_.SizeOf(BlockDim::kKv, num_blocks_)) {
    return absl::OutOfRangeError(absl::StrCat("block cache: layer ", layer, ", kv ", kv,
                                              " but there are ", shape_.num_layers, " layers of ",
                                              shape_.SizeOf(BlockDim::kKv, num_blocks_)));
  }
  return TokenView{.data = layers_[layer] + kv * shape_.StrideOf(BlockDim::kKv, num_blocks_),
                   .dtype = shape_.dtype,
                   .num_slots = num_blocks_ * shape_.block_size,
                   .page_size = shape_.block_size,
                   .num_heads = shape_.num_kv_heads,
                   .head_dim = shape_.head_dim,
                   .page_stride = shape_.StrideOf(BlockDim::kBlock, num_blocks_),
                   .token_stride = shape_.StrideOf(BlockDim::kToken, num_blocks_),
                   .head_stride = shape_.StrideOf(BlockDim::kHead, num_blocks_),
                   .value_stride = shape_.StrideOf(BlockDim::kValue, num_blocks_)};
}

absl::Status BlockCache::PinFor(const PoolMemory& device) {
  KVFERRY_RETURN_IF_ERROR(CheckOnHost("block cache: what is to be pinned", *memory_));
  const bool reached =
      std::all_of(pieces_.begin(), pieces_.end(),
                  [&](const std::span<std::byte>& piece) { return device.Reaches(piece); });
  if (reached) return absl::OkStatus();
  // All at once: layers of an engine's may share pages of the system's.
  KVFERRY_ASSIGN_OR_RETURN(pin_, device.Pin(pieces_));
  return absl::OkStatus();
}

std::vector<BufferInfo> BlockCache::buffer_infos() const {
  const int64_t item_bytes = shape_.StrideOf(BlockDim::kBlock, num_blocks_);
  const int64_t buffer_bytes = num_blocks_ * item_bytes, bytes = layer_bytes();
  std::vector<BufferInfo> infos;
  for (std::byte* const layer : layers_) {
    for (int64_t at = 0; at < bytes; at += buffer_bytes) {
      infos.push_back({layer + at, buffer_bytes, item_bytes});
    }
  }
  return infos;
}

absl::StatusOr<std::vector<ItemsMove>> PlanBlockCopy(const BlockCache& from, const BlockCache& to,
                                                     std::span<const BlockPair> pairs) {
  if (from.shape() != to.shape()) {
    return absl::InvalidArgumentError("block cache: blocks move between caches of one shape only");
  }
  const bool are_one = &from == &to || HaveSameLayers(from, to);
  if (!are_one && ShareMemory(from, to)) {
    return absl::InvalidArgumentError(
        "block cache: the caches share memory but not all layers, so that a block of one is part "
        "of others of the other");
  }
  KVFERRY_RETURN_IF_ERROR(CheckPairs(from, to, are_one, pairs));
  return Coalesce(pairs);
}

absl::Status CopyBlocks(const BlockCache& from, BlockCache& to, std::span<const BlockPair> pairs,
                        ThreadPool* threads) {
  // A device knows how to reach the host, and not the other way round.
  const PoolMemory& copier = to.memory().on_host() ? from.memory() : to.memory();
  if (!copier.on_host()) return copier.RunBlocks(from, to, pairs);
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<ItemsMove> runs, PlanBlockCopy(from, to, pairs));
  const std::vector<BufferInfo> sources = from.buffer_infos();
  const std::vector<BufferInfo> destinations = to.buffer_infos();
  const auto copy_buffer = [&](int64_t buffer) {
    const auto& [source, bytes, item_bytes] = sources[static_cast<size_t>(buffer)];
    for (const ItemsMove& run : runs) {
      std::memcpy(destinations[static_cast<size_t>(buffer)].address + run.to * item_bytes,
                  source + run.from * item_bytes, static_cast<size_t>(run.items * item_bytes));
    }
  };
  const auto num_buffers = static_cast<int64_t>(sources.size());
  if (threads != nullptr) {
    threads->ParallelFor(num_buffers, copy_buffer);
  } else {
    for (int64_t buffer = 0; buffer < num_buffers; ++buffer) copy_buffer(buffer);
  }
  return absl::OkStatus();
}

}  // namespace kvferry
