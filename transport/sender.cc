#include "transport/sender.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"

namespace kvferry {
namespace {

// The decode side gives up at its own deadline and says so; this is for one that cannot any more.
constexpr int64_t kDeadlineSlackMs = 1000;
// Transfers of which a `done` may still be on its way: as many as a peer may have under way.
constexpr size_t kMaxTakenBack = 1024;
// No receiver of ours has shorter chunks: it is the least chunk_bytes that Config takes.
constexpr int64_t kMinChunkBytes = 4 << 10;
// Pages smaller than this are cheaper to gather than to name one by one.
constexpr int64_t kMinBytesInPlace = 256;
// Of all peers, for each processor: one that is copied, and one that is next. More readers at once
// only take the processors from each other (64 of them on two moved half as much, measured).
constexpr int64_t kMaxReadersAProcessor = 2;
// Who reads in place gets what is there.
bool MayBeReadInPlace(const StreamPlan& plan) {
  return plan.min_item_bytes() >= kMinBytesInPlace && !plan.casts();
}

PathModel::Work WorkOf(const StreamPlan& plan) {
  return {plan.pages_bytes(), plan.mean_piece_bytes()};
}

}  // namespace

Sender::Sender(const Config& config, std::shared_ptr<const KvPool> pool, FetchSource* source,
               Arena* arena, Outbox* outbox, Metrics* metrics, const MachineTraits& machine,
               HeadShare heads, ValueFormat values)
    : config_(config),
      pool_(std::move(pool)),
      heads_(heads),
      values_(std::move(values)),
      source_(source),
      arena_(arena),
      outbox_(outbox),
      metrics_(metrics),
      regions_(*pool_),
      copies_(machine.copies),
      paths_(machine.copies),
      max_read_in_place_(kMaxReadersAProcessor * machine.processors),
      under_way_(std::make_shared<ChunksUnderWay>(ChunksUnderWay{.arena = arena})) {
  metrics_->arena_chunks = arena_->num_chunks();
}

void Sender::UpdateGauges() {
  metrics_->transfers_active = static_cast<int64_t>(transfers_.size());
  metrics_->arena_chunks_taken = arena_->num_taken();
}

absl::Status Sender::CheckLimits(const PeerKey& peer, const FetchMsg& fetch) const {
  if (source_ == nullptr) {
    return absl::FailedPreconditionError(
        "this endpoint publishes nothing; fetch from a prefill one");
  }
  // Shorter ones would cost this side, and whoever else it serves, more than they bring.
  if (std::min(fetch.chunk_bytes, fetch.window_bytes) < kMinChunkBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunks of ", fetch.chunk_bytes, " bytes and a window of ", fetch.window_bytes,
                     " asked for; ask for ", kMinChunkBytes, " at least of both"));
  }
  const auto count = fetches_of_peer_.find(peer);
  if (count != fetches_of_peer_.end() && count->second >= config_.max_fetches_per_peer) {
    return absl::ResourceExhaustedError(absl::StrCat("max_fetches_per_peer (",
                                                     config_.max_fetches_per_peer,
                                                     ") are under way; wait for one to end"));
  }
  if (parked_.Has(fetch.transfer_id) || transfers_.contains(fetch.transfer_id)) {
    return absl::AlreadyExistsError("the transfer id is in use");
  }
  return absl::OkStatus();
}

void Sender::Refuse(const PeerKey& peer, uint64_t transfer_id, const absl::Status& status) {
  ++metrics_->fetches_refused;
  if (const auto more = refused_.Next()) {
    Log().warn("refused a fetch: {}{}", status.ToString(), *more);
  }
  outbox_->Send(peer, RefuseMsg{transfer_id, status});
}

void Sender::ForgetFetch(const PeerKey& peer) {
  const auto count = fetches_of_peer_.find(peer);
  if (count != fetches_of_peer_.end() && --count->second == 0) fetches_of_peer_.erase(count);
}

template <typename Matches>
std::vector<uint64_t> Sender::IdsWhere(const Matches& matches) const {
  std::vector<uint64_t> ids;
  for (const TransferPtr& transfer : turn_) {
    if (matches(*transfer)) ids.push_back(transfer->fetch.transfer_id);
  }
  return ids;
}

