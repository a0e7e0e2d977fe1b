#pragma once

// Some of the heads that pages hold: what a tensor-parallel rank needs of another one's pages, where
// the two sides of a transfer have different numbers of ranks.

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
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

// The memory of a pool seen as smaller pages, and those of them that hold what was asked for.
struct HeadSlice {
  std::shared_ptr<const KvPool> pool;
  PageRuns items;
  int64_t items_a_page = 1;  // Items that one page has become, next to each other in `items`.
};

// `heads` of `pages`, page by page in the order in which values lie in a page of so many heads: HND, head by
// head, one item or more a page; NHD, token by token, one item or more a token. Two slices of as many
// heads are thus the same row of bytes, whatever pages they are cut out of. O(runs), where a page has
// become a run, and with NHD a token.
//
// INVALID_ARGUMENT, naming both, when the pool does not hold these heads, its tensors differ in heads,
// its page_format does not say where heads lie, or there are more items than a list holds; pages outside the
// pool are not looked for.
absl::StatusOr<HeadSlice> SliceHeads(const std::shared_ptr<const KvPool>& pool,
                                     const PageRuns& pages, HeadRange heads);

}  // namespace kvferry
