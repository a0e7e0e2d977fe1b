#include "connector/store/redis_connection.h"

#include <hiredis/hiredis.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/interrupt.h"
#include "base/secret_file.h"
#include "base/status.h"

namespace kvferry {
namespace {

constexpr size_t kReceiveBytes = 256 << 10;
constexpr size_t kPiecesASend = 256;

absl::string_view ErrorText(int error) { return std::strerror(error); }

// Every reply that we ask for is one item. An array is refused before memory is set aside for as
// many items as it claims to have.
redisReplyObjectFunctions WithoutArrays(const redisReplyObjectFunctions& functions) {
  redisReplyObjectFunctions changed = functions;
  changed.createArray = [](const redisReadTask*, auto) -> void* { return nullptr; };
  return changed;
}

}  // namespace

std::string RedisServer::address() const { return absl::StrCat(host, ":", port); }

absl::string_view TextOf(const redisReply& reply) {
  return reply.str == nullptr ? absl::string_view() : absl::string_view(reply.str, reply.len);
}

absl::Status RedisErrorStatus(const RedisServer& server, absl::string_view text) {
  const std::string message = absl::StrCat("redis ", server.address(), ": ", text);
  if (absl::StartsWith(text, "OOM ")) return absl::ResourceExhaustedError(message);
  for (const absl::string_view refusal : {"NOAUTH ", "WRONGPASS ", "NOPERM "}) {
    if (absl::StartsWith(text, refusal)) return absl::PermissionDeniedError(message);
  }
  return absl::UnavailableError(message);
}

bool IsRedisRefusal(absl::string_view text) {
  return absl::StartsWith(text, "ERR ") || absl::StartsWith(text, "NOPERM ");
}

// ---------------------------------------------------------------- commands

std::string& RedisCommands::Begin(std::initializer_list<absl::string_view> words,
                                  size_t num_words) {
  ++size_;
  std::string& text = texts_.emplace_back(absl::StrCat("*", num_words, "\r\n"));
  for (const absl::string_view word : words) {
    absl::StrAppend(&text, "$", word.size(), "\r\n", word, "\r\n");
  }
  return text;
}

void RedisCommands::AddPiece(absl::string_view text) {
  pieces_.push_back(std::as_bytes(std::span(text)));
}

void RedisCommands::Add(std::initializer_list<absl::string_view> words) {
  AddPiece(Begin(words, words.size()));
}

void RedisCommands::Add(std::initializer_list<absl::string_view> words,
                        std::span<const std::byte> header, KvStore::ConstParts value) {
  std::string& text = Begin(words, words.size() + 1);
  absl::StrAppend(&text, "$", static_cast<int64_t>(header.size()) + BytesOf(value), "\r\n");
  text.append(reinterpret_cast<const char*>(header.data()), header.size());
  AddPiece(text);
  for (const std::span<const std::byte> part : value) {
    if (!part.empty()) pieces_.push_back(part);
  }
  AddPiece("\r\n");
}

// ---------------------------------------------------------------- connecting

RedisConnection::RedisConnection(const RedisServer& server)
    : server_(server), context_(nullptr, redisFree), received_(kReceiveBytes) {}

RedisConnection::~RedisConnection() = default;

absl::StatusOr<std::unique_ptr<RedisConnection>> RedisConnection::Connect(const RedisServer& server,
                                                                          HostLookup& lookup,
                                                                          Deadline deadline) {
  std::unique_ptr<RedisConnection> connection(new RedisConnection(server));
  deadline = std::min(deadline, DeadlineInMs(server.connect_timeout_ms));
  absl::Status status = connection->Open(lookup, deadline);
  if (status.ok()) status = connection->LogIn(deadline);
  if (absl::IsDeadlineExceeded(status)) return absl::UnavailableError(status.message());
  if (!status.ok()) return status;
  return connection;
}

absl::Status RedisConnection::Open(HostLookup& lookup, Deadline deadline) {
  const absl::StatusOr<std::vector<std::string>> addresses = lookup.Find(deadline);
  if (!addresses.ok()) return Broken(addresses.status().message());
  for (const std::string& address : *addresses) {
    context_.reset(redisConnectNonBlock(address.c_str(), static_cast<int>(server_.port)));
    if (context_ == nullptr) return Broken("out of memory");
    if (context_->err == 0) break;
  }
  if (context_->err != 0) return Broken(context_->errstr);
  KVFERRY_RETURN_IF_ERROR(Await(POLLOUT, deadline));
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(context_->fd, SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return Broken(ErrorText(error));
  static redisReplyObjectFunctions functions = WithoutArrays(*context_->reader->fn);
  context_->reader->fn = &functions;
  clean_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadRedisPassword(const std::string& password_file) {
  KVFERRY_ASSIGN_OR_RETURN(std::string text, ReadSecretFile("redis: password_file", password_file));
  // Of a line that an editor or 'echo' has ended; spaces may be the password's own.
  while (absl::EndsWith(text, "\n") || absl::EndsWith(text, "\r")) text.pop_back();
  if (!text.empty()) return text;
  return absl::InvalidArgumentError(
      absl::StrCat("redis: password_file '", password_file, "' holds no password"));
}

absl::StatusOr<std::string> RedisConnection::Password() const {
  if (server_.password_file.empty()) return server_.password;
  absl::StatusOr<std::string> read = ReadRedisPassword(server_.password_file);
  if (read.ok()) return read;
  return absl::PermissionDeniedError(
      absl::StrCat("redis ", server_.address(), ": ", read.status().message()));
}

absl::Status RedisConnection::LogIn(Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const std::string password, Password());
  RedisCommands commands;
  if (!password.empty() && server_.username.empty()) commands.Add({"AUTH", password});
  if (!server_.username.empty()) commands.Add({"AUTH", server_.username, password});
  const int64_t num_auth = commands.size();
  if (server_.database != 0) commands.Add({"SELECT", absl::StrCat(server_.database)});
  absl::Status refused;
  const auto check = [&](int64_t command, const redisReply& reply) {
    if (reply.type != REDIS_REPLY_ERROR || !refused.ok()) return;
    refused = RedisErrorStatus(server_, TextOf(reply));
    const std::string message(refused.message());
    if (!absl::IsUnavailable(refused)) return;
    if (absl::StartsWith(TextOf(reply), "LOADING")) return;
    // An ERR: a server without a password, with other words in old versions; or a number too high.
    refused = command < num_auth ? absl::PermissionDeniedError(message)
                                 : absl::FailedPreconditionError(
                                       absl::StrCat(message, " (database ", server_.database, ")"));
  };
  KVFERRY_RETURN_IF_ERROR(Exchange(commands, deadline, check));
  return refused;
}

namespace {

// In what INFO says, which is a line a field.
std::string RunIdIn(absl::string_view info) {
  for (absl::string_view line : absl::StrSplit(info, "\r\n")) {
    if (absl::ConsumePrefix(&line, "run_id:")) return std::string(line);
  }
  return "";
}

}  // namespace

absl::Status RedisConnection::LearnId(Deadline deadline) {
  if (id_ || !id_refusal_.empty()) return absl::OkStatus();
  RedisCommands commands;
  commands.Add({"CLIENT", "ID"});
  commands.Add({"INFO", "server"});
  RedisClientId id;
  std::string refusal;
  absl::Status failed;
  const auto answer = [&](int64_t command, const redisReply& reply) {
    const absl::string_view text = TextOf(reply);
    if (reply.type == REDIS_REPLY_ERROR) {
      if (IsRedisRefusal(text)) refusal = std::string(text);
      if (!IsRedisRefusal(text)) failed = RedisErrorStatus(server_, text);
    } else if (command == 0) {
      id.number = reply.integer;
    } else {
      id.run = RunIdIn(text);
    }
  };
  KVFERRY_RETURN_IF_ERROR(Exchange(commands, deadline, answer));
  KVFERRY_RETURN_IF_ERROR(failed);
  const bool learnt = refusal.empty() && id.number > 0 && !id.run.empty();
  if (learnt) id_ = std::move(id);
  if (!learnt) id_refusal_ = refusal.empty() ? "it has no run_id" : std::move(refusal);
  return absl::OkStatus();
}

// ---------------------------------------------------------------- exchanging

absl::Status RedisConnection::Broken(absl::string_view what) const {
  return absl::UnavailableError(absl::StrCat("redis ", server_.address(), ": ", what));
}

bool RedisConnection::usable() const {
  pollfd fd = {context_->fd, POLLIN, 0};
  return clean_ && poll(&fd, 1, 0) == 0;
}

absl::StatusOr<short> RedisConnection::Await(short events, Deadline deadline) const {
  for (;;) {
    // Also when there is something: a server that sends without end is late all the same.
    const Deadline now = Clock::now();
    if (now >= deadline || Interrupted()) {
      return absl::DeadlineExceededError(
          absl::StrCat("redis ", server_.address(), ": no answer in time"));
    }
    const int64_t left_ms = std::min<int64_t>(MsUntil(NextLook(deadline), now), 1 << 30);
    pollfd fd = {context_->fd, events, 0};
    const int ready = poll(&fd, 1, static_cast<int>(left_ms));
    if (ready > 0) return fd.revents;
    if (ready < 0 && errno != EINTR) return Broken(ErrorText(errno));
  }
}

absl::Status RedisConnection::Send(std::span<const std::span<const std::byte>> pieces,
                                   Unsent& unsent) {
  std::array<iovec, kPiecesASend> list;
  const size_t count = std::min(list.size(), pieces.size() - unsent.piece);
  for (size_t i = 0; i < count; ++i) {
    const std::span<const std::byte> piece =
        pieces[unsent.piece + i].subspan(i == 0 ? unsent.offset : 0);
    list[i] = {const_cast<std::byte*>(piece.data()), piece.size()};  // It is only read.
  }
  msghdr message = {};
  message.msg_iov = list.data();
  message.msg_iovlen = count;
  const ssize_t sent = sendmsg(context_->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    return errno == EAGAIN || errno == EINTR ? absl::OkStatus() : Broken(ErrorText(errno));
  }
  has_sent_ |= sent > 0;
  unsent.offset += static_cast<size_t>(sent);
  while (unsent.piece < pieces.size() && unsent.offset >= pieces[unsent.piece].size()) {
    unsent.offset -= pieces[unsent.piece++].size();
  }
  return absl::OkStatus();
}

absl::Status RedisConnection::Receive() {
  const ssize_t got = recv(context_->fd, received_.data(), received_.size(), MSG_DONTWAIT);
  if (got == 0) return Broken("closed the connection");
  if (got < 0) {
    return errno == EAGAIN || errno == EINTR ? absl::OkStatus() : Broken(ErrorText(errno));
  }
  redisReader* reader = context_->reader;
  if (redisReaderFeed(reader, received_.data(), got) != REDIS_OK) return Broken(reader->errstr);
  if (static_cast<int64_t>(reader->len) <= server_.max_reply_bytes + 2 * int64_t{kReceiveBytes}) {
    return absl::OkStatus();
  }
  return Broken(absl::StrCat("a reply of more than ", server_.max_reply_bytes, " bytes"));
}

absl::Status RedisConnection::HandOut(int64_t num_commands, int64_t& answered, Answer answer) {
  redisReader& reader = *context_->reader;
  while (answered < num_commands) {
    void* reply = nullptr;
    if (redisReaderGetReply(&reader, &reply) != REDIS_OK) return Broken(reader.errstr);
    if (reply == nullptr) return absl::OkStatus();
    const absl::Cleanup free_it = [reply] { freeReplyObject(reply); };
    answer(answered++, *static_cast<redisReply*>(reply));
  }
  // Not asked for once more: of what has only begun hiredis may take a byte, and keep it to itself.
  return reader.pos == reader.len ? absl::OkStatus() : Broken("a reply that was not asked for");
}

absl::Status RedisConnection::Exchange(const RedisCommands& commands, Deadline deadline,
                                       Answer answer) {
  clean_ = false;
  has_sent_ = false;
  Unsent unsent;
  int64_t answered = 0;
  while (answered < commands.size()) {
    const bool sending = unsent.piece < commands.pieces().size();
    KVFERRY_ASSIGN_OR_RETURN(
        const short ready,
        Await(static_cast<short>(sending ? POLLIN | POLLOUT : POLLIN), deadline));
    // Reading comes first: a server that hangs up has often said why.
    if ((ready & ~POLLOUT) != 0) {
      KVFERRY_RETURN_IF_ERROR(Receive());
      KVFERRY_RETURN_IF_ERROR(HandOut(commands.size(), answered, answer));
    }
    if ((ready & POLLOUT) != 0 && sending) {
      KVFERRY_RETURN_IF_ERROR(Send(commands.pieces(), unsent));
    }
  }
  // A server that answers before it was asked is not to be asked again.
  clean_ = unsent.piece == commands.pieces().size();
  return absl::OkStatus();
}

}  // namespace kvferry
