#pragma once

// Redis and RocksDB as a program without kvferry uses them: what our stores are measured beside.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvferry::bench {

// For one thread.
class PlainStore {
 public:
  virtual ~PlainStore() = default;
  virtual absl::Status Put(const std::string& key, std::span<const std::byte> value) = 0;
  // An error too when the value is not as long as `out`.
  virtual absl::Status Get(const std::string& key, std::span<std::byte> out) = 0;
};

// SET and GET by hiredis, one command at a time, of a server on this machine.
absl::StatusOr<std::unique_ptr<PlainStore>> PlainRedis(int64_t port);

// A database in a new folder, with the settings for large values that our store has: blob files and
// no compression.
absl::StatusOr<std::unique_ptr<PlainStore>> PlainRocksDb(const std::string& path);

}  // namespace kvferry::bench
