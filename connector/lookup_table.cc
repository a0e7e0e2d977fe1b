#include "connector/lookup_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {
namespace {

absl::Status Closed() { return absl::CancelledError("lookup: the buffer was closed"); }

}  // namespace

absl::StatusOr<std::shared_ptr<LookupTable>> LookupTable::Create(const Options& options) {
  for (const auto& [name, value] :
       {std::pair("max_bytes", options.max_bytes), std::pair("max_waiting", options.max_waiting),
        std::pair("max_tokens", options.max_tokens)}) {
    if (value >= 1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("lookup: ", name, " is ", value, " but must be at least 1"));
  }
  return std::shared_ptr<LookupTable>(new LookupTable(options));
}

LookupTable::~LookupTable() { Close(); }

// ---------------------------------------------------------------- entries

absl::Status LookupTable::CheckTokens(const Tokens& tokens) const {
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

LookupTable::Taken LookupTable::MakeTaken(Entry entry, int64_t num_matched) {
  std::shared_ptr<void> bytes;
  if (entry.kept) {
    // A table that is gone needs nothing back.
    bytes = std::shared_ptr<void>(nullptr, [table = weak_from_this(), count = entry.bytes](void*) {
      if (const auto alive = table.lock()) alive->GiveBack(count);
    });
  }
  return {std::move(entry.tokens), num_matched, std::move(entry.payload), entry.bytes,
          std::move(bytes)};
}

void LookupTable::GiveBack(int64_t bytes) {
  const MutexLock lock(&mutex_);
  bytes_ -= bytes;
  changed_.NotifyAll();
}

absl::Status LookupTable::WaitForRoom(uint64_t id, Deadline deadline) {
  const int64_t bytes = entries_.at(id).bytes;
  const auto place = wait_for_room_.insert(wait_for_room_.end(), id);
  absl::Status status;
  while (entries_.contains(id)) {
    if (wait_for_room_.front() == id && bytes_ + bytes <= options_.max_bytes) break;
    if (changed_.WaitUntil(&mutex_, deadline) || Clock::now() < deadline) continue;
    if (!entries_.contains(id)) break;
    status = absl::DeadlineExceededError(absl::StrCat("lookup: no room for an entry of ", bytes,
                                                      " bytes in time; ", bytes_, " of ",
                                                      options_.max_bytes, " are taken"));
    break;
  }
  wait_for_room_.erase(place);
  changed_.NotifyAll();  // The next one may be served now.
  return status;
}

absl::Status LookupTable::Insert(Tokens tokens, int64_t bytes, Payload payload, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckInsert(tokens, bytes));
  mutex_.Lock();
  if (closed_) {
    mutex_.Unlock();
    return Closed();
  }
  if (auto query = QueryFor(tokens)) {
    mutex_.Unlock();
    // Never kept, so there are no bytes to give back.
    query->first(MakeTaken({std::move(tokens), bytes, std::move(payload)}, query->second));
    return absl::OkStatus();
  }
  const uint64_t id = next_id_++;
  absl::Status status = entry_index_.Insert(id, tokens);
  entries_[id] = {std::move(tokens), bytes, std::move(payload)};
  if (status.ok()) status = WaitForRoom(id, deadline);
  const auto found = entries_.find(id);
  if (status.ok() && found != entries_.end()) {
    found->second.kept = true;
    bytes_ += bytes;
  } else if (found != entries_.end()) {
    entry_index_.Erase(id).IgnoreError();
    entries_.erase(found);
  } else if (dropped_.erase(id) > 0) {
    status = Closed();
  }
  mutex_.Unlock();
  return status;
}

void LookupTable::Keep(Entry entry) {
  const uint64_t id = next_id_++;
  entry_index_.Insert(id, entry.tokens).IgnoreError();  // A new id, and tokens: cannot fail.
  bytes_ += entry.bytes;
  entry.kept = true;
  entries_[id] = std::move(entry);
}

void LookupTable::PutBack(Taken taken) {
  mutex_.Lock();
  if (closed_) {
    mutex_.Unlock();
    return;
  }
  if (auto query = QueryFor(taken.tokens_)) {
    mutex_.Unlock();
    taken.num_matched_ = query->second;
    query->first(std::move(taken));
    return;
  }
  Keep({std::move(taken.tokens_), taken.num_bytes_, std::move(taken.payload_)});
  mutex_.Unlock();
  // Its bytes count again by now, so what it held until here can go, and nothing slips in between.
}

// ---------------------------------------------------------------- queries

std::optional<TokenIndex::Match> LookupTable::Find(const std::optional<Tokens>& tokens) const {
  if (tokens) return entry_index_.Longest(*tokens);
  const std::optional<uint64_t> oldest = entry_index_.Oldest();
  if (!oldest) return std::nullopt;
  return TokenIndex::Match{*oldest, static_cast<int64_t>(entries_.at(*oldest).tokens.size())};
}

