#include "connector/store/tiered_store.h"

#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
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
    : upper_{.store = std::move(upper)}, lower_{.store = std::move(lower)} {}

int64_t TieredStore::max_value_bytes() const {
  return std::max(upper_.store->max_value_bytes(), lower_.store->max_value_bytes());
}

bool TieredStore::IsStale(const Tier& tier, std::string_view key) const {
  MutexLock lock(&mutex_);
  return tier.stale.contains(key);
}

bool TieredStore::IsPinned(std::string_view key) const {
  MutexLock lock(&mutex_);
  return pins_.contains(key);
}

// The other tier may hide it from whoever calls. What the tiers have to hear about yet is not to be
// left out because there is no memory to say this.
void TieredStore::CountError(const absl::Status& status) {
  try {
    std::optional<std::string> more;
    {
      MutexLock lock(&mutex_);
      ++counts_.errors;
      more = failed_.Next();
    }
    if (more) Log().warn("tiered store: a tier failed: {}{}", status.ToString(), *more);
  } catch (const std::bad_alloc&) {
    return;  // It is counted.
  }
}

bool TieredStore::IsPinnedInATier(std::string_view key) const {
  MutexLock lock(&mutex_);
  return std::ranges::any_of(std::array{&upper_, &lower_}, [key](const Tier* tier) {
    return tier->pinned.contains(key) && !tier->stale.contains(key);
  });
}

// ---- Tiers that do not answer -------------------------------------------------------------------

namespace {

bool GaveNoAnswer(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

}  // namespace

absl::StatusOr<Deadline> TieredStore::MayAskUntil(const Tier& tier, Deadline deadline) const {
  const Deadline now = Clock::now();
  MutexLock lock(&mutex_);
  const Deadline silent_until = tier.patience.silent_until();
  if (now >= silent_until) return tier.patience.WaitUntil(now, deadline);
  return absl::UnavailableError(absl::StrCat(
      "tiered store: the ", &tier == &upper_ ? "upper" : "lower", " tier (",
      std::string(tier.store->name()), ") did not answer and is not asked for another ",
      MsUntil(silent_until, now), " ms"));
}

void TieredStore::Heard(Tier& tier, Deadline begin, std::span<const absl::Status> statuses) {
  // It is quick about tiers of its own that are silent, and has what the others have.
  if (dynamic_cast<const TieredStore*>(tier.store.get()) != nullptr) return;
  const bool answered = !std::ranges::all_of(statuses, GaveNoAnswer);
  const Deadline now = Clock::now();
  MutexLock lock(&mutex_);
  tier.patience.Heard(begin, now, answered);
}

namespace {

// A tier that finds no memory has failed, and is done without as if it had said so itself: what the
// other one has to hear about is not to be left out.
template <typename Call>
auto WithoutThrowing(const Call& call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("tiered store: a tier found no memory for this call");
  }
}

}  // namespace

template <typename Call>
auto TieredStore::Ask(Tier& tier, Deadline deadline, const Call& call) -> decltype(call(deadline)) {
  KVFERRY_ASSIGN_OR_RETURN(const Deadline until, MayAskUntil(tier, deadline));
  const Deadline begin = Clock::now();
  auto result = WithoutThrowing([&] { return call(until); });
  const absl::Status status = internal::AsStatus(result);
  Heard(tier, begin, {&status, 1});
  return result;
}

template <typename Call>
std::vector<absl::Status> TieredStore::AskBatch(Tier& tier, Deadline deadline, size_t num_items,
                                                const Call& call) {
  if (num_items == 0) return {};
  const absl::StatusOr<Deadline> until = MayAskUntil(tier, deadline);
  if (!until.ok()) return std::vector<absl::Status>(num_items, until.status());
  const Deadline begin = Clock::now();
  absl::StatusOr<std::vector<absl::Status>> said =
      WithoutThrowing([&]() -> absl::StatusOr<std::vector<absl::Status>> { return call(*until); });
  std::vector<absl::Status> statuses =
      said.ok() ? *std::move(said) : std::vector<absl::Status>(num_items, said.status());
  Heard(tier, begin, statuses);
  return statuses;
}

// ---- Put and Erase ------------------------------------------------------------------------------

