#include "connector/store/rocksdb_resumer.h"

#include <rocksdb/convenience.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "base/thread.h"

namespace kvferry {
namespace {

constexpr auto kAskAgain = std::chrono::seconds(5);
// It writes 64 MiB or a few times that. One that takes longer does not end, or the disk hangs.
constexpr auto kLongest = std::chrono::seconds(30);
constexpr int64_t kMoreRoom = 1 << 20;  // What others write and remove beside it comes and goes.

absl::Status With(const absl::Status& status, absl::string_view more) {
  return {status.code(), absl::StrCat(status.message(), "; ", more)};
}

absl::Status TakesNoMore(const absl::Status& status) {
  return With(status, "RocksDB takes no more writes until the store is opened anew");
}

}  // namespace

std::optional<int64_t> DiskRoomBytes(const std::string& path) {
  struct statvfs disk {};
  if (statvfs(path.c_str(), &disk) != 0) return std::nullopt;
  return static_cast<int64_t>(disk.f_bavail * disk.f_frsize);
}

RocksDbResumer::~RocksDbResumer() {
  if (IsRunning()) rocksdb::CancelAllBackgroundWork(db_, /*wait=*/false);  // Which wakes it.
  if (thread_.joinable()) thread_.join();
}

bool RocksDbResumer::IsRunning() {
  MutexLock lock(&mutex_);
  return running_;
}

absl::Status RocksDbResumer::Resume(const rocksdb::Status& error, int64_t bytes,
                                    const absl::Status& status, Deadline deadline) {
  if (!IsRunning()) {
    if (!MayGoOn(error, bytes)) return status;
    if (const absl::Status started = Start(); !started.ok()) return With(status, started.message());
  }
  if (Clock::now() - began_ > kLongest) return TakesNoMore(status);
  MutexLock lock(&mutex_);
  while (running_ && Clock::now() < std::min(deadline, began_ + kLongest)) {
    ended_.WaitUntil(&mutex_, std::min(deadline, began_ + kLongest));
  }
  if (running_) return With(status, "RocksDB has not got over it yet");
  if (said_->ok()) {
    ask_at_ = {};
    return absl::OkStatus();
  }
  // After some errors (no file descriptor left, a failing disk; not a full one) it never does.
  return said_->severity() < rocksdb::Status::kFatalError ? status : TakesNoMore(status);
}

bool RocksDbResumer::MayGoOn(const rocksdb::Status& error, int64_t bytes) {
  if (!error.IsNoSpace()) return true;
  const Deadline now = Clock::now();
  const int64_t room = DiskRoomBytes(path_).value_or(0);
  if (now < ask_at_ && room < ask_with_bytes_) return false;
  ask_at_ = now + kAskAgain;
  ask_with_bytes_ = room + std::max(bytes, kMoreRoom);
  return true;
}

absl::Status RocksDbResumer::Start() {
  if (thread_.joinable()) thread_.join();  // It has ended.
  began_ = Clock::now();
  {
    MutexLock lock(&mutex_);
    running_ = true;
    said_.reset();
  }
  absl::Cleanup not_started = [this] {  // Also where there is no memory for a thread.
    MutexLock lock(&mutex_);
    running_ = false;
  };
  KVFERRY_ASSIGN_OR_RETURN(thread_, StartThread("rocksdb-resume", [this] { Run(); }));
  std::move(not_started).Cancel();
  return absl::OkStatus();
}

void RocksDbResumer::Run() {
  rocksdb::Status said;
  try {
    said = db_->Resume();
  } catch (const std::bad_alloc&) {  // Which would end the process here.
    said = rocksdb::Status::MemoryLimit();
  }
  MutexLock lock(&mutex_);
  said_ = std::move(said);
  running_ = false;
  ended_.NotifyAll();
}

}  // namespace kvferry
