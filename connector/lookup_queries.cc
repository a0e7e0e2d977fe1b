#include "connector/lookup_queries.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/random.h"
#include "base/slab.h"
#include "base/status.h"
#include "pool/page_runs.h"
#include "transport/ticket.h"

namespace kvferry {
namespace {

// A producer that cannot answer is asked again after this, and after twice as long each time.
constexpr int64_t kFirstBackoffMs = 10;
constexpr int64_t kLastBackoffMs = 500;
// Of what lookups ask again together that a producer has no place for: 8 MB a second.
constexpr int64_t kCrowdBytesPerMs = 8192;
constexpr int64_t kBareQuestionBytes = 4096;  // What one costs, in bytes, besides its tokens.

Deadline BackOff(int64_t& backoff_ms, Deadline now) {
  backoff_ms = std::clamp(2 * backoff_ms, kFirstBackoffMs, kLastBackoffMs);
  return now + std::chrono::milliseconds(backoff_ms);
}

constexpr int64_t kGiveBackMs = 2000;
// A lookup that asks for the entry whose bytes it has gets so long for that, also past its
// deadline: without the answer the entry may be lost.
constexpr int64_t kTakeMs = 2000;
constexpr size_t kMaxQueries = 65536;

bool IsFinal(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status) ||
         absl::IsPermissionDenied(status) || absl::IsUnimplemented(status) ||
         absl::IsDataLoss(status);
}

// A producer's reply that it has no place for the lookup now; nothing is leased to it.
bool IsCrowded(const absl::Status& status) {
  return absl::IsUnavailable(status) && CutOffOf(status) == CutOff::kNo;
}

absl::Status Closed() { return absl::CancelledError("the lookup buffer was closed"); }
absl::Status Cancelled() { return absl::CancelledError("the lookup was cancelled"); }

absl::Status BadReply(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("lookup: the producer's reply ", what));
}
// Of what it says that cannot be read, which is none of the caller's doing.
template <typename T>
absl::StatusOr<T> OfReply(absl::StatusOr<T> field) {
  if (field.ok()) return field;
  return BadReply(absl::StrCat("is not as it has to be: ", field.status().message()));
}

}  // namespace

absl::Status LookupQueries::Start() {
  Node::Options node;
  node.config = options_.config;
  node.model = options_.model;
  node.name = options_.name;
  node.pool = options_.pool;
  node.handler = this;
  KVFERRY_ASSIGN_OR_RETURN(owned_node_, Node::Start(std::move(node)));
  node_ = owned_node_.get();
  return absl::OkStatus();
}

void LookupQueries::Close() {
  close_once_.Run([this] {
    {
      const MutexLock lock(&mutex_);
      closing_ = true;
    }
    // Fetches end with it, and nothing is written from then on.
    owned_node_.reset();
    std::vector<Ended> ended;
    {
      const MutexLock lock(&mutex_);
      // Their callbacks may use the consumer.
      while (cancelling_ > 0) cancelled_.WaitAwhile(&mutex_);
      while (!queries_.empty()) ended.push_back(End(queries_.begin()->first, Closed()));
    }
    for (Ended& one : ended) one.Finish();
  });
}

std::vector<std::pair<std::string, int64_t>> LookupQueries::Metrics() const {
  const MutexLock lock(&mutex_);
  if (closing_) return {};
  return node_->Metrics();
}

void LookupQueries::OnCall(const CallKey& call, const std::string&, const Fields&, Deadline) {
  node_->Reply(call, absl::UnimplementedError("the consumer of a lookup buffer serves no calls"));
}

// ---------------------------------------------------------------- beginning

