#include "connector/token_tree.h"

#include <algorithm>
#include <cstring>

namespace kvferry {
namespace {

// More children than these are found by hash.
constexpr size_t kFewChildren = 16;

// How many of the first `most` tokens are equal. By blocks, which memcmp() compares many times as
// fast as a loop does, and which the processor fetches ahead of.
size_t NumEqual(const int32_t* a, const int32_t* b, size_t most) {
  constexpr size_t kBlock = 64;
  size_t equal = 0;
  while (equal + kBlock <= most && std::memcmp(a + equal, b + equal, sizeof(*a) * kBlock) == 0) {
    equal += kBlock;
  }
  return static_cast<size_t>(std::mismatch(a + equal, a + most, b + equal).first - a);
}

}  // namespace

// ---------------------------------------------------------------- nodes

void TokenTree::Node::StandFor(Entry* other) {
  entry = other;
  tokens = other->tokens_.data();
}

TokenTree::Node* TokenTree::Node::Child(int32_t token) const {
  if (many) {
    const auto found = many->find(token);
    return found == many->end() ? nullptr : found->second;
  }
  for (const Edge& edge : few) {
    if (edge.token == token) return edge.child;
  }
  return nullptr;
}

void TokenTree::Node::MakeRoom(size_t children) {
  if (!many && few.size() + children <= kFewChildren) {
    if (few.size() + children > few.capacity()) few.reserve(std::max(2 * few.size(), children));
    return;
  }
  // A map that is at most three quarters full never grows. One that did, and found no memory, could
  // not even be destroyed; one that finds none when it is made is none.
  const size_t needed = num_children() + children;
  if (many && 4 * needed <= 3 * many->capacity()) return;
  auto more = std::make_unique<Many>(2 * needed);
  if (many) {
    more->insert(many->begin(), many->end());
  } else {
    for (const Edge& edge : few) more->emplace(edge.token, edge.child);
    few.clear();
  }
  many = std::move(more);
}

void TokenTree::Node::SetChild(int32_t token, Node* child) {
  child->parent = this;
  if (many) {
    (*many)[token] = child;
    return;
  }
  const auto found = std::ranges::find(few, token, &Edge::token);
  if (found != few.end()) {
    found->child = child;
  } else {
    few.push_back({token, child});
  }
}

void TokenTree::Node::RemoveChild(int32_t token) {
  if (!many) {
    few.erase(std::ranges::find(few, token, &Edge::token));  // The others stay in their order.
    return;
  }
  many->erase(token);
  if (many->size() > kFewChildren / 2) return;
  for (const auto& [first, child] : *many) few.push_back({first, child});
  many.reset();
}

// ---------------------------------------------------------------- the tree

TokenTree::TokenTree() : root_(std::make_unique<Node>()) {}

TokenTree::~TokenTree() {
  while (oldest_ != nullptr) Erase(oldest_);
}

TokenTree::Place TokenTree::Find(std::span<const int32_t> tokens) const {
  Node* node = root_.get();
  while (node->end < tokens.size()) {
    Node* const child = node->Child(tokens[node->end]);
    if (child == nullptr) break;
    node = child;
  }
  if (node == root_.get()) return {node, 0};
  // Wanted when the tokens have been compared; an entry lies in two cache lines.
  __builtin_prefetch(node->entry);
  __builtin_prefetch(&node->entry->newer_);
  const size_t shared =
      NumEqual(tokens.data(), node->tokens, std::min<size_t>(node->end, tokens.size()));
  while (node->parent != nullptr && node->parent->end >= shared) node = node->parent;
  return {node, shared};
}

void TokenTree::Split(const Place& place, Node* upper) {
  Node* const lower = place.node;
  upper->end = place.shared;
  upper->StandFor(lower->entry);
  lower->parent->SetChild(lower->tokens[lower->parent->end], upper);
  upper->SetChild(lower->tokens[place.shared], lower);
}

void TokenTree::EndAt(Node* node, Entry* entry) {
  entry->node_ = node;
  entry->previous_same_ = entry->next_same_ = entry;
  if (!node->ends_here) {
    node->ends_here = true;
    node->StandFor(entry);
    return;
  }
  Entry* const first = node->entry;
  entry->next_same_ = first;
  entry->previous_same_ = first->previous_same_;
  entry->previous_same_->next_same_ = entry;
  first->previous_same_ = entry;
}

void TokenTree::Insert(std::unique_ptr<Entry> owned) {
  const Tokens& tokens = owned->tokens_;
  const Place place = Find(tokens);
  const bool splits = place.node->end != place.shared;
  const bool grows = place.shared < tokens.size();
  // All the memory that it takes, before anything changes.
  auto upper = splits ? std::make_unique<Node>() : nullptr;
  auto leaf = grows ? std::make_unique<Node>() : nullptr;
  Node* node = splits ? upper.get() : place.node;
  if (splits || grows) node->MakeRoom((splits ? 1 : 0) + (grows ? 1 : 0));

  if (splits) Split(place, upper.release());
  if (grows) {
    leaf->end = tokens.size();
    node->SetChild(tokens[place.shared], leaf.get());
    node = leaf.release();
  }
  Entry* const entry = owned.release();
  EndAt(node, entry);
  entry->older_ = newest_;
  (newest_ != nullptr ? newest_->newer_ : oldest_) = entry;
  newest_ = entry;
  ++size_;
}

void TokenTree::LeaveNode(Entry* entry) {
  Node* const node = entry->node_;
  if (entry->next_same_ == entry) {
    node->ends_here = false;
    return;
  }
  entry->previous_same_->next_same_ = entry->next_same_;
  entry->next_same_->previous_same_ = entry->previous_same_;
  if (node->entry == entry) node->StandFor(entry->next_same_);
}

TokenTree::Node* TokenTree::Tidy(Node* node) {
  if (!node->ends_here && node->num_children() == 0) {
    const std::unique_ptr<Node> gone(node);
    node = node->parent;
    node->RemoveChild(gone->tokens[node->end]);
  }
  if (node == root_.get() || node->ends_here || node->num_children() > 1) return node;
  const std::unique_ptr<Node> gone(node);
  Node* const child = node->AnyChild();
  node = node->parent;
  node->SetChild(child->tokens[node->end], child);
  return node;
}

std::unique_ptr<TokenTree::Entry> TokenTree::Erase(Entry* entry) {
  // First: its neighbours' memory is on its way while the rest is done.
  (entry->older_ != nullptr ? entry->older_->newer_ : oldest_) = entry->newer_;
  (entry->newer_ != nullptr ? entry->newer_->older_ : newest_) = entry->older_;
  --size_;
  LeaveNode(entry);
  // From below, so that what a node's child stands for is there.
  for (Node* node = Tidy(entry->node_); node != root_.get(); node = node->parent) {
    if (node->entry == entry) node->StandFor(node->AnyChild()->entry);
  }
  return std::unique_ptr<Entry>(entry);
}

std::optional<TokenTree::Match> TokenTree::Longest(std::span<const int32_t> tokens) const {
  if (tokens.empty() || size_ == 0) return std::nullopt;
  const auto [node, shared] = Find(tokens);
  if (shared == tokens.size()) {
    // Everything at and below the node begins with the query.
    return Match{node->entry->node_->entry, static_cast<int64_t>(shared)};
  }
  // Else what ended on the way here, the longest first.
  const Node* on_way = node->end > shared ? node->parent : node;
  while (on_way != nullptr && !on_way->ends_here) on_way = on_way->parent;
  if (on_way == nullptr) return std::nullopt;
  return Match{on_way->entry, static_cast<int64_t>(on_way->end)};
}

}  // namespace kvferry
