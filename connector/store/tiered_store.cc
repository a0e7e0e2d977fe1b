#include "connector/store/tiered_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {

absl::StatusOr<std::unique_ptr<TieredStore>> TieredStore::Create(std::shared_ptr<KvStore> upper,
                                                                 std::shared_ptr<KvStore> lower) {
  if (upper == nullptr || lower == nullptr || upper == lower) {
    return absl::InvalidArgumentError(
        upper != nullptr && upper == lower
            ? "tiered store: upper and lower are the same store"
            : absl::StrCat("tiered store: ", upper == nullptr ? "upper" : "lower", " is null"));
  }
  return std::unique_ptr<TieredStore>(new TieredStore(std::move(upper), std::move(lower)));
}

TieredStore::TieredStore(std::shared_ptr<KvStore> upper, std::shared_ptr<KvStore> lower)
    : upper_{std::move(upper), {}, {}}, lower_{std::move(lower), {}, {}} {}

int64_t TieredStore::max_value_bytes() const {
  return std::max(upper_.store->max_value_bytes(), lower_.store->max_value_bytes());
}

bool TieredStore::IsStale(const Tier& tier, std::string_view key) const {
  MutexLock lock(&mutex_);
  return !tier.stale.empty() && tier.stale.contains(std::string(key));
}

bool TieredStore::IsPinned(std::string_view key) const {
  MutexLock lock(&mutex_);
  return pins_.contains(std::string(key));
}

void TieredStore::CountError() {
  MutexLock lock(&mutex_);
  ++counts_.errors;
}

// ---- Put and Erase ------------------------------------------------------------------------------

absl::Status TieredStore::EraseFrom(Tier& tier, std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(tier.store->Erase(key, deadline));
  MutexLock lock(&mutex_);
  tier.stale.erase(std::string(key));
  tier.pinned.erase(std::string(key));
  return absl::OkStatus();
}

absl::Status TieredStore::DropOld(Tier& tier, std::string_view key, Deadline deadline) {
  absl::Status erased = EraseFrom(tier, key, deadline);
  if (erased.ok()) return absl::OkStatus();
  MutexLock lock(&mutex_);
  if (std::ssize(tier.stale) >= kMaxStaleKeys) return erased;
  tier.stale.insert(std::string(key));
  return absl::OkStatus();
}

absl::Status TieredStore::PutInto(Tier& tier, std::string_view key, ConstParts value,
                                  Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckValueBytes(BytesOf(value), tier.store->max_value_bytes()));
  KVFERRY_RETURN_IF_ERROR(tier.store->Put(key, value, deadline));
  {
    MutexLock lock(&mutex_);
    tier.stale.erase(std::string(key));
  }
  if (IsPinned(key)) (void)PinIn(tier, key, deadline);
  return absl::OkStatus();
}

absl::Status TieredStore::Put(std::string_view key, ConstParts value, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  KVFERRY_RETURN_IF_ERROR(CheckValueBytes(BytesOf(value), max_value_bytes()));
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, turns_.Take(key, deadline));
  const absl::Status upper = PutInto(upper_, key, value, deadline);
  const absl::Status lower = PutInto(lower_, key, value, deadline);
  // Too large for a tier is no failure of it, and neither is an upper one that is full just now.
  if (!upper.ok() && !absl::IsInvalidArgument(upper) && !absl::IsResourceExhausted(upper)) {
    CountError();
  }
  if (!lower.ok() && !absl::IsInvalidArgument(lower)) CountError();
  if (!upper.ok() && !lower.ok()) {
    return {lower.code(), absl::StrCat("tiered store: neither tier took it: ", upper.message(),
                                       "; ", lower.message())};
  }
  if (!upper.ok()) KVFERRY_RETURN_IF_ERROR(DropOld(upper_, key, deadline));
  if (!lower.ok()) KVFERRY_RETURN_IF_ERROR(DropOld(lower_, key, deadline));
  MutexLock lock(&mutex_);
  ++counts_.puts;
  return absl::OkStatus();
}

absl::Status TieredStore::Erase(std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, turns_.Take(key, deadline));
  const absl::Status upper = EraseFrom(upper_, key, deadline);
  const absl::Status lower = EraseFrom(lower_, key, deadline);
  for (const absl::Status& status : {upper, lower}) {
    if (!status.ok()) CountError();
  }
  KVFERRY_RETURN_IF_ERROR(upper);
  KVFERRY_RETURN_IF_ERROR(lower);
  MutexLock lock(&mutex_);
  pins_.erase(std::string(key));
  return absl::OkStatus();
}

// ---- Get and Exists -----------------------------------------------------------------------------

// A value of another length than asked for is an answer, not a failure.
absl::Status TieredStore::FetchFrom(Tier& tier, std::string_view key, Fetch fetch) {
  if (IsStale(tier, key)) return absl::NotFoundError("tiered store: only an old value");
  absl::Status fetched = fetch(*tier.store);
  if (!fetched.ok() && !absl::IsNotFound(fetched) && !absl::IsFailedPrecondition(fetched)) {
    CountError();
  }
  return fetched;
}