namespace {

// Where there is no memory, too: no copy of the key is made.
template <typename Table>
void EraseIfThere(Table& table, std::string_view key) {
  if (const auto it = table.find(key); it != table.end()) table.erase(it);
}

}  // namespace

TieredStore::PutUnderWay::PutUnderWay(TieredStore* store, std::span<const std::string_view> keys,
                                      Deadline deadline)
    : store_(store), deadline_(deadline) {
  marks_.reserve(keys.size());
  for (const std::string_view key : keys) {
    Keys one;
    marks_.push_back(one.extract(one.emplace(key).first));
  }
}

TieredStore::PutUnderWay::~PutUnderWay() {
  for (Keys::node_type& mark : marks_) {
    bool is_erased = false;
    try {
      is_erased = store_->EraseFrom(store_->upper_, mark.value(), deadline_).ok();
    } catch (const std::bad_alloc&) {
      is_erased = false;  // The mark is there.
    }
    if (is_erased) continue;
    MutexLock lock(&store_->mutex_);
    store_->upper_.stale.insert(std::move(mark));
  }
}

absl::Status TieredStore::EraseFrom(Tier& tier, std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(
      Ask(tier, deadline, [&](Deadline until) { return tier.store->Erase(key, until); }));
  MutexLock lock(&mutex_);
  EraseIfThere(tier.stale, key);
  EraseIfThere(tier.pinned, key);
  return absl::OkStatus();
}

bool TieredStore::RememberStale(Tier& tier, std::string_view key) {
  MutexLock lock(&mutex_);
  if (std::ssize(tier.stale) >= kMaxStaleKeys) return false;
  tier.stale.insert(std::string(key));
  return true;
}

absl::Status TieredStore::DropOld(Tier& tier, std::string_view key, const absl::Status& put,
                                  Deadline deadline) {
  // Who did not answer to the put would be waited for again, once for each key of a batch.
  if (GaveNoAnswer(put) && RememberStale(tier, key)) return absl::OkStatus();
  absl::Status erased = EraseFrom(tier, key, deadline);
  if (erased.ok() || RememberStale(tier, key)) return absl::OkStatus();
  return erased;
}

std::vector<absl::Status> TieredStore::PutInto(Tier& tier, std::span<const PutItem> items,
                                               Deadline deadline, bool* cut_off) {
  std::vector<absl::Status> statuses;
  std::vector<PutItem> fit;
  for (const PutItem& item : items) {
    statuses.push_back(CheckValueBytes(BytesOf(item.value), tier.store->max_value_bytes()));
    if (statuses.back().ok()) fit.push_back(item);
  }
  const std::vector<absl::Status> put = AskBatch(tier, deadline, fit.size(), [&](Deadline until) {
    absl::Cleanup note = [cut_off] { *cut_off = true; };
    std::vector<absl::Status> said = tier.store->PutBatch(fit, until);
    std::move(note).Cancel();
    return said;
  });
  auto next = put.begin();
  for (size_t i = 0; i < items.size(); ++i) {
    if (statuses[i].ok()) statuses[i] = *next++;
    if (statuses[i].ok()) AfterPutInto(tier, items[i].key, deadline);
  }
  return statuses;
}

void TieredStore::AfterPutInto(Tier& tier, std::string_view key, Deadline deadline) {
  {
    MutexLock lock(&mutex_);
    EraseIfThere(tier.stale, key);
  }
  if (&tier == &upper_) ++puts_above_;
  if (IsPinned(key)) (void)PinIn(tier, key, deadline);
}

absl::Status TieredStore::PutInto(Tier& tier, std::string_view key, ConstParts value,
                                  Deadline deadline) {
  const PutItem item = {key, value};
  bool cut_off = false;
  return PutInto(tier, {&item, 1}, deadline, &cut_off)[0];
}

