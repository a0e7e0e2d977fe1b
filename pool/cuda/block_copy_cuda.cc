#include "pool/cuda/block_copy_cuda.h"

#include <algorithm>
#include <span>
#include <vector>

#include "base/status.h"
#include "pool/cuda/cuda_kv_pool.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/move_bytes_cuda.h"

namespace kvferry {
namespace {

// Whether kernels of the current device can read and write the blocks.
absl::StatusOr<bool> IsReached(const BlockCache& cache) {
  if (cache.memory().on_host()) {
    const std::span<const std::span<std::byte>> pieces = cache.pieces();
    return std::all_of(pieces.begin(), pieces.end(),
                       [](const auto& piece) { return IsPinned(piece); });
  }
  int current = 0;
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&current), "block copy"));
  return cache.memory().cuda_device() == current;
}

}  // namespace

absl::Status CopyBlocksCuda(const BlockCache& from, BlockCache& to,
                            std::span<const BlockPair> pairs, cudaStream_t stream) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<BlockRun> runs, PlanBlockCopy(from, to, pairs));
  const std::vector<BufferInfo> sources = from.buffer_infos(), destinations = to.buffer_infos();
  std::vector<BytesMove> moves;
  moves.reserve(sources.size() * runs.size());
  for (size_t buffer = 0; buffer < sources.size(); ++buffer) {
    const int64_t item_bytes = sources[buffer].item_bytes;
    for (const BlockRun& run : runs) {
      moves.push_back({sources[buffer].address + run.from * item_bytes,
                       destinations[buffer].address + run.to * item_bytes, run.count * item_bytes});
    }
  }
  KVFERRY_ASSIGN_OR_RETURN(const bool reads, IsReached(from));
  KVFERRY_ASSIGN_OR_RETURN(const bool writes, IsReached(to));
  return reads && writes ? MoveBytesCuda(moves, stream) : CopyEachCuda(moves, stream);
}

}  // namespace kvferry
