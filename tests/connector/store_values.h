#pragma once

// Values that say whose they are: from the bytes alone a test can tell which key and which put
// they came from, and whether they are whole.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "connector/store/kv_store.h"
#include "tests/support/wait_for.h"

namespace kvferry {

using Bytes = std::vector<std::byte>;

// Word i of the value of (key, version): the key, the version, then a pattern of both and i.
inline uint64_t ValueWord(uint64_t key, uint64_t version, uint64_t i) {
  if (i < 2) return i == 0 ? key : version;
  uint64_t word = (key * 31 + version) * 0x9e3779b97f4a7c15 + i;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
  return word ^ (word >> 31);
}

inline Bytes ValueOf(uint64_t key, uint64_t version, int64_t bytes) {
  Bytes value(static_cast<size_t>(bytes));
  for (size_t at = 0; at < value.size(); at += sizeof(uint64_t)) {
    const uint64_t word = ValueWord(key, version, at / sizeof(uint64_t));
    std::memcpy(value.data() + at, &word, std::min(sizeof(word), value.size() - at));
  }
  return value;
}

inline absl::Status Put(KvStore& store, std::string_view key, const Bytes& value,
                        Deadline deadline = Soon()) {
  const std::span<const std::byte> part = value;
  return store.Put(key, {&part, 1}, deadline);
}

// How long the values of WholeValue() are: several lengths, and many versions of each.
inline int64_t WholeValueBytes(uint64_t version) {
  return 16 + static_cast<int64_t>(version % 4) * 3001;
}
inline Bytes WholeValue(uint64_t key, uint64_t version) {
  return ValueOf(key, version, WholeValueBytes(version));
}
// Whether these are the bytes of WholeValue(key, v) for any v.
inline bool IsWholeValue(uint64_t key, std::span<const std::byte> value) {
  if (value.size() < 16) return false;
  uint64_t version = 0;
  std::memcpy(&version, value.data() + 8, sizeof(version));
  return std::ranges::equal(value, WholeValue(key, version));
}

// The bytes as up to 9 parts that follow one another, empty ones among them.
template <typename Byte>
std::vector<std::span<Byte>> SplitAtRandom(std::span<Byte> bytes, std::mt19937_64& random) {
  std::vector<size_t> cuts(random() % 9);
  for (size_t& cut : cuts) cut = random() % (bytes.size() + 1);
  cuts.push_back(bytes.size());
  std::ranges::sort(cuts);
  std::vector<std::span<Byte>> parts;
  size_t begin = 0;
  for (const size_t cut : cuts) {
    parts.push_back(bytes.subspan(begin, cut - begin));
    begin = cut;
  }
  return parts;
}

}  // namespace kvferry
