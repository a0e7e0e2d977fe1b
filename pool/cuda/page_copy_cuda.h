#pragma once

// Gather and scatter on an NVIDIA GPU: page_copy.h for whole pages in device memory. One kernel
// launch whatever the number of pages, so fragmentation costs no descriptors. Not yet used by the
// transport, which moves host memory.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "pool/kv_pool.h"

namespace kvferry {

// Gather: packed[i] = page device_pages[i] of `buffer`, for i in [0, num_pages); scatter the other
// way. `buffer` and `packed` ([num_pages, buffer.item_bytes]) lie in device memory, or in host
// memory that the device can address; so does `device_pages`, whose ids the caller has checked
// against the buffer. Asynchronous on `stream`: everything must live until it has run.
// INVALID_ARGUMENT for null pointers or num_pages < 0, INTERNAL with CUDA's words when the launch
// fails.
absl::Status GatherPagesCuda(const BufferInfo& buffer, const int64_t* device_pages,
                             int64_t num_pages, std::byte* packed, cudaStream_t stream);
absl::Status ScatterPagesCuda(const BufferInfo& buffer, const int64_t* device_pages,
                              int64_t num_pages, const std::byte* packed, cudaStream_t stream);

}  // namespace kvferry
