#include "connector/store/block_key.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <random>
#include <set>

#include "absl/strings/escaping.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
using Tokens = std::vector<int32_t>;

KeyScope Scope() { return {"m@1", KvLayout::Mha(2, 4, 3, 8, DType::kBFloat16), 0, ""}; }

std::vector<std::string> Hex(std::vector<std::string> keys) {
  for (std::string& key : keys) key = absl::BytesToHexString(key);
  return keys;
}

std::vector<std::string> Keys(const Tokens& tokens, const KeyScope& scope = Scope()) {
  return Must(BlockKeys(tokens, 4, scope));
}

// Computed with Python's hashlib and struct from the formula in the header.
TEST(BlockKeys, KnownAnswers) {
  EXPECT_EQ(Hex(Keys({1, 2, 3, 4, 5, 6, 7, 8, 9})),
            (std::vector<std::string>{
                "5156c2f24014b36890cf71209cf04a6558944ede37c3498c6e8e34ae29ecff19",
                "ce5a4c0a23dcd535cb0bee930c7ce08157cb1bdc7a43c210bbca5064d6b5bcd0"}));
  KeyScope mla = {std::string("a\0b", 3), KvLayout::Mla(32, 16, 576, DType::kFloat32), 7,
                  "tenant 1"};
  mla.layout.page_format = "HND";
  mla.layout.tensors.push_back({"index_k", 1, 128, DType::kFloat8E4M3});
  EXPECT_EQ(Hex(Must(BlockKeys(Tokens{-1, INT32_MAX, INT32_MIN, 128000}, 2, mla))),
            (std::vector<std::string>{
                "1fcb514cd14761324f4d186a216fd3cf79e43dbd843de25f541792e2360c8abc",
                "4bc2e8d75e028108a9432e14bd7dbb4226c8491ae203902b53c27bb5d7a78016"}));
}

TEST(BlockKeys, OnlyFullBlocksHaveKeys) {
  EXPECT_TRUE(Keys({}).empty());
  EXPECT_TRUE(Keys({1, 2, 3}).empty());
  EXPECT_EQ(Keys({1, 2, 3, 4}).size(), 1);
  EXPECT_EQ(Keys({1, 2, 3, 4, 5, 6, 7}), Keys({1, 2, 3, 4}));
  EXPECT_EQ(Keys({1, 2, 3, 4})[0].size(), 32);
}

TEST(BlockKeys, PromptsShareTheKeysOfTheirCommonPrefix) {
  const auto a = Keys({1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1, 1});
  const auto b = Keys({1, 2, 3, 4, 5, 6, 7, 9, 1, 1, 1, 1});
  EXPECT_EQ(a[0], b[0]);
  EXPECT_NE(a[1], b[1]);
  EXPECT_NE(a[2], b[2]);  // The same tokens, behind others.
  EXPECT_NE(Keys({1, 2, 3, 4, 1, 2, 3, 4})[0], Keys({1, 2, 3, 4, 1, 2, 3, 4})[1]);
}

TEST(BlockKeys, AParentGoesOn) {
  Tokens tokens(40);
  std::iota(tokens.begin(), tokens.end(), 100000);
  const auto whole = Keys(tokens);
  for (size_t blocks = 1; blocks < whole.size(); ++blocks) {
    const auto rest =
        Must(BlockKeys(std::span(tokens).subspan(4 * blocks), 4, Scope(), whole[blocks - 1]));
    EXPECT_EQ(rest, std::vector<std::string>(whole.begin() + static_cast<ptrdiff_t>(blocks),
                                             whole.end()));
  }
}

