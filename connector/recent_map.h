#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace kvferry {

// What is known of ids that come up once more, if they do: the last kMax of them that were added. Peers
// choose ids, so there has to be a limit. Not thread-safe.
template <typename Value>
class RecentMap {
 public:
  // At 3,000 leases a second for 20 s, twice as long as a silent session lasts.
  static constexpr size_t kMax = 65536;

  // What is known already stays as it is.
  void Add(uint64_t id, Value value) {
    if (!values_.try_emplace(id, std::move(value)).second) return;
    order_.push_back(id);
    if (order_.size() <= kMax) return;
    values_.erase(order_.front());
    order_.pop_front();
  }
  bool contains(uint64_t id) const { return values_.contains(id); }
  // Null if it is unknown. Valid until the next Add().
  const Value* Find(uint64_t id) const {
    const auto found = values_.find(id);
    return found == values_.end() ? nullptr : &found->second;
  }
  Value* Find(uint64_t id) {
    const auto found = values_.find(id);
    return found == values_.end() ? nullptr : &found->second;
  }

 private:
  absl::flat_hash_map<uint64_t, Value> values_;
  std::deque<uint64_t> order_;
};

}  // namespace kvferry
