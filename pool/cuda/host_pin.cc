#include "pool/cuda/host_pin.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/ceil_div.h"
#include "base/mutex.h"
#include "base/status.h"
#include "pool/cuda/cuda_memory.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/on_device.h"

namespace kvferry {
namespace {

// The memory pages that hold the buffers, those that touch put together: CUDA refuses to pin a
// page twice.
std::vector<std::span<std::byte>> MemoryPages(std::span<const BufferInfo> buffers) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
  ranges.reserve(buffers.size());
  for (const BufferInfo& buffer : buffers) {
    const auto address = reinterpret_cast<uintptr_t>(buffer.address);
    ranges.emplace_back(address / page * page,
                        RoundUp(address + static_cast<uintptr_t>(buffer.bytes), page));
  }
  std::sort(ranges.begin(), ranges.end());
  std::vector<std::span<std::byte>> merged;
  for (const auto& [begin, end] : ranges) {
    auto* first = reinterpret_cast<std::byte*>(begin);
    auto* last = reinterpret_cast<std::byte*>(end);
    if (!merged.empty() && first <= merged.back().data() + merged.back().size()) {
      std::byte* start = merged.back().data();
      merged.back() = {start, std::max(last, start + merged.back().size())};
    } else {
      merged.push_back({first, last});
    }
  }
  return merged;
}

// What is pinned. CUDA could be asked, but not about all bytes from one place to another.
class Pinned {
 public:
  void Add(std::span<const std::byte> range) {
    const MutexLock lock(&mutex_);
    ranges_[range.data()] = range.size();
  }
  void Remove(const std::byte* begin) {
    const MutexLock lock(&mutex_);
    ranges_.erase(begin);
  }
  bool Has(std::span<const std::byte> bytes) {
    const MutexLock lock(&mutex_);
    const auto behind = ranges_.upper_bound(bytes.data());
    if (behind == ranges_.begin()) return false;
    const auto& [begin, size] = *std::prev(behind);
    return bytes.data() + bytes.size() <= begin + size;
  }
  bool HasAny(std::span<const std::byte> bytes) {
    const MutexLock lock(&mutex_);
    const auto behind = ranges_.lower_bound(bytes.data() + bytes.size());
    if (behind == ranges_.begin()) return false;
    const auto& [begin, size] = *std::prev(behind);
    return bytes.data() < begin + size;
  }

 private:
  Mutex mutex_;
  std::map<const std::byte*, size_t> ranges_ ABSL_GUARDED_BY(mutex_);
};

Pinned& AllPinned() {
  static auto* const pinned = new Pinned;  // Outlives whatever static or thread holds a pin.
  return *pinned;
}

}  // namespace

HostPin::~HostPin() {
  if (pinned_.empty()) return;
  for (std::byte* address : pinned_) AllPinned().Remove(address);
  OnDevice(device_, [this] {
    for (std::byte* address : pinned_) cudaHostUnregister(address);
    return absl::OkStatus();
  }).IgnoreError();  // Nothing can be done about it.
}

absl::Status HostPin::Pin(std::span<std::byte> range) {
  const cudaError_t error = cudaHostRegister(range.data(), range.size(),
                                             cudaHostRegisterPortable | cudaHostRegisterMapped);
  const auto what = [&] {
    return absl::StrCat("pinning ", range.size(), " bytes at ",
                        absl::Hex(reinterpret_cast<uintptr_t>(range.data())));
  };
  const absl::Status status = CudaStatus(error, what());
  if (error == cudaErrorHostMemoryAlreadyRegistered) {
    return absl::AlreadyExistsError(status.message());
  }
  KVFERRY_RETURN_IF_ERROR(status);
  pinned_.push_back(range.data());
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device_), what()));
  void* seen = nullptr;
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaHostGetDevicePointer(&seen, range.data(), 0), what()));
  if (seen == range.data()) {
    AllPinned().Add(range);
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      absl::StrCat(what(), ": the device would see them at another address"));
}

absl::StatusOr<std::unique_ptr<HostPin>> PinHostMemory(std::span<const BufferInfo> buffers,
                                                       std::shared_ptr<const void> owner) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].address != nullptr && buffers[i].bytes > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("pinning: buffer ", i, " has ", buffers[i].bytes, " bytes at ",
                     absl::Hex(reinterpret_cast<uintptr_t>(buffers[i].address))));
  }
  std::unique_ptr<HostPin> pin(new HostPin(std::move(owner)));
  for (const std::span<std::byte> range : MemoryPages(buffers)) {
    KVFERRY_RETURN_IF_ERROR(pin->Pin(range));
  }
  return pin;
}

bool IsPinned(std::span<const std::byte> bytes) { return AllPinned().Has(bytes); }
bool IsAnyPinned(std::span<const std::byte> bytes) { return AllPinned().HasAny(bytes); }

}  // namespace kvferry
