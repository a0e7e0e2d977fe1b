#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

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
namespace {

constexpr int kDevices = 2;
constexpr size_t kDeviceBytes = size_t{80} << 30;
constexpr size_t kAlignment = 256;  // Of what cudaMalloc() gives.
constexpr std::byte kUnset{0xcd}, kBeside{0xb5};

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

std::array<std::atomic<bool>, kDevices> has_context;
std::atomic<bool> is_capturing;
std::atomic<int> lost_device = -1;
std::atomic<int> failing_queries;
std::atomic<cudaError_t> query_error;
std::atomic<bool> hides_host_ranges;
std::atomic<int64_t> launches, copies;

cudaError_t Answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// What a GPU might let pass.
[[noreturn]] void Fault(const std::string& what) {
  std::fprintf(stderr, "emulated device: %s\n", what.c_str());
  std::abort();
}

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// What a cudaIpcMemHandle_t holds: where a process has the file with an allocation's memory.
struct SharedAllocation {
  static constexpr uint32_t kMagic = 0x6b766679;

  uint32_t magic;
  int32_t process, file;
  int32_t device;
  uint64_t id;
  uint64_t bytes;
};
static_assert(sizeof(SharedAllocation) <= sizeof(cudaIpcMemHandle_t));
static_assert(std::has_unique_object_representations_v<SharedAllocation>);

std::string FileName(uint64_t id, int device, uint64_t bytes) {
  return absl::StrCat("kvferry-emulated-", id, "-", device, "-", bytes);
}

// Invalid when that process has it no longer, or a handle is not as it was given.
UniqueFd OpenFile(const SharedAllocation& shared) {
  const std::string path = absl::StrCat("/proc/", shared.process, "/fd/", shared.file);
  UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  // Both numbers may be another's by now.
  const std::string opened = absl::StrCat("/proc/self/fd/", file.get());
  const std::string name = FileName(shared.id, shared.device, shared.bytes);
  std::array<char, 200> target{};
  if (readlink(opened.c_str(), target.data(), target.size() - 1) < 0 ||
      target.data() != absl::StrCat("/memfd:", name, " (deleted)")) {
    return UniqueFd();
  }
  return file;
}

// Addresses of a device's, which nobody can touch, and its memory for them elsewhere: as much
// before it as makes up whole pages, and behind it up to the last page but one, the last being out
// of bounds.
class Allocation {
 public:
  // nullptr when the system refuses the memory.
  static std::unique_ptr<Allocation> Create(int device, size_t bytes, bool can_be_shared) {
    std::unique_ptr<Allocation> made = Reserve(device, bytes);
    if (made == nullptr || mprotect(made->memory_, made->usable_, PROT_READ | PROT_WRITE) != 0) {
      return nullptr;
    }
    std::fill_n(made->memory_, made->usable_, kBeside);
    std::fill_n(made->memory_ + made->begin_, bytes, kUnset);
    made->can_be_shared_ = can_be_shared;
    return made;
  }
  // Another process's memory, for one device. nullptr when it is there no longer.
  static std::unique_ptr<Allocation> Open(const SharedAllocation& shared, int reader) {
    const UniqueFd file = OpenFile(shared);
    if (!file.valid()) return nullptr;
    std::unique_ptr<Allocation> opened = Reserve(shared.device, shared.bytes);
    if (opened == nullptr || mmap(opened->memory_, opened->usable_, PROT_READ,
                                  MAP_SHARED | MAP_FIXED, file.get(), 0) == MAP_FAILED) {
      return nullptr;
    }
    opened->reader_ = reader;
    opened->id_ = shared.id;
    opened->is_imported_ = true;
    return opened;
  }
  ~Allocation() {
    munmap(addresses_, usable_ + guard_);
    munmap(memory_, usable_ + guard_);
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  int device() const { return device_; }
  int reader() const { return reader_; }  // The device whose kernels reach it.
  bool is_imported() const { return is_imported_; }
  uint64_t id() const { return id_; }
  size_t bytes() const { return bytes_; }
  std::byte* address() const { return addresses_ + begin_; }
  // Where the device has what lies at an address of this.
  std::byte* Of(const std::byte* address) const { return memory_ + (address - addresses_); }

  // Nothing when this is not to be shared, or the system refuses it. As few are shared, and
  // processes may have few files, the memory lies in one only from here on.
  std::optional<SharedAllocation> Share() {
    if (!can_be_shared_ || (!file_.valid() && !MoveToFile())) return std::nullopt;
    return SharedAllocation{
        SharedAllocation::kMagic, getpid(), file_.get(), device_, id_, bytes_,
    };
  }

  void CheckWhatIsBeside() const {
    const auto untouched = [](const std::byte* from, const std::byte* to) {
      return std::all_of(from, to, [](std::byte byte) { return byte == kBeside; });
    };
    if (untouched(memory_, memory_ + begin_) &&
        untouched(memory_ + begin_ + bytes_, memory_ + usable_)) {
      return;
    }
    Fault(absl::StrCat("something was written beside an allocation of ", bytes_, " bytes"));
  }

 private:
  Allocation(int device, std::byte* addresses, std::byte* memory, size_t usable, size_t guard,
             size_t bytes)
      : device_(device),
        reader_(device),
        addresses_(addresses),
        memory_(memory),
        usable_(usable),
        guard_(guard),
        bytes_(bytes),
        begin_(usable - RoundUp(bytes, kAlignment)) {}

  // All of it out of bounds. nullptr when the system refuses the addresses.
  static std::unique_ptr<Allocation> Reserve(int device, size_t bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t usable = RoundUp(bytes, page);
    const auto map = [&] {
      return static_cast<std::byte*>(mmap(nullptr, usable + page, PROT_NONE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    };
    std::unique_ptr<Allocation> made(new Allocation(device, map(), map(), usable, page, bytes));
    if (made->addresses_ == MAP_FAILED || made->memory_ == MAP_FAILED) return nullptr;
    return made;
  }

  // Its place stays the same, as work that waits has pointers into it.
  bool MoveToFile() {
    std::random_device random;
    const uint64_t id = uint64_t{random()} << 32 | random();
    UniqueFd file(memfd_create(FileName(id, device_, bytes_).c_str(), MFD_CLOEXEC));
    if (!file.valid() || ftruncate(file.get(), static_cast<off_t>(usable_)) != 0) return false;
    void* const copy = mmap(nullptr, usable_, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (copy == MAP_FAILED) return false;
    std::memcpy(copy, memory_, usable_);
    if (mremap(copy, usable_, usable_, MREMAP_MAYMOVE | MREMAP_FIXED, memory_) == MAP_FAILED) {
      munmap(copy, usable_);
      return false;
    }
    file_ = std::move(file);
    id_ = id;
    return true;
  }

  const int device_;
  int reader_;
  bool can_be_shared_ = false, is_imported_ = false;
  UniqueFd file_;    // Of what is shared.
  uint64_t id_ = 0;  // The file's, also of what is imported.
  std::byte *const addresses_, *const memory_;
  const size_t usable_, guard_;  // Bytes of each; guard_ behind usable_.
  const size_t bytes_, begin_;   // What was asked for, and where in usable_ it lies.
};

// All devices and what the host has pinned.
class Machine {
 public:
  cudaError_t Allocate(void** pointer, size_t bytes, bool can_be_shared) {
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

  cudaError_t AllocateManaged(void** pointer, size_t bytes) {
    const std::scoped_lock lock(mutex_);
    if (bytes == 0) return cudaErrorInvalidValue;
    void* const made =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return cudaErrorMemoryAllocation;
    pinned_.emplace(static_cast<std::byte*>(made), HostRange{bytes, /*is_managed=*/true});
    *pointer = made;
    return cudaSuccess;
  }

  cudaError_t Free(void* pointer) {
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

  cudaError_t FreeInOrder(void* pointer, cudaStream_t stream) {
    const std::scoped_lock lock(mutex_);
    const auto* memory = static_cast<const std::byte*>(pointer);
    if (!IsOwnAt(memory)) return cudaErrorInvalidValue;
    Of(stream)->work.emplace_back([this, memory] { allocations_.erase(memory); });
    return cudaSuccess;
  }

  std::optional<SharedAllocation> Share(const void* pointer) {
    const std::scoped_lock lock(mutex_);
    Allocation* allocation = AllocationOf(pointer);
    return allocation == nullptr ? std::nullopt : allocation->Share();
  }

  cudaError_t Open(void** pointer, const SharedAllocation& shared) {
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

  cudaError_t Close(const void* pointer) {
    const std::scoped_lock lock(mutex_);
    const auto* memory = static_cast<const std::byte*>(pointer);
    if (!allocations_.contains(memory) || IsOwnAt(memory)) return cudaErrorInvalidValue;
    allocations_.erase(memory);
    return cudaSuccess;
  }

  // The allocation that the pointer lies in, or what is pinned with it; empty when there is none.
  std::span<const std::byte> RangeOf(const void* pointer) {
    const std::scoped_lock lock(mutex_);
    if (const Allocation* allocation = AllocationOf(pointer)) {
      return {allocation->address(), allocation->bytes()};
    }
    const auto found = PinnedAt(pointer);
    if (found == pinned_.end() || hides_host_ranges) return {};
    return {found->first, found->second.bytes};
  }

  cudaError_t Pin(void* pointer, size_t bytes) {
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

  cudaError_t Unpin(const void* pointer) {
    const std::scoped_lock lock(mutex_);
    DrainAll();
    const auto found = pinned_.find(static_cast<const std::byte*>(pointer));
    if (found == pinned_.end() || found->second.is_managed) return cudaErrorHostMemoryNotRegistered;
    pinned_.erase(found);
    return cudaSuccess;
  }

  cudaPointerAttributes AttributesOf(const void* pointer) {
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

  cudaError_t Set(void* to, int value, size_t bytes) {
    const std::scoped_lock lock(mutex_);
    if (bytes == 0) return cudaSuccess;
    const std::optional<bool> on_device = IsOnDevice(to, bytes);
    if (!on_device || (!*on_device && !IsPinned(to))) return cudaErrorInvalidValue;
    CheckReach(to);
    Of(nullptr)->work.emplace_back([=, this] { std::memset(Seen(to), value, bytes); });
    if (!*on_device) Drain(Of(nullptr));
    return cudaSuccess;
  }

  cudaError_t Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, bool waits,
                   cudaStream_t stream) {
    const std::scoped_lock lock(mutex_);
    ++copies;
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

  cudaStream_t MakeStream() {
    const std::scoped_lock lock(mutex_);
    return *made_.insert(new CUstream_st{current_device, {}}).first;
  }

  void Destroy(cudaStream_t stream) {
    const std::scoped_lock lock(mutex_);
    if (made_.erase(stream) == 0) Fault("a stream that nobody made is destroyed");
    Drain(stream);
    delete stream;
  }

  void Synchronize(cudaStream_t stream) {
    const std::scoped_lock lock(mutex_);
    Drain(Of(stream));
  }

  cudaEvent_t MakeEvent() {
    const std::scoped_lock lock(mutex_);
    return *events_.insert(new CUevent_st).first;
  }

  void Destroy(cudaEvent_t event) {
    const std::scoped_lock lock(mutex_);
    if (events_.erase(event) == 0) Fault("an event that nobody made is destroyed");
    delete event;
  }

  void Record(cudaEvent_t event, cudaStream_t stream) {
    const std::scoped_lock lock(mutex_);
    if (event->stream != nullptr) Fault("an event is recorded twice");
    event->stream = Of(stream);
    event->stream->work.emplace_back([done = event->done] { *done = true; });
  }

  bool IsDone(cudaEvent_t event) {
    const std::scoped_lock lock(mutex_);
    if (std::exchange(event->asked, true)) DrainUntil(event);
    return *event->done;
  }

  void Synchronize(cudaEvent_t event) {
    const std::scoped_lock lock(mutex_);
    DrainUntil(event);
  }

  void Translate(std::span<std::byte> argument, bool has_padding) {
    const std::scoped_lock lock(mutex_);
    for (; argument.size() >= sizeof(uintptr_t); argument = argument.subspan(sizeof(uintptr_t))) {
      uintptr_t word;
      std::memcpy(&word, argument.data(), sizeof word);
      auto* pointer = reinterpret_cast<std::byte*>(word);
      if (word < kLeastAddress || IsPinned(pointer)) continue;
      const Allocation* allocation = AllocationOf(pointer);
      if (allocation != nullptr && allocation->reader() == current_device) {
        pointer = allocation->Of(pointer);
        std::memcpy(argument.data(), &pointer, sizeof pointer);
      } else if (!has_padding && (allocation != nullptr || IsMapped(word))) {
        Fault(absl::StrCat("a kernel of device ", current_device, " gets a pointer to memory of ",
                           allocation == nullptr ? "the host that is not pinned" : "another one"));
      }
    }
  }

  cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> thread) {
    const std::scoped_lock lock(mutex_);
    if (config.gridDim.x < 1 || config.blockDim.x < 1 || config.blockDim.x > 1024) {
      return cudaErrorInvalidConfiguration;
    }
    Of(config.stream)
        ->work.emplace_back([config, thread = std::move(thread), backwards = backwards_] {
          gridDim = config.gridDim;
          const uint64_t block_threads = config.blockDim.x;
          const uint64_t threads = config.gridDim.x * block_threads;
          for (uint64_t i = 0; i < threads; ++i) {
            const uint64_t which = backwards ? threads - 1 - i : i;
            blockIdx.x = static_cast<uint32_t>(which / block_threads);
            threadIdx.x = static_cast<uint32_t>(which % block_threads);
            thread();
          }
        });
    backwards_ = !backwards_;
    return cudaSuccess;
  }

 private:
  // null: the current device's default stream.
  cudaStream_t Of(cudaStream_t stream) {
    if (stream == nullptr) return &default_[current_device];
    if (!made_.contains(stream)) Fault("a stream that nobody made, or not any more");
    if (stream->device != current_device) Fault("a stream of another device than the current one");
    return stream;
  }

  // Does what waits in a stream.
  void Drain(cudaStream_t stream) {
    while (!stream->work.empty()) DoNext(stream);
  }
  // What waits before an event.
  void DrainUntil(cudaEvent_t event) {
    if (event->stream == nullptr) Fault("an event that nobody has recorded");
    while (!*event->done) DoNext(event->stream);
  }
  void DoNext(cudaStream_t stream) {
    stream->work.front()();
    stream->work.pop_front();
    for (const auto& [begin, allocation] : allocations_) allocation->CheckWhatIsBeside();
  }
  void DrainAll() {
    for (CUstream_st& stream : default_) Drain(&stream);
    for (const cudaStream_t stream : made_) Drain(stream);
  }

  // Whether memory of this process begins there.
  bool IsOwnAt(const std::byte* first) const {
    const auto found = allocations_.find(first);
    return found != allocations_.end() && !found->second->is_imported();
  }

  Allocation* AllocationOf(const void* pointer) const {
    const auto* at = static_cast<const std::byte*>(pointer);
    const auto behind = allocations_.upper_bound(at);
    if (behind == allocations_.begin()) return nullptr;
    Allocation* allocation = std::prev(behind)->second.get();
    return at < allocation->address() + allocation->bytes() ? allocation : nullptr;
  }

  // Memory of the host that devices reach.
  struct HostRange {
    size_t bytes;
    bool is_managed = false;
  };
  using HostRanges = std::map<const std::byte*, HostRange>;  // By their first byte.

  HostRanges::const_iterator PinnedAt(const void* pointer) const {
    const auto* at = static_cast<const std::byte*>(pointer);
    return std::ranges::find_if(pinned_, [at](const auto& range) {
      return at >= range.first && at < range.first + range.second.bytes;
    });
  }
  bool IsPinned(const void* pointer) const { return PinnedAt(pointer) != pinned_.end(); }

  // What is pinned, and what is not, cannot be copied in one go.
  bool IsPartlyPinned(const void* pointer, size_t bytes) const {
    const auto* first = static_cast<const std::byte*>(pointer);
    return std::ranges::any_of(pinned_, [&](const auto& range) {
      const std::byte* end = range.first + range.second.bytes;
      return first < end && range.first < first + bytes &&
             (first < range.first || end < first + bytes);
    });
  }

  // Nothing when a part of it is.
  std::optional<bool> IsOnDevice(const void* pointer, size_t bytes) const {
    const auto* last = static_cast<const std::byte*>(pointer) + bytes - 1;
    const Allocation* allocation = AllocationOf(pointer);
    if (allocation != AllocationOf(last)) return std::nullopt;
    return allocation != nullptr;
  }

  // Copies of a device may use all memory of this process.
  void CheckReach(const void* pointer) const {
    const Allocation* allocation = AllocationOf(pointer);
    if (allocation == nullptr || !allocation->is_imported()) return;
    if (allocation->reader() == current_device) return;
    Fault(absl::StrCat("a copy of device ", current_device, " uses memory that device ",
                       allocation->reader(), " opened"));
  }

  // Where a copy finds these bytes.
  std::byte* Seen(const void* pointer) const {
    auto* at = const_cast<std::byte*>(static_cast<const std::byte*>(pointer));
    const Allocation* allocation = AllocationOf(pointer);
    return allocation == nullptr ? at : allocation->Of(at);
  }

  // Where programs, their heaps and mappings lie on x86-64, with sanitizers too; but two counts of
  // 32 bits seldom make as much.
  static constexpr uintptr_t kLeastAddress = uintptr_t{1} << 46;

  static bool IsMapped(uintptr_t address) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    unsigned char resident;
    return mincore(reinterpret_cast<void*>(address / page * page), 1, &resident) == 0;
  }

  std::mutex mutex_;
  std::map<const std::byte*, std::unique_ptr<Allocation>> allocations_;  // By their first byte.
  HostRanges pinned_;                                                    // Whole pages.
  std::array<CUstream_st, kDevices> default_ = {CUstream_st{0, {}}, CUstream_st{1, {}}};
  std::set<cudaStream_t> made_;
  std::set<cudaEvent_t> events_;
  bool backwards_ = false;
};

Machine& AnyMachine() {
  static auto* const machine = new Machine;  // Outlives whatever static holds memory of it.
  return *machine;
}

// For calls that need a context.
Machine& TheMachine() {
  has_context[static_cast<size_t>(current_device)] = true;
  return AnyMachine();
}

// What a call gets that may be unsafe while a graph is captured.
bool IsForbidden() { return is_capturing && capture_mode == cudaStreamCaptureModeGlobal; }

// Of a query: an error that keeps it from being answered.
std::optional<cudaError_t> FailureOfQuery() {
  if (IsForbidden()) return cudaErrorStreamCaptureUnsupported;
  if (failing_queries <= 0) return std::nullopt;
  if (failing_queries.fetch_sub(1) <= 0) return std::nullopt;  // Another thread's was the last.
  return query_error;
}

CUresult PrimaryContextState(CUdevice device, unsigned* flags, int* active) {
  if (device < 0 || device >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = HasContext(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult AddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  const auto range = AnyMachine().RangeOf(reinterpret_cast<const void*>(pointer));
  if (range.empty()) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = reinterpret_cast<CUdeviceptr>(range.data());
  if (bytes != nullptr) *bytes = range.size();
  return CUDA_SUCCESS;
}

}  // namespace

bool HasContext(int device) { return has_context[static_cast<size_t>(device)]; }

void ForgetContexts() {
  for (std::atomic<bool>& has : has_context) has = false;
}

void SetCapturing(bool capturing) { is_capturing = capturing; }

void LoseDevice(int device) { lost_device = device; }

void HideHostRanges(bool hide) { hides_host_ranges = hide; }

CallCounts CountedCalls() { return {launches, copies}; }

void FailQueries(int count, cudaError_t error) {
  query_error = error;
  failing_queries = count;
}

void Translate(std::span<std::byte> argument, bool has_padding) {
  TheMachine().Translate(argument, has_padding);
}

cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> thread) {
  ++launches;
  return Answer(TheMachine().Launch(config, std::move(thread)));
}

}  // namespace kvferry::emulated

using kvferry::emulated::AddressRange;
using kvferry::emulated::Answer;
using kvferry::emulated::FailureOfQuery;
using kvferry::emulated::IsForbidden;
using kvferry::emulated::PrimaryContextState;
using kvferry::emulated::TheMachine;

cudaError_t cudaGetLastError() { return std::exchange(kvferry::emulated::last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    default:
      return "an error of the emulated device";
  }
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kvferry::emulated::kDevices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = kvferry::emulated::current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kvferry::emulated::kDevices) return Answer(cudaErrorInvalidDevice);
  if (device == kvferry::emulated::lost_device) return Answer(cudaErrorDevicesUnavailable);
  kvferry::emulated::current_device = device;
  kvferry::emulated::has_context[static_cast<size_t>(device)] = true;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Allocate(pointer, bytes, /*can_be_shared=*/true));
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t /*stream*/) {
  return Answer(TheMachine().Allocate(pointer, bytes, /*can_be_shared=*/false));
}

cudaError_t cudaFree(void* pointer) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Free(pointer));
}

cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned /*flags*/) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().AllocateManaged(pointer, bytes));
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return Answer(TheMachine().FreeInOrder(pointer, stream));
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned /*flags*/) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Pin(pointer, bytes));
}

