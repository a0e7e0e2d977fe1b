#include "connector/store/rocksdb_store.h"

#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>

#include <chrono>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/check_range.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status.h"
#include "connector/store/entry_index.h"
#include "connector/store/key_turns.h"
#include "connector/store/rocksdb_database.h"
#include "connector/store/rocksdb_resumer.h"
#include "connector/store/value_header.h"

namespace kvferry {
namespace {

int64_t EntryBytes(std::string_view key, int64_t value_bytes) {
  return static_cast<int64_t>(key.size()) + kValueHeaderBytes + value_bytes;
}
int64_t ValueBytes(std::string_view key, int64_t entry_bytes) {
  return entry_bytes - kValueHeaderBytes - static_cast<int64_t>(key.size());
}

rocksdb::Slice SliceOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
std::span<const std::byte> SpanOf(const rocksdb::Slice& slice) {
  return std::as_bytes(std::span(slice.data(), slice.size()));
}

absl::Status CheckOptions(const RocksDbStore::Options& options) {
  const auto bad = [](auto&&... what) {
    return absl::InvalidArgumentError(absl::StrCat("rocksdb store: ", what...));
  };
  if (options.path.empty()) return bad("path is empty");
  if (options.capacity_bytes < 0) {
    return bad("capacity_bytes is ", options.capacity_bytes, " but may not be negative");
  }
  return CheckRange("rocksdb store", "max_value_bytes", options.max_value_bytes, 1,
                    RocksDbStore::kMaxValueBytes);
}

}  // namespace

class RocksDbStore::Impl {
 public:
  Impl(const Options& options, RocksDbDatabase database)
      : options_(options), database_(std::move(database)) {}

  using Numbers = EntryIndex::Numbers;
  struct NumberedItem {
    PutItem item;
    uint64_t number;
  };

  absl::Status Load();
  // For a batch, whatever is put while it is written.
  Numbers TakeNumbers(size_t count);
  // All of them or none, without dropping others of their batch. No two items have the same key.
  absl::Status PutTogether(std::span<const NumberedItem> items, Numbers batch, Deadline deadline);
  // Fills what it can of `items` and says OK for it; leaves the other statuses as they are.
  void ReadTogether(std::span<const GetItem> items, std::span<absl::Status> statuses);
  // Hands the value to `take` once, whole. `want_bytes`: how long it must be, if that is known.
  absl::Status Read(std::string_view key, std::optional<int64_t> want_bytes, Deadline deadline,
                    absl::FunctionRef<void(std::span<const std::byte>)> take);
  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys) const;
  std::vector<bool> Which(std::span<const std::string_view> keys) const;
  absl::Status Erase(std::string_view key, Deadline deadline);
  absl::Status Pin(std::string_view key, Deadline deadline);
  absl::Status Unpin(std::string_view key, Deadline deadline);
  Stats stats() const;
  const Options& options() const { return options_; }

 private:
  // The right to change anything, held by one call at a time.
  absl::StatusOr<KeyTurns::Turn> TakeTurn(Deadline deadline) {
    auto turn = turns_.Take("", deadline);
    if (turn.ok()) return turn;
    return absl::DeadlineExceededError("rocksdb store: others were writing until the deadline");
  }
  std::optional<EntryIndex::Entry> Find(std::string_view key) const;
  absl::Status LoadEntries(rocksdb::WriteBatch* stale);
  absl::StatusOr<std::vector<std::string>> VictimsFor(std::span<const EntryIndex::Wanted> wanted,
                                                      Numbers batch) const;
  void AddRemoval(std::string_view key, rocksdb::WriteBatch* batch) const;
  absl::Status AddValue(std::string_view key, uint64_t number, const ValueHeader& header,
                        ConstParts value, rocksdb::WriteBatch* batch) const;
  absl::Status Miss();
  // These need a Turn.
  absl::Status CheckRoom(int64_t bytes);
  absl::Status Write(std::string_view doing, rocksdb::WriteBatch* batch, Deadline deadline);
  absl::Status Remove(std::string_view key, Deadline deadline);
  absl::Status DropDamaged(std::string_view key, uint64_t number, Deadline deadline);

