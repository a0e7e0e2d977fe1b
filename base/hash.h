#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/strings/string_view.h"

namespace kvferry {

// XXH3, 64 bits: chunk checksums and fingerprints. Not a defence against an adversary.
uint64_t Xxh3(std::span<const std::byte> bytes);
uint64_t Xxh3(absl::string_view text);
// As of the parts one after another.
uint64_t Xxh3(std::span<const std::span<const std::byte>> parts);

// The same of parts that come one after another.
class Xxh3Stream {
 public:
  Xxh3Stream();
  ~Xxh3Stream();
  void Update(std::span<const std::byte> bytes);
  // Of all parts so far.
  uint64_t Digest() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace kvferry