absl::Status TieredStore::AfterPut(std::string_view key, const absl::Status& upper,
                                   const absl::Status& lower, Deadline deadline) {
  // Too large for a tier is no failure of it, and neither is an upper one that is full just now.
  if (!upper.ok() && !absl::IsInvalidArgument(upper) && !absl::IsResourceExhausted(upper)) {
    CountError(upper);
  }
  if (!lower.ok() && !absl::IsInvalidArgument(lower)) CountError(lower);
  if (!upper.ok() && !lower.ok()) {
    // What is too large for the lower one may fit the upper one another time.
    const absl::StatusCode code = absl::IsInvalidArgument(lower) ? upper.code() : lower.code();
    return {code, absl::StrCat("tiered store: neither tier took it: ", upper.message(), "; ",
                               lower.message())};
  }
  if (!upper.ok()) KVFERRY_RETURN_IF_ERROR(DropOld(upper_, key, upper, deadline));
  if (!lower.ok()) KVFERRY_RETURN_IF_ERROR(DropOld(lower_, key, lower, deadline));
  if (IsPinned(key) && !IsPinnedInATier(key)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tiered store: the value was put, but no tier keeps it pinned: upper ",
                     upper.ToString(), "; lower ", lower.ToString()));
  }
  MutexLock lock(&mutex_);
  ++counts_.puts;
  return absl::OkStatus();
}

// A new value needs room beside the old one, and pinned ones leave little.
void TieredStore::PutInPlaceAbove(std::span<const PutItem> items,
                                  std::span<const absl::Status> lower,
                                  std::span<absl::Status> upper, Deadline deadline) {
  for (size_t i = 0; i < items.size(); ++i) {
    // The old value has to stay where the new one is nowhere.
    if (!absl::IsResourceExhausted(upper[i]) || !lower[i].ok() || !IsPinned(items[i].key)) continue;
    if (!EraseFrom(upper_, items[i].key, deadline).ok()) continue;
    upper[i] = PutInto(upper_, items[i].key, items[i].value, deadline);
  }
}

std::vector<absl::Status> TieredStore::PutIntoBoth(std::span<const PutItem> items,
                                                   Deadline deadline) {
  const std::vector<std::string_view> keys = KeysOf(items);
  const auto turns = turns_.TakeEach(keys, deadline);
  if (!turns.ok()) return std::vector<absl::Status>(items.size(), turns.status());
  PutUnderWay under_way(this, keys, deadline);
  bool cut_off_above = false, cut_off_below = false;
  std::vector<absl::Status> upper = PutInto(upper_, items, deadline, &cut_off_above);
  const std::vector<absl::Status> lower = PutInto(lower_, items, deadline, &cut_off_below);
  PutInPlaceAbove(items, lower, upper, deadline);
  std::vector<absl::Status> statuses;
  for (size_t i = 0; i < items.size(); ++i) {
    statuses.push_back(AfterPut(items[i].key, upper[i], lower[i], deadline));
  }
  if (!cut_off_above) under_way.IsOver();
  return statuses;
}

std::vector<absl::Status> TieredStore::PutShown(std::span<const std::string_view> keys,
                                                const KvPool& pool, std::span<const int64_t> pages,
                                                const std::function<absl::Status(size_t)>& show,
                                                Deadline deadline) {
  const auto turns = turns_.TakeEach({keys.begin(), keys.end()}, deadline);
  if (!turns.ok()) return std::vector<absl::Status>(keys.size(), turns.status());
  PutUnderWay under_way(this, keys, deadline);
  std::vector<absl::Status> statuses = AskBatch(lower_, deadline, keys.size(), [&](Deadline until) {
    return lower_.store->PutPages(keys, pool, pages, until);
  });
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!statuses[i].ok()) {
      CountError(statuses[i]);
      continue;
    }
    AfterPutInto(lower_, keys[i], deadline);
    statuses[i] = Ask(upper_, deadline, [&](Deadline /*until*/) { return show(i); });
    if (!statuses[i].ok()) {
      // The value before is below no more.
      statuses[i].Update(DropOld(upper_, keys[i], statuses[i], deadline));
      continue;
    }
    AfterPutInto(upper_, keys[i], deadline);
    MutexLock lock(&mutex_);
    ++counts_.puts;
  }
  under_way.IsOver();
  return statuses;
}

absl::Status TieredStore::Put(std::string_view key, ConstParts value, Deadline deadline) {
  const PutItem item = {key, value};
  return PutBatch({&item, 1}, deadline)[0];
}