  int64_t capacity_bytes() const {
    return options_.capacity_bytes > 0 ? options_.capacity_bytes
                                       : std::numeric_limits<int64_t>::max();
  }
  void CountError() {
    MutexLock lock(&mutex_);
    ++counts_.errors;
  }

  const Options options_;
  const RocksDbDatabase database_;
  RocksDbResumer resumer_{database_.db.get(), options_.path};  // Used in a Turn only.
  KeyTurns turns_;
  mutable Mutex mutex_;                       // Never held while RocksDB works.
  EntryIndex index_ ABSL_GUARDED_BY(mutex_);  // Changes in a Turn only.
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;
  Stats counts_ ABSL_GUARDED_BY(mutex_);
};

// ---- Opening ------------------------------------------------------------------------------------

// In order of age: of two entries of a key, as a put that failed half-way may leave, the later one
// stays. `stale` then removes the other.
absl::Status RocksDbStore::Impl::LoadEntries(rocksdb::WriteBatch* stale) {
  const std::unique_ptr<rocksdb::Iterator> it(
      database_.db->NewIterator(rocksdb::ReadOptions(), database_.entries));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    const std::optional<EntryRecord> record = ParseEntryRecord(it->key(), it->value());
    if (!record || ValueBytes(record->key, record->bytes) < 1) {
      return absl::DataLossError(absl::StrCat("rocksdb store: path '", options_.path,
                                              "' has an entry that makes no sense; remove the "
                                              "folder"));
    }
    if (Find(record->key)) AddRemoval(record->key, stale);
    MutexLock lock(&mutex_);
    index_.Set(EntryIndex::Place(record->key), record->number, record->bytes);
    next_number_ = record->number + 1;
  }
  return it->status().ok() ? absl::OkStatus() : FromRocksDb("reading the entries", it->status());
}

absl::Status RocksDbStore::Impl::Load() {
  rocksdb::WriteBatch stale;
  KVFERRY_RETURN_IF_ERROR(LoadEntries(&stale));
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<std::string> victims, VictimsFor({}, {}));
  for (const std::string& victim : victims) AddRemoval(victim, &stale);
  if (stale.Count() == 0) return absl::OkStatus();
  KVFERRY_RETURN_IF_ERROR(Write("removing what is over the capacity", &stale, Deadline::max()));
  MutexLock lock(&mutex_);
  for (const std::string& victim : victims) index_.Remove(victim);
  counts_.evictions += std::ssize(victims);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<RocksDbStore>> RocksDbStore::Open(const Options& options) {
  KVFERRY_RETURN_IF_ERROR(CheckOptions(options));
  KVFERRY_ASSIGN_OR_RETURN(RocksDbDatabase database,
                           OpenRocksDb(options.path, options.capacity_bytes));
  auto impl = std::make_unique<Impl>(options, std::move(database));
  KVFERRY_RETURN_IF_ERROR(impl->Load());
  return std::unique_ptr<RocksDbStore>(new RocksDbStore(std::move(impl)));
}

// ---- Changing -----------------------------------------------------------------------------------

std::optional<EntryIndex::Entry> RocksDbStore::Impl::Find(std::string_view key) const {
  MutexLock lock(&mutex_);
  const EntryIndex::Entry* const entry = index_.Find(key);
  return entry != nullptr ? std::optional(*entry) : std::nullopt;
}

absl::StatusOr<std::vector<std::string>> RocksDbStore::Impl::VictimsFor(
    std::span<const EntryIndex::Wanted> wanted, Numbers batch) const {
  MutexLock lock(&mutex_);
  std::optional<std::vector<std::string>> victims =
      index_.VictimsFor(wanted, capacity_bytes(), batch);
  if (victims) return *std::move(victims);
  int64_t bytes = 0;
  for (const EntryIndex::Wanted& one : wanted) bytes += one.bytes;
  return absl::ResourceExhaustedError(
      absl::StrCat("rocksdb store: no room for ", bytes, " bytes: of ", capacity_bytes(), " are ",
                   index_.pinned_bytes(), " pinned",
                   batch.end - batch.begin > 1 ? ", and what comes before in the batch stays" : "",
                   "; unpin entries or give the store more"));
}

