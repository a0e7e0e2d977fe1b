#pragma once

#include <algorithm>
#include <cstddef>

#include "transport/data_plane.h"

namespace kvferry {

// visit(from, to, bytes) for what lies together on both sides, in order, until `to` is full. `from`
// has as many bytes behind the first `skip` as `to`, at least, and `skip` lies in its first piece.
template <typename Visit>
void ForEachMove(Pieces from, MutablePieces to, const Visit& visit, size_t skip = 0) {
  for (std::span<std::byte> target : to) {
    while (!target.empty()) {
      const std::span<const std::byte> piece = from.front().subspan(skip);
      const size_t bytes = std::min(target.size(), piece.size());
      if (bytes > 0) visit(piece.data(), target.data(), bytes);
      target = target.subspan(bytes);
      skip += bytes;
      if (bytes < piece.size()) continue;
      from = from.subspan(1);
      skip = 0;
    }
  }
}

}  // namespace kvferry
