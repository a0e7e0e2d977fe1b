#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "absl/status/status.h"
#include "pool/pool_memory.h"

namespace kvferry {

// Moves bytes between places that the current device can address: few long ones by CUDA's own
// copies, others many in one launch, however they are aligned. Asynchronous on `stream`, whose
// device must be the current one; the memory must live until it has run, the list need not. As
// CudaStatus() says when a launch fails; what came before it may be on its way. Thread-safe.
absl::Status MoveBytesCuda(std::span<const BytesMove> moves, cudaStream_t stream);
// The same of each of `items` at each of `places`, whose list is the items' alone: a launch for
// some 1,600 of them.
absl::Status MoveItemsCuda(std::span<const ItemsMove> items, std::span<const PlaceMove> places,
                           cudaStream_t stream);

// The same by one cudaMemcpyAsync a move, also of host memory that the device cannot address; CUDA
// may have waited then.
absl::Status CopyEachCuda(std::span<const BytesMove> moves, cudaStream_t stream);

}  // namespace kvferry
