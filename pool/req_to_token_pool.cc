#include "pool/req_to_token_pool.h"

#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/slab.h"
#include "base/status.h"

namespace kvferry {
namespace {

absl::Status CheckSize(const char* name, int64_t value, int64_t max) {
  if (value >= 1 && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("request pool: ", name, " is ", value, " but must lie in [1, ", max, "]"));
}

}  // namespace

absl::StatusOr<ReqToTokenPool> ReqToTokenPool::Create(int64_t num_requests,
                                                      int64_t max_context_tokens) {
  KVFERRY_RETURN_IF_ERROR(CheckSize("num_requests", num_requests, kMaxRequests));
  KVFERRY_RETURN_IF_ERROR(CheckSize("max_context_tokens", max_context_tokens, kMaxContextTokens));
  const auto entry_bytes = static_cast<int64_t>(sizeof(int32_t));
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory,
                           MapSlab(num_requests * max_context_tokens * entry_bytes));
  return ReqToTokenPool(num_requests, max_context_tokens, std::move(memory));
}

ReqToTokenPool::ReqToTokenPool(int64_t num_requests, int64_t max_context_tokens,
                               std::shared_ptr<std::byte> memory)
    : max_context_tokens_(max_context_tokens),
      memory_(std::move(memory)),
      allocated_(static_cast<size_t>(num_requests)) {
  Clear();
}

void ReqToTokenPool::Clear() {
  free_.resize(allocated_.size());
  std::iota(free_.rbegin(), free_.rend(), 0);  // Low slots first.
  allocated_.assign(allocated_.size(), false);
}

absl::StatusOr<std::vector<int64_t>> ReqToTokenPool::Allocate(int64_t count) {
  if (count < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("request pool: count is ", count, " but must be at least 1"));
  }
  if (count > num_free()) {
    return absl::ResourceExhaustedError(absl::StrCat("request pool: ", count, " slots asked, ",
                                                     num_free(), " of ", num_requests(), " free"));
  }
  std::vector<int64_t> slots(free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - count);
  for (const int64_t slot : slots) allocated_[slot] = true;
  return slots;
}

absl::Status ReqToTokenPool::CheckAllocated(int64_t slot) const {
  if (slot < 0 || slot >= num_requests()) {
    return absl::InvalidArgumentError(
        absl::StrCat("request pool: slot ", slot, " is outside [0, ", num_requests(), ")"));
  }
  if (!allocated_[slot]) {
    return absl::InvalidArgumentError(
        absl::StrCat("request pool: slot ", slot, " is not allocated"));
  }
  return absl::OkStatus();
}

absl::Status ReqToTokenPool::Free(std::span<const int64_t> slots) {
  for (size_t i = 0; i < slots.size(); ++i) {
    absl::Status status = CheckAllocated(slots[i]);
    if (!status.ok()) {  // Also of one that this list freed already.
      for (size_t undo = 0; undo < i; ++undo) allocated_[slots[undo]] = true;
      return status;
    }
    allocated_[slots[i]] = false;
  }
  free_.insert(free_.end(), slots.rbegin(), slots.rend());
  return absl::OkStatus();
}

absl::Status ReqToTokenPool::Write(int64_t slot, int64_t first,
                                   std::span<const int32_t> token_slots) {
  KVFERRY_RETURN_IF_ERROR(CheckAllocated(slot));
  const auto count = static_cast<int64_t>(token_slots.size());
  if (first < 0 || first > max_context_tokens_ || count > max_context_tokens_ - first) {
    return absl::OutOfRangeError(
        absl::StrCat("request pool: positions ", first, " + ", count,
                     " are outside [0, max_context_tokens = ", max_context_tokens_, ")"));
  }
  if (count > 0) {
    std::memcpy(table().data() + slot * max_context_tokens_ + first, token_slots.data(),
                token_slots.size_bytes());
  }
  return absl::OkStatus();
}

std::span<int32_t> ReqToTokenPool::table() const {
  return {reinterpret_cast<int32_t*>(memory_.get()),
          static_cast<size_t>(num_requests() * max_context_tokens_)};
}

std::span<const int32_t> ReqToTokenPool::row(int64_t slot) const {
  return table().subspan(slot * max_context_tokens_, max_context_tokens_);
}

}  // namespace kvferry
