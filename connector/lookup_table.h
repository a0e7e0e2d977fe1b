#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "connector/token_tree.h"

namespace kvferry {

// Who brings KV and who waits for it, matched by tokens: the bookkeeping of a lookup buffer, for
// one process and one partition (tensor-parallel rank). What KV is and how it moves is somebody
// else's: an entry carries it as a payload.
//
//   Insert   an entry goes to a query that waits for it, or is kept until one comes. While the
//            table is full it waits for room, and can be found already then: so a producer that
//            waits for room and a consumer that waits for the entry cannot wait for each other.
//   Ask      takes the entry with the longest match (TokenTree) out of the table, or waits for
//            one. Queries wait side by side; an entry goes to one of them and to nobody else.
//
// Every wait ends at its deadline: what waits with a callback is ended by Expire(). Thread-safe;
// callbacks run outside of the lock, on the thread that brought them about.
class LookupTable : public std::enable_shared_from_this<LookupTable> {
 public:
  using Tokens = std::vector<int32_t>;
  using Payload = std::shared_ptr<void>;

  struct Options {
    // Of all entries that are kept, or were and are taken and not yet let go. One that goes
    // straight to a query that waited for it never counts.
    int64_t max_bytes = 0;
    int64_t max_waiting = 65536;            // Queries.
    int64_t max_waiting_bytes = 256 << 20;  // Of their tokens.
    int64_t max_tokens = 1 << 24;           // Of an entry or a query.
  };

  // An entry on its way to its consumer. Its bytes count until this is gone.
  class Taken {
   public:
    Taken(Taken&&) = default;
    Taken& operator=(Taken&&) = default;

    const Tokens& tokens() const { return tokens_; }
    // How many of the query's tokens the entry covers; all of the entry's for a query without any.
    int64_t num_matched() const { return num_matched_; }
    const Payload& payload() const { return payload_; }

   private:
    friend class LookupTable;
    Taken(Tokens tokens, int64_t num_matched, Payload payload, int64_t num_bytes,
          std::shared_ptr<void> bytes)
        : tokens_(std::move(tokens)),
          num_matched_(num_matched),
          payload_(std::move(payload)),
          num_bytes_(num_bytes),
          bytes_(std::move(bytes)) {}

    Tokens tokens_;
    int64_t num_matched_;
    Payload payload_;
    int64_t num_bytes_;
    std::shared_ptr<void> bytes_;  // Gives them back, where they count.
  };
  using Answer = std::function<void(absl::StatusOr<Taken>)>;

  // What a query counts of max_waiting_bytes.
  static int64_t BytesOf(const std::optional<Tokens>& tokens) {
    return tokens ? std::ssize(*tokens) * int64_t{sizeof(int32_t)} : 0;
  }

  // INVALID_ARGUMENT for a limit below 1.
  static absl::StatusOr<std::shared_ptr<LookupTable>> Create(const Options& options);
  ~LookupTable();

  // Returns when the entry is kept or taken. INVALID_ARGUMENT without tokens, with too many, or
  // with negative bytes, RESOURCE_EXHAUSTED at once for one that is larger than max_bytes,
  // DEADLINE_EXCEEDED when there was no room in time, CANCELLED when the table was closed: the
  // entry is not in the table then, and its payload is the caller's again. So it is where there is
  // no memory and this throws; an answer for which there is none must not.
  absl::Status Insert(Tokens tokens, int64_t bytes, Payload payload, Deadline deadline);
  // What Insert() refuses at once.
  absl::Status CheckInsert(const Tokens& tokens, int64_t bytes) const;

  // Calls `answer` once: with an entry, at once or when one comes; DEADLINE_EXCEEDED from the first
  // Expire() after the deadline; CANCELLED when the table is closed. Without tokens it takes
  // whatever there is, the oldest first. INVALID_ARGUMENT for too many tokens or none in the list,
  // RESOURCE_EXHAUSTED when max_waiting queries wait already, or max_waiting_bytes of tokens would:
  // `answer` is not called then. Returns the query's id, for Withdraw(), or 0 when it has been
  // answered.
  absl::StatusOr<uint64_t> Ask(std::optional<Tokens> tokens, Deadline deadline, Answer answer);
  // Takes a query back: true, and `answer` is never called. False: it was, or is about to be.
  bool Withdraw(uint64_t query);
  // NOT_FOUND when nothing matches now. Where there is no memory it throws, as Ask() does, and the
  // entry stays.
  absl::StatusOr<Taken> TryTake(std::optional<std::span<const int32_t>> tokens);
  // An entry whose consumer did not get it: as Insert(), but there is always room for it, also
  // above max_bytes where its bytes did not count before; later inserts wait. It is the newest
  // then. A closed table drops it.
  void PutBack(Taken taken);

