#include "transport/piece_copy.h"

#include <algorithm>

#include "pool/bulk_copy.h"

namespace kvferry {
namespace {

// What one thread copies at a time: long against the cost of waking it, short against a chunk.
constexpr size_t kShareBytes = 64 << 10;

}  // namespace

void PieceCopy::Add(std::byte* to, const std::byte* from, size_t bytes) {
  while (bytes > 0) {
    if (shares_.empty() || bytes_of_share_ >= kShareBytes) {
      shares_.push_back(parts_.size());
      bytes_of_share_ = 0;
    }
    const size_t part = std::min(bytes, kShareBytes - bytes_of_share_);
    parts_.push_back({to, from, part});
    bytes_of_share_ += part;
    to += part;
    from += part;
    bytes -= part;
  }
}

void PieceCopy::CopyShare(int64_t share) const {
  const auto index = static_cast<size_t>(share);
  const size_t end = index + 1 < shares_.size() ? shares_[index + 1] : parts_.size();
  for (size_t i = shares_[index]; i < end; ++i) {
    if (i + 1 < end) PrefetchStart(parts_[i + 1].from, parts_[i + 1].bytes);
    BulkCopy(parts_[i].to, parts_[i].from, parts_[i].bytes);
  }
  FinishBulkCopies();
}

void PieceCopy::Run(const StreamPlan& plan, int64_t offset, Pieces from) {
  int64_t bytes = 0;
  for (const std::span<const std::byte> piece : from) bytes += static_cast<int64_t>(piece.size());
  to_.clear();
  parts_.clear();
  shares_.clear();
  plan.AppendPieces(offset, bytes, &to_);
  size_t target = 0;
  size_t done = 0;  // Of to_[target].
  for (std::span<const std::byte> piece : from) {
    while (!piece.empty()) {
      const size_t part = std::min(piece.size(), to_[target].size() - done);
      Add(to_[target].data() + done, piece.data(), part);
      piece = piece.subspan(part);
      done += part;
      if (done < to_[target].size()) continue;
      ++target;
      done = 0;
    }
  }
  threads_->ParallelFor(static_cast<int64_t>(shares_.size()),
                        [this](int64_t share) { CopyShare(share); });
}

}  // namespace kvferry
