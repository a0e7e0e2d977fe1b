#pragma once

// CUDA's memory, for the suites of pools.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <vector>

#include "pool/cuda/cuda_memory.h"
#include "tests/pool/memory_backend.h"
#include "tests/pool_cuda/device.h"

namespace kvferry {

inline MemoryBackend CudaBackend() {
  return {{"Cuda", MissingDevice()},
          CudaMemory(0),
          [](const std::byte* at, int64_t bytes) {
            std::vector<std::byte> host(static_cast<size_t>(bytes));
            EXPECT_EQ(cudaMemcpy(host.data(), at, host.size(), cudaMemcpyDefault), cudaSuccess);
            return host;
          },
          [](std::byte* at, std::span<const std::byte> bytes) {
            CopyToDevice(at, bytes.data(), bytes.size());
          },
          /*slow=*/true};
}

}  // namespace kvferry
