#pragma once

// Stores on Redis, and what is in them.

#include <memory>
#include <string_view>

#include "connector/store/redis_store.h"
#include "tests/connector/store_values.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {

inline std::unique_ptr<RedisStore> MakeStore(const RedisStore::Options& options) {
  return Must(RedisStore::Create(options));
}

// Past any store.
inline absl::StatusOr<std::unique_ptr<RedisConnection>> Connect(const RedisServer& server) {
  HostLookup lookup(server.host);
  return RedisConnection::Connect(server, lookup, Soon());
}

inline absl::StatusOr<Bytes> Get(KvStore& store, std::string_view key, Deadline deadline = Soon()) {
  return store.GetBytes(key, deadline);
}

}  // namespace kvferry
