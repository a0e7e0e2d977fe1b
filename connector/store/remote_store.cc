#include "connector/store/remote_store.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/cancel_and_wait.h"
#include "base/interrupt.h"
#include "base/mutex.h"
#include "base/status.h"
#include "connector/store/in_pieces.h"
#include "connector/store/store_wire.h"
#include "connector/store/value_header.h"

namespace kvferry {
namespace {

// Of a call whose sessions end under it.
constexpr int kMaxAttempts = 3;
constexpr int64_t kAbortTimeoutMs = 1000;
constexpr int64_t kStatsTimeoutMs = 1000;
// Waits are for a notice; this is how often one looks for itself.
constexpr int64_t kWaitMs = 60000;

// Where one thread waits for an answer that another brings.
class Answer {
 public:
  void Set(absl::StatusOr<Fields> reply) {
    const MutexLock lock(&mutex_);
    reply_ = std::move(reply);
    changed_.NotifyAll();
  }
  // The node answers every call, at its deadline at the latest. To a caller who was interrupted
  // before, that is over: the call may have been carried out, but is not after a later one.
  absl::StatusOr<Fields> Wait() {
    const MutexLock lock(&mutex_);
    // Interrupted() lets go of the mutex: a reply that came then would not be heard of by waiting.
    while (!reply_ && (changed_.WaitUntil(&mutex_, NextLook(DeadlineInMs(kWaitMs))) ||
                       !Interrupted(&mutex_))) {
    }
    return reply_ ? *std::move(reply_) : absl::DeadlineExceededError("interrupted");
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::optional<absl::StatusOr<Fields>> reply_ ABSL_GUARDED_BY(mutex_);
};

// Until nothing is written any more. A caller that is interrupted has it end first.
void WaitForEnd(FetchHandle& fetch) {
  while (!fetch.done() && !Interrupted()) {
    fetch.Wait(NextLook(DeadlineInMs(kWaitMs))).IgnoreError();
  }
  if (!fetch.done()) CancelAndWait(fetch);
}

// A lease of ours outlives the call that names it, which may have no limit; it is taken back long
// before.
Deadline LeaseUntil(Deadline called_by) {
  return std::min(called_by, DeadlineInMs(INT64_MAX)) + std::chrono::seconds(10);
}

// The session may have been one with a process that is no more, or that has given it up: another
// one shows.
bool SessionEnded(const absl::Status& status) {
  return absl::IsUnavailable(status) && CutOffOf(status) != CutOff::kNo;
}
bool EndedUnasked(const absl::Status& status) {
  return SessionEnded(status) && CutOffOf(status) == CutOff::kNotAsked;
}

// Whether the server has said how the call went, or cannot have heard of it.
bool IsOver(const absl::Status& status) {
  const CutOff cut_off = CutOffOf(status);
  return cut_off == CutOff::kNotAsked ||
         (cut_off == CutOff::kNo && !absl::IsDeadlineExceeded(status));
}

// Another change of this client had the server refuse it: it shows in a later era.
bool RefusedForAnother(const absl::Status& status) {
  return absl::IsAborted(status) && CutOffOf(status) == CutOff::kNotAsked;
}

// What `attempt` gives in the end. Errors for which `may_try_again` holds may pass, and others'
// changes are over at some time.
template <typename Attempt>
auto Persist(Deadline deadline, bool (*may_try_again)(const absl::Status&),
             const Attempt& attempt) {
  for (int left = kMaxAttempts - 1;;) {
    auto result = attempt();
    const absl::Status& status = internal::AsStatus(result);
    const bool refused = RefusedForAnother(status);
    if (!refused && (!may_try_again(status) || left-- == 0)) return result;
    if (Clock::now() < deadline) continue;
    if (refused) result = WithCutOff(absl::UnavailableError(status.message()), CutOff::kNotAsked);
    return result;
  }
}

// A server's fault, and none of the caller's, as the codes of Fields would have it.
absl::Status BadReply(absl::string_view what) {
  return absl::InternalError(absl::StrCat("store: the server's reply: ", what));
}
template <typename T>
absl::StatusOr<T> OfReply(const absl::StatusOr<T>& field) {
  return field.ok() ? field : BadReply(field.status().message());
}

using Keys = std::span<const std::string_view>;
using PageIds = std::span<const int64_t>;

// What a call about these keys says first. (What Set() returns would be a copy of them.)
absl::StatusOr<Fields> ArgsAbout(Keys keys) {
  KVFERRY_ASSIGN_OR_RETURN(std::string packed, PackKeys(keys));
  Fields args;
  args.Set("keys", std::move(packed));
  return args;
}

template <typename T>
std::vector<T> Those(std::span<const T> all, const std::vector<size_t>& which) {
  std::vector<T> those;
  those.reserve(which.size());
  for (const size_t i : which) those.push_back(all[i]);
  return those;
}

// All with a good key in one round, and in another one what had no room beside the others, while
// that gets on.
template <typename DoRound>
std::vector<absl::Status> InRounds(Keys keys, PageIds pages, Deadline deadline,
                                   const DoRound& do_round) {
  std::vector<absl::Status> statuses;
  std::vector<size_t> left;
  for (size_t i = 0; i < keys.size(); ++i) {
    statuses.push_back(CheckKey(keys[i]));  // A call with a bad one is refused as a whole.
    if (statuses[i].ok()) left.push_back(i);
  }
  for (bool again = !left.empty(); again;) {
    const auto round = do_round(Those(keys, left), Those(pages, left));
    std::vector<size_t> without_room;
    bool any_done = false;
    for (size_t i = 0; i < left.size(); ++i) {
      const absl::Status& status = round.ok() ? round->statuses[i] : round.status();
      statuses[left[i]] = status;
      any_done |= status.ok();
      if (absl::IsResourceExhausted(status)) without_room.push_back(left[i]);
    }
    left = std::move(without_room);
    again = any_done && round->again && !left.empty() && Clock::now() < deadline;
  }
  return statuses;
}

template <typename DoRound>
std::vector<absl::Status> InCalls(Keys keys, PageIds pages, bool last_first, Deadline deadline,
                                  const DoRound& do_round) {
  return InPieces(keys.size(), kMaxKeysPerCall, last_first, [&](size_t first, size_t count) {
    return InRounds(keys.subspan(first, count), pages.subspan(first, count), deadline, do_round);
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteStore>> RemoteStore::Create(Options options) {
  if (options.pool == nullptr) return absl::InvalidArgumentError("remote store: no pool");
  if (options.max_value_bytes < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "remote store: max_value_bytes is ", options.max_value_bytes, " but must be at least 1"));
  }
  KVFERRY_RETURN_IF_ERROR(CheckHostAllowed(options.address, options.endpoint.config));
  options.max_value_bytes = std::min(options.max_value_bytes, kMaxStagedBytes);
  std::unique_ptr<RemoteStore> store(new RemoteStore(std::move(options)));
  Node::Options node;
  node.config = store->options_.endpoint.config;
  node.model = store->options_.endpoint.model;
  node.name = store->options_.endpoint.name;
  node.pool = store->options_.pool;
  node.source = &store->leases_;
  KVFERRY_ASSIGN_OR_RETURN(store->node_, Node::Start(std::move(node)));
  return store;
}

// ---------------------------------------------------------------- asking

absl::StatusOr<Fields> RemoteStore::Ask(const std::string& function, const Fields& args,
                                        Deadline deadline) const {
  auto answer = std::make_shared<Answer>();
  const absl::StatusOr<uint64_t> call =
      node_->Call({options_.address, function, args, deadline},
                  [answer](absl::StatusOr<Fields> reply) { answer->Set(std::move(reply)); });
  absl::StatusOr<Fields> reply = call.ok() ? answer->Wait() : call.status();
  if (reply.ok()) return reply;
  if (call.ok() && Interrupted()) node_->CancelCall(*call);
  const absl::Status& error = reply.status();
  const CutOff cut_off = CutOffOf(error);
  // A server that has forgotten the session says so with the code of a store's miss.
  const bool forgotten = cut_off != CutOff::kNo && absl::IsNotFound(error);
  return WithCutOff({forgotten ? absl::StatusCode::kUnavailable : error.code(),
                     absl::StrCat("store at ", options_.address, ": ", error.message())},
                    cut_off);
}

absl::StatusOr<Fields> RemoteStore::AskToChange(const std::string& function,
                                                std::span<const std::string_view> keys,
                                                const Fields& args, Deadline deadline) {
  const auto turns = turns_.TakeEach({keys.begin(), keys.end()}, deadline);
  if (!turns.ok()) {
    return absl::DeadlineExceededError(
        absl::StrCat("store at ", options_.address, ": ", turns.status().message()));
  }
  const uint64_t era = eras_.Of(keys);
  // Also where there is no memory to hear the answer.
  absl::Cleanup abandon = [&] { eras_.Abandon(era, keys); };
  absl::StatusOr<Fields> reply =
      Ask(function, Fields(args).Set("client", id_).Set("era", era), deadline);
  if (IsOver(reply.status())) std::move(abandon).Cancel();
  if (!absl::IsAborted(reply.status())) return reply;
  return WithCutOff(reply.status(), CutOff::kNotAsked);
}

absl::Status RemoteStore::ChangeOne(const std::string& function, std::string_view key,
                                    bool (*may_try_again)(const absl::Status&), Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const Fields args, ArgsAbout({&key, 1}));
  const absl::Status status = Persist(deadline, may_try_again, [&] {
    return AskToChange(function, {&key, 1}, args, deadline).status();
  });
  if (CutOffOf(status) != CutOff::kAsked) return status;
  return absl::UnavailableError(
      absl::StrCat(status.message(), "; '", function, "' may have been carried out"));
}

absl::StatusOr<Fields> RemoteStore::AskAbout(const std::string& function,
                                             std::span<const std::string_view> keys,
                                             Deadline deadline) const {
  KVFERRY_ASSIGN_OR_RETURN(const Fields args, ArgsAbout(keys));
  return Persist(deadline, SessionEnded, [&] { return Ask(function, args, deadline); });
}

absl::StatusOr<int64_t> RemoteStore::Exists(std::span<const std::string_view> keys,
                                            Deadline deadline) {
  for (const std::string_view key : keys) KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  size_t there = 0;
  size_t before_last = 0;  // What there was before the last call.
  while (there < keys.size()) {
    before_last = there;
    const size_t asked = std::min(kMaxKeysPerCall, keys.size() - there);
    KVFERRY_ASSIGN_OR_RETURN(const Fields reply,
                             AskAbout(store_call::kExists, keys.subspan(there, asked), deadline));
    KVFERRY_ASSIGN_OR_RETURN(const uint64_t count, OfReply(reply.Uint("count", asked)));
    there += count;
    if (count < asked) break;
  }
  // Of several calls the keys of the last were used last, and the first are to be dropped last.
  if (there > kMaxKeysPerCall) ExistsEach(keys.first(before_last), deadline).IgnoreError();
  return static_cast<int64_t>(there);
}

absl::StatusOr<std::vector<bool>> RemoteStore::ExistsEach(std::span<const std::string_view> keys,
                                                          Deadline deadline) {
  for (const std::string_view key : keys) KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  std::vector<bool> there(keys.size());
  // Last to first, so that the first were used last.
  for (size_t begin = 0, end = keys.size(); end > 0; end = begin) {
    begin = (end - 1) / kMaxKeysPerCall * kMaxKeysPerCall;
    const size_t asked = end - begin;
    const auto some = keys.subspan(begin, asked);
    KVFERRY_ASSIGN_OR_RETURN(const Fields reply, AskAbout(store_call::kExistsEach, some, deadline));
    KVFERRY_ASSIGN_OR_RETURN(const std::string_view flags, OfReply(reply.Bytes("there", asked)));
    if (flags.size() != asked) {
      return BadReply(absl::StrCat("answers for ", flags.size(), " of ", asked, " keys"));
    }
    for (size_t i = 0; i < asked; ++i) there[begin + i] = flags[i] != 0;
  }
  return there;
}

absl::Status RemoteStore::Erase(std::string_view key, Deadline deadline) {
  return ChangeOne(store_call::kErase, key, SessionEnded, deadline);
}

absl::Status RemoteStore::Pin(std::string_view key, Deadline deadline) {
  return ChangeOne(store_call::kPin, key, EndedUnasked, deadline);
}

absl::Status RemoteStore::Unpin(std::string_view key, Deadline deadline) {
  return ChangeOne(store_call::kUnpin, key, EndedUnasked, deadline);
}

KvStore::Stats RemoteStore::stats() const {
  Stats stats;
  const absl::StatusOr<Fields> reply =
      Ask(store_call::kStats, Fields(), DeadlineInMs(kStatsTimeoutMs));
  if (!reply.ok()) {
    ++stats.errors;
    return stats;
  }
  for (const auto& [name, field] : kStatsFields) {
    const absl::StatusOr<uint64_t> value = reply->Uint(name, INT64_MAX);
    if (value.ok()) stats.*field = static_cast<int64_t>(*value);
  }
  return stats;
}

// ---------------------------------------------------------------- moving

absl::Status RemoteStore::Fetch(const Ticket& ticket, const std::vector<int64_t>& pages,
                                StreamTail tail, Deadline deadline) {
  Node::FetchRequest request;
  request.ticket = ticket;
  const PageRun all{0, ticket.num_pages};
  if (ticket.num_pages > 0) {
    KVFERRY_ASSIGN_OR_RETURN(request.positions, PageRuns::FromRuns({&all, 1}));
  }
  KVFERRY_ASSIGN_OR_RETURN(request.pages, PageRuns::FromPages(pages));
  request.deadline = deadline;
  request.tail = std::move(tail);
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<FetchHandle> handle,
                           node_->Fetch(std::move(request)));
  WaitForEnd(*handle);  // At its deadline at the latest; until then the memory is the transfer's.
  const absl::Status ended = OfTransfer(handle->status());
  return absl::IsUnavailable(ended) ? WithCutOff(ended, CutOff::kAsked) : ended;
}

void RemoteStore::Decline(const Ticket& ticket) {
  Fetch({ticket.address, ticket.epoch, ticket.lease_id, 0, 0}, {}, {},
        DeadlineInMs(kAbortTimeoutMs))
      .IgnoreError();  // It expires otherwise.
}

void RemoteStore::Withdraw(uint64_t lease_id) {
  const absl::StatusOr<bool> ended = leases_.Withdraw(lease_id);
  if (ended.ok() && !*ended) {
    const absl::Status why = absl::AbortedError("the client took the value back");
    // However long it takes: a process that stood still meanwhile has not run its progress thread,
    // which may send from the pages still, and the server would keep what their owner writes next.
    while (
        !node_->AbortLease(lease_id, why, Node::Again::kNo, DeadlineInMs(kAbortTimeoutMs)).ok()) {
    }
  }
  leases_.TakeEnded();
}

absl::StatusOr<RemoteStore::Offer> RemoteStore::AskForValue(std::string_view key,
                                                            Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const Fields args, ArgsAbout({&key, 1}));
  KVFERRY_ASSIGN_OR_RETURN(const Fields reply, Ask(store_call::kGet, args, deadline));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, OfReply(reply.Uint("lease")));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t epoch, OfReply(reply.Uint("epoch")));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t bytes, OfReply(reply.Uint("bytes", INT64_MAX)));
  return Offer{{options_.address, epoch, lease_id, 0, 0}, static_cast<int64_t>(bytes)};
}

