#include "connector/lookup_crowd.h"

#include <bit>

namespace kvferry {
namespace {

int WidthOf(int64_t bytes) {
  return static_cast<int>(std::bit_width(static_cast<uint64_t>(bytes)));
}

}  // namespace

void LookupCrowd::Join(uint64_t id, int64_t bytes, bool in_turn) {
  if (in_turn) in_turn_[WidthOf(bytes)].insert(id);
  bytes_ += bytes;
}

void LookupCrowd::Leave(uint64_t id, int64_t bytes) {
  const auto of_width = in_turn_.find(WidthOf(bytes));
  if (of_width != in_turn_.end()) of_width->second.erase(id);
  bytes_ -= bytes;
}

uint64_t LookupCrowd::FirstShorterThan(int64_t bytes) const {
  uint64_t first = 0;
  for (const auto& [width, ids] : in_turn_) {
    if (width >= WidthOf(bytes)) break;
    if (!ids.empty() && (first == 0 || *ids.begin() < first)) first = *ids.begin();
  }
  return first;
}

}  // namespace kvferry
