#include "base/sha256.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <utility>

namespace kvferry {

struct Sha256::State {
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context{EVP_MD_CTX_new(),
                                                                  EVP_MD_CTX_free};
  std::unique_ptr<EVP_MD, decltype(&EVP_MD_free)> algorithm{
      EVP_MD_fetch(nullptr, "SHA256", nullptr), EVP_MD_free};
};

Sha256::Sha256(std::unique_ptr<State> state) : state_(std::move(state)) {}
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;
Sha256::~Sha256() = default;

absl::StatusOr<Sha256> Sha256::Create() {
  auto state = std::make_unique<State>();
  if (state->context == nullptr || state->algorithm == nullptr) {
    return absl::InternalError("OpenSSL has no SHA-256");
  }
  return Sha256(std::move(state));
}

absl::StatusOr<std::string> Sha256::Digest(std::string_view bytes) {
  std::string digest(32, '\0');
  if (EVP_DigestInit_ex(state_->context.get(), state_->algorithm.get(), nullptr) != 1 ||
      EVP_DigestUpdate(state_->context.get(), bytes.data(), bytes.size()) != 1 ||
      EVP_DigestFinal_ex(state_->context.get(), reinterpret_cast<unsigned char*>(digest.data()),
                         nullptr) != 1) {
    return absl::InternalError("OpenSSL refused to compute SHA-256");
  }
  return digest;
}

absl::StatusOr<std::array<uint8_t, 32>> HmacSha256(std::string_view key, std::string_view text) {
  std::array<uint8_t, 32> code{};
  unsigned int bytes = 0;
  const unsigned char* made =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(text.data()), text.size(), code.data(), &bytes);
  if (made == nullptr || bytes != code.size()) {
    return absl::InternalError("OpenSSL refused to compute HMAC-SHA-256");
  }
  return code;
}

}  // namespace kvferry
