#include "pool/page_copy.h"

#include <algorithm>

#include "base/status.h"
#include "pool/bulk_copy.h"
#include "pool/token_view.h"

namespace kvferry {
namespace {

// Calls copy(address, packed_offset, bytes) for each contiguous piece of the window.
template <typename Copy>
void ForEachPiece(const BufferInfo& buffer, const PageRuns& runs, int64_t offset, int64_t bytes,
                  const Copy& copy) {
  if (bytes == 0) return;
  size_t index = runs.RunAt(offset / buffer.item_bytes);
  for (int64_t done = 0; done < bytes; ++index) {
    const int64_t into_run = offset + done - runs.RunBegin(index) * buffer.item_bytes;
    const int64_t run_end = runs.RunEnd(index) * buffer.item_bytes;
    const int64_t piece = std::min(bytes - done, run_end - (offset + done));
    copy(buffer.address + runs.Run(index).first * buffer.item_bytes + into_run, done, piece);
    done += piece;
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

// ---------------------------------------------------------------- in other memory

struct PageCopies::Window {
  const BufferInfo& buffer;
  const PageRuns& runs;
  int64_t offset;
  std::span<std::byte> packed;
  bool gathers;
};

absl::Status PageCopies::Gather(const BufferInfo& buffer, const PageRuns& runs, int64_t offset,
                                std::span<std::byte> packed) {
  return Add({buffer, runs, offset, packed, /*gathers=*/true});
}

absl::Status PageCopies::Scatter(const BufferInfo& buffer, const PageRuns& runs, int64_t offset,
                                 std::span<const std::byte> packed) {
  // Only read, though views do not say so.
  const std::span<std::byte> source(const_cast<std::byte*>(packed.data()), packed.size());
  return Add({buffer, runs, offset, source, /*gathers=*/false});
}

absl::Status PageCopies::AddPiece(const Window& window, std::byte* page, int64_t at,
                                  int64_t bytes) {
  const auto row = [bytes](std::byte* data) {
    return TokenView::Packed(data, DType::kUint8, 1, 1, bytes);
  };
  std::byte* const packed = window.packed.data() + at;
  KVFERRY_ASSIGN_OR_RETURN(const TokenCopy copy,
                           window.gathers ? TokenCopy::PlanInOrder(row(page), row(packed))
                                          : TokenCopy::PlanInOrder(row(packed), row(page)));
  copies_.push_back(copy);
  return absl::OkStatus();
}

// Of positions [first, end).
absl::Status PageCopies::AddWholePages(const Window& window, int64_t first, int64_t end) {
  if (first >= end) return absl::OkStatus();
  std::vector<int32_t>& list = lists_.emplace_back();
  list.reserve(end - first);
  for (size_t index = window.runs.RunAt(first); first < end; ++index) {
    const PageRun run = window.runs.Run(index);
    for (int64_t i = first - window.runs.RunBegin(index); i < run.count && first < end; ++i) {
      list.push_back(static_cast<int32_t>(run.first + i));
      ++first;
    }
  }
  const int64_t item = window.buffer.item_bytes;
  const auto count = static_cast<int64_t>(list.size());
  const TokenView pages =
      TokenView::Packed(window.buffer.address, DType::kUint8, window.buffer.bytes / item, 1, item);
  const TokenView packed = TokenView::Packed(
      window.packed.data() + (end - count) * item - window.offset, DType::kUint8, count, 1, item);
  KVFERRY_ASSIGN_OR_RETURN(const TokenCopy copy, window.gathers
                                                     ? TokenCopy::PlanGather(pages, list, packed)
                                                     : TokenCopy::PlanScatter(packed, pages, list));
  copies_.push_back(copy);
  return absl::OkStatus();
}

absl::Status PageCopies::Add(const Window& window) {
  // From here on a piece takes longer than it takes to ask a device for its copy, some microseconds.
  constexpr int64_t kLongPiece = 64 << 10;
  const auto bytes = static_cast<int64_t>(window.packed.size());
  const int64_t item = window.buffer.item_bytes;
  int64_t pieces = 0;
  absl::Status status;
  const auto add = [&](std::byte* page, int64_t at, int64_t piece) {
    if (status.ok()) status = AddPiece(window, page, at, piece);
  };
  ForEachPiece(window.buffer, window.runs, window.offset, bytes,
               [&](std::byte*, int64_t, int64_t) { ++pieces; });
  if (pieces <= 1 || bytes / pieces >= kLongPiece) {
    ForEachPiece(window.buffer, window.runs, window.offset, bytes, add);
    return status;
  }
  // Whole pages, and what is left of one before and behind them.
  const int64_t first = (window.offset + item - 1) / item, end = (window.offset + bytes) / item;
  const int64_t before = first * item - window.offset;
  const int64_t behind = window.offset + bytes - end * item;
  if (before > 0) ForEachPiece(window.buffer, window.runs, window.offset, before, add);
  KVFERRY_RETURN_IF_ERROR(status);
  KVFERRY_RETURN_IF_ERROR(AddWholePages(window, first, end));
  if (behind > 0) {
    ForEachPiece(window.buffer, window.runs, end * item, behind,
                 [&](std::byte* page, int64_t, int64_t) { add(page, bytes - behind, behind); });
  }
  return status;
}

}  // namespace kvferry