absl::Status RemoteStore::Get(std::string_view key, Parts out, Deadline deadline) {
  return Persist(deadline, SessionEnded, [&] { return GetOnce(key, out, deadline); });
}

absl::Status RemoteStore::GetOnce(std::string_view key, Parts out, Deadline deadline) {
  const int64_t wanted = BytesOf(out);
  KVFERRY_ASSIGN_OR_RETURN(const Offer offer, AskForValue(key, deadline));
  if (offer.bytes != wanted) {
    Decline(offer.ticket);
    return absl::FailedPreconditionError(
        absl::StrCat("store: the value has ", offer.bytes, " bytes, the memory for it ", wanted));
  }
  if (out.size() == 1) return Fetch(offer.ticket, {}, {out[0].data(), wanted}, deadline);
  const auto whole = std::make_shared<std::vector<std::byte>>(wanted);
  KVFERRY_RETURN_IF_ERROR(Fetch(offer.ticket, {}, {whole->data(), wanted, whole}, deadline));
  CopyToParts(*whole, out);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::byte>> RemoteStore::GetBytes(std::string_view key,
                                                             Deadline deadline) {
  return Persist(deadline, SessionEnded, [&] { return GetBytesOnce(key, deadline); });
}

absl::StatusOr<std::vector<std::byte>> RemoteStore::GetBytesOnce(std::string_view key,
                                                                 Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const Offer offer, AskForValue(key, deadline));
  if (const absl::Status valid = CheckValueBytes(offer.bytes, options_.max_value_bytes);
      !valid.ok()) {
    Decline(offer.ticket);
    return absl::FailedPreconditionError(valid.message());
  }
  std::vector<std::byte> value(offer.bytes);
  KVFERRY_RETURN_IF_ERROR(Fetch(offer.ticket, {}, {value.data(), offer.bytes}, deadline));
  return value;
}

