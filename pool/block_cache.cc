#include "pool/block_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

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

absl::Status CheckInRange(absl::string_view side, int64_t block, const BlockCache& cache) {
  if (block >= 0 && block < cache.num_blocks()) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat("block cache: ", side, " block ", block,
                                            " is not in [0, ", cache.num_blocks(), ")"));
}

// Both ends of the pairs in range, no block written twice nor, in one cache, read and written.
absl::Status CheckPairs(const BlockCache& from, const BlockCache& to,
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
    if (&from != &to || !written[source]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("block cache: block ", source, " is both read and written"));
  }
  return absl::OkStatus();
}

std::vector<BlockRun> Coalesce(std::span<const BlockPair> pairs) {
  std::vector<BlockPair> sorted(pairs.begin(), pairs.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<BlockRun> runs;
  for (const auto& [from, to] : sorted) {
    if (!runs.empty() && runs.back().from + runs.back().count == from &&
        runs.back().to + runs.back().count == to) {
      ++runs.back().count;
    } else {
      runs.push_back({from, to, 1});
    }
  }
  return runs;
}

}  // namespace

absl::Status BlockCacheShape::Validate() const {
  KVFERRY_RETURN_IF_ERROR(LayoutOf(*this).Validate());
  return CheckOrder(order);
}

int64_t BlockCacheShape::block_bytes() const { return LayoutOf(*this).page_bytes(); }

absl::StatusOr<std::shared_ptr<BlockCache>> BlockCache::Create(
    const BlockCacheShape& shape, int64_t num_blocks,
    const std::shared_ptr<const PoolMemory>& memory) {
  if (memory == nullptr) return Create(shape, num_blocks, HostMemory());
  KVFERRY_RETURN_IF_ERROR(shape.Validate());
  const int64_t max_blocks = kMaxBytes / shape.block_bytes();
  if (num_blocks < 1 || num_blocks > max_blocks) {
    return absl::InvalidArgumentError(absl::StrCat("block cache: num_blocks is ", num_blocks,
                                                   " but must lie in [1, ", max_blocks, "]"));
  }
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> blocks,
                           memory->Allocate(num_blocks * shape.block_bytes()));
  return std::shared_ptr<BlockCache>(new BlockCache(shape, num_blocks, memory, std::move(blocks)));
}

BlockCache::BlockCache(const BlockCacheShape& shape, int64_t num_blocks,
                       std::shared_ptr<const PoolMemory> memory, std::shared_ptr<std::byte> blocks)
    : shape_(shape),
      num_blocks_(num_blocks),
      memory_(std::move(memory)),
      blocks_(std::move(blocks)) {}

int64_t BlockCache::SizeOf(BlockDim dim) const {
  switch (dim) {
    case BlockDim::kKv:
      return shape_.mla ? 1 : 2;
    case BlockDim::kBlock:
      return num_blocks_;
    case BlockDim::kToken:
      return shape_.block_size;
    case BlockDim::kHead:
      return shape_.num_kv_heads;
    case BlockDim::kValue:
      return shape_.head_dim;
  }
  return 0;
}

int64_t BlockCache::StrideOf(BlockDim dim) const {
  int64_t stride = DTypeBytes(shape_.dtype);
  for (auto inner = shape_.order.rbegin(); *inner != dim; ++inner) stride *= SizeOf(*inner);
  return stride;
}

absl::StatusOr<TokenView> BlockCache::View(int64_t layer, int64_t kv) const {
  if (layer < 0 || layer >= shape_.num_layers || kv < 0 || kv >= SizeOf(BlockDim::kKv)) {
    return absl::OutOfRangeError(absl::StrCat("block cache: layer ", layer, ", kv ", kv,
                                              " but there are ", shape_.num_layers, " layers of ",
                                              SizeOf(BlockDim::kKv)));
  }
  return TokenView{
      .data = blocks_.get() + layer * (bytes() / shape_.num_layers) + kv * StrideOf(BlockDim::kKv),
      .dtype = shape_.dtype,
      .num_slots = num_blocks_ * shape_.block_size,
      .page_size = shape_.block_size,
      .num_heads = shape_.num_kv_heads,
      .head_dim = shape_.head_dim,
      .page_stride = StrideOf(BlockDim::kBlock),
      .token_stride = StrideOf(BlockDim::kToken),
      .head_stride = StrideOf(BlockDim::kHead),
      .value_stride = StrideOf(BlockDim::kValue)};
}

absl::Status BlockCache::PinFor(const PoolMemory& device) {
  KVFERRY_RETURN_IF_ERROR(CheckOnHost("block cache: what is to be pinned", *memory_));
  KVFERRY_ASSIGN_OR_RETURN(pin_, device.Pin({blocks_.get(), static_cast<size_t>(bytes())}));
  return absl::OkStatus();
}

std::vector<BufferInfo> BlockCache::buffer_infos() const {
  const int64_t item_bytes = StrideOf(BlockDim::kBlock);
  const int64_t buffer_bytes = num_blocks_ * item_bytes;
  std::vector<BufferInfo> infos;
  for (int64_t at = 0; at < bytes(); at += buffer_bytes) {
    infos.push_back({blocks_.get() + at, buffer_bytes, item_bytes});
  }
  return infos;
}

absl::StatusOr<std::vector<BlockRun>> PlanBlockCopy(const BlockCache& from, const BlockCache& to,
                                                    std::span<const BlockPair> pairs) {
  if (from.shape() != to.shape()) {
    return absl::InvalidArgumentError("block cache: blocks move between caches of one shape only");
  }
  KVFERRY_RETURN_IF_ERROR(CheckPairs(from, to, pairs));
  return Coalesce(pairs);
}

absl::Status CopyBlocks(const BlockCache& from, BlockCache& to, std::span<const BlockPair> pairs,
                        ThreadPool* threads) {
  // A device knows how to reach the host, and not the other way round.
  const PoolMemory& copier = to.memory().on_host() ? from.memory() : to.memory();
  if (!copier.on_host()) return copier.RunBlocks(from, to, pairs);
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<BlockRun> runs, PlanBlockCopy(from, to, pairs));
  const std::vector<BufferInfo> sources = from.buffer_infos();
  const std::vector<BufferInfo> destinations = to.buffer_infos();
  const auto copy_buffer = [&](int64_t buffer) {
    const auto& [source, bytes, item_bytes] = sources[static_cast<size_t>(buffer)];
    for (const BlockRun& run : runs) {
      std::memcpy(destinations[static_cast<size_t>(buffer)].address + run.to * item_bytes,
                  source + run.from * item_bytes, static_cast<size_t>(run.count * item_bytes));
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
