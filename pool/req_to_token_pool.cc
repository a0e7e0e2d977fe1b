#include "pool/req_to_token_pool.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check_range.h"
#include "base/status.h"
#include "pool/token_copy.h"
#include "pool/token_view.h"

namespace kvferry {
namespace {

constexpr auto kEntryBytes = static_cast<int64_t>(sizeof(int32_t));

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("request pool: ", parts...));
}

}  // namespace

absl::StatusOr<ReqToTokenPool> ReqToTokenPool::Create(
    int64_t num_requests, int64_t max_context_tokens,
    const std::shared_ptr<const PoolMemory>& memory) {
  const std::shared_ptr<const PoolMemory>& kind = memory == nullptr ? HostMemory() : memory;
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("request pool", "num_requests", num_requests, 1, kMaxRequests));
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("request pool", "max_context_tokens", max_context_tokens, 1, kMaxContextTokens));
  const int64_t entries = num_requests * max_context_tokens;
  // Devices are told where an entry goes by 32 bits (TokenCopy).
  if (!kind->on_host()) {
    KVFERRY_RETURN_IF_ERROR(CheckRange("request pool",
                                       "a device's table (num_requests x max_context_tokens)",
                                       entries, 1, INT32_MAX));
  }
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> table, kind->Allocate(entries * kEntryBytes));
  return ReqToTokenPool(num_requests, max_context_tokens, kind, std::move(table));
}

ReqToTokenPool::ReqToTokenPool(int64_t num_requests, int64_t max_context_tokens,
                               std::shared_ptr<const PoolMemory> memory,
                               std::shared_ptr<std::byte> table)
    : max_context_tokens_(max_context_tokens),
      memory_(std::move(memory)),
      table_(std::move(table)),
      allocated_(static_cast<size_t>(num_requests)) {
  Clear();
}

void ReqToTokenPool::Clear() {
  free_.resize(allocated_.size());
  std::iota(free_.rbegin(), free_.rend(), 0);  // Low slots first.
  allocated_.assign(allocated_.size(), false);
}

absl::StatusOr<std::vector<int64_t>> ReqToTokenPool::Allocate(int64_t count) {
  if (count < 1) return Invalid("count is ", count, " but must be at least 1");
  if (count > num_free()) {
    return absl::ResourceExhaustedError(absl::StrCat("request pool: ", count, " slots asked, ",
                                                     num_free(), " of ", num_requests(), " free"));
  }
  std::vector<int64_t> slots(free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - count);
  for (const int64_t slot : slots) allocated_[slot] = true;
  return slots;
}

bool ReqToTokenPool::IsAllocated(int64_t slot) const {
  return slot >= 0 && slot < num_requests() && allocated_[slot];
}

absl::Status ReqToTokenPool::NotAllocated(int64_t slot) const {
  if (slot < 0 || slot >= num_requests()) {
    return Invalid("slot ", slot, " is outside [0, ", num_requests(), ")");
  }
  return Invalid("slot ", slot, " is not allocated");
}

absl::Status ReqToTokenPool::Free(std::span<const int64_t> slots) {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!IsAllocated(slots[i])) {  // Also what this list freed already.
      for (size_t undo = 0; undo < i; ++undo) allocated_[slots[undo]] = true;
      return NotAllocated(slots[i]);
    }
    allocated_[slots[i]] = false;
  }
  free_.insert(free_.end(), slots.rbegin(), slots.rend());
  return absl::OkStatus();
}

absl::Status ReqToTokenPool::CheckWrite(int64_t slot, int64_t first, int64_t count) const {
  if (!IsAllocated(slot)) return NotAllocated(slot);
  if (first >= 0 && first <= max_context_tokens_ && count >= 0 &&
      count <= max_context_tokens_ - first) {
    return absl::OkStatus();
  }
  return absl::OutOfRangeError(
      absl::StrCat("request pool: positions ", first, " + ", count,
                   " are outside [0, max_context_tokens = ", max_context_tokens_, ")"));
}

absl::Status ReqToTokenPool::Write(int64_t slot, int64_t first,
                                   std::span<const int32_t> token_slots) {
  const auto count = static_cast<int64_t>(token_slots.size());
  return WriteBatch({&slot, 1}, {&first, 1}, {&count, 1}, token_slots);
}

absl::Status ReqToTokenPool::WriteBatch(std::span<const int64_t> slots,
                                        std::span<const int64_t> firsts,
                                        std::span<const int64_t> counts,
                                        std::span<const int32_t> token_slots) {
  if (firsts.size() != slots.size() || counts.size() != slots.size()) {
    return Invalid(slots.size(), " slots, ", firsts.size(), " firsts and ", counts.size(),
                   " counts, but there must be as many of each");
  }
  int64_t total = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    KVFERRY_RETURN_IF_ERROR(CheckWrite(slots[i], firsts[i], counts[i]));
    total += counts[i];
  }
  if (total != static_cast<int64_t>(token_slots.size())) {
    return Invalid("the counts add up to ", total, " but there are ", token_slots.size(),
                   " token slots");
  }
  if (!memory_->on_host()) return WriteOnDevice(slots, firsts, counts, token_slots);
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto values = token_slots.first(counts[i]);
    std::copy(values.begin(), values.end(), table().begin() + Entry(slots[i], firsts[i]));
    token_slots = token_slots.subspan(counts[i]);
  }
  return absl::OkStatus();
}

// Entry by entry, as rows of a copy.
absl::Status ReqToTokenPool::WriteOnDevice(std::span<const int64_t> slots,
                                           std::span<const int64_t> firsts,
                                           std::span<const int64_t> counts,
                                           std::span<const int32_t> token_slots) {
  std::vector<int32_t> places(token_slots.size());
  auto place = places.begin();
  for (size_t i = 0; i < slots.size(); ++i) {
    std::iota(place, place + counts[i], static_cast<int32_t>(Entry(slots[i], firsts[i])));
    place += counts[i];
  }
  const auto entries = [](const void* data, size_t count) {  // Those of `from` are only read.
    auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));
    return TokenView::Packed(bytes, DType::kUint8, static_cast<int64_t>(count), 1, kEntryBytes);
  };
  KVFERRY_ASSIGN_OR_RETURN(const TokenCopy copy,
                           TokenCopy::PlanScatter(entries(token_slots.data(), token_slots.size()),
                                                  entries(table_.get(), table().size()), places));
  return memory_->Run({&copy, 1}, nullptr);
}

std::span<int32_t> ReqToTokenPool::table() const {
  return {reinterpret_cast<int32_t*>(table_.get()),
          static_cast<size_t>(num_requests() * max_context_tokens_)};
}

std::span<const int32_t> ReqToTokenPool::row(int64_t slot) const {
  return table().subspan(slot * max_context_tokens_, max_context_tokens_);
}

}  // namespace kvferry