void TieredStore::PutDistinct(std::span<const PutItem> items, std::span<absl::Status> statuses,
                              Deadline deadline) {
  std::vector<PutItem> together;
  std::vector<size_t> at;  // Where those stand in `items`.
  for (size_t i = 0; i < items.size(); ++i) {
    statuses[i] = CheckKey(items[i].key);
    if (statuses[i].ok()) statuses[i] = CheckValueBytes(BytesOf(items[i].value), max_value_bytes());
    if (!statuses[i].ok()) continue;
    together.push_back(items[i]);
    at.push_back(i);
  }
  const std::vector<absl::Status> done = PutIntoBoth(together, deadline);
  for (size_t i = 0; i < at.size(); ++i) statuses[at[i]] = done[i];
}

absl::Status TieredStore::Erase(std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, turns_.Take(key, deadline));
  const absl::Status upper = EraseFrom(upper_, key, deadline);
  const absl::Status lower = EraseFrom(lower_, key, deadline);
  for (const absl::Status& status : {upper, lower}) {
    if (!status.ok()) CountError(status);
  }
  KVFERRY_RETURN_IF_ERROR(upper);
  KVFERRY_RETURN_IF_ERROR(lower);
  MutexLock lock(&mutex_);
  EraseIfThere(pins_, key);
  return absl::OkStatus();
}

// ---- Get and Exists -----------------------------------------------------------------------------

absl::Status TieredStore::Note(absl::Status fetched) {
  if (!fetched.ok() && !absl::IsNotFound(fetched) && !absl::IsFailedPrecondition(fetched)) {
    CountError(fetched);
  }
  return fetched;
}

std::vector<absl::Status> TieredStore::FetchFrom(Tier& tier, std::span<const GetItem> items,
                                                 Deadline deadline) {
  std::vector<absl::Status> statuses;
  std::vector<GetItem> asked;
  for (const GetItem& item : items) {
    statuses.push_back(CheckKey(item.key));
    if (statuses.back().ok() && IsStale(tier, item.key)) {
      statuses.back() = absl::NotFoundError("tiered store: only an old value");
    }
    if (statuses.back().ok()) asked.push_back(item);
  }
  const std::vector<absl::Status> got = AskBatch(tier, deadline, asked.size(), [&](Deadline until) {
    return tier.store->GetBatch(asked, until);
  });
  auto next = got.begin();
  for (absl::Status& status : statuses) {
    if (status.ok()) status = Note(*next++);
  }
  return statuses;
}

namespace {

// Whose memory is that of another one too, or twice its own.
std::vector<bool> ItemsThatOverlap(std::span<const KvStore::GetItem> items) {
  struct Part {
    const std::byte* begin;
    const std::byte* end;
    size_t item;
  };
  std::vector<Part> parts;
  for (size_t i = 0; i < items.size(); ++i) {
    for (const std::span<std::byte> part : items[i].out) {
      if (!part.empty()) parts.push_back({part.data(), part.data() + part.size(), i});
    }
  }
  std::ranges::sort(parts, {}, &Part::begin);
  std::vector<bool> overlap(items.size());
  const Part* furthest = nullptr;  // Of those before, the one that ends last.
  for (const Part& part : parts) {
    if (furthest != nullptr && part.begin < furthest->end) {
      overlap[part.item] = overlap[furthest->item] = true;
    }
    if (furthest == nullptr || part.end > furthest->end) furthest = &part;
  }
  return overlap;
}

// That one of another length is there is no miss.
bool IsMissOfBoth(const absl::Status& upper, const absl::Status& lower) {
  return absl::IsNotFound(upper) && !lower.ok() && !absl::IsFailedPrecondition(lower);
}

}  // namespace

void TieredStore::FetchWhatMovedUp(std::span<const GetItem> items,
                                   std::span<const absl::Status> upper,
                                   std::span<absl::Status> lower, Deadline deadline) {
  std::vector<GetItem> asked;
  std::vector<size_t> at;  // Where those stand in `items`.
  for (size_t i = 0; i < items.size(); ++i) {
    if (!IsMissOfBoth(upper[i], lower[i])) continue;
    asked.push_back(items[i]);
    at.push_back(i);
  }
  const std::vector<absl::Status> got = FetchFrom(upper_, asked, deadline);
  for (size_t i = 0; i < at.size(); ++i) {
    if (!absl::IsNotFound(got[i])) lower[at[i]] = got[i];
  }
}

