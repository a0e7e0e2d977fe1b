#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvferry {

// Adjacent pages first, first + 1, ..., first + count - 1.
struct PageRun {
  int64_t first = 0;
  int64_t count = 0;

  bool operator==(const PageRun&) const = default;
};

// A list of page ids in order, run-length coded. The position of a page is its index in the list.
// Immutable once made; thread-compatible; memory is 24 bytes a run, whatever the number of pages.
class PageRuns {
 public:
  PageRuns() = default;
  // One run, which must be valid: FromRuns() checks.
  explicit PageRuns(PageRun run) : runs_{run}, ends_{run.count} {}
  // Merges neighbours: {4, 5, 6, 9} becomes runs {4 x 3}, {9 x 1}. Order is kept, repeats are legal
  // here. INVALID_ARGUMENT on a page id outside [0, kMaxPages).
  static absl::StatusOr<PageRuns> FromPages(std::span<const int64_t> pages);
  // INVALID_ARGUMENT on a negative first, a count below 1, or more than kMaxPages in all.
  static absl::StatusOr<PageRuns> FromRuns(std::span<const PageRun> runs);

  int64_t num_pages() const { return ends_.empty() ? 0 : ends_.back(); }
  std::span<const PageRun> runs() const { return runs_; }
  // Index of the run that holds `position`, which must lie in [0, num_pages()).
  size_t RunAt(int64_t position) const;
  // Position after the last page of run `index`.
  int64_t RunEnd(size_t index) const { return ends_[index]; }
  // The page id at `position`.
  int64_t PageAt(int64_t position) const;
  // Pages at positions [first, first + count). OUT_OF_RANGE when that is not inside the list.
  absl::StatusOr<PageRuns> Slice(int64_t first, int64_t count) const;
  std::vector<int64_t> ToPages() const;
  // OUT_OF_RANGE naming the run when a page is not in [0, pool_pages).
  absl::Status CheckWithin(int64_t pool_pages) const;

  // Far beyond any pool, and small enough that sums and products with item sizes cannot overflow.
  static constexpr int64_t kMaxPages = int64_t{1} << 30;

 private:
  void Append(PageRun run);

  // Most lists that an allocator makes are of one run: no memory of their own then.
  absl::InlinedVector<PageRun, 1> runs_;
  absl::InlinedVector<int64_t, 1> ends_;  // ends_[i]: pages in runs_[0..i].
};

}  // namespace kvferry
