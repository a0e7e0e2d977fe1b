// Streams of emulated devices, events in them, and the kernels that they run.

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/pool_cuda/emulated/machine.h"

namespace kvferry::emulated {
namespace {

// Where programs, their heaps and mappings lie on x86-64, with sanitizers too; but two counts of
// 32 bits seldom make as much.
constexpr uintptr_t kLeastAddress = uintptr_t{1} << 46;

bool IsMapped(uintptr_t address) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident;
  return mincore(reinterpret_cast<void*>(address / page * page), 1, &resident) == 0;
}

}  // namespace

cudaStream_t Machine::MakeStream() {
  const std::scoped_lock lock(mutex_);
  return *made_.insert(new CUstream_st{current_device, {}}).first;
}

void Machine::Destroy(cudaStream_t stream) {
  const std::scoped_lock lock(mutex_);
  if (made_.erase(stream) == 0) Fault("a stream that nobody made is destroyed");
  Drain(stream);
  delete stream;
}

void Machine::Synchronize(cudaStream_t stream) {
  const std::scoped_lock lock(mutex_);
  Drain(Of(stream));
}

cudaEvent_t Machine::MakeEvent() {
  const std::scoped_lock lock(mutex_);
  return *events_.insert(new CUevent_st).first;
}

void Machine::Destroy(cudaEvent_t event) {
  const std::scoped_lock lock(mutex_);
  if (events_.erase(event) == 0) Fault("an event that nobody made is destroyed");
  delete event;
}

void Machine::Record(cudaEvent_t event, cudaStream_t stream) {
  const std::scoped_lock lock(mutex_);
  if (event->stream != nullptr) Fault("an event is recorded twice");
  event->stream = Of(stream);
  event->stream->work.emplace_back([done = event->done] { *done = true; });
}

bool Machine::IsDone(cudaEvent_t event) {
  const std::scoped_lock lock(mutex_);
  if (std::exchange(event->asked, true)) DrainUntil(event);
  return *event->done;
}

void Machine::Synchronize(cudaEvent_t event) {
  const std::scoped_lock lock(mutex_);
  DrainUntil(event);
}

void Machine::Translate(std::span<std::byte> argument, bool has_padding) {
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

cudaError_t Machine::Launch(const cudaLaunchConfig_t& config, std::function<void()> thread) {
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

cudaStream_t Machine::Of(cudaStream_t stream) {
  if (stream == nullptr) return &default_[current_device];
  if (!made_.contains(stream)) Fault("a stream that nobody made, or not any more");
  if (stream->device != current_device) Fault("a stream of another device than the current one");
  return stream;
}

void Machine::Drain(cudaStream_t stream) {
  while (!stream->work.empty()) DoNext(stream);
}

void Machine::DrainUntil(cudaEvent_t event) {
  if (event->stream == nullptr) Fault("an event that nobody has recorded");
  while (!*event->done) DoNext(event->stream);
}

void Machine::DoNext(cudaStream_t stream) {
  stream->work.front()();
  stream->work.pop_front();
  for (const auto& [begin, allocation] : allocations_) allocation->CheckWhatIsBeside();
}

void Machine::DrainAll() {
  for (CUstream_st& stream : default_) Drain(&stream);
  for (const cudaStream_t stream : made_) Drain(stream);
}

}  // namespace kvferry::emulated