void Sender::OnFetch(const PeerKey& peer, LinkId link, FetchMsg fetch) {
  if (IsOutrun(fetch)) {
    Refuse(peer, fetch.transfer_id, absl::CancelledError("a later attempt has come before it"));
    return;
  }
  if (fetch.replaces != 0) EndReplaced(fetch);
  if (const absl::Status status = CheckLimits(peer, fetch); !status.ok()) {
    Refuse(peer, fetch.transfer_id, status);
    return;
  }
  ++fetches_of_peer_[peer];
  const int64_t wait_ms = std::min(fetch.wait_ms, config_.max_fetch_timeout_ms);
  const int64_t park_ms =
      std::max(config_.publish_grace_ms, wait_ms > 0 ? wait_ms + kDeadlineSlackMs : 0);
  RetryParked({std::move(fetch), peer, link, DeadlineInMs(park_ms)}, Clock::now());
}

void Sender::RetryParked(ParkedFetch parked, Deadline now) {
  absl::StatusOr<LeasedMemory> leased =
      source_->BeginTransfer(parked.fetch.lease_id, parked.fetch.reader);
  if (leased.ok()) {
    Start(parked.peer, parked.link, std::move(parked.fetch), *leased);
    return;
  }
  if (absl::IsNotFound(leased.status()) && now < parked.until) {
    parked_.Add(std::move(parked));
    return;
  }
  ForgetFetch(parked.peer);
  Refuse(parked.peer, parked.fetch.transfer_id, NeverPublished(parked.fetch, leased.status()));
}

// Who would have waited longer waits still: else its own deadline is over.
absl::Status Sender::NeverPublished(const FetchMsg& fetch, const absl::Status& unknown) const {
  if (!absl::IsNotFound(unknown) || fetch.wait_ms <= config_.max_fetch_timeout_ms) return unknown;
  return absl::DeadlineExceededError(
      absl::StrCat("lease ", absl::Hex(fetch.lease_id),
                   " was not published within this side's max_fetch_timeout_ms (",
                   config_.max_fetch_timeout_ms, "), the longest that a fetch may wait for it"));
}

// The plan is of what this side reads: its own pages, cut as the receiver has them.
absl::StatusOr<StreamPlan> Sender::PlanFor(const FetchMsg& fetch,
                                           const LeasedMemory& leased) const {
  if (fetch.positions.num_pages() == 0 && fetch.tail_bytes == 0) {
    return absl::OutOfRangeError(
        absl::StrCat("0 pages asked of a lease of ", leased.pages.num_pages()));
  }
  const int64_t tail_bytes = leased.tail ? static_cast<int64_t>(leased.tail->size()) : 0;
  if (fetch.tail_bytes != 0 && fetch.tail_bytes != tail_bytes) {
    return absl::OutOfRangeError(
        absl::StrCat("a tail of ", fetch.tail_bytes, " bytes asked of a lease with ", tail_bytes));
  }
  KVFERRY_ASSIGN_OR_RETURN(const HeadRange heads, LocalHeads(pool_->layout(), heads_, fetch.heads));
  StreamTail tail;
  // A sender only reads; a plan serves both sides.
  if (fetch.tail_bytes != 0) {
    tail = {const_cast<std::byte*>(leased.tail->data()), tail_bytes, leased.tail};
  }
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<const ValueCasts> casts,
                           ValueCasts::Make(pool_->layout(), values_, fetch.values));
  return StreamPlan::CreateIn(fetch.form, pool_, leased.pages, fetch.positions, std::move(tail),
                              heads, std::move(casts));
}

void Sender::Start(const PeerKey& peer, LinkId link, FetchMsg fetch, const LeasedMemory& leased) {
  absl::StatusOr<StreamPlan> plan = PlanFor(fetch, leased);
  if (plan.ok() && fetch.from_bytes >= plan->total_bytes()) {
    plan = absl::OutOfRangeError(absl::StrCat("from byte ", fetch.from_bytes,
                                              " asked of a stream of ", plan->total_bytes()));
  }
  if (!plan.ok()) {
    source_->EndTransfer(fetch.lease_id, fetch.reader, plan.status());
    ForgetFetch(peer);
    Refuse(peer, fetch.transfer_id, plan.status());
    return;
  }
  const int64_t timeout_ms = std::min(fetch.timeout_ms, config_.max_fetch_timeout_ms);
  const int64_t chunk_bytes =
      std::min({fetch.chunk_bytes, config_.chunk_bytes, fetch.window_bytes});
  const int64_t ready_bytes = ReadyBytes(*plan, fetch.lease_id);
  const uint64_t id = fetch.transfer_id;
  {
    const PageRuns spent = std::move(fetch.positions);  // The plan has what they stand for.
  }
  auto transfer = std::make_shared<Transfer>(
      Transfer{std::move(fetch), peer, link, *std::move(plan),
               DeadlineInMs(timeout_ms + kDeadlineSlackMs), chunk_bytes, ready_bytes});
  transfer->sent_bytes = transfer->credited_bytes = transfer->fetch.from_bytes;
  ChooseWay(*transfer);
  if (transfer->plan.casts()) ++metrics_->transfers_cast;
  transfers_.emplace(id, transfer);
  turn_.push_back(std::move(transfer));
  ++metrics_->transfers_started;
  UpdateGauges();
}

