#include "connector/token_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

namespace kvferry {
namespace {

using Tokens = std::vector<int32_t>;
using Match = std::pair<uint64_t, int64_t>;  // The entry, and how many tokens match.

// Entries are numbers here.
class Index {
 public:
  void Insert(uint64_t entry, const Tokens& tokens) {
    auto numbered = std::make_unique<Numbered>(entry, tokens);
    entries_[entry] = numbered.get();
    tree_.Insert(std::move(numbered));
  }
  void Erase(uint64_t entry) {
    tree_.Erase(entries_.at(entry));
    entries_.erase(entry);
  }
  std::optional<Match> Longest(const Tokens& tokens) const {
    const auto match = tree_.Longest(tokens);
    if (!match) return std::nullopt;
    return Match{NumberOf(match->entry), match->num_tokens};
  }
  std::optional<uint64_t> Oldest() const {
    if (tree_.Oldest() == nullptr) return std::nullopt;
    return NumberOf(tree_.Oldest());
  }
  int64_t size() const { return tree_.size(); }

 private:
  struct Numbered : TokenTree::Entry {
    Numbered(uint64_t number, const Tokens& tokens) : Entry(tokens), number(number) {}
    const uint64_t number;
  };
  static uint64_t NumberOf(const TokenTree::Entry* entry) {
    return static_cast<const Numbered*>(entry)->number;
  }

  TokenTree tree_;
  std::map<uint64_t, TokenTree::Entry*> entries_;
};

TEST(TokenTrees, ShorterAndLongerEntriesMatch) {
  Index index;
  index.Insert(1, Tokens{5, 6, 7});
  index.Insert(2, Tokens{5, 6, 7, 8, 9});
  EXPECT_EQ(index.Longest(Tokens{5, 6, 7, 8, 1}), (Match{1, 3}));  // 2 differs at its end.
  EXPECT_EQ(index.Longest(Tokens{5, 6, 7, 8}), (Match{2, 4}));     // The query is shorter.
  EXPECT_EQ(index.Longest(Tokens{5, 6, 7, 8, 9, 10}), (Match{2, 5}));
  EXPECT_EQ(index.Longest(Tokens{5, 6, 7}), (Match{1, 3}));
  EXPECT_EQ(index.Longest(Tokens{5, 6, 1}), std::nullopt);
  EXPECT_EQ(index.Longest(Tokens{4}), std::nullopt);
  EXPECT_EQ(index.Longest(Tokens{}), std::nullopt);
}

// Within the tolerance of a comparison of floats, as it was once done, these ids are equal.
TEST(TokenTrees, NeighbouringTokenIdsAreDifferent) {
  Index index;
  index.Insert(1, Tokens{100000, 150000});
  EXPECT_EQ(index.Longest(Tokens{100001, 150000}), std::nullopt);
  EXPECT_EQ(index.Longest(Tokens{100000, 150001}), std::nullopt);
  EXPECT_EQ(index.Longest(Tokens{100000, 150000}), (Match{1, 2}));
}

TEST(TokenTrees, TheOldestOfEqualsAndOfAll) {
  Index index;
  EXPECT_EQ(index.Oldest(), std::nullopt);
  for (const uint64_t entry : {30, 10, 20}) index.Insert(entry, Tokens{1, 2});
  EXPECT_EQ(index.Oldest(), 30);
  EXPECT_EQ(index.Longest(Tokens{1, 2}), (Match{30, 2}));
  index.Erase(30);
  EXPECT_EQ(index.Oldest(), 10);
  EXPECT_EQ(index.Longest(Tokens{1}), (Match{10, 1}));
}

// Of several that go on differently behind the query, while there are few.
TEST(TokenTrees, TheOldestOfThoseThatGoOnDifferently) {
  Index index;
  for (int32_t last = 3; last <= 6; ++last) {
    index.Insert(static_cast<uint64_t>(last), Tokens{1, 2, last});
  }
  for (uint64_t entry = 3; entry <= 6; ++entry) {
    EXPECT_EQ(index.Longest(Tokens{1, 2}), (Match{entry, 2}));
    index.Erase(entry);
  }
}

// Dozens of ways to go on, growing and shrinking, at the root and below.
TEST(TokenTrees, ManyChildren) {
  std::mt19937_64 random(6);
  Index index;
  std::vector<Tokens> entries;
  entries.reserve(300);
  for (int32_t i = 0; i < 300; ++i) entries.push_back({i % 5 == 0 ? 1000 + i : 7, i, i + 1});
  for (int round = 0; round < 20; ++round) {
    std::vector<uint64_t> order(entries.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, random);
    for (const uint64_t at : order) index.Insert(at, entries[at]);
    std::ranges::shuffle(order, random);
    while (!order.empty()) {
      EXPECT_TRUE(index.Longest(Tokens{7}).has_value() ==
                  std::ranges::any_of(order, [](uint64_t at) { return at % 5 != 0; }));
      const uint64_t at = order.back();
      ASSERT_EQ(index.Longest(entries[at]), (Match{at, 3}));
      index.Erase(at);
      ASSERT_EQ(index.Longest(entries[at]), std::nullopt);
      order.pop_back();
    }
    ASSERT_EQ(index.size(), 0);
  }
}

TEST(TokenTrees, AVeryDeepTreeIsFreed) {
  Index index;
  Tokens tokens;
  for (int32_t i = 0; i < 100000; ++i) {
    tokens.push_back(i);
    if (i % 1000 == 0) continue;
    if (i >= 3000 && i <= 97000) continue;
    index.Insert(static_cast<uint64_t>(i), tokens);
  }
  EXPECT_EQ(index.Longest(tokens)->second, 100000);
}

// All that the tree may not know: entries in a list, compared one by one.
class Model {
 public:
  std::map<uint64_t, Tokens> entries;  // Entries are numbered by age.

