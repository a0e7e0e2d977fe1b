#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "absl/status/status.h"
#include "pool/block_cache.h"

namespace kvferry {

// CopyBlocks() where either cache, or both, lie on a GPU (BlockCache::Create in CudaMemory()): swap
// in, swap out and copy of an engine's CacheEngine.
//
// On `stream`, whose device must be the current one; both caches must live until it has come this
// far. Between that device and itself or pinned memory (PinHostMemory, or an engine's own) some
// launches move all blocks (MoveBytesCuda), else there is a cudaMemcpyAsync for each run of
// neighbouring blocks and buffer of the caches, which takes some microseconds each, and waits where
// it copies host memory. A run of which only a part is pinned, as a page of the system's that
// another cache shares, CUDA does not copy: the processor does, and waits for all of the stream
// before.
//
// Errors as for PlanBlockCopy(), and nothing is written then; as CudaStatus() says when CUDA
// refuses a copy, when those before it may be on their way already. Thread-safe.
absl::Status CopyBlocksCuda(const BlockCache& from, BlockCache& to,
                            std::span<const BlockPair> pairs, cudaStream_t stream);

}  // namespace kvferry
