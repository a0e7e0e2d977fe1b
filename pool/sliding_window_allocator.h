#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/token_slot_allocator.h"

namespace kvferry {

// Token slots for a model that mixes full-attention with sliding-window layers. A token has a slot
// in the full pool for as long as it lives, and one in a smaller window pool for as long as it is
// inside the window: the first names the second, page by page. What SGLang calls
// SWATokenToKVPoolAllocator with its full_to_swa_index_mapping.
//
// Callers hold full slots; the kernels of windowed layers ask ToWindow(). Not thread-safe.
class SlidingWindowAllocator {
 public:
  // Errors as for TokenSlotAllocator::Create(), for either size.
  static absl::StatusOr<SlidingWindowAllocator> Create(int64_t num_full_tokens,
                                                       int64_t num_window_tokens,
                                                       int64_t page_size);

  int64_t page_size() const { return full_.page_size(); }
  // Tokens that can be allocated: what both pools have.
  int64_t num_free() const { return std::min(full_.num_free(), window_.num_free()); }
  const TokenSlotAllocator& full() const { return full_; }
  const TokenSlotAllocator& window() const { return window_; }

  // As the calls of TokenSlotAllocator with these names, in both pools at once: full slots, and
  // nothing changes in either when one of them refuses. Growing needs the last token of a sequence
  // inside the window still: FAILED_PRECONDITION naming the sequence when it is not.
  absl::StatusOr<std::vector<int32_t>> Allocate(int64_t num_tokens);
  absl::Status AllocateInto(std::span<int32_t> slots);  // Needs memory for the window's slots.
  absl::Status CheckRoom(int64_t num_tokens) const;
  absl::StatusOr<std::vector<int32_t>> Extend(std::span<const int64_t> prefix_tokens,
                                              std::span<const int64_t> tokens,
                                              std::span<const int32_t> last_slots);
  absl::StatusOr<std::vector<int32_t>> Decode(std::span<const int64_t> tokens,
                                              std::span<const int32_t> last_slots);
  // Both slots of the pages of these full slots, those that left the window included. Errors as for
  // TokenSlotAllocator::Free(); nothing changes then.
  absl::Status Free(std::span<const int32_t> slots);
  // These tokens left the window: pages of which every slot is listed lose their window slots.
  // Pages that lost theirs before are passed over. OUT_OF_RANGE naming a slot that does not exist,
  // INVALID_ARGUMENT naming one that is not allocated; nothing changes then.
  absl::Status FreeWindow(std::span<const int32_t> slots);
  // As TokenSlotAllocator's: what Free() accepts is only noted until the end, in both pools.
  // FreeWindow() frees at once in a group too.
  void BeginFreeGroup() { full_.BeginFreeGroup(); }
  void EndFreeGroup();

  // The window slots of full slots; 0, the padding slot, for tokens outside of the window.
  // OUT_OF_RANGE naming a slot that does not exist.
  absl::StatusOr<std::vector<int32_t>> ToWindow(std::span<const int32_t> slots) const;
  // Window page of each full page, 0 for none: [full pages]. What a kernel needs of the map.
  std::span<const int32_t> window_pages() const { return window_pages_; }

  void Clear();

 private:
  SlidingWindowAllocator(TokenSlotAllocator full, TokenSlotAllocator window);

  absl::Status CheckSlots(std::span<const int32_t> slots) const;
  // Of a slot that exists; 0 outside of the window.
  int32_t WindowSlot(int32_t slot) const {
    const auto page_size = static_cast<int32_t>(this->page_size());
    const int32_t page = window_pages_[slot / page_size];
    return page == 0 ? 0 : page * page_size + slot % page_size;
  }
  absl::StatusOr<std::vector<int32_t>> LastWindowSlots(std::span<const int64_t> prefix_tokens,
                                                       std::span<const int32_t> last_slots) const;
  // What grow_in(pool, last slots there) says of both pools.
  template <typename GrowIn>
  absl::StatusOr<std::vector<int32_t>> Grow(std::span<const int64_t> prefix_tokens,
                                            std::span<const int64_t> tokens,
                                            std::span<const int32_t> last_slots,
                                            const GrowIn& grow_in);
  // Pages that Allocate() or Extend() has just taken from `pool`, of which these are the slots.
  void FreeNewPages(std::span<const int32_t> slots, TokenSlotAllocator* pool) const;
  void Map(std::span<const int32_t> full_slots, std::span<const int32_t> window_slots);
  void FreeWindowPages(PageRun full_pages);

  TokenSlotAllocator full_;
  TokenSlotAllocator window_;
  std::vector<int32_t> window_pages_;
};

}  // namespace kvferry
