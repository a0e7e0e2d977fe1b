#pragma once

// CUDA's own copies, which transfers between pools on a GPU are compared with.

#include <cstdint>

#include "absl/status/statusor.h"

namespace kvferry::bench {

// Seconds of one copy of all bytes, waited for.
struct PlainCudaCopies {
  double device_to_device;
  double to_host, to_device;  // The host's memory is pinned.
};

// In memory that is made for it. Errors as of CudaMemory().
absl::StatusOr<PlainCudaCopies> MeasurePlainCuda(int device, int64_t bytes);

}  // namespace kvferry::bench
