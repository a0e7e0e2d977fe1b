// Memory of emulated devices: given out, pinned, copied and shared.

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/pool_cuda/emulated/machine.h"

namespace kvferry::emulated {
namespace {

constexpr size_t kDeviceBytes = size_t{80} << 30;

}  // namespace

cudaError_t Machine::Allocate(void** pointer, size_t bytes, bool can_be_shared) {
  const std::scoped_lock lock(mutex_);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  size_t used = 0;
  for (const auto& [begin, allocation] : allocations_) used += allocation->bytes();
  auto made = bytes <= kDeviceBytes - used
                  ? Allocation::Create(current_device, bytes, can_be_shared)
                  : nullptr;
  if (made == nullptr) return cudaErrorMemoryAllocation;
  *pointer = made->address();
  allocations_.emplace(made->address(), std::move(made));
  return cudaSuccess;
}

cudaError_t Machine::AllocateManaged(void** pointer, size_t bytes) {
  const std::scoped_lock lock(mutex_);
  if (bytes == 0) return cudaErrorInvalidValue;
  void* const made =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return cudaErrorMemoryAllocation;
  pinned_.emplace(static_cast<std::byte*>(made), HostRange{bytes, /*is_managed=*/true});
  *pointer = made;
  return cudaSuccess;
}

cudaError_t Machine::Free(void* pointer) {
  const std::scoped_lock lock(mutex_);
  if (pointer == nullptr) return cudaSuccess;
  const auto* memory = static_cast<const std::byte*>(pointer);
  if (const auto found = pinned_.find(memory); found != pinned_.end()) {
    if (!found->second.is_managed) return cudaErrorInvalidValue;
    DrainAll();
    munmap(pointer, found->second.bytes);
    pinned_.erase(found);
    return cudaSuccess;
  }
  if (!IsOwnAt(memory)) return cudaErrorInvalidValue;
  DrainAll();
  allocations_.erase(memory);
  return cudaSuccess;
}

cudaError_t Machine::FreeInOrder(void* pointer, cudaStream_t stream) {
  const std::scoped_lock lock(mutex_);
  const auto* memory = static_cast<const std::byte*>(pointer);
  if (!IsOwnAt(memory)) return cudaErrorInvalidValue;
  Of(stream)->work.emplace_back([this, memory] { allocations_.erase(memory); });
  return cudaSuccess;
}

std::optional<SharedAllocation> Machine::Share(const void* pointer) {
  const std::scoped_lock lock(mutex_);
  Allocation* allocation = AllocationOf(pointer);
  return allocation == nullptr ? std::nullopt : allocation->Share();
}

cudaError_t Machine::Open(void** pointer, const SharedAllocation& shared) {
  const std::scoped_lock lock(mutex_);
  if (shared.magic != SharedAllocation::kMagic) return cudaErrorInvalidValue;
  if (shared.process == getpid()) return cudaErrorDeviceUninitialized;
  for (const auto& [begin, allocation] : allocations_) {
    if (allocation->is_imported() && allocation->id() == shared.id &&
        allocation->reader() == current_device) {
      return cudaErrorAlreadyMapped;
    }
  }
  auto opened = Allocation::Open(shared, current_device);
  if (opened == nullptr) return cudaErrorInvalidResourceHandle;
  *pointer = opened->address();
  allocations_.emplace(opened->address(), std::move(opened));
  return cudaSuccess;
}

cudaError_t Machine::Close(const void* pointer) {
  const std::scoped_lock lock(mutex_);
  const auto* memory = static_cast<const std::byte*>(pointer);
  if (!allocations_.contains(memory) || IsOwnAt(memory)) return cudaErrorInvalidValue;
  allocations_.erase(memory);
  return cudaSuccess;
}

std::span<const std::byte> Machine::RangeOf(const void* pointer, bool knows_host_ranges) {
  const std::scoped_lock lock(mutex_);
  if (const Allocation* allocation = AllocationOf(pointer)) {
    return {allocation->address(), allocation->bytes()};
  }
  const auto found = PinnedAt(pointer);
  if (found == pinned_.end() || !knows_host_ranges) return {};
  return {found->first, found->second.bytes};
}

cudaError_t Machine::Pin(void* pointer, size_t bytes) {
  const std::scoped_lock lock(mutex_);
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes == 0 || pointer == nullptr) return cudaErrorInvalidValue;
  auto* first = static_cast<std::byte*>(pointer);
  first -= reinterpret_cast<uintptr_t>(first) % page;
  const size_t size =
      RoundUp(static_cast<size_t>(static_cast<std::byte*>(pointer) - first) + bytes, page);
  for (const auto& [begin, pinned] : pinned_) {
    if (first < begin + pinned.bytes && begin < first + size) {
      return cudaErrorHostMemoryAlreadyRegistered;
    }
  }
  pinned_.emplace(first, HostRange{size});
  return cudaSuccess;
}

cudaError_t Machine::Unpin(const void* pointer) {
  const std::scoped_lock lock(mutex_);
  DrainAll();
  const auto found = pinned_.find(static_cast<const std::byte*>(pointer));
  if (found == pinned_.end() || found->second.is_managed) return cudaErrorHostMemoryNotRegistered;
  pinned_.erase(found);
  return cudaSuccess;
}

