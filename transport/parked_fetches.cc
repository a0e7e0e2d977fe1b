#include "transport/parked_fetches.h"

namespace kvferry {

const ParkedFetch* ParkedFetches::Find(uint64_t transfer_id) const {
  const auto found = by_id_.find(transfer_id);
  return found == by_id_.end() ? nullptr : &found->second;
}

void ParkedFetches::Add(ParkedFetch parked) {
  const uint64_t id = parked.fetch.transfer_id;
  by_lease_.emplace(parked.fetch.lease_id, id);
  due_.emplace(parked.until, id);
  by_id_.emplace(id, std::move(parked));
}

std::optional<ParkedFetch> ParkedFetches::Take(uint64_t transfer_id) {
  auto node = by_id_.extract(transfer_id);
  if (node.empty()) return std::nullopt;
  ParkedFetch& parked = node.mapped();
  by_lease_.erase({parked.fetch.lease_id, transfer_id});
  due_.erase({parked.until, transfer_id});
  return std::move(parked);
}

std::vector<ParkedFetch> ParkedFetches::TakeOfLease(uint64_t lease_id) {
  std::vector<ParkedFetch> taken;
  for (auto next = by_lease_.lower_bound({lease_id, 0});
       next != by_lease_.end() && next->first == lease_id;
       next = by_lease_.lower_bound({lease_id, 0})) {
    taken.push_back(*Take(next->second));
  }
  return taken;
}

std::vector<uint64_t> ParkedFetches::IdsOfLease(uint64_t lease_id) const {
  std::vector<uint64_t> ids;
  for (auto next = by_lease_.lower_bound({lease_id, 0});
       next != by_lease_.end() && next->first == lease_id; ++next) {
    ids.push_back(next->second);
  }
  return ids;
}

std::vector<ParkedFetch> ParkedFetches::TakeDue(Deadline now) {
  std::vector<ParkedFetch> taken;
  while (next_due() <= now) taken.push_back(*Take(due_.begin()->second));
  return taken;
}

void ParkedFetches::ForgetPeer(const PeerKey& peer) {
  std::vector<uint64_t> ids;
  for (const auto& [id, parked] : by_id_) {
    if (parked.peer == peer) ids.push_back(id);
  }
  for (const uint64_t id : ids) Take(id);
}

}  // namespace kvferry
