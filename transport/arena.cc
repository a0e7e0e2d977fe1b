#include "transport/arena.h"

#include <atomic>
#include <utility>

#include "base/status.h"
#include "transport/generation.h"

namespace kvferry {

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(int64_t arena_bytes, int64_t chunk_bytes) {
  const ArenaShape shape{arena_bytes / chunk_bytes, chunk_bytes};
  KVFERRY_ASSIGN_OR_RETURN(SharedMemory memory,
                           SharedMemory::CreateOrPrivate("kvferry-arena", shape.total_bytes()));
  return std::unique_ptr<Arena>(new Arena(std::move(memory), shape));
}

Arena::Arena(SharedMemory memory, const ArenaShape& shape)
    : memory_(std::move(memory)), shape_(shape), slots_(shape.num_chunks) {}

std::span<std::byte> Arena::Bytes(int64_t chunk) const {
  return {memory_.data.get() + shape_.chunk_at(chunk), static_cast<size_t>(shape_.chunk_bytes)};
}

std::span<std::byte> Arena::memory() const {
  return {memory_.data.get(), static_cast<size_t>(memory_.bytes)};
}

int64_t Arena::ChunkAt(const std::byte* address) const {
  const std::byte* first = memory_.data.get() + shape_.chunks_at();
  if (address < first || address >= memory_.data.get() + shape_.total_bytes()) return -1;
  const int64_t offset = address - first;
  return offset % shape_.chunk_bytes == 0 ? offset / shape_.chunk_bytes : -1;
}

void Arena::TakeFromReaders(int64_t chunk) { RaiseGeneration(memory_.data.get(), chunk); }

uint64_t Arena::Generation(int64_t chunk) const {
  return GenerationIn(memory_.data.get(), chunk).load(std::memory_order_relaxed);
}

uint64_t GenerationSeenByReader(const std::byte* arena, int64_t chunk) {
  std::atomic_thread_fence(std::memory_order_acquire);
  // atomic_ref has no form for const; a load does not write.
  return GenerationIn(const_cast<std::byte*>(arena), chunk).load(std::memory_order_relaxed);
}

}  // namespace kvferry