  // Ends queries whose deadline has passed; returns the next one, if any wait.
  std::optional<Deadline> Expire(Deadline now);
  // Everything that waits is answered, entries are dropped, and later calls are CANCELLED.
  void Close();

  int64_t max_waiting_bytes() const { return options_.max_waiting_bytes; }
  int64_t num_entries() const;
  int64_t num_waiting() const;
  int64_t bytes() const;

 private:
  class Room;
  struct Entry;
  // An Insert() that waits for room, until its entry is kept or taken (kIn) or out of the table.
  enum class Fate { kWaits, kIn, kLate, kClosed };
  struct Waiting {
    Entry* entry;  // While it waits.
    Fate fate = Fate::kWaits;
  };
  struct Entry : TokenTree::Entry {
    Entry(Tokens tokens, int64_t bytes, Payload payload)
        : TokenTree::Entry(std::move(tokens)), bytes(bytes), payload(std::move(payload)) {}

    const int64_t bytes;
    Payload payload;
    Waiting* waiting = nullptr;  // Else it is kept, and its bytes count.
  };
  // Of a query with tokens, in query_tree_.
  struct QueryTokens : TokenTree::Entry {
    QueryTokens(uint64_t query, Tokens tokens)
        : TokenTree::Entry(std::move(tokens)), query(query) {}
    const uint64_t query;
  };

  struct Query {
    Deadline deadline;
    Answer answer;
    int64_t bytes;                                     // Of its tokens.
    std::optional<std::list<uint64_t>::iterator> any;  // In any_queries_, when it has no tokens.
    TokenTree::Entry* tokens = nullptr;                // Else, in query_tree_.
  };

  explicit LookupTable(const Options& options) : options_(options) {}

  absl::Status CheckTokens(std::span<const int32_t> tokens) const;
  std::optional<TokenTree::Match> Find(std::optional<std::span<const int32_t>> tokens) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `fate` is that of its Insert(), if that waits.
  std::unique_ptr<Entry> Erase(TokenTree::Entry* entry, Fate fate)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where there is no memory it throws, and the entry stays.
  Taken Remove(const TokenTree::Match& match) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasRoom(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return bytes_ + bytes <= options_.max_bytes;
  }
  // The query that this entry goes to, taken out of those that wait.
  std::optional<std::pair<Answer, int64_t>> QueryFor(std::span<const int32_t> tokens)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether one more query, with so many bytes of tokens, may wait.
  absl::Status CheckMayWait(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t AddQuery(const std::optional<Tokens>& tokens, Deadline deadline, Answer answer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Answer EndQuery(uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns with `late` where there was no room in time.
  absl::Status Keep(std::unique_ptr<Entry> entry, Deadline deadline, std::unique_ptr<Entry>* late)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // In `place`, of wait_for_room_.
  absl::Status WaitForRoom(std::list<Waiting*>::iterator place, Deadline deadline,
                           std::unique_ptr<Entry>* late) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(int64_t bytes);

  const Options options_;
  mutable Mutex mutex_;
  CondVar changed_;  // Room was made, an entry was taken, or the table was closed.
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t next_query_ ABSL_GUARDED_BY(mutex_) = 1;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  TokenTree entries_ ABSL_GUARDED_BY(mutex_);
  std::list<Waiting*> wait_for_room_ ABSL_GUARDED_BY(mutex_);  // The first one is served first.
  // Abseil's maps are broken by a growth for which there is no memory.
  std::unordered_map<uint64_t, Query> queries_ ABSL_GUARDED_BY(mutex_);
  int64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // Of their tokens.
  TokenTree query_tree_ ABSL_GUARDED_BY(mutex_);
  std::list<uint64_t> any_queries_ ABSL_GUARDED_BY(mutex_);  // Those without tokens, oldest first.
  std::set<std::pair<Deadline, uint64_t>> deadlines_ ABSL_GUARDED_BY(mutex_);  // Of queries.
};

}  // namespace kvferry
