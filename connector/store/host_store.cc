#include "connector/store/host_store.h"

#include <algorithm>
#include <iterator>
#include <list>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/ceil_div.h"
#include "base/check_range.h"
#include "base/mutex.h"
#include "base/status.h"
#include "pool/page_allocator.h"
#include "transport/stream_plan.h"

namespace kvferry {

// A value and its pages. Key, bytes and pages are constant while it is leased; the rest belongs to
// State::mutex_.
struct HostStore::Value {
  std::string key;  // Empty until it is committed.
  int64_t bytes = 0;
  PageRuns pages;
  bool stored = false;  // The table has it. Otherwise it goes with its last lease.
  int64_t pins = 0;
  int64_t leases = 0;  // Or a reservation.
  std::list<Value>::iterator self;
};

class HostStore::State : public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<KvPool> pool, PageAllocator allocator, int64_t max_value_bytes)
      : pool_(std::move(pool)),
        page_bytes_(pool_->layout().page_bytes()),
        max_value_bytes_(max_value_bytes),
        allocator_(std::move(allocator)) {}

  const std::shared_ptr<KvPool>& pool() const { return pool_; }
  int64_t max_value_bytes() const { return max_value_bytes_; }

  std::vector<absl::StatusOr<Held>> Reserve(std::span<const int64_t> bytes);
  void Commit(Held held, std::string_view key);
  absl::StatusOr<Held> Acquire(std::string_view key);
  void Release(Value* value);
  void Erase(std::string_view key);
  absl::Status Pin(std::string_view key);
  absl::Status Unpin(std::string_view key);
  int64_t CountPrefix(std::span<const std::string_view> keys);
  std::vector<bool> Which(std::span<const std::string_view> keys);
  Stats stats() const;

 private:
  // Values that share a fate, and their pages added up.
  struct Group {
    std::list<Value> values;
    int64_t pages = 0;
  };

  Group& GroupOf(const Value& value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Applies `change`, and moves the value to the group where it then belongs.
  template <typename Change>
  void Update(Value* value, const Change& change) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(Value* value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeOut(Value* value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The table has it no more.
  void EndStored(Value* value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NoRoom(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Held> Allocate(int64_t num_pages, int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Use(Value* value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Value* Find(std::string_view key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<KvPool> pool_;
  const int64_t page_bytes_;
  const int64_t max_value_bytes_;
  mutable Mutex mutex_;
  PageAllocator allocator_ ABSL_GUARDED_BY(mutex_);
  // Keys: Value's. Abseil's maps are broken by a growth for which there is no memory.
  std::unordered_map<std::string_view, Value*> table_ ABSL_GUARDED_BY(mutex_);
  Group evictable_ ABSL_GUARDED_BY(mutex_);  // What was used least recently is first.
  Group pinned_ ABSL_GUARDED_BY(mutex_);     // Leased or not.
  Group leased_ ABSL_GUARDED_BY(mutex_);  // Not pinned; also what is no longer stored, or not yet.
  Stats counts_ ABSL_GUARDED_BY(mutex_);
};

HostStore::State::Group& HostStore::State::GroupOf(const Value& value) {
  if (value.pins > 0) return pinned_;
  return value.leases > 0 ? leased_ : evictable_;
}

template <typename Change>
void HostStore::State::Update(Value* value, const Change& change) {
  Group& from = GroupOf(*value);
  change();
  Group& to = GroupOf(*value);
  const int64_t pages = value->pages.num_pages();
  from.pages -= pages;
  to.pages += pages;
  to.values.splice(to.values.end(), from.values, value->self);
}

// Pages and memory of a value that is neither stored nor leased.
void HostStore::State::Drop(Value* value) {
  Group& group = GroupOf(*value);
  group.pages -= value->pages.num_pages();
  allocator_.FreeEachRun(value->pages);
  group.values.erase(value->self);
}

void HostStore::State::TakeOut(Value* value) {
  table_.erase(value->key);
  EndStored(value);
}

void HostStore::State::EndStored(Value* value) {
  Update(value, [value] {
    value->stored = false;
    value->pins = 0;
  });
  if (value->leases == 0) Drop(value);
}

HostStore::Value* HostStore::State::Find(std::string_view key) const {
  const auto it = table_.find(key);
  return it == table_.end() ? nullptr : it->second;
}

absl::Status HostStore::State::NoRoom(int64_t bytes) const {
  return absl::ResourceExhaustedError(absl::StrCat(
      "host store: no room for ", bytes, " bytes: of ", pool_->num_pages() * page_bytes_, " are ",
      pinned_.pages * page_bytes_, " pinned and ", leased_.pages * page_bytes_,
      " leased or reserved; unpin entries or let go of leases, or give the store more"));
}

// All room is made before any of it is taken, so that pages lie side by side also in a full store:
// what goes first is the end of what was put together, page by page from its last.
std::vector<absl::StatusOr<HostStore::Held>> HostStore::State::Reserve(
    std::span<const int64_t> bytes) {
  std::vector<absl::StatusOr<Held>> reserved;
  reserved.reserve(bytes.size());
  MutexLock lock(&mutex_);
  const int64_t most = allocator_.num_free() + evictable_.pages;
  std::vector<int64_t> pages;  // Of each value; 0 where there is no room for it.
  int64_t wanted = 0;
  for (const int64_t value_bytes : bytes) {
    const bool valid = CheckValueBytes(value_bytes, max_value_bytes_).ok();
    const int64_t num_pages = valid ? CeilDiv(value_bytes, page_bytes_) : 0;
    pages.push_back(num_pages <= most - wanted ? num_pages : 0);
    wanted += pages.back();
  }
  while (allocator_.num_free() < wanted) {
    TakeOut(&evictable_.values.front());
    ++counts_.evictions;
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    const absl::Status valid = CheckValueBytes(bytes[i], max_value_bytes_);
    reserved.push_back(pages[i] > 0 ? Allocate(pages[i], bytes[i])
                       : valid.ok() ? NoRoom(bytes[i])
                                    : valid);
  }
  return reserved;
}

absl::StatusOr<HostStore::Held> HostStore::State::Allocate(int64_t num_pages, int64_t bytes) {
  std::list<Value> one(1);  // Before the pages, which would be nobody's without it.
  KVFERRY_ASSIGN_OR_RETURN(one.front().pages, allocator_.Allocate(num_pages));
  leased_.values.splice(leased_.values.end(), one);
  Value& value = leased_.values.back();
  value.bytes = bytes;
  value.leases = 1;
  value.self = std::prev(leased_.values.end());
  leased_.pages += num_pages;
  return Held(&value, {shared_from_this()});
}

// What takes memory comes first: without it nothing has changed.
void HostStore::State::Commit(Held held, std::string_view key) {
  MutexLock lock(&mutex_);
  held->key = key;
  const auto [place, is_new] = table_.try_emplace(held->key, held.get());
  Value* const value = held.release();
  int64_t pins = 0;
  if (!is_new) {
    Value* const before = place->second;
    pins = before->pins;
    auto node = table_.extract(place);
    node.key() = value->key;
    node.mapped() = value;
    table_.insert(std::move(node));
    EndStored(before);
  }
  Update(value, [value, pins] {
    value->stored = true;
    value->pins = pins;
    value->leases = 0;
  });
  ++counts_.puts;
}

absl::StatusOr<HostStore::Held> HostStore::State::Acquire(std::string_view key) {
  MutexLock lock(&mutex_);
  Value* const value = Find(key);
  ++(value == nullptr ? counts_.misses : counts_.hits);
  if (value == nullptr) return absl::NotFoundError("host store: no such entry");
  Update(value, [value] { ++value->leases; });
  return Held(value, {shared_from_this()});
}

void HostStore::State::Release(Value* value) {
  MutexLock lock(&mutex_);
  if (!value->stored && value->leases == 1) {
    Drop(value);
  } else {
    Update(value, [value] { --value->leases; });
  }
}

void HostStore::State::Erase(std::string_view key) {
  MutexLock lock(&mutex_);
  if (Value* const value = Find(key); value != nullptr) TakeOut(value);
}

absl::Status HostStore::State::Pin(std::string_view key) {
  MutexLock lock(&mutex_);
  Value* const value = Find(key);
  if (value == nullptr) return absl::NotFoundError("host store: no such entry to pin");
  Update(value, [value] { ++value->pins; });
  return absl::OkStatus();
}

absl::Status HostStore::State::Unpin(std::string_view key) {
  MutexLock lock(&mutex_);
  Value* const value = Find(key);
  if (value == nullptr || value->pins == 0) {
    return absl::FailedPreconditionError(value == nullptr ? "host store: no such entry to unpin"
                                                          : "host store: the entry is not pinned");
  }
  Update(value, [value] { --value->pins; });
  return absl::OkStatus();
}

// Behind all others of its group.
void HostStore::State::Use(Value* value) {
  Update(value, [] {});
}

int64_t HostStore::State::CountPrefix(std::span<const std::string_view> keys) {
  MutexLock lock(&mutex_);
  std::vector<Value*> there;
  for (const std::string_view key : keys) {
    Value* const value = Find(key);
    if (value == nullptr) break;
    there.push_back(value);
  }
  for (size_t i = there.size(); i-- > 0;) Use(there[i]);
  return std::ssize(there);
}

std::vector<bool> HostStore::State::Which(std::span<const std::string_view> keys) {
  std::vector<bool> there(keys.size());
  MutexLock lock(&mutex_);
  for (size_t i = keys.size(); i-- > 0;) {
    Value* const value = Find(keys[i]);
    there[i] = value != nullptr;
    if (there[i]) Use(value);
  }
  return there;
}

KvStore::Stats HostStore::State::stats() const {
  MutexLock lock(&mutex_);
  Stats stats = counts_;
  stats.entries = std::ssize(table_);
  stats.pinned = std::ssize(pinned_.values);
  stats.bytes = (allocator_.num_pages() - allocator_.num_free()) * page_bytes_;
  stats.capacity_bytes = allocator_.num_pages() * page_bytes_;
  return stats;
}

void HostStore::Release::operator()(Value* value) const { state->Release(value); }

namespace {

// One part after another to or from a stream. An empty span has no address to copy from.
template <typename Parts, typename Copy>
absl::Status CopyParts(Parts parts, const Copy& copy) {
  int64_t offset = 0;
  for (const auto& part : parts) {
    if (!part.empty()) KVFERRY_RETURN_IF_ERROR(copy(offset, part));
    offset += static_cast<int64_t>(part.size());
  }
  return absl::OkStatus();
}

}  // namespace

int64_t HostStore::ReadLease::bytes() const { return value_->bytes; }
const PageRuns& HostStore::ReadLease::pages() const { return value_->pages; }

absl::Status HostStore::ReadLease::CopyTo(Parts out) const {
  if (BytesOf(out) != bytes()) {
    return absl::FailedPreconditionError(absl::StrCat("host store: the value has ", bytes(),
                                                      " bytes, the memory for it ", BytesOf(out)));
  }
  KVFERRY_ASSIGN_OR_RETURN(const StreamPlan plan,
                           StreamPlan::Create(value_.get_deleter().state->pool(), pages()));
  return CopyParts(out, [&plan](int64_t offset, auto part) { return plan.Gather(offset, part); });
}

int64_t HostStore::Reservation::bytes() const { return value_->bytes; }
const PageRuns& HostStore::Reservation::pages() const { return value_->pages; }

absl::Status HostStore::Reservation::CopyFrom(ConstParts value) {
  if (BytesOf(value) != bytes()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "host store: ", bytes(), " bytes are reserved, the value has ", BytesOf(value)));
  }
  KVFERRY_ASSIGN_OR_RETURN(const StreamPlan plan,
                           StreamPlan::Create(value_.get_deleter().state->pool(), pages()));
  return CopyParts(value,
                   [&plan](int64_t offset, auto part) { return plan.Scatter(offset, part); });
}

absl::StatusOr<KvLayout> HostStore::FlatLayout(int64_t page_bytes) {
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("host store", "page_bytes", page_bytes, 1, KvLayout::kMaxHeadDim));
  return KvLayout{1, 1, DType::kUint8, "flat", {{"bytes", 1, page_bytes}}};
}

absl::StatusOr<std::unique_ptr<HostStore>> HostStore::Create(const Options& options) {
  KVFERRY_RETURN_IF_ERROR(options.layout.Validate());
  if (options.capacity_bytes < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "host store: capacity_bytes is ", options.capacity_bytes, " but must be at least 1"));
  }
  const int64_t page_bytes = options.layout.page_bytes();
  if (options.capacity_bytes / page_bytes > PageRuns::kMaxPages) {
    return absl::InvalidArgumentError(absl::StrCat(
        "host store: capacity_bytes is ", options.capacity_bytes, " but must be at most ",
        PageRuns::kMaxPages * page_bytes, " with pages of ", page_bytes, " bytes"));
  }
  const int64_t num_pages = std::max<int64_t>(1, options.capacity_bytes / page_bytes);
  KVFERRY_ASSIGN_OR_RETURN(PageAllocator allocator, PageAllocator::Create(num_pages, 0));
  // It may never be full, and its values are long.
  KVFERRY_ASSIGN_OR_RETURN(
      std::shared_ptr<KvPool> pool,
      KvPool::Create(options.layout, num_pages, KvPool::TakesRoom::kAsTouched));
  if (options.max_value_bytes < 0 || options.max_value_bytes > num_pages * page_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("host store: max_value_bytes is ",
                                                   options.max_value_bytes, " but must lie in [0, ",
                                                   num_pages * page_bytes, "], the capacity"));
  }
  const int64_t max_value_bytes =
      options.max_value_bytes > 0 ? options.max_value_bytes : num_pages * page_bytes;
  return std::unique_ptr<HostStore>(new HostStore(
      std::make_shared<State>(std::move(pool), std::move(allocator), max_value_bytes)));
}

const std::shared_ptr<KvPool>& HostStore::pool() const { return state_->pool(); }
int64_t HostStore::max_value_bytes() const { return state_->max_value_bytes(); }

absl::StatusOr<HostStore::ReadLease> HostStore::Acquire(std::string_view key) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  KVFERRY_ASSIGN_OR_RETURN(Held value, state_->Acquire(key));
  return ReadLease(std::move(value));
}