absl::Status RemoteStore::Put(std::string_view key, ConstParts value, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(Fields args, ArgsAbout({&key, 1}));
  const int64_t bytes = BytesOf(value);
  KVFERRY_RETURN_IF_ERROR(CheckValueBytes(bytes, options_.max_value_bytes));
  auto whole = std::make_shared<std::vector<std::byte>>();
  whole->reserve(bytes);
  for (const std::span<const std::byte> part : value) {
    whole->insert(whole->end(), part.begin(), part.end());
  }
  args.Set("bytes", static_cast<uint64_t>(bytes));
  return Persist(deadline, SessionEnded, [&] { return PutOnce(key, args, whole, deadline); });
}

absl::Status RemoteStore::PutOnce(std::string_view key, const Fields& args,
                                  std::shared_ptr<const std::vector<std::byte>> value,
                                  Deadline deadline) {
  // Of its own: the server may have fetched that of an attempt before, and a lease is fetched once.
  const uint64_t lease_id = RandomId();
  KVFERRY_RETURN_IF_ERROR(leases_.Publish(lease_id, PageRuns(), options_.pool->layout().num_layers,
                                          LeaseUntil(deadline), std::move(value)));
  const absl::Cleanup withdraw = [this, lease_id] { Withdraw(lease_id); };
  return AskToChange(store_call::kPut, {&key, 1}, Fields(args).Set("lease", lease_id), deadline)
      .status();
}

