#include "connector/token_index.h"

#include <memory>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace kvferry {

absl::Status TokenIndex::Insert(uint64_t entry, std::span<const int32_t> tokens) {
  if (tokens.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("token index: entry ", entry, " has no tokens"));
  }
  if (entries_.contains(entry)) {
    return absl::AlreadyExistsError(absl::StrCat("token index: entry ", entry, " is there"));
  }
  auto numbered = std::make_unique<Numbered>(entry, tokens);
  entries_.emplace(entry, numbered.get());
  absl::Cleanup remove = [&] { entries_.erase(entry); };
  tree_.Insert(std::move(numbered));
  std::move(remove).Cancel();
  return absl::OkStatus();
}

absl::Status TokenIndex::Erase(uint64_t entry) {
  const auto found = entries_.find(entry);
  if (found == entries_.end()) {
    return absl::NotFoundError(absl::StrCat("token index: no entry ", entry));
  }
  tree_.Erase(found->second);
  entries_.erase(found);
  return absl::OkStatus();
}

std::optional<TokenIndex::Match> TokenIndex::Longest(std::span<const int32_t> tokens) const {
  const std::optional<TokenTree::Match> match = tree_.Longest(tokens);
  if (!match) return std::nullopt;
  return Match{NumberOf(match->entry), match->num_tokens};
}

std::optional<uint64_t> TokenIndex::Oldest() const {
  if (tree_.Oldest() == nullptr) return std::nullopt;
  return NumberOf(tree_.Oldest());
}

}  // namespace kvferry
