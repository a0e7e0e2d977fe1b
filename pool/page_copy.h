#pragma once

// Gather and scatter on the CPU: between the pages of one buffer and packed bytes.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pool/kv_pool.h"
#include "pool/page_runs.h"

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

}  // namespace kvferry
