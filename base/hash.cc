#include "base/hash.h"

#include <xxhash.h>

namespace kvferry {

uint64_t Xxh3(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }
uint64_t Xxh3(absl::string_view text) { return XXH3_64bits(text.data(), text.size()); }

}  // namespace kvferry
