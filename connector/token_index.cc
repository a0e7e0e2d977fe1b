#include "connector/token_index.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvferry {

TokenIndex::TokenIndex() : root_(std::make_unique<Node>()) {}

TokenIndex::~TokenIndex() {
  // From the leaves up: a chain of nodes, each in its parent, would be freed by recursion.
  std::vector<std::unique_ptr<Node>> nodes;
  nodes.push_back(std::move(root_));
  while (!nodes.empty()) {
    const std::unique_ptr<Node> node = std::move(nodes.back());
    nodes.pop_back();
    for (auto& [token, child] : node->children) nodes.push_back(std::move(child));
  }
}

TokenIndex::Descent TokenIndex::Descend(std::span<const int32_t> tokens) const {
  Node* node = root_.get();
  while (!tokens.empty()) {
    const auto found = node->children.find(tokens[0]);
    if (found == node->children.end()) break;
    node = found->second.get();
    const auto differ =
        std::mismatch(node->edge.begin(), node->edge.end(), tokens.begin(), tokens.end());
    const auto shared = static_cast<size_t>(differ.first - node->edge.begin());
    tokens = tokens.subspan(shared);
    if (shared < node->edge.size()) return {node, shared, tokens};
  }
  return {node, node->edge.size(), tokens};
}

TokenIndex::Node* TokenIndex::AddChild(Node* parent, std::span<const int32_t> edge) {
  auto child = std::make_unique<Node>();
  child->parent = parent;
  child->edge.assign(edge.begin(), edge.end());
  Node* const added = child.get();
  parent->children[edge[0]] = std::move(child);
  return added;
}

TokenIndex::Node* TokenIndex::Split(const Descent& descent) {
  Node* const lower = descent.node;
  if (descent.on_edge == lower->edge.size()) return lower;
  Node* const parent = lower->parent;
  std::unique_ptr<Node> owned = std::move(parent->children[lower->edge[0]]);
  Node* const upper = AddChild(parent, std::span(lower->edge).first(descent.on_edge));
  lower->edge.erase(lower->edge.begin(),
                    lower->edge.begin() + static_cast<ptrdiff_t>(descent.on_edge));
  lower->parent = upper;
  upper->children[lower->edge[0]] = std::move(owned);
  return upper;
}

absl::Status TokenIndex::Insert(uint64_t entry, std::span<const int32_t> tokens) {
  if (tokens.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("token index: entry ", entry, " has no tokens"));
  }
  if (places_.contains(entry)) {
    return absl::AlreadyExistsError(absl::StrCat("token index: entry ", entry, " is there"));
  }
  const Descent descent = Descend(tokens);
  Node* node = Split(descent);
  if (!descent.rest.empty()) node = AddChild(node, descent.rest);
  node->entries.push_back(entry);
  places_[entry] = {node, ages_.insert(ages_.end(), entry)};
  return absl::OkStatus();
}

void TokenIndex::Tidy(Node* node) {
  while (node != root_.get() && node->entries.empty() && node->children.empty()) {
    Node* const parent = node->parent;
    parent->children.erase(node->edge[0]);
    node = parent;
  }
  if (node == root_.get() || !node->entries.empty() || node->children.size() != 1) return;
  std::unique_ptr<Node> child = std::move(node->children.begin()->second);
  child->edge.insert(child->edge.begin(), node->edge.begin(), node->edge.end());
  child->parent = node->parent;
  // Frees `node`.
  node->parent->children[child->edge[0]] = std::move(child);
}

absl::Status TokenIndex::Erase(uint64_t entry) {
  const auto found = places_.find(entry);
  if (found == places_.end()) {
    return absl::NotFoundError(absl::StrCat("token index: no entry ", entry));
  }
  Node* const node = found->second.node;
  ages_.erase(found->second.age);
  places_.erase(found);
  node->entries.erase(std::find(node->entries.begin(), node->entries.end(), entry));
  Tidy(node);
  return absl::OkStatus();
}

std::optional<TokenIndex::Match> TokenIndex::Longest(std::span<const int32_t> tokens) const {
  if (tokens.empty() || ages_.empty()) return std::nullopt;
  const Descent descent = Descend(tokens);
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  if (descent.rest.empty()) {
    // Everything from here on begins with the query. Every leaf holds an entry.
    const Node* node = descent.node;
    while (node->entries.empty()) node = node->children.begin()->second.get();
    return Match{node->entries.front(), num_tokens};
  }
  // Else what ended on the way here, the longest first.
  int64_t matched = num_tokens - static_cast<int64_t>(descent.rest.size());
  const Node* node = descent.node;
  if (descent.on_edge < node->edge.size()) {
    matched -= static_cast<int64_t>(descent.on_edge);
    node = node->parent;
  }
  for (; node != nullptr; node = node->parent) {
    if (!node->entries.empty()) return Match{node->entries.front(), matched};
    matched -= static_cast<int64_t>(node->edge.size());
  }
  return std::nullopt;
}

std::optional<uint64_t> TokenIndex::Oldest() const {
  if (ages_.empty()) return std::nullopt;
  return ages_.front();
}

}  // namespace kvferry
