#include "connector/lease_table.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {
namespace {

uint64_t BitOf(LeaseReader reader) { return uint64_t{1} << reader.index; }

}  // namespace

absl::string_view LeaseOutcomeName(LeaseOutcome outcome) {
  switch (outcome) {
    case LeaseOutcome::kFetched:
      return "fetched";
    case LeaseOutcome::kReleased:
      return "released";
    case LeaseOutcome::kExpired:
      return "expired";
  }
  return "unknown";
}

std::optional<LeaseTable::Fate> LeaseTable::FateOf(uint64_t lease_id) const {
  if (const Fate* const fate = fates_.Find(lease_id)) return *fate;
  if (unneeded_.contains(lease_id)) return kUnneeded;
  return std::nullopt;
}

absl::Status LeaseTable::NotLive(uint64_t lease_id) const {
  const std::optional<Fate> fate = FateOf(lease_id);
  if (!fate.has_value()) {
    return absl::NotFoundError(absl::StrCat(
        "lease ", absl::Hex(lease_id), " is unknown here; was the ticket made by this process?"));
  }
  const auto [outcome, published] = *fate;
  if (!published) {
    return absl::FailedPreconditionError(
        absl::StrCat("lease ", absl::Hex(lease_id), " will not be published: ",
                     outcome == LeaseOutcome::kFetched ? "its reader said that it needs nothing"
                                                       : "the prefill side gave the request up"));
  }
  const std::string ended = outcome == LeaseOutcome::kExpired
                                ? "expired; raise lease_ms or fetch sooner"
                                : absl::StrCat("been ", LeaseOutcomeName(outcome));
  return absl::FailedPreconditionError(
      absl::StrCat("lease ", absl::Hex(lease_id), " has already ", ended));
}

absl::Status LeaseTable::Publish(uint64_t lease_id, PageRuns pages, int64_t ready_layers,
                                 Deadline expiry,
                                 std::shared_ptr<const std::vector<std::byte>> tail,
                                 std::optional<Deadline> last_expiry) {
  MutexLock lock(&mutex_);
  const std::optional<Fate> fate = FateOf(lease_id);
  if (leases_.contains(lease_id) || (fate.has_value() && *fate != kUnneeded)) {
    return absl::AlreadyExistsError(
        absl::StrCat("lease ", absl::Hex(lease_id), " was published or given up before"));
  }
  if (static_cast<int64_t>(leases_.size() + ended_.size()) >= config_.max_leases) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "max_leases (", config_.max_leases, "): ", leases_.size(), " requests are published and ",
        ended_.size(), " ended ones have not been taken; take those, or raise it"));
  }
  if (fate.has_value()) {
    End(lease_id, LeaseOutcome::kFetched);
    return absl::OkStatus();
  }
  none_expires_before_ = std::min(none_expires_before_, expiry);
  const Readers* before = unpublished_.Find(lease_id);
  if (before == nullptr) before = done_before_.Find(lease_id);
  if (asked_before_.contains(lease_id)) asked_for_.Add(lease_id, {});
  const auto max_fetch_timeout = std::chrono::milliseconds(config_.max_fetch_timeout_ms);
  leases_.emplace(lease_id, Lease{{std::move(pages), std::move(tail)},
                                  ready_layers,
                                  expiry,
                                  last_expiry.value_or(expiry + max_fetch_timeout),
                                  before != nullptr ? *before : Readers()});
  return absl::OkStatus();
}

absl::Status LeaseTable::SetReadyLayers(uint64_t lease_id, int64_t layers) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return NotLive(lease_id);
  found->second.ready_layers = std::max(found->second.ready_layers, layers);
  return absl::OkStatus();
}

absl::Status LeaseTable::GiveUp(uint64_t lease_id) {
  MutexLock lock(&mutex_);
  const std::optional<Fate> fate = FateOf(lease_id);
  if (leases_.contains(lease_id) || (fate.has_value() && fate->published)) {
    return absl::AlreadyExistsError(
        absl::StrCat("lease ", absl::Hex(lease_id), " was published; release it"));
  }
  fates_.Add(lease_id, fate.value_or(Fate{LeaseOutcome::kReleased, false}));
  return absl::OkStatus();
}

absl::StatusOr<bool> LeaseTable::Withdraw(uint64_t lease_id) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return NotLive(lease_id);
  if (found->second.state == State::kIdle) {
    End(lease_id, LeaseOutcome::kReleased);
    return true;
  }
  State& state = found->second.state;
  if (state == State::kTransferring || state == State::kUnpublishing) state = State::kWithdrawing;
  return false;
}

