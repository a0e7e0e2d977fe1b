#include "connector/store/value_header.h"

#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "base/hash.h"

namespace kvferry {
namespace {

static_assert(std::endian::native == std::endian::little, "headers are copied as they lie");

constexpr std::array<char, 8> kMagic = {'k', 'v', 'f', 'e', 'r', 'r', 'y', 1};

uint64_t NumberAt(std::span<const std::byte> bytes, size_t offset) {
  uint64_t number = 0;
  std::memcpy(&number, bytes.data() + offset, sizeof(number));
  return number;
}

uint64_t Checksum(std::string_view key, KvStore::ConstParts value) {
  std::vector<std::span<const std::byte>> parts = {std::as_bytes(std::span(key))};
  parts.insert(parts.end(), value.begin(), value.end());
  return Xxh3(parts);
}

}  // namespace

ValueHeader MakeValueHeader(std::string_view key, KvStore::ConstParts value) {
  const auto length = static_cast<uint64_t>(BytesOf(value));
  const uint64_t checksum = Checksum(key, value);
  ValueHeader header;
  std::memcpy(header.data(), kMagic.data(), kMagic.size());
  std::memcpy(header.data() + 8, &length, sizeof(length));
  std::memcpy(header.data() + 16, &checksum, sizeof(checksum));
  return header;
}

std::optional<int64_t> LengthInHeader(std::span<const std::byte> bytes) {
  if (bytes.size() < kValueHeaderBytes) return std::nullopt;
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) return std::nullopt;
  const uint64_t length = NumberAt(bytes, 8);
  if (length < 1 || length > std::numeric_limits<int64_t>::max()) return std::nullopt;
  return static_cast<int64_t>(length);
}

std::optional<std::span<const std::byte>> CheckedValue(std::string_view key,
                                                       std::span<const std::byte> bytes) {
  const std::optional<int64_t> length = LengthInHeader(bytes);
  if (!length) return std::nullopt;
  const std::span<const std::byte> value = bytes.subspan(kValueHeaderBytes);
  if (static_cast<int64_t>(value.size()) != *length) return std::nullopt;
  if (Checksum(key, {&value, 1}) != NumberAt(bytes, 16)) return std::nullopt;
  return value;
}

void CopyToParts(std::span<const std::byte> bytes, KvStore::Parts parts) {
  for (const std::span<std::byte> part : parts) {
    if (part.empty()) continue;
    std::memcpy(part.data(), bytes.data(), part.size());
    bytes = bytes.subspan(part.size());
  }
}

}  // namespace kvferry