absl::StatusOr<HostStore::Reservation> HostStore::Reserve(int64_t bytes) {
  return std::move(ReserveEach({&bytes, 1})[0]);
}

std::vector<absl::StatusOr<HostStore::Reservation>> HostStore::ReserveEach(
    std::span<const int64_t> bytes) {
  std::vector<absl::StatusOr<Reservation>> reservations;
  reservations.reserve(bytes.size());
  for (absl::StatusOr<Held>& value : state_->Reserve(bytes)) {
    reservations.push_back(value.ok() ? absl::StatusOr<Reservation>(Reservation(*std::move(value)))
                                      : value.status());
  }
  return reservations;
}

absl::Status HostStore::Commit(Reservation reservation, std::string_view key) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  if (reservation.value_ == nullptr || reservation.value_.get_deleter().state != state_) {
    return absl::InvalidArgumentError(reservation.value_ == nullptr
                                          ? "host store: the reservation was moved from"
                                          : "host store: the reservation is of another store");
  }
  state_->Commit(std::move(reservation.value_), key);
  return absl::OkStatus();
}

absl::Status HostStore::Put(std::string_view key, ConstParts value, Deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  KVFERRY_ASSIGN_OR_RETURN(Reservation reservation, Reserve(BytesOf(value)));
  KVFERRY_RETURN_IF_ERROR(reservation.CopyFrom(value));
  return Commit(std::move(reservation), key);
}

