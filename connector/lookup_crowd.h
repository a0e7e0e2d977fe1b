#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <set>

namespace kvferry {

// Of one producer and one consumer: the lookups that the producer has no place for. Those in turn
// may be given one that becomes free; the others have been given one in vain, and ask again when it
// is time. What a call costs hardly depends on how many there are. Not thread-safe.
class LookupCrowd {
 public:
  static constexpr int64_t kAnyLength = std::numeric_limits<int64_t>::max();

  // `bytes` is the length of its question.
  void Join(uint64_t id, int64_t bytes, bool in_turn);
  // Of one that has joined, with the same length.
  void Leave(uint64_t id, int64_t bytes);
  // Of their questions.
  int64_t bytes() const { return bytes_; }

  // The oldest of those in turn, which is the one with the smallest id; 0: none. But only of those
  // whose question is of a smaller power of two than `bytes`: for a place in which one with so long
  // a question had no room. So one place is tried by a few at most, who ask for less and less.
  uint64_t FirstShorterThan(int64_t bytes) const;

 private:
  int64_t bytes_ = 0;
  std::map<int, std::set<uint64_t>> in_turn_;  // By the width in bits of their lengths.
};

}  // namespace kvferry
