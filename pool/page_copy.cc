#include "pool/page_copy.h"

#include <algorithm>

#include "pool/bulk_copy.h"

namespace kvferry {
namespace {

// Calls copy(address, packed_offset, bytes) for each contiguous piece of the window.
template <typename Copy>
void ForEachPiece(const BufferInfo& buffer, const PageRuns& runs, int64_t offset, int64_t bytes,
                  const Copy& copy) {
  const int64_t item_bytes = buffer.item_bytes;
  size_t index = runs.RunAt(offset / item_bytes);
  int64_t into_run = offset - runs.RunBegin(index) * item_bytes;
  for (int64_t done = 0; done < bytes; ++index) {
    const PageRun run = runs.Run(index);
    const int64_t piece = std::min(bytes - done, run.count * item_bytes - into_run);
    copy(buffer.address + run.first * item_bytes + into_run, done, piece);
    done += piece;
    into_run = 0;
  }
}

}  // namespace

void GatherPages(const BufferInfo& buffer, const PageRuns& runs, int64_t offset,
                 std::span<std::byte> packed) {
  CopyAhead<PlainCopy> copies;
  ForEachPiece(buffer, runs, offset, static_cast<int64_t>(packed.size()),
               [&](const std::byte* page, int64_t at, int64_t bytes) {
                 copies.Add(packed.data() + at, std::span(page, bytes));
               });
  copies.Finish();
}

void ScatterPages(const BufferInfo& buffer, const PageRuns& runs, int64_t offset,
                  std::span<const std::byte> packed) {
  ForEachPiece(buffer, runs, offset, static_cast<int64_t>(packed.size()),
               [&](std::byte* page, int64_t at, int64_t bytes) {
                 BulkCopy(page, packed.data() + at, bytes);
               });
  FinishBulkCopies();
}

void AppendPagePieces(const BufferInfo& buffer, const PageRuns& runs, int64_t offset, int64_t bytes,
                      std::vector<std::span<std::byte>>* pieces) {
  ForEachPiece(buffer, runs, offset, bytes,
               [&](std::byte* page, int64_t, int64_t piece) { pieces->emplace_back(page, piece); });
}

}  // namespace kvferry
