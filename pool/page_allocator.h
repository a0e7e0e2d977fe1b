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

// Hands out the page ids [reserved, num_pages) in as few runs as it can: the tightest free run that
// holds the whole request, else the longest ones. Free neighbours merge. O(log free runs) a run
// taken or given back. Not thread-safe.
class PageAllocator {
 public:
  // Pages [0, reserved) are never handed out (engines keep page 0 as padding). INVALID_ARGUMENT
  // unless 0 <= reserved < num_pages.
  static absl::StatusOr<PageAllocator> Create(int64_t num_pages, int64_t reserved);

  // RESOURCE_EXHAUSTED when fewer than `count` pages are free, INVALID_ARGUMENT when count < 1;
  // nothing changes then.
  absl::StatusOr<PageRuns> Allocate(int64_t count);
  // INVALID_ARGUMENT naming the page when one was not allocated (or twice in the list); nothing
  // changes then.
  absl::Status Free(const PageRuns& pages);

  int64_t num_free() const { return num_free_; }
  int64_t longest_free_run() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  int64_t num_free_runs() const { return static_cast<int64_t>(by_start_.size()); }

 private:
  PageAllocator(int64_t num_pages, int64_t reserved);

  absl::Status CheckAllocated(std::span<const PageRun> sorted) const;
  void InsertFree(PageRun run);
  void EraseFree(PageRun run);

  int64_t num_pages_;
  int64_t reserved_;
  int64_t num_free_ = 0;
  absl::btree_map<int64_t, int64_t> by_start_;            // First page -> pages, of each free run.
  absl::btree_set<std::pair<int64_t, int64_t>> by_size_;  // {pages, first page} of the same runs.
};

}  // namespace kvferry
