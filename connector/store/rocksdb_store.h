#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "connector/store/kv_store.h"

namespace kvferry {

// A store in files, by RocksDB: survives restarts and crashes. A value that is there after a crash
// is one that was put, whole; one that was damaged on the disk is a miss (value_header.h), dropped
// and counted in `errors`.
//
// What was written first goes first when the store is full, and of what was written together the
// last; reading does not make an entry younger. What of a batch has no room beside what comes
// before it there is RESOURCE_EXHAUSTED. `bytes` and the capacity count keys, values and 24 bytes
// an entry. RocksDB's files take more for a while, as it cleans up behind: about half as much
// again, and 400 MiB for a large store.
//
// Keys are kept in memory as well, about 210 bytes each where they have 32, and read at Open().
// Pins are kept in memory only: after a restart nothing is pinned. Puts take turns, and wait for
// theirs until their deadline; what the disk itself takes, a read or a write under way, is not
// broken off.
//
// When the disk is full or fails, puts and erasures fail (RESOURCE_EXHAUSTED, UNAVAILABLE, with
// RocksDB's words) and change nothing, gets go on, and the next put after there is room again
// works. Room has to come from elsewhere: RocksDB needs some to remove anything. After errors that
// RocksDB calls fatal (no file descriptor left, a failing disk) they fail until the store is opened
// anew, and say so.
class RocksDbStore : public KvStore {
 public:
  struct Options {
    std::string path;            // A folder of its own; made when it is not there.
    int64_t capacity_bytes = 0;  // 0: no limit. What is over it at Open() is dropped.
    int64_t max_value_bytes = 64 << 20;
    bool sync = false;  // A put is on the disk when it returns: survives the machine's crash too.
  };

  static constexpr int64_t kMaxValueBytes = int64_t{1} << 30;
  // Of a batch, values of so many bytes in all are written in one go, and read in one.
  static constexpr int64_t kTogetherBytes = 2 << 20;

  // INVALID_ARGUMENT for an empty path, a negative capacity, or max_value_bytes outside
  // [1, kMaxValueBytes]; FAILED_PRECONDITION for a path that is no folder, is open already, here or
  // in another process, or holds another database; PERMISSION_DENIED when it may not be written;
  // RESOURCE_EXHAUSTED or UNAVAILABLE when the disk is full or fails; RESOURCE_EXHAUSTED when the
  // system does not give RocksDB its three threads; DATA_LOSS when RocksDB finds its files damaged.
  static absl::StatusOr<std::unique_ptr<RocksDbStore>> Open(const Options& options);
  ~RocksDbStore() override;

  std::string_view name() const override { return "rocksdb"; }
  int64_t max_value_bytes() const override;
  absl::Status Put(std::string_view key, ConstParts value, Deadline deadline) override;
  absl::Status Get(std::string_view key, Parts out, Deadline deadline) override;
  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key, Deadline deadline) override;
  // These answer from memory: a value that is damaged counts until somebody gets it.
  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override;
  absl::StatusOr<std::vector<bool>> ExistsEach(std::span<const std::string_view> keys,
                                               Deadline deadline) override;
  absl::Status Erase(std::string_view key, Deadline deadline) override;
  absl::Status Pin(std::string_view key, Deadline deadline) override;
  absl::Status Unpin(std::string_view key, Deadline deadline) override;
  std::vector<absl::Status> GetBatch(std::span<const GetItem> items, Deadline deadline) override;
  Stats stats() const override;

 private:
  class Impl;
  explicit RocksDbStore(std::unique_ptr<Impl> impl);
  void PutDistinct(std::span<const PutItem> items, std::span<absl::Status> statuses,
                   Deadline deadline) override;

  const std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