// How the peer is to get the pages of a transfer that begins.
void Sender::ChooseWay(Transfer& transfer) {
  // Transfers beside each other say nothing of what either takes alone.
  for (const TransferPtr& other : turn_) other->tells_costs = false;
  const StreamPlan& plan = transfer.plan;
  if (plan.pages_bytes() == 0) return;
  if (!plan.on_host()) return ChooseWayOfDevice(transfer);
  if (!MayBeReadInPlace(plan)) return;
  PathModel* const model = ModelOf(transfer);
  if (model == nullptr) return;
  const bool from_afar = model != &paths_;
  const std::string& wanted = from_afar ? config_.network_path : config_.same_host_path;
  if (wanted == "auto") {
    transfer.tells_costs = turn_.empty() && transfer.ready_bytes == plan.total_bytes() &&
                           transfer.fetch.from_bytes == 0;
    TakeWay(transfer, model->Choose(WorkOf(plan), transfer.tells_costs), from_afar);
  } else if (wanted == "in_place" || wanted == "direct") {
    TakeWay(transfer, PageWay::kInPlace, from_afar);
  }
}

// Through the host it takes two more copies, over a bus. But a checksum is made by the processor.
void Sender::ChooseWayOfDevice(Transfer& transfer) {
  const bool mapped =
      outbox_->data().PoolReads(transfer.link) == ChunkLinks::ReadsPool::kOnThisHost;
  if (!mapped || transfer.fetch.checksum) return;
  if (on_device_.pages && MayBeReadInPlace(transfer.plan) && config_.same_host_path != "arena") {
    TakeWay(transfer, PageWay::kInPlace, /*from_afar=*/false);
  } else if (on_device_.arena != nullptr) {
    ++metrics_->transfers_on_device;
    transfer.way = PageWay::kDeviceArena;
  }
}

PathModel* Sender::ModelOf(const Transfer& transfer) {
  switch (outbox_->data().PoolReads(transfer.link)) {
    case ChunkLinks::ReadsPool::kNo:
      return nullptr;
    case ChunkLinks::ReadsPool::kOnThisHost:
      return &paths_;
    case ChunkLinks::ReadsPool::kFromAfar:
      break;
  }
  const ReadCosts& reads = transfer.fetch.reads;
  if (guards_ == nullptr || !reads.possible()) return nullptr;
  return &paths_to_.try_emplace(transfer.peer, copies_, reads).first->second;
}

void Sender::TakeWay(Transfer& transfer, PageWay way, bool from_afar) {
  if (way == PageWay::kArena) return;
  if (from_afar) {
    transfer.guard = guards_->Take();
    if (transfer.guard < 0) return;  // As many at once as there are words: this one is packed.
    ++metrics_->transfers_direct;
  } else {
    ++metrics_->transfers_in_place;
  }
  transfer.way = way;
}

void Sender::LearnCosts(const Transfer& transfer) {
  PathModel* const model = transfer.tells_costs ? ModelOf(transfer) : nullptr;
  if (model == nullptr) return;
  model->Observe(transfer.way, WorkOf(transfer.plan),
                 SecondsBetween(transfer.started_at, Clock::now()));
}

int64_t Sender::ReadyBytes(const StreamPlan& plan, uint64_t lease_id) const {
  return plan.BytesOfLayers(std::max<int64_t>(0, source_->ReadyLayers(lease_id)));
}

void Sender::OnLeaseChanged(uint64_t lease_id) {
  for (const TransferPtr& transfer : turn_) {
    if (transfer->fetch.lease_id == lease_id) {
      transfer->ready_bytes = ReadyBytes(transfer->plan, lease_id);
    }
  }
  const Deadline now = Clock::now();
  for (ParkedFetch& parked : parked_.TakeOfLease(lease_id)) RetryParked(std::move(parked), now);
}

