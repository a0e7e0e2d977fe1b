#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/close_once.h"
#include "base/mutex.h"
#include "connector/lookup_consumer.h"
#include "connector/lookup_crowd.h"
#include "connector/lookup_handle.h"
#include "transport/calls.h"
#include "transport/fetch_handle.h"
#include "transport/node.h"

namespace kvferry {

// The lookups of a LookupConsumer.
//
//   state     on                       becomes   because
//   asking    found                    fetching  -
//   asking    deadline, cancel,        gone      with that error
//              all refuse
//   fetching  producer has no turn     fetching  anew after a moment: the entry is still ours
//   fetching  the same, and cancelled  gone      with that error; the entry goes back
//              or deadline
//   fetching  lease has ended          asking    the entry went back before it was fetched, or its
//                                                producer has begun anew
//   fetching  fetch failed, cancelled  gone      with that error; the entry goes back
//   fetching  every byte               taking    if `done` is lost the producer puts the entry
//                                                back: it has to say whose it is (lookup_take)
//   taking    yes                      gone OK   the entry is gone from its producer, for good
//   taking    no                       asking    it went back, perhaps to somebody else: what came
//                                                does not count
//   taking    no answer                taking    over another session, after a moment: asked again,
//                                                the producer says the same
//   taking    no answer, and cancelled gone      with an error, even though every byte is here: the
//             or too late                        entry may be somebody else's, or lost
//   taking    refused for good         gone      the same
//   taking    cancel                   taking    the answer may be on its way: without one it ends
//
// Too late is the deadline, but 2 s after the last byte at the earliest. Each of its producers is,
// while the lookup is asking,
//
//   asked --cannot now--> waits --time--> asked          refused for good
//
// One at which as many lookups wait as may (max_calls_per_peer) answers those whose entry is there
// and refuses the others, which ask again: the first as soon as one that waits there has ended, and
// all after a time that grows with their number and length. Who is refused then too, as one with
// more tokens than there is room for, is passed over until that time, and a shorter one asks
// (LookupCrowd). A place that none of them has room in is for who asks next.
//
// That one has waited its producer does not say. But it answers those that do not wait in turn: of
// all that were asked before a question, those wait that are not answered when it is. So many
// waited when it refused one, and there is a place when fewer of ours are asked there. The place of
// one that is not known to have waited is for who asks next, too.
//
// The node's thread drives them; nothing is called back under the lock.
class LookupQueries : public CallHandler, public std::enable_shared_from_this<LookupQueries> {
 public:
  explicit LookupQueries(const LookupConsumer::Options& options)
      : options_(options), crowds_(options.producers.size()) {}
  // Call Close() first.
  ~LookupQueries() override = default;

  absl::Status Start();
  void Close();
  absl::StatusOr<std::shared_ptr<LookupHandle>> Add(LookupConsumer::Request request);
  void Cancel(uint64_t id);
  std::vector<std::pair<std::string, int64_t>> Metrics() const;

  // CallHandler; a consumer serves nothing.
  void OnCall(const CallKey& call, const std::string& function, const Fields& args,
              Deadline deadline) override;
  void OnCallDropped(const CallKey&) override {}
  Deadline Tick(Deadline now) override;

 private:
  struct Producer {  // One of a query's; the address is options_.producers'.
    bool asked = false;
    bool refused = false;   // For good.
    bool crowded = false;   // It had no place for the lookup to wait in; not asked again yet.
    bool by_place = false;  // Asked, the last time, because one that waited there had ended.
    uint64_t attempt = 0;   // Replies to earlier ones are late.
    uint64_t call = 0;
    uint64_t lease = 0;
    int64_t number = 0;  // Of the question (Crowd).
    Deadline retry_at{};
    int64_t backoff_ms = 0;
    absl::Status error;  // The last.
  };
  enum class State { kAsking, kFetching, kTaking };
  struct Query {
    LookupConsumer::Request request;  // Its tokens are those of its roi.
    std::shared_ptr<LookupHandle> handle;
    std::vector<Producer> producers;
    bool cancelled = false;
    State state = State::kAsking;
    // Once found:
    size_t found_at = 0;
    uint64_t epoch = 0;
    LookupResult result{};
    std::shared_ptr<FetchHandle> fetch{};
    Deadline retry_at = Deadline::max();  // To fetch or to take again.
    int64_t backoff_ms = 0;
    Deadline take_by{};
    Deadline due{};  // In due_.
  };
  // Of a producer. Questions are numbered as they are asked there.
  struct Crowd {
    LookupCrowd lookups;        // Those that it has no place for.
    int64_t last = 0;           // The last number.
    std::set<int64_t> unheard;  // Those asked there of which it is not known yet whether they wait.
    int64_t waiting = 0;        // Those that do.
    int64_t full_at = 0;        // With so many it refuses more.
    int64_t passed_on = 0;      // The last that got a place in which a longer one had no room.
  };
  // To be finished, and let go of, outside of the lock: what the request holds may call back.
  struct Ended {
    std::shared_ptr<Query> query;
    absl::Status status;

