#pragma once

#include <atomic>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status.h"
#include "connector/store/kv_store.h"
#include "tests/support/wait_for.h"
#include "transport/command_queue.h"

namespace kvferry {

// A store in a std::map that can be told to be down, to hang, or to be full. Has no pins.
class FakeStore : public KvStore {
 public:
  explicit FakeStore(int64_t max_value_bytes) : max_value_bytes_(max_value_bytes) {}

  std::atomic<bool> down = false;
  std::atomic<bool> hangs = false;  // Each call, until its deadline.
  std::atomic<bool> full = false;
  std::atomic<int> num_calls = 0;
  std::atomic<int64_t> num_keys_asked = 0;  // By Exists.

  std::string_view name() const override { return "fake"; }
  int64_t max_value_bytes() const override { return max_value_bytes_; }

  absl::Status Put(std::string_view key, ConstParts value, Deadline deadline) override {
    KVFERRY_RETURN_IF_ERROR(CheckKey(key));
    KVFERRY_RETURN_IF_ERROR(CheckValueBytes(BytesOf(value), max_value_bytes_));
    KVFERRY_RETURN_IF_ERROR(CheckUp(deadline));
    if (full) return absl::ResourceExhaustedError("the fake is full");
    MutexLock lock(&mutex_);
    std::vector<std::byte>& bytes = entries_[std::string(key)];
    bytes.clear();
    for (const auto& part : value) bytes.insert(bytes.end(), part.begin(), part.end());
    ++stats_.puts;
    return absl::OkStatus();
  }

  absl::Status Get(std::string_view key, Parts out, Deadline deadline) override {
    KVFERRY_ASSIGN_OR_RETURN(const std::vector<std::byte> value, GetBytes(key, deadline));
    if (std::ssize(value) != BytesOf(out)) {
      return absl::FailedPreconditionError(
          absl::StrCat("fake: the value has ", value.size(), " bytes, not ", BytesOf(out)));
    }
    auto from = value.begin();
    for (const auto& part : out) {
      std::copy_n(from, part.size(), part.begin());
      from += std::ssize(part);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key,
                                                  Deadline deadline) override {
    KVFERRY_RETURN_IF_ERROR(CheckKey(key));
    KVFERRY_RETURN_IF_ERROR(CheckUp(deadline));
    MutexLock lock(&mutex_);
    const auto it = entries_.find(key);
    ++(it == entries_.end() ? stats_.misses : stats_.hits);
    if (it == entries_.end()) return absl::NotFoundError("fake: no such entry");
    return it->second;
  }

  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override {
    for (const std::string_view key : keys) KVFERRY_RETURN_IF_ERROR(CheckKey(key));
    num_keys_asked += std::ssize(keys);
    KVFERRY_RETURN_IF_ERROR(CheckUp(deadline));
    MutexLock lock(&mutex_);
    int64_t there = 0;
    for (const std::string_view key : keys) {
      if (!entries_.contains(key)) break;
      ++there;
    }
    return there;
  }

  absl::StatusOr<std::vector<bool>> ExistsEach(std::span<const std::string_view> keys,
                                               Deadline deadline) override {
    for (const std::string_view key : keys) KVFERRY_RETURN_IF_ERROR(CheckKey(key));
    num_keys_asked += std::ssize(keys);
    KVFERRY_RETURN_IF_ERROR(CheckUp(deadline));
    MutexLock lock(&mutex_);
    std::vector<bool> there;
    for (const std::string_view key : keys) there.push_back(entries_.contains(key));
    return there;
  }

  absl::Status Erase(std::string_view key, Deadline deadline) override {
    KVFERRY_RETURN_IF_ERROR(CheckKey(key));
    KVFERRY_RETURN_IF_ERROR(CheckUp(deadline));
    MutexLock lock(&mutex_);
    if (const auto it = entries_.find(key); it != entries_.end()) entries_.erase(it);
    return absl::OkStatus();
  }

  absl::Status Pin(std::string_view, Deadline) override { return absl::UnimplementedError("fake"); }
  absl::Status Unpin(std::string_view, Deadline) override {
    return absl::UnimplementedError("fake");
  }

  Stats stats() const override {
    MutexLock lock(&mutex_);
    Stats stats = stats_;
    stats.entries = std::ssize(entries_);
    return stats;
  }

 private:
  absl::Status CheckUp(Deadline deadline) {
    ++num_calls;
    if (hangs) {
      MutexLock lock(&mutex_);
      while (Clock::now() < deadline) never_.WaitUntil(&mutex_, deadline);
      return absl::DeadlineExceededError("the fake hangs");
    }
    return down ? absl::UnavailableError("the fake is down") : absl::OkStatus();
  }

  const int64_t max_value_bytes_;
  mutable Mutex mutex_;
  CondVar never_;  // It is notified.
  std::map<std::string, std::vector<std::byte>, std::less<>> entries_ ABSL_GUARDED_BY(mutex_);
  Stats stats_ ABSL_GUARDED_BY(mutex_);
};

// Finds no memory, whatever it is asked for, while that is scarce.
class ScarceStore : public FakeStore {
 public:
  using FakeStore::FakeStore;
  std::atomic<bool> scarce = false;

  absl::Status Put(std::string_view key, ConstParts value, Deadline deadline) override {
    Check();
    return FakeStore::Put(key, value, deadline);
  }
  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key,
                                                  Deadline deadline) override {
    Check();
    return FakeStore::GetBytes(key, deadline);
  }
  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override {
    Check();
    return FakeStore::Exists(keys, deadline);
  }

 private:
  void Check() const {
    if (scarce) throw std::bad_alloc();
  }
};

// Each get waits, with what it has read, until it may go on.
class GatedStore : public FakeStore {
 public:
  using FakeStore::FakeStore;

  std::atomic<int> num_gets = 0;
  Latch asked, go_on;

  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key,
                                                  Deadline deadline) override {
    ++num_gets;
    absl::StatusOr<std::vector<std::byte>> value = FakeStore::GetBytes(key, deadline);
    asked.Open();
    go_on.Wait(Soon());
    return value;
  }
};

}  // namespace kvferry