LookupTable::Taken LookupTable::Remove(const TokenIndex::Match& match) {
  const auto found = entries_.find(match.entry);
  Entry entry = std::move(found->second);
  entries_.erase(found);
  entry_index_.Erase(match.entry).IgnoreError();
  changed_.NotifyAll();  // Its Insert() may be waiting.
  return MakeTaken(std::move(entry), match.num_tokens);
}

LookupTable::Answer LookupTable::EndQuery(uint64_t id) {
  const auto found = queries_.find(id);
  Answer answer = std::move(found->second.answer);
  if (found->second.any) {
    any_queries_.erase(*found->second.any);
  } else {
    query_index_.Erase(id).IgnoreError();
  }
  deadlines_.erase({found->second.deadline, id});
  queries_.erase(found);
  return answer;
}

std::optional<std::pair<LookupTable::Answer, int64_t>> LookupTable::QueryFor(const Tokens& tokens) {
  if (const auto match = query_index_.Longest(tokens)) {
    return std::pair(EndQuery(match->entry), match->num_tokens);
  }
  if (any_queries_.empty()) return std::nullopt;
  return std::pair(EndQuery(any_queries_.front()), static_cast<int64_t>(tokens.size()));
}

absl::StatusOr<uint64_t> LookupTable::Ask(std::optional<Tokens> tokens, Deadline deadline,
                                          Answer answer) {
  if (tokens) KVFERRY_RETURN_IF_ERROR(CheckTokens(*tokens));
  mutex_.Lock();
  if (closed_) {
    mutex_.Unlock();
    return Closed();
  }
  if (const auto match = Find(tokens)) {
    Taken taken = Remove(*match);
    mutex_.Unlock();
    answer(std::move(taken));
    return 0;
  }
  absl::StatusOr<uint64_t> asked;
  if (static_cast<int64_t>(queries_.size()) >= options_.max_waiting) {
    asked = absl::ResourceExhaustedError(
        absl::StrCat("lookup: ", queries_.size(), " queries wait already"));
  } else {
    asked = AddQuery(tokens, deadline, std::move(answer));
  }
  mutex_.Unlock();
  return asked;
}

uint64_t LookupTable::AddQuery(const std::optional<Tokens>& tokens, Deadline deadline,
                               Answer answer) {
  const uint64_t id = next_id_++;
  Query query = {deadline, std::move(answer), std::nullopt};
  if (tokens) {
    query_index_.Insert(id, *tokens).IgnoreError();  // A new id, and tokens: cannot fail.
  } else {
    query.any = any_queries_.insert(any_queries_.end(), id);
  }
  queries_[id] = std::move(query);
  deadlines_.insert({deadline, id});
  return id;
}

bool LookupTable::Withdraw(uint64_t query) {
  Answer unused;  // What it holds goes outside of the lock.
  const MutexLock lock(&mutex_);
  if (!queries_.contains(query)) return false;
  unused = EndQuery(query);
  return true;
}

absl::StatusOr<LookupTable::Taken> LookupTable::TryTake(const std::optional<Tokens>& tokens) {
  if (tokens) KVFERRY_RETURN_IF_ERROR(CheckTokens(*tokens));
  const MutexLock lock(&mutex_);
  if (closed_) return Closed();
  if (const auto match = Find(tokens)) return Remove(*match);
  return absl::NotFoundError("lookup: no entry matches");
}

absl::StatusOr<LookupTable::Taken> LookupTable::Take(std::optional<Tokens> tokens,
                                                     Deadline deadline) {
  // Shared with the callback, which may come after this has given up waiting.
  struct Slot {
    Mutex mutex;
    CondVar answered;
    std::optional<absl::StatusOr<Taken>> answer ABSL_GUARDED_BY(mutex);
  };
  const auto slot = std::make_shared<Slot>();
  KVFERRY_RETURN_IF_ERROR(Ask(std::move(tokens), deadline, [slot](absl::StatusOr<Taken> answer) {
    const MutexLock lock(&slot->mutex);
    slot->answer.emplace(std::move(answer));
    slot->answered.NotifyAll();
  }));
  while (true) {
    {
      const MutexLock lock(&slot->mutex);
      while (!slot->answer) {
        if (!slot->answered.WaitUntil(&slot->mutex, deadline) && Clock::now() >= deadline) break;
      }
      if (slot->answer) return *std::move(slot->answer);
    }
    // The answer comes from here now, or is on its way from another thread, which holds no lock
    // that it could wait for.
    Expire(deadline);
    deadline = DeadlineInMs(1000);
  }
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
  absl::flat_hash_map<uint64_t, Entry> dropped;  // Payloads go outside of the lock.
  {
    const MutexLock lock(&mutex_);
    closed_ = true;
    while (!queries_.empty()) waiting.push_back(EndQuery(queries_.begin()->first));
    for (const auto& [id, entry] : entries_) {
      entry_index_.Erase(id).IgnoreError();
      if (!entry.kept) dropped_.insert(id);
    }
    dropped.swap(entries_);
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
