#include "pool/cuda/move_bytes_cuda.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/ceil_div.h"
#include "base/status.h"
#include "pool/cuda/cuda_status.h"

namespace kvferry {
namespace {

constexpr uint32_t kLanes = 32;  // Threads of a warp.
constexpr uint32_t kWarps = 8;   // Of a block.
// What a warp moves: enough to be worth starting it, little enough that all of a device's
// multiprocessors have some of it.
constexpr int64_t kLeastUnitBytes = 8 << 10, kMostUnitBytes = 16 << 10;
// Of short items it moves as much in several places, where so many warps are left: a large device's
// multiprocessors have room for about as many at once.
constexpr int64_t kEnoughWarps = 8 << 10;
// Of long ones as much at a time; in more parts than this of one no device has use.
constexpr int64_t kMostSlices = 4 << 10;
// A copy of CUDA's own takes some microseconds to ask for, in which it could move this much.
constexpr int64_t kLongMove = 64 << 10;
constexpr size_t kFewMoves = 16;

// What a launch moves: each unit, some items that lie together, at each place. It brings this along
// as an argument, which may be 32,764 bytes long: nothing has to be copied to the device first, and
// nothing kept until the launch has run. Arrays for themselves, as some are of short numbers: so
// there is room for more units. No padding, which would hide what is wrong in it from the emulated
// device.
template <int kUnits, int kPlaces>
struct Moves {
  static constexpr int kMostUnits = kUnits, kMostPlaces = kPlaces;
  // Units, in items from where a place begins.
  uint64_t from[kUnits], to[kUnits];
  uint16_t items[kUnits];
  // Places, as addresses: 0 for units that are addresses themselves, of items of a byte.
  uint64_t places_from[kPlaces], places_to[kPlaces];
  uint64_t item_bytes[kPlaces];
  uint32_t num_units, num_places;
  uint32_t places_a_warp;  // One unit at so many places, one after another,
  uint32_t slices;         // or one of so many parts of it, each so long.
  uint64_t slice_bytes;
};
using ManyMoves = Moves<1604, 160>;  // K and V of 80 layers.
using SomeMoves = Moves<512, 160>;
using FewMoves = Moves<128, 8>;
static_assert(sizeof(ManyMoves) <= 32764);

struct Piece {
  const std::byte* from;
  std::byte* to;
  uint32_t bytes;
};

// Four words of each lane under way at a time. So at the end, where there are fewer: who has none
// there reads the last one and keeps it to himself, as no load then waits for another one's turn.
template <typename Word>
__device__ void MoveWords(const Piece& piece, uint32_t lane) {
  constexpr uint32_t kWordsAtATime = 4;
  const auto* from = reinterpret_cast<const Word*>(piece.from);
  auto* to = reinterpret_cast<Word*>(piece.to);
  const uint32_t words = piece.bytes / static_cast<uint32_t>(sizeof(Word));
  Word word[kWordsAtATime];
  uint32_t at = lane;
  for (; at + (kWordsAtATime - 1) * kLanes < words; at += kWordsAtATime * kLanes) {
    for (uint32_t i = 0; i < kWordsAtATime; ++i) word[i] = from[at + i * kLanes];
    for (uint32_t i = 0; i < kWordsAtATime; ++i) to[at + i * kLanes] = word[i];
  }
  if (at >= words) return;
  for (uint32_t i = 0; i < kWordsAtATime; ++i) word[i] = from[min(at + i * kLanes, words - 1)];
  for (uint32_t i = 0; i < kWordsAtATime; ++i) {
    if (at + i * kLanes < words) to[at + i * kLanes] = word[i];
  }
}

__device__ void MovePiece(const Piece& piece, uint32_t lane) {
  const uint64_t aligned =
      reinterpret_cast<uintptr_t>(piece.from) | reinterpret_cast<uintptr_t>(piece.to) | piece.bytes;
  if (aligned % sizeof(uint4) == 0) {
    MoveWords<uint4>(piece, lane);
  } else if (aligned % sizeof(uint32_t) == 0) {
    MoveWords<uint32_t>(piece, lane);
  } else {
    MoveWords<uint8_t>(piece, lane);
  }
}

// Warps beside each other have units beside each other, all at the same places.
template <typename List>
__global__ void MoveUnits(const List __grid_constant__ list) {
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kLanes;
  const uint32_t unit = warp % list.num_units;
  const uint64_t skip = warp / list.num_units % list.slices * list.slice_bytes;
  const uint32_t first_place = warp / list.num_units / list.slices * list.places_a_warp;
  const uint32_t end_place = min(first_place + list.places_a_warp, list.num_places);
  for (uint32_t place = first_place; place < end_place; ++place) {
    const uint64_t item_bytes = list.item_bytes[place];
    const uint64_t bytes = list.items[unit] * item_bytes;
    if (skip >= bytes) continue;  // Items of other places are longer.
    const uint64_t from = list.places_from[place] + list.from[unit] * item_bytes + skip;
    const uint64_t to = list.places_to[place] + list.to[unit] * item_bytes + skip;
    // The compiler cannot know it of sums, and would ask in each load.
    MovePiece({static_cast<const std::byte*>(__cvta_global_to_generic(from)),
               static_cast<std::byte*>(__cvta_global_to_generic(to)),
               static_cast<uint32_t>(min(bytes - skip, list.slice_bytes))},
              threadIdx.x % kLanes);
  }
}

template <typename Byte>
uint64_t AddressOf(Byte* byte) {
  return reinterpret_cast<uintptr_t>(byte);
}

// Launches what it is given, as many units at a time as an argument has room for.
class Launches {
 public:
  static constexpr int64_t kMostUnits = ManyMoves::kMostUnits;
  static constexpr int64_t kMostPlaces = ManyMoves::kMostPlaces;