// Nothing for an entry that is not there.
void RocksDbStore::Impl::AddRemoval(std::string_view key, rocksdb::WriteBatch* batch) const {
  const std::optional<EntryIndex::Entry> entry = Find(key);
  if (!entry) return;
  const std::string record_key = RecordKey(entry->number);
  (void)batch->Delete(database_.values, record_key);  // In memory: cannot fail without limits.
  (void)batch->Delete(database_.entries, record_key);
}

// RocksDB does not always get over a disk that is full (RocksDbResumer), so it is given nothing
// that it could not write beside what it has in memory. Others may fill the disk all the same.
absl::Status RocksDbStore::Impl::CheckRoom(int64_t bytes) {
  uint64_t in_memory = 0;
  (void)database_.db->GetAggregatedIntProperty(rocksdb::DB::Properties::kCurSizeAllMemTables,
                                               &in_memory);
  const std::optional<int64_t> room = DiskRoomBytes(options_.path);
  const int64_t needed = bytes + static_cast<int64_t>(in_memory);
  if (!room || *room >= needed) return absl::OkStatus();
  CountError();
  return absl::ResourceExhaustedError(
      absl::StrCat("rocksdb store: writing a value: No space left on device: ", *room,
                   " bytes are free at '", options_.path, "', and RocksDB may need ", needed));
}

// RocksDB is told not to wait when it is behind with its files, so that the deadline holds. After
// an error it refuses all writes until it is told to go on; after some it does so for good.
absl::Status RocksDbStore::Impl::Write(std::string_view doing, rocksdb::WriteBatch* batch,
                                       Deadline deadline) {
  rocksdb::WriteOptions options;
  options.sync = options_.sync;
  options.no_slowdown = true;
  bool resumed = false;
  for (;;) {
    const rocksdb::Status written = database_.db->Write(options, batch);
    if (written.ok()) return absl::OkStatus();
    if (written.IsIncomplete() && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    absl::Status status =
        written.IsIncomplete()
            ? absl::DeadlineExceededError("rocksdb store: the disk was behind until the deadline")
            : FromRocksDb(doing, written);
    if (!written.IsIncomplete() && !std::exchange(resumed, true)) {
      const auto bytes = static_cast<int64_t>(batch->GetDataSize());
      status = resumer_.Resume(written, bytes, status, deadline);
      if (status.ok()) continue;
    }
    CountError();
    return status;
  }
}

RocksDbStore::Impl::Numbers RocksDbStore::Impl::TakeNumbers(size_t count) {
  MutexLock lock(&mutex_);
  const uint64_t begin = std::exchange(next_number_, next_number_ + count);
  return {begin, next_number_};
}

absl::Status RocksDbStore::Impl::PutTogether(std::span<const NumberedItem> items, Numbers batch,
                                             Deadline deadline) {
  std::vector<ValueHeader> headers;
  std::vector<EntryIndex::Wanted> wanted;
  std::vector<EntryIndex::Place> places;  // Now: what the disk has is to be known, come what may.
  for (const auto& [item, number] : items) {
    headers.push_back(MakeValueHeader(item.key, item.value));
    wanted.push_back({item.key, EntryBytes(item.key, BytesOf(item.value))});
    places.emplace_back(item.key);
  }
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, TakeTurn(deadline));
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<std::string> victims, VictimsFor(wanted, batch));
  rocksdb::WriteBatch writes;
  for (const std::string& victim : victims) AddRemoval(victim, &writes);
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& [item, number] = items[i];
    AddRemoval(item.key, &writes);
    KVFERRY_RETURN_IF_ERROR(AddValue(item.key, number, headers[i], item.value, &writes));
  }
  KVFERRY_RETURN_IF_ERROR(CheckRoom(static_cast<int64_t>(writes.GetDataSize())));
  KVFERRY_RETURN_IF_ERROR(Write("writing a value", &writes, deadline));
  MutexLock lock(&mutex_);
  for (const std::string& victim : victims) index_.Remove(victim);
  for (size_t i = 0; i < items.size(); ++i) {
    index_.Set(std::move(places[i]), items[i].number, wanted[i].bytes);
  }
  counts_.evictions += std::ssize(victims);
  counts_.puts += std::ssize(items);
  return absl::OkStatus();
}

