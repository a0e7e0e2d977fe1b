#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "connector/store/host_lookup.h"
#include "connector/store/kv_store.h"

struct redisContext;
struct redisReply;

namespace kvferry {

struct RedisServer {
  std::string host = "127.0.0.1";
  int64_t port = 6379;
  std::string username = {};  // Empty: the default user.
  std::string password = {};  // This and the next one empty: does not log in.
  std::string password_file = {};
  int64_t database = 0;
  int64_t connect_timeout_ms = 1000;
  int64_t max_reply_bytes = 0;

  std::string address() const;  // "host:port", for messages.
};

// INVALID_ARGUMENT: it cannot be read, or holds none.
absl::StatusOr<std::string> ReadRedisPassword(const std::string& password_file);

// Commands to be sent together. Words are copied; a value is not, and stays the caller's until the
// exchange is over.
class RedisCommands {
 public:
  void Add(std::initializer_list<absl::string_view> words);
  // With the header and the value, one after the other, as the last argument.
  void Add(std::initializer_list<absl::string_view> words, std::span<const std::byte> header,
           KvStore::ConstParts value);

  int64_t size() const { return size_; }
  std::span<const std::span<const std::byte>> pieces() const { return pieces_; }

 private:
  std::string& Begin(std::initializer_list<absl::string_view> words, size_t num_words);
  void AddPiece(absl::string_view text);

  int64_t size_ = 0;
  std::deque<std::string> texts_;  // That pieces are of: it moves none when it grows.
  std::vector<std::span<const std::byte>> pieces_;
};

// What a server calls a connection. It counts from 1 again whenever it is started.
struct RedisClientId {
  std::string run;  // Of the server, another one each time that it is started.
  int64_t number = 0;

  bool operator==(const RedisClientId&) const = default;
};

// One connection to a Redis server, logged in. hiredis reads the replies; waiting and sending are
// ours, so that a deadline bounds a whole exchange and not each read of it, and values go out from
// where they lie. For one thread at a time.
class RedisConnection {
 public:
  // UNAVAILABLE when the server does not accept, or does not answer to the log-in, within
  // connect_timeout_ms or by the deadline, or its host, `lookup`'s too, is not found by then;
  // PERMISSION_DENIED when it refuses the log-in.
  static absl::StatusOr<std::unique_ptr<RedisConnection>> Connect(const RedisServer& server,
                                                                  HostLookup& lookup,
                                                                  Deadline deadline);
  ~RedisConnection();
  RedisConnection(const RedisConnection&) = delete;
  RedisConnection& operator=(const RedisConnection&) = delete;

  // Hands the reply to each command, in order, to `answer`; it lives as long as that call.
  // UNAVAILABLE or DEADLINE_EXCEEDED otherwise: commands without a reply may have been carried out,
  // and the connection is of no more use, because a late reply would answer another command.
  using Answer = absl::FunctionRef<void(int64_t command, const redisReply& reply)>;
  absl::Status Exchange(const RedisCommands& commands, Deadline deadline, Answer answer);
  // Whether the server may have got any of the last exchange's commands.
  bool has_sent() const { return has_sent_; }

  // Asks the server what it calls this connection, once; errors as of Exchange. OK also where it,
  // or the user's rights, refuse that: then there is no id(), and id_refusal() is what was said.
  absl::Status LearnId(Deadline deadline);
  const std::optional<RedisClientId>& id() const { return id_; }
  const std::string& id_refusal() const { return id_refusal_; }

  // Whether the next exchange can begin: nothing has gone wrong, and the server has neither closed
  // the connection nor said what it was not asked.
  bool usable() const;

 private:
  struct Unsent {
    size_t piece = 0;
    size_t offset = 0;
  };

  explicit RedisConnection(const RedisServer& server);

  absl::Status Open(HostLookup& lookup, Deadline deadline);
  absl::StatusOr<std::string> Password() const;
  absl::Status LogIn(Deadline deadline);
  absl::StatusOr<short> Await(short events, Deadline deadline) const;
  absl::Status Send(std::span<const std::span<const std::byte>> pieces, Unsent& unsent);
  absl::Status Receive();
  absl::Status HandOut(int64_t num_commands, int64_t& answered, Answer answer);
  absl::Status Broken(absl::string_view what) const;

  const RedisServer server_;
  std::unique_ptr<redisContext, void (*)(redisContext*)> context_;
  std::vector<char> received_;
  bool clean_ = false;  // No exchange has failed, or is under way.
  bool has_sent_ = false;
  std::optional<RedisClientId> id_;
  std::string id_refusal_;
};

// What a reply says; nothing of one that is a number.
absl::string_view TextOf(const redisReply& reply);
// The error that an error reply is.
absl::Status RedisErrorStatus(const RedisServer& server, absl::string_view text);
// Whether an error reply says that the server does not know the command, or that the user may not
// use it: it will say so again.
bool IsRedisRefusal(absl::string_view text);

}  // namespace kvferry
