#include "transport/arena.h"

#include <utility>

#include "base/slab.h"
#include "base/status.h"

namespace kvferry {

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(int64_t arena_bytes, int64_t chunk_bytes) {
  const int64_t num_chunks = arena_bytes / chunk_bytes;
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, MapSlab(num_chunks * chunk_bytes));
  return std::unique_ptr<Arena>(new Arena(std::move(memory), num_chunks, chunk_bytes));
}

Arena::Arena(std::shared_ptr<std::byte> memory, int64_t num_chunks, int64_t chunk_bytes)
    : memory_(std::move(memory)), num_chunks_(num_chunks), chunk_bytes_(chunk_bytes) {
  for (int64_t chunk = num_chunks - 1; chunk >= 0; --chunk) free_.push_back(chunk);
}

int64_t Arena::Take() {
  if (free_.empty()) return -1;
  const int64_t chunk = free_.back();
  free_.pop_back();
  return chunk;
}

void Arena::GiveBack(int64_t chunk) { free_.push_back(chunk); }

std::span<std::byte> Arena::Bytes(int64_t chunk) const {
  return {memory_.get() + chunk * chunk_bytes_, static_cast<size_t>(chunk_bytes_)};
}

}  // namespace kvferry