  // At most kMostPlaces. What is moved at all of them together is `total` bytes.
  Launches(std::span<const PlaceMove> places, int64_t total, cudaStream_t stream)
      : stream_(stream),
        // A multiple of the longest word.
        unit_bytes_(std::clamp(total / kMostUnits / kLeastUnitBytes * kLeastUnitBytes,
                               kLeastUnitBytes, kMostUnitBytes)) {
    list_.num_units = list_.num_places = 0;
    for (const PlaceMove& place : places) {
      list_.places_from[list_.num_places] = AddressOf(place.from);
      list_.places_to[list_.num_places] = AddressOf(place.to);
      list_.item_bytes[list_.num_places++] = static_cast<uint64_t>(place.item_bytes);
      longest_item_ = std::max(longest_item_, place.item_bytes);
    }
    unit_items_ = std::max<int64_t>(1, unit_bytes_ / longest_item_);
  }

  absl::Status Add(ItemsMove move) {
    while (move.items > 0) {
      const int64_t items = std::min(unit_items_, move.items);
      list_.from[list_.num_units] = static_cast<uint64_t>(move.from);
      list_.to[list_.num_units] = static_cast<uint64_t>(move.to);
      list_.items[list_.num_units] = static_cast<uint16_t>(items);
      longest_unit_ = std::max(longest_unit_, items * longest_item_);
      move = {move.from + items, move.to + items, move.items - items};
      if (++list_.num_units == kMostUnits) KVFERRY_RETURN_IF_ERROR(Flush());
    }
    return absl::OkStatus();
  }

  // All of an argument is copied, used or not.
  absl::Status Flush() {
    if (list_.num_units == 0) return absl::OkStatus();
    ShareAmongWarps();
    const absl::Status launched = Fits<FewMoves>()    ? Launch<FewMoves>()
                                  : Fits<SomeMoves>() ? Launch<SomeMoves>()
                                                      : Launch<ManyMoves>();
    list_.num_units = 0;
    longest_unit_ = 0;
    return launched;
  }

 private:
  template <typename List>
  bool Fits() const {
    return list_.num_units <= List::kMostUnits && list_.num_places <= List::kMostPlaces;
  }

  void ShareAmongWarps() {
    const int64_t slice_bytes = unit_bytes_ * CeilDiv(longest_unit_, unit_bytes_ * kMostSlices);
    const int64_t pieces = int64_t{list_.num_units} * list_.num_places;
    const int64_t places =
        std::min(kLeastUnitBytes / std::min(longest_unit_, kLeastUnitBytes), pieces / kEnoughWarps);
    list_.slice_bytes = static_cast<uint64_t>(slice_bytes);
    list_.slices = static_cast<uint32_t>(CeilDiv(longest_unit_, slice_bytes));
    list_.places_a_warp = static_cast<uint32_t>(std::clamp<int64_t>(places, 1, list_.num_places));
  }

  template <typename List>
  absl::Status Launch() const {
    List list;
    const auto take = [](const auto& from, uint32_t count, auto& to) {
      std::fill(std::copy_n(from, count, to), std::end(to), 0);
    };
    take(list_.from, list_.num_units, list.from);
    take(list_.to, list_.num_units, list.to);
    take(list_.items, list_.num_units, list.items);
    take(list_.places_from, list_.num_places, list.places_from);
    take(list_.places_to, list_.num_places, list.places_to);
    take(list_.item_bytes, list_.num_places, list.item_bytes);
    list.num_units = list_.num_units;
    list.num_places = list_.num_places;
    list.places_a_warp = list_.places_a_warp;
    list.slices = list_.slices;
    list.slice_bytes = list_.slice_bytes;
    const int64_t warps =
        CeilDiv(list.num_places, list.places_a_warp) * list.slices * list.num_units;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<uint32_t>(CeilDiv(warps, int64_t{kWarps})));
    config.blockDim = dim3(kWarps * kLanes);
    config.stream = stream_;
    return CudaStatus(cudaLaunchKernelEx(&config, &MoveUnits<List>, list), "moving bytes");
  }

  const cudaStream_t stream_;
  const int64_t unit_bytes_;
  int64_t unit_items_ = 1, longest_item_ = 1;
  int64_t longest_unit_ = 0;  // Of those in the list, in bytes.
  ManyMoves list_;
};

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
  const PlaceMove everywhere = {nullptr, nullptr, 1};
  Launches launches({&everywhere, 1}, total, stream);
  for (const BytesMove& move : moves) {
    KVFERRY_RETURN_IF_ERROR(launches.Add({static_cast<int64_t>(AddressOf(move.from)),
                                          static_cast<int64_t>(AddressOf(move.to)), move.bytes}));
  }
  return launches.Flush();
}

absl::Status MoveItemsCuda(std::span<const ItemsMove> items, std::span<const PlaceMove> places,
                           cudaStream_t stream) {
  if (items.size() * places.size() <= kFewMoves) {
    return MoveBytesCuda(MovesOf(items, places), stream);
  }
  int64_t total_items = 0;
  for (const ItemsMove& move : items) total_items += move.items;
  while (!places.empty()) {
    const auto some = places.first(std::min<size_t>(places.size(), Launches::kMostPlaces));
    places = places.subspan(some.size());
    int64_t item_bytes = 0;
    for (const PlaceMove& place : some) item_bytes += place.item_bytes;
    Launches launches(some, total_items * item_bytes, stream);
    for (const ItemsMove& move : items) KVFERRY_RETURN_IF_ERROR(launches.Add(move));
    KVFERRY_RETURN_IF_ERROR(launches.Flush());
  }
  return absl::OkStatus();
}

}  // namespace kvferry
