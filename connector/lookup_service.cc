#include "connector/lookup_service.h"

#include <algorithm>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "connector/lookup_buffer.h"

namespace kvferry {
namespace {

const LookupEntry& EntryOf(const LookupTable::Taken& taken) {
  return *static_cast<LookupEntry*>(taken.payload().get());
}

// A refusal after which nothing is leased. RESOURCE_EXHAUSTED says less: an answer that finds no
// room on its way becomes that, too, and then the consumer gives back what it has not heard of.
absl::Status NotNow(const absl::Status& status) {
  return absl::IsResourceExhausted(status) ? absl::UnavailableError(status.message()) : status;
}

}  // namespace

void LookupService::Close() {
  const MutexLock lock(&mutex_);
  closing_ = true;
}

void LookupService::DropLeased() {
  absl::flat_hash_map<uint64_t, Taken> dropped;  // Goes outside of the lock.
  const MutexLock lock(&mutex_);
  dropped.swap(leased_);
}

// ---------------------------------------------------------------- lookups

void LookupService::OnCall(const CallKey& call, const std::string& function, const Fields& args,
                           Deadline deadline) {
  absl::Status status;
  if (function == kLookupFunction) {
    status = Lookup(call, args, deadline);
  } else if (function == kLookupTakeFunction) {
    status = LookupTake(call, args);
  } else if (function == kLookupBackFunction) {
    status = LookupBack(call, args);
  } else {
    status = absl::UnimplementedError(
        absl::StrCat("a lookup buffer has no function '", absl::CEscape(function), "'"));
  }
  if (!status.ok()) node().Reply(call, status);
}

absl::Status LookupService::Lookup(const CallKey& call, const Fields& args, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, args.Uint("lease"));
  if (lease_id == 0) return absl::InvalidArgumentError("lookup: lease is 0");
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t partition, args.Uint("partition", kMaxLookupPartition));
  if (partition != static_cast<uint64_t>(options_.partition)) {
    return absl::FailedPreconditionError(absl::StrCat("lookup: partition: ", options_.partition,
                                                      " here, ", partition,
                                                      " there; ask the producer of the same rank"));
  }
  std::optional<LookupTable::Tokens> tokens;
  if (args.Has("tokens")) {
    KVFERRY_ASSIGN_OR_RETURN(const std::string_view bytes, args.Bytes("tokens"));
    KVFERRY_ASSIGN_OR_RETURN(tokens, UnpackTokens(bytes));
  }
  absl::Status may_wait;
  {
    const MutexLock lock(&mutex_);
    may_wait = StartWaiting(call, LookupTable::BytesOf(tokens));
  }
  const absl::StatusOr<uint64_t> query = Ask(call, lease_id, std::move(tokens), deadline, may_wait);
  const MutexLock lock(&mutex_);
  if (!query.ok()) {
    StopWaiting(call);
    return NotNow(query.status());
  }
  // Else it has been answered, here or on another thread.
  if (Waiting* const waiting = FindWaiting(call)) waiting->query = *query;
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> LookupService::Ask(const CallKey& call, uint64_t lease_id,
                                            std::optional<LookupTable::Tokens> tokens,
                                            Deadline deadline, const absl::Status& may_wait) {
  auto answer = [this, call, lease_id](absl::StatusOr<Taken> taken) {
    Answer(call, lease_id, std::move(taken));
  };
  if (may_wait.ok()) return table_->Ask(std::move(tokens), deadline, std::move(answer));
  absl::StatusOr<Taken> taken = table_->TryTake(tokens);
  if (absl::IsNotFound(taken.status())) return may_wait;
  KVFERRY_RETURN_IF_ERROR(taken.status());
  answer(std::move(taken));
  return 0;
}

absl::Status LookupService::StartWaiting(const CallKey& call, int64_t bytes) {
  OfPeer& of_peer = waiting_[call.peer];
  absl::Status may_wait = CheckMayWait(of_peer, bytes);
  of_peer.calls.emplace(call.id, Waiting{0, bytes});
  of_peer.bytes += bytes;
  waiting_bytes_ += bytes;
  return may_wait;
}

absl::Status LookupService::CheckMayWait(const OfPeer& of_peer, int64_t bytes) const {
  if (std::ssize(of_peer.calls) >= options_.config.max_calls_per_peer) {
    return absl::ResourceExhaustedError(
        absl::StrCat("lookup: no entry matches now, and max_calls_per_peer (",
                     options_.config.max_calls_per_peer,
                     ") lookups of this consumer wait already; ask again in a moment"));
  }
  // As with the arena's chunks: who has the most of what all share leaves some of it to others.
  const int64_t free_bytes = std::max<int64_t>(0, table_->max_waiting_bytes() - waiting_bytes_);
  if (bytes == 0 || of_peer.bytes < free_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "lookup: no entry matches now, and lookups of this consumer wait with ", of_peer.bytes,
      " bytes of tokens; all have ", table_->max_waiting_bytes(), " together, of which ",
      free_bytes, " are left for others; ask again in a moment"));
}

LookupService::Waiting* LookupService::FindWaiting(const CallKey& call) {
  const auto of_peer = waiting_.find(call.peer);
  if (of_peer == waiting_.end()) return nullptr;
  const auto waiting = of_peer->second.calls.find(call.id);
  return waiting == of_peer->second.calls.end() ? nullptr : &waiting->second;
}

