#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/unique_fd.h"
#include "pool/block_cache.h"
#include "pool/cuda/block_copy_cuda.h"
#include "pool/cuda/cuda_memory.h"
#include "pool/cuda/on_device.h"
#include "pool/token_copy.h"
#include "pool/token_kv_pool.h"
#include "tests/pool_cuda/device.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"

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

// Another process, which shares kBytes of its device 1, all of them 1 at first.
class Exporter {
 public:
  Exporter() {
    std::array<int, 2> ends{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    UniqueFd child_end(ends[0]);
    end_ = UniqueFd(ends[1]);
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);  // It died before the line above.
      end_ = UniqueFd();
      Share(child_end.get());
    }
    EXPECT_GT(pid_, 0);
    child_end = UniqueFd();
    EXPECT_EQ(read(end_.get(), &handle_, sizeof handle_), ssize_t{sizeof handle_});
  }
  ~Exporter() { Kill(); }
  Exporter(const Exporter&) = delete;
  Exporter& operator=(const Exporter&) = delete;

  const cudaIpcMemHandle_t& handle() const { return handle_; }
  // Afterwards all its bytes are this.
  void Fill(char value) const {
    ASSERT_NE(value, kFree);
    Ask(value);
  }
  void Free() const { Ask(kFree); }
  void Kill() {
    if (pid_ <= 0) return;
    EXPECT_EQ(kill(pid_, SIGKILL), 0);
    EXPECT_EQ(waitpid(pid_, nullptr, 0), pid_);
    pid_ = -1;
  }

 private:
  static constexpr char kFree = 0;

  static void Must(bool done) {
    if (!done) _exit(1);
  }

  // Answers requests until it is killed.
  [[noreturn]] static void Share(int end) {
    Must(cudaSetDevice(1) == cudaSuccess);
    std::byte* memory = nullptr;
    Must(cudaMalloc(reinterpret_cast<void**>(&memory), kBytes) == cudaSuccess);
    Must(cudaMemset(memory, 1, kBytes) == cudaSuccess);
    Must(cudaStreamSynchronize(nullptr) == cudaSuccess);
    cudaIpcMemHandle_t handle;
    Must(cudaIpcGetMemHandle(&handle, memory) == cudaSuccess);
    Must(write(end, &handle, sizeof handle) == sizeof handle);
    char request = 0;
    while (read(end, &request, 1) == 1) {
      if (request == kFree) {
        Must(cudaFree(memory) == cudaSuccess);
      } else {
        Must(cudaMemset(memory, request, kBytes) == cudaSuccess);
        Must(cudaStreamSynchronize(nullptr) == cudaSuccess);
      }
      Must(write(end, &request, 1) == 1);
    }
    _exit(0);
  }

  void Ask(char request) const {
    char answer = 0;
    ASSERT_EQ(send(end_.get(), &request, 1, MSG_NOSIGNAL), 1);
    ASSERT_EQ(read(end_.get(), &answer, 1), 1);
  }

  pid_t pid_ = -1;
  UniqueFd end_;
  cudaIpcMemHandle_t handle_ = {};
};

class EmulatedDeviceSharing : public EmulatedDevice {
 protected:
  static std::byte* Open(const cudaIpcMemHandle_t& handle) {
    void* opened = nullptr;
    EXPECT_EQ(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess), cudaSuccess);
    return static_cast<std::byte*>(opened);
  }

  static cudaError_t ErrorOfOpening(const cudaIpcMemHandle_t& handle) {
    void* opened = nullptr;
    return cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess);
  }

  static std::vector<std::byte> Read(const std::byte* memory) {
    std::vector<std::byte> seen(kBytes);
    EXPECT_EQ(cudaMemcpy(seen.data(), memory, kBytes, cudaMemcpyDefault), cudaSuccess);
    return seen;
  }
  static std::vector<std::byte> Full(char value) {
    return std::vector<std::byte>(kBytes, std::byte(value));
  }

  // Of the allocation that the pointer lies in.
  static std::pair<void*, size_t> RangeOf(const void* pointer) {
    void* function = nullptr;
    auto status = cudaDriverEntryPointSymbolNotFound;
    EXPECT_EQ(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 3020,
                                               cudaEnableDefault, &status),
              cudaSuccess);
    EXPECT_EQ(status, cudaDriverEntryPointSuccess);
    CUdeviceptr base = 0;
    size_t bytes = 0;
    const CUresult result = reinterpret_cast<PFN_cuMemGetAddressRange_v3020>(function)(
        &base, &bytes, reinterpret_cast<CUdeviceptr>(pointer));
    EXPECT_EQ(result, bytes == 0 ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS);
    return {reinterpret_cast<void*>(base), bytes};
  }
};

