#include "tests/support/random_lookups.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <iostream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr int64_t kPageTokens = 16;
constexpr int64_t kMostEntryPages = 12;
constexpr int64_t kMostLookups = 6;  // Of a consumer, at once.
constexpr int64_t kLongestLookupMs = 3000;
constexpr int64_t kAnswerMs = 2000;  // By which a lookup may outlive its deadline.
constexpr int64_t kGroups = 4;

int64_t PagesOf(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

std::vector<int64_t> Numbers(const std::string& text) {
  std::vector<int64_t> numbers;
  for (const auto word : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    numbers.push_back(0);
    EXPECT_TRUE(absl::SimpleAtoi(word, &numbers.back())) << text;
  }
  return numbers;
}

}  // namespace

void RandomLookups::OnEnd(const Process& process) {
  may_be_lost_ += std::erase_if(lookups_, [&](const Lookup& l) { return l.at == &process; });
  for (auto& [number, entry] : entries_) {
    if (entry.at != &process) continue;
    entry.at = nullptr;
    entry.pages.clear();
  }
}

void RandomLookups::Step() {
  static const std::array<std::pair<int64_t, void (RandomLookups::*)()>, 4> kActions = {{
      {100, &RandomLookups::Insert},
      {150, &RandomLookups::LookUp},
      {10, &RandomLookups::Cancel},
      {80, &RandomLookups::LookForEnds},
  }};
  (this->*AnyOfWeighted(kActions))();
}

void RandomLookups::Insert() {
  Process* const producer = AnyRunning(sources_);
  const int64_t num_pages = 1 + UpTo(kMostEntryPages - 1);
  if (producer == nullptr || !producer->free.Has(num_pages)) return;
  const auto number = static_cast<int64_t>(entries_.size()) + 1;
  Entry entry;
  entry.at = producer;
  entry.pages = producer->free.Take(num_pages, random_);
  entry.tokens.assign(kPageTokens * (num_pages - 1) + 2 + UpTo(kPageTokens - 2), 7);
  entry.tokens[0] = UpTo(kGroups - 1);
  entry.tokens[1] = number;
  Write(*producer, kUnwritten + number, entry.pages, 0, kPeerLayers);
  entry.id =
      Ask(*producer, absl::StrCat("insert ", Listed(entry.tokens), " ", Listed(entry.pages)));
  ASSERT_EQ(Numbers(entry.id).size(), 1);
  entries_.emplace(number, std::move(entry));
}

// Anything, a group, or an entry that is there or was, its end or a longer one.
RandomLookups::Tokens RandomLookups::AnyQuery() {
  if (entries_.empty() || OneIn(4)) return {};
  if (OneIn(4)) return {UpTo(kGroups - 1)};
  const auto newest = static_cast<int64_t>(entries_.size());
  Tokens tokens = entries_.at(std::max<int64_t>(1, newest - UpTo(40))).tokens;
  if (OneIn(4)) tokens.push_back(99);
  if (OneIn(4)) tokens.resize(2 + UpTo(static_cast<int64_t>(tokens.size()) - 2));
  return tokens;
}

void RandomLookups::LookUp() {
  Process* const consumer = AnyRunning(targets_);
  if (consumer == nullptr) return;
  if (CountAt(lookups_, *consumer) >= kMostLookups) return;
  Begin(*consumer, AnyQuery(), OneIn(8) ? 1 : kMostEntryPages, 20 + AnyMs(kLongestLookupMs));
}

void RandomLookups::Begin(Process& process, const Tokens& query, int64_t num_pages,
                          int64_t timeout_ms) {
  const std::optional<Pages> pages = TakeToFill(process, num_pages);
  if (!pages) return;
  const std::string answer =
      Ask(process, absl::StrCat("lookup ", query.empty() ? "any" : Listed(query), " ",
                                Listed(*pages), " ", timeout_ms));
  ASSERT_EQ(Numbers(answer).size(), 1);
  lookups_.push_back({&process, answer, query, *pages, DeadlineInMs(timeout_ms)});
}

void RandomLookups::Cancel() {
  if (lookups_.empty()) return;
  const Lookup& lookup = AnyOf(lookups_);
  if (lookup.at->stopped_until) return;
  EXPECT_EQ(Ask(*lookup.at, "cancel " + lookup.number), "OK");
}

