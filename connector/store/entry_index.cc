#include "connector/store/entry_index.h"

#include <unordered_set>
#include <utility>

namespace kvferry {

// Made in maps of their own, from which they come whole.
EntryIndex::Place::Place(std::string_view key) {
  Entries entries;
  entry_ = entries.extract(entries.try_emplace(std::string(key)).first);
  ByNumber numbers;
  number_ = numbers.extract(numbers.try_emplace(0).first);
}

const EntryIndex::Entry* EntryIndex::Find(std::string_view key) const {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

void EntryIndex::Count(const Entries::value_type& entry, ByNumber::node_type number) {
  bytes_ += entry.second.bytes;
  if (entry.second.pins > 0) pinned_bytes_ += entry.second.bytes;
  number.key() = entry.second.number;
  number.mapped() = &entry;
  GroupOf(entry.second).insert(std::move(number));
}

EntryIndex::ByNumber::node_type EntryIndex::Discount(const Entry& entry) {
  bytes_ -= entry.bytes;
  if (entry.pins > 0) pinned_bytes_ -= entry.bytes;
  return GroupOf(entry).extract(entry.number);
}

void EntryIndex::Set(Place place, uint64_t number, int64_t bytes) noexcept {
  const auto [it, added, there_already] = entries_.insert(std::move(place.entry_));
  if (!added) place.number_ = Discount(it->second);
  it->second.number = number;
  it->second.bytes = bytes;
  Count(*it, std::move(place.number_));
}

void EntryIndex::Remove(std::string_view key) noexcept {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return;
  Discount(it->second);
  entries_.erase(it);
}

void EntryIndex::AddPins(std::string_view key, int64_t pins) noexcept {
  const auto it = entries_.find(key);
  ByNumber::node_type number = Discount(it->second);
  it->second.pins += pins;
  Count(*it, std::move(number));
}

std::optional<std::vector<std::string>> EntryIndex::VictimsFor(std::span<const Wanted> wanted,
                                                               int64_t capacity_bytes,
                                                               Numbers spared) const {
  std::unordered_set<const Entry*> replaced;
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