absl::Status RocksDbStore::Impl::AddValue(std::string_view key, uint64_t number,
                                          const ValueHeader& header, ConstParts value,
                                          rocksdb::WriteBatch* batch) const {
  const std::string record_key = RecordKey(number);
  const std::string entry = EntryRecordText(key, EntryBytes(key, BytesOf(value)));
  std::vector<rocksdb::Slice> record = {SliceOf(header)};
  for (const auto& part : value) record.push_back(SliceOf(part));
  const rocksdb::Slice key_slice = record_key;
  rocksdb::Status added =
      batch->Put(database_.values, rocksdb::SliceParts(&key_slice, 1),
                 rocksdb::SliceParts(record.data(), static_cast<int>(record.size())));
  if (added.ok()) added = batch->Put(database_.entries, record_key, entry);
  return added.ok() ? absl::OkStatus() : FromRocksDb("writing a value", added);
}

absl::Status RocksDbStore::Impl::Remove(std::string_view key, Deadline deadline) {
  rocksdb::WriteBatch batch;
  AddRemoval(key, &batch);
  if (batch.Count() == 0) return absl::OkStatus();
  KVFERRY_RETURN_IF_ERROR(Write("removing a value", &batch, deadline));
  MutexLock lock(&mutex_);
  index_.Remove(key);
  return absl::OkStatus();
}

absl::Status RocksDbStore::Impl::Erase(std::string_view key, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, TakeTurn(deadline));
  return Remove(key, deadline);
}

absl::Status RocksDbStore::Impl::Pin(std::string_view key, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, TakeTurn(deadline));
  MutexLock lock(&mutex_);
  if (index_.Find(key) == nullptr) {
    return absl::NotFoundError("rocksdb store: no such entry to pin");
  }
  index_.AddPins(key, 1);
  return absl::OkStatus();
}

absl::Status RocksDbStore::Impl::Unpin(std::string_view key, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, TakeTurn(deadline));
  MutexLock lock(&mutex_);
  const EntryIndex::Entry* const entry = index_.Find(key);
  if (entry == nullptr || entry->pins == 0) {
    return absl::FailedPreconditionError(entry == nullptr
                                             ? "rocksdb store: no such entry to unpin"
                                             : "rocksdb store: the entry is not pinned");
  }
  index_.AddPins(key, -1);
  return absl::OkStatus();
}

// ---- Reading ------------------------------------------------------------------------------------

// Nothing is held while the disk is read, so the value may be replaced meanwhile: then the entry
// has another number, and is read again.
absl::Status RocksDbStore::Impl::Read(std::string_view key, std::optional<int64_t> want_bytes,
                                      Deadline deadline,
                                      absl::FunctionRef<void(std::span<const std::byte>)> take) {
  for (;;) {
    const std::optional<EntryIndex::Entry> entry = Find(key);
    if (!entry) return Miss();
    const int64_t bytes = ValueBytes(key, entry->bytes);
    if (want_bytes && *want_bytes != bytes) {
      return absl::FailedPreconditionError(absl::StrCat("rocksdb store: the value has ", bytes,
                                                        " bytes, the memory for it ", *want_bytes));
    }
    if (Clock::now() >= deadline) {
      return absl::DeadlineExceededError("rocksdb store: the deadline has passed");
    }
    rocksdb::PinnableSlice record;
    const rocksdb::Status got = database_.db->Get(rocksdb::ReadOptions(), database_.values,
                                                  RecordKey(entry->number), &record);
    // A file that is gone is a value that is damaged.
    if (!got.ok() && !got.IsNotFound() && !got.IsCorruption() && !got.IsPathNotFound()) {
      CountError();
      return FromRocksDb("reading a value", got);
    }
    if (got.ok()) {
      const auto value = CheckedValue(key, SpanOf(record));
      if (value && std::ssize(*value) == bytes) {
        take(*value);
        MutexLock lock(&mutex_);
        ++counts_.hits;
        return absl::OkStatus();
      }
    }
    KVFERRY_RETURN_IF_ERROR(DropDamaged(key, entry->number, deadline));
  }
}

