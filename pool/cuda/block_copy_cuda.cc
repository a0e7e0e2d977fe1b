#include "pool/cuda/block_copy_cuda.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "base/slab.h"
#include "base/status.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/move_bytes_cuda.h"
#include "pool/cuda/places.h"

namespace kvferry {
namespace {

// How the current device gets at a cache's blocks.
struct Reach {
  bool by_kernels = true;
  bool by_copies = true;  // Else CUDA may refuse some: they are pinned in part.
};

absl::StatusOr<Reach> ReachOf(const BlockCache& cache, int device) {
  if (!cache.memory().on_host()) return Reach{cache.memory().cuda_device() == device, true};
  Reach reach;
  for (const std::span<std::byte>& piece : cache.pieces()) {
    KVFERRY_ASSIGN_OR_RETURN(const Place place, PlaceOf(piece, device));
    reach.by_kernels &= place == Place::kPinned || place == Place::kDevice;
    reach.by_copies &= place != Place::kPartlyPinned && place != Place::kPinnedAtEnds;
  }
  return reach;
}

std::vector<PlaceMove> PlacesOf(const BlockCache& from, const BlockCache& to) {
  const std::vector<BufferInfo> sources = from.buffer_infos(), destinations = to.buffer_infos();
  std::vector<PlaceMove> places;
  for (size_t i = 0; i < sources.size(); ++i) {
    places.push_back({sources[i].address, destinations[i].address, sources[i].item_bytes});
  }
  return places;
}

// Moves between two caches of which one at least lies on the host and is pinned in part: the
// processor does what CUDA refuses.
class PartlyPinnedCopies {
 public:
  PartlyPinnedCopies(bool from_host, bool to_host, int device, cudaStream_t stream)
      : from_host_(from_host), to_host_(to_host), device_(device), stream_(stream) {}

  absl::Status Run(std::span<const BytesMove> moves) {
    for (const BytesMove& move : moves) {
      KVFERRY_ASSIGN_OR_RETURN(const bool from, IsRefused(from_host_, move.from, move.bytes));
      KVFERRY_ASSIGN_OR_RETURN(const bool to, IsRefused(to_host_, move.to, move.bytes));
      KVFERRY_RETURN_IF_ERROR(from || to ? MoveByTheHost(move) : CopyEachCuda({&move, 1}, stream_));
    }
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kBufferBytes = 16 << 20;

  absl::StatusOr<bool> IsRefused(bool on_host, const std::byte* first, int64_t bytes) const {
    if (!on_host) return false;
    KVFERRY_ASSIGN_OR_RETURN(const Place place,
                             PlaceOf({first, static_cast<size_t>(bytes)}, device_));
    return place == Place::kPartlyPinned;
  }

  // In its place in the stream: behind what reads and writes these bytes before.
  absl::Status MoveByTheHost(const BytesMove& move) {
    KVFERRY_RETURN_IF_ERROR(Wait());
    if (from_host_ && to_host_) {
      std::memcpy(move.to, move.from, static_cast<size_t>(move.bytes));
      return absl::OkStatus();
    }
    if (buffer_ == nullptr) {
      KVFERRY_ASSIGN_OR_RETURN(buffer_, MapSlab(kBufferBytes));
    }
    for (int64_t done = 0; done < move.bytes; done += kBufferBytes) {
      const int64_t bytes = std::min(kBufferBytes, move.bytes - done);
      KVFERRY_RETURN_IF_ERROR(MoveByBuffer({move.from + done, move.to + done, bytes}));
    }
    return absl::OkStatus();
  }

  // CUDA copies between the buffer and the device.
  absl::Status MoveByBuffer(const BytesMove& move) {
    const auto size = static_cast<size_t>(move.bytes);
    if (from_host_) std::memcpy(buffer_.get(), move.from, size);
    const BytesMove copy = from_host_ ? BytesMove{buffer_.get(), move.to, move.bytes}
                                      : BytesMove{move.from, buffer_.get(), move.bytes};
    KVFERRY_RETURN_IF_ERROR(CopyEachCuda({&copy, 1}, stream_));
    KVFERRY_RETURN_IF_ERROR(Wait());
    if (to_host_) std::memcpy(move.to, buffer_.get(), size);
    return absl::OkStatus();
  }

  absl::Status Wait() const { return CudaStatus(cudaStreamSynchronize(stream_), "moving bytes"); }

  const bool from_host_, to_host_;
  const int device_;
  const cudaStream_t stream_;
  std::shared_ptr<std::byte> buffer_;  // Pinned nowhere; made when it is first wanted.
};

}  // namespace

absl::Status CopyBlocksCuda(const BlockCache& from, BlockCache& to,
                            std::span<const BlockPair> pairs, cudaStream_t stream) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<ItemsMove> runs, PlanBlockCopy(from, to, pairs));
  if (runs.empty()) return absl::OkStatus();
  int device = 0;
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), "block copy"));
  KVFERRY_ASSIGN_OR_RETURN(const Reach read, ReachOf(from, device));
  KVFERRY_ASSIGN_OR_RETURN(const Reach written, ReachOf(to, device));
  const std::vector<BytesMove> moves = MovesOf(runs, PlacesOf(from, to));
  if (read.by_kernels && written.by_kernels) return MoveBytesCuda(moves, stream);
  if (read.by_copies && written.by_copies) return CopyEachCuda(moves, stream);
  return PartlyPinnedCopies(from.memory().on_host(), to.memory().on_host(), device, stream)
      .Run(moves);
}

}  // namespace kvferry