  static int64_t MatchLength(const Tokens& a, const Tokens& b) {
    const size_t n = std::min(a.size(), b.size());
    return std::equal(a.begin(), a.begin() + n, b.begin()) ? static_cast<int64_t>(n) : 0;
  }
  int64_t Longest(const Tokens& query) const {
    int64_t longest = 0;
    for (const auto& [entry, tokens] : entries) {
      longest = std::max(longest, MatchLength(tokens, query));
    }
    return longest;
  }
};

TEST(TokenTrees, RandomCallsAgreeWithAListComparedOneByOne) {
  std::mt19937_64 random(8);
  const auto upto = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  Index index;
  Model model;
  uint64_t next = 1;
  // Few tokens and few shapes, so that prefixes are shared at every length.
  const auto tokens = [&] {
    Tokens made(static_cast<size_t>(1 + upto(9)));
    for (int32_t& token : made) token = static_cast<int32_t>(upto(upto(3) == 0 ? 3 : 2));
    return made;
  };
  for (int i = 0; i < 1000000; ++i) {
    const int64_t what = upto(10);
    const auto full = static_cast<int64_t>(model.entries.size()) > 12;
    if (what < 3 && !full) {
      const Tokens made = tokens();
      index.Insert(next, made);
      model.entries[next++] = made;
    } else if (what < 6 && !model.entries.empty()) {
      auto victim = model.entries.begin();
      std::advance(victim, upto(static_cast<int64_t>(model.entries.size())));
      index.Erase(victim->first);
      model.entries.erase(victim);
    } else {
      const Tokens query = tokens();
      const std::optional<Match> match = index.Longest(query);
      ASSERT_EQ(match ? match->second : 0, model.Longest(query));
      if (match) {
        const Tokens& found = model.entries.at(match->first);
        ASSERT_EQ(Model::MatchLength(found, query), match->second);
        for (const auto& [entry, same] : model.entries) {
          ASSERT_TRUE(same != found || match->first <= entry) << "not the oldest of its equals";
        }
      }
    }
    ASSERT_EQ(index.size(), static_cast<int64_t>(model.entries.size()));
    ASSERT_EQ(index.Oldest().value_or(0), model.entries.empty() ? 0 : model.entries.begin()->first);
  }
}

}  // namespace
}  // namespace kvferry
