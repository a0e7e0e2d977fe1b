#include "transport/byte_ranges.h"

#include <iterator>

namespace kvferry {

bool ByteRanges::CanAdd(int64_t begin, int64_t end) const {
  if (begin < prefix_) return false;
  const auto next = ahead_.lower_bound(begin);
  if (next != ahead_.end() && next->first < end) return false;
  if (next != ahead_.begin() && std::prev(next)->second > begin) return false;
  return begin == prefix_ || ahead_.size() < kMaxAhead;
}

bool ByteRanges::Add(int64_t begin, int64_t end) {
  if (!CanAdd(begin, end)) return false;
  if (begin == prefix_) {
    prefix_ = end;
    while (!ahead_.empty() && ahead_.begin()->first == prefix_) {
      prefix_ = ahead_.begin()->second;
      ahead_.erase(ahead_.begin());
    }
  } else {
    ahead_.emplace(begin, end);
  }
  num_bytes_ += end - begin;
  return true;
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
