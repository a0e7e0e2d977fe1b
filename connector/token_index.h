#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>

#include "absl/status/status.h"
#include "connector/token_tree.h"

namespace kvferry {

// A TokenTree whose entries are numbers, which the caller chooses. Not thread-safe.
class TokenIndex {
 public:
  struct Match {
    uint64_t entry = 0;
    int64_t num_tokens = 0;  // That match.

    bool operator==(const Match&) const = default;
  };

  // Several entries may have the same tokens. INVALID_ARGUMENT without tokens, ALREADY_EXISTS when
  // `entry` is there; nothing changes then.
  absl::Status Insert(uint64_t entry, std::span<const int32_t> tokens);
  // NOT_FOUND when there is no such entry.
  absl::Status Erase(uint64_t entry);

  // As of the tree.
  std::optional<Match> Longest(std::span<const int32_t> tokens) const;
  std::optional<uint64_t> Oldest() const;

  int64_t size() const { return tree_.size(); }

 private:
  struct Numbered : TokenTree::Entry {
    Numbered(uint64_t number, std::span<const int32_t> tokens)
        : Entry({tokens.begin(), tokens.end()}), number(number) {}
    const uint64_t number;
  };
  static uint64_t NumberOf(const TokenTree::Entry* entry) {
    return static_cast<const Numbered*>(entry)->number;
  }

  TokenTree tree_;
  // Not Abseil's, which a growth without memory breaks.
  std::unordered_map<uint64_t, TokenTree::Entry*> entries_;
};

}  // namespace kvferry
