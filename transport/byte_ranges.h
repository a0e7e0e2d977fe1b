#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"

namespace kvferry {

// Which bytes of a stream have arrived. In order, it is one number; what arrives ahead waits in a
// bounded list of ranges. Not thread-safe.
class ByteRanges {
 public:
  // [0, prefix) is there from the start.
  explicit ByteRanges(int64_t prefix = 0) : prefix_(prefix), num_bytes_(prefix) {}

  // Marks [begin, end), begin < end. False, and nothing changes, when it overlaps what is there or
  // would need more than kMaxAhead separate ranges.
  bool Add(int64_t begin, int64_t end);

  // All of [0, prefix()) is there.
  int64_t prefix() const { return prefix_; }
  int64_t num_bytes() const { return num_bytes_; }
  // The ranges of [0, total) that are not there.
  std::vector<std::pair<int64_t, int64_t>> Gaps(int64_t total) const;

  static constexpr size_t kMaxAhead = 4096;

 private:
  bool CanAdd(int64_t begin, int64_t end) const;

  int64_t prefix_;
  int64_t num_bytes_;
  absl::btree_map<int64_t, int64_t> ahead_;  // begin -> end, all beyond prefix_.
};

}  // namespace kvferry
