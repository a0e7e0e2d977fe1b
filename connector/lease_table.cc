#include "connector/lease_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvferry {

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

absl::Status LeaseTable::NotLive(uint64_t lease_id) const {
  const Fate* const fate = fates_.Find(lease_id);
  if (fate == nullptr) {
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
  const absl::string_view hint =
      outcome == LeaseOutcome::kExpired ? "; raise lease_ms or fetch sooner" : "";
  return absl::FailedPreconditionError(absl::StrCat(
      "lease ", absl::Hex(lease_id), " has already been ", LeaseOutcomeName(outcome), hint));
}

absl::Status LeaseTable::Publish(uint64_t lease_id, PageRuns pages, int64_t ready_layers,
                                 Deadline expiry,
                                 std::shared_ptr<const std::vector<std::byte>> tail) {
  MutexLock lock(&mutex_);
  Fate* const fate = fates_.Find(lease_id);
  const bool unneeded =
      fate != nullptr && !fate->published && fate->outcome == LeaseOutcome::kFetched;
  if (leases_.contains(lease_id) || (fate != nullptr && !unneeded)) {
    return absl::AlreadyExistsError(
        absl::StrCat("lease ", absl::Hex(lease_id), " was published or given up before"));
  }
  if (static_cast<int64_t>(leases_.size() + ended_.size()) >= config_.max_leases) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "max_leases (", config_.max_leases, "): ", leases_.size(), " requests are published and ",
        ended_.size(), " ended ones have not been taken"));
  }
  if (unneeded) {
    fate->published = true;
    ended_.push_back({lease_id, LeaseOutcome::kFetched});
    return absl::OkStatus();
  }
  leases_.emplace(lease_id,
                  Lease{{std::move(pages), std::move(tail)}, ready_layers, expiry, State::kIdle});
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
  const Fate* const fate = fates_.Find(lease_id);
  if (leases_.contains(lease_id) || (fate != nullptr && fate->published)) {
    return absl::AlreadyExistsError(
        absl::StrCat("lease ", absl::Hex(lease_id), " was published; release it"));
  }
  fates_.Add(lease_id, {LeaseOutcome::kReleased, false});
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
    leases_.erase(found);
    return true;
  }
  if (found->second.state == State::kTransferring) found->second.state = State::kUnpublishing;
  return false;
}

std::vector<uint64_t> LeaseTable::AskedFor(absl::Span<const uint64_t> lease_ids) const {
  MutexLock lock(&mutex_);
  std::vector<uint64_t> asked_for;
  std::copy_if(lease_ids.begin(), lease_ids.end(), std::back_inserter(asked_for),
               [&](uint64_t id)
                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return asked_for_.contains(id); });
  return asked_for;
}

absl::Status LeaseTable::CheckNotEnded(uint64_t lease_id) const {
  MutexLock lock(&mutex_);
  return fates_.contains(lease_id) ? NotLive(lease_id) : absl::OkStatus();
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

absl::StatusOr<LeasedMemory> LeaseTable::BeginTransfer(uint64_t lease_id) {
  MutexLock lock(&mutex_);
  asked_for_.Add(lease_id, {});
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return NotLive(lease_id);
  if (found->second.state == State::kUnpublishing) {
    return absl::NotFoundError(
        absl::StrCat("lease ", absl::Hex(lease_id), " is not published now"));
  }
  if (found->second.state != State::kIdle) {
    return absl::FailedPreconditionError(
        absl::StrCat("lease ", absl::Hex(lease_id), " is being ",
                     found->second.state == State::kWithdrawing ? "withdrawn" : "fetched already"));
  }
  found->second.state = State::kTransferring;
  return found->second.memory;
}

int64_t LeaseTable::ReadyLayers(uint64_t lease_id) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  return found == leases_.end() ? 0 : found->second.ready_layers;
}

void LeaseTable::EndTransfer(uint64_t lease_id, const absl::Status& outcome) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return;
  if (outcome.ok()) {
    End(lease_id, LeaseOutcome::kFetched);
  } else {
    EndOrIdle(lease_id, found->second);
  }
}

void LeaseTable::GoOn(uint64_t lease_id, Deadline expiry) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) return;
  found->second.expiry = std::max(found->second.expiry, expiry);
  EndOrIdle(lease_id, found->second);
}

void LeaseTable::EndOrIdle(uint64_t lease_id, Lease& lease) {
  switch (lease.state) {
    case State::kIdle:
    case State::kTransferring:
      lease.state = State::kIdle;
      break;
    case State::kWithdrawing:
      End(lease_id, LeaseOutcome::kReleased);
      break;
    case State::kUnpublishing:
      leases_.erase(lease_id);
      break;
    case State::kTaken:
      End(lease_id, LeaseOutcome::kFetched);
      break;
  }
}

void LeaseTable::NothingNeeded(uint64_t lease_id) {
  MutexLock lock(&mutex_);
  asked_for_.Add(lease_id, {});
  const auto found = leases_.find(lease_id);
  if (found == leases_.end()) {
    fates_.Add(lease_id, {LeaseOutcome::kFetched, false});
  } else if (found->second.state == State::kIdle) {
    End(lease_id, LeaseOutcome::kFetched);
  }
}

Deadline LeaseTable::Tick(Deadline now) {
  MutexLock lock(&mutex_);
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
  return next;
}

void LeaseTable::End(uint64_t lease_id, LeaseOutcome outcome) {
  leases_.erase(lease_id);
  ended_.push_back({lease_id, outcome});
  fates_.Add(lease_id, {outcome, true});
}

}  // namespace kvferry
