#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvferry {

// What one of `peers` may hold of `all`, 1 at least. One share is always left over, so that a
// newcomer is served while a stuck peer holds its own.
inline int64_t FairShare(int64_t all, size_t peers) {
  return std::max<int64_t>(1, all / static_cast<int64_t>(peers + 1));
}

}  // namespace kvferry
