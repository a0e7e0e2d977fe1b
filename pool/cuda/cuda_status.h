#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvferry {

// Whether nothing that was asked about is under way any more after this answer: it is done, or the
// device does nothing for this process any longer, which nearly every error means that is the
// answer to such a question. Those while a graph is captured say nothing about it.
bool IsOver(cudaError_t answer);

// What a call of CUDA returned: RESOURCE_EXHAUSTED when memory is short, UNAVAILABLE when there is
// no device or driver to use, INTERNAL for the rest; the message is `what` and CUDA's words. Takes
// an error back from CUDA's "last error" too, so that the thread's next user is not blamed for it.
absl::Status CudaStatus(cudaError_t error, absl::string_view what);
// What CUDA knows of an address; of memory that it has not heard of too.
absl::StatusOr<cudaPointerAttributes> AttributesOf(const void* address);

}  // namespace kvferry