    void Finish();
  };

  // What a tick finds to do outside of the lock.
  struct Due {
    std::vector<Ended> late;
    std::vector<std::pair<uint64_t, std::shared_ptr<Query>>> fetches;
  };

  absl::Status CheckRequest(const LookupConsumer::Request& request) const;
  void Ask(uint64_t id, Query& query, size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartAsking(Producer& producer, size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whatever ends a question goes through it, so that those asked are counted. Needs no memory.
  void StopAsking(Producer& producer, size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnReply(uint64_t id, size_t index, uint64_t attempt, absl::StatusOr<Fields> reply);
  // It has answered: those that were asked before wait.
  void Hear(const Producer& producer, size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the reply into the query; the number of its pages that are needed.
  absl::StatusOr<int64_t> Read(const Fields& reply, Query& query) const;
  absl::StatusOr<int64_t> Found(uint64_t id, Query& query, size_t index, const Fields& reply)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Not under the lock: calls the request's `allocate`.
  absl::Status ChoosePages(Query& query, int64_t num_pages) const;
  // Ends the lookup when `status` is not OK or the fetch cannot start.
  void Fetch(uint64_t id, std::shared_ptr<Query> query, absl::Status status);
  absl::Status StartFetch(uint64_t id, Query& query);
  void OnFetched(uint64_t id);
  Ended OnFetchedLocked(uint64_t id, Query& query) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After a moment, if there is time for that.
  static bool FetchesAgain(Query& query);
  absl::Status NotFetched(const Query& query, const absl::Status& why) const;
  // What a producer has said, with its name.
  absl::Status ErrorOf(size_t index, const absl::Status& status) const;
  // Asks the producer for the entry, of which every byte is here.
  void Take(uint64_t id, Query& query) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnTaken(uint64_t id, const absl::StatusOr<Fields>& reply);
  Ended OnTakenLocked(uint64_t id, Query& query, const absl::StatusOr<uint64_t>& taken)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NotTaken(const Query& query, const absl::Status& why) const;
  void LookOn(Query& query) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Ended OnRefused(uint64_t id, Query& query, size_t index, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AskLater(uint64_t id, Query& query, size_t index, bool is_crowded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static int64_t QuestionBytes(const Query& query);
  // The producer has no place for it. `in_turn`: it may be given one that becomes free.
  void JoinCrowd(uint64_t id, Query& query, size_t index, bool in_turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveCrowd(uint64_t id, Query& query, size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveCrowds(uint64_t id, Query& query) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Asks for the one in turn among those with shorter questions (LookupCrowd); false: there is
  // none.
  bool GivePlace(size_t index, int64_t shorter_than) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // To a shorter one, if there was a place for the one that was refused but too little room in it.
  void PassOnPlace(const Query& refused, size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GivePlaces(size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // When there is something to do for it, if nothing is heard until then.
  static Deadline NextOf(const Query& query);
  // To be called when that has changed. Needs no memory.
  void Schedule(uint64_t id, Query& query) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What of the lookup is due: asking, fetching or taking again, or its end.
  void TickOne(uint64_t id, Deadline now, Due& due) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TooLate(const Query& query) const;
  // Stops asking; what is found nevertheless goes back.
  void Unask(Producer& producer, size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(size_t index, uint64_t lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What it has found.
  void GiveBack(const Query& found) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Ended End(uint64_t id, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const LookupConsumer::Options options_;
  CloseOnce close_once_;
  std::unique_ptr<Node> owned_node_;
  // The same, also while it is being destroyed: then its own thread alone uses it.
  Node* node_ = nullptr;

  mutable Mutex mutex_;
  CondVar cancelled_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t cancelling_ ABSL_GUARDED_BY(mutex_) = 0;  // Calls that finish a handle.
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  // By age. (Abseil's maps are broken by an insert that finds no memory.)
  std::map<uint64_t, std::shared_ptr<Query>> queries_ ABSL_GUARDED_BY(mutex_);
  // Each of them once, the nearest first, so that a tick costs the same however many wait.
  std::set<std::pair<Deadline, uint64_t>> due_ ABSL_GUARDED_BY(mutex_);
  std::vector<Crowd> crowds_ ABSL_GUARDED_BY(mutex_);  // By producer.
};

}  // namespace kvferry
