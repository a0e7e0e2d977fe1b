#include "transport/piece_copy.h"

#include <algorithm>

#include "base/status.h"
#include "pool/bulk_copy.h"

namespace kvferry {
namespace {

// What one thread copies at a time: long against the cost of waking it, short against a chunk. The
// lists of so many bytes stay in the first cache.
constexpr int64_t kShareBytes = 64 << 10;
// What goes to a device at a time when it has to be packed first: long against what asking it takes.
constexpr size_t kPackedBytes = 1 << 20;

using Piece = std::span<const std::byte>;

// Copies what lies together on both sides at a time. `from` has as many bytes behind `skip` in its
// first piece as `to`, at least.
void Copy(const std::vector<std::span<std::byte>>& to, Pieces from, size_t skip) {
  CopyAhead<BulkCopy> copies;
  for (std::span<std::byte> target : to) {
    while (!target.empty()) {
      const Piece piece = from.front().subspan(skip);
      const size_t bytes = std::min(target.size(), piece.size());
      copies.Add(target.data(), piece.first(bytes));
      target = target.subspan(bytes);
      skip += bytes;
      if (bytes < piece.size()) continue;
      from = from.subspan(1);
      skip = 0;
    }
  }
  copies.Finish();
  FinishBulkCopies();
}

}  // namespace

absl::Status PieceCopy::Run(const StreamPlan& plan, int64_t offset, Pieces from) {
  if (!plan.on_host()) return ToDevice(plan, offset, from);
  ToHost(plan, offset, from);
  return absl::OkStatus();
}

// Many pieces are packed first: a device takes some microseconds to be asked for a copy.
absl::Status PieceCopy::ToDevice(const StreamPlan& plan, int64_t offset, Pieces from) {
  if (from.size() == 1) return plan.Scatter(offset, from.front());
  packed_.clear();
  for (Piece piece : from) {
    while (!piece.empty()) {
      const Piece part = piece.first(std::min(piece.size(), kPackedBytes - packed_.size()));
      packed_.insert(packed_.end(), part.begin(), part.end());
      piece = piece.subspan(part.size());
      if (packed_.size() < kPackedBytes) continue;
      KVFERRY_RETURN_IF_ERROR(plan.Scatter(offset, packed_));
      offset += static_cast<int64_t>(packed_.size());
      packed_.clear();
    }
  }
  return packed_.empty() ? absl::OkStatus() : plan.Scatter(offset, packed_);
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
  threads_->ParallelFor((bytes + kShareBytes - 1) / kShareBytes, copy_share);
}

}  // namespace kvferry
