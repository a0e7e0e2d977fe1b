#pragma once

#include <cstddef>
#include <vector>

#include "transport/data_plane.h"

namespace kvferry {

inline std::vector<std::byte> Joined(Pieces pieces) {
  std::vector<std::byte> bytes;
  for (const auto& piece : pieces) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

}  // namespace kvferry
