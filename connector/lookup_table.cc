#include "connector/lookup_table.h"

#include <iterator>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/interrupt.h"
#include "base/status.h"

namespace kvferry {
namespace {

absl::Status Closed() { return absl::CancelledError("lookup: the buffer was closed"); }

}  // namespace

absl::StatusOr<std::shared_ptr<LookupTable>> LookupTable::Create(const Options& options) {
  for (const auto& [name, value] :
       {std::pair("max_bytes", options.max_bytes), std::pair("max_waiting", options.max_waiting),
        std::pair("max_waiting_bytes", options.max_waiting_bytes),
        std::pair("max_tokens", options.max_tokens)}) {
    if (value >= 1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("lookup: ", name, " is ", value, " but must be at least 1"));
  }
  return std::shared_ptr<LookupTable>(new LookupTable(options));
}

LookupTable::~LookupTable() { Close(); }

// ---------------------------------------------------------------- entries

absl::Status LookupTable::CheckTokens(std::span<const int32_t> tokens) const {
  if (!tokens.empty() && static_cast<int64_t>(tokens.size()) <= options_.max_tokens) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "lookup: ", tokens.size(), " tokens but there must be 1 to ", options_.max_tokens));
}

absl::Status LookupTable::CheckInsert(const Tokens& tokens, int64_t bytes) const {
  KVFERRY_RETURN_IF_ERROR(CheckTokens(tokens));
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("lookup: an entry of ", bytes, " bytes"));
  }
  if (bytes <= options_.max_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "lookup: an entry of ", bytes, " bytes can never fit: the buffer has ", options_.max_bytes));
}

// What an entry that is taken holds of max_bytes, until it is let go of.
class LookupTable::Room {
 public:
  explicit Room(std::weak_ptr<LookupTable> table) : table_(std::move(table)) {}
  ~Room() {
    if (bytes_ == 0) return;
    // A table that is gone needs nothing back.
    if (const auto alive = table_.lock()) alive->GiveBack(bytes_);
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  // From now on its end takes the table's lock.
  void Hold(int64_t bytes) { bytes_ = bytes; }

 private:
  const std::weak_ptr<LookupTable> table_;
  int64_t bytes_ = 0;
};

void LookupTable::GiveBack(int64_t bytes) {
  const MutexLock lock(&mutex_);
  bytes_ -= bytes;
  changed_.NotifyAll();
}

absl::Status LookupTable::Keep(std::unique_ptr<Entry> entry, Deadline deadline,
                               std::unique_ptr<Entry>* late) {
  Entry* const kept = entry.get();
  Waiting waiting = {kept};
  std::list<Waiting*> place;
  if (!wait_for_room_.empty() || !HasRoom(kept->bytes)) place.push_back(&waiting);
  entries_.Insert(std::move(entry));  // The last that may throw.
  if (place.empty()) {
    bytes_ += kept->bytes;
    return absl::OkStatus();
  }
  kept->waiting = &waiting;
  wait_for_room_.splice(wait_for_room_.end(), place);
  return WaitForRoom(std::prev(wait_for_room_.end()), deadline, late);
}

absl::Status LookupTable::WaitForRoom(std::list<Waiting*>::iterator place, Deadline deadline,
                                      std::unique_ptr<Entry>* late) {
  Waiting& waiting = **place;
  const int64_t bytes = waiting.entry->bytes;
  while (waiting.fate == Fate::kWaits) {
    if (wait_for_room_.front() == &waiting && HasRoom(bytes)) {
      waiting.entry->waiting = nullptr;
      waiting.fate = Fate::kIn;
      bytes_ += bytes;
    } else if (!WaitOrLook(changed_, &mutex_, deadline) && waiting.fate == Fate::kWaits) {
      *late = Erase(waiting.entry, Fate::kLate);
    }
  }
  wait_for_room_.erase(place);
  changed_.NotifyAll();  // The next one may be served now.
  if (waiting.fate == Fate::kClosed) return Closed();
  if (waiting.fate == Fate::kIn) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat("lookup: no room for an entry of ", bytes,
                                                  " bytes in time; ", bytes_, " of ",
                                                  options_.max_bytes, " are taken"));
}

