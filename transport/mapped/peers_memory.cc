#include "transport/mapped/peers_memory.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/kv_layout.h"

namespace kvferry::mapped {

// Entries of a list that lies where its sender can change it: each is read once, and then checked.
class PoolList {
 public:
  PoolList(const std::byte* begin, size_t size) : begin_(begin), size_(size) {}

  size_t size() const { return size_; }
  PoolList From(size_t first) const { return {begin_ + first * sizeof(PoolPiece), size_ - first}; }
  PoolList First(size_t count) const { return {begin_, count}; }
  template <typename Entry>
  Entry Read(size_t index) const {
    static_assert(sizeof(Entry) == sizeof(PoolPiece));
    Entry entry;
    std::memcpy(&entry, begin_ + index * sizeof(entry), sizeof(entry));
    return entry;
  }

 private:
  const std::byte* begin_;
  size_t size_;
};

namespace {

constexpr uint64_t kMaxPlaces = KvLayout::kMaxLayers * KvLayout::kMaxTensors;

// Of items that could be a byte each.
absl::Status ReadRuns(const PoolList& list, uint64_t chunk_bytes, std::vector<PageRun>* runs) {
  runs->clear();
  uint64_t items = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const auto run = list.Read<PoolRun>(i);
    if (run.first > PeersMemory::kMaxPoolBytes || run.count == 0 ||
        run.count > chunk_bytes - items) {
      return absl::InvalidArgumentError(absl::StrCat(
          "items ", run.first, " + ", run.count, " after ", items, " of a chunk of ", chunk_bytes));
    }
    items += run.count;
    runs->push_back({static_cast<int64_t>(run.first), static_cast<int64_t>(run.count)});
  }
  if (items > 0) return absl::OkStatus();
  return absl::InvalidArgumentError("places without runs");
}

}  // namespace

void PeersMemory::TakeArena(std::shared_ptr<const std::byte> arena, const ArenaShape& shape) {
  arena_ = std::move(arena);
  shape_ = shape;
}

void PeersMemory::AddPart(std::shared_ptr<const std::byte> memory, uint64_t bytes, bool on_device) {
  parts_.push_back({std::move(memory), pool_bytes(), bytes});
  on_device_ = on_device;
}

const PeersMemory::Part& PeersMemory::PartAt(uint64_t offset) const {
  const auto begins_behind = [](uint64_t at, const Part& part) { return at < part.begin; };
  return *std::prev(std::upper_bound(parts_.begin(), parts_.end(), offset, begins_behind));
}

absl::StatusOr<Payload> PeersMemory::Find(const ChunkPacket& chunk, Found* found) const {
  found->pieces.clear();
  const bool in_pool = (chunk.header.flags & kChunkInPool) != 0;
  if (chunk.slot >= static_cast<uint64_t>(shape_.num_chunks) ||
      chunk.payload_bytes > static_cast<uint64_t>(shape_.chunk_bytes) ||
      (in_pool ? parts_.empty() : chunk.payload_bytes != chunk.header.bytes)) {
    return absl::InvalidArgumentError(absl::StrCat("a chunk of ", chunk.header.bytes, " bytes, ",
                                                   chunk.payload_bytes, " in slot ", chunk.slot));
  }
  if (in_pool && on_device_ && (chunk.header.flags & kChunkHasChecksum) != 0) {
    return absl::InvalidArgumentError("a checksum of what the processor cannot read");
  }
  if (in_pool) return ReadPoolList(chunk, found);
  const int64_t at = shape_.chunk_at(static_cast<int64_t>(chunk.slot));
  found->pieces.emplace_back(arena_.get() + at, chunk.header.bytes);
  return Payload(Pieces(found->pieces));
}

