#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/free_runs.h"
#include "pool/page_runs.h"

namespace kvferry {

// Hands out the page ids [reserved, num_pages) in as few runs as it can, and keeps it that way
// while sequences come, grow page by page and go. A run taken or given back costs the same whatever
// the size of the pool and the number of free runs, but for a bit a page. FreeRuns says what
// memory it takes. Moved, not copied. Not thread-safe.
//
// A request goes into about the tightest free run that also leaves room to grow behind it; those
// are long enough for a request are left to requests: a sequence that outgrows its room goes on
// in a shorter one. bench/micro_bench.cc (BM_Fragmentation) measures what that is worth.
class PageAllocator {
 public:
  // Pages [0, reserved) are never handed out (engines keep page 0 as padding). INVALID_ARGUMENT
  // unless 0 <= reserved < num_pages <= PageRuns::kMaxPages, RESOURCE_EXHAUSTED when the system
  // refuses the memory.
  static absl::StatusOr<PageAllocator> Create(int64_t num_pages, int64_t reserved);

  // RESOURCE_EXHAUSTED when fewer than `count` pages are free, INVALID_ARGUMENT when count < 1;
  // nothing changes then, nor where the list of runs finds no memory (std::bad_alloc).
  absl::StatusOr<PageRuns> Allocate(int64_t count);
  // The error that Allocate(count) would have now.
  absl::Status CheckCount(int64_t count) const;
  // `count` more pages for a sequence whose last page is `last_page`: those right behind it as far
  // as they are free. Errors as for Allocate, and INVALID_ARGUMENT when last_page is not allocated.
  absl::StatusOr<PageRuns> Extend(int64_t last_page, int64_t count);
  // Allocate(count), Extend(last_page, count) and Extend(last_page, 1) for a caller that has made
  // sure, for a whole batch, that they cannot fail. They need no memory: taken(run), which must not
  // throw, is called for each run in turn.
  void AllocateRuns(int64_t count, absl::FunctionRef<void(PageRun)> taken);
  void ExtendRuns(int64_t last_page, int64_t count, absl::FunctionRef<void(PageRun)> taken);
  int64_t ExtendByOne(int64_t last_page);
  // INVALID_ARGUMENT naming the page when one was not allocated (or twice in the list); nothing
  // changes then.
  absl::Status Free(const PageRuns& pages);
  // Frees those of these that are pages, passing over numbers below `reserved`, for a caller that
  // knows them to be allocated, each once. Cannot fail, and needs no memory.
  void FreeEach(std::span<const int32_t> pages);
  // The same of a list that is all pages.
  void FreeEachRun(const PageRuns& pages);
  // Every page but the reserved ones is free again.
  void Clear();

  // Of a page in [0, num_pages).
  bool IsFree(int64_t page) const { return free_.IsFree(page); }
  // Bit page % 64 of word page / 64 says the same; they stay where they are.
  const uint64_t* free_bits() const { return free_.bits(); }
  // False also for a page that is reserved or does not exist.
  bool IsAllocated(int64_t page) const {
    return page >= reserved_ && page < num_pages_ && !free_.IsFree(page);
  }
  // The first page of `run` that is not, or the one behind it when all are.
  int64_t FirstNotAllocated(PageRun run) const;

  int64_t num_pages() const { return num_pages_; }
  int64_t num_free() const { return free_.num_free(); }
  int64_t num_free_runs() const { return free_.num_runs(); }
  // These two look at free runs: at about those as long as the longest, and at all.
  int64_t longest_free_run() const { return free_.longest(); }
  // Element i counts the free runs of [2^i, 2^(i + 1)) pages; the last one is not 0.
  std::vector<int64_t> free_run_histogram() const { return free_.Histogram(); }

 private:
  PageAllocator(FreeRuns free, int64_t num_pages, int64_t reserved);

  template <typename Runs>
  absl::Status CheckAllocated(const Runs& sorted) const;
  template <typename Runs>
  absl::Status FreeSorted(const Runs& sorted);
  PageRun TakeForRequest(int64_t count);
  PageRun TakeForGrowth(int64_t count);
  // What lies behind it, else for growth.
  PageRun TakeBehind(int64_t last_page, int64_t count);
  void NoteRequest(int64_t count);
  template <typename Take>
  absl::StatusOr<PageRuns> List(PageRun first, int64_t count, Take take);

  FreeRuns free_;
  int64_t num_pages_;
  int64_t reserved_;
  int64_t request_pages_ = 0;  // The largest of late: what a free run should be good for.
};

}  // namespace kvferry