absl::Status LookupTable::Insert(Tokens tokens, int64_t bytes, Payload payload, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckInsert(tokens, bytes));
  std::unique_ptr<Entry> late;  // Its payload goes outside of the lock.
  std::optional<std::pair<Answer, int64_t>> query;
  {
    const MutexLock lock(&mutex_);
    if (closed_) return Closed();
    query = QueryFor(tokens);
    if (!query) {
      return Keep(std::make_unique<Entry>(std::move(tokens), bytes, std::move(payload)), deadline,
                  &late);
    }
  }
  // Never kept, so there are no bytes to give back.
  query->first(Taken(std::move(tokens), query->second, std::move(payload), bytes, nullptr));
  return absl::OkStatus();
}

void LookupTable::PutBack(Taken taken) {
  std::optional<std::pair<Answer, int64_t>> query;
  {
    const MutexLock lock(&mutex_);
    if (closed_) return;
    query = QueryFor(taken.tokens_);
    if (!query) {
      entries_.Insert(std::make_unique<Entry>(std::move(taken.tokens_), taken.num_bytes_,
                                              std::move(taken.payload_)));
      bytes_ += taken.num_bytes_;
      // They count again, so what it held until here can go, and nothing slips in between.
      return;
    }
  }
  taken.num_matched_ = query->second;
  query->first(std::move(taken));
}

// ---------------------------------------------------------------- queries

std::optional<TokenTree::Match> LookupTable::Find(
    std::optional<std::span<const int32_t>> tokens) const {
  if (tokens) return entries_.Longest(*tokens);
  TokenTree::Entry* const oldest = entries_.Oldest();
  if (oldest == nullptr) return std::nullopt;
  return TokenTree::Match{oldest, std::ssize(oldest->tokens())};
}

std::unique_ptr<LookupTable::Entry> LookupTable::Erase(TokenTree::Entry* entry, Fate fate) {
  std::unique_ptr<Entry> erased(static_cast<Entry*>(entries_.Erase(entry).release()));
  if (erased->waiting != nullptr) erased->waiting->fate = fate;
  return erased;
}

LookupTable::Taken LookupTable::Remove(const TokenTree::Match& match) {
  auto room = std::make_shared<Room>(weak_from_this());  // All that may throw.
  const std::unique_ptr<Entry> entry = Erase(match.entry, Fate::kIn);
  changed_.NotifyAll();  // Its Insert() may be waiting.
  if (entry->waiting == nullptr) room->Hold(entry->bytes);
  return {entry->TakeTokens(), match.num_tokens, std::move(entry->payload), entry->bytes,
          std::move(room)};
}

LookupTable::Answer LookupTable::EndQuery(uint64_t id) {
  const auto found = queries_.find(id);
  Answer answer = std::move(found->second.answer);
  if (found->second.any) {
    any_queries_.erase(*found->second.any);
  } else {
    query_tree_.Erase(found->second.tokens);
  }
  deadlines_.erase({found->second.deadline, id});
  waiting_bytes_ -= found->second.bytes;
  queries_.erase(found);
  return answer;
}

std::optional<std::pair<LookupTable::Answer, int64_t>> LookupTable::QueryFor(
    std::span<const int32_t> tokens) {
  if (const auto match = query_tree_.Longest(tokens)) {
    return std::pair(EndQuery(static_cast<QueryTokens*>(match->entry)->query), match->num_tokens);
  }
  if (any_queries_.empty()) return std::nullopt;
  return std::pair(EndQuery(any_queries_.front()), static_cast<int64_t>(tokens.size()));
}

