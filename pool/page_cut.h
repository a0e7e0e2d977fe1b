#pragma once

// Pages as another side of a transfer has them: some of the heads, another number of tokens a page,
// or the values in the other order, where the two sides have other numbers of tensor-parallel ranks
// or other attention kernels.

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "pool/kv_layout.h"
#include "pool/kv_pool.h"
#include "pool/page_runs.h"

namespace kvferry {

// Heads [first, first + count). A count of 0 stands for all there are.
struct HeadRange {
  int64_t first = 0;
  int64_t count = 0;

  bool operator==(const HeadRange&) const = default;
};

// Whether that is all that pages of a layout hold: then there is nothing to cut out of them.
bool AreAllHeads(const KvLayout& layout, HeadRange heads);

// How the values of a page lie: token by token, or head by head. Of others nothing is known.
enum class ValueOrder : uint8_t { kOther, kNhd, kHnd };

// Pages as somebody counts in them.
struct PageForm {
  int64_t page_size = 0;                  // Tokens; 0: as many as the pool's own have.
  ValueOrder order = ValueOrder::kOther;  // kOther: as in the pool's own, whatever that is.

  bool operator==(const PageForm&) const = default;
};

// What a page_format says: "NHD", "HND" and, of pages of one head, "ND", which is the same as
// either then. An arrangement of an engine's own is kOther, whatever its name ends with.
ValueOrder OrderOf(const KvLayout& layout);
// INVALID_ARGUMENT where that is kOther, and what follows from it: `so`, in words.
absl::Status CheckOrderIsKnown(const KvLayout& layout, absl::string_view so);
// What fits into pages of that layout. Of an arrangement of an engine's own PageForm(): it fits
// into pages that are arranged alike, and nobody else could make it.
PageForm FormOf(const KvLayout& layout);
// OK when CutPages() can make pages of the one form out of those of the other, if they are alike in
// all else. INVALID_ARGUMENT says why not.
absl::Status CheckConvertible(const KvLayout& one, const KvLayout& other);
// How many pages of that form `num_pages` of the layout's are; the last one may reach behind their
// end.
int64_t PagesIn(int64_t num_pages, const KvLayout& layout, const PageForm& form);

// The memory of a pool seen as smaller pages, and those of them that hold what was asked for.
struct PageCut {
  std::shared_ptr<const KvPool> pool;
  PageRuns items;
  int64_t items_a_page =
      1;  // Items that one page asked for has become, next to each other in `items`.
};

// `heads` of what lies in `pages`, in pages of `form`: those at `positions`, which count in such
// pages from the first token of `pages` on. Of each in order what a page of so many tokens and
// heads holds, in the order that `form` says. Two cuts of the same form and as many heads are thus
// the same row of bytes, whatever pages they are cut out of. Where a page reaches behind the end of
// `pages` it has their last tokens again: somebody else's memory is none of its business.
//
// The items are as long as what lies together on both sides. With heads token by token on both
// sides (NHD) that is as many tokens as both page sizes are multiples of, or, of some heads, as
// many heads of a token as all borders are multiples of; head by head (HND) as many heads of a
// page, or, with other page sizes, so many tokens of a head; with orders that differ a head of a
// token. O(items) time, and memory O(runs) of them.
//
// OUT_OF_RANGE, naming both, for positions that are not within `pages`. INVALID_ARGUMENT, naming
// both, when the pool does not hold these heads, its tensors differ in heads and the cut goes
// through them, its page_format does not say where heads or values lie, the page asked for has more
// tokens than the pool, or there are more items than a list holds. Pages outside the pool are not
// looked for.
absl::StatusOr<PageCut> CutPages(const std::shared_ptr<const KvPool>& pool, const PageRuns& pages,
                                 const PageRuns& positions, const PageForm& form, HeadRange heads);
// All of `pages`, in the pool's own form.
absl::StatusOr<PageCut> CutPages(const std::shared_ptr<const KvPool>& pool, const PageRuns& pages,
                                 HeadRange heads);

}  // namespace kvferry
