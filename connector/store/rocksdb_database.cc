#include "connector/store/rocksdb_database.h"

#include <rocksdb/env.h>
#include <rocksdb/listener.h>
#include <rocksdb/options.h>

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/log.h"
#include "base/status.h"
#include "base/thread.h"
#include "connector/store/kv_store.h"

namespace kvferry {
namespace {

constexpr char kEntriesFamily[] = "kvferry entries 1";
// Those that RocksDB starts in a process and keeps, one each: for flushes, for compactions, and a
// timer. All stores of the process share them.
constexpr int kRocksDbThreads = 3;
constexpr size_t kNumberBytes = 8;
constexpr size_t kBytesBytes = 8;

uint64_t NumberOf(const rocksdb::Slice& record_key) {
  uint64_t number = 0;
  for (size_t i = 0; i < kNumberBytes; ++i) {
    number = number << 8 | static_cast<unsigned char>(record_key[i]);
  }
  return number;
}

// As FromRocksDb(), for Open(), which fails for reasons that a caller can do something about.
absl::Status FromOpening(const std::string& path, const rocksdb::Status& status) {
  const std::string text = status.ToString();
  if (absl::StrContains(text, "lock file") || absl::StrContains(text, "lock hold")) {
    return absl::FailedPreconditionError(absl::StrCat("rocksdb store: path '", path,
                                                      "' is open already, in this process or in "
                                                      "another: ",
                                                      text));
  }
  if (absl::StrContains(text, "Permission denied") ||
      absl::StrContains(text, "Read-only file system")) {
    return absl::PermissionDeniedError(
        absl::StrCat("rocksdb store: path '", path, "' may not be written: ", text));
  }
  return FromRocksDb(absl::StrCat("opening path '", path, "'"), status);
}

absl::Status MakeFolder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error && std::filesystem::is_directory(path, error)) return absl::OkStatus();
  const std::string text = absl::StrCat("rocksdb store: path '", path, "' ");
  if (error == std::errc::permission_denied || error == std::errc::read_only_file_system) {
    return absl::PermissionDeniedError(absl::StrCat(text, "cannot be made: ", error.message()));
  }
  if (error == std::errc::no_space_on_device) {
    return absl::ResourceExhaustedError(absl::StrCat(text, "cannot be made: ", error.message()));
  }
  return absl::FailedPreconditionError(
      absl::StrCat(text, "is no folder and cannot be made one: ", error.message()));
}

// RocksDB's own log is a file beside its others, and once the disk was full it aborts the process
// when it writes to that again (7.8 with assertions, as in Debian). It also tells nobody.
class RocksDbLog : public rocksdb::Logger {
 public:
  RocksDbLog() : rocksdb::Logger(rocksdb::WARN_LEVEL) {}

  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list arguments) override {
    char line[1000];
    (void)std::vsnprintf(line, sizeof(line), format, arguments);
    Log().info("rocksdb: {}", line);
  }
};

// When the disk is full RocksDB would wait for more room than a small disk ever has, and refuse to
// be resumed meanwhile. The next write resumes it.
class NoRecovery : public rocksdb::EventListener {
 public:
  void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason, rocksdb::Status,
                            bool* auto_recovery) override {
    *auto_recovery = false;
  }
};

rocksdb::Options RocksDbOptions(int64_t capacity_bytes) {
  const int64_t share =
      capacity_bytes == 0 ? std::numeric_limits<int64_t>::max() : capacity_bytes / 16;
  rocksdb::Options made;
  made.create_if_missing = true;
  made.create_missing_column_families = true;
  made.write_buffer_size = std::clamp<int64_t>(share, 1 << 20, 64 << 20);
  made.max_total_wal_size = 4 * made.write_buffer_size;  // Else the small family keeps old logs.
  made.compression = rocksdb::kNoCompression;            // KV hardly shrinks.
  made.enable_blob_files = true;
  made.min_blob_size = 4096;
  made.blob_file_size = made.write_buffer_size;  // So that one is soon all garbage, and goes.
  made.enable_blob_garbage_collection = true;
  made.blob_garbage_collection_force_threshold = 0.5;
  made.max_open_files = 512;  // The usual limit of a process is 1024.
  // A thread that the system refuses among those that open files ends the process.
  made.max_file_opening_threads = 1;
  made.stats_dump_period_sec = 0;  // Nobody reads them.
  made.stats_persist_period_sec = 0;
  made.info_log = std::make_shared<RocksDbLog>();
  made.listeners.push_back(std::make_shared<NoRecovery>());
  return made;
}

