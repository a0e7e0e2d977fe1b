#pragma once

#include <rocksdb/db.h>

#include <cstdint>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace kvferry {

// Free on the disk of that folder, for whoever is not root. Nothing where the system does not say.
std::optional<int64_t> DiskRoomBytes(const std::string& path);

// Tells a database to go on after an error. RocksDB (7.8) knows no deadline for that: it writes
// what it has in memory, and waits for ever when it has lost sight of a flush, as when one that had
// failed before ends meanwhile. So it waits in a thread of its own, and where the disk is full it
// is asked again only when there is more room, or after a while: each time it would write what
// fits, and fail.
class RocksDbResumer {
 public:
  // `path`: the folder of `db`, which has to outlive this.
  RocksDbResumer(rocksdb::DB* db, std::string path) : db_(db), path_(std::move(path)) {}
  RocksDbResumer(const RocksDbResumer&) = delete;
  RocksDbResumer& operator=(const RocksDbResumer&) = delete;
  // Ends what still waits; no other call of the database may be under way then.
  ~RocksDbResumer();

  // After a write of `bytes` that has ended with `error`. OK when the database takes writes again;
  // else `status`, which is that of the error, with what is to be known of it. By one thread at a
  // time.
  absl::Status Resume(const rocksdb::Status& error, int64_t bytes, const absl::Status& status,
                      Deadline deadline);

 private:
  // False while the disk is as full as it was when RocksDB was last asked.
  bool MayGoOn(const rocksdb::Status& error, int64_t bytes);
  bool IsRunning();
  absl::Status Start();
  void Run();

  rocksdb::DB* const db_;
  const std::string path_;
  // Used by the thread that calls.
  std::thread thread_;
  Deadline began_{};
  Deadline ask_at_{};
  int64_t ask_with_bytes_ = 0;  // Of room, before ask_at_.

  Mutex mutex_;
  CondVar ended_;
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<rocksdb::Status> said_ ABSL_GUARDED_BY(mutex_);  // By the last one, if it ended.
};

}  // namespace kvferry
