#pragma once

// Copies that read what they write, for whose rows memory of their own is needed meanwhile.

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "pool/pool_memory.h"
#include "pool/token_copy.h"
#include "pool/token_view.h"

namespace kvferry {

// Whether two stretches of bytes have some in common.
bool Meet(std::span<const std::byte> a, std::span<const std::byte> b);
// Two stretches that have some of their bytes in common but are not one, if there are any: their
// numbers, the lower one first.
std::optional<std::pair<size_t, size_t>> FindMeetInPart(
    std::span<const std::span<std::byte>> stretches);
// Whether some of these may have bytes of the others, as far as the first and the last byte of each
// say. Only the former may be without slots.
bool Meet(std::span<const TokenView> some, std::span<const TokenView> others);

// Rows of views as they are, without gaps, in memory of their own.
struct RowsAside {
  std::vector<TokenView> rows;
  std::shared_ptr<std::byte> memory;
};
// All rows of `views`, which lie where `memory` reaches them. RESOURCE_EXHAUSTED saying how many
// bytes are missing when it has no room for them; else its own errors.
absl::StatusOr<RowsAside> PutAside(std::span<const TokenView> views, const PoolMemory& memory,
                                   ThreadPool* threads);

// memory.Run(), but all rows are read before one is written. Errors as for PutAside(), and nothing
// is written then; or of the writes.
absl::Status RunAside(std::span<const TokenCopy> copies, const PoolMemory& memory,
                      ThreadPool* threads);

}  // namespace kvferry