absl::Status LookupQueries::CheckRequest(const LookupConsumer::Request& request) const {
  if (request.roi && !request.tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("lookup: a roi of ", request.roi->size(), " values without tokens"));
  }
  KVFERRY_ASSIGN_OR_RETURN(const PageRuns pages, PageRuns::FromPages(request.pages));
  KVFERRY_RETURN_IF_ERROR(pages.CheckWithin(options_.pool->num_pages()));
  const int64_t timeout_ms = MsUntil(request.deadline, Clock::now());
  if (timeout_ms <= options_.config.max_fetch_timeout_ms) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("lookup: the deadline is ", timeout_ms,
                                                 " ms away, but max_fetch_timeout_ms is ",
                                                 options_.config.max_fetch_timeout_ms));
}

absl::StatusOr<std::shared_ptr<LookupHandle>> LookupQueries::Add(LookupConsumer::Request request) {
  KVFERRY_RETURN_IF_ERROR(CheckRequest(request));
  if (request.tokens) {
    KVFERRY_ASSIGN_OR_RETURN(request.tokens, SelectTokens(*request.tokens, request.roi));
  }
  const MutexLock lock(&mutex_);
  // The node is going or gone, and nobody would end another one. No handle that is done(): who asks
  // again in on_done would never get out of it.
  if (closing_) return Closed();
  if (queries_.size() >= kMaxQueries) {
    return absl::ResourceExhaustedError(
        absl::StrCat("lookup: ", queries_.size(), " lookups are under way"));
  }
  const uint64_t id = next_id_++;
  auto cancel = [weak = weak_from_this(), id] {
    if (const auto self = weak.lock()) self->Cancel(id);
  };
  auto query = std::make_shared<Query>();
  query->handle = std::make_shared<LookupHandle>(std::move(cancel), std::move(request.on_done));
  query->request = std::move(request);
  query->producers.resize(options_.producers.size());
  query->due = query->request.deadline;
  queries_.emplace(id, query);
  // Where there is no memory: an entry that is found for it nevertheless goes back with its lease.
  absl::Cleanup never_asked = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (size_t i = 0; i < query->producers.size(); ++i) StopAsking(query->producers[i], i);
    due_.erase({query->due, id});
    queries_.erase(id);
  };
  due_.emplace(query->due, id);
  for (size_t i = 0; i < query->producers.size(); ++i) Ask(id, *query, i);
  std::move(never_asked).Cancel();
  return query->handle;
}

void LookupQueries::Ask(uint64_t id, Query& query, size_t index) {
  LeaveCrowd(id, query, index);
  Producer& producer = query.producers[index];
  StartAsking(producer, index);
  producer.by_place = false;
  producer.lease = RandomId();
  const uint64_t attempt = ++producer.attempt;
  Fields args;
  args.Set("lease", producer.lease).Set("partition", static_cast<uint64_t>(options_.partition));
  if (query.request.tokens) args.Set("tokens", PackTokens(*query.request.tokens));
  // Cannot fail: the addresses were checked, and the tokens are few enough.
  producer.call = node_
                      ->Call({options_.producers[index], kLookupFunction, std::move(args),
                              query.request.deadline},
                             [this, id, index, attempt](absl::StatusOr<Fields> reply) {
                               OnReply(id, index, attempt, std::move(reply));
                             })
                      .value_or(0);
}

void LookupQueries::StartAsking(Producer& producer, size_t index) {
  Crowd& crowd = crowds_[index];
  crowd.unheard.insert(crowd.unheard.end(), crowd.last + 1);
  producer.number = ++crowd.last;
  producer.asked = true;
}

void LookupQueries::StopAsking(Producer& producer, size_t index) {
  if (!std::exchange(producer.asked, false)) return;
  Crowd& crowd = crowds_[index];
  if (crowd.unheard.erase(producer.number) == 0) --crowd.waiting;
}

// ---------------------------------------------------------------- replies