void RandomLookups::LookForEnds() {
  std::erase_if(lookups_, [&](Lookup& lookup) { return HasEnded(lookup); });
  for (auto& [number, entry] : entries_) LookForGone(entry);
}

void RandomLookups::LookForGone(Entry& entry) {
  if (entry.pages.empty() || entry.at->stopped_until) return;
  const std::string gone = entry.at->peer->Ask(absl::StrCat("gone ", entry.id, " 0"));
  if (gone == "here") return;
  EXPECT_EQ(gone, "fetched");
  GiveBackSpent(*entry.at, entry.pages);
}

bool RandomLookups::HasEnded(Lookup& lookup) {
  if (lookup.at->stopped_until) return false;
  const std::string status = lookup.at->peer->Wait(lookup.number, 0);
  if (status == "PENDING") {
    ExpectNotLate(lookup.due + std::chrono::milliseconds(kAnswerMs),
                  absl::StrCat(lookup.at->name, " lookup ", lookup.number));
    return false;
  }
  Log(absl::StrCat(lookup.at->name, " lookup ", lookup.number, " ends: ", status));
  CountEnd(status.substr(0, status.find(':')));
  // Whatever happens to an entry before it is fetched, there may be another.
  EXPECT_NE(status.rfind("FAILED_PRECONDITION", 0), 0) << status;
  EXPECT_NE(status.rfind("NOT_FOUND", 0), 0) << status;
  if (status == "OK") {
    Delivered(lookup);
  } else {
    ++may_be_lost_;
  }
  GiveBackFilled(*lookup.at, lookup.pages);
  return true;
}

void RandomLookups::Delivered(const Lookup& lookup) {
  const std::vector<std::string> words =
      absl::StrSplit(Ask(*lookup.at, "result " + lookup.number), ' ');
  ASSERT_EQ(words.size(), 3);
  const Tokens tokens = Numbers(words[2]);
  ASSERT_GE(tokens.size(), 2);
  Entry& entry = entries_.at(tokens[1]);
  EXPECT_FALSE(entry.delivered) << "entry " << tokens[1] << " was delivered twice";
  entry.delivered = true;
  EXPECT_EQ(tokens, entry.tokens);
  const size_t matched =
      lookup.query.empty() ? tokens.size() : std::min(lookup.query.size(), tokens.size());
  EXPECT_EQ(words[0], absl::StrCat(matched));
  EXPECT_TRUE(lookup.query.empty() ||
              std::equal(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(matched),
                         lookup.query.begin()));
  const Pages pages = Numbers(words[1]);
  EXPECT_EQ(static_cast<int64_t>(pages.size()), PagesOf(static_cast<int64_t>(matched)));
  EXPECT_EQ(Holds(*lookup.at, kUnwritten + tokens[1], pages, 0, kPeerLayers), "OK")
      << lookup.at->name << " lookup " << lookup.number;
}

void RandomLookups::Drain() {
  const auto ended = [&] {
    LookForEnds();
    return lookups_.empty() || HasFailure();
  };
  EXPECT_TRUE(WaitFor(ended, DeadlineInMs(kLongestLookupMs + kAnswerMs + 2 * kSlackMs)));
  Insert();  // Something there is.
  // Whatever was not delivered can be found.
  const int64_t may_be_lost = may_be_lost_;
  const auto taken = [&] {
    if (lookups_.empty()) Begin(targets_[0], {}, kMostEntryPages, 500);
    LookForEnds();
    const bool left = std::any_of(entries_.begin(), entries_.end(),
                                  [](const auto& entry) { return !entry.second.pages.empty(); });
    return !left || HasFailure();
  };
  EXPECT_TRUE(WaitFor(taken, DeadlineInMs(4 * kSlackMs)));
  EXPECT_TRUE(WaitFor(ended, Soon()));
  int64_t lost = 0;
  for (const auto& [number, entry] : entries_) lost += entry.at != nullptr && !entry.delivered;
  EXPECT_LE(lost, may_be_lost);
  std::cerr << "lost: " << lost << "\n";
  EXPECT_GT(CountedEnds("OK"), 0);
  for (Process& producer : sources_) {
    ExpectAtRest(producer, {"lookup_entries", "lookup_leased", "lookup_waiting", "lookup_bytes",
                            "transfers_active", "arena_chunks_taken"});
  }
  for (Process& consumer : targets_) ExpectAtRest(consumer, {"fetches_active"});
}

}  // namespace kvferry
