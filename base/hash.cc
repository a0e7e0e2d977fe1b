#include "base/hash.h"

// The state of a hash of parts, on the stack rather than from malloc.
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

namespace kvferry {

uint64_t Xxh3(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }
uint64_t Xxh3(absl::string_view text) { return XXH3_64bits(text.data(), text.size()); }

uint64_t Xxh3(std::span<const std::span<const std::byte>> parts) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (const std::span<const std::byte> part : parts) {
    XXH3_64bits_update(&state, part.data(), part.size());
  }
  return XXH3_64bits_digest(&state);
}

struct Xxh3Stream::State {
  XXH3_state_t xxh3;
};
Xxh3Stream::Xxh3Stream() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh3); }
Xxh3Stream::~Xxh3Stream() = default;
void Xxh3Stream::Update(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size());
}
uint64_t Xxh3Stream::Digest() const { return XXH3_64bits_digest(&state_->xxh3); }

}  // namespace kvferry