void HostStore::PutDistinct(std::span<const PutItem> items, std::span<absl::Status> statuses,
                            Deadline) {
  std::vector<int64_t> bytes;
  std::vector<size_t> at;  // Where those stand in `items`.
  for (size_t i = 0; i < items.size(); ++i) {
    statuses[i] = CheckKey(items[i].key);
    if (!statuses[i].ok()) continue;
    bytes.push_back(BytesOf(items[i].value));
    at.push_back(i);
  }
  std::vector<absl::StatusOr<Reservation>> room = ReserveEach(bytes);
  for (size_t j = at.size(); j-- > 0;) {
    absl::Status& status = statuses[at[j]] = room[j].status();
    if (status.ok()) status = room[j]->CopyFrom(items[at[j]].value);
    if (status.ok()) status = Commit(*std::move(room[j]), items[at[j]].key);
  }
}

absl::Status HostStore::Get(std::string_view key, Parts out, Deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const ReadLease lease, Acquire(key));
  return lease.CopyTo(out);
}

absl::StatusOr<std::vector<std::byte>> HostStore::GetBytes(std::string_view key, Deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const ReadLease lease, Acquire(key));
  std::vector<std::byte> value(static_cast<size_t>(lease.bytes()));
  const std::span<std::byte> out = value;
  KVFERRY_RETURN_IF_ERROR(lease.CopyTo({&out, 1}));
  return value;
}

absl::StatusOr<int64_t> HostStore::Exists(std::span<const std::string_view> keys, Deadline) {
  for (const std::string_view key : keys) KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  return state_->CountPrefix(keys);
}

absl::StatusOr<std::vector<bool>> HostStore::ExistsEach(std::span<const std::string_view> keys,
                                                        Deadline) {
  for (const std::string_view key : keys) KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  return state_->Which(keys);
}

absl::Status HostStore::Erase(std::string_view key, Deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  state_->Erase(key);
  return absl::OkStatus();
}

absl::Status HostStore::Pin(std::string_view key, Deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  return state_->Pin(key);
}

absl::Status HostStore::Unpin(std::string_view key, Deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  return state_->Unpin(key);
}

KvStore::Stats HostStore::stats() const { return state_->stats(); }

}  // namespace kvferry