// What is read below is brought up in the keys' turns, so that it cannot cover newer values.
std::vector<absl::Status> TieredStore::FetchFromLower(std::span<const GetItem> items,
                                                      std::vector<absl::Status> statuses,
                                                      uint64_t puts_above, Deadline deadline) {
  std::vector<std::string_view> keys;
  for (const GetItem& item : items) keys.push_back(item.key);
  const auto turns = turns_.TakeEach(std::move(keys), deadline);
  if (!turns.ok()) return std::vector<absl::Status>(items.size(), turns.status());
  std::vector<absl::Status> lower = FetchFrom(lower_, items, deadline);
  // Values are brought up from where they were read to, where another one's bytes may be by now.
  const std::vector<bool> overlap = ItemsThatOverlap(items);
  std::vector<std::vector<std::span<const std::byte>>> values;
  std::vector<PutItem> bring_up;
  for (size_t i = 0; i < items.size(); ++i) {
    if (lower[i].ok() && absl::IsNotFound(statuses[i]) && !overlap[i]) {
      // Its parts stay where they are when `values` grows.
      values.emplace_back(items[i].out.begin(), items[i].out.end());
      bring_up.push_back({items[i].key, values.back()});
    }
  }
  // What is brought up here has been found.
  if (MayHaveMovedUp(puts_above)) FetchWhatMovedUp(items, statuses, lower, deadline);
  bool cut_off = false;  // Then that one is above which is below too.
  if (!bring_up.empty()) (void)PutInto(upper_, bring_up, deadline, &cut_off);
  for (size_t i = 0; i < items.size(); ++i) {
    if (absl::IsNotFound(statuses[i]) || !absl::IsNotFound(lower[i])) statuses[i] = lower[i];
  }
  return statuses;
}

void TieredStore::CountGets(std::span<const absl::Status> statuses) {
  MutexLock lock(&mutex_);
  for (const absl::Status& status : statuses) {
    counts_.hits += status.ok() ? 1 : 0;
    counts_.misses += absl::IsNotFound(status) ? 1 : 0;
  }
}

void TieredStore::UseAbove(std::span<const std::string_view> keys, Deadline deadline) {
  if (keys.size() < 2) return;
  Ask(upper_, deadline, [&](Deadline until) {
    return upper_.store->ExistsEach(keys, until);
  }).IgnoreError();
}

void TieredStore::CountHitAbove() {
  const absl::Status hit;
  CountGets({&hit, 1});
}

std::vector<absl::Status> TieredStore::GetBatch(std::span<const GetItem> items, Deadline deadline) {
  const uint64_t puts_above = puts_above_;
  std::vector<absl::Status> statuses = FetchFrom(upper_, items, deadline);
  std::vector<GetItem> left;
  std::vector<absl::Status> left_statuses;
  std::vector<size_t> at;  // Where those stand in `items`.
  for (size_t i = 0; i < items.size(); ++i) {
    if (statuses[i].ok() || absl::IsFailedPrecondition(statuses[i])) continue;
    if (!CheckKey(items[i].key).ok()) continue;
    left.push_back(items[i]);
    left_statuses.push_back(statuses[i]);
    at.push_back(i);
  }
  if (!left.empty()) {
    const std::vector<absl::Status> got = FetchFromLower(left, left_statuses, puts_above, deadline);
    for (size_t i = 0; i < at.size(); ++i) statuses[at[i]] = got[i];
    // What came up was used after all that was above before.
    std::vector<std::string_view> there;
    for (size_t i = 0; i < items.size(); ++i) {
      if (statuses[i].ok()) there.push_back(items[i].key);
    }
    if (std::ranges::any_of(got, [](const absl::Status& one) { return one.ok(); })) {
      UseAbove(there, deadline);
    }
  }
  CountGets(statuses);
  return statuses;
}

absl::Status TieredStore::Get(std::string_view key, Parts out, Deadline deadline) {
  const GetItem item = {key, out};
  return GetBatch({&item, 1}, deadline)[0];
}

absl::StatusOr<std::vector<std::byte>> TieredStore::BytesFrom(Tier& tier, std::string_view key,
                                                              Deadline deadline) {
  if (IsStale(tier, key)) return absl::NotFoundError("tiered store: only an old value");
  absl::StatusOr<std::vector<std::byte>> bytes =
      Ask(tier, deadline, [&](Deadline until) { return tier.store->GetBytes(key, until); });
  (void)Note(bytes.status());
  return bytes;
}