void LookupQueries::OnReply(uint64_t id, size_t index, uint64_t attempt,
                            absl::StatusOr<Fields> reply) {
  Ended ended;
  std::shared_ptr<Query> query;
  absl::StatusOr<int64_t> num_pages;
  {
    const MutexLock lock(&mutex_);
    const auto found = queries_.find(id);
    if (found == queries_.end()) return;
    query = found->second;
    Producer& producer = query->producers[index];
    if (!producer.asked || producer.attempt != attempt) return;
    if (reply.ok() || IsCrowded(reply.status())) Hear(producer, index);
    StopAsking(producer, index);
    if (reply.ok()) {
      num_pages = Found(id, *query, index, *reply);
      if (!num_pages.ok()) ended = End(id, num_pages.status());
    } else {
      ended = OnRefused(id, *query, index, reply.status());
    }
    if (ended.query == nullptr) Schedule(id, *query);
  }
  if (reply.ok() && num_pages.ok()) {
    absl::Status chosen = ChoosePages(*query, *num_pages);
    return Fetch(id, std::move(query), std::move(chosen));
  }
  query = nullptr;
  ended.Finish();
}

// What it has refused or found at once it answers in the order in which it was asked.
void LookupQueries::Hear(const Producer& producer, size_t index) {
  Crowd& crowd = crowds_[index];
  const auto own = crowd.unheard.lower_bound(producer.number);
  crowd.waiting += std::distance(crowd.unheard.begin(), own);
  crowd.unheard.erase(crowd.unheard.begin(), own);
  crowd.full_at = std::max(crowd.full_at, crowd.waiting);
}

LookupQueries::Ended LookupQueries::OnRefused(uint64_t id, Query& query, size_t index,
                                              const absl::Status& status) {
  Producer& producer = query.producers[index];
  const bool is_late = absl::IsDeadlineExceeded(status);
  const bool is_crowded = IsCrowded(status);
  // Our own clock has ended the call, and the answer may be on the way, or it found no room there.
  if (is_late || absl::IsResourceExhausted(status)) GiveBack(index, producer.lease);
  // Which says nothing of a producer that has been reached, and less than an error from before.
  const bool never_reached = CutOffOf(status) == CutOff::kNotAsked && producer.error.ok();
  if (!is_late || never_reached) {
    producer.error = ErrorOf(index, status);
  }
  producer.refused = IsFinal(status);
  if (closing_) return End(id, Closed());
  if (std::all_of(query.producers.begin(), query.producers.end(),
                  [](const Producer& p) { return p.refused; })) {
    return End(id, producer.error);
  }
  // Tick() ends it where it is too late: by then all have been heard of.
  AskLater(id, query, index, is_crowded);
  return {};
}

void LookupQueries::AskLater(uint64_t id, Query& query, size_t index, bool is_crowded) {
  Producer& producer = query.producers[index];
  const Deadline now = Clock::now();
  // Who was given a place in vain has asked ahead of its time, and asks no more often for that.
  const Deadline from = producer.by_place ? std::max(producer.retry_at, now) : now;
  producer.retry_at = BackOff(producer.backoff_ms, now);
  if (!is_crowded) return;
  JoinCrowd(id, query, index, /*in_turn=*/!producer.by_place);
  const std::chrono::milliseconds crowd_ms(crowds_[index].lookups.bytes() / kCrowdBytesPerMs);
  producer.retry_at = std::max(producer.retry_at, from + crowd_ms);
  PassOnPlace(query, index);
}

absl::Status LookupQueries::ErrorOf(size_t index, const absl::Status& status) const {
  return {status.code(), absl::StrCat(options_.producers[index], ": ", status.message())};
}

absl::Status LookupQueries::TooLate(const Query& query) const {
  std::string message = "lookup: no matching entry came in time";
  for (const Producer& producer : query.producers) {
    if (!producer.error.ok()) absl::StrAppend(&message, "; ", producer.error.ToString());
  }
  return absl::DeadlineExceededError(message);
}

