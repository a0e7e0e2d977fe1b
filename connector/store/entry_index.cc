#include "connector/store/entry_index.h"

#include <utility>

#include "absl/container/flat_hash_set.h"

namespace kvferry {

const EntryIndex::Entry* EntryIndex::Find(std::string_view key) const {
  const auto it = entries_.find(std::string(key));
  return it == entries_.end() ? nullptr : &it->second;
}

void EntryIndex::Count(const Entries::value_type& entry) {
  bytes_ += entry.second.bytes;
  if (entry.second.pins > 0) {
    pinned_bytes_ += entry.second.bytes;
  } else {
    unpinned_.emplace(entry.second.number, &entry);
  }
}

void EntryIndex::Discount(const Entries::value_type& entry) {
  bytes_ -= entry.second.bytes;
  if (entry.second.pins > 0) {
    pinned_bytes_ -= entry.second.bytes;
  } else {
    unpinned_.erase(entry.second.number);
  }
}

void EntryIndex::Set(std::string_view key, uint64_t number, int64_t bytes) {
  const auto [it, added] = entries_.try_emplace(std::string(key));
  if (!added) Discount(*it);
  it->second.number = number;
  it->second.bytes = bytes;
  Count(*it);
}

void EntryIndex::Remove(std::string_view key) {
  const auto it = entries_.find(std::string(key));
  if (it == entries_.end()) return;
  Discount(*it);
  entries_.erase(it);
}

void EntryIndex::AddPins(std::string_view key, int64_t pins) {
  const auto it = entries_.find(std::string(key));
  Discount(*it);
  it->second.pins += pins;
  Count(*it);
}

std::optional<std::vector<std::string>> EntryIndex::VictimsFor(std::string_view key, int64_t bytes,
                                                               int64_t capacity_bytes) const {
  const Wanted wanted = {key, bytes};
  return VictimsFor({&wanted, 1}, capacity_bytes, {});
}

std::optional<std::vector<std::string>> EntryIndex::VictimsFor(std::span<const Wanted> wanted,
                                                               int64_t capacity_bytes,
                                                               Numbers spared) const {
  absl::flat_hash_set<const Entry*> replaced;
  int64_t over_bytes = bytes_ - capacity_bytes;
  int64_t pinned_over_bytes = pinned_bytes_ - capacity_bytes;
  for (const auto& [key, bytes] : wanted) {
    const Entry* const before = Find(key);
    const bool pinned = before != nullptr && before->pins > 0;
    over_bytes += bytes - (before != nullptr ? before->bytes : 0);
    pinned_over_bytes += bytes - (pinned ? before->bytes : 0);
    if (before != nullptr) replaced.insert(before);
  }
  if (pinned_over_bytes > 0) return std::nullopt;
  std::vector<std::string> victims;
  for (auto it = unpinned_.begin(); over_bytes > 0 && it != unpinned_.end(); ++it) {
    if (replaced.contains(&it->second->second) || spared.Has(it->first)) continue;
    victims.push_back(it->second->first);
    over_bytes -= it->second->second.bytes;
  }
  return over_bytes > 0 ? std::nullopt : std::optional(std::move(victims));
}

}  // namespace kvferry
