#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "pool/block_quant.h"

namespace kvferry {

// QuantizedCopy::Run() on an NVIDIA GPU, in one kernel launch, for some of its rows: all of `rows`,
// which stands in for copy.rows(), and `slots` for them, which are not checked again but for those
// outside the views: they are skipped. The bytes are those that a processor writes.
//
// Memory, stream and lifetimes as for CopyTokensCuda(). INVALID_ARGUMENT for more than INT32_MAX
// rows, or values in one; as CudaStatus() says when the launch fails. Nothing is written then.
// Thread-safe.
absl::Status RunQuantizedCuda(const QuantizedCopy& copy, const TokenView& rows,
                              const int32_t* slots, cudaStream_t stream);

}  // namespace kvferry