// What is not there, of another length, or damaged is Read()'s to say.
void RocksDbStore::Impl::ReadTogether(std::span<const GetItem> items,
                                      std::span<absl::Status> statuses) {
  std::vector<std::string> record_keys;
  std::vector<size_t> at;
  for (size_t i = 0; i < items.size(); ++i) {
    const std::optional<EntryIndex::Entry> entry = Find(items[i].key);
    if (!entry || ValueBytes(items[i].key, entry->bytes) != BytesOf(items[i].out)) continue;
    record_keys.push_back(RecordKey(entry->number));
    at.push_back(i);
  }
  const std::vector<rocksdb::Slice> keys(record_keys.begin(), record_keys.end());
  std::vector<rocksdb::PinnableSlice> records(keys.size());
  std::vector<rocksdb::Status> got(keys.size());
  database_.db->MultiGet(rocksdb::ReadOptions(), database_.values, keys.size(), keys.data(),
                         records.data(), got.data());
  int64_t hits = 0;
  for (size_t i = 0; i < at.size(); ++i) {
    const GetItem& item = items[at[i]];
    if (!got[i].ok()) continue;
    const auto value = CheckedValue(item.key, SpanOf(records[i]));
    if (!value || std::ssize(*value) != BytesOf(item.out)) continue;
    CopyToParts(*value, item.out);
    statuses[at[i]] = absl::OkStatus();
    ++hits;
  }
  MutexLock lock(&mutex_);
  counts_.hits += hits;
}

absl::Status RocksDbStore::Impl::Miss() {
  MutexLock lock(&mutex_);
  ++counts_.misses;
  return absl::NotFoundError("rocksdb store: no such entry");
}

// Unless another put has come in between. What cannot be removed stays, and is a miss all the same.
absl::Status RocksDbStore::Impl::DropDamaged(std::string_view key, uint64_t number,
                                             Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const KeyTurns::Turn turn, TakeTurn(deadline));
  const std::optional<EntryIndex::Entry> entry = Find(key);
  if (!entry || entry->number != number) return absl::OkStatus();
  Log().warn("rocksdb store: a damaged value of {} bytes is dropped", entry->bytes);
  CountError();
  if (!Remove(key, deadline).ok()) return Miss();
  return absl::OkStatus();
}

absl::StatusOr<int64_t> RocksDbStore::Impl::Exists(std::span<const std::string_view> keys) const {
  MutexLock lock(&mutex_);
  int64_t there = 0;
  while (there < std::ssize(keys) && index_.Find(keys[there]) != nullptr) ++there;
  return there;
}

std::vector<bool> RocksDbStore::Impl::Which(std::span<const std::string_view> keys) const {
  std::vector<bool> there;
  there.reserve(keys.size());
  MutexLock lock(&mutex_);
  for (const std::string_view key : keys) there.push_back(index_.Find(key) != nullptr);
  return there;
}

KvStore::Stats RocksDbStore::Impl::stats() const {
  MutexLock lock(&mutex_);
  Stats stats = counts_;
  stats.entries = index_.size();
  stats.bytes = index_.bytes();
  stats.pinned = index_.num_pinned();
  if (options_.capacity_bytes > 0) stats.capacity_bytes = options_.capacity_bytes;
  return stats;
}

// ---- The interface ------------------------------------------------------------------------------

RocksDbStore::RocksDbStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RocksDbStore::~RocksDbStore() = default;

int64_t RocksDbStore::max_value_bytes() const { return impl_->options().max_value_bytes; }

absl::Status RocksDbStore::Put(std::string_view key, ConstParts value, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  KVFERRY_RETURN_IF_ERROR(CheckValueBytes(BytesOf(value), max_value_bytes()));
  const EntryIndex::Numbers numbers = impl_->TakeNumbers(1);
  const Impl::NumberedItem item = {{key, value}, numbers.begin};
  return impl_->PutTogether({&item, 1}, numbers, deadline);
}