absl::StatusOr<bool> LeaseTable::Unpublish(uint64_t lease_id) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return NotLive(lease_id);
  if (found->second.state == State::kIdle) {
    Forget(lease_id, found->second);
    return true;
  }
  if (found->second.state == State::kTransferring) found->second.state = State::kUnpublishing;
  return false;
}

bool LeaseTable::Retract(uint64_t lease_id) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end() || found->second.state != State::kIdle) return false;
  leases_.erase(found);
  return true;
}

std::vector<uint64_t> LeaseTable::AskedFor(absl::Span<const uint64_t> lease_ids) const {
  MutexLock lock(&mutex_);
  std::vector<uint64_t> asked_for;
  std::copy_if(lease_ids.begin(), lease_ids.end(), std::back_inserter(asked_for),
               [&](uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                 return asked_for_.contains(id) || asked_before_.contains(id);
               });
  return asked_for;
}

absl::Status LeaseTable::CheckNotEnded(uint64_t lease_id) const {
  MutexLock lock(&mutex_);
  const Fate* const fate = fates_.Find(lease_id);
  return fate != nullptr && fate->published ? NotLive(lease_id) : absl::OkStatus();
}

absl::Status LeaseTable::Take(uint64_t lease_id) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) {
    const Fate* const fate = fates_.Find(lease_id);
    const bool fetched =
        fate != nullptr && fate->published && fate->outcome == LeaseOutcome::kFetched;
    return fetched ? absl::OkStatus() : NotLive(lease_id);
  }
  switch (found->second.state) {
    case State::kIdle:
      End(lease_id, LeaseOutcome::kFetched);
      break;
    case State::kWithdrawing:
    case State::kUnpublishing:
      return absl::FailedPreconditionError(
          absl::StrCat("lease ", absl::Hex(lease_id), " is being withdrawn"));
    case State::kTransferring:
    case State::kTaken:
      found->second.state = State::kTaken;
      break;
  }
  return absl::OkStatus();
}

std::vector<EndedLease> LeaseTable::TakeEnded() {
  MutexLock lock(&mutex_);
  return std::exchange(ended_, {});
}

int64_t LeaseTable::num_live() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(leases_.size());
}

bool LeaseTable::IsOurs(uint64_t lease_id) const {
  return leases_.contains(lease_id) || fates_.contains(lease_id) || unpublished_.contains(lease_id);
}

void LeaseTable::NoteAskedFor(uint64_t lease_id) {
  (IsOurs(lease_id) ? asked_for_ : asked_before_).Add(lease_id, {});
}

absl::StatusOr<LeasedMemory> LeaseTable::BeginTransfer(uint64_t lease_id, LeaseReader reader) {
  MutexLock lock(&mutex_);
  NoteAskedFor(lease_id);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return NotLive(lease_id);
  KVFERRY_RETURN_IF_ERROR(Admit(lease_id, found->second, reader));
  return found->second.memory;
}

absl::Status LeaseTable::Admit(uint64_t lease_id, Lease& lease, LeaseReader reader) {
  const auto refused = [&](auto... why) {
    return absl::FailedPreconditionError(absl::StrCat("lease ", absl::Hex(lease_id), " ", why...));
  };
  if (lease.state == State::kUnpublishing) {
    return absl::NotFoundError(
        absl::StrCat("lease ", absl::Hex(lease_id), " is not published now"));
  }
  if (lease.state == State::kWithdrawing) return refused("is being withdrawn");
  // Nothing expires while somebody reads: readers that take turns would keep the pages for ever.
  // Whoever began in time has ended by then.
  if (Clock::now() > lease.expiry + std::chrono::milliseconds(config_.max_fetch_timeout_ms)) {
    return refused("has already expired; raise lease_ms or fetch sooner");
  }
  Readers& readers = lease.readers;
  if (lease.state == State::kTaken || (readers.reading & BitOf(reader)) != 0) {
    return refused("is being fetched already");
  }
  if (!readers.Agrees(reader)) {
    return refused("is for ", readers.of, " readers, not for ", reader.of);
  }
  if ((readers.done & BitOf(reader)) != 0) {
    return refused("has already been fetched by reader ", reader.index, " of ", reader.of);
  }
  readers.of = reader.of;
  readers.reading |= BitOf(reader);
  lease.state = State::kTransferring;
  return absl::OkStatus();
}

int64_t LeaseTable::ReadyLayers(uint64_t lease_id) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  return found == leases_.end() ? 0 : found->second.ready_layers;
}

