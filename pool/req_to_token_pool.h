#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/pool_memory.h"

namespace kvferry {

// Where each token of each running request lies: a table [num_requests, max_context_tokens] of
// int32 token slots, and the request slots (its rows) that are free. What SGLang and pymllm call
// ReqToTokenPool.
//
// The table may lie on a device, for its kernels to read; who has which slots is the host's anyway.
// A row keeps its old contents until it is written. Not thread-safe; engines drive it from their
// scheduler thread.
class ReqToTokenPool {
 public:
  // A zeroed table in memory of the given kind (null: the host's), whose errors are passed on:
  // RESOURCE_EXHAUSTED when the machine will not give it. INVALID_ARGUMENT for sizes below 1 or
  // above the limits, on a device also for more than 2^31 - 1 entries.
  static absl::StatusOr<ReqToTokenPool> Create(
      int64_t num_requests, int64_t max_context_tokens,
      const std::shared_ptr<const PoolMemory>& memory = HostMemory());

  // `count` free request slots, of a new or cleared pool the lowest. RESOURCE_EXHAUSTED when fewer
  // are free, INVALID_ARGUMENT when count is below 1; nothing changes then.
  absl::StatusOr<std::vector<int64_t>> Allocate(int64_t count);
  // INVALID_ARGUMENT naming the slot when one is out of range, not allocated, or twice in the list;
  // nothing changes then.
  absl::Status Free(std::span<const int64_t> slots);
  // All request slots are free again.
  void Clear();
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }

  // Writes positions [first, first + token_slots.size()) of an allocated request slot's row.
  // INVALID_ARGUMENT when the slot is not allocated, OUT_OF_RANGE beyond max_context_tokens;
  // nothing changes then. On a device also what that fails with.
  absl::Status Write(int64_t slot, int64_t first, std::span<const int32_t> token_slots);
  // The same for a batch, in one go on a device: the next counts[i] of token_slots to positions
  // [firsts[i], firsts[i] + counts[i]) of slots[i], as allocators give them out for a batch. Of two
  // that write one position either may be left. INVALID_ARGUMENT also where the lists differ in
  // length or the counts do not add up to that of token_slots.
  absl::Status WriteBatch(std::span<const int64_t> slots, std::span<const int64_t> firsts,
                          std::span<const int64_t> counts, std::span<const int32_t> token_slots);

  int64_t num_requests() const { return static_cast<int64_t>(allocated_.size()); }
  int64_t max_context_tokens() const { return max_context_tokens_; }
  const PoolMemory& memory() const { return *memory_; }
  // The whole table, row after row, where memory() has it; it lives as long as table_memory() has
  // an owner.
  std::span<int32_t> table() const;
  std::shared_ptr<std::byte> table_memory() const { return table_; }
  // A row, likewise; `slot` must be in range.
  std::span<const int32_t> row(int64_t slot) const;

  static constexpr int64_t kMaxRequests = 1 << 24;
  static constexpr int64_t kMaxContextTokens = 1 << 28;

 private:
  ReqToTokenPool(int64_t num_requests, int64_t max_context_tokens,
                 std::shared_ptr<const PoolMemory> memory, std::shared_ptr<std::byte> table);

  bool IsAllocated(int64_t slot) const;
  absl::Status NotAllocated(int64_t slot) const;
  absl::Status CheckWrite(int64_t slot, int64_t first, int64_t count) const;
  absl::Status WriteOnDevice(std::span<const int64_t> slots, std::span<const int64_t> firsts,
                             std::span<const int64_t> counts, std::span<const int32_t> token_slots);
  int64_t Entry(int64_t slot, int64_t position) const {
    return slot * max_context_tokens_ + position;
  }

  int64_t max_context_tokens_;
  std::shared_ptr<const PoolMemory> memory_;
  std::shared_ptr<std::byte> table_;
  std::vector<int64_t> free_;  // The last one is handed out next.
  std::vector<bool> allocated_;
};

}  // namespace kvferry
