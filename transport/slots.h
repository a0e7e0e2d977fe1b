#pragma once

#include <cstdint>
#include <vector>

namespace kvferry {

// Numbers in [0, count), each of them taken or not. Not thread-safe.
class Slots {
 public:
  explicit Slots(int64_t count) : count_(count) {
    for (int64_t slot = count - 1; slot >= 0; --slot) free_.push_back(slot);
  }

  // The one that was given back last, which is still in the cache; -1 when all are taken.
  int64_t Take() {
    if (free_.empty()) return -1;
    const int64_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void GiveBack(int64_t slot) { free_.push_back(slot); }

  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_taken() const { return count_ - num_free(); }

 private:
  const int64_t count_;
  std::vector<int64_t> free_;
};

}  // namespace kvferry
