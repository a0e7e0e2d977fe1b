#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/strings/string_view.h"

namespace kvferry {

// XXH3, 64 bits: chunk checksums and fingerprints. Not a defence against an adversary.
uint64_t Xxh3(std::span<const std::byte> bytes);
uint64_t Xxh3(absl::string_view text);
// As of the parts one after another.
uint64_t Xxh3(std::span<const std::span<const std::byte>> parts);

}  // namespace kvferry