absl::StatusOr<Payload> PeersMemory::ReadPoolList(const ChunkPacket& chunk, Found* found) const {
  const int64_t slot = shape_.chunk_at(static_cast<int64_t>(chunk.slot));
  const PoolList all(arena_.get() + slot, chunk.payload_bytes / sizeof(PoolPiece));
  if (all.size() == 0) return absl::InvalidArgumentError("a list without a head");
  const uint64_t places = all.Read<PoolListHead>(0).places;
  if (places == 0) {
    KVFERRY_RETURN_IF_ERROR(ReadPieces(all.From(1), chunk.header.bytes, found));
    return Payload(Pieces(found->pieces));
  }
  if (!on_device_ || places > kMaxPlaces || places > all.size() - 1) {
    return absl::InvalidArgumentError(absl::StrCat(places, " places in a list of ", all.size(),
                                                   on_device_ ? "" : ", of a pool on the host"));
  }
  KVFERRY_RETURN_IF_ERROR(ReadRuns(all.From(1 + places), chunk.header.bytes, &found->runs));
  KVFERRY_RETURN_IF_ERROR(ReadPlaces(all.From(1).First(places), chunk.header.bytes, found));
  return Payload(PlacedRuns{found->runs, found->places});
}

// Pieces that lie in the pool, and are all of the chunk.
absl::Status PeersMemory::ReadPieces(const PoolList& list, uint64_t chunk_bytes,
                                     Found* found) const {
  const uint64_t size = pool_bytes();
  uint64_t sum = 0;
  const Part* part = parts_.data();
  for (size_t i = 0; i < list.size() && sum <= chunk_bytes; ++i) {
    const auto piece = list.Read<PoolPiece>(i);
    if (piece.offset > size || piece.bytes > size - piece.offset) {
      return absl::InvalidArgumentError(
          absl::StrCat("bytes ", piece.offset, " + ", piece.bytes, " of a pool of ", size));
    }
    // Most lie where the last one did.
    if (!part->Has(piece.offset)) part = &PartAt(piece.offset);
    part = AddPieces(part, piece, found);
    sum += piece.bytes;
  }
  if (sum == chunk_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("pieces of ", sum, " bytes for a chunk of ", chunk_bytes));
}

// It begins in `part` and lies in the pool: perhaps in the parts behind, too.
const PeersMemory::Part* PeersMemory::AddPieces(const Part* part, PoolPiece piece, Found* found) {
  while (piece.bytes > 0) {
    const uint64_t at = piece.offset - part->begin;
    const uint64_t bytes = std::min(piece.bytes, part->bytes - at);
    found->pieces.emplace_back(part->memory.get() + at, bytes);
    piece = {piece.offset + bytes, piece.bytes - bytes};
    if (piece.bytes > 0) ++part;
  }
  return part;
}

// Each with all of the runs in one part; together they are all of the chunk.
absl::Status PeersMemory::ReadPlaces(const PoolList& list, uint64_t chunk_bytes,
                                     Found* found) const {
  found->places.clear();
  uint64_t items = 0, end = 0, left = chunk_bytes;
  for (const PageRun& run : found->runs) {
    items += static_cast<uint64_t>(run.count);
    end = std::max(end, static_cast<uint64_t>(run.first + run.count));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    const auto place = list.Read<PoolPlace>(i);
    if (place.item_bytes == 0 || place.item_bytes > left / items) {
      return absl::InvalidArgumentError(absl::StrCat(items, " items of ", place.item_bytes,
                                                     " bytes, of ", chunk_bytes, " in the chunk ",
                                                     left, " left"));
    }
    const Part* const part = place.offset < pool_bytes() ? &PartAt(place.offset) : nullptr;
    if (part == nullptr || end > (part->bytes - (place.offset - part->begin)) / place.item_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          end, " items of ", place.item_bytes, " bytes from ", place.offset, " of a pool's part"));
    }
    left -= items * place.item_bytes;
    found->places.push_back({part->memory.get() + (place.offset - part->begin),
                             static_cast<int64_t>(place.item_bytes)});
  }
  if (left == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("places of ", chunk_bytes - left, " bytes for a chunk of ", chunk_bytes));
}

}  // namespace kvferry::mapped