absl::StatusOr<RemoteStore::Round> RemoteStore::ReadRound(const Fields& reply, size_t num_keys) {
  KVFERRY_ASSIGN_OR_RETURN(const std::string_view codes, OfReply(reply.Bytes("codes")));
  KVFERRY_ASSIGN_OR_RETURN(std::vector<absl::Status> statuses, UnpackCodes(codes, num_keys));
  return Round{std::move(statuses), reply.Uint("again", 1).value_or(0) == 1};
}

absl::StatusOr<RemoteStore::Round> RemoteStore::PutSomePages(std::span<const std::string_view> keys,
                                                             std::span<const int64_t> pages,
                                                             Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(Fields args, ArgsAbout(keys));
  KVFERRY_ASSIGN_OR_RETURN(PageRuns runs, PageRuns::FromPages(pages));
  const uint64_t lease_id = RandomId();
  KVFERRY_RETURN_IF_ERROR(leases_.Publish(
      lease_id, std::move(runs), options_.pool->layout().num_layers, LeaseUntil(deadline)));
  // After it the caller may change the pages.
  const absl::Cleanup withdraw = [this, lease_id] { Withdraw(lease_id); };
  args.Set("lease", lease_id);
  KVFERRY_ASSIGN_OR_RETURN(const Fields reply,
                           AskToChange(store_call::kPutPages, keys, args, deadline));
  return ReadRound(reply, keys.size());
}

