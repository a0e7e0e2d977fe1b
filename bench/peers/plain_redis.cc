#include <hiredis/hiredis.h>
#include <sys/time.h>

#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "bench/peers/plain_store.h"

namespace kvferry::bench {
namespace {

constexpr timeval kTimeout = {.tv_sec = 10, .tv_usec = 0};

struct FreeContext {
  void operator()(redisContext* context) const { redisFree(context); }
};
struct FreeReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, FreeReply>;

class Redis : public PlainStore {
 public:
  explicit Redis(std::unique_ptr<redisContext, FreeContext> context)
      : context_(std::move(context)) {}

  absl::Status Put(const std::string& key, std::span<const std::byte> value) override {
    const char* const bytes = reinterpret_cast<const char*>(value.data());
    std::array<const char*, 3> words = {"SET", key.data(), bytes};
    const std::array<size_t, 3> sizes = {3, key.size(), value.size()};
    const Reply reply = Ask(words.size(), words.data(), sizes.data());
    if (reply != nullptr && reply->type == REDIS_REPLY_STATUS) return absl::OkStatus();
    return Error("SET", reply);
  }

  absl::Status Get(const std::string& key, std::span<std::byte> out) override {
    std::array<const char*, 2> words = {"GET", key.data()};
    const std::array<size_t, 2> sizes = {3, key.size()};
    const Reply reply = Ask(words.size(), words.data(), sizes.data());
    if (reply == nullptr || reply->type != REDIS_REPLY_STRING || reply->len != out.size()) {
      return Error("GET", reply);
    }
    std::memcpy(out.data(), reply->str, out.size());
    return absl::OkStatus();
  }

 private:
  Reply Ask(size_t count, const char** words, const size_t* sizes) {
    return Reply(static_cast<redisReply*>(
        redisCommandArgv(context_.get(), static_cast<int>(count), words, sizes)));
  }
  absl::Status Error(absl::string_view what, const Reply& reply) const {
    const bool said = reply != nullptr && reply->type == REDIS_REPLY_ERROR;
    return absl::UnavailableError(absl::StrCat(what, ": ", said ? reply->str : context_->errstr));
  }

  const std::unique_ptr<redisContext, FreeContext> context_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PlainStore>> PlainRedis(int64_t port) {
  std::unique_ptr<redisContext, FreeContext> context(
      redisConnectWithTimeout("127.0.0.1", static_cast<int>(port), kTimeout));
  if (context == nullptr || context->err != 0 ||
      redisSetTimeout(context.get(), kTimeout) != REDIS_OK) {
    return absl::UnavailableError(absl::StrCat("no Redis at port ", port));
  }
  return std::make_unique<Redis>(std::move(context));
}

}  // namespace kvferry::bench
