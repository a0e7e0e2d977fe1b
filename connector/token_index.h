#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"

namespace kvferry {

// Finds entries by token ids: which entry shares the longest prefix with a query. A radix tree, so
// the cost of a call depends on the length of its tokens and not on the number of entries, and
// tokens are compared as they are: no hash can make two prompts look alike.
//
// An entry and a query match when one is a prefix of the other, as in vLLM's lookup buffer; the
// length of the shorter one is what matches. Not thread-safe.
class TokenIndex {
 public:
  struct Match {
    uint64_t entry = 0;
    int64_t num_tokens = 0;  // That match.

    bool operator==(const Match&) const = default;
  };

  TokenIndex();
  ~TokenIndex();
  TokenIndex(const TokenIndex&) = delete;
  TokenIndex& operator=(const TokenIndex&) = delete;

  // Several entries may have the same tokens. INVALID_ARGUMENT without tokens, ALREADY_EXISTS when
  // `entry` is there; nothing changes then.
  absl::Status Insert(uint64_t entry, std::span<const int32_t> tokens);
  // NOT_FOUND when there is no such entry.
  absl::Status Erase(uint64_t entry);

  // The entry of the longest match. Of entries with the same tokens the oldest; of several that go
  // on differently behind the end of the query, any one. Nothing when none matches.
  std::optional<Match> Longest(std::span<const int32_t> tokens) const;
  // The entry that was inserted first.
  std::optional<uint64_t> Oldest() const;

  int64_t size() const { return static_cast<int64_t>(places_.size()); }

 private:
  // Tokens from the parent's end to here, and the entries that end here, the oldest first.
  struct Node {
    Node* parent = nullptr;
    std::vector<int32_t> edge;
    std::vector<uint64_t> entries;
    absl::flat_hash_map<int32_t, std::unique_ptr<Node>> children;  // By first token of their edge.
  };
  struct Place {
    Node* node;
    std::list<uint64_t>::iterator age;
  };

  // How far `tokens` lead: all of them but `rest`, to a node whose edge is shared up to `on_edge`
  // (the whole edge, unless the tokens end or differ inside it).
  struct Descent {
    Node* node;
    size_t on_edge;
    std::span<const int32_t> rest;
  };
  Descent Descend(std::span<const int32_t> tokens) const;
  // Makes a node where `descent` stopped inside an edge.
  static Node* Split(const Descent& descent);
  static Node* AddChild(Node* parent, std::span<const int32_t> edge);
  // Takes a node without entries out of the tree, or joins it with its only child.
  void Tidy(Node* node);

  std::unique_ptr<Node> root_;
  std::list<uint64_t> ages_;  // All entries, the oldest first.
  absl::flat_hash_map<uint64_t, Place> places_;
};

}  // namespace kvferry