TEST_F(EmulatedDeviceSharing, WhatTheOwnerWritesIsSeen) {
  const Exporter exporter;
  std::byte* opened = Open(exporter.handle());
  EXPECT_EQ(Read(opened), Full(1));
  exporter.Fill(2);
  EXPECT_EQ(Read(opened), Full(2));
  exporter.Fill(3);
  Run(1, &Copy<std::byte>, opened + kBytes - 1, pinned_);
  Wait();
  EXPECT_EQ(pinned_[0], std::byte{3});
  cudaPointerAttributes attributes;
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, opened + 1), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 1);
  EXPECT_EQ(cudaFree(opened), cudaErrorInvalidValue);
  cudaIpcMemHandle_t handle;
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, opened), cudaErrorInvalidValue);
  ASSERT_EQ(cudaIpcCloseMemHandle(opened), cudaSuccess);
}

// PoolMemory's names of parts hold such handles.
TEST_F(EmulatedDeviceSharing, PartsLieInsideTheirAllocation) {
  const auto memory = CudaMemory(0);
  const auto own = memory->Allocate(1);
  ASSERT_TRUE(IsOk(own));
  const std::string of_own = (*memory->Share({own->get(), 1}))[0].name;
  const Exporter exporter;
  char filled = 1;
  const auto name_of = [&](uint64_t offset) {
    std::string name = of_own;
    name[8] = static_cast<char>(name[8] ^ 1);  // Another process.
    const std::vector<std::byte> probed(512, std::byte(filled));
    const uint64_t probe_hash = Xxh3(std::span<const std::byte>(probed));
    std::memcpy(&name[16], &exporter.handle(), sizeof exporter.handle());
    std::memcpy(&name[80], &offset, sizeof offset);
    std::memcpy(&name[88], &exporter.handle(), sizeof exporter.handle());
    std::memcpy(&name[152], &probe_hash, sizeof probe_hash);
    return name;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_TRUE(Fails(memory->MapShared(name_of(0), kBytes + 1), kInvalid, "another process's"));
  EXPECT_TRUE(Fails(memory->MapShared(name_of(kBytes), 1), kInvalid, "another process's"));
  EXPECT_TRUE(Fails(memory->MapShared(name_of(UINT64_MAX), 1), kInvalid, "another process's"));
  EXPECT_TRUE(Fails(memory->MapShared(name_of(0), 0), kInvalid, "another process's"));
  EXPECT_TRUE(Fails(memory->MapShared(name_of(0), -1), kInvalid, "another process's"));
  filled = 9;  // As if the device read something else than lies there.
  EXPECT_TRUE(
      Fails(memory->MapShared(name_of(0), kBytes), absl::StatusCode::kUnavailable, "other bytes"));
  filled = 1;
  for (int round = 0; round < 2; ++round) {  // What is mapped no more can be mapped again.
    const auto all = memory->MapShared(name_of(0), kBytes);
    const auto part = memory->MapShared(name_of(10), kBytes - 10);
    ASSERT_TRUE(IsOk(all));
    ASSERT_TRUE(IsOk(part));
    EXPECT_EQ(part->get(), all->get() + 10);
    filled = static_cast<char>(5 + round);
    exporter.Fill(filled);
    std::vector<std::byte> seen(kBytes);
    const BytesMove move{part->get(), seen.data() + 10, int64_t{kBytes} - 10};
    EXPECT_TRUE(IsOk(memory->MoveApart({&move, 1})));
    std::vector<std::byte> want = Full(filled);
    std::fill_n(want.begin(), 10, std::byte{0});
    EXPECT_EQ(seen, want);
  }
  EXPECT_EQ(cudaIpcCloseMemHandle(Open(exporter.handle())), cudaSuccess);  // Mapped no more.
}

TEST_F(EmulatedDeviceSharing, WhatIsOpenOutlivesItsOwner) {
  Exporter exporter;
  std::byte* opened = Open(exporter.handle());
  exporter.Free();
  EXPECT_EQ(Read(opened), Full(1));
  ASSERT_EQ(cudaIpcCloseMemHandle(opened), cudaSuccess);
  EXPECT_EQ(ErrorOfOpening(exporter.handle()), cudaErrorInvalidResourceHandle);

  Exporter killed;
  opened = Open(killed.handle());
  killed.Fill(2);
  killed.Kill();
  EXPECT_EQ(Read(opened), Full(2));
  ASSERT_EQ(cudaIpcCloseMemHandle(opened), cudaSuccess);
  EXPECT_EQ(ErrorOfOpening(killed.handle()), cudaErrorInvalidResourceHandle);
}

TEST_F(EmulatedDeviceSharing, EachDeviceOpensOnce) {
  const Exporter exporter;
  std::byte* opened = Open(exporter.handle());
  EXPECT_EQ(ErrorOfOpening(exporter.handle()), cudaErrorAlreadyMapped);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_DEATH(Run(1, &Copy<std::byte>, opened, pinned_), "device 1 gets .* of another one");
  EXPECT_DEATH(Read(opened), "a copy of device 1 uses memory that device 0 opened");
  std::byte* other = Open(exporter.handle());
  EXPECT_NE(other, opened);
  EXPECT_EQ(Read(other), Full(1));
  ASSERT_EQ(cudaIpcCloseMemHandle(other), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(Read(opened), Full(1));
  ASSERT_EQ(cudaIpcCloseMemHandle(opened), cudaSuccess);
  EXPECT_EQ(cudaIpcCloseMemHandle(opened), cudaErrorInvalidValue);
  EXPECT_EQ(cudaIpcCloseMemHandle(memory_), cudaErrorInvalidValue);
  opened = Open(exporter.handle());
  EXPECT_EQ(Read(opened), Full(1));
  ASSERT_EQ(cudaIpcCloseMemHandle(opened), cudaSuccess);
}

TEST_F(EmulatedDeviceSharing, WhatIsOpenIsOnlyRead) {
  const Exporter exporter;
  std::byte* opened = Open(exporter.handle());
  EXPECT_DEATH((void)*const_cast<volatile std::byte*>(opened), "");
  EXPECT_DEATH((Run(1, &Write<std::byte>, opened, std::byte{7}), Wait()), "");
  EXPECT_DEATH(cudaMemcpy(opened, memory_, 1, cudaMemcpyDefault), "");
  EXPECT_DEATH((cudaMemset(opened, 0, 1), Wait()), "");
  EXPECT_EQ(Read(opened), Full(1));
  // Work that waits has no claim to it.
  EXPECT_DEATH((Run(1, &Copy<std::byte>, opened, memory_), cudaIpcCloseMemHandle(opened), Wait()),
               "");
  ASSERT_EQ(cudaIpcCloseMemHandle(opened), cudaSuccess);
}

TEST_F(EmulatedDeviceSharing, SharingChangesNothingForTheOwner) {
  cudaIpcMemHandle_t handle, again;
  // Shared in the child of this alone, whose writes the test would see otherwise.
  EXPECT_DEATH(
      (cudaIpcGetMemHandle(&handle, memory_), Run(1, &WriteAt, memory_, int64_t{-1}), Wait()),
      "written beside an allocation of 1000 bytes");
  Run(1, &Write<std::byte>, memory_, std::byte{7});
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, memory_), cudaSuccess);
  ASSERT_EQ(cudaIpcGetMemHandle(&again, memory_ + 500), cudaSuccess);
  EXPECT_EQ(std::memcmp(&handle, &again, sizeof handle), 0);
  std::vector<std::byte> expected(kBytes, std::byte{0xcd});
  expected[0] = std::byte{7};
  EXPECT_EQ(Read(memory_), expected);
  EXPECT_DEATH((Run(1, &WriteAt, memory_, int64_t{4096}), Wait()), "");
}