absl::StatusOr<int64_t> LookupQueries::Read(const Fields& reply, Query& query) const {
  KVFERRY_ASSIGN_OR_RETURN(query.epoch, OfReply(reply.Uint("epoch")));
  KVFERRY_ASSIGN_OR_RETURN(const std::string_view bytes, OfReply(reply.Bytes("tokens")));
  LookupResult& result = query.result;
  KVFERRY_ASSIGN_OR_RETURN(result.tokens, OfReply(UnpackTokens(bytes)));
  const auto num_tokens = static_cast<int64_t>(result.tokens.size());
  const int64_t page_size = options_.pool->layout().page_size;
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t pages, OfReply(reply.Uint("pages", kMaxLookupTokens)));
  if (static_cast<int64_t>(pages) != PagesOfTokens(num_tokens, page_size)) {
    return BadReply(absl::StrCat("has ", num_tokens, " tokens in ", pages, " pages"));
  }
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t matched, OfReply(reply.Uint("matched", num_tokens)));
  result.num_matched = static_cast<int64_t>(matched);
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t hidden,
                           OfReply(reply.Uint("hidden", kMaxLookupHiddenBytes)));
  result.hidden_bytes = static_cast<int64_t>(hidden);
  const auto& asked = query.request.tokens;
  const int64_t expected =
      asked ? std::min(num_tokens, static_cast<int64_t>(asked->size())) : num_tokens;
  if (result.num_matched != expected ||
      (asked && !std::equal(asked->begin(), asked->begin() + expected, result.tokens.begin()))) {
    return BadReply(absl::StrCat("has ", num_tokens, " tokens, of which ", matched,
                                 " are said to match, but they do not"));
  }
  return PagesOfTokens(expected, page_size);
}

absl::StatusOr<int64_t> LookupQueries::Found(uint64_t id, Query& query, size_t index,
                                             const Fields& reply) {
  for (size_t i = 0; i < query.producers.size(); ++i) Unask(query.producers[i], i);
  absl::StatusOr<int64_t> num_pages = Read(reply, query);
  if (!num_pages.ok()) {
    GiveBack(index, query.producers[index].lease);
    return num_pages;
  }
  LeaveCrowds(id, query);
  query.state = State::kFetching;
  query.found_at = index;
  return num_pages;
}

// ---------------------------------------------------------------- fetching

absl::Status LookupQueries::ChoosePages(Query& query, int64_t num_pages) const {
  std::vector<int64_t>& pages = query.result.pages;
  if (query.request.allocate) {
    KVFERRY_ASSIGN_OR_RETURN(pages, query.request.allocate(num_pages));
  } else {
    pages = query.request.pages;
  }
  if (static_cast<int64_t>(pages.size()) < num_pages) {
    return absl::ResourceExhaustedError(absl::StrCat("lookup: the entry needs ", num_pages,
                                                     " pages but ", pages.size(), " are given"));
  }
  pages.resize(static_cast<size_t>(num_pages));
  return absl::OkStatus();
}

void LookupQueries::Fetch(uint64_t id, std::shared_ptr<Query> query, absl::Status status) {
  if (status.ok()) status = StartFetch(id, *query);
  if (status.ok()) return;
  Ended ended;
  {
    const MutexLock lock(&mutex_);
    GiveBack(*query);
    ended = End(id, status);
  }
  query = nullptr;
  ended.Finish();
}

absl::Status LookupQueries::StartFetch(uint64_t id, Query& query) {
  LookupResult& result = query.result;
  const PageRun first{0, static_cast<int64_t>(result.pages.size())};
  const auto num_tokens = static_cast<int64_t>(result.tokens.size());
  Node::FetchRequest fetch;
  fetch.ticket = {options_.producers[query.found_at], query.epoch,
                  query.producers[query.found_at].lease,
                  PagesOfTokens(num_tokens, options_.pool->layout().page_size), num_tokens};
  KVFERRY_ASSIGN_OR_RETURN(fetch.positions, PageRuns::FromRuns({&first, 1}));
  KVFERRY_ASSIGN_OR_RETURN(fetch.pages, PageRuns::FromPages(result.pages));
  if (result.hidden_bytes > 0) {
    KVFERRY_ASSIGN_OR_RETURN(result.hidden, MapSlab(result.hidden_bytes));
    fetch.tail = {result.hidden.get(), result.hidden_bytes, result.hidden};
  }
  fetch.deadline = query.request.deadline;
  fetch.on_done = [this, id] { OnFetched(id); };
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<FetchHandle> handle, node_->Fetch(std::move(fetch)));
  const MutexLock lock(&mutex_);
  query.fetch = std::move(handle);
  if (query.cancelled) query.fetch->Cancel();
  return absl::OkStatus();
}

