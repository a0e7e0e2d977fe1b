#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"

namespace kvferry {

// Which bytes of a stream have arrived. In order, it is one number; what arrives ahead is a bounded
// list of ranges that do not touch: one for each gap, however far ahead the last one is. Not
// thread-safe.
class ByteRanges {
 public:
  // [0, prefix) is there from the start.
  explicit ByteRanges(int64_t prefix = 0) : prefix_(prefix), num_bytes_(prefix) {}

  // Marks [begin, end), begin < end. DATA_LOSS, and nothing changes, when it overlaps what is there
  // or would leave more than kMaxGaps gaps.
  absl::Status Add(int64_t begin, int64_t end);

  // All of [0, prefix()) is there.
  int64_t prefix() const { return prefix_; }
  int64_t num_bytes() const { return num_bytes_; }
  // The ranges of [0, total) that are not there.
  std::vector<std::pair<int64_t, int64_t>> Gaps(int64_t total) const;

  // Behind each gap's end is a chunk that has overtaken one under way, and no more are under way
  // than credits_per_transfer may be.
  static constexpr size_t kMaxGaps = 4096;

 private:
  int64_t prefix_;
  int64_t num_bytes_;
  absl::btree_map<int64_t, int64_t> ahead_;  // begin -> end, all beyond prefix_, none touching.
};

}  // namespace kvferry
