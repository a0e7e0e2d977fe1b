#include "connector/store/entry_index.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "tests/support/failing_new.h"

namespace kvferry {
namespace {

using Victims = std::vector<std::string>;

void Set(EntryIndex& index, std::string_view key, uint64_t number, int64_t bytes) {
  index.Set(EntryIndex::Place(key), number, bytes);
}

// For one entry.
std::optional<Victims> VictimsFor(const EntryIndex& index, std::string_view key, int64_t bytes,
                                  int64_t capacity_bytes) {
  const EntryIndex::Wanted wanted = {key, bytes};
  return index.VictimsFor({&wanted, 1}, capacity_bytes, {});
}

TEST(EntryIndices, TheOldestThatIsNotPinnedGoes) {
  EntryIndex index;
  for (uint64_t i = 1; i <= 4; ++i) Set(index, absl::StrCat(i), i, 10);
  index.AddPins("1", 1);
  Set(index, "2", 5, 10);  // Is the youngest now.
  EXPECT_EQ(VictimsFor(index, "new", 10, 50), Victims{});
  EXPECT_EQ(VictimsFor(index, "new", 10, 49), Victims{"3"});
  EXPECT_EQ(VictimsFor(index, "new", 10, 30), (Victims{"3", "4"}));
  EXPECT_EQ(VictimsFor(index, "3", 15, 40), Victims{"4"});  // Its own room counts.
  EXPECT_EQ(VictimsFor(index, "1", 20, 20), (Victims{"3", "4", "2"}));
  EXPECT_EQ(VictimsFor(index, "new", 21, 30), std::nullopt);
}

TEST(EntryIndices, RoomForSeveralAtOnce) {
  using Wanted = std::vector<EntryIndex::Wanted>;
  EntryIndex index;
  for (uint64_t i = 1; i <= 4; ++i) Set(index, absl::StrCat(i), i, 10);
  index.AddPins("1", 1);
  EXPECT_EQ(index.VictimsFor(Wanted{}, 40, {}), Victims{});
  EXPECT_EQ(index.VictimsFor(Wanted{}, 15, {}), (Victims{"2", "3", "4"}));
  EXPECT_EQ(index.VictimsFor(Wanted{{"a", 10}, {"b", 5}}, 55, {}), Victims{});
  EXPECT_EQ(index.VictimsFor(Wanted{{"a", 10}, {"b", 5}}, 54, {}), Victims{"2"});
  EXPECT_EQ(index.VictimsFor(Wanted{{"a", 10}, {"2", 15}}, 50, {}),
            Victims{"3"});  // "2" makes way.
  EXPECT_EQ(index.VictimsFor(Wanted{{"1", 5}, {"a", 15}}, 20, {}), (Victims{"2", "3", "4"}));
  EXPECT_EQ(index.VictimsFor(Wanted{{"a", 10}, {"b", 11}}, 30, {}), std::nullopt);
}

TEST(EntryIndices, WhatIsSparedMakesNoRoom) {
  using Wanted = std::vector<EntryIndex::Wanted>;
  EntryIndex index;
  for (uint64_t i = 1; i <= 4; ++i) Set(index, absl::StrCat(i), i, 10);
  EXPECT_EQ(index.VictimsFor(Wanted{{"a", 10}}, 30, {2, 4}), (Victims{"1", "4"}));
  EXPECT_EQ(index.VictimsFor(Wanted{{"a", 11}}, 30, {2, 4}), std::nullopt);
  EXPECT_EQ(index.VictimsFor(Wanted{{"2", 20}}, 30, {2, 4}), (Victims{"1", "4"}));
}

// New ones, and one in place of another.
TEST(EntryIndices, ASetThatFindsNoMemoryChangesNothing) {
  const auto key_of = [](uint64_t i) { return absl::StrCat("a key with memory of its own", i); };
  EntryIndex index;
  for (uint64_t i = 1; i <= 20; ++i) {
    for (const uint64_t number : {i, 100 + i}) {
      const int64_t bytes = index.bytes();
      CallWithoutMemory([&] { Set(index, key_of(i), number, 10); },
                        [&] {
                          EXPECT_EQ(index.size(), number == i ? i - 1 : i);
                          EXPECT_EQ(index.bytes(), bytes);
                        });
      EXPECT_EQ(index.Find(key_of(i))->number, number);
    }
  }
  EXPECT_EQ(index.bytes(), 200);
  EXPECT_EQ(VictimsFor(index, "new", 10, 200), Victims{key_of(1)});
}

// Not even that of its key.
TEST(EntryIndices, PinsAndRemovalsNeedNoMemory) {
  const std::string key = "a key with memory of its own";
  EntryIndex index;
  Set(index, key, 1, 10);
  const FailingNew failing(0);
  index.AddPins(key, 1);
  index.AddPins(key, -1);
  EXPECT_EQ(index.num_pinned(), 0);
  index.Remove(key);
  EXPECT_EQ(index.bytes(), 0);
}

TEST(EntryIndices, ALookForVictimsThatFindsNoMemoryChangesNothing) {
  EntryIndex index;
  for (uint64_t i = 1; i <= 4; ++i) Set(index, absl::StrCat(i), i, 10);
  const std::vector<EntryIndex::Wanted> wanted = {{"1", 10}, {"2", 10}, {"3", 20}};
  CallWithoutMemory([&] { (void)index.VictimsFor(wanted, 40, {}); },
                    [&] { EXPECT_EQ(index.VictimsFor(wanted, 40, {}), Victims{"4"}); });
}

// All entries, looked at one by one.
TEST(EntryIndices, RandomCallsAgreeWithAMap) {
  EntryIndex index;
  std::map<std::string, EntryIndex::Entry> model;
  std::mt19937_64 random(9);
  for (uint64_t i = 1; i <= 1000000; ++i) {
    const std::string key = absl::StrCat(random() % 12);
    const auto it = model.find(key);
    switch (random() % 5) {
      case 0:
      case 1: {
        const auto bytes = static_cast<int64_t>(random() % 100 + 1);
        Set(index, key, i, bytes);
        model[key] = {i, bytes, it == model.end() ? 0 : it->second.pins};
        break;
      }
      case 2:
        index.Remove(key);
        if (it != model.end()) model.erase(it);
        break;
      case 3:
        if (it == model.end()) break;
        it->second.pins += it->second.pins > 0 && random() % 2 != 0 ? -1 : 1;
        index.AddPins(key, it->second.pins - index.Find(key)->pins);
        break;
      default: {
        const auto bytes = static_cast<int64_t>(random() % 100 + 1);
        const auto capacity = static_cast<int64_t>(random() % 600 + 1);
        std::map<uint64_t, std::string> by_age;
        int64_t held = bytes;
        for (const auto& [name, entry] : model) {
          if (name == key) continue;
          held += entry.bytes;
          if (entry.pins == 0) by_age[entry.number] = name;
        }
        Victims want;
        for (const auto& [number, name] : by_age) {
          if (held <= capacity) break;
          held -= model[name].bytes;
          want.push_back(name);
        }
        const auto victims = VictimsFor(index, key, bytes, capacity);
        ASSERT_EQ(victims, held <= capacity ? std::optional(want) : std::nullopt);
      }
    }
    int64_t bytes = 0, pinned_bytes = 0, num_pinned = 0;
    for (const auto& [name, entry] : model) {
      bytes += entry.bytes;
      pinned_bytes += entry.pins > 0 ? entry.bytes : 0;
      num_pinned += entry.pins > 0 ? 1 : 0;
    }
    ASSERT_EQ(index.size(), std::ssize(model));
    ASSERT_EQ(index.bytes(), bytes);
    ASSERT_EQ(index.pinned_bytes(), pinned_bytes);
    ASSERT_EQ(index.num_pinned(), num_pinned);
    const EntryIndex::Entry* const found = index.Find(key);
    ASSERT_EQ(found != nullptr, model.contains(key));
    if (found != nullptr) {
      ASSERT_EQ(found->number, model[key].number);
    }
  }
}

}  // namespace
}  // namespace kvferry
