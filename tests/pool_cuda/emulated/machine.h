#pragma once

// All emulated devices, and what the host has pinned for them.

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>

#include "tests/pool_cuda/emulated/allocation.h"

struct CUstream_st {
  int device;
  std::deque<std::function<void()>> work;  // Until somebody waits for it.
};

struct CUevent_st {
  cudaStream_t stream = nullptr;  // Where it was recorded.
  bool asked = false;
  std::shared_ptr<bool> done = std::make_shared<bool>(false);
};

namespace kvferry::emulated {

inline constexpr int kDevices = 2;
inline thread_local int current_device = 0;

// Thread-safe. What cuda_runtime_api.h says of a call is said of the method that it becomes.
class Machine {
 public:
  // Memory of the current device, and of the host.
  cudaError_t Allocate(void** pointer, size_t bytes, bool can_be_shared);
  cudaError_t AllocateManaged(void** pointer, size_t bytes);
  cudaError_t Free(void* pointer);
  cudaError_t FreeInOrder(void* pointer, cudaStream_t stream);
  // The allocation that the pointer lies in, or what is pinned with it; empty when there is none.
  std::span<const std::byte> RangeOf(const void* pointer, bool knows_host_ranges);
  cudaError_t Pin(void* pointer, size_t bytes);
  cudaError_t Unpin(const void* pointer);
  cudaPointerAttributes AttributesOf(const void* pointer);
  cudaError_t Set(void* to, int value, size_t bytes);
  cudaError_t Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, bool waits,
                   cudaStream_t stream);

  // What other processes open, and have opened.
  std::optional<SharedAllocation> Share(const void* pointer);
  cudaError_t Open(void** pointer, const SharedAllocation& shared);
  cudaError_t Close(const void* pointer);

  // Streams and events.
  cudaStream_t MakeStream();
  void Destroy(cudaStream_t stream);
  void Synchronize(cudaStream_t stream);
  cudaEvent_t MakeEvent();
  void Destroy(cudaEvent_t event);
  void Record(cudaEvent_t event, cudaStream_t stream);
  bool IsDone(cudaEvent_t event);
  void Synchronize(cudaEvent_t event);

  // Kernels: an argument's pointers become those that a launch may use.
  void Translate(std::span<std::byte> argument, bool has_padding);
  cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> thread);

 private:
  // null: the current device's default stream.
  cudaStream_t Of(cudaStream_t stream);

  // Does what waits in a stream.
  void Drain(cudaStream_t stream);
  // What waits before an event.
  void DrainUntil(cudaEvent_t event);
  void DoNext(cudaStream_t stream);
  void DrainAll();

  // Whether memory of this process begins there.
  bool IsOwnAt(const std::byte* first) const;

  Allocation* AllocationOf(const void* pointer) const;

  // Memory of the host that devices reach.
  struct HostRange {
    size_t bytes;
    bool is_managed = false;
  };
  using HostRanges = std::map<const std::byte*, HostRange>;  // By their first byte.

  HostRanges::const_iterator PinnedAt(const void* pointer) const;
  bool IsPinned(const void* pointer) const { return PinnedAt(pointer) != pinned_.end(); }

  // What is pinned, and what is not, cannot be copied in one go.
  bool IsPartlyPinned(const void* pointer, size_t bytes) const;

  // Nothing when a part of it is.
  std::optional<bool> IsOnDevice(const void* pointer, size_t bytes) const;

  // Copies of a device may use all memory of this process.
  void CheckReach(const void* pointer) const;

  // Where a copy finds these bytes.
  std::byte* Seen(const void* pointer) const;

  std::mutex mutex_;
  std::map<const std::byte*, std::unique_ptr<Allocation>> allocations_;  // By their first byte.
  HostRanges pinned_;                                                    // Whole pages.
  std::array<CUstream_st, kDevices> default_ = {CUstream_st{0, {}}, CUstream_st{1, {}}};
  std::set<cudaStream_t> made_;
  std::set<cudaEvent_t> events_;
  bool backwards_ = false;
};

}  // namespace kvferry::emulated
