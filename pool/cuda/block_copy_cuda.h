#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "absl/status/status.h"
#include "pool/block_cache.h"

namespace kvferry {

// CopyBlocks() where either cache, or both, lie on a GPU (BlockCache::Create in CudaMemory()): swap
// in, swap out and copy of an engine's CacheEngine. Tested on an emulated device; it has
// never run on a GPU.
//
// One cudaMemcpyAsync for each run of neighbouring blocks and buffer of the caches, on `stream`,
// whose device must be the current one. Both caches must live until the stream has come this far.
// Copies of host memory are asynchronous only when it is pinned (PinHostMemory).
//
// Errors as for PlanBlockCopy(), and nothing is written then; as CudaStatus() says when CUDA
// refuses a copy, when those before it may be on their way already. Thread-safe.
absl::Status CopyBlocksCuda(const BlockCache& from, BlockCache& to,
                            std::span<const BlockPair> pairs, cudaStream_t stream);

}  // namespace kvferry
