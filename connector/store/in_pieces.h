#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "base/ceil_div.h"

namespace kvferry {

// Calls move(first, count) for items [first, first + count), so many at a time, and returns the
// statuses that it gave, of all items in their order. `last_first`: the pieces go from the last to
// the first.
template <typename Move>
std::vector<absl::Status> InPieces(size_t num_items, size_t at_a_time, bool last_first,
                                   const Move& move) {
  std::vector<absl::Status> statuses(num_items);
  const size_t pieces = CeilDiv(num_items, at_a_time);
  for (size_t piece = 0; piece < pieces; ++piece) {
    const size_t first = at_a_time * (last_first ? pieces - 1 - piece : piece);
    std::ranges::move(move(first, std::min(at_a_time, num_items - first)),
                      statuses.begin() + static_cast<std::ptrdiff_t>(first));
  }
  return statuses;
}

}  // namespace kvferry
