#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "base/clock.h"
#include "transport/control_plane.h"
#include "transport/data_plane.h"
#include "transport/messages.h"

namespace kvferry {

// A fetch that came before its lease.
struct ParkedFetch {
  FetchMsg fetch;
  PeerKey peer;
  LinkId link;
  Deadline until;
};

// Those of one sender. Thousands may wait while layers of other leases become ready all the time,
// so what is done for one of them, or when none is due, looks at no others. Not thread-safe.
class ParkedFetches {
 public:
  bool Has(uint64_t transfer_id) const { return by_id_.contains(transfer_id); }
  // Null where there is none; good until the next call that is not const.
  const ParkedFetch* Find(uint64_t transfer_id) const;
  // Of a transfer that is not here yet.
  void Add(ParkedFetch parked);
  std::optional<ParkedFetch> Take(uint64_t transfer_id);
  std::vector<ParkedFetch> TakeOfLease(uint64_t lease_id);
  std::vector<uint64_t> IdsOfLease(uint64_t lease_id) const;
  std::vector<ParkedFetch> TakeDue(Deadline now);
  void ForgetPeer(const PeerKey& peer);
  // When the first one is due.
  Deadline next_due() const { return due_.empty() ? Deadline::max() : due_.begin()->first; }

 private:
  absl::flat_hash_map<uint64_t, ParkedFetch> by_id_;
  absl::btree_set<std::pair<uint64_t, uint64_t>> by_lease_;  // Lease, transfer.
  absl::btree_set<std::pair<Deadline, uint64_t>> due_;
};

}  // namespace kvferry
