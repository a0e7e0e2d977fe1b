#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "base/shared_memory.h"
#include "transport/slots.h"

namespace kvferry {

// Where things lie in an arena's memory: `chunks` generations, padded to a page, then the chunks.
struct ArenaShape {
  int64_t num_chunks = 0;
  int64_t chunk_bytes = 0;

  int64_t chunks_at() const { return (num_chunks * 8 + 4095) / 4096 * 4096; }
  int64_t chunk_at(int64_t chunk) const { return chunks_at() + chunk * chunk_bytes; }
  int64_t total_bytes() const { return chunk_at(num_chunks); }
};

// The only memory that the packed path takes: arena_bytes / chunk_bytes chunks, made once and never
// more. What is being sent lies here and not in pool pages, so a page is free again the moment it
// was gathered, even when its chunk can no longer be recalled. Peers on this host read the chunks
// where they lie. Not thread-safe.
class Arena {
 public:
  // In memory that can be shared, where the system has such (SharedMemory::CreateOrPrivate).
  static absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t arena_bytes, int64_t chunk_bytes);

  // An index in [0, num_chunks()), or -1 when all are taken.
  int64_t Take() { return slots_.Take(); }
  void GiveBack(int64_t chunk) { slots_.GiveBack(chunk); }
  int64_t num_free() const { return slots_.num_free(); }
  std::span<std::byte> Bytes(int64_t chunk) const;
  // All of it.
  std::span<std::byte> memory() const;
  // The chunk that begins at this address, or -1.
  int64_t ChunkAt(const std::byte* address) const;

  // A peer's reader may not be through with the chunk, which is to be used again: it will find
  // another generation than it was told.
  void TakeFromReaders(int64_t chunk);
  uint64_t Generation(int64_t chunk) const;

  int64_t num_chunks() const { return shape_.num_chunks; }
  int64_t num_taken() const { return slots_.num_taken(); }
  const ArenaShape& shape() const { return shape_; }
  // -1 when the memory is not shared.
  int fd() const { return memory_.fd.get(); }

 private:
  Arena(SharedMemory memory, const ArenaShape& shape);

  const SharedMemory memory_;
  const ArenaShape shape_;
  Slots slots_;
};

// The same word as its readers see it, in a read-only mapping: to be read after what it guards.
uint64_t GenerationSeenByReader(const std::byte* arena, int64_t chunk);

}  // namespace kvferry
