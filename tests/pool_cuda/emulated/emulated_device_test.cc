#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/pool_cuda/device.h"

namespace kvferry {
namespace {

constexpr size_t kBytes = 1000;

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

__global__ void WriteAt(std::byte* to, int64_t at) { to[at] = std::byte{1}; }

template <typename Value>
__global__ void Copy(const Value* from, Value* to) {
  *to = *from;
}

__global__ void Enter(uint32_t* next, uint32_t* order) { order[threadIdx.x] = (*next)++; }

TEST_F(EmulatedDevice, TheHostCannotTouchItsMemory) {
  Run(1, &Write<std::byte>, memory_, std::byte{7});
  EXPECT_DEATH(memory_[0] = std::byte{1}, "");
  Wait();
  EXPECT_DEATH((void)*const_cast<volatile std::byte*>(memory_), "");
}

TEST_F(EmulatedDevice, MemoryBeginsFullOfRubbish) {
  std::vector<std::byte> seen(kBytes);
  ASSERT_EQ(cudaMemcpy(seen.data(), memory_, kBytes, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(seen, std::vector<std::byte>(kBytes, std::byte{0xcd}));
}

TEST_F(EmulatedDevice, WhatIsWrittenBesideAnAllocationIsFound) {
  for (const int64_t beside : {int64_t{-1}, int64_t{kBytes}}) {
    EXPECT_DEATH((Run(1, &WriteAt, memory_, beside), Wait()),
                 "written beside an allocation of 1000 bytes");
  }
  EXPECT_DEATH((Run(1, &WriteAt, memory_, int64_t{4096}), Wait()), "");
}

TEST_F(EmulatedDevice, AStreamIsWorkedOffWhenSomebodyWaits) {
  Run(1, &Write<std::byte>, memory_, std::byte{7});
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDefault, nullptr), cudaSuccess);
  EXPECT_EQ(pinned_[0], std::byte{0});
  Wait();
  EXPECT_EQ(pinned_[0], std::byte{7});
  // Other host memory is read before the call returns.
  std::byte plain{8};
  ASSERT_EQ(cudaMemcpyAsync(memory_, &plain, 1, cudaMemcpyDefault, nullptr), cudaSuccess);
  plain = std::byte{9};
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDefault, nullptr), cudaSuccess);
  Wait();
  EXPECT_EQ(pinned_[0], std::byte{8});
}

TEST_F(EmulatedDevice, OtherStreamsWaitForNobody) {
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  Run(1, &Write<std::byte>, memory_, std::byte{7});
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDefault, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(pinned_[0], std::byte{0xcd});
  Wait();
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDefault, stream), cudaSuccess);
  Wait();
  EXPECT_EQ(pinned_[0], std::byte{0xcd});
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(pinned_[0], std::byte{7});
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_DEATH(cudaStreamSynchronize(stream), "a stream that nobody made");
}

TEST_F(EmulatedDevice, KernelsReachTheirDeviceAndPinnedMemoryAlone) {
  Run(1, &Write<std::byte>, pinned_, std::byte{5});
  Run(1, &Copy<std::byte>, pinned_, memory_);
  Wait();
  EXPECT_EQ(pinned_[0], std::byte{5});
  std::byte plain{1};
  EXPECT_DEATH(Run(1, &Copy<std::byte>, memory_, &plain), "memory of the host that is not pinned");
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_DEATH(Run(1, &Write<std::byte>, memory_, std::byte{1}), "device 1 gets .* of another one");
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

TEST_F(EmulatedDevice, WordsThatAreNotAlignedTrap) {
  Run(1, &Write<uint4>, reinterpret_cast<uint4*>(memory_ + 16), uint4{});
  Wait();
  EXPECT_DEATH((Run(1, &Write<uint4>, reinterpret_cast<uint4*>(memory_ + 8), uint4{}), Wait()), "");
}

TEST_F(EmulatedDevice, ThreadsRunInEitherOrder) {
  auto* order = reinterpret_cast<uint32_t*>(pinned_);
  for (const uint32_t launch : {0, 1}) {
    Run(3, &Enter, order + 8 + launch, order + 4 * launch);
  }
  Wait();
  EXPECT_EQ(order[1], 1U);
  EXPECT_EQ(order[4 + 1], 1U);
  EXPECT_EQ(order[0] + order[4], 2U);
}

TEST_F(EmulatedDevice, CallsThatCudaRefusesAreRefused) {
  std::byte plain[8];
  EXPECT_EQ(cudaMemcpy(plain, memory_ + kBytes - 4, 8, cudaMemcpyDefault), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(plain, memory_, 8, cudaMemcpyHostToDevice), cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(memory_, pinned_ + 4000, 100, cudaMemcpyDefault), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(plain, 0, 8), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(plain), cudaErrorInvalidValue);
  EXPECT_EQ(cudaHostRegister(pinned_ + 4095, 1, 0), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaHostUnregister(plain), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  cudaLaunchConfig_t config = {};
  config.blockDim.x = 1025;
  EXPECT_EQ(cudaLaunchKernelEx(&config, &Write<std::byte>, memory_, std::byte{}),
            cudaErrorInvalidConfiguration);
}

}  // namespace
}  // namespace kvferry