void LeaseTable::EndTransfer(uint64_t lease_id, LeaseReader reader, const absl::Status& outcome) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return;
  Readers& readers = found->second.readers;
  readers.reading &= ~BitOf(reader);
  if (outcome.ok()) readers.NeedsNothing(reader);
  if (readers.all_done()) {
    End(lease_id, LeaseOutcome::kFetched);
  } else if (readers.reading == 0) {
    EndOrIdle(lease_id, found->second);
  }
}

void LeaseTable::GoOn(uint64_t lease_id, LeaseReader reader, Deadline expiry) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  if (found != leases_.end()) GoOn(lease_id, found->second, reader, expiry);
}

void LeaseTable::GoOn(uint64_t lease_id, Lease& lease, LeaseReader reader, Deadline expiry) {
  lease.readers.reading &= ~BitOf(reader);
  lease.expiry = std::max(lease.expiry, expiry);
  if (lease.readers.reading == 0) EndOrIdle(lease_id, lease);
}

void LeaseTable::OnReaderGone(uint64_t lease_id, LeaseReader reader, const absl::Status&) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return;
  const Deadline expiry =
      std::min(DeadlineInMs(config_.connect_timeout_ms), found->second.last_expiry);
  GoOn(lease_id, found->second, reader, expiry);
}

int64_t LeaseTable::Keep(absl::Span<const uint64_t> lease_ids, Deadline expiry) {
  MutexLock lock(&mutex_);
  int64_t num_live = 0;
  for (const uint64_t lease_id : lease_ids) {
    const auto found = leases_.find(lease_id);
    if (found == leases_.end()) continue;
    Lease& lease = found->second;
    // Not before it expires otherwise: none_expires_before_ holds still.
    lease.expiry = std::max(lease.expiry, std::min(expiry, lease.last_expiry));
    ++num_live;
  }
  return num_live;
}

void LeaseTable::EndOrIdle(uint64_t lease_id, Lease& lease) {
  switch (lease.state) {
    case State::kIdle:
    case State::kTransferring:
      lease.state = State::kIdle;
      none_expires_before_ = std::min(none_expires_before_, lease.expiry);
      break;
    case State::kWithdrawing:
      End(lease_id, LeaseOutcome::kReleased);
      break;
    case State::kUnpublishing:
      Forget(lease_id, lease);
      break;
    case State::kTaken:
      End(lease_id, LeaseOutcome::kFetched);
      break;
  }
}

void LeaseTable::Forget(uint64_t lease_id, const Lease& lease) {
  unpublished_.Add(lease_id, {}) = lease.readers;
  leases_.erase(lease_id);
}

void LeaseTable::Readers::NeedsNothing(LeaseReader reader) {
  if (!Agrees(reader) || (reading & BitOf(reader)) != 0) return;
  of = reader.of;
  done |= BitOf(reader);
}

void LeaseTable::NothingNeeded(uint64_t lease_id, LeaseReader reader) {
  MutexLock lock(&mutex_);
  NoteAskedFor(lease_id);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return NothingNeededOfUnpublished(lease_id, reader);
  Lease& lease = found->second;
  if (lease.state == State::kWithdrawing) return;
  lease.readers.NeedsNothing(reader);
  if (lease.readers.all_done()) End(lease_id, LeaseOutcome::kFetched);
}

void LeaseTable::NothingNeededOfUnpublished(uint64_t lease_id, LeaseReader reader) {
  Readers* const ours = unpublished_.Find(lease_id);
  Readers& readers = ours != nullptr ? *ours : done_before_.Add(lease_id, {});
  readers.NeedsNothing(reader);
  if (!readers.all_done()) return;
  if (ours != nullptr) {
    fates_.Add(lease_id, kUnneeded);
  } else {
    unneeded_.Add(lease_id, {});
  }
}

Deadline LeaseTable::Tick(Deadline now) {
  MutexLock lock(&mutex_);
  if (now < none_expires_before_) return none_expires_before_;
  std::vector<uint64_t> expired;
  Deadline next = Deadline::max();
  for (const auto& [lease_id, lease] : leases_) {
    if (lease.state != State::kIdle) continue;
    if (lease.expiry <= now) {
      expired.push_back(lease_id);
    } else {
      next = std::min(next, lease.expiry);
    }
  }
  for (const uint64_t lease_id : expired) End(lease_id, LeaseOutcome::kExpired);
  none_expires_before_ = next;
  return next;
}

// What takes memory comes first: without it nothing has changed.
void LeaseTable::End(uint64_t lease_id, LeaseOutcome outcome) {
  ended_.push_back({lease_id, outcome});
  absl::Cleanup not_ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { ended_.pop_back(); };
  const Fate fate{outcome, true};
  fates_.Add(lease_id, fate) = fate;
  std::move(not_ended).Cancel();
  leases_.erase(lease_id);
}

}  // namespace kvferry
