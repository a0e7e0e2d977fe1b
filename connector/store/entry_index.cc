#include "connector/store/entry_index.h"

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
  const Entry* const before = Find(key);
  const int64_t before_bytes = before != nullptr ? before->bytes : 0;
  const int64_t before_pinned_bytes = before != nullptr && before->pins > 0 ? before->bytes : 0;
  if (pinned_bytes_ - before_pinned_bytes + bytes > capacity_bytes) return std::nullopt;
  int64_t over_bytes = bytes_ - before_bytes + bytes - capacity_bytes;
  std::vector<std::string> victims;
  for (auto it = unpinned_.begin(); over_bytes > 0; ++it) {
    if (&it->second->second == before) continue;
    victims.push_back(it->second->first);
    over_bytes -= it->second->second.bytes;
  }
  return victims;
}

}  // namespace kvferry