TEST(BlockKeys, EveryFieldOfTheScopeChangesEveryKey) {
  const std::vector<std::function<void(KeyScope&)>> changes = {
      [](KeyScope&) {},
      [](KeyScope& s) { s.model = "m@2"; },
      [](KeyScope& s) { s.partition = 1; },
      [](KeyScope& s) { s.salt = "x"; },
      [](KeyScope& s) { s.layout.num_layers = 3; },
      [](KeyScope& s) { s.layout.page_size = 5; },
      [](KeyScope& s) { s.layout.dtype = DType::kFloat16; },
      [](KeyScope& s) { s.layout.page_format = "HND"; },
      [](KeyScope& s) { s.layout.tensors[0].name = "q"; },
      [](KeyScope& s) { s.layout.tensors[0].num_heads = 4; },
      [](KeyScope& s) { s.layout.tensors[1].head_dim = 9; },
      [](KeyScope& s) { s.layout.tensors[1].dtype = DType::kUint8; },
      [](KeyScope& s) { s.layout.tensors.pop_back(); },
      // Fields do not run into one another.
      [](KeyScope& s) { s.model = "m@", s.salt = "1"; },
  };
  std::set<std::string> seen;
  for (const auto& change : changes) {
    KeyScope scope = Scope();
    change(scope);
    const auto keys = Keys({1, 2, 3, 4, 5, 6, 7, 8}, scope);
    seen.insert(keys.begin(), keys.end());
    const auto on = Must(BlockKeys(Tokens{5, 6, 7, 8}, 4, scope, Keys({1, 2, 3, 4})[0]));
    seen.insert(on[0]);  // Of the parent of another scope; the scope's own for the first change.
  }
  EXPECT_EQ(seen.size(), 3 * changes.size() - 1);
}

// Bits of tokens, block lengths, and where blocks are cut: nothing collides.
TEST(BlockKeys, RandomPromptsHaveKeysOfTheirOwn) {
  std::mt19937_64 random(5);
  std::set<Tokens> prompts;
  std::set<std::string> keys;
  for (int i = 0; i < 20000; ++i) {
    Tokens prompt(4 * (1 + random() % 3));
    for (int32_t& token : prompt) token = static_cast<int32_t>(1 << (8 * (random() % 4)));
    const auto made = Keys(prompt);
    for (size_t block = 0; block < made.size(); ++block) {
      prompts.insert(
          Tokens(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(4 * block + 4)));
    }
    keys.insert(made.begin(), made.end());
  }
  EXPECT_EQ(keys.size(), prompts.size());
  EXPECT_NE(Must(BlockKeys(Tokens{1, 2}, 2, Scope()))[0],
            Must(BlockKeys(Tokens{1, 2}, 1, Scope()))[1]);
}

TEST(BlockKeys, BadArgumentsAreNamed) {
  const auto keys = [](int64_t page_size, const KeyScope& scope,
                       std::optional<std::string_view> parent = std::nullopt) {
    return BlockKeys(Tokens{1, 2, 3}, page_size, scope, parent);
  };
  EXPECT_TRUE(Fails(keys(0, Scope()), kInvalid, "page_size is 0", "1048576"));
  EXPECT_TRUE(Fails(keys(INT64_MIN, Scope()), kInvalid, "page_size is -9"));
  EXPECT_TRUE(Fails(keys((1 << 20) + 1, Scope()), kInvalid, "page_size is 1048577"));
  KeyScope scope = Scope();
  scope.model = "";
  EXPECT_TRUE(Fails(keys(4, scope), kInvalid, "model is empty"));
  scope = Scope();
  scope.partition = -1;
  EXPECT_TRUE(Fails(keys(4, scope), kInvalid, "partition is -1"));
  scope = Scope();
  scope.layout.num_layers = 0;
  EXPECT_TRUE(Fails(keys(4, scope), kInvalid, "num_layers is 0"));
  EXPECT_TRUE(Fails(keys(4, Scope(), ""), kInvalid, "parent has 0 bytes", "32"));
  EXPECT_TRUE(Fails(keys(4, Scope(), std::string(33, 'x')), kInvalid, "parent has 33 bytes"));
}

}  // namespace
}  // namespace kvferry
