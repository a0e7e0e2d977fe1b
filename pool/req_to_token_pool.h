#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvferry {

// Where each token of each running request lies: a table [num_requests, max_context_tokens] of
// int32 token slots, and the request slots (its rows) that are free. What SGLang and pymllm call
// ReqToTokenPool.
//
// A row keeps its old contents until it is written. Not thread-safe; engines drive it from their
// scheduler thread.
class ReqToTokenPool {
 public:
  // A zeroed table. INVALID_ARGUMENT for sizes below 1 or above the limits, RESOURCE_EXHAUSTED when
  // the machine will not give the memory.
  static absl::StatusOr<ReqToTokenPool> Create(int64_t num_requests, int64_t max_context_tokens);

  // `count` free request slots. RESOURCE_EXHAUSTED when fewer are free, INVALID_ARGUMENT when count
  // is below 1; nothing changes then.
  absl::StatusOr<std::vector<int64_t>> Allocate(int64_t count);
  // INVALID_ARGUMENT naming the slot when one is out of range, not allocated, or twice in the list;
  // nothing changes then.
  absl::Status Free(std::span<const int64_t> slots);
  // All request slots are free again.
  void Clear();
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }

  // Writes positions [first, first + token_slots.size()) of an allocated request slot's row.
  // INVALID_ARGUMENT when the slot is not allocated, OUT_OF_RANGE beyond max_context_tokens.
  absl::Status Write(int64_t slot, int64_t first, std::span<const int32_t> token_slots);

  int64_t num_requests() const { return static_cast<int64_t>(allocated_.size()); }
  int64_t max_context_tokens() const { return max_context_tokens_; }
  // The whole table, row after row; it lives as long as this memory has an owner.
  std::span<int32_t> table() const;
  std::shared_ptr<std::byte> memory() const { return memory_; }
  // A row; `slot` must be in range.
  std::span<const int32_t> row(int64_t slot) const;

  static constexpr int64_t kMaxRequests = 1 << 24;
  static constexpr int64_t kMaxContextTokens = 1 << 28;

 private:
  ReqToTokenPool(int64_t num_requests, int64_t max_context_tokens,
                 std::shared_ptr<std::byte> memory);

  absl::Status CheckAllocated(int64_t slot) const;

  int64_t max_context_tokens_;
  std::shared_ptr<std::byte> memory_;
  std::vector<int64_t> free_;  // The last one is handed out next.
  std::vector<bool> allocated_;
};

}  // namespace kvferry
