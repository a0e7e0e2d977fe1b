#pragma once

#include <cstdint>
#include <utility>

#include "absl/container/btree_map.h"
#include "transport/control_plane.h"

namespace kvferry {

// Ids of what waits to be asked of peers, of each peer in the order of their turns.
class WaitingLine {
 public:
  // For who is new in the line: behind all others, and not 0.
  int64_t NextTurn() { return ++last_turn_; }
  void Add(const PeerKey& peer, int64_t turn, uint64_t id) { ids_.emplace(Key(peer, turn), id); }
  // No-op for who is not in it.
  void Remove(const PeerKey& peer, int64_t turn) { ids_.erase(Key(peer, turn)); }
  // The one that has waited longest for that peer, or 0.
  uint64_t First(const PeerKey& peer) const {
    const auto first = ids_.lower_bound(Key(peer, 0));
    return first == ids_.end() || first->first.first != peer ? 0 : first->second;
  }

 private:
  using Key = std::pair<PeerKey, int64_t>;

  int64_t last_turn_ = 0;
  absl::btree_map<Key, uint64_t> ids_;
};

}  // namespace kvferry
