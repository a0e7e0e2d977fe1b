#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace kvferry {

// The only memory that the packed path takes: arena_bytes / chunk_bytes chunks, made once and never
// more. What is being sent lies here and not in pool pages, so a page is free again the moment it
// was gathered, even when its chunk can no longer be recalled. Not thread-safe.
class Arena {
 public:
  static absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t arena_bytes, int64_t chunk_bytes);

  // An index in [0, num_chunks()), or -1 when all are taken.
  int64_t Take();
  void GiveBack(int64_t chunk);
  std::span<std::byte> Bytes(int64_t chunk) const;

  int64_t num_chunks() const { return num_chunks_; }
  int64_t num_taken() const { return num_chunks_ - static_cast<int64_t>(free_.size()); }

 private:
  Arena(std::shared_ptr<std::byte> memory, int64_t num_chunks, int64_t chunk_bytes);

  const std::shared_ptr<std::byte> memory_;
  const int64_t num_chunks_;
  const int64_t chunk_bytes_;
  std::vector<int64_t> free_;  // Last given back is taken first: it is still in the cache.
};

}  // namespace kvferry
