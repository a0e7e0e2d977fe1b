#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/page_runs.h"
#include "transport/arena.h"
#include "transport/data_plane.h"
#include "transport/mapped/mapped_packets.h"

namespace kvferry::mapped {

class PoolList;

// What a peer on this host lets this process read: its arena, and its pool, whole or in parts. The
// peer goes on writing there, and may say anything about it: each word is read once, then checked.
class PeersMemory {
 public:
  // Where the bytes of one chunk lie.
  struct Found {
    std::vector<std::span<const std::byte>> pieces;
    std::vector<PageRun> runs;  // These two where a device reads them.
    std::vector<ItemsPlace> places;
  };

  static constexpr uint64_t kMaxPoolBytes = uint64_t{1} << 45;

  // Before any chunk is looked for.
  void TakeArena(std::shared_ptr<const std::byte> arena, const ArenaShape& shape);
  bool has_arena() const { return arena_ != nullptr; }
  const std::byte* arena() const { return arena_.get(); }
  const ArenaShape& shape() const { return shape_; }

  // What follows the parts that are there. on_device: the processor cannot touch it.
  void AddPart(std::shared_ptr<const std::byte> memory, uint64_t bytes, bool on_device);
  void ForgetParts() { parts_.clear(); }
  size_t num_parts() const { return parts_.size(); }
  uint64_t pool_bytes() const { return parts_.empty() ? 0 : parts_.back().end(); }

  // The bytes of a chunk, which lie where `found` says and are good until that changes.
  // INVALID_ARGUMENT for what does not lie here or is not as long as the chunk.
  absl::StatusOr<Payload> Find(const ChunkPacket& chunk, Found* found) const;

 private:
  struct Part {
    std::shared_ptr<const std::byte> memory;
    uint64_t begin, bytes;  // In the pool.

    uint64_t end() const { return begin + bytes; }
    bool Has(uint64_t offset) const { return offset - begin < bytes; }
  };

  const Part& PartAt(uint64_t offset) const;
  absl::StatusOr<Payload> ReadPoolList(const ChunkPacket& chunk, Found* found) const;
  absl::Status ReadPieces(const PoolList& list, uint64_t chunk_bytes, Found* found) const;
  absl::Status ReadPlaces(const PoolList& list, uint64_t chunk_bytes, Found* found) const;
  static const Part* AddPieces(const Part* part, PoolPiece piece, Found* found);

  std::shared_ptr<const std::byte> arena_;
  ArenaShape shape_;
  std::vector<Part> parts_;  // One behind the other; empty: the pool cannot be read.
  bool on_device_ = false;
};

}  // namespace kvferry::mapped
