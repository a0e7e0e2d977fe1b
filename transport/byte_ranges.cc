#include "transport/byte_ranges.h"

#include <iterator>

#include "absl/strings/str_cat.h"

namespace kvferry {

absl::Status ByteRanges::Add(int64_t begin, int64_t end) {
  const auto next = ahead_.lower_bound(begin);
  const auto before = next == ahead_.begin() ? ahead_.end() : std::prev(next);
  if (begin < prefix_ || (next != ahead_.end() && next->first < end) ||
      (before != ahead_.end() && before->second > begin)) {
    return absl::DataLossError(
        absl::StrCat("the chunk at byte ", begin, " overlaps what has arrived"));
  }
  const bool extends = begin == prefix_ || (before != ahead_.end() && before->second == begin);
  const bool meets_next = next != ahead_.end() && next->first == end;
  if (!extends && !meets_next && ahead_.size() >= kMaxGaps) {
    return absl::DataLossError(absl::StrCat("the chunk at byte ", begin, " leaves more than ",
                                            kMaxGaps, " gaps before it"));
  }
  num_bytes_ += end - begin;
  if (meets_next) end = next->second;
  if (begin == prefix_) {
    prefix_ = end;
  } else if (extends) {
    before->second = end;
  }
  if (meets_next) ahead_.erase(next);
  if (!extends) ahead_.emplace(begin, end);
  return absl::OkStatus();
}

std::vector<std::pair<int64_t, int64_t>> ByteRanges::Gaps(int64_t total) const {
  std::vector<std::pair<int64_t, int64_t>> gaps;
  int64_t at = prefix_;
  for (const auto& [begin, end] : ahead_) {
    if (at < begin) gaps.emplace_back(at, begin);
    at = end;
  }
  if (at < total) gaps.emplace_back(at, total);
  return gaps;
}

}  // namespace kvferry
