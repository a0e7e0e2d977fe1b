#include "pool/page_copy.h"

#include <algorithm>
#include <cstring>

#include "pool/bulk_copy.h"

namespace kvferry {
namespace {

// Calls copy(address, packed_offset, bytes, soon) for each contiguous piece of the window; `soon` is
// where the run after the next one begins, or null.
template <typename Copy>
void ForEachPiece(const BufferInfo& buffer, const PageRuns& runs, int64_t offset, int64_t bytes,
                  const Copy& copy) {
  if (bytes == 0) return;
  size_t index = runs.RunAt(offset / buffer.item_bytes);
  for (int64_t done = 0; done < bytes; ++index) {
    const int64_t into_run = offset + done - runs.RunBegin(index) * buffer.item_bytes;
    const int64_t run_end = runs.RunEnd(index) * buffer.item_bytes;
    const int64_t piece = std::min(bytes - done, run_end - (offset + done));
    const auto address_of = [&](size_t run) {
      return buffer.address + runs.Run(run).first * buffer.item_bytes;
    };
    std::byte* const soon = index + 2 < runs.num_runs() ? address_of(index + 2) : nullptr;
    copy(address_of(index) + into_run, done, piece, soon);
    done += piece;
  }
}

}  // namespace

void GatherPages(const BufferInfo& buffer, const PageRuns& runs, int64_t offset,
                 std::span<std::byte> packed) {
  ForEachPiece(buffer, runs, offset, static_cast<int64_t>(packed.size()),
               [&](const std::byte* page, int64_t at, int64_t bytes, const std::byte* soon) {
                 if (soon != nullptr) PrefetchStart(soon, buffer.item_bytes);
                 std::memcpy(packed.data() + at, page, bytes);
               });
}

void ScatterPages(const BufferInfo& buffer, const PageRuns& runs, int64_t offset,
                  std::span<const std::byte> packed) {
  ForEachPiece(buffer, runs, offset, static_cast<int64_t>(packed.size()),
               [&](std::byte* page, int64_t at, int64_t bytes, const std::byte*) {
                 BulkCopy(page, packed.data() + at, bytes);
               });
  FinishBulkCopies();
}

void AppendPagePieces(const BufferInfo& buffer, const PageRuns& runs, int64_t offset, int64_t bytes,
                      std::vector<std::span<std::byte>>* pieces) {
  ForEachPiece(buffer, runs, offset, bytes, [&](std::byte* page, int64_t, int64_t piece, auto*) {
    pieces->emplace_back(page, piece);
  });
}

}  // namespace kvferry
