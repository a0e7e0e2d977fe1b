#include "transport/receiver.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/random.h"
#include "base/status.h"

namespace kvferry {
namespace {

// Beyond these no machine copies a chunk in a millisecond any more.
constexpr int64_t kMaxThreadsInPlace = 8;

// Behind each the device has nothing to do until the next list has been read and launched, some 30
// to 100 us, in which it could move some 100 MB. More would be waited for longer by who ends the
// fetch, 20 ms where the pages come over a bus.
constexpr int64_t kBytesInPlaceOnDevice = 512 << 20;

// One after another that brought nothing: whoever answers so many times so would be asked for ever.
constexpr int kMaxFutileRequests = 100;

// The sender computes a checksum by itself, so its time counts.
int64_t BytesInPlace(const Config& config, const StreamPlan& plan) {
  if (!plan.on_host()) return kBytesInPlaceOnDevice;
  return kBytesInPlace * (config.checksum ? 1 : std::min(config.copy_threads, kMaxThreadsInPlace));
}

// What a connection says of its end may not name whose it was.
absl::Status OfSession(const std::string& address, const absl::Status& end) {
  if (absl::StrContains(end.message(), address)) return end;
  return {end.code(), absl::StrCat("the session with ", address, " ended: ", end.message())};
}

}  // namespace

Receiver::Receiver(const Config& config, ThreadPool* copy_threads, Outbox* outbox, Metrics* metrics,
                   ValueFormat values)
    : config_(config),
      values_(std::move(values)),
      outbox_(outbox),
      metrics_(metrics),
      copy_(copy_threads) {}

void Receiver::Add(Fetch&& fetch) {
  const bool is_new = fetch.turn == 0;
  ++(is_new ? metrics_->fetches_started : metrics_->fetches_restarted);
  if (is_new) fetch.turn = waiting_.NextTurn();
  const uint64_t transfer_id = fetch.transfer_id;
  waiting_.Add(fetch.peer, fetch.turn, transfer_id);
  transfer_ids_[fetch.id] = transfer_id;
  deadlines_.emplace(fetch.deadline, fetch.id);
  fetches_.emplace(transfer_id, std::move(fetch));
  metrics_->fetches_active = static_cast<int64_t>(fetches_.size());
}

Receiver::Fetch Receiver::Remove(uint64_t transfer_id) {
  Fetch fetch = std::move(fetches_.extract(transfer_id).mapped());
  transfer_ids_.erase(fetch.id);
  deadlines_.erase({fetch.deadline, fetch.id});
  return fetch;
}

Receiver::Fetch* Receiver::Assign(uint64_t id, const PeerKey& peer, uint64_t lease_id) {
  const auto found = transfer_ids_.find(id);
  if (found == transfer_ids_.end()) return nullptr;
  Fetch& fetch = fetches_.find(found->second)->second;
  if (!fetch.peer.empty()) return nullptr;
  waiting_.Remove(fetch.peer, fetch.turn);
  fetch.peer = peer;
  waiting_.Add(peer, fetch.turn, fetch.transfer_id);
  fetch.ticket.lease_id = lease_id;
  return &fetch;
}

template <typename Matches>
std::vector<uint64_t> Receiver::IdsWhere(const Matches& matches) const {
  std::vector<uint64_t> ids;
  for (const auto& [id, fetch] : fetches_) {
    if (matches(fetch)) ids.push_back(id);
  }
  return ids;
}

void Receiver::OnPeerReady(const PeerKey& peer, uint64_t epoch, LinkId link) {
  ready_[peer] = {link, epoch};
  RequestWaiting(peer);
}

void Receiver::RequestWaiting(const PeerKey& peer) {
  const auto session = ready_.find(peer);
  if (session == ready_.end()) return;
  for (uint64_t id; (id = waiting_.First(peer)) != 0 && outbox_->HasRoom(peer);) {
    Request(fetches_.find(id)->second, session->second);
  }
}

void Receiver::Request(Fetch& fetch, const Ready& session) {
  const uint64_t transfer_id = fetch.transfer_id;
  if (fetch.ticket.epoch == 0) fetch.ticket.epoch = session.epoch;  // From now on it is that one's.
  if (session.epoch != fetch.ticket.epoch) {
    Fail(transfer_id, absl::NotFoundError(
                          absl::StrCat("the prefill side at ", fetch.ticket.address,
                                       " has restarted since it gave out the ticket; prefill the "
                                       "request again")));
    return;
  }
  const Deadline now = Clock::now();
  if (fetch.requested_at == Deadline{}) fetch.requested_at = now;
  OpenLanding(fetch);
  if (EndIfWhole(fetch)) return;  // Nothing was wanted.
  fetch.known_as = transfer_id;
  FetchMsg message;
  message.transfer_id = transfer_id;
  message.lease_id = fetch.ticket.lease_id;
  message.positions = fetch.positions;
  message.timeout_ms = std::max<int64_t>(1, MsUntil(fetch.deadline, now));
  message.chunk_bytes = config_.chunk_bytes;
  message.window_bytes = config_.chunk_bytes * config_.credits_per_transfer;
  message.checksum = config_.checksum;
  message.in_place_bytes = BytesInPlace(config_, *fetch.plan);
  message.tail_bytes = fetch.plan->tail_bytes();
  message.replaces = fetch.replaces;
  message.attempt = fetch.attempt;
  message.from_bytes = fetch.from_bytes;
  if (fetch.early) message.wait_ms = message.timeout_ms;
  message.heads = fetch.heads;
  message.reader = fetch.reader;
  message.form = fetch.form;
  message.values = values_;
  if (!fetch.packed) message.reads = outbox_->data().CostsOfReads(session.link);
  fetch.may_be_listed = message.reads.possible();
  outbox_->Send(fetch.peer, std::move(message));
}

void Receiver::OnPeerGone(const PeerKey& peer, const absl::Status& status) {
  ready_.erase(peer);
  for (const uint64_t id : IdsWhere([&](const Fetch& f) { return f.peer == peer; })) {
    Fail(id, OfSession(fetches_.find(id)->second.ticket.address, status));
  }
}

std::vector<Receiver::Fetch> Receiver::TakeUnfinished(const PeerKey& peer, Deadline since) {
  std::vector<Fetch> taken;
  for (const uint64_t id :
       IdsWhere([&](const Fetch& f) { return f.peer == peer && f.redial && f.created > since; })) {
    std::optional<Fetch> fetch = TakeOut(id);
    if (!fetch.has_value()) continue;
    fetch->peer.clear();
    fetch->known_as = 0;
    taken.push_back(*std::move(fetch));
  }
  return taken;
}

std::optional<Receiver::Fetch> Receiver::TakeOut(uint64_t transfer_id) {
  if (CloseAndEndIfWhole(fetches_.find(transfer_id)->second)) return std::nullopt;
  Fetch fetch = Remove(transfer_id);
  fetch.transfer_id = RandomId();
  if (fetch.requested()) {
    ++fetch.attempt;
    // Of a request that brought nothing nobody knows whether it was heard: then the sender has
    // either that one, which has said what it replaces, or the one before.
    if (fetch.replaces == 0 || fetch.bytes_arrived() > fetch.from_bytes) {
      fetch.replaces = transfer_id;
    }
    fetch.from_bytes = fetch.landing->prefix();
    Log().info("fetch {:x} goes on as {:x} from byte {} of {}", transfer_id, fetch.transfer_id,
               fetch.from_bytes, fetch.plan->total_bytes());
  }
  fetch.credited_bytes = fetch.from_bytes;
  fetch.landing = nullptr;
  return fetch;
}

bool Receiver::EndIfWhole(const Fetch& fetch) {
  const int64_t total = fetch.plan->total_bytes();
  if (!fetch.requested() || fetch.bytes_arrived() != total) return false;
  outbox_->Send(fetch.peer, DoneMsg{fetch.transfer_id, fetch.ticket.lease_id, total, fetch.reader});
  End(fetch.transfer_id, absl::OkStatus());
  return true;
}

bool Receiver::CloseAndEndIfWhole(const Fetch& fetch) {
  CloseLanding(fetch);  // First, so that no lane adds to it any more.
  return EndIfWhole(fetch);
}

bool Receiver::RequestAgain(uint64_t transfer_id) {
  const auto found = fetches_.find(transfer_id);
  if (found == fetches_.end() || !found->second.redial ||
      found->second.futile_requests >= kMaxFutileRequests) {
    return false;
  }
  const int64_t began_at = found->second.from_bytes;
  std::optional<Fetch> fetch = TakeOut(transfer_id);
  if (!fetch.has_value()) return true;
  fetch->futile_requests = fetch->from_bytes > began_at ? 0 : fetch->futile_requests + 1;
  const PeerKey peer = fetch->peer;
  Add(*std::move(fetch));
  RequestWaiting(peer);
  return true;
}

void Receiver::OnRefuse(const PeerKey& peer, const RefuseMsg& refuse) {
  const auto found = fetches_.find(refuse.transfer_id);
  if (found == fetches_.end() || found->second.peer != peer) return;
  Fail(refuse.transfer_id,
       absl::Status(refuse.status.code(), absl::StrCat("refused by ", found->second.ticket.address,
                                                       ": ", refuse.status.message())));
}

void Receiver::OnAbort(const PeerKey& peer, const AbortMsg& abort) {
  const auto found = fetches_.find(abort.transfer_id);
  if (found == fetches_.end() || found->second.peer != peer) return;
  if (abort.again && found->second.early && RequestAgain(abort.transfer_id)) return;
  Fail(abort.transfer_id,
       absl::Status(abort.status.code(), absl::StrCat("given up by ", found->second.ticket.address,
                                                      ": ", abort.status.message())));
}

void Receiver::OpenLanding(Fetch& fetch) {
  const int64_t max_chunk_bytes = std::max(config_.chunk_bytes, BytesInPlace(config_, *fetch.plan));
  waiting_.Remove(fetch.peer, fetch.turn);
  fetch.landing = std::make_shared<Landing>(fetch.plan, fetch.handle, fetch.from_bytes,
                                            max_chunk_bytes, config_.checksum, metrics_);
  const MutexLock lock(&landings_mutex_);
  landings_.emplace(fetch.transfer_id, fetch.landing);
}

void Receiver::CloseLanding(const Fetch& fetch) {
  if (!fetch.requested()) return waiting_.Remove(fetch.peer, fetch.turn);  // It has none.
  {
    const MutexLock lock(&landings_mutex_);
    landings_.erase(fetch.transfer_id);
  }
  fetch.landing->Close();
}

void Receiver::OnChunk(const ChunkHeader& header, const Payload& payload,
                       ChunkTaker::Intact intact) {
  OnLanded(header, Land(header, payload, intact, &copy_));
}

void Receiver::OnChunkElsewhere(const ChunkHeader& header, std::span<const std::byte> list) {
  const auto found = fetches_.find(header.transfer_id);
  const auto session = found == fetches_.end() ? ready_.end() : ready_.find(found->second.peer);
  // The transfer says whose memory is meant: nobody else's can be named.
  if (session == ready_.end()) return OnLanded(header, absl::NotFoundError("no such fetch"));
  if (!found->second.may_be_listed) {
    return OnLanded(header, absl::DataLossError("a chunk to be read out of the sender's memory, "
                                                "which was not asked for"));
  }
  outbox_->data().Read(session->second.link, header, list);
}

std::shared_ptr<Landing> Receiver::FindLanding(uint64_t transfer_id) {
  const MutexLock lock(&landings_mutex_);
  const auto found = landings_.find(transfer_id);
  return found == landings_.end() ? nullptr : found->second;
}

absl::Status Receiver::Land(const ChunkHeader& header, const Payload& payload,
                            ChunkTaker::Intact intact, PieceCopy* copy) {
  const std::shared_ptr<Landing> landing = FindLanding(header.transfer_id);
  if (landing == nullptr) return absl::NotFoundError("no such fetch");
  return landing->Accept(header, payload, intact, copy);
}

std::unique_ptr<ChunkSink> Receiver::Begin(const ChunkHeader& header, PieceCopy* copy,
                                           LandingChunk::Landed landed) {
  std::shared_ptr<Landing> landing = FindLanding(header.transfer_id);
  const absl::Status status =
      landing == nullptr ? absl::NotFoundError("no such fetch") : landing->Begin(header);
  if (status.ok()) {
    return std::make_unique<LandingChunk>(header, std::move(landing), copy, std::move(landed));
  }
  landed(header, status);
  return nullptr;
}

std::unique_ptr<ChunkSink> Receiver::OnChunkBegins(const ChunkHeader& header) {
  return Begin(header, &copy_,
               [this](const ChunkHeader& of, const absl::Status& status) { OnLanded(of, status); });
}

void Receiver::OnLanded(const ChunkHeader& header, const absl::Status& status) {
  ++metrics_->chunks_received;
  if (!status.ok()) ++metrics_->chunks_dropped;
  const auto found = fetches_.find(header.transfer_id);
  // It may have ended since.
  if (found == fetches_.end() || absl::IsNotFound(status)) return;
  Fetch& fetch = found->second;
  // The network's fault, or a sender's that thought us dead and took back what we had not read.
  if (absl::IsUnavailable(status) && RequestAgain(header.transfer_id)) return;
  if (!status.ok()) {
    GiveUp(header.transfer_id, status);
    return;
  }
  if (EndIfWhole(fetch)) return;
  // One that was read in place was in no buffer, and its reader has said that it is through.
  if ((header.flags & kChunkInPool) == 0) Credit(fetch);
}

// What is asked for again comes packed: where reads do not work, and where there is no room for
// more of them.
void Receiver::OnReadFailed(const ChunkHeader& header, const absl::Status& status) {
  const auto found = fetches_.find(header.transfer_id);
  const bool no_room =
      found != fetches_.end() && found->second.redial && absl::IsResourceExhausted(status);
  if (no_room) found->second.packed = true;
  OnLanded(header, no_room ? absl::UnavailableError(status.message()) : status);
}

void Receiver::Credit(Fetch& fetch) {
  // A quarter of the window at a time: often enough that the sender never runs dry, and one credit
  // pays for several chunks. A window of one chunk is paid back at once: the next chunk may need
  // all of it.
  const int64_t credits = config_.credits_per_transfer;
  const int64_t step = credits == 1 ? 1 : std::max<int64_t>(1, credits / 4) * config_.chunk_bytes;
  const int64_t arrived = fetch.bytes_arrived();
  if (arrived - fetch.credited_bytes < step) return;
  const auto session = ready_.find(fetch.peer);
  if (session == ready_.end()) return;
  fetch.credited_bytes = arrived;
  outbox_->data().SendCredit(session->second.link,
                             {fetch.transfer_id, static_cast<uint64_t>(fetch.credited_bytes)});
}

void Receiver::Cancel(uint64_t id, const absl::Status& status) {
  const auto found = transfer_ids_.find(id);
  if (found != transfer_ids_.end()) GiveUp(found->second, status);
}

void Receiver::CancelAll(const absl::Status& status) {
  for (const uint64_t id : IdsWhere([](const Fetch&) { return true; })) GiveUp(id, status);
}

void Receiver::GiveUp(uint64_t transfer_id, const absl::Status& status) {
  const Fetch& fetch = fetches_.find(transfer_id)->second;
  if (CloseAndEndIfWhole(fetch)) return;
  if (fetch.known_as != 0) {
    outbox_->Send(fetch.peer, CancelMsg{fetch.known_as, std::string(status.message())});
  }
  End(transfer_id, status);
}

void Receiver::Fail(uint64_t transfer_id, const absl::Status& status) {
  if (!CloseAndEndIfWhole(fetches_.find(transfer_id)->second)) End(transfer_id, status);
}

void Receiver::End(uint64_t transfer_id, const absl::Status& status) {
  const Fetch fetch = Remove(transfer_id);
  const Deadline now = Clock::now();
  const int64_t total = fetch.plan->total_bytes();
  const Deadline left = fetch.requested_at == Deadline{} ? now : fetch.requested_at;
  CloseLanding(fetch);  // The pages are the caller's again.
  const FetchReport report{total, fetch.bytes_arrived(), SecondsBetween(fetch.created, left),
                           SecondsBetween(left, now)};
  ++(status.ok() ? metrics_->fetches_ok : metrics_->fetches_failed);
  metrics_->fetches_active = static_cast<int64_t>(fetches_.size());
  if (!status.ok()) {
    Log().warn("fetch {:x} from {} failed after {} of {} bytes: {}", transfer_id,
               fetch.ticket.address, report.bytes_done, total, status.ToString());
  }
  const std::vector<std::pair<int64_t, int64_t>> gaps =
      fetch.requested() ? fetch.landing->Gaps() : ByteRanges(fetch.from_bytes).Gaps(total);
  fetch.handle->Finish(status, fetch.plan->PagesTouchedBy(gaps), report);
}

std::string Receiver::Overdue(const Fetch& fetch) const {
  if (fetch.peer.empty()) return "nobody has pushed to these pages in time";
  const bool anew = fetch.replaces != 0;
  const char* silent =
      anew ? ", and then the peer has not answered again" : ", the peer never answered";
  if (ready_.contains(fetch.peer)) {
    silent = anew ? ", and then the peer took so little that it was not asked again"
                  : ", and the peer took so little that it was never asked";
  }
  const char* unheard_of = fetch.early && fetch.bytes_arrived() == 0
                               ? "; was the prefill side given the same request?"
                               : "";
  const std::string why = outbox_->WhyUnreachable(fetch.peer);
  const std::string unasked = absl::StrCat(silent, why.empty() ? "" : ": ", why);
  return absl::StrCat("the fetch from ", fetch.ticket.address,
                      " did not end in time: ", fetch.bytes_arrived(), " of ",
                      fetch.plan->total_bytes(), " bytes arrived",
                      fetch.requested() ? unheard_of : unasked);
}

Deadline Receiver::Tick(Deadline now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const uint64_t id = deadlines_.begin()->second;
    const Fetch& fetch = fetches_.find(transfer_ids_.find(id)->second)->second;
    Cancel(id, absl::DeadlineExceededError(Overdue(fetch)));
  }
  return deadlines_.empty() ? Deadline::max() : deadlines_.begin()->first;
}

}  // namespace kvferry
