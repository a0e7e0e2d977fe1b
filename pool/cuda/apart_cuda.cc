#include "pool/cuda/apart_cuda.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/slab.h"
#include "base/status.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/host_pin.h"
#include "pool/cuda/move_bytes_cuda.h"
#include "pool/cuda/on_device.h"

namespace kvferry {
namespace {

// Of bytes of the host's that the device cannot reach: short against what is moved, long against a
// launch.
constexpr int64_t kBounceBytes = 1 << 20;

// One that waits for no other, not even the default one, and whose work goes before theirs.
class OwnStream {
 public:
  OwnStream() = default;
  ~OwnStream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  // Of the device that is current the first time.
  absl::StatusOr<cudaStream_t> Get() {
    if (stream_ != nullptr) return stream_;
    int least = 0, greatest = 0;
    KVFERRY_RETURN_IF_ERROR(
        CudaStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cuda memory: priorities"));
    KVFERRY_RETURN_IF_ERROR(
        CudaStatus(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
                   "cuda memory: a stream for transfers"));
    return stream_;
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// Asks again as long as the answer says nothing: until then the device may write.
template <typename Ask>
absl::Status AskUntilOver(const Ask& ask, absl::string_view what) {
  for (;;) {
    const cudaError_t answer = ask();
    if (IsOver(answer)) return CudaStatus(answer, what);
    cudaGetLastError();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// All that a stream was given until this was made.
class AllBefore final : public MovesUnderWay {
 public:
  // Of the stream's device, which any thread may ask afterwards, whatever its own current device
  // is.
  explicit AllBefore(int device) : device_(device) {}
  ~AllBefore() override {
    if (event_ != nullptr) Ask(&cudaEventDestroy);
  }

  // While the device is the current one.
  absl::Status Record(cudaStream_t stream) {
    KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming),
                                       "cuda memory: an event"));
    return CudaStatus(cudaEventRecord(event_, stream), "cuda memory: an event");
  }
  bool done() const override { return IsOver(Ask(&cudaEventQuery)); }
  absl::Status Wait() const override {
    return AskUntilOver([this] { return Ask(&cudaEventSynchronize); }, "cuda memory: moving bytes");
  }

 private:
  cudaError_t Ask(cudaError_t (*call)(cudaEvent_t)) const {
    std::optional<cudaError_t> answer;
    const auto ask = [&] {
      answer = call(event_);
      // CUDA keeps even what is no error, that the event is not ready.
      if (answer != cudaSuccess) cudaGetLastError();
      return absl::OkStatus();
    };
    OnDevice(device_, ask).IgnoreError();
    // A device that cannot be made current any more still has an answer.
    if (!answer) ask().IgnoreError();
    return *answer;
  }

  const int device_;
  cudaEvent_t event_ = nullptr;
};

// Pinned memory of the calling thread's, made when it is first wanted.
absl::StatusOr<std::byte*> Bounce() {
  thread_local std::unique_ptr<HostPin> pin;
  thread_local std::shared_ptr<std::byte> memory;
  if (pin == nullptr) {
    KVFERRY_ASSIGN_OR_RETURN(memory, MapSlab(kBounceBytes));
    const BufferInfo buffer{memory.get(), kBounceBytes, kBounceBytes};
    KVFERRY_ASSIGN_OR_RETURN(pin, PinHostMemory({&buffer, 1}, memory));
  }
  return memory.get();
}

// Of what a pool on the device may have adopted: managed memory too.
absl::StatusOr<bool> IsOnDevice(const std::byte* address) {
  KVFERRY_ASSIGN_OR_RETURN(const cudaPointerAttributes attributes, AttributesOf(address));
  return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

// From the first of these bytes to the last of them.
template <typename Side>
std::span<const std::byte> Around(std::span<const BytesMove> moves, Side BytesMove::*side) {
  const std::byte *first = moves[0].*side, *end = first;
  for (const BytesMove& move : moves) {
    const std::byte* const begin = move.*side;
    first = std::min(first, begin, std::less<>());
    end = std::max(end, begin + move.bytes, std::less<>());
  }
  return {first, end};
}

// Whether the device reaches this side of the moves. Looking up what is pinned takes less than
// asking CUDA about an address.
template <typename Side>
absl::StatusOr<bool> IsReached(std::span<const BytesMove> moves, Side BytesMove::*side) {
  const std::byte* const first = moves[0].*side;
  if (IsPinned({first, 1})) return IsPinned(Around(moves, side));
  return IsOnDevice(first);
}

// Which sides of the moves the device reaches.
struct Reach {
  bool from, to;
};
absl::StatusOr<Reach> ReachOf(std::span<const BytesMove> moves) {
  KVFERRY_ASSIGN_OR_RETURN(const bool from, IsReached(moves, &BytesMove::from));
  KVFERRY_ASSIGN_OR_RETURN(const bool to, IsReached(moves, &BytesMove::to));
  return Reach{from, to};
}

// Also after an error: some of it may be under way.
absl::Status WaitAfter(const absl::Status& moved, cudaStream_t stream) {
  absl::Status done = WaitFor(stream, "cuda memory: moving bytes");
  return moved.ok() ? done : moved;
}

absl::Status MoveAndWait(std::span<const BytesMove> moves, cudaStream_t stream) {
  return WaitAfter(MoveBytesCuda(moves, stream), stream);
}

// What goes through the bounce buffer at a time: the same bytes on the host, in it, and on the
// device.
class Window {
 public:
  Window(std::byte* bounce, bool to_host, cudaStream_t stream)
      : bounce_(bounce), to_host_(to_host), stream_(stream) {}

  absl::Status Add(BytesMove move) {
    while (move.bytes > 0) {
      const int64_t bytes = std::min(move.bytes, kBounceBytes - filled_);
      std::byte* const place = bounce_ + filled_;
      on_host_.push_back(to_host_ ? BytesMove{place, move.to, bytes}
                                  : BytesMove{move.from, place, bytes});
      on_device_.push_back(to_host_ ? BytesMove{move.from, place, bytes}
                                    : BytesMove{place, move.to, bytes});
      filled_ += bytes;
      move = {move.from + bytes, move.to + bytes, move.bytes - bytes};
      if (filled_ == kBounceBytes) KVFERRY_RETURN_IF_ERROR(Flush());
    }
    return absl::OkStatus();
  }

  absl::Status Flush() {
    if (filled_ == 0) return absl::OkStatus();
    if (!to_host_) CopyOnHost();
    KVFERRY_RETURN_IF_ERROR(MoveAndWait(on_device_, stream_));
    if (to_host_) CopyOnHost();
    on_host_.clear();
    on_device_.clear();
    filled_ = 0;
    return absl::OkStatus();
  }

 private:
  void CopyOnHost() const {
    for (const BytesMove& move : on_host_) {
      std::memcpy(move.to, move.from, static_cast<size_t>(move.bytes));
    }
  }

  std::byte* const bounce_;
  const bool to_host_;
  const cudaStream_t stream_;
  int64_t filled_ = 0;
  std::vector<BytesMove> on_host_, on_device_;
};

absl::Status MoveThroughBounce(std::span<const BytesMove> moves, bool to_host,
                               cudaStream_t stream) {
  KVFERRY_ASSIGN_OR_RETURN(std::byte* const bounce, Bounce());
  Window window(bounce, to_host, stream);
  for (const BytesMove& move : moves) KVFERRY_RETURN_IF_ERROR(window.Add(move));
  return window.Flush();
}

}  // namespace

absl::StatusOr<cudaStream_t> StreamApart(int device) {
  // Making one for each call would take longer than many a call.
  thread_local std::map<int, OwnStream> streams;
  return streams[device].Get();
}

absl::Status WaitFor(cudaStream_t stream, absl::string_view what) {
  return AskUntilOver([stream] { return cudaStreamSynchronize(stream); }, what);
}

absl::Status MoveApartCuda(std::span<const BytesMove> moves, int device) {
  if (moves.empty()) return absl::OkStatus();
  KVFERRY_ASSIGN_OR_RETURN(const cudaStream_t stream, StreamApart(device));
  KVFERRY_ASSIGN_OR_RETURN(const Reach reach, ReachOf(moves));
  return reach.from && reach.to ? MoveAndWait(moves, stream)
                                : MoveThroughBounce(moves, /*to_host=*/reach.from, stream);
}

absl::StatusOr<std::shared_ptr<const MovesUnderWay>> BeginMoveApartCuda(
    std::span<const BytesMove> moves, int device) {
  if (moves.empty()) return nullptr;
  KVFERRY_ASSIGN_OR_RETURN(const cudaStream_t stream, StreamApart(device));
  KVFERRY_ASSIGN_OR_RETURN(const Reach reach, ReachOf(moves));
  if (!reach.from || !reach.to) {
    KVFERRY_RETURN_IF_ERROR(MoveThroughBounce(moves, /*to_host=*/reach.from, stream));
    return nullptr;
  }
  auto all = std::make_shared<AllBefore>(device);
  absl::Status begun = MoveBytesCuda(moves, stream);
  if (begun.ok()) begun = all->Record(stream);
  if (!begun.ok()) return WaitAfter(begun, stream);
  return all;
}

absl::Status MoveItemsApartCuda(std::span<const ItemsMove> items, std::span<const PlaceMove> places,
                                int device) {
  KVFERRY_ASSIGN_OR_RETURN(const cudaStream_t stream, StreamApart(device));
  return WaitAfter(MoveItemsCuda(items, places, stream), stream);
}

}  // namespace kvferry