absl::StatusOr<std::vector<std::byte>> TieredStore::GetBytes(std::string_view key,
                                                             Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  const uint64_t puts_above = puts_above_;
  absl::StatusOr<std::vector<std::byte>> bytes = BytesFrom(upper_, key, deadline);
  if (!bytes.ok()) {
    KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, turns_.Take(key, deadline));
    absl::StatusOr<std::vector<std::byte>> lower = BytesFrom(lower_, key, deadline);
    if (lower.ok() && absl::IsNotFound(bytes.status())) {
      const std::span<const std::byte> value = *lower;
      (void)PutInto(upper_, key, {&value, 1}, deadline);
    }
    if (IsMissOfBoth(bytes.status(), lower.status()) && MayHaveMovedUp(puts_above)) {
      absl::StatusOr<std::vector<std::byte>> again = BytesFrom(upper_, key, deadline);
      if (!absl::IsNotFound(again.status())) lower = std::move(again);
    }
    if (absl::IsNotFound(bytes.status()) || !absl::IsNotFound(lower.status())) {
      bytes = std::move(lower);
    }
  }
  const absl::Status status = bytes.status();
  CountGets({&status, 1});
  return bytes;
}

absl::StatusOr<int64_t> TieredStore::CountIn(Tier& tier, std::span<const std::string_view> keys,
                                             Deadline deadline) {
  absl::StatusOr<int64_t> there =
      Ask(tier, deadline, [&](Deadline until) { return tier.store->Exists(keys, until); });
  if (!there.ok()) {
    CountError(there.status());
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
  int64_t ask = 1;  // So many keys of the lower tier.
  int pieces_above = 0;
  while (there < std::ssize(keys)) {
    const uint64_t puts_above = puts_above_;
    const absl::StatusOr<int64_t> upper = CountIn(upper_, keys.subspan(there), deadline);
    there += upper.value_or(0);
    if (upper.value_or(0) > 0) ++pieces_above;
    if (there == std::ssize(keys)) break;
    // More and more behind one gap of the upper's. All that are left, at each of them, would be
    // keys times gaps.
    if (upper.value_or(0) > 0) ask = 1;
    const int64_t count = std::min(ask, std::ssize(keys) - there);
    ask = 2 * count;
    absl::StatusOr<int64_t> lower = CountIn(lower_, keys.subspan(there, count), deadline);
    there += lower.value_or(0);
    if (!upper.ok() && !lower.ok() && there == 0) return lower;
    if (lower.value_or(0) > 0) continue;
    const int64_t moved = upper.ok() && MayHaveMovedUp(puts_above)
                              ? CountIn(upper_, keys.subspan(there, 1), deadline).value_or(0)
                              : 0;
    if (moved == 0) break;
    there += moved;
    ++pieces_above;
  }
  // Of several pieces the last was used last.
  if (pieces_above > 1) UseAbove(keys.first(there), deadline);
  return there;
}

absl::StatusOr<std::vector<bool>> TieredStore::WhichIn(Tier& tier,
                                                       std::span<const std::string_view> keys,
                                                       Deadline deadline) {
  absl::StatusOr<std::vector<bool>> there =
      Ask(tier, deadline, [&](Deadline until) { return tier.store->ExistsEach(keys, until); });
  if (!there.ok()) {
    CountError(there.status());
    return there;
  }
  for (size_t i = 0; i < keys.size(); ++i) (*there)[i] = (*there)[i] && !IsStale(tier, keys[i]);
  return there;
}

absl::StatusOr<std::vector<bool>> TieredStore::ExistsEach(std::span<const std::string_view> keys,
                                                          Deadline deadline) {
  for (const std::string_view key : keys) KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  const uint64_t puts_above = puts_above_;
  const absl::StatusOr<std::vector<bool>> upper = WhichIn(upper_, keys, deadline);
  std::vector<bool> there = upper.value_or(std::vector<bool>(keys.size()));
  // About those that none has so far.
  const auto ask = [&](Tier& tier) -> absl::Status {
    std::vector<std::string_view> others;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!there[i]) others.push_back(keys[i]);
    }
    if (others.empty()) return absl::OkStatus();
    KVFERRY_ASSIGN_OR_RETURN(const std::vector<bool> which, WhichIn(tier, others, deadline));
    auto next = which.begin();
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!there[i]) there[i] = *next++;
    }
    return absl::OkStatus();
  };
  const absl::Status lower = ask(lower_);
  if (!upper.ok()) return lower.ok() ? absl::StatusOr<std::vector<bool>>(there) : lower;
  if (MayHaveMovedUp(puts_above)) ask(upper_).IgnoreError();
  return there;
}