void Sender::OnDone(const PeerKey& peer, const DoneMsg& done) {
  const auto found = transfers_.find(done.transfer_id);
  if (found == transfers_.end()) {
    OnDoneAfterEnd(peer, done);
    return;
  }
  const Transfer& transfer = *found->second;
  if (transfer.peer != peer) return;
  const int64_t total = transfer.plan.total_bytes();
  if (done.bytes != total || transfer.sent_bytes != total) {
    End(done.transfer_id,
        absl::InternalError(absl::StrCat("the receiver reports ", done.bytes, " bytes, of ", total,
                                         " to send ", transfer.sent_bytes, " were sent")),
        /*tell=*/true);
    return;
  }
  LearnCosts(transfer);
  End(done.transfer_id, absl::OkStatus(), /*tell=*/false);
}

// Or without a transfer: the receiver needs nothing. So does one that had everything before it
// heard that its lease was taken back: it will not come when the lease is published again.
void Sender::OnDoneAfterEnd(const PeerKey& peer, const DoneMsg& done) {
  if (source_ == nullptr) return;
  if (done.bytes == 0) {
    source_->NothingNeeded(done.lease_id, done.reader);
    return;
  }
  const auto taken_back =
      std::find_if(taken_back_.begin(), taken_back_.end(), [&](const TakenBack& entry) {
        return entry.transfer_id == done.transfer_id && entry.peer == peer;
      });
  if (taken_back == taken_back_.end() || taken_back->bytes != done.bytes) return;
  source_->NothingNeeded(taken_back->lease_id, taken_back->reader);
  taken_back_.erase(taken_back);
}

void Sender::OnCancel(const PeerKey& peer, const CancelMsg& cancel) {
  const auto found = transfers_.find(cancel.transfer_id);
  if (found != transfers_.end() && found->second->peer == peer) {
    End(cancel.transfer_id, absl::CancelledError(absl::StrCat("the receiver: ", cancel.reason)),
        false);
  }
  const ParkedFetch* const parked = parked_.Find(cancel.transfer_id);
  if (parked != nullptr && parked->peer == peer) ForgetParked(cancel.transfer_id);
}

// Sessions do not outrun themselves, but each other. One that goes on with nothing is refused for
// the transfer under way, if there is one.
bool Sender::IsOutrun(const FetchMsg& fetch) const {
  for (const uint64_t id : parked_.IdsOfLease(fetch.lease_id)) {
    if (parked_.Find(id)->fetch.GoesOnWith(fetch)) return true;
  }
  return fetch.replaces != 0 &&
         !IdsWhere([&](const Transfer& t) { return t.fetch.GoesOnWith(fetch); }).empty();
}

// The session of the fetch that is replaced may not have ended here yet, and while it lasts the
// lease is taken.
void Sender::EndReplaced(const FetchMsg& fetch) {
  for (const uint64_t id : IdsWhere([&](const Transfer& t) { return fetch.GoesOnWith(t.fetch); })) {
    End(id, absl::CancelledError("the receiver goes on with another fetch"), /*tell=*/false);
  }
  for (const uint64_t id : parked_.IdsOfLease(fetch.lease_id)) {
    if (fetch.GoesOnWith(parked_.Find(id)->fetch)) ForgetParked(id);
  }
}

void Sender::ForgetParked(uint64_t transfer_id) {
  if (const auto parked = parked_.Take(transfer_id)) ForgetFetch(parked->peer);
}

void Sender::OnCredit(const CreditHeader& credit) {
  const auto found = transfers_.find(credit.transfer_id);
  if (found == transfers_.end()) return;
  Transfer& transfer = *found->second;
  // Credit for what was not sent, or less than before, is no credit.
  const auto done =
      static_cast<int64_t>(std::min<uint64_t>(credit.bytes_done, transfer.sent_bytes));
  transfer.credited_bytes = std::max(transfer.credited_bytes, done);
}

void Sender::OnPeerGone(const PeerKey& peer, const absl::Status& status) {
  parked_.ForgetPeer(peer);
  for (const uint64_t id : IdsWhere([&](const Transfer& t) { return t.peer == peer; })) {
    const TransferPtr transfer = Stop(id, status);
    source_->OnReaderGone(transfer->fetch.lease_id, transfer->fetch.reader, status);
  }
  fetches_of_peer_.erase(peer);
  paths_to_.erase(peer);
}

