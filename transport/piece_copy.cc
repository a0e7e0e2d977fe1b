#include "transport/piece_copy.h"

#include <algorithm>

#include "base/ceil_div.h"
#include "base/status.h"
#include "pool/bulk_copy.h"
#include "transport/pieces.h"

namespace kvferry {
namespace {

// What one thread copies at a time: long against the cost of waking it, short against a chunk. The
// lists of so many bytes stay in the first cache.
constexpr int64_t kShareBytes = 64 << 10;

void Copy(const std::vector<std::span<std::byte>>& to, Pieces from, size_t skip) {
  CopyAhead<BulkCopy> copies;
  ForEachMove(
      from, to,
      [&](const std::byte* source, std::byte* target, size_t bytes) {
        copies.Add(target, {source, bytes});
      },
      skip);
  copies.Finish();
  FinishBulkCopies();
}

}  // namespace

absl::Status PieceCopy::Run(const StreamPlan& plan, int64_t offset, Pieces from) {
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<const MovesUnderWay> moves,
                           Begin(plan, offset, from));
  return plan.Settle(moves);
}

absl::StatusOr<std::shared_ptr<const MovesUnderWay>> PieceCopy::Begin(const StreamPlan& plan,
                                                                      int64_t offset, Pieces from) {
  if (!plan.on_host()) return plan.BeginScatterPieces(offset, from);
  ToHost(plan, offset, from);
  return nullptr;
}

// Each share finds its own pieces on both sides: with small pages that is much of the work, and
// who has several threads wants all of them to do it.
void PieceCopy::ToHost(const StreamPlan& plan, int64_t offset, Pieces from) {
  begins_.clear();
  int64_t bytes = 0;
  for (const std::span<const std::byte> piece : from) {
    begins_.push_back(bytes);
    bytes += static_cast<int64_t>(piece.size());
  }
  const auto copy_share = [&](int64_t share) {
    thread_local std::vector<std::span<std::byte>> to;
    to.clear();
    const int64_t begin = share * kShareBytes;
    plan.AppendPieces(offset + begin, std::min(kShareBytes, bytes - begin), &to);
    const auto first = std::upper_bound(begins_.begin(), begins_.end(), begin) - 1;
    Copy(to, from.subspan(first - begins_.begin()), begin - *first);
  };
  threads_->ParallelFor(CeilDiv(bytes, kShareBytes), copy_share);
}

}  // namespace kvferry