// What is read below is brought up in the key's turn, so that it cannot cover a newer one.
absl::Status TieredStore::GetWith(std::string_view key, Deadline deadline, Fetch fetch,
                                  BringUp bring_up) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  absl::Status status = FetchFrom(upper_, key, fetch);
  if (!status.ok() && !absl::IsFailedPrecondition(status)) {
    KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, turns_.Take(key, deadline));
    const absl::Status lower = FetchFrom(lower_, key, fetch);
    if (lower.ok() && absl::IsNotFound(status)) bring_up();
    if (absl::IsNotFound(status) || !absl::IsNotFound(lower)) status = lower;
  }
  MutexLock lock(&mutex_);
  counts_.hits += status.ok() ? 1 : 0;
  counts_.misses += absl::IsNotFound(status) ? 1 : 0;
  return status;
}

absl::Status TieredStore::Get(std::string_view key, Parts out, Deadline deadline) {
  return GetWith(
      key, deadline, [&](KvStore& from) { return from.Get(key, out, deadline); },
      [&] {
        const std::vector<std::span<const std::byte>> value(out.begin(), out.end());
        (void)PutInto(upper_, key, value, deadline);
      });
}

absl::StatusOr<std::vector<std::byte>> TieredStore::GetBytes(std::string_view key,
                                                             Deadline deadline) {
  std::vector<std::byte> bytes;
  KVFERRY_RETURN_IF_ERROR(GetWith(
      key, deadline,
      [&](KvStore& from) -> absl::Status {
        KVFERRY_ASSIGN_OR_RETURN(bytes, from.GetBytes(key, deadline));
        return absl::OkStatus();
      },
      [&] {
        const std::span<const std::byte> value = bytes;
        (void)PutInto(upper_, key, {&value, 1}, deadline);
      }));
  return bytes;
}

absl::StatusOr<int64_t> TieredStore::CountIn(Tier& tier, std::span<const std::string_view> keys,
                                             Deadline deadline) {
  absl::StatusOr<int64_t> there = tier.store->Exists(keys, deadline);
  if (!there.ok()) {
    CountError();
    return there;
  }
  int64_t fresh = 0;
  while (fresh < *there && !IsStale(tier, keys[fresh])) ++fresh;
  return fresh;
}

absl::StatusOr<int64_t> TieredStore::Exists(std::span<const std::string_view> keys,
                                            Deadline deadline) {
  for (const std::string_view key : keys) KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  int64_t there = 0;
  while (there < std::ssize(keys)) {
    const absl::StatusOr<int64_t> upper = CountIn(upper_, keys.subspan(there), deadline);
    there += upper.value_or(0);
    if (there == std::ssize(keys)) break;
    absl::StatusOr<int64_t> lower = CountIn(lower_, keys.subspan(there), deadline);
    there += lower.value_or(0);
    if (!upper.ok() && !lower.ok() && there == 0) return lower;
    if (lower.value_or(0) == 0) break;
  }
  return there;
}

// ---- Pins ---------------------------------------------------------------------------------------

absl::Status TieredStore::PinIn(Tier& tier, std::string_view key, Deadline deadline) {
  {
    MutexLock lock(&mutex_);
    if (tier.pinned.contains(std::string(key))) return absl::OkStatus();
    if (tier.stale.contains(std::string(key))) return absl::NotFoundError("tiered store: stale");
  }
  KVFERRY_RETURN_IF_ERROR(tier.store->Pin(key, deadline));
  MutexLock lock(&mutex_);
  tier.pinned.insert(std::string(key));
  return absl::OkStatus();
}

void TieredStore::UnpinIn(Tier& tier, std::string_view key, Deadline deadline) {
  {
    MutexLock lock(&mutex_);
    if (tier.pinned.erase(std::string(key)) == 0) return;
  }
  (void)tier.store->Unpin(key, deadline);
}

absl::Status TieredStore::BringUpAndPin(std::string_view key, Deadline deadline) {
  if (IsStale(lower_, key)) return absl::NotFoundError("tiered store: only an old value");
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                           lower_.store->GetBytes(key, deadline));
  const std::span<const std::byte> value = bytes;
  KVFERRY_RETURN_IF_ERROR(PutInto(upper_, key, {&value, 1}, deadline));
  return PinIn(upper_, key, deadline);
}

absl::Status TieredStore::Pin(std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, turns_.Take(key, deadline));
  absl::Status upper = PinIn(upper_, key, deadline);
  const absl::Status lower = PinIn(lower_, key, deadline);
  if (absl::IsNotFound(upper) && absl::IsUnimplemented(lower)) {
    upper = BringUpAndPin(key, deadline);
  }
  if (!upper.ok() && !lower.ok()) return absl::IsUnimplemented(lower) ? upper : lower;
  MutexLock lock(&mutex_);
  ++pins_[std::string(key)];
  return absl::OkStatus();
}

absl::Status TieredStore::Unpin(std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, turns_.Take(key, deadline));
  {
    MutexLock lock(&mutex_);
    const auto it = pins_.find(std::string(key));
    if (it == pins_.end()) {
      return absl::FailedPreconditionError("tiered store: the entry is not pinned");
    }
    if (--it->second > 0) return absl::OkStatus();
    pins_.erase(it);
  }
  UnpinIn(upper_, key, deadline);
  UnpinIn(lower_, key, deadline);
  return absl::OkStatus();
}

KvStore::Stats TieredStore::stats() const {
  const int64_t evictions = upper_.store->stats().evictions + lower_.store->stats().evictions;
  MutexLock lock(&mutex_);
  Stats stats = counts_;
  stats.evictions = evictions;
  stats.pinned = std::ssize(pins_);
  return stats;
}

}  // namespace kvferry
