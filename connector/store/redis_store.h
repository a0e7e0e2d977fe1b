#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "connector/store/host_lookup.h"
#include "connector/store/kv_store.h"
#include "connector/store/redis_connection.h"

namespace kvferry {

// Values in a Redis server (or one that speaks as it does): for small deployments, and wherever
// there is one already. Room, eviction and durability are the server's: give it maxmemory and an
// LRU policy of the "allkeys" kind. Not for a Redis Cluster.
//
// A value is one string under key_prefix + key: value_header.h, then the bytes. What lies there
// and is not exactly that, because it was cut short, altered, or written by somebody else, is a
// miss and counts among the errors; it stays until it is replaced or erased, and Exists and
// ExistsEach, which see no bytes, still count it. A value that is longer than max_value_bytes, as
// another process may have put one, is FAILED_PRECONDITION.
//
// Batches go out together (pipelined; kPipelined commands or 1 MiB of answers at a time) and values
// go out from where they lie. A get takes them from the socket into a buffer, from there into
// hiredis' reply and from there to its place. Memory: connections x twice the largest value that
// is asked for, while it is, and 256 KiB a connection for good.
//
// Nothing is connected before the first call. A connection on which a deadline passed or that broke
// is closed, and a new one made by a later call: a server that is back is used again without more
// ado. While it is away every call fails with UNAVAILABLE and its "host:port", after
// connect_timeout_ms at most. A host that is a name is looked up for each connection.
// PERMISSION_DENIED: wrong or missing password, or a user without the right, or a password_file
// that is gone.
//
// A put or an erasure that failed with UNAVAILABLE or DEADLINE_EXCEEDED may have been carried out,
// or may be while nothing else is written: what was sent lies in the server's kernel, also when its
// connection is closed, and is read when a server that stood still goes on. It is not carried out
// after a later put or erasure of this store that succeeded: that has the server end the connection
// first (CLIENT KILL), by the id that it is asked for before a connection is first written to
// (CLIENT ID, and INFO for the run of the server that the id is one of). Where the server or the
// user's rights refuse one of these it may come after a later one, and the log says so once.
class RedisStore : public KvStore {
 public:
  // Redis takes no string above 512 MiB.
  static constexpr int64_t kMaxValueBytes = (int64_t{512} << 20) - 64;
  static constexpr int64_t kPipelined = 64;

  struct Options {
    std::string host = "127.0.0.1";
    int64_t port = 6379;
    std::string username = {};  // Needs a password.
    std::string password = {};
    // Holds the password, without or with the end of its line. Read for each connection, so that a
    // password that is changed there is used from then on. Not both.
    std::string password_file = {};
    int64_t database = 0;
    std::string key_prefix = "kvferry:";
    int64_t ttl_ms = 0;  // From the put on; 0: for ever.
    int64_t connect_timeout_ms = 1000;
    int64_t max_value_bytes = int64_t{64} << 20;
    int64_t connections = 2;  // At most so many calls at a time; others wait.
  };

  // INVALID_ARGUMENT names the option.
  static absl::StatusOr<std::unique_ptr<RedisStore>> Create(const Options& options);
  // No call may be under way.
  ~RedisStore() override = default;

  std::string_view name() const override { return "redis"; }
  int64_t max_value_bytes() const override { return options_.max_value_bytes; }

  absl::Status Put(std::string_view key, ConstParts value, Deadline deadline) override;
  absl::Status Get(std::string_view key, Parts out, Deadline deadline) override;
  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key, Deadline deadline) override;
  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override;
  absl::StatusOr<std::vector<bool>> ExistsEach(std::span<const std::string_view> keys,
                                               Deadline deadline) override;
  absl::Status Erase(std::string_view key, Deadline deadline) override;
  // UNIMPLEMENTED: Redis evicts by one rule for all keys.
  absl::Status Pin(std::string_view key, Deadline deadline) override;
  absl::Status Unpin(std::string_view key, Deadline deadline) override;
  std::vector<absl::Status> PutBatch(std::span<const PutItem> items, Deadline deadline) override;
  std::vector<absl::Status> GetBatch(std::span<const GetItem> items, Deadline deadline) override;

  // Of this object, not of the server.
  Stats stats() const override;

 private:
  explicit RedisStore(const Options& options);

  // What goes out together.
  struct Round {
    RedisCommands commands;
    int64_t reply_bytes = 0;
  };
  // Adds the command of an item, or says why there is none.
  using Ask = absl::FunctionRef<absl::Status(int64_t item, Round& round)>;
  // Makes of a reply, which is of hiredis' type `kind`, the status of an item.
  using Answer =
      absl::FunctionRef<absl::Status(int64_t item, absl::string_view text, int64_t number)>;
  enum class Access { kRead, kWrite };
  std::vector<absl::Status> Which(std::span<const std::string_view> keys, std::vector<bool>* there,
                                  Deadline deadline);
  std::vector<absl::Status> Pipeline(Access access, int64_t num_items, Deadline deadline, int kind,
                                     Ask ask, Answer answer);
  absl::Status CheckKind(const redisReply& reply, int kind);
  absl::Status OneRound(Access access, int64_t& next, Deadline deadline, int kind, Ask ask,
                        Answer answer, std::span<absl::Status> statuses);
  absl::Status Exchange(Access access, const RedisCommands& commands, Deadline deadline,
                        RedisConnection::Answer answer);
  absl::Status Write(RedisConnection& connection, const RedisCommands& commands, Deadline deadline,
                     RedisConnection::Answer answer);
  // Nothing of the writes that were broken off is carried out after this.
  absl::Status EndBrokenOff(RedisConnection& connection, Deadline deadline);
  void SayRefused(absl::string_view what);
  absl::StatusOr<std::unique_ptr<RedisConnection>> Acquire(Deadline deadline);
  std::unique_ptr<RedisConnection> TakeIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Release(std::unique_ptr<RedisConnection> connection);

  std::string FullKey(std::string_view key) const;
  void AskForValue(std::string_view key, int64_t value_bytes, Round& round) const;
  absl::StatusOr<std::span<const std::byte>> CheckReply(std::string_view key,
                                                        absl::string_view text, int64_t want_bytes);
  absl::Status Miss();
  absl::Status Damaged(absl::string_view what);
  absl::Status Count(absl::Status error);

  const Options options_;
  const RedisServer server_;
  HostLookup lookup_;

  std::atomic<int64_t> puts_ = 0;
  std::atomic<int64_t> hits_ = 0;
  std::atomic<int64_t> misses_ = 0;
  std::atomic<int64_t> errors_ = 0;

  Mutex mutex_;
  CondVar released_;
  int64_t in_use_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::unique_ptr<RedisConnection>> idle_ ABSL_GUARDED_BY(mutex_);
  // Connections on which a write was broken off, until the server has ended them. At most
  // options_.connections: while there are any nothing more is written.
  std::vector<RedisClientId> broken_off_ ABSL_GUARDED_BY(mutex_);
  bool said_refused_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvferry
