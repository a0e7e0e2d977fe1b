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

inline std::vector<std::byte> Joined(const PlacedRuns& placed) {
  std::vector<std::byte> bytes;
  for (const ItemsPlace& place : placed.places) {
    for (const PageRun& run : placed.runs) {
      const std::byte* const from = place.begin + run.first * place.item_bytes;
      bytes.insert(bytes.end(), from, from + run.count * place.item_bytes);
    }
  }
  return bytes;
}

inline std::vector<std::byte> Joined(const Payload& payload) {
  return std::visit([](const auto& bytes) { return Joined(bytes); }, payload);
}

}  // namespace kvferry