cudaPointerAttributes Machine::AttributesOf(const void* pointer) {
  const std::scoped_lock lock(mutex_);
  auto* seen = const_cast<void*>(pointer);
  if (const Allocation* allocation = AllocationOf(pointer)) {
    return {cudaMemoryTypeDevice, allocation->device(), seen, nullptr};
  }
  if (const auto found = PinnedAt(pointer); found != pinned_.end()) {
    const bool managed = found->second.is_managed;
    return {managed ? cudaMemoryTypeManaged : cudaMemoryTypeHost, current_device, seen, seen};
  }
  return {cudaMemoryTypeUnregistered, -1, nullptr, seen};
}

cudaError_t Machine::Set(void* to, int value, size_t bytes) {
  const std::scoped_lock lock(mutex_);
  if (bytes == 0) return cudaSuccess;
  const std::optional<bool> on_device = IsOnDevice(to, bytes);
  if (!on_device || (!*on_device && !IsPinned(to))) return cudaErrorInvalidValue;
  CheckReach(to);
  Of(nullptr)->work.emplace_back([=, this] { std::memset(Seen(to), value, bytes); });
  if (!*on_device) Drain(Of(nullptr));
  return cudaSuccess;
}

cudaError_t Machine::Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, bool waits,
                          cudaStream_t stream) {
  const std::scoped_lock lock(mutex_);
  if (bytes == 0) return cudaSuccess;
  const std::optional<bool> to_device = IsOnDevice(to, bytes),
                            from_device = IsOnDevice(from, bytes);
  if (!to_device || !from_device) return cudaErrorInvalidValue;
  if (IsPartlyPinned(to, bytes) || IsPartlyPinned(from, bytes)) return cudaErrorInvalidValue;
  if (kind != cudaMemcpyDefault && kind != (*from_device ? 2 : 0) + (*to_device ? 1 : 0)) {
    return cudaErrorInvalidMemcpyDirection;
  }
  CheckReach(to);
  CheckReach(from);
  const bool from_pageable = !*from_device && !IsPinned(from);
  if (from_pageable && *to_device) {
    // Is read before the call returns, and may be gone when its bytes are written: cudaMemcpy,
    // too, may return once it has read them.
    if (waits) Drain(Of(stream));
    const auto* first = static_cast<const std::byte*>(from);
    Of(stream)->work.emplace_back(
        [this, to, staged = std::vector<std::byte>(first, first + bytes)] {
          std::memcpy(Seen(to), staged.data(), staged.size());
        });
    return cudaSuccess;
  }
  Of(stream)->work.emplace_back([=, this] { std::memcpy(Seen(to), Seen(from), bytes); });
  if (waits || from_pageable || (!*to_device && !IsPinned(to))) Drain(Of(stream));
  return cudaSuccess;
}

bool Machine::IsOwnAt(const std::byte* first) const {
  const auto found = allocations_.find(first);
  return found != allocations_.end() && !found->second->is_imported();
}

Allocation* Machine::AllocationOf(const void* pointer) const {
  const auto* at = static_cast<const std::byte*>(pointer);
  const auto behind = allocations_.upper_bound(at);
  if (behind == allocations_.begin()) return nullptr;
  Allocation* allocation = std::prev(behind)->second.get();
  return at < allocation->address() + allocation->bytes() ? allocation : nullptr;
}

Machine::HostRanges::const_iterator Machine::PinnedAt(const void* pointer) const {
  const auto* at = static_cast<const std::byte*>(pointer);
  return std::ranges::find_if(pinned_, [at](const auto& range) {
    return at >= range.first && at < range.first + range.second.bytes;
  });
}

bool Machine::IsPartlyPinned(const void* pointer, size_t bytes) const {
  const auto* first = static_cast<const std::byte*>(pointer);
  return std::ranges::any_of(pinned_, [&](const auto& range) {
    const std::byte* end = range.first + range.second.bytes;
    return first < end && range.first < first + bytes &&
           (first < range.first || end < first + bytes);
  });
}

std::optional<bool> Machine::IsOnDevice(const void* pointer, size_t bytes) const {
  const auto* last = static_cast<const std::byte*>(pointer) + bytes - 1;
  const Allocation* allocation = AllocationOf(pointer);
  if (allocation != AllocationOf(last)) return std::nullopt;
  return allocation != nullptr;
}

void Machine::CheckReach(const void* pointer) const {
  const Allocation* allocation = AllocationOf(pointer);
  if (allocation == nullptr || !allocation->is_imported()) return;
  if (allocation->reader() == current_device) return;
  Fault(absl::StrCat("a copy of device ", current_device, " uses memory that device ",
                     allocation->reader(), " opened"));
}

std::byte* Machine::Seen(const void* pointer) const {
  auto* at = const_cast<std::byte*>(static_cast<const std::byte*>(pointer));
  const Allocation* allocation = AllocationOf(pointer);
  return allocation == nullptr ? at : allocation->Of(at);
}

}  // namespace kvferry::emulated
