// What the emulated devices forbid, and do when somebody waits for it.

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/pool_cuda/emulated/emulated_memory.h"

namespace kvferry {
namespace {

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
  // Also by the copy that is said to wait: it may return before it has written.
  plain = std::byte{10};
  ASSERT_EQ(cudaMemcpy(memory_, &plain, 1, cudaMemcpyDefault), cudaSuccess);
  Run(1, &Copy<std::byte>, memory_, pinned_);
  EXPECT_EQ(pinned_[0], std::byte{8});
  Wait();
  EXPECT_EQ(pinned_[0], std::byte{10});
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

TEST_F(EmulatedDevice, AnEventIsDoneWhenWhatWasBeforeItIs) {
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  std::array<cudaEvent_t, 3> events;
  for (size_t i = 0; i < events.size(); ++i) {
    ASSERT_EQ(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(pinned_ + i, memory_, 1, cudaMemcpyDefault, stream), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(events[i], stream), cudaSuccess);
  }
  EXPECT_EQ(cudaEventSynchronize(events[0]), cudaSuccess);
  EXPECT_EQ(pinned_[0], std::byte{0xcd});
  EXPECT_EQ(pinned_[1], std::byte{0});
  // It is done by the second time that somebody asks.
  EXPECT_EQ(cudaEventQuery(events[1]), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  EXPECT_EQ(pinned_[1], std::byte{0});
  EXPECT_EQ(cudaEventQuery(events[1]), cudaSuccess);
  EXPECT_EQ(pinned_[1], std::byte{0xcd});
  EXPECT_EQ(pinned_[2], std::byte{0});
  EXPECT_EQ(cudaEventDestroy(events[1]), cudaSuccess);
  // A stream that goes away is worked off.
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(events[2]), cudaSuccess);
  EXPECT_EQ(pinned_[2], std::byte{0xcd});
  EXPECT_EQ(cudaEventDestroy(events[0]), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(events[2]), cudaSuccess);
  cudaEvent_t never;
  ASSERT_EQ(cudaEventCreateWithFlags(&never, cudaEventDisableTiming), cudaSuccess);
  EXPECT_DEATH(cudaEventSynchronize(never), "nobody has recorded");
  EXPECT_EQ(cudaEventDestroy(never), cudaSuccess);
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

TEST_F(EmulatedDevice, ManagedMemoryIsTheHostsAndTheDevices) {
  std::byte* managed = nullptr;
  ASSERT_EQ(cudaMallocManaged(reinterpret_cast<void**>(&managed), kBytes), cudaSuccess);
  managed[0] = std::byte{5};
  Run(1, &Copy<std::byte>, managed, managed + 1);
  Wait();
  EXPECT_EQ(managed[1], std::byte{5});
  cudaPointerAttributes attributes;
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, managed + 1), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeManaged);
  EXPECT_EQ(cudaHostUnregister(managed), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaFree(managed), cudaSuccess);
  EXPECT_EQ(cudaFree(managed), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(pinned_), cudaErrorInvalidValue);
}

TEST_F(EmulatedDevice, CallsAreCounted) {
  const auto [launches, copies] = emulated::CountedCalls();
  Run(1, &Write<std::byte>, memory_, std::byte{7});
  ASSERT_EQ(cudaMemcpyAsync(pinned_, memory_, 1, cudaMemcpyDefault, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(pinned_, memory_, 1, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(emulated::CountedCalls().launches, launches + 1);
  EXPECT_EQ(emulated::CountedCalls().copies, copies + 2);
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

TEST(EmulatedDriver, KnowsTwoCalls) {
  void* function = &function;
  auto status = cudaDriverEntryPointSuccess;
  ASSERT_EQ(
      cudaGetDriverEntryPointByVersion("cuMemAlloc", &function, 12000, cudaEnableDefault, &status),
      cudaSuccess);
  EXPECT_EQ(status, cudaDriverEntryPointSymbolNotFound);
  EXPECT_EQ(function, nullptr);
  ASSERT_EQ(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 2000,
                                             cudaEnableDefault, &status),
            cudaSuccess);
  EXPECT_EQ(status, cudaDriverEntryPointVersionNotSufficent);
  EXPECT_EQ(function, nullptr);
}

TEST(EmulatedDevices, ReachOneAnother) {
  int can = -1;
  ASSERT_EQ(cudaDeviceCanAccessPeer(&can, 0, 1), cudaSuccess);
  EXPECT_EQ(can, 1);
  ASSERT_EQ(cudaDeviceCanAccessPeer(&can, 1, 1), cudaSuccess);
  EXPECT_EQ(can, 0);
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can, 0, 2), cudaErrorInvalidDevice);
}

}  // namespace
}  // namespace kvferry
