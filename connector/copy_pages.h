#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "pool/page_allocator.h"
#include "pool/page_runs.h"

namespace kvferry {

// The last pages of a pool, handed out to whoever waits for them, first come first served.
// Thread-safe.
class CopyPages {
 public:
  // Of num_pages pages the last `copy_pages`, which may be 0. INVALID_ARGUMENT for a negative count
  // or more than there are.
  static absl::StatusOr<std::unique_ptr<CopyPages>> Create(int64_t num_pages, int64_t copy_pages);

  // RESOURCE_EXHAUSTED at once for more than there are in all, DEADLINE_EXCEEDED when so many did
  // not get free in time, CANCELLED after Close().
  absl::StatusOr<PageRuns> Allocate(int64_t count, Deadline deadline);
  // What came from here, each once. Needs no memory.
  void Free(const PageRuns& pages);
  // Whoever waits is CANCELLED, and later calls too.
  void Close();

 private:
  CopyPages(std::optional<PageAllocator> pages, int64_t total)
      : total_(total), pages_(std::move(pages)) {}

  absl::Status WaitForTurn(int64_t count, Deadline deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t total_;
  Mutex mutex_;
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<PageAllocator> pages_ ABSL_GUARDED_BY(mutex_);
  std::list<int64_t> waiting_ ABSL_GUARDED_BY(mutex_);  // The first one is served first.
};

}  // namespace kvferry