// A database of ours whose making was cut short has nothing in it yet.
absl::StatusOr<bool> IsEmpty(const std::string& path, const rocksdb::Options& options) {
  rocksdb::DB* opened = nullptr;
  const rocksdb::Status status = rocksdb::DB::OpenForReadOnly(options, path, &opened);
  if (!status.ok()) return FromOpening(path, status);
  const std::unique_ptr<rocksdb::DB> db(opened);
  const std::unique_ptr<rocksdb::Iterator> it(db->NewIterator(rocksdb::ReadOptions()));
  it->SeekToFirst();
  return !it->Valid();
}

// RocksDB would add our family to anybody's database.
absl::Status CheckOurs(const std::string& path, const rocksdb::Options& options) {
  std::error_code error;
  if (!std::filesystem::exists(path + "/CURRENT", error)) return absl::OkStatus();
  std::vector<std::string> families;
  const rocksdb::Status listed = rocksdb::DB::ListColumnFamilies(options, path, &families);
  if (!listed.ok()) return FromOpening(path, listed);
  if (std::ranges::find(families, kEntriesFamily) != families.end()) return absl::OkStatus();
  KVFERRY_ASSIGN_OR_RETURN(const bool empty, IsEmpty(path, options));
  if (empty && families.size() == 1) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("rocksdb store: path '", path, "' holds another RocksDB database"));
}

absl::Status NoThreads(const std::string& path, absl::string_view why) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "rocksdb store: path '", path, "' is not opened: RocksDB needs ", kRocksDbThreads,
      " threads: ", why, " (ulimit -u, or the container's limit of pids)"));
}

absl::StatusOr<RocksDbDatabase> OpenFamilies(const std::string& path,
                                             const rocksdb::Options& options) {
  KVFERRY_RETURN_IF_ERROR(CheckOurs(path, options));
  const std::vector<rocksdb::ColumnFamilyDescriptor> families = {
      {rocksdb::kDefaultColumnFamilyName, options}, {kEntriesFamily, options}};
  rocksdb::DB* db = nullptr;
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  const rocksdb::Status opened = rocksdb::DB::Open(options, path, families, &handles, &db);
  if (!opened.ok()) return FromOpening(path, opened);
  RocksDbDatabase database;
  database.db.reset(db);
  database.values = handles[0];
  database.entries = handles[1];
  return database;
}

}  // namespace

RocksDbDatabase::~RocksDbDatabase() {
  if (db == nullptr) return;
  for (rocksdb::ColumnFamilyHandle* const family : {values, entries}) {
    (void)db->DestroyColumnFamilyHandle(family);
  }
  (void)db->Close();
}

absl::Status FromRocksDb(std::string_view doing, const rocksdb::Status& status) {
  const std::string text =
      absl::StrCat("rocksdb store: ", std::string(doing), ": ", status.ToString());
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(text);
  if (status.IsCorruption()) return absl::DataLossError(text);
  if (status.IsIOError() || status.IsBusy()) return absl::UnavailableError(text);
  return absl::InternalError(text);
}

absl::StatusOr<RocksDbDatabase> OpenRocksDb(const std::string& path, int64_t capacity_bytes) {
  KVFERRY_RETURN_IF_ERROR(MakeFolder(path));
  // First, while nothing is open: where RocksDB is refused a thread half-way, the path stays locked
  // until the process ends.
  const absl::Status threads = CheckThreadsStart(kRocksDbThreads);
  if (!threads.ok()) return NoThreads(path, threads.message());
  try {  // Others may have taken the threads since.
    return OpenFamilies(path, RocksDbOptions(capacity_bytes));
  } catch (const std::system_error& error) {
    return NoThreads(path, error.what());
  }
}

std::string RecordKey(uint64_t number) {
  std::string key(kNumberBytes, '\0');
  for (size_t i = 0; i < kNumberBytes; ++i) key[i] = static_cast<char>(number >> (56 - 8 * i));
  return key;
}

static_assert(std::endian::native == std::endian::little, "numbers are copied as they lie");

std::string EntryRecordText(std::string_view key, int64_t bytes) {
  std::string text(kBytesBytes, '\0');
  std::memcpy(text.data(), &bytes, sizeof(bytes));
  return text.append(key);
}

std::optional<EntryRecord> ParseEntryRecord(const rocksdb::Slice& record_key,
                                            const rocksdb::Slice& text) {
  const auto max_text_bytes = kBytesBytes + static_cast<size_t>(KvStore::kMaxKeyBytes);
  if (record_key.size() != kNumberBytes) return std::nullopt;
  if (text.size() <= kBytesBytes || text.size() > max_text_bytes) return std::nullopt;
  EntryRecord record;
  record.number = NumberOf(record_key);
  std::memcpy(&record.bytes, text.data(), sizeof(record.bytes));
  record.key.assign(text.data() + kBytesBytes, text.size() - kBytesBytes);
  return record;
}

}  // namespace kvferry