cudaError_t cudaHostUnregister(void* pointer) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Unpin(pointer));
}

cudaError_t cudaHostGetDevicePointer(void** seen, void* pointer, unsigned /*flags*/) {
  *seen = TheMachine().AttributesOf(pointer).devicePointer;
  return Answer(*seen == nullptr ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = TheMachine().AttributesOf(pointer);
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  const auto shared = TheMachine().Share(pointer);
  if (!shared) return Answer(cudaErrorInvalidValue);
  *handle = {};
  std::memcpy(handle->reserved, &*shared, sizeof *shared);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  if (flags != cudaIpcMemLazyEnablePeerAccess) return Answer(cudaErrorInvalidValue);
  kvferry::emulated::SharedAllocation shared;
  std::memcpy(&shared, handle.reserved, sizeof shared);
  return Answer(TheMachine().Open(pointer, shared));
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) { return Answer(TheMachine().Close(pointer)); }

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  for (const int number : {device, peer}) {
    if (number < 0 || number >= kvferry::emulated::kDevices) return Answer(cudaErrorInvalidDevice);
  }
  *can = device == peer ? 0 : 1;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* status) {
  struct Call {
    const char* name;
    unsigned since;  // What has this name in older versions takes other types.
    void* function;
  };
  const PFN_cuMemGetAddressRange_v3020 address_range = &AddressRange;
  const PFN_cuDevicePrimaryCtxGetState_v7000 context_state = &PrimaryContextState;
  auto found = cudaDriverEntryPointSymbolNotFound;
  *function = nullptr;
  for (const Call& call :
       {Call{"cuMemGetAddressRange", 3020, reinterpret_cast<void*>(address_range)},
        Call{"cuDevicePrimaryCtxGetState", 7000, reinterpret_cast<void*>(context_state)}}) {
    if (symbol != std::string(call.name)) continue;
    const bool known = version >= call.since;
    found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointVersionNotSufficent;
    *function = known ? call.function : nullptr;
  }
  if (status != nullptr) *status = found;
  return cudaSuccess;
}

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Set(pointer, value, bytes));
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Copy(to, from, bytes, kind, /*waits=*/true, nullptr));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return Answer(TheMachine().Copy(to, from, bytes, kind, /*waits=*/false, stream));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int /*priority*/) {
  if (flags != cudaStreamNonBlocking) kvferry::emulated::Fault("such streams wait for others");
  *stream = TheMachine().MakeStream();
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  TheMachine().Destroy(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const auto failure = FailureOfQuery()) return Answer(*failure);
  TheMachine().Synchronize(stream);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (flags != cudaEventDisableTiming) kvferry::emulated::Fault("this device has no clock");
  *event = TheMachine().MakeEvent();
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  TheMachine().Destroy(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  TheMachine().Record(event, stream);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const auto failure = FailureOfQuery()) return Answer(*failure);
  return Answer(TheMachine().IsDone(event) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const auto failure = FailureOfQuery()) return Answer(*failure);
  TheMachine().Synchronize(event);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  (void)TheMachine();
  std::swap(*mode, kvferry::emulated::capture_mode);
  return cudaSuccess;
}