TEST_F(EmulatedDeviceSharing, HandlesThatCannotBeOpenedAreRefused) {
  cudaIpcMemHandle_t handle;
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, memory_), cudaSuccess);
  EXPECT_EQ(ErrorOfOpening(handle), cudaErrorDeviceUninitialized);
  EXPECT_EQ(cudaGetLastError(), cudaErrorDeviceUninitialized);
  EXPECT_EQ(ErrorOfOpening({}), cudaErrorInvalidValue);
  const Exporter exporter;
  void* opened = nullptr;
  EXPECT_EQ(cudaIpcOpenMemHandle(&opened, exporter.handle(), 0), cudaErrorInvalidValue);
  // Whatever byte of it is changed.
  for (size_t i = 0; i < 32; ++i) {
    cudaIpcMemHandle_t changed = exporter.handle();
    changed.reserved[i] = static_cast<char>(changed.reserved[i] ^ 0x55);
    EXPECT_NE(ErrorOfOpening(changed), cudaSuccess) << i;
  }

  EXPECT_EQ(cudaIpcGetMemHandle(&handle, pinned_), cudaErrorInvalidValue);
  void* in_order = nullptr;
  ASSERT_EQ(cudaMallocAsync(&in_order, kBytes, nullptr), cudaSuccess);
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, in_order), cudaErrorInvalidValue);
  ASSERT_EQ(cudaFree(in_order), cudaSuccess);
}

