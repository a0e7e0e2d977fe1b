#include "base/sha256.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/escaping.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// FIPS 180-4's example, and the empty text.
TEST(Sha256, OfTexts) {
  Sha256 sha256 = Must(Sha256::Create());
  EXPECT_EQ(absl::BytesToHexString(Must(sha256.Digest("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(absl::BytesToHexString(Must(sha256.Digest(""))),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

// RFC 4231, test case 2.
TEST(Sha256, WithAKey) {
  const auto code = Must(HmacSha256("Jefe", "what do ya want for nothing?"));
  EXPECT_EQ(absl::BytesToHexString({reinterpret_cast<const char*>(code.data()), code.size()}),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

}  // namespace
}  // namespace kvferry
