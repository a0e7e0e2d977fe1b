#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <new>
#include <unordered_map>
#include <utility>

namespace kvferry {

// What is known of ids that come up once more, if they do: the last kMax of them that were added.
// Peers choose ids, so there has to be a limit. Not thread-safe.
template <typename Value>
class RecentMap {
 public:
  // At 3,000 leases a second for 20 s, twice as long as a silent session lasts.
  static constexpr size_t kMax = 65536;

  // What is known then. What was known before stays as it is, and where there is no memory
  // everything does. Valid until the next Add().
  Value& Add(uint64_t id, Value value) {
    if (Value* const known = Find(id)) return *known;
    order_.push_back(id);
    Value* added = nullptr;
    try {
      added = &values_.emplace(id, std::move(value)).first->second;
    } catch (const std::bad_alloc&) {
      order_.pop_back();
      throw;
    }
    if (order_.size() > kMax) {
      values_.erase(order_.front());
      order_.pop_front();
    }
    return *added;
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
  std::unordered_map<uint64_t, Value> values_;  // Abseil's are broken by a growth without memory.
  std::deque<uint64_t> order_;
};

}  // namespace kvferry
