#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/page_runs.h"

namespace kvferry {

// Hands out the page ids [reserved, num_pages) in as few runs as it can, and keeps it that way
// while sequences come, grow page by page and go. O(log free runs) a run taken or given back,
// whatever the number of pages. Not thread-safe.
//
// A request goes into the tightest free run that also leaves room to grow behind it; free runs that
// are long enough for a request are left to requests: a sequence that outgrows its room goes on
// in a shorter one. bench/micro_bench.cc (BM_Fragmentation) measures what that is worth.
class PageAllocator {
 public:
  // Pages [0, reserved) are never handed out (engines keep page 0 as padding). INVALID_ARGUMENT
  // unless 0 <= reserved < num_pages.
  static absl::StatusOr<PageAllocator> Create(int64_t num_pages, int64_t reserved);

  // RESOURCE_EXHAUSTED when fewer than `count` pages are free, INVALID_ARGUMENT when count < 1;
  // nothing changes then.
  absl::StatusOr<PageRuns> Allocate(int64_t count);
  // `count` more pages for a sequence whose last page is `last_page`: those right behind it as far
  // as they are free. Errors as for Allocate, and INVALID_ARGUMENT when last_page is not allocated.
  absl::StatusOr<PageRuns> Extend(int64_t last_page, int64_t count);
  // INVALID_ARGUMENT naming the page when one was not allocated (or twice in the list); nothing
  // changes then.
  absl::Status Free(const PageRuns& pages);
  // Every page but the reserved ones is free again.
  void Clear();

  // False also for a page that is reserved or does not exist.
  bool IsAllocated(int64_t page) const;

  int64_t num_free() const { return num_free_; }
  int64_t longest_free_run() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  int64_t num_free_runs() const { return static_cast<int64_t>(by_start_.size()); }

 private:
  PageAllocator(int64_t num_pages, int64_t reserved);

  absl::Status CheckCount(int64_t count) const;
  absl::Status CheckAllocated(std::span<const PageRun> sorted) const;
  PageRun RunForRequest(int64_t count) const;
  PageRun RunForGrowth() const;
  // Takes the first `count` pages of `part`, or all of them, out of the free run that holds it.
  PageRun Take(PageRun part, int64_t count);
  void InsertFree(PageRun run);
  void EraseFree(PageRun run);

  int64_t num_pages_;
  int64_t reserved_;
  int64_t num_free_ = 0;
  int64_t request_pages_ = 0;  // The largest of late: what a free run should be good for.
  absl::btree_map<int64_t, int64_t> by_start_;            // First page -> pages, of each free run.
  absl::btree_set<std::pair<int64_t, int64_t>> by_size_;  // {pages, first page} of the same runs.
};

}  // namespace kvferry
