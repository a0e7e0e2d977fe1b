#pragma once

// An allocation on an emulated device, and kernels that write there.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

namespace kvferry {

inline constexpr size_t kBytes = 1000;

// Memory of device 0, and a page of the host that it reaches.
class EmulatedDevice : public testing::Test {
 protected:
  void SetUp() override {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&memory_), kBytes), cudaSuccess);
    EXPECT_EQ(cudaHostRegister(pinned_, sizeof pinned_, cudaHostRegisterMapped), cudaSuccess);
  }
  void TearDown() override {
    EXPECT_EQ(cudaHostUnregister(pinned_), cudaSuccess);
    EXPECT_EQ(cudaFree(memory_), cudaSuccess);
  }

  static void Wait() { EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess); }

  template <typename... Parameters, typename... Arguments>
  static void Run(uint32_t threads, void (*kernel)(Parameters...), Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.blockDim.x = threads;
    EXPECT_EQ(cudaLaunchKernelEx(&config, kernel, arguments...), cudaSuccess);
  }

  std::byte* memory_ = nullptr;
  alignas(4096) std::byte pinned_[4096] = {};  // A page of its own.
};

template <typename Value>
__global__ void Write(Value* to, Value value) {
  *to = value;
}

inline __global__ void WriteAt(std::byte* to, int64_t at) { to[at] = std::byte{1}; }

template <typename Value>
__global__ void Copy(const Value* from, Value* to) {
  *to = *from;
}

}  // namespace kvferry
