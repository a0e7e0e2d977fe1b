#include "pool/head_slice.h"

#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {
namespace {

// In a page each head's values lie together. Engines' own arrangements say so by the end of their name.
bool HeadsLieApart(const KvLayout& layout) {
  return layout.page_size == 1 || absl::EndsWith(layout.page_format, "HND");
}

absl::Status CheckSlice(const KvLayout& layout, HeadRange heads) {
  const int64_t num_heads = layout.num_heads();
  if (num_heads == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "some of the heads of pages whose tensors differ in heads: ", layout.ToString()));
  }
  if (heads.first < 0 || heads.count < 1 || heads.first >= num_heads ||
      heads.count > num_heads - heads.first) {
    return absl::InvalidArgumentError(absl::StrCat("heads [", heads.first, ", ", heads.first, " + ",
                                                   heads.count, ") of pages of ", num_heads));
  }
  if (!HeadsLieApart(layout) && layout.page_format != "NHD") {
    return absl::InvalidArgumentError(
        absl::StrCat("some of the heads of pages whose page_format, ", layout.page_format,
                     ", does not say where heads lie: it is neither NHD nor ends with HND"));
  }
  return absl::OkStatus();
}

}  // namespace

bool AreAllHeads(const KvLayout& layout, HeadRange heads) {
  return heads.count == 0 || heads == HeadRange{0, layout.num_heads()};
}

absl::StatusOr<HeadSlice> SliceHeads(const std::shared_ptr<const KvPool>& pool,
                                     const PageRuns& pages, HeadRange heads) {
  const KvLayout& layout = pool->layout();
  if (AreAllHeads(layout, heads)) return HeadSlice{pool, pages};
  KVFERRY_RETURN_IF_ERROR(CheckSlice(layout, heads));
  // As many heads an item as all borders are multiples of.
  const int64_t item_heads = std::gcd(std::gcd(heads.first, heads.count), layout.num_heads());
  const int64_t rows = HeadsLieApart(layout) ? 1 : layout.page_size;  // Of all heads, in a page.
  const int64_t row_items = layout.num_heads() / item_heads;
  if (pages.num_pages() > PageRuns::kMaxPages / rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("some of the heads of ", pages.num_pages(), " pages of ", layout.page_size,
                     " tokens: more rows than a list holds, ", PageRuns::kMaxPages));
  }
  std::vector<PageRun> items;
  items.reserve(pages.num_pages() * rows);
  for (const PageRun& run : pages.runs()) {
    for (int64_t row = run.first * rows; row < (run.first + run.count) * rows; ++row) {
      items.push_back({row * row_items + heads.first / item_heads, heads.count / item_heads});
    }
  }
  HeadSlice slice;
  slice.pool = KvPool::InSmallerPages(pool, layout.page_size / rows, item_heads);
  KVFERRY_ASSIGN_OR_RETURN(slice.items, PageRuns::FromRuns(items));
  slice.items_a_page = rows * heads.count / item_heads;
  return slice;
}

}  // namespace kvferry