void LookupQueries::OnFetched(uint64_t id) {
  Ended ended;
  {
    const MutexLock lock(&mutex_);
    Query& query = *queries_.at(id);
    ended = OnFetchedLocked(id, query);
    if (ended.query == nullptr) Schedule(id, query);
  }
  ended.Finish();
}

LookupQueries::Ended LookupQueries::OnFetchedLocked(uint64_t id, Query& query) {
  absl::Status status = query.fetch->status();
  if (status.ok()) {
    query.take_by = std::max(query.request.deadline, DeadlineInMs(kTakeMs));
    Take(id, query);
    return {};
  }
  // Of the producer, which has too many fetches under way, or our own for one more session; the
  // entry is still leased to us.
  if (absl::IsResourceExhausted(status) && !closing_) {
    if (FetchesAgain(query)) return {};
    status = NotFetched(query, status);
  }
  // It is not leased to us any more: we have come too late, or its producer has begun anew.
  if ((absl::IsFailedPrecondition(status) || absl::IsNotFound(status)) && !closing_ &&
      !query.cancelled) {
    Producer& producer = query.producers[query.found_at];
    producer.error = ErrorOf(query.found_at, status);
    LookOn(query);
    producer.retry_at = BackOff(producer.backoff_ms, Clock::now());
    return {};
  }
  // A producer that is gone has nothing to take back.
  if (!absl::IsUnavailable(status)) GiveBack(query);
  return End(id, status);
}

bool LookupQueries::FetchesAgain(Query& query) {
  const Deadline now = Clock::now();
  if (query.cancelled || now >= query.request.deadline) return false;
  query.fetch = nullptr;
  query.retry_at = now + std::chrono::milliseconds(kFirstBackoffMs);
  return true;
}

absl::Status LookupQueries::NotFetched(const Query& query, const absl::Status& why) const {
  if (query.cancelled) return Cancelled();
  return absl::DeadlineExceededError(
      absl::StrCat("lookup: ", options_.producers[query.found_at],
                   " has the entry, but no turn came in time to fetch it: ", why.ToString()));
}

// ---------------------------------------------------------------- taking

void LookupQueries::Take(uint64_t id, Query& query) {
  query.state = State::kTaking;
  query.retry_at = Deadline::max();
  // Cannot fail, as in Ask().
  node_
      ->Call({options_.producers[query.found_at], kLookupTakeFunction,
              Fields().Set("lease", query.producers[query.found_at].lease), query.take_by},
             [this, id](const absl::StatusOr<Fields>& reply) { OnTaken(id, reply); })
      .IgnoreError();
}

void LookupQueries::OnTaken(uint64_t id, const absl::StatusOr<Fields>& reply) {
  const absl::StatusOr<uint64_t> taken =
      reply.ok() ? OfReply(reply->Uint("taken", 1)) : reply.status();
  Ended ended;
  {
    const MutexLock lock(&mutex_);
    Query& query = *queries_.at(id);
    ended = OnTakenLocked(id, query, taken);
    if (ended.query == nullptr) Schedule(id, query);
  }
  ended.Finish();
}

LookupQueries::Ended LookupQueries::OnTakenLocked(uint64_t id, Query& query,
                                                  const absl::StatusOr<uint64_t>& taken) {
  if (taken.ok() && *taken == 1) return End(id, absl::OkStatus());
  if (closing_) return End(id, Closed());
  if (taken.ok() && !query.cancelled) {
    LookOn(query);
    return {};
  }
  const Deadline now = Clock::now();
  if (!query.cancelled && now < query.take_by && !IsFinal(taken.status())) {
    query.retry_at = std::min(BackOff(query.backoff_ms, now), query.take_by);
    return {};
  }
  GiveBack(query);
  return End(id, query.cancelled ? Cancelled() : NotTaken(query, taken.status()));
}