// ---- Pins ---------------------------------------------------------------------------------------

absl::Status TieredStore::PinIn(Tier& tier, std::string_view key, Deadline deadline) {
  if (!tier.store->pins_for_sure()) {
    return absl::UnimplementedError(absl::StrCat(
        "tiered store: pins of a tier (", std::string(tier.store->name()), ") are not for sure"));
  }
  {
    MutexLock lock(&mutex_);
    if (tier.pinned.contains(key)) return absl::OkStatus();
    if (tier.stale.contains(key)) return absl::NotFoundError("tiered store: stale");
  }
  Keys pinned = {std::string(key)};  // Before it is: without memory nobody would know of the pin.
  KVFERRY_RETURN_IF_ERROR(
      Ask(tier, deadline, [&](Deadline until) { return tier.store->Pin(key, until); }));
  MutexLock lock(&mutex_);
  tier.pinned.merge(pinned);
  return absl::OkStatus();
}

absl::Status TieredStore::UnpinIn(Tier& tier, std::string_view key, Deadline deadline) {
  {
    MutexLock lock(&mutex_);
    if (!tier.pinned.contains(key)) return absl::OkStatus();
  }
  absl::Status status =
      Ask(tier, deadline, [&](Deadline until) { return tier.store->Unpin(key, until); });
  // FAILED_PRECONDITION: the tier has not got the pin.
  if (!status.ok() && !absl::IsFailedPrecondition(status)) {
    CountError(status);
    return status;
  }
  MutexLock lock(&mutex_);
  EraseIfThere(tier.pinned, key);
  return absl::OkStatus();
}

absl::Status TieredStore::BringUpAndPin(std::string_view key, Deadline deadline) {
  if (IsStale(lower_, key)) return absl::NotFoundError("tiered store: only an old value");
  KVFERRY_ASSIGN_OR_RETURN(
      const std::vector<std::byte> bytes,
      Ask(lower_, deadline, [&](Deadline until) { return lower_.store->GetBytes(key, until); }));
  const std::span<const std::byte> value = bytes;
  KVFERRY_RETURN_IF_ERROR(PutInto(upper_, key, {&value, 1}, deadline));
  return PinIn(upper_, key, deadline);
}

absl::Status TieredStore::Pin(std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, turns_.Take(key, deadline));
  std::map<std::string, int64_t, std::less<>> pinned = {{std::string(key), 0}};  // As in PinIn().
  absl::Status upper = PinIn(upper_, key, deadline);
  const absl::Status lower = PinIn(lower_, key, deadline);
  if (absl::IsNotFound(upper) && absl::IsUnimplemented(lower)) {
    upper = BringUpAndPin(key, deadline);
  }
  if (!upper.ok() && !lower.ok()) return absl::IsUnimplemented(lower) ? upper : lower;
  MutexLock lock(&mutex_);
  pins_.merge(pinned);
  ++pins_.find(key)->second;
  return absl::OkStatus();
}

absl::Status TieredStore::Unpin(std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, turns_.Take(key, deadline));
  {
    MutexLock lock(&mutex_);
    const auto it = pins_.find(key);
    if (it == pins_.end()) {
      return absl::FailedPreconditionError("tiered store: the entry is not pinned");
    }
    if (it->second > 1) {
      --it->second;
      return absl::OkStatus();
    }
  }
  const absl::Status upper = UnpinIn(upper_, key, deadline);
  KVFERRY_RETURN_IF_ERROR(UnpinIn(lower_, key, deadline));
  KVFERRY_RETURN_IF_ERROR(upper);
  MutexLock lock(&mutex_);
  EraseIfThere(pins_, key);  // Last: until the tiers have let go of it, it counts.
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