TEST_F(EmulatedDeviceSharing, AnyPointerLeadsToItsAllocation) {
  const std::pair<void*, size_t> own(memory_, kBytes), none(nullptr, 0);
  EXPECT_EQ(RangeOf(memory_), own);
  EXPECT_EQ(RangeOf(memory_ + kBytes - 1), own);
  EXPECT_EQ(RangeOf(memory_ + kBytes), none);
  EXPECT_EQ(RangeOf(pinned_ + 1), std::pair(static_cast<void*>(pinned_), sizeof pinned_));
  EXPECT_EQ(RangeOf(pinned_ + sizeof pinned_), none);
  emulated::HideHostRanges(true);
  EXPECT_EQ(RangeOf(pinned_), none);
  EXPECT_EQ(RangeOf(memory_), own);
  emulated::HideHostRanges(false);
  const Exporter exporter;
  std::byte* opened = Open(exporter.handle());
  EXPECT_EQ(RangeOf(opened + 500), std::pair(static_cast<void*>(opened), kBytes));
  ASSERT_EQ(cudaIpcCloseMemHandle(opened), cudaSuccess);
  EXPECT_EQ(RangeOf(opened), none);
}

// What PoolMemory does on device 1, from threads whose current device is 0, as that of new threads
// is.
class OtherDevice : public testing::Test {
 protected:
  static constexpr int64_t kMoved = 1 << 20;

  void SetUp() override { emulated::ForgetContexts(); }
  void TearDown() override {
    emulated::SetCapturing(false);
    emulated::FailQueries(0, cudaSuccess);
    emulated::LoseDevice(-1);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);  // For the tests that follow.
  }

  // fn() on a new thread, and which device is the current one afterwards.
  template <typename Fn>
  static int OnThread(const Fn& fn) {
    int current = -1;
    std::thread([&] {
      fn();
      EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    }).join();
    return current;
  }
  std::shared_ptr<std::byte> Allocate() const {
    std::shared_ptr<std::byte> device;
    OnThread([&] { device = Must(memory_->Allocate(2 * kMoved)); });
    return device;
  }
  std::shared_ptr<const MovesUnderWay> Begin(const std::shared_ptr<std::byte>& device) const {
    const BytesMove move{device.get(), device.get() + kMoved, kMoved};
    std::shared_ptr<const MovesUnderWay> moves = Must(memory_->BeginMoveApart({&move, 1}));
    EXPECT_NE(moves, nullptr);
    return moves;
  }

  const std::shared_ptr<const PoolMemory> memory_ = CudaMemory(1);
};