std::optional<uint64_t> LookupService::StopWaiting(const CallKey& call) {
  const Waiting* const found = FindWaiting(call);
  if (found == nullptr) return std::nullopt;
  const Waiting waiting = *found;
  const auto of_peer = waiting_.find(call.peer);
  of_peer->second.calls.erase(call.id);
  of_peer->second.bytes -= waiting.bytes;
  waiting_bytes_ -= waiting.bytes;
  if (of_peer->second.calls.empty()) waiting_.erase(of_peer);
  return waiting.query;
}

absl::Status LookupService::LookupTake(const CallKey& call, const Fields& args) {
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, args.Uint("lease"));
  {
    const MutexLock lock(&mutex_);
    if (closing_) return absl::UnavailableError("the lookup buffer is closing");
  }
  // Not OK: it has gone back, and perhaps to somebody else, or was never here.
  const bool taken = leases_.Take(lease_id).ok();
  node().Reply(call, Fields().Set("taken", taken ? 1 : 0));
  Settle();  // After the reply: who learns that the entry is gone may close the buffer.
  return absl::OkStatus();
}

absl::Status LookupService::LookupBack(const CallKey& call, const Fields& args) {
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, args.Uint("lease"));
  // Unknown: nothing was leased. Still being read: it ends with the transfer.
  leases_.Withdraw(lease_id).IgnoreError();
  Settle();
  node().Reply(call, Fields());
  return absl::OkStatus();
}

void LookupService::OnCallDropped(const CallKey& call) {
  std::optional<uint64_t> query;
  {
    const MutexLock lock(&mutex_);
    query = StopWaiting(call);
  }
  // False: another thread is about to answer, and will find that nobody waits.
  if (query) table_->Withdraw(*query);
}

void LookupService::Answer(const CallKey& call, uint64_t lease_id,
                           absl::StatusOr<Taken> taken) noexcept {
  if (taken.ok()) return node().Reply(call, Lease(call, lease_id, *std::move(taken)));
  {
    const MutexLock lock(&mutex_);
    StopWaiting(call);
  }
  node().Reply(call, taken.status());
}

Fields LookupService::ReplyOf(const Taken& taken) {
  return Fields()
      .Set("epoch", node().epoch())
      .Set("pages", static_cast<uint64_t>(EntryOf(taken).pages.num_pages()))
      .Set("tokens", PackTokens(taken.tokens()))
      .Set("matched", static_cast<uint64_t>(taken.num_matched()))
      .Set("hidden", EntryOf(taken).hidden ? EntryOf(taken).hidden->size() : 0);
}

absl::Status LookupService::TryLease(const CallKey& call, uint64_t lease_id, Taken& taken) {
  // Under the lock, so that a lease is in both tables or in none.
  const MutexLock lock(&mutex_);
  if (!StopWaiting(call)) {
    return absl::CancelledError("lookup: nobody waits for the entry any more");
  }
  const LookupEntry& entry = EntryOf(taken);
  KVFERRY_RETURN_IF_ERROR(leases_.Publish(lease_id, entry.pages, options_.num_layers,
                                          DeadlineInMs(options_.reply_lease_ms), entry.hidden));
  leased_.emplace(lease_id, std::move(taken));
  return absl::OkStatus();
}

absl::StatusOr<Fields> LookupService::Lease(const CallKey& call, uint64_t lease_id, Taken taken) {
  Fields reply = ReplyOf(taken);
  if (const absl::Status status = TryLease(call, lease_id, taken); !status.ok()) {
    PutBack(std::move(taken));
    return NotNow(status);
  }
  node().LeaseChanged(lease_id);  // And so the node asks again when the next lease expires.
  return reply;
}

void LookupService::PutBack(Taken taken) {
  mutex_.Lock();
  returning_.push_back(std::move(taken));
  // An entry that answers a query on its way back may have to come back again: in turn, and not
  // one call inside the other.
  if (!putting_back_) {
    putting_back_ = true;
    while (!returning_.empty()) {
      Taken next = std::move(returning_.front());
      returning_.pop_front();
      mutex_.Unlock();
      table_->PutBack(std::move(next));
      mutex_.Lock();
    }
    putting_back_ = false;
  }
  mutex_.Unlock();
}

// ---------------------------------------------------------------- leases

// Even with every byte there the consumer has to ask for the entry: what it says by `done` may be
// lost, and it would not know.
void LookupService::EndTransfer(uint64_t lease_id, LeaseReader reader, const absl::Status&) {
  leases_.GoOn(lease_id, reader, DeadlineInMs(options_.reply_lease_ms));
  Settle();
}

void LookupService::Settle() {
  for (const EndedLease& ended : leases_.TakeEnded()) {
    std::optional<Taken> taken;
    {
      const MutexLock lock(&mutex_);
      auto leased = leased_.extract(ended.lease_id);
      if (leased.empty()) continue;
      taken.emplace(std::move(leased.mapped()));
    }
    if (ended.outcome == LeaseOutcome::kFetched) {
      static_cast<LookupEntry*>(taken->payload().get())->fetched = true;
    } else {
      PutBack(*std::move(taken));
    }
  }
}

Deadline LookupService::Tick(Deadline now) {
  const Deadline next_lease = LeaseSource::Tick(now);
  return std::min(next_lease, table_->Expire(now).value_or(Deadline::max()));
}

}  // namespace kvferry