void Sender::AbortLease(uint64_t lease_id, const absl::Status& status, bool again) {
  for (const uint64_t id :
       IdsWhere([&](const Transfer& t) { return t.fetch.lease_id == lease_id; })) {
    End(id, status, /*tell=*/true, again);
  }
  OnLeaseChanged(lease_id);  // Parked fetches of it learn that there is nothing to wait for.
}

void Sender::AbortAll(const absl::Status& status) {
  for (const uint64_t id : IdsWhere([](const Transfer&) { return true; })) End(id, status, true);
}

Sender::TransferPtr Sender::Stop(uint64_t transfer_id, const absl::Status& outcome) {
  const auto found = transfers_.find(transfer_id);
  const TransferPtr transfer = found->second;
  transfers_.erase(found);
  turn_.remove(transfer);
  ForgetFetch(transfer->peer);
  // The pages are their owner's again.
  transfer->reading->Close();
  for (const int64_t chunk : transfer->read_in_place) arena_->TakeFromReaders(chunk);
  if (transfer->guard >= 0) guards_->RaiseAndGiveBack(transfer->guard);
  ++(outcome.ok() ? metrics_->transfers_ok : metrics_->transfers_failed);
  UpdateGauges();
  if (const auto more = outcome.ok() ? std::nullopt : ended_.Next()) {
    Log().warn("transfer {:x} of lease {:x} ended after {} of {} bytes: {}{}", transfer_id,
               transfer->fetch.lease_id, transfer->credited_bytes, transfer->plan.total_bytes(),
               outcome.ToString(), *more);
  }
  return transfer;
}

void Sender::End(uint64_t transfer_id, const absl::Status& outcome, bool tell, bool again) {
  const TransferPtr transfer = Stop(transfer_id, outcome);
  if (tell) outbox_->Send(transfer->peer, AbortMsg{transfer_id, outcome, again});
  if (again && transfer->sent_bytes == transfer->plan.total_bytes()) {
    taken_back_.push_back({transfer_id, transfer->peer, transfer->fetch.lease_id,
                           transfer->fetch.reader, transfer->sent_bytes});
    if (taken_back_.size() > kMaxTakenBack) taken_back_.pop_front();
  }
  source_->EndTransfer(transfer->fetch.lease_id, transfer->fetch.reader, outcome);
}

bool Sender::Pump() {
  waits_for_readers_ = has_ended_some_ = false;
  if (turn_.empty()) return false;
  for (const uint64_t id : IdsWhere([](const Transfer& t) { return !t.failed.ok(); })) {
    End(id, transfers_.find(id)->second->failed, /*tell=*/true);
    has_ended_some_ = true;
  }
  bool sent = false;
  auto turn = turn_.begin();
  for (size_t left = turn_.size(); left > 0; --left) {
    const auto next = std::next(turn);
    if (PumpOne(*turn)) {
      sent = true;
      turn_.splice(turn_.end(), turn_, turn);
    }
    turn = next;
  }
  if (sent) metrics_->arena_chunks_taken = arena_->num_taken();
  return sent;
}

absl::Status Sender::Overdue(const Transfer& transfer) const {
  if (transfer.fetch.timeout_ms <= config_.max_fetch_timeout_ms) {
    return absl::DeadlineExceededError("the receiver's deadline passed");
  }
  return absl::DeadlineExceededError(
      absl::StrCat("the transfer was given up after this side's max_fetch_timeout_ms (",
                   config_.max_fetch_timeout_ms, ")"));
}

Deadline Sender::Tick(Deadline now) {
  for (const uint64_t id : IdsWhere([&](const Transfer& t) { return t.deadline <= now; })) {
    End(id, Overdue(*transfers_.find(id)->second), /*tell=*/true);
  }
  for (ParkedFetch& parked : parked_.TakeDue(now)) RetryParked(std::move(parked), now);
  metrics_->arena_chunks_taken = arena_->num_taken();

  Deadline next = source_ == nullptr ? Deadline::max() : source_->Tick(now);
  for (const TransferPtr& transfer : turn_) next = std::min(next, transfer->deadline);
  if (waits_for_readers_) next = std::min(next, now + kReaderTurn);
  return std::min(next, parked_.next_due());
}

}  // namespace kvferry