// What came does not count; its pages are as good as untouched.
void LookupQueries::LookOn(Query& query) {
  query.state = State::kAsking;
  query.result = {};
  query.fetch = nullptr;
  query.backoff_ms = 0;
  for (Producer& producer : query.producers) producer.retry_at = {};  // With the next tick.
}

absl::Status LookupQueries::NotTaken(const Query& query, const absl::Status& why) const {
  const absl::StatusCode code = IsFinal(why) ? why.code() : absl::StatusCode::kDeadlineExceeded;
  return {code, absl::StrCat("lookup: every byte came, but ", options_.producers[query.found_at],
                             " has not said in time that the entry is ours: ",
                             why.ToString(absl::StatusToStringMode::kWithNoExtraData))};
}

// ---------------------------------------------------------------- endings

void LookupQueries::GiveBack(size_t index, uint64_t lease) {
  if (closing_) return;  // Leases expire.
  node_
      ->Call({options_.producers[index], kLookupBackFunction, Fields().Set("lease", lease),
              DeadlineInMs(kGiveBackMs)},
             [](const absl::StatusOr<Fields>&) {})
      .IgnoreError();
}

void LookupQueries::GiveBack(const Query& found) {
  GiveBack(found.found_at, found.producers[found.found_at].lease);
}

void LookupQueries::Unask(Producer& producer, size_t index) {
  if (!producer.asked) return;
  node_->CancelCall(producer.call);
  GiveBack(index, producer.lease);  // The reply may be on its way.
  StopAsking(producer, index);      // Last: it is done again where there was no memory for that.
}

LookupQueries::Ended LookupQueries::End(uint64_t id, const absl::Status& status) {
  const auto found = queries_.find(id);
  if (!closing_) {  // First: what finds no memory here can be made again.
    std::vector<Producer>& producers = found->second->producers;
    for (size_t i = 0; i < producers.size(); ++i) Unask(producers[i], i);
  }
  std::shared_ptr<Query> query = std::move(found->second);
  LeaveCrowds(id, *query);
  due_.erase({query->due, id});
  queries_.erase(found);
  return {std::move(query), status};
}

void LookupQueries::Ended::Finish() {
  if (query == nullptr) return;
  const std::shared_ptr<LookupHandle> handle = query->handle;
  LookupResult result = std::move(query->result);
  query = nullptr;  // First: what `allocate` holds is free when the handle is done().
  handle->Finish(status, std::move(result));
}

void LookupQueries::Cancel(uint64_t id) {
  Ended ended;
  {
    const MutexLock lock(&mutex_);
    const auto found = queries_.find(id);
    if (found == queries_.end() || closing_) return;
    Query& query = *found->second;
    query.cancelled = true;
    if (query.fetch != nullptr) query.fetch->Cancel();
    const bool asks_again = query.state == State::kTaking && query.retry_at != Deadline::max();
    if (asks_again) GiveBack(query);
    // A fetch, or a question that is under way, ends it.
    if (query.state != State::kAsking && !asks_again) return;
    ended = End(id, Cancelled());
    ++cancelling_;
  }
  // Also where a callback throws: Close() waits for this.
  const absl::Cleanup finished = [this] {
    const MutexLock lock(&mutex_);
    --cancelling_;
    cancelled_.NotifyAll();
  };
  ended.Finish();
}

// ---------------------------------------------------------------- what is due

Deadline LookupQueries::NextOf(const Query& query) {
  // Else it ends with its fetch, or with the answer.
  if (query.state != State::kAsking) return query.retry_at;
  Deadline next = query.request.deadline;
  for (const Producer& producer : query.producers) {
    if (!producer.asked && !producer.refused) next = std::min(next, producer.retry_at);
  }
  return next;
}

void LookupQueries::Schedule(uint64_t id, Query& query) {
  auto due = due_.extract({query.due, id});
  query.due = NextOf(query);
  due.value().first = query.due;
  due_.insert(std::move(due));
}

void LookupQueries::TickOne(uint64_t id, Deadline now, Due& due) {
  const std::shared_ptr<Query>& query = queries_.at(id);
  if (query->state == State::kTaking) {
    Take(id, *query);
  } else if (query->state == State::kFetching) {
    query->retry_at = Deadline::max();
    due.fetches.emplace_back(id, query);
  } else if (query->request.deadline <= now) {
    due.late.push_back(End(id, TooLate(*query)));
    return;
  } else {
    for (size_t i = 0; i < query->producers.size(); ++i) {
      const Producer& producer = query->producers[i];
      if (!producer.asked && !producer.refused && producer.retry_at <= now) Ask(id, *query, i);
    }
  }
  Schedule(id, *query);
}

Deadline LookupQueries::Tick(Deadline now) {
  Due due;
  Deadline next;
  {
    const MutexLock lock(&mutex_);
    if (closing_) return Deadline::max();
    while (!due_.empty() && due_.begin()->first <= now) TickOne(due_.begin()->second, now, due);
    for (size_t i = 0; i < crowds_.size(); ++i) GivePlaces(i);
    next = due_.empty() ? Deadline::max() : due_.begin()->first;
  }
  for (Ended& one : due.late) one.Finish();
  for (auto& [id, query] : due.fetches) Fetch(id, std::move(query), absl::OkStatus());
  return next;
}

// ---------------------------------------------------------------- who has no place

int64_t LookupQueries::QuestionBytes(const Query& query) {
  const auto& tokens = query.request.tokens;
  return kBareQuestionBytes + (tokens ? std::ssize(*tokens) * int64_t{sizeof(int32_t)} : 0);
}

void LookupQueries::JoinCrowd(uint64_t id, Query& query, size_t index, bool in_turn) {
  crowds_[index].lookups.Join(id, QuestionBytes(query), in_turn);
  query.producers[index].crowded = true;
}

void LookupQueries::LeaveCrowd(uint64_t id, Query& query, size_t index) {
  if (!std::exchange(query.producers[index].crowded, false)) return;
  crowds_[index].lookups.Leave(id, QuestionBytes(query));
}

void LookupQueries::LeaveCrowds(uint64_t id, Query& query) {
  for (size_t i = 0; i < query.producers.size(); ++i) LeaveCrowd(id, query, i);
}

bool LookupQueries::GivePlace(size_t index, int64_t shorter_than) {
  const uint64_t id = crowds_[index].lookups.FirstShorterThan(shorter_than);
  if (id == 0) return false;
  Query& query = *queries_.at(id);
  Ask(id, query, index);
  query.producers[index].by_place = true;
  Schedule(id, query);
  return true;
}

void LookupQueries::PassOnPlace(const Query& refused, size_t index) {
  const Producer& producer = refused.producers[index];
  Crowd& crowd = crowds_[index];
  // What was asked before says nothing of a place that has been passed on since.
  const bool is_news = producer.number >= crowd.passed_on;
  const bool in_vain = producer.by_place || (is_news && crowd.waiting < crowd.full_at);
  if (is_news) crowd.full_at = crowd.waiting;
  if (!in_vain || !GivePlace(index, QuestionBytes(refused))) return;
  ++crowd.full_at;  // Until the shorter one is refused as well.
  crowd.passed_on = crowd.last;
}

void LookupQueries::GivePlaces(size_t index) {
  const Crowd& crowd = crowds_[index];
  const auto asked = [&crowd] { return crowd.waiting + std::ssize(crowd.unheard); };
  while (asked() < crowd.full_at && GivePlace(index, LookupCrowd::kAnyLength)) continue;
}

}  // namespace kvferry
