#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/node_hash_map.h"

namespace kvferry {

// What a store on disk knows of its entries without asking the disk: number, size and pins by key,
// and what has to go when there is no room, the lowest number first. Not thread-safe.
class EntryIndex {
 public:
  struct Entry {
    uint64_t number = 0;  // Its age; no two entries have the same.
    int64_t bytes = 0;
    int64_t pins = 0;
  };

  // Null for a miss.
  const Entry* Find(std::string_view key) const;
  // In place of what was there, with its pins.
  void Set(std::string_view key, uint64_t number, int64_t bytes);
  void Remove(std::string_view key);
  // Of an entry that is there; not below 0.
  void AddPins(std::string_view key, int64_t pins);

  // Which entries have to go so that `key` fits with `bytes`, in place of what it has now. Nothing
  // when what is pinned leaves no room.
  std::optional<std::vector<std::string>> VictimsFor(std::string_view key, int64_t bytes,
                                                     int64_t capacity_bytes) const;
  // The same for several at once. No two have the same key. What has one of the numbers `spared`
  // stays as if it were pinned.
  struct Wanted {
    std::string_view key;
    int64_t bytes;
  };
  struct Numbers {
    uint64_t begin = 0;
    uint64_t end = 0;
    bool Has(uint64_t number) const { return begin <= number && number < end; }
  };
  std::optional<std::vector<std::string>> VictimsFor(std::span<const Wanted> wanted,
                                                     int64_t capacity_bytes, Numbers spared) const;

  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  int64_t bytes() const { return bytes_; }
  int64_t pinned_bytes() const { return pinned_bytes_; }
  int64_t num_pinned() const { return size() - static_cast<int64_t>(unpinned_.size()); }

 private:
  using Entries = absl::node_hash_map<std::string, Entry>;

  void Count(const Entries::value_type& entry);
  void Discount(const Entries::value_type& entry);

  Entries entries_;
  absl::btree_map<uint64_t, const Entries::value_type*> unpinned_;  // By number.
  int64_t bytes_ = 0;
  int64_t pinned_bytes_ = 0;
};

}  // namespace kvferry
