#include "pool/cuda/block_copy_cuda.h"

#include <vector>

#include "base/status.h"
#include "pool/cuda/cuda_status.h"

namespace kvferry {

// Why not CopyTokensCuda() with blocks as rows, a launch a buffer: that has to bring the lists of
// blocks to the device, and cannot reach host memory unless it is pinned. Nor cudaMemcpy2DAsync, a
// call a run, whose pitch, a whole buffer here, is limited to 2 GiB; nor cudaMemcpyBatchAsync, a
// call for all, which older toolkits lack and the default stream refuses. A call takes some
// microseconds, so that it is the runs being long that makes this fast, and what page allocators
// care for; where they are many and short, CopyTokensCuda() remains.
absl::Status CopyBlocksCuda(const BlockCache& from, BlockCache& to,
                            std::span<const BlockPair> pairs, cudaStream_t stream) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<BlockRun> runs, PlanBlockCopy(from, to, pairs));
  const std::vector<BufferInfo> sources = from.buffer_infos(), destinations = to.buffer_infos();
  for (size_t buffer = 0; buffer < sources.size(); ++buffer) {
    const int64_t item_bytes = sources[buffer].item_bytes;
    for (const BlockRun& run : runs) {
      KVFERRY_RETURN_IF_ERROR(CudaStatus(
          cudaMemcpyAsync(destinations[buffer].address + run.to * item_bytes,
                          sources[buffer].address + run.from * item_bytes,
                          static_cast<size_t>(run.count * item_bytes), cudaMemcpyDefault, stream),
          "block copy"));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvferry
