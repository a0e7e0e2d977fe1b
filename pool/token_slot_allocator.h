#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/page_allocator.h"

namespace kvferry {

// Hands out token slots of a paged KV cache: slot = page * page_size + place in the page. Page 0
// (slot 0 with pages of one token) is never handed out, because engines write the rows of padded
// tokens there. What SGLang and pymllm call TokenToKVPoolAllocator and PagedTokenToKVPoolAllocator.
//
// Whole pages are allocated and freed. Free pages merge and stay sorted at all times, so there is
// no list to merge or to sort on demand. Not thread-safe.
class TokenSlotAllocator {
 public:
  // num_tokens slots beside those of page 0. INVALID_ARGUMENT when page_size is below 1, num_tokens
  // is not a positive multiple of it, a slot would not fit an int32, or there would be more than
  // PageRuns::kMaxPages pages.
  static absl::StatusOr<TokenSlotAllocator> Create(int64_t num_tokens, int64_t page_size);

  int64_t page_size() const { return page_size_; }
  // Tokens that can be allocated; those of an open free group cannot yet.
  int64_t num_free() const { return pages_.num_free() * page_size_; }
  const PageAllocator& pages() const { return pages_; }

  // num_tokens slots in whole pages, page by page. INVALID_ARGUMENT unless num_tokens is a positive
  // multiple of page_size, RESOURCE_EXHAUSTED when fewer are free; nothing changes then.
  absl::StatusOr<std::vector<int32_t>> Allocate(int64_t num_tokens);
  // As many as `slots` has places for, written there, such as to a row of a ReqToTokenPool. Needs
  // no memory; the errors are those of Allocate().
  absl::Status AllocateInto(std::span<int32_t> slots);
  // The error that Allocate(num_tokens) would have now.
  absl::Status CheckRoom(int64_t num_tokens) const;

  // More tokens for a batch of sequences in one call. Sequence i has prefix_tokens[i] tokens, the
  // last of them at last_slots[i] (not looked at when there is none), and grows to tokens[i]. Its
  // last page is filled first, then come whole pages, right behind the last one if they are free.
  // Returns the new slots, sequence by sequence. No two sequences may share a page that is not
  // full.
  //
  // INVALID_ARGUMENT naming the sequence when lengths do not fit each other or last_slots[i] is not
  // an allocated slot at that place in a page; RESOURCE_EXHAUSTED naming both numbers when the
  // batch needs more pages than are free. Nothing changes then.
  absl::StatusOr<std::vector<int32_t>> Extend(std::span<const int64_t> prefix_tokens,
                                              std::span<const int64_t> tokens,
                                              std::span<const int32_t> last_slots);
  // The error that Extend() would have now.
  absl::Status CheckExtend(std::span<const int64_t> prefix_tokens, std::span<const int64_t> tokens,
                           std::span<const int32_t> last_slots) const;
  // Extend() by one token each: tokens[i] counts the new one.
  absl::StatusOr<std::vector<int32_t>> Decode(std::span<const int64_t> tokens,
                                              std::span<const int32_t> last_slots);

  // Frees the pages of these slots; several slots of a page count once. INVALID_ARGUMENT naming a
  // slot when one is out of range or its page is free, or, with pages of one token, stands twice in
  // the list; nothing changes then.
  absl::Status Free(std::span<const int32_t> slots);
  // From BeginFreeGroup() to EndFreeGroup() what Free() accepts is only noted, and freed at the
  // end, which needs no memory; slots of one page may then come in several calls. Groups do not
  // nest: a second Begin changes nothing, an End without one neither.
  void BeginFreeGroup() { in_group_ = true; }
  void EndFreeGroup();

  // The halves of Free(slots), for a caller that keeps something beside each page: which pages it
  // means, in ascending order, each once, with its errors; and those freed, or noted in a group.
  using Runs = absl::InlinedVector<PageRun, 8>;
  absl::StatusOr<Runs> RunsOf(std::span<const int32_t> slots) const;
  absl::Status FreePages(const Runs& runs);
  // Pages beyond those it has, for a sequence of `from` tokens that grows to `to`.
  int64_t NewPages(int64_t from, int64_t to) const;
  bool in_free_group() const { return in_group_; }
  // The pages that are noted, in ascending order; needs no memory.
  void ForEachNoted(absl::FunctionRef<void(PageRun)> see) const;
  // PageAllocator::FreeEach(); pages below 1 are passed over.
  void FreeEachPage(std::span<const int32_t> pages) { pages_.FreeEach(pages); }

  // Everything is free, and no group is open.
  void Clear();

 private:
  TokenSlotAllocator(PageAllocator pages, int64_t page_size);

  struct Growth {
    int64_t from = 0;  // Tokens.
    int64_t to = 0;
    int64_t last_slot = 0;
  };
  // "is not allocated", or where slots lie.
  std::string WhyNotAllocated(int64_t slot) const;
  absl::Status NotAllocated(int64_t slot) const;
  absl::Status CheckGrowth(int64_t sequence, const Growth& growth) const;
  absl::StatusOr<std::vector<Growth>> PlanExtend(std::span<const int64_t> prefix_tokens,
                                                 std::span<const int64_t> tokens,
                                                 std::span<const int32_t> last_slots) const;
  // Cannot fail after CheckGrowth(), with enough free pages and room in `slots`.
  void Grow(const Growth& growth, std::vector<int32_t>* slots);
  // Decode() of the usual batch: every sequence has tokens, all arguments are right, and pages hold
  // a power of two tokens. nullopt otherwise, and nothing changes: Extend() says what is wrong.
  std::optional<std::vector<int32_t>> DecodeUsual(std::span<const int64_t> tokens,
                                                  std::span<const int32_t> last_slots);
  int64_t PageOf(int64_t slot) const {
    return page_shift_ < 0 ? slot / page_size_ : slot >> page_shift_;
  }
  absl::Status AddRun(int64_t first, int64_t count, Runs* runs) const;
  bool IsNoted(int64_t page) const {
    return page < noted_end_ && (noted_[page / 64] >> (page % 64) & 1) != 0;
  }
  // The first page from `page` on that is noted, or is not; noted_end_ when there is none.
  int64_t NextNoted(int64_t page, bool noted) const;
  void Note(const Runs& runs);  // All, or none where there is no memory.
  void CloseGroup();

  PageAllocator pages_;
  int64_t page_size_;
  int page_shift_;  // page_size_ = 1 << page_shift_, or -1.
  bool in_group_ = false;
  // Pages of the open group, bit page % 64 of word page / 64, all of them in [first, end). Made for
  // the first page there is to note, so that the end of a group needs no memory.
  std::vector<uint64_t> noted_;
  int64_t noted_first_ = 0;
  int64_t noted_end_ = 0;
};

}  // namespace kvferry
