// Memory of an emulated device that other processes open.

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/unique_fd.h"
#include "pool/cuda/cuda_memory.h"
#include "tests/pool_cuda/emulated/emulated_memory.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

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

}  // namespace
}  // namespace kvferry