TEST_F(OtherDevice, TransfersSetUpNoContextElsewhere) {
  std::shared_ptr<std::byte> device = Allocate();
  std::shared_ptr<const MovesUnderWay> asked, waited;
  OnThread([&] { asked = Begin(device); });
  OnThread([&] { waited = Begin(device); });
  // Each step on a thread of its own: whatever the one before made current is not.
  OnThread([&] {
    while (!asked->done()) {
    }
  });
  OnThread([&] { EXPECT_TRUE(IsOk(waited->Wait())); });
  OnThread([&] { asked.reset(); });
  OnThread([&] { waited.reset(); });
  std::vector<std::byte> host(kMoved, std::byte{3});
  OnThread([&] {  // Through the thread's own pinned memory, which ends with it.
    const BytesMove move{host.data(), device.get(), kMoved};
    EXPECT_TRUE(IsOk(memory_->MoveApart({&move, 1})));
  });
  const std::shared_ptr<std::byte> slab = Must(HostMemory()->Allocate(kMoved));
  std::shared_ptr<const void> pin;
  OnThread([&] { pin = Must(memory_->Pin({slab.get(), kMoved})); });
  OnThread([&] { pin.reset(); });
  EXPECT_EQ(OnThread([&] { device.reset(); }), 1);
  EXPECT_FALSE(emulated::HasContext(0));
  EXPECT_TRUE(emulated::HasContext(1));
}

TEST_F(OtherDevice, WhatAnEngineUsesIsCurrentAgain) {
  EXPECT_EQ(OnThread([&] {
              ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
              Allocate().reset();
              EXPECT_TRUE(IsOk(memory_->Allocate(kMoved)));
            }),
            0);
}

// Such as moves that are under way, which nobody would wait for.
TEST_F(OtherDevice, WhatWasDoneStandsWhereTheOneBeforeCannotBeCurrentAgain) {
  const std::shared_ptr<std::byte> device = Allocate();
  EXPECT_EQ(OnThread([&] {
              ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
              emulated::LoseDevice(0);
              const std::shared_ptr<const MovesUnderWay> moves = Begin(device);
              EXPECT_TRUE(IsOk(moves->Wait()));
              EXPECT_EQ(cudaGetLastError(), cudaSuccess);
            }),
            1);
}

TEST_F(OtherDevice, TheOneBeforeIsCurrentAgainAfterAnException) {
  EXPECT_EQ(OnThread([&] {
              ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
              const auto fail = []() -> absl::Status { throw std::bad_alloc(); };
              EXPECT_THROW(OnDevice(1, fail).IgnoreError(), std::bad_alloc);
              // What others capture concerns this thread again.
              emulated::SetCapturing(true);
              EXPECT_EQ(cudaFree(nullptr), cudaErrorStreamCaptureUnsupported);
            }),
            0);
}

TEST_F(OtherDevice, CopiesAreWaitedForWhenMemoryRunsOutAmidThem) {
  constexpr int64_t kRows = 64, kMore = 1237, kRowBytes = 4096;
  const std::shared_ptr<std::byte> device = Allocate();
  const std::shared_ptr<std::byte> pinned = Must(HostMemory()->Allocate(kRows * kRowBytes));
  const auto pin = Must(memory_->Pin({pinned.get(), kRows * kRowBytes}));
  const std::vector<std::byte> bytes(kRows * kRowBytes, std::byte{7});
  const BytesMove move{bytes.data(), device.get(), kRows * kRowBytes};
  ASSERT_TRUE(IsOk(memory_->MoveApart({&move, 1})));
  std::vector<std::byte> host(kMore);
  const auto view = [](std::byte* data, int64_t rows, int64_t row_bytes) {
    return TokenView::Packed(data, DType::kUint8, rows, 1, row_bytes);
  };
  const std::vector<int32_t> few(kRows, 1), many(kMore, 2);
  const std::vector<TokenCopy> copies = {
      Must(TokenCopy::PlanGather(view(device.get(), kRows, kRowBytes), few,
                                 view(pinned.get(), kRows, kRowBytes))),
      Must(TokenCopy::PlanGather(view(host.data(), kMore, 1), many,
                                 view(device.get() + kMoved, kMore, 1)))};
  // What the second one makes of its list, when the first has begun.
  const ScarceNew scarce(ScarceNew::Of::kThisThread, kMore * sizeof(int32_t));
  EXPECT_THROW(memory_->RunApart(copies).IgnoreError(), std::bad_alloc);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), pinned.get()));
}

