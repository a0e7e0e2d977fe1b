#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvferry {

// What a call of CUDA returned: RESOURCE_EXHAUSTED when memory is short, UNAVAILABLE when there is
// no device or driver to use, INTERNAL for the rest; the message is `what` and CUDA's words. Takes
// an error back from CUDA's "last error" too, so that the thread's next user is not blamed for it.
absl::Status CudaStatus(cudaError_t error, absl::string_view what);

}  // namespace kvferry
