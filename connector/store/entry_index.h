#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

 private:
  // Not Abseil's, which are broken by a growth for which there is no memory.
  using Entries = std::map<std::string, Entry, std::less<>>;
  using ByNumber = std::map<uint64_t, const Entries::value_type*>;

 public:
  // What the index needs to know an entry: all memory that it ever takes.
  class Place {
   public:
    explicit Place(std::string_view key);

   private:
    friend class EntryIndex;
    Entries::node_type entry_;
    ByNumber::node_type number_;
  };

  // Null for a miss.
  const Entry* Find(std::string_view key) const;
  // The place's key, in place of what was there, with its pins.
  void Set(Place place, uint64_t number, int64_t bytes) noexcept;
  void Remove(std::string_view key) noexcept;
  // Of an entry that is there; not below 0.
  void AddPins(std::string_view key, int64_t pins) noexcept;

  // Which entries have to go so that all `wanted` fit, each in place of what its key has now; no
  // two have the same key. Nothing when what is pinned leaves no room, or has one of the numbers
  // `spared`, which stays as if it were.
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
  int64_t num_pinned() const { return static_cast<int64_t>(pinned_.size()); }

 private:
  ByNumber& GroupOf(const Entry& entry) { return entry.pins > 0 ? pinned_ : unpinned_; }
  void Count(const Entries::value_type& entry, ByNumber::node_type number);
  ByNumber::node_type Discount(const Entry& entry);

  Entries entries_;
  ByNumber unpinned_;
  ByNumber pinned_;
  int64_t bytes_ = 0;
  int64_t pinned_bytes_ = 0;
};

}  // namespace kvferry
