#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "connector/store/kv_store.h"

namespace kvferry {

// What stands before a value in the keeping of somebody else, so that bytes which were cut short,
// altered or never ours are told from a value. Little-endian:
//
//   offset  bytes
//        0      8  "kvferry" and the version, 1
//        8      8  length of the value
//       16      8  XXH3-64 of the key and the value, one after the other
//
// The key is in the checksum: a value that ended up under another key is none.
inline constexpr int64_t kValueHeaderBytes = 24;
using ValueHeader = std::array<std::byte, kValueHeaderBytes>;

ValueHeader MakeValueHeader(std::string_view key, KvStore::ConstParts value);

// The length that the header in front of `bytes` says; none when there is no such header.
std::optional<int64_t> LengthInHeader(std::span<const std::byte> bytes);

// The value behind the header in `bytes`; none unless it is there to the last byte, and unaltered.
std::optional<std::span<const std::byte>> CheckedValue(std::string_view key,
                                                       std::span<const std::byte> bytes);

// Fills `parts`, which must have as many bytes.
void CopyToParts(std::span<const std::byte> bytes, KvStore::Parts parts);

}  // namespace kvferry
