#include "base/utf8.h"

#include <gtest/gtest.h>

#include <random>

namespace kvferry {
namespace {

TEST(Utf8, WhatIsNoneIsReplaced) {
  EXPECT_EQ(ValidUtf8(""), "");
  using namespace std::string_literals;  // NOLINT(google-build-using-namespace): "..."s
  const std::string good = "a \"quoted\" \\ line\n\0\x7f"s + "äøß 中文 🚢";
  EXPECT_EQ(ValidUtf8(good), good);
  EXPECT_EQ(ValidUtf8("no \xff\xfe"), "no \ufffd\ufffd");
  EXPECT_EQ(ValidUtf8("cut \xc3"), "cut \ufffd");
  std::mt19937 random(1);
  for (int i = 0; i < 10000; ++i) {
    std::string bytes(random() % 20, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    const std::string clean = ValidUtf8(bytes);
    ASSERT_EQ(ValidUtf8(clean), clean);
  }
}

TEST(Utf8, PrefixesEndWithACharacter) {
  EXPECT_EQ(Utf8Prefix("abc", 3), "abc");
  EXPECT_EQ(Utf8Prefix("abc", 2), "ab");
  EXPECT_EQ(Utf8Prefix("abc", 0), "");
  EXPECT_EQ(Utf8Prefix("aä", 2), "a");
  EXPECT_EQ(Utf8Prefix("aäb", 3), "aä");
  for (size_t bytes = 1; bytes < 5; ++bytes) EXPECT_EQ(Utf8Prefix("a🚢b", bytes), "a");
  EXPECT_EQ(Utf8Prefix("a🚢b", 5), "a🚢");
  // Of what is none, no more is lost than a character has.
  EXPECT_EQ(Utf8Prefix("\x80\x80\x80\x80\x80\x80", 5).size(), 2);
}

}  // namespace
}  // namespace kvferry
