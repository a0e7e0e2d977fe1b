#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "pool/kv_pool.h"

namespace kvferry {

// A dictionary of KV blocks: what every backend of KVStoreBuffer is. A key is 1 to kMaxKeyBytes
// bytes of any kind (block_key.h makes them from tokens), a value 1 to max_value_bytes() bytes.
//
// A value is given and taken as parts, memory that the caller keeps until the call has returned:
// the items of a page in a pool, one after another, are one value. Values are checked: a get is
// either exactly the bytes of one put or an error, never a mixture and never torn.
//
// A store is a cache. What was put may be gone when it is asked for (NOT_FOUND), unless it is
// pinned. All methods are thread-safe, and none outlasts its deadline by more than a second.
// Errors, besides those named below: INVALID_ARGUMENT for a key or a value out of bounds (nothing
// has changed then), UNAVAILABLE for a backend that does not answer, DEADLINE_EXCEEDED.
class KvStore {
 public:
  static constexpr int64_t kMaxKeyBytes = 256;

  using ConstParts = std::span<const std::span<const std::byte>>;
  using Parts = std::span<const std::span<std::byte>>;

  // Numbers since the store was made, and of its present contents where it knows them (else -1).
  struct Stats {
    int64_t entries = -1;
    int64_t bytes = -1;
    int64_t capacity_bytes = -1;
    int64_t pinned = -1;  // Entries.
    int64_t puts = 0;
    int64_t hits = 0;
    int64_t misses = 0;
    int64_t evictions = 0;
    int64_t errors = 0;  // Of the backend: unreachable, full disk, damaged value.
  };

  virtual ~KvStore() = default;

  // "host", "rocksdb", ...: for messages and metrics.
  virtual std::string_view name() const = 0;
  virtual int64_t max_value_bytes() const = 0;

  // Stores the bytes of `value` under `key`, in place of what was there. RESOURCE_EXHAUSTED when
  // there is no room that may be taken: what was there before then stays.
  virtual absl::Status Put(std::string_view key, ConstParts value, Deadline deadline) = 0;

  // Fills `out` with the value. NOT_FOUND for a miss; FAILED_PRECONDITION, naming both sizes, when
  // the value is not as long as `out`. After an error the bytes of `out` are undefined.
  virtual absl::Status Get(std::string_view key, Parts out, Deadline deadline) = 0;
  // The same where the length is not known beforehand.
  virtual absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key,
                                                          Deadline deadline) = 0;

  // How many of the keys, from the first on, are there without a gap: the longest prefix.
  virtual absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                         Deadline deadline) = 0;
  // Which of the keys are there, whatever comes before them: an answer a key.
  virtual absl::StatusOr<std::vector<bool>> ExistsEach(std::span<const std::string_view> keys,
                                                       Deadline deadline) = 0;

  // OK also when there is no such entry.
  virtual absl::Status Erase(std::string_view key, Deadline deadline) = 0;

  // A pinned entry is not evicted and can still be replaced or erased. Pins are counted. Pin:
  // NOT_FOUND for a miss; Unpin: FAILED_PRECONDITION for an entry that is not pinned. UNIMPLEMENTED
  // where the backend has no such thing.
  virtual absl::Status Pin(std::string_view key, Deadline deadline) = 0;
  virtual absl::Status Unpin(std::string_view key, Deadline deadline) = 0;
  // False where a Pin or Unpin that failed may have been carried out. Who has to know how many pins
  // there are, as a store over this one does, leaves them alone then.
  virtual bool pins_for_sure() const { return true; }

  struct PutItem {
    std::string_view key;
    ConstParts value;
  };
  struct GetItem {
    std::string_view key;
    Parts out;
  };
  // One status an item, in order. As many single calls, unless a backend does better.
  //
  // Of one batch what comes first is dropped last: a block is of no use without those before it. Of
  // one that is more than there is room for the first are kept, and the others may be
  // RESOURCE_EXHAUSTED. Of two puts of one key the later one stays.
  virtual std::vector<absl::Status> PutBatch(std::span<const PutItem> items, Deadline deadline);
  virtual std::vector<absl::Status> GetBatch(std::span<const GetItem> items, Deadline deadline);

  // The same for pages of a pool: the value of keys[i] is the page pages[i], its items one after
  // another, layer by layer. As many keys as pages, and pages within the pool, or each status is
  // INVALID_ARGUMENT or OUT_OF_RANGE. After an error the bytes of that page are undefined. Pages on
  // a device go through host memory, 16 MiB at a time (PoolMemory::RunApart says what they wait
  // for), which is pinned and which the calling thread keeps.
  std::vector<absl::Status> PutPages(std::span<const std::string_view> keys, const KvPool& pool,
                                     std::span<const int64_t> pages, Deadline deadline);
  std::vector<absl::Status> GetPages(std::span<const std::string_view> keys, const KvPool& pool,
                                     std::span<const int64_t> pages, Deadline deadline);

  virtual Stats stats() const = 0;

 protected:
  // What PutBatch does with items of different keys: says for each how it went. Single calls,
  // unless a backend does better.
  virtual void PutDistinct(std::span<const PutItem> items, std::span<absl::Status> statuses,
                           Deadline deadline);
  // What PutPages and GetPages do once their arguments are checked: a batch of parts, unless a
  // backend can do better.
  virtual std::vector<absl::Status> DoPutPages(std::span<const std::string_view> keys,
                                               const KvPool& pool, std::span<const int64_t> pages,
                                               Deadline deadline);
  virtual std::vector<absl::Status> DoGetPages(std::span<const std::string_view> keys,
                                               const KvPool& pool, std::span<const int64_t> pages,
                                               Deadline deadline);
  // For who has got these one after another, or some at a time: uses what it got once more, the
  // first last, so that the first is dropped last. A store that did not answer to the last of them
  // is not asked.
  void UseLastToFirst(std::span<const std::string_view> keys, std::span<const absl::Status> got,
                      Deadline deadline);
};

// What the numbers are called elsewhere: between processes and in Python.
inline constexpr std::pair<const char*, int64_t KvStore::Stats::*> kStatsFields[] = {
    {"entries", &KvStore::Stats::entries},
    {"bytes", &KvStore::Stats::bytes},
    {"capacity_bytes", &KvStore::Stats::capacity_bytes},
    {"pinned", &KvStore::Stats::pinned},
    {"puts", &KvStore::Stats::puts},
    {"hits", &KvStore::Stats::hits},
    {"misses", &KvStore::Stats::misses},
    {"evictions", &KvStore::Stats::evictions},
    {"errors", &KvStore::Stats::errors},
};

// How many, from the first on, are keys that have not come before among them.
size_t CountDistinct(std::span<const std::string_view> keys);
std::vector<std::string_view> KeysOf(std::span<const KvStore::PutItem> items);

// INVALID_ARGUMENT unless the key, or the value's length, is within bounds.
absl::Status CheckKey(std::string_view key);
absl::Status CheckValueBytes(int64_t bytes, int64_t max_value_bytes);

int64_t BytesOf(KvStore::ConstParts parts);
int64_t BytesOf(KvStore::Parts parts);

}  // namespace kvferry