// The first is written first, so that what a deadline cuts off are those that are of no use without
// it, and has the highest number, so that it is the youngest all the same.
void RocksDbStore::PutDistinct(std::span<const PutItem> items, std::span<absl::Status> statuses,
                               Deadline deadline) {
  const EntryIndex::Numbers batch = impl_->TakeNumbers(items.size());
  std::vector<Impl::NumberedItem> together;
  std::vector<size_t> at;  // Where those stand in `items`.
  int64_t bytes = 0;
  const auto put = [&] {
    const absl::Status status = impl_->PutTogether(together, batch, deadline);
    // What is too much for the room or the disk in all may fit in part.
    const bool singly = absl::IsResourceExhausted(status) && together.size() > 1;
    for (size_t i = 0; i < at.size(); ++i) {
      statuses[at[i]] = singly ? impl_->PutTogether({&together[i], 1}, batch, deadline) : status;
    }
    together.clear(), at.clear();
    bytes = 0;
  };
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t value_bytes = BytesOf(items[i].value);
    statuses[i] = CheckKey(items[i].key);
    if (statuses[i].ok()) statuses[i] = CheckValueBytes(value_bytes, max_value_bytes());
    if (!statuses[i].ok()) continue;
    if (bytes + value_bytes > kTogetherBytes && !together.empty()) put();
    together.push_back({items[i], batch.end - 1 - i});
    at.push_back(i);
    bytes += value_bytes;
  }
  if (!together.empty()) put();
}

std::vector<absl::Status> RocksDbStore::GetBatch(std::span<const GetItem> items,
                                                 Deadline deadline) {
  std::vector<absl::Status> statuses(items.size(), absl::UnknownError("not read yet"));
  for (size_t begin = 0, end = 0; begin < items.size(); begin = end) {
    int64_t bytes = 0;
    while (end < items.size() && (end == begin || bytes < kTogetherBytes)) {
      bytes += BytesOf(items[end++].out);
    }
    if (end - begin > 1 && Clock::now() < deadline) {
      impl_->ReadTogether(items.subspan(begin, end - begin),
                          std::span(statuses).subspan(begin, end - begin));
    }
  }
  for (size_t i = 0; i < items.size(); ++i) {
    if (!statuses[i].ok()) statuses[i] = Get(items[i].key, items[i].out, deadline);
  }
  return statuses;
}

absl::Status RocksDbStore::Get(std::string_view key, Parts out, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  return impl_->Read(key, BytesOf(out), deadline,
                     [out](std::span<const std::byte> value) { CopyToParts(value, out); });
}

absl::StatusOr<std::vector<std::byte>> RocksDbStore::GetBytes(std::string_view key,
                                                              Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  std::vector<std::byte> bytes;
  KVFERRY_RETURN_IF_ERROR(impl_->Read(
      key, std::nullopt, deadline,
      [&bytes](std::span<const std::byte> value) { bytes.assign(value.begin(), value.end()); }));
  return bytes;
}

absl::StatusOr<int64_t> RocksDbStore::Exists(std::span<const std::string_view> keys, Deadline) {
  for (const std::string_view key : keys) KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  return impl_->Exists(keys);
}

absl::StatusOr<std::vector<bool>> RocksDbStore::ExistsEach(std::span<const std::string_view> keys,
                                                           Deadline) {
  for (const std::string_view key : keys) KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  return impl_->Which(keys);
}

absl::Status RocksDbStore::Erase(std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  return impl_->Erase(key, deadline);
}

absl::Status RocksDbStore::Pin(std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  return impl_->Pin(key, deadline);
}

absl::Status RocksDbStore::Unpin(std::string_view key, Deadline deadline) {
  KVFERRY_RETURN_IF_ERROR(CheckKey(key));
  return impl_->Unpin(key, deadline);
}

KvStore::Stats RocksDbStore::stats() const { return impl_->stats(); }

}  // namespace kvferry
