#pragma once

// What RocksDbStore keeps on the disk, and how it is opened.

#include <rocksdb/db.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvferry {

// A database and its two column families, closed in the right order. Both are keyed by the number
// of a put (RecordKey), so that order is age:
//
//   values   "default"            header and value (value_header.h)
//   entries  "kvferry entries 1"  8 bytes: what the entry counts for in bytes, little-endian; then
//                                 the key
//
// One batch writes both and removes what it replaces or pushes out, so that no crash can part them.
// No two puts write the same record: they cannot get in each other's way.
struct RocksDbDatabase {
  std::unique_ptr<rocksdb::DB> db;
  rocksdb::ColumnFamilyHandle* values = nullptr;
  rocksdb::ColumnFamilyHandle* entries = nullptr;

  RocksDbDatabase() = default;
  RocksDbDatabase(RocksDbDatabase&& other) noexcept
      : db(std::move(other.db)), values(other.values), entries(other.entries) {}
  RocksDbDatabase& operator=(RocksDbDatabase&&) = delete;
  ~RocksDbDatabase();
};

// Makes the folder and the database where they are missing; `capacity_bytes` (0: none) says how
// large files are worth it. Errors as of RocksDbStore::Open().
absl::StatusOr<RocksDbDatabase> OpenRocksDb(const std::string& path, int64_t capacity_bytes);

// "rocksdb store: " and what it was doing, with RocksDB's words.
absl::Status FromRocksDb(std::string_view doing, const rocksdb::Status& status);

// 8 bytes, big-endian.
std::string RecordKey(uint64_t number);

// A record of the entries' family.
struct EntryRecord {
  uint64_t number = 0;
  int64_t bytes = 0;
  std::string key;
};
std::string EntryRecordText(std::string_view key, int64_t bytes);
// Nothing when it is none of ours.
std::optional<EntryRecord> ParseEntryRecord(const rocksdb::Slice& record_key,
                                            const rocksdb::Slice& text);

}  // namespace kvferry