absl::StatusOr<uint64_t> LookupTable::Ask(std::optional<Tokens> tokens, Deadline deadline,
                                          Answer answer) {
  if (tokens) KVFERRY_RETURN_IF_ERROR(CheckTokens(*tokens));
  std::optional<Taken> taken;
  {
    const MutexLock lock(&mutex_);
    if (closed_) return Closed();
    if (const auto match = Find(tokens)) {
      taken = Remove(*match);
    } else {
      KVFERRY_RETURN_IF_ERROR(CheckMayWait(BytesOf(tokens)));
      return AddQuery(tokens, deadline, std::move(answer));
    }
  }
  answer(*std::move(taken));
  return 0;
}

absl::Status LookupTable::CheckMayWait(int64_t bytes) const {
  if (static_cast<int64_t>(queries_.size()) >= options_.max_waiting) {
    return absl::ResourceExhaustedError(
        absl::StrCat("lookup: ", queries_.size(), " queries wait already"));
  }
  if (waiting_bytes_ + bytes <= options_.max_waiting_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "lookup: a query with ", bytes, " bytes of tokens cannot wait: those that do have ",
      waiting_bytes_, " of ", options_.max_waiting_bytes));
}

uint64_t LookupTable::AddQuery(const std::optional<Tokens>& tokens, Deadline deadline,
                               Answer answer) {
  const uint64_t id = next_query_++;
  Query& query =
      queries_.emplace(id, Query{deadline, std::move(answer), BytesOf(tokens), std::nullopt})
          .first->second;
  absl::Cleanup remove = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    deadlines_.erase({deadline, id});
    queries_.erase(id);
  };
  deadlines_.insert({deadline, id});
  // Last: what finds no memory is in none of them.
  if (tokens) {
    auto entry = std::make_unique<QueryTokens>(id, *tokens);
    query.tokens = entry.get();
    query_tree_.Insert(std::move(entry));
  } else {
    query.any = any_queries_.insert(any_queries_.end(), id);
  }
  std::move(remove).Cancel();
  waiting_bytes_ += query.bytes;
  return id;
}

bool LookupTable::Withdraw(uint64_t query) {
  Answer unused;  // What it holds goes outside of the lock.
  const MutexLock lock(&mutex_);
  if (!queries_.contains(query)) return false;
  unused = EndQuery(query);
  return true;
}

absl::StatusOr<LookupTable::Taken> LookupTable::TryTake(
    std::optional<std::span<const int32_t>> tokens) {
  if (tokens) KVFERRY_RETURN_IF_ERROR(CheckTokens(*tokens));
  const MutexLock lock(&mutex_);
  if (closed_) return Closed();
  if (const auto match = Find(tokens)) return Remove(*match);
  return absl::NotFoundError("lookup: no entry matches");
}

std::optional<Deadline> LookupTable::Expire(Deadline now) {
  std::vector<Answer> late;
  std::optional<Deadline> next;
  {
    const MutexLock lock(&mutex_);
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      late.push_back(EndQuery(deadlines_.begin()->second));
    }
    if (!deadlines_.empty()) next = deadlines_.begin()->first;
  }
  for (const Answer& answer : late) {
    answer(absl::DeadlineExceededError("lookup: no matching entry came in time"));
  }
  return next;
}

void LookupTable::Close() {
  std::vector<Answer> waiting;
  std::vector<std::unique_ptr<Entry>> dropped;  // Payloads go outside of the lock.
  {
    const MutexLock lock(&mutex_);
    closed_ = true;
    while (!queries_.empty()) waiting.push_back(EndQuery(queries_.begin()->first));
    while (TokenTree::Entry* const entry = entries_.Oldest()) {
      dropped.push_back(Erase(entry, Fate::kClosed));
    }
    changed_.NotifyAll();
  }
  for (const Answer& answer : waiting) answer(Closed());
}

// ---------------------------------------------------------------- numbers

int64_t LookupTable::num_entries() const {
  const MutexLock lock(&mutex_);
  return static_cast<int64_t>(entries_.size());
}

int64_t LookupTable::num_waiting() const {
  const MutexLock lock(&mutex_);
  return static_cast<int64_t>(queries_.size());
}

int64_t LookupTable::bytes() const {
  const MutexLock lock(&mutex_);
  return bytes_;
}

}  // namespace kvferry