absl::StatusOr<RemoteStore::Round> RemoteStore::GetSomePages(std::span<const std::string_view> keys,
                                                             std::span<const int64_t> pages,
                                                             Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const Fields args, ArgsAbout(keys));
  KVFERRY_ASSIGN_OR_RETURN(const Fields reply, Ask(store_call::kGetPages, args, deadline));
  KVFERRY_ASSIGN_OR_RETURN(Round round, ReadRound(reply, keys.size()));
  std::vector<int64_t> into;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (round.statuses[i].ok()) into.push_back(pages[i]);
  }
  if (into.empty()) return round;
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, OfReply(reply.Uint("lease")));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t epoch, OfReply(reply.Uint("epoch")));
  const Ticket ticket{options_.address, epoch, lease_id, static_cast<int64_t>(into.size()), 0};
  const absl::Status fetched = Fetch(ticket, into, {}, deadline);
  if (SessionEnded(fetched)) return fetched;
  for (absl::Status& status : round.statuses) {
    if (status.ok()) status = fetched;
  }
  return round;
}

std::vector<absl::Status> RemoteStore::DoPutPages(std::span<const std::string_view> keys,
                                                  const KvPool& pool,
                                                  std::span<const int64_t> pages,
                                                  Deadline deadline) {
  if (&pool != options_.pool.get()) return KvStore::DoPutPages(keys, pool, pages, deadline);
  // The first are to stay where there is no room for all, but of two values of one key the later
  // one.
  const bool last_first = CountDistinct(keys) == keys.size();
  return InCalls(keys, pages, last_first, deadline, [&](Keys some_keys, PageIds some_pages) {
    return Persist(deadline, SessionEnded,
                   [&] { return PutSomePages(some_keys, some_pages, deadline); });
  });
}

std::vector<absl::Status> RemoteStore::DoGetPages(std::span<const std::string_view> keys,
                                                  const KvPool& pool,
                                                  std::span<const int64_t> pages,
                                                  Deadline deadline) {
  if (&pool != options_.pool.get()) return KvStore::DoGetPages(keys, pool, pages, deadline);
  int rounds = 0;
  const auto do_round = [&](Keys some_keys, PageIds some_pages) {
    ++rounds;
    return Persist(deadline, SessionEnded,
                   [&] { return GetSomePages(some_keys, some_pages, deadline); });
  };
  // What a deadline cuts off are the last pages, without which the first are of use.
  std::vector<absl::Status> got = InCalls(keys, pages, /*last_first=*/false, deadline, do_round);
  // Which made those of the last round the ones that were used last.
  if (rounds > 1) UseLastToFirst(keys, got, deadline);
  return got;
}

}  // namespace kvferry
