#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace kvferry {

// Finds entries by token ids: which entry shares the longest prefix with a query. A radix tree, so
// the cost of a call depends on the length of its tokens and not on the number of entries, and
// tokens are compared as they are: no hash can make two prompts look alike.
//
// An entry and a query match when one is a prefix of the other, as in vLLM's lookup buffer; the
// length of the shorter one is what matches. Not thread-safe.
class TokenTree {
 private:
  struct Node;

 public:
  using Tokens = std::vector<int32_t>;

  // What users derive their entries from. The tree owns those that are in it.
  class Entry {
   public:
    explicit Entry(Tokens tokens) : tokens_(std::move(tokens)) {}
    virtual ~Entry() = default;
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

    const Tokens& tokens() const { return tokens_; }
    // Only while it is in no tree.
    Tokens TakeTokens() { return std::move(tokens_); }

   private:
    friend class TokenTree;
    Tokens tokens_;
    Node* node_ = nullptr;  // Where it ends.
    Entry* older_ = nullptr;
    Entry* newer_ = nullptr;
    Entry* previous_same_ = nullptr;  // A ring of the entries that end there, from old to new.
    Entry* next_same_ = nullptr;
  };

  struct Match {
    Entry* entry = nullptr;
    int64_t num_tokens = 0;  // That match.
  };

  TokenTree();
  ~TokenTree();
  TokenTree(const TokenTree&) = delete;
  TokenTree& operator=(const TokenTree&) = delete;

  // An entry with at least one token. Several may have the same tokens. Where there is no memory it
  // throws and nothing has changed.
  void Insert(std::unique_ptr<Entry> entry);
  // Of an entry that is there. Never throws.
  std::unique_ptr<Entry> Erase(Entry* entry);

  // The entry of the longest match. Of entries with the same tokens the oldest; of several that go
  // on differently behind the end of the query one of the way that was there first, and any one
  // where there are many ways. Nothing when none matches.
  std::optional<Match> Longest(std::span<const int32_t> tokens) const;
  // The entry that was inserted first; null when there is none.
  Entry* Oldest() const { return oldest_; }

  int64_t size() const { return size_; }

 private:
  // Where entries end or part. The tree keeps no tokens: what leads to a node is what all entries
  // at and below it begin with, and one of them stands for them. So a descent looks at one token a
  // node, and compares the rest with one entry at its end, from the first token to the last.
  struct Node {
    struct Edge {
      int32_t token;
      Node* child;
    };

    Node* parent = nullptr;
    const int32_t* tokens = nullptr;  // Those of `entry`.
    Entry* entry = nullptr;           // The oldest of those that end here, or any one below.
    size_t end : 63 = 0;              // Tokens up to here.
    size_t ends_here : 1 = false;     // Entries do.
    using Many = absl::flat_hash_map<int32_t, Node*>;
    std::vector<Edge> few;  // Keeps its memory while there are many, for when there are few again.
    std::unique_ptr<Many> many;

    void StandFor(Entry* other);
    size_t num_children() const { return many ? many->size() : few.size(); }
    Node* AnyChild() const { return many ? many->begin()->second : few.front().child; }
    Node* Child(int32_t token) const;
    // Room for so many more, at most two: setting them cannot throw then. All that can is this.
    void MakeRoom(size_t children);
    // A child that there is room for, or another one in the place of one that is there.
    void SetChild(int32_t token, Node* child);
    void RemoveChild(int32_t token);
  };

  // `tokens` share `shared` with what is in the tree, which is where `node` ends or before, but
  // behind its parent.
  struct Place {
    Node* node;
    size_t shared;
  };
  Place Find(std::span<const int32_t> tokens) const;
  // Makes `upper`, which has room for it, the parent of the place's node, and end at the place.
  static void Split(const Place& place, Node* upper);
  void EndAt(Node* node, Entry* entry);
  void LeaveNode(Entry* entry);
  // Takes a node without entries out of the tree if it is not needed; returns the last one that is.
  Node* Tidy(Node* node);

  std::unique_ptr<Node> root_;
  Entry* oldest_ = nullptr;
  Entry* newest_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace kvferry
