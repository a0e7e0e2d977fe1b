#include "pool/cuda/move_bytes_cuda.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/status.h"
#include "pool/cuda/cuda_status.h"

namespace kvferry {
namespace {

constexpr uint32_t kLanes = 32;  // Threads of a warp.
constexpr uint32_t kWarps = 8;   // Of a block.
// What a warp moves: enough to be worth starting it, little enough that all of a device's
// multiprocessors have some of it.
constexpr int64_t kLeastUnitBytes = 8 << 10, kMostUnitBytes = 16 << 10;
// A copy of CUDA's own takes some microseconds to ask for, in which it could move this much.
constexpr int64_t kLongMove = 64 << 10;
constexpr size_t kFewMoves = 16;

struct Unit {
  const std::byte* from;
  std::byte* to;
  uint32_t bytes;
};

// A launch brings its list along as an argument, which may be 32,764 bytes long: nothing has to be
// copied to the device first, and nothing kept until the launch has run. Sizes for themselves, as they
// are short: so there is room for a third more units.
template <int kMost>
struct Units {
  const std::byte* from[kMost];
  std::byte* to[kMost];
  uint16_t bytes[kMost];
  uint64_t count;
};
constexpr int kManyUnits = 1816, kSomeUnits = 512, kFewUnits = 128;
static_assert(sizeof(Units<kManyUnits>) <= 32764 && kMostUnitBytes <= UINT16_MAX);

// Four words of each lane under way at a time.
template <typename Word>
__device__ void MoveWords(const Unit& unit, uint32_t lane) {
  constexpr uint32_t kWordsAtATime = 4;
  const auto* from = reinterpret_cast<const Word*>(unit.from);
  auto* to = reinterpret_cast<Word*>(unit.to);
  const uint32_t words = unit.bytes / static_cast<uint32_t>(sizeof(Word));
  uint32_t at = lane;
  for (; at + (kWordsAtATime - 1) * kLanes < words; at += kWordsAtATime * kLanes) {
    Word word[kWordsAtATime];
    for (uint32_t i = 0; i < kWordsAtATime; ++i) word[i] = from[at + i * kLanes];
    for (uint32_t i = 0; i < kWordsAtATime; ++i) to[at + i * kLanes] = word[i];
  }
  for (; at < words; at += kLanes) to[at] = from[at];
}

// A warp a unit.
template <int kMost>
__global__ void MoveUnits(const __grid_constant__ Units<kMost> units) {
  const uint32_t index = blockIdx.x * kWarps + threadIdx.x / kLanes;
  if (index >= units.count) return;
  const Unit unit = {units.from[index], units.to[index], units.bytes[index]};
  const uint32_t lane = threadIdx.x % kLanes;
  const uint64_t aligned =
      reinterpret_cast<uintptr_t>(unit.from) | reinterpret_cast<uintptr_t>(unit.to) | unit.bytes;
  if (aligned % sizeof(uint4) == 0) {
    MoveWords<uint4>(unit, lane);
  } else if (aligned % sizeof(uint32_t) == 0) {
    MoveWords<uint32_t>(unit, lane);
  } else {
    MoveWords<uint8_t>(unit, lane);
  }
}

template <int kMost>
absl::Status Launch(const Units<kManyUnits>& list, cudaStream_t stream) {
  Units<kMost> units;
  const auto take = [&list](const auto& from, auto& to, auto none) {
    std::fill(std::copy_n(from, list.count, to), std::end(to), none);
  };
  take(list.from, units.from, nullptr);
  take(list.to, units.to, nullptr);
  take(list.bytes, units.bytes, uint16_t{0});
  units.count = list.count;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<uint32_t>((list.count + kWarps - 1) / kWarps));
  config.blockDim = dim3(kWarps * kLanes);
  config.stream = stream;
  return CudaStatus(cudaLaunchKernelEx(&config, &MoveUnits<kMost>, units), "moving bytes");
}

// All of an argument is copied, used or not.
absl::Status LaunchUnits(const Units<kManyUnits>& list, cudaStream_t stream) {
  if (list.count == 0) return absl::OkStatus();
  if (list.count <= kFewUnits) return Launch<kFewUnits>(list, stream);
  if (list.count <= kSomeUnits) return Launch<kSomeUnits>(list, stream);
  return Launch<kManyUnits>(list, stream);
}

}  // namespace

absl::Status CopyEachCuda(std::span<const BytesMove> moves, cudaStream_t stream) {
  for (const BytesMove& move : moves) {
    KVFERRY_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(move.to, move.from, static_cast<size_t>(move.bytes),
                                   cudaMemcpyDefault, stream),
                   "moving bytes"));
  }
  return absl::OkStatus();
}

absl::Status MoveBytesCuda(std::span<const BytesMove> moves, cudaStream_t stream) {
  int64_t total = 0;
  for (const BytesMove& move : moves) total += move.bytes;
  const auto count = static_cast<int64_t>(moves.size());
  if (moves.size() <= kFewMoves && total >= count * kLongMove) return CopyEachCuda(moves, stream);
  // A multiple of the longest word.
  const int64_t unit_bytes = std::clamp(total / kManyUnits / kLeastUnitBytes * kLeastUnitBytes,
                                        kLeastUnitBytes, kMostUnitBytes);
  Units<kManyUnits> list;
  list.count = 0;
  for (const BytesMove& move : moves) {
    for (int64_t at = 0; at < move.bytes; at += unit_bytes) {
      list.from[list.count] = move.from + at;
      list.to[list.count] = move.to + at;
      list.bytes[list.count] = static_cast<uint16_t>(std::min(unit_bytes, move.bytes - at));
      if (++list.count < kManyUnits) continue;
      KVFERRY_RETURN_IF_ERROR(LaunchUnits(list, stream));
      list.count = 0;
    }
  }
  return LaunchUnits(list, stream);
}

}  // namespace kvferry
