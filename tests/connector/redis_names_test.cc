// Servers that are given by name, and a resolver that takes its time.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "tests/connector/redis_stores.h"
#include "tests/support/redis_process.h"

namespace {

constexpr char kSilent[] = "silent.test";
constexpr char kLocal[] = "redis.test";

std::atomic<bool> g_answers = false;
std::atomic<int> g_asked = 0;

}  // namespace

// In the C library's place: what a name is, and when that is said, is the tests'. The resolver does
// give up after 20 s.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  static const auto real =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (hints == nullptr || (hints->ai_flags & AI_NUMERICHOST) != 0 || host == nullptr) {
    return real(host, service, hints, found);
  }
  if (std::strcmp(host, kLocal) == 0) {
    if (hints->ai_family == AF_INET6) return EAI_NONAME;
    return real("127.0.0.1", service, hints, found);
  }
  if (std::strcmp(host, kSilent) != 0) return real(host, service, hints, found);
  ++g_asked;
  for (int left = 2000; left > 0 && !g_answers; --left) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return EAI_AGAIN;
}

namespace kvferry {
namespace {

using Code = absl::StatusCode;

class RedisNames : public testing::Test {
 protected:
  RedisNames() {
    g_answers = false;
    g_asked = 0;
  }
  void TearDown() override { g_answers = true; }

  static double Took(const std::function<void()>& call) {
    const Deadline begin = Clock::now();
    call();
    return SecondsBetween(begin, Clock::now());
  }
};

TEST_F(RedisNames, AreLookedUpByTheDeadline) {
  const auto store = MakeStore({.host = kSilent, .connect_timeout_ms = 600'000});
  for (int i = 0; i < 3; ++i) {
    EXPECT_LT(Took([&] {
                EXPECT_TRUE(Fails(Get(*store, "a", DeadlineInMs(50)), Code::kUnavailable,
                                  "redis silent.test:6379: looking the host up: the system's "
                                  "resolver did not answer"));
              }),
              10);
  }
  EXPECT_EQ(g_asked, 1);  // No more than one question at a time, however many calls there are.
  g_answers = true;
  EXPECT_TRUE(Fails(Get(*store, "a"), Code::kUnavailable, "Temporary failure in name resolution"));
}

TEST_F(RedisNames, AreLookedUpWithinTheTimeToConnect) {
  const auto store = MakeStore({.host = kSilent, .connect_timeout_ms = 50});
  EXPECT_LT(Took([&] { EXPECT_TRUE(Fails(Get(*store, "a"), Code::kUnavailable, "resolver")); }),
            10);
}

TEST_F(RedisNames, AResolverMayAnswerWhenTheStoreIsGone) {
  auto store = MakeStore({.host = kSilent, .connect_timeout_ms = 50});
  EXPECT_TRUE(Fails(Get(*store, "a"), Code::kUnavailable, "resolver"));
  store.reset();
}

TEST_F(RedisNames, AreThoseOfServers) {
  if (!WhyNoRedis().empty()) GTEST_SKIP() << WhyNoRedis();
  RedisProcess server;
  const auto store = MakeStore({.host = kLocal, .port = server.port()});
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 100))));
  EXPECT_EQ(Must(Get(*store, "a")), ValueOf(1, 1, 100));
}

}  // namespace
}  // namespace kvferry
