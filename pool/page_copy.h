#pragma once

// Gather and scatter on the CPU: between the pages of one buffer and packed bytes.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "pool/kv_pool.h"
#include "pool/page_runs.h"
#include "pool/token_copy.h"

namespace kvferry {

// Imagine the pages of `runs` laid end to end: runs.num_pages() * buffer.item_bytes bytes. Gather
// copies the window [offset, offset + packed.size()) of them into `packed`; Scatter copies `packed`
// into that window. One copy a run. The window and the pages must be inside the list and the
// buffer; the caller has checked both (PageRuns::CheckWithin). Thread-compatible.
void GatherPages(const BufferInfo& buffer, const PageRuns& runs, int64_t offset,
                 std::span<std::byte> packed);
void ScatterPages(const BufferInfo& buffer, const PageRuns& runs, int64_t offset,
                  std::span<const std::byte> packed);
// Appends where the window [offset, offset + bytes) lies: a piece a run.
void AppendPagePieces(const BufferInfo& buffer, const PageRuns& runs, int64_t offset, int64_t bytes,
                      std::vector<std::span<std::byte>>* pieces);

// The same of pages that the processor cannot touch, as copies for their PoolMemory: a piece that is
// long is a copy, short ones are copied together. The packed bytes lie on the host. The runs may go
// before this, the memory may not. Errors leave what was added before. Not thread-safe.
class PageCopies {
 public:
  absl::Status Gather(const BufferInfo& buffer, const PageRuns& runs, int64_t offset,
                      std::span<std::byte> packed);
  absl::Status Scatter(const BufferInfo& buffer, const PageRuns& runs, int64_t offset,
                       std::span<const std::byte> packed);

  std::span<const TokenCopy> copies() const { return copies_; }

 private:
  struct Window;

  absl::Status Add(const Window& window);
  absl::Status AddWholePages(const Window& window, int64_t first, int64_t end);
  absl::Status AddPiece(const Window& window, std::byte* page, int64_t at, int64_t bytes);

  std::vector<TokenCopy> copies_;
  std::vector<std::vector<int32_t>> lists_;  // Of pages; copies point to what they hold.
};

}  // namespace kvferry
