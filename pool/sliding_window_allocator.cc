#include "pool/sliding_window_allocator.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"

namespace kvferry {
namespace {

// Pages that a batch needs beyond those it has; 0 when the lengths make no sense, which Extend()
// will say.
int64_t NewPages(std::span<const int64_t> prefix_tokens, std::span<const int64_t> tokens,
                 const TokenSlotAllocator& pool) {
  int64_t pages = 0;
  for (size_t i = 0; i < tokens.size() && i < prefix_tokens.size(); ++i) {
    if (prefix_tokens[i] < 0 || tokens[i] < prefix_tokens[i]) return 0;
    if (tokens[i] > int64_t{INT32_MAX}) return 0;
    pages += pool.NewPages(prefix_tokens[i], tokens[i]);
  }
  return pages;
}

// An error says of which of the two sizes it speaks.
absl::StatusOr<TokenSlotAllocator> CreateSlots(absl::string_view which, int64_t num_tokens,
                                               int64_t page_size) {
  absl::StatusOr<TokenSlotAllocator> slots = TokenSlotAllocator::Create(num_tokens, page_size);
  if (slots.ok()) return slots;
  return absl::Status(slots.status().code(), absl::StrCat("sliding window: of the ", which, ": ",
                                                          slots.status().message()));
}

}  // namespace

absl::StatusOr<SlidingWindowAllocator> SlidingWindowAllocator::Create(int64_t num_full_tokens,
                                                                      int64_t num_window_tokens,
                                                                      int64_t page_size) {
  KVFERRY_ASSIGN_OR_RETURN(TokenSlotAllocator full,
                           CreateSlots("full slots", num_full_tokens, page_size));
  KVFERRY_ASSIGN_OR_RETURN(TokenSlotAllocator window,
                           CreateSlots("window slots", num_window_tokens, page_size));
  return SlidingWindowAllocator(std::move(full), std::move(window));
}

SlidingWindowAllocator::SlidingWindowAllocator(TokenSlotAllocator full, TokenSlotAllocator window)
    : full_(std::move(full)), window_(std::move(window)) {
  window_pages_.resize(static_cast<size_t>(full_.num_free() / full_.page_size() + 1), 0);
}

absl::Status SlidingWindowAllocator::CheckSlots(std::span<const int32_t> slots) const {
  const int64_t num_slots = static_cast<int64_t>(window_pages_.size()) * page_size();
  for (const int32_t slot : slots) {
    if (slot >= 0 && slot < num_slots) continue;
    return absl::OutOfRangeError(
        absl::StrCat("sliding window: slot ", slot, " is not in [0, ", num_slots, ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> SlidingWindowAllocator::ToWindow(
    std::span<const int32_t> slots) const {
  KVFERRY_RETURN_IF_ERROR(CheckSlots(slots));
  std::vector<int32_t> window(slots.size());
  std::transform(slots.begin(), slots.end(), window.begin(),
                 [this](int32_t slot) { return WindowSlot(slot); });
  return window;
}

void SlidingWindowAllocator::Map(std::span<const int32_t> full_slots,
                                 std::span<const int32_t> window_slots) {
  const auto page_size = static_cast<int32_t>(this->page_size());
  for (size_t i = 0; i < full_slots.size(); ++i) {
    window_pages_[full_slots[i] / page_size] = window_slots[i] / page_size;
  }
}

// ---------------------------------------------------------------- taking

absl::Status SlidingWindowAllocator::CheckRoom(int64_t num_tokens) const {
  KVFERRY_RETURN_IF_ERROR(window_.CheckRoom(num_tokens));
  return full_.CheckRoom(num_tokens);
}

absl::Status SlidingWindowAllocator::AllocateInto(std::span<int32_t> slots) {
  const auto num_tokens = static_cast<int64_t>(slots.size());
  KVFERRY_RETURN_IF_ERROR(CheckRoom(num_tokens));
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<int32_t> window, window_.Allocate(num_tokens));
  KVFERRY_RETURN_IF_ERROR(full_.AllocateInto(slots));  // OK: there is room, it needs no memory.
  Map(slots, window);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> SlidingWindowAllocator::Allocate(int64_t num_tokens) {
  KVFERRY_RETURN_IF_ERROR(CheckRoom(num_tokens));
  std::vector<int32_t> slots(num_tokens);
  KVFERRY_RETURN_IF_ERROR(AllocateInto(slots));
  return slots;
}

absl::StatusOr<std::vector<int32_t>> SlidingWindowAllocator::LastWindowSlots(
    std::span<const int64_t> prefix_tokens, std::span<const int32_t> last_slots) const {
  std::vector<int32_t> window(last_slots.size(), 0);
  for (size_t i = 0; i < last_slots.size() && i < prefix_tokens.size(); ++i) {
    if (prefix_tokens[i] <= 0) continue;  // Nothing to grow from.
    KVFERRY_RETURN_IF_ERROR(CheckSlots(last_slots.subspan(i, 1)));
    window[i] = WindowSlot(last_slots[i]);
    if (window[i] == 0 && last_slots[i] >= page_size() &&
        full_.pages().IsAllocated(last_slots[i] / page_size())) {
      return absl::FailedPreconditionError(absl::StrCat("sliding window: sequence ", i,
                                                        ": its last token, at slot ", last_slots[i],
                                                        ", has left the window"));
    }
  }
  return window;
}

void SlidingWindowAllocator::FreeNewPages(std::span<const int32_t> slots,
                                          TokenSlotAllocator* pool) const {
  const auto page_size = static_cast<int32_t>(this->page_size());
  for (const int32_t slot : slots) {
    if (slot % page_size != 0) continue;  // A page that is new begins among them.
    const int32_t page = slot / page_size;
    pool->FreeEachPage({&page, 1});
  }
}

template <typename GrowIn>
absl::StatusOr<std::vector<int32_t>> SlidingWindowAllocator::Grow(
    std::span<const int64_t> prefix_tokens, std::span<const int64_t> tokens,
    std::span<const int32_t> last_slots, const GrowIn& grow_in) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<int32_t> last_window,
                           LastWindowSlots(prefix_tokens, last_slots));
  // Said here, as the window pool itself would not say whose pages are missing.
  const int64_t pages = NewPages(prefix_tokens, tokens, window_);
  if (pages * page_size() > window_.num_free()) {
    // Unless there is something wrong with the batch.
    KVFERRY_RETURN_IF_ERROR(full_.CheckExtend(prefix_tokens, tokens, last_slots));
    return absl::ResourceExhaustedError(absl::StrCat("sliding window: ", pages,
                                                     " pages needed but the window pool has ",
                                                     window_.num_free() / page_size()));
  }
  KVFERRY_ASSIGN_OR_RETURN(std::vector<int32_t> full, grow_in(full_, last_slots));
  // The window pool does not refuse, but its list may find no memory.
  absl::Cleanup give_back = [&] { FreeNewPages(full, &full_); };
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<int32_t> window, grow_in(window_, last_window));
  std::move(give_back).Cancel();
  Map(full, window);
  return full;
}

absl::StatusOr<std::vector<int32_t>> SlidingWindowAllocator::Extend(
    std::span<const int64_t> prefix_tokens, std::span<const int64_t> tokens,
    std::span<const int32_t> last_slots) {
  return Grow(prefix_tokens, tokens, last_slots,
              [&](TokenSlotAllocator& pool, std::span<const int32_t> last) {
                return pool.Extend(prefix_tokens, tokens, last);
              });
}

absl::StatusOr<std::vector<int32_t>> SlidingWindowAllocator::Decode(
    std::span<const int64_t> tokens, std::span<const int32_t> last_slots) {
  std::vector<int64_t> prefix_tokens(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 1) {
      return absl::InvalidArgumentError(absl::StrCat("sliding window: sequence ", i, " has ",
                                                     tokens[i],
                                                     " tokens but must have one at least"));
    }
    prefix_tokens[i] = tokens[i] - 1;
  }
  return Grow(prefix_tokens, tokens, last_slots,
              [&](TokenSlotAllocator& pool, std::span<const int32_t> last) {
                return pool.Decode(tokens, last);
              });
}

// ---------------------------------------------------------------- giving back

void SlidingWindowAllocator::FreeWindowPages(PageRun full_pages) {
  const auto mapped = std::span(window_pages_).subspan(full_pages.first, full_pages.count);
  window_.FreeEachPage(mapped);  // Every mapped page is allocated, once.
  std::fill(mapped.begin(), mapped.end(), 0);
}

absl::Status SlidingWindowAllocator::Free(std::span<const int32_t> slots) {
  KVFERRY_ASSIGN_OR_RETURN(const TokenSlotAllocator::Runs pages, full_.RunsOf(slots));
  KVFERRY_RETURN_IF_ERROR(full_.FreePages(pages));
  if (full_.in_free_group()) return absl::OkStatus();
  for (const PageRun& run : pages) FreeWindowPages(run);
  return absl::OkStatus();
}

void SlidingWindowAllocator::EndFreeGroup() {
  full_.ForEachNoted([this](PageRun run) { FreeWindowPages(run); });
  full_.EndFreeGroup();
}

absl::Status SlidingWindowAllocator::FreeWindow(std::span<const int32_t> slots) {
  KVFERRY_RETURN_IF_ERROR(CheckSlots(slots));
  for (const int32_t slot : slots) {
    if (full_.pages().IsAllocated(slot / page_size())) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("sliding window: slot ", slot, " is not allocated"));
  }
  std::vector<int32_t> sorted(slots.begin(), slots.end());
  if (!std::is_sorted(sorted.begin(), sorted.end())) std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  for (size_t first = 0, end = 0; first < sorted.size(); first = end) {
    const int64_t page = sorted[first] / page_size();
    while (end < sorted.size() && sorted[end] < (page + 1) * page_size()) ++end;
    if (static_cast<int64_t>(end - first) == page_size()) FreeWindowPages({page, 1});
  }
  return absl::OkStatus();
}

void SlidingWindowAllocator::Clear() {
  full_.Clear();
  window_.Clear();
  std::fill(window_pages_.begin(), window_pages_.end(), 0);
}

}  // namespace kvferry
