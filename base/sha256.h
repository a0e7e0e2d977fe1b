#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvferry {

// SHA-256 by OpenSSL, with what that looks up kept from one digest to the next. Not thread-safe.
class Sha256 {
 public:
  // INTERNAL if OpenSSL has none.
  static absl::StatusOr<Sha256> Create();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;
  ~Sha256();

  // 32 bytes; INTERNAL if OpenSSL refuses.
  absl::StatusOr<std::string> Digest(std::string_view bytes);

 private:
  struct State;
  explicit Sha256(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// HMAC-SHA-256 (RFC 2104): what only those can say of a text who have the key. INTERNAL as above.
absl::StatusOr<std::array<uint8_t, 32>> HmacSha256(std::string_view key, std::string_view text);

}  // namespace kvferry