TEST_F(OtherDevice, OnlyItsMemoryIsAdopted) {
  const KvLayout layout = KvLayout::Mla(1, 1, 1 << 12, DType::kUint8);
  const auto adopt = [&](std::byte* begin, int64_t bytes, const auto& owner) {
    const BufferInfo buffer{begin, bytes, 1 << 12};
    return KvPool::Adopt(layout, {&buffer, 1}, owner, memory_);
  };
  const std::shared_ptr<std::byte> here = Allocate();
  EXPECT_TRUE(IsOk(adopt(here.get(), kMoved, here)));
  EXPECT_TRUE(IsOk(adopt(here.get() + kMoved, kMoved, here)));
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_TRUE(Fails(adopt(here.get() + kMoved, 2 * kMoved, here), kInvalid, "buffer 0 of 2097152"));
  const std::shared_ptr<std::byte> there = Must(CudaMemory(0)->Allocate(kMoved));
  EXPECT_TRUE(
      Fails(adopt(there.get(), kMoved, there), kInvalid, "lies on device 0", "on device 1"));
  const std::shared_ptr<std::byte> host = Must(HostMemory()->Allocate(kMoved));
  EXPECT_TRUE(Fails(adopt(host.get(), kMoved, host), kInvalid, "lies in the host's memory"));
  const auto pin = Must(memory_->Pin({host.get(), kMoved}));
  EXPECT_TRUE(Fails(adopt(host.get(), kMoved, host), kInvalid, "lies in the host's memory"));
}

TEST_F(OtherDevice, ManagedMemoryIsAdoptedToo) {
  std::byte* managed = nullptr;
  ASSERT_EQ(cudaMallocManaged(reinterpret_cast<void**>(&managed), kMoved), cudaSuccess);
  const std::shared_ptr<std::byte> owner(
      managed, [](std::byte* memory) { EXPECT_EQ(cudaFree(memory), cudaSuccess); });
  const BufferInfo buffer{managed, kMoved, 1 << 12};
  const auto pages =
      KvPool::Adopt(KvLayout::Mla(1, 1, 1 << 12, DType::kUint8), {&buffer, 1}, owner, memory_);
  ASSERT_TRUE(IsOk(pages));
  const auto pool = Must(TokenKvPool::Over(*pages));
  const std::vector<int32_t> slots = {7, 3};
  std::vector<std::byte> rows(2 << 12, std::byte{3}), got(2 << 12);
  rows.back() = std::byte{4};
  ASSERT_TRUE(IsOk(pool->WriteFlat(slots, rows)));
  ASSERT_TRUE(IsOk(pool->ReadFlat(slots, got)));
  EXPECT_EQ(got, rows);
  // From and to memory that no device reaches.
  const BytesMove in{rows.data(), managed, 2 << 12}, out{managed, got.data(), 2 << 12};
  got.assign(got.size(), std::byte{0});
  ASSERT_TRUE(IsOk(memory_->MoveApart({&in, 1})));
  ASSERT_TRUE(IsOk(memory_->MoveApart({&out, 1})));
  EXPECT_EQ(got, rows);
}

// Of a cache on the host, with layers of a page each that an engine has pinned itself.
class PinnedByAnEngine : public testing::Test {
 protected:
  static constexpr size_t kLayerBytes = 4096;
  static constexpr int64_t kBlocks = 8;

  void SetUp() override {
    std::mt19937 random(4);
    for (const std::span<std::byte>& layer : layers_) {
      ASSERT_EQ(cudaHostRegister(layer.data(), layer.size(), 0), cudaSuccess);
      for (std::byte& byte : layer) byte = static_cast<std::byte>(random());
    }
  }
  void TearDown() override {
    emulated::HideHostRanges(false);
    for (const std::span<std::byte>& layer : layers_) {
      EXPECT_EQ(cudaHostUnregister(layer.data()), cudaSuccess);
    }
  }
  std::vector<std::byte> Bytes() const {
    std::vector<std::byte> bytes;
    for (const std::span<std::byte>& layer : layers_) {
      bytes.insert(bytes.end(), layer.begin(), layer.end());
    }
    return bytes;
  }
  // All blocks out and in again, in one order and another; what that took.
  emulated::CallCounts SwapOutAndIn() {
    std::vector<BlockPair> in, out;
    for (int64_t block = 0; block < kBlocks; ++block) {
      in.emplace_back(block, (3 * block) % kBlocks);
      out.emplace_back((3 * block) % kBlocks, block);
    }
    const std::vector<std::byte> before = Bytes();
    const auto [launches, copies] = emulated::CountedCalls();
    EXPECT_TRUE(IsOk(CopyBlocksCuda(*cache_, *device_, in, nullptr)));
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    for (const std::span<std::byte>& layer : layers_) {
      std::fill(layer.begin(), layer.end(), std::byte{0});
    }
    EXPECT_TRUE(IsOk(CopyBlocksCuda(*device_, *cache_, out, nullptr)));
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    EXPECT_EQ(Bytes(), before);
    return {emulated::CountedCalls().launches - launches, emulated::CountedCalls().copies - copies};
  }

  const BlockCacheShape shape_{
      .num_layers = 10, .block_size = 4, .num_kv_heads = 2, .head_dim = 16};
  // With a page between any two.
  const std::shared_ptr<std::byte> heap_ = Must(HostMemory()->Allocate(19 * kLayerBytes));
  const std::vector<std::span<std::byte>> layers_ = [this] {
    std::vector<std::span<std::byte>> layers;
    for (int64_t i = 0; i < shape_.num_layers; ++i) {
      layers.push_back({heap_.get() + 2 * i * kLayerBytes, kLayerBytes});
    }
    return layers;
  }();
  const std::shared_ptr<BlockCache> cache_ = Must(BlockCache::Adopt(shape_, layers_, heap_));
  const std::shared_ptr<BlockCache> device_ =
      Must(BlockCache::Create(shape_, kBlocks, CudaMemory(0)));
};

TEST_F(PinnedByAnEngine, ItIsReachedAtOnce) {
  const auto [launches, copies] = SwapOutAndIn();
  EXPECT_EQ(launches, 2);
  EXPECT_EQ(copies, 0);
  EXPECT_TRUE(IsOk(cache_->PinFor(*CudaMemory(0))));
}

// A driver that does not tell how much is pinned: copies as before.
TEST_F(PinnedByAnEngine, ItIsCopiedWhereItMayHaveGaps) {
  emulated::HideHostRanges(true);
  const auto [launches, copies] = SwapOutAndIn();
  EXPECT_EQ(launches, 0);
  EXPECT_EQ(copies, 2 * 10 * 2 * kBlocks);
  EXPECT_TRUE(Fails(cache_->PinFor(*CudaMemory(0)), absl::StatusCode::kAlreadyExists, "pinning"));
}

TEST_F(OtherDevice, CapturesOfOthersForbidNothing) {
  emulated::SetCapturing(true);
  std::shared_ptr<std::byte> device = Allocate();
  const std::shared_ptr<const MovesUnderWay> asked = Begin(device), waited = Begin(device);
  EXPECT_FALSE(asked->done());  // It is under way, as this device has it.
  EXPECT_TRUE(asked->done());
  EXPECT_TRUE(IsOk(waited->Wait()));
  std::vector<std::byte> host(kMoved);
  const BytesMove move{device.get(), host.data(), kMoved};
  EXPECT_TRUE(IsOk(memory_->MoveApart({&move, 1})));
  // The thread itself is as it was.
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureUnsupported);
  device.reset();
}

TEST_F(OtherDevice, WhatCannotBeAskedIsNotDone) {
  const std::shared_ptr<std::byte> device = Allocate();
  for (const auto error : {cudaErrorStreamCaptureUnsupported, cudaErrorCapturedEvent}) {
    const std::shared_ptr<const MovesUnderWay> asked = Begin(device), waited = Begin(device);
    emulated::FailQueries(3, error);
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(asked->done());
    EXPECT_FALSE(asked->done());  // Now it is asked for the first time.
    EXPECT_TRUE(asked->done());
    emulated::FailQueries(3, error);
    EXPECT_TRUE(IsOk(waited->Wait()));
    emulated::FailQueries(3, error);
    const BytesMove move{device.get(), device.get() + kMoved, kMoved};
    EXPECT_TRUE(IsOk(memory_->MoveApart({&move, 1})));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  // Nothing writes any more once the device has failed for good, whatever it calls that.
  for (const auto error : {cudaErrorIllegalAddress, cudaErrorContained,
                           cudaErrorMpsClientTerminated, static_cast<cudaError_t>(4711)}) {
    const std::shared_ptr<const MovesUnderWay> moves = Begin(device);
    emulated::FailQueries(2, error);
    EXPECT_TRUE(moves->done());
    EXPECT_TRUE(Fails(moves->Wait(), absl::StatusCode::kInternal, "moving bytes"));
  }
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
