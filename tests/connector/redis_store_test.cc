#include "connector/store/redis_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <hiredis/hiredis.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "connector/store/value_header.h"
#include "tests/connector/redis_stores.h"
#include "tests/connector/store_conformance.h"
#include "tests/connector/store_values.h"
#include "tests/support/captured_log.h"
#include "tests/support/redis_process.h"
#include "tests/support/status.h"
#include "tests/support/temp_folder.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

using Code = absl::StatusCode;

// ---------------------------------------------------------------- conformance

// One server for the tests of a process; each store has a prefix of its own.
StoreBackend Redis() {
  const auto make = [](const StoreBackend::Size& size) {
    static RedisProcess server;
    static std::atomic<int> stores = 0;
    return MakeStore({.port = server.port(),
                      .key_prefix = absl::StrCat("store ", ++stores, ":"),
                      .max_value_bytes = size.max_value_bytes});
  };
  return {{"Redis", WhyNoRedis()},    make, /*pins=*/false, /*evicts=*/false, /*reopen=*/nullptr,
          /*random_operations=*/20000};
}

StoreBackend RedisThatForgets() {
  StoreBackend backend = Redis();
  backend.name = "RedisWithTtl";
  backend.make = [](const StoreBackend::Size& size) {
    static RedisProcess server;
    static std::atomic<int> stores = 0;
    return MakeStore({.port = server.port(),
                      .key_prefix = absl::StrCat("store ", ++stores, ":"),
                      .ttl_ms = 3'600'000,
                      .max_value_bytes = size.max_value_bytes,
                      .connections = 1});
  };
  backend.random_operations = 2000;
  return backend;
}

INSTANTIATE_TEST_SUITE_P(RedisStores, StoreConformance,
                         testing::Values(Redis(), RedisThatForgets()), BackendName());

// ---------------------------------------------------------------- helpers

class RedisStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!WhyNoRedis().empty()) GTEST_SKIP() << WhyNoRedis();
  }

  // What the server says to a command past the store, in one text.
  static std::string Command(const RedisProcess& server,
                             std::initializer_list<absl::string_view> words) {
    const RedisServer address = {.port = server.port(), .max_reply_bytes = 1 << 20};
    const auto connection = Must(Connect(address));
    RedisCommands commands;
    commands.Add(words);
    std::string text;
    EXPECT_TRUE(IsOk(connection->Exchange(commands, Soon(), [&](int64_t, const redisReply& reply) {
      text = std::string(TextOf(reply));
      EXPECT_NE(reply.type, REDIS_REPLY_ERROR) << text;
    })));
    return text;
  }
};

// ---------------------------------------------------------------- options

TEST(RedisStoreOptions, BadOnesAreNamed) {
  const auto create = [](const std::function<void(RedisStore::Options&)>& change) {
    RedisStore::Options options;
    change(options);
    return RedisStore::Create(options);
  };
  using Options = RedisStore::Options;
  const Code kInvalid = Code::kInvalidArgument;
  EXPECT_TRUE(Fails(create([](Options& o) { o.host = ""; }), kInvalid, "host"));
  EXPECT_TRUE(Fails(create([](Options& o) { o.port = 0; }), kInvalid, "port is 0", "65535"));
  EXPECT_TRUE(Fails(create([](Options& o) { o.port = 65536; }), kInvalid, "port is 65536"));
  EXPECT_TRUE(Fails(create([](Options& o) { o.database = -1; }), kInvalid, "database is -1"));
  EXPECT_TRUE(Fails(create([](Options& o) { o.ttl_ms = -5; }), kInvalid, "ttl_ms is -5"));
  EXPECT_TRUE(Fails(create([](Options& o) { o.connect_timeout_ms = 0; }), kInvalid,
                    "connect_timeout_ms is 0"));
  EXPECT_TRUE(Fails(create([](Options& o) { o.connections = 0; }), kInvalid, "connections is 0"));
  EXPECT_TRUE(
      Fails(create([](Options& o) { o.max_value_bytes = 0; }), kInvalid, "max_value_bytes is 0"));
  EXPECT_TRUE(Fails(create([](Options& o) { o.max_value_bytes = int64_t{512} << 20; }), kInvalid,
                    "max_value_bytes is 536870912", "536870848"));
  EXPECT_TRUE(Fails(create([](Options& o) { o.username = "eve"; }), kInvalid, "username 'eve'"));
  EXPECT_TRUE(
      Fails(create([](Options& o) { o.key_prefix.assign(1025, 'x'); }), kInvalid, "key_prefix"));
  EXPECT_TRUE(IsOk(create([](Options&) {})));  // Nothing is connected yet.
}

// Would be waited for without end, and what was in it is gone once it is read.
TEST(RedisStoreOptions, APasswordFileIsAFile) {
  const TempFolder folder;
  const std::string path = absl::StrCat(folder.path(), "/fifo");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  auto created = std::async(std::launch::async,
                            [&] { return RedisStore::Create({.password_file = path}).status(); });
  if (created.wait_for(std::chrono::seconds(5)) != std::future_status::ready) {
    ADD_FAILURE() << "it is waited for";
    close(open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));  // Lets go of who reads.
  }
  EXPECT_TRUE(Fails(created.get(), Code::kInvalidArgument, path, "no regular file"));
  EXPECT_TRUE(Fails(RedisStore::Create({.password_file = folder.path()}), Code::kInvalidArgument,
                    folder.path(), "no regular file"));
}

// ---------------------------------------------------------------- a server that goes away

TEST_F(RedisStoreTest, ADeadServerIsNamedAndOneThatIsBackIsUsed) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port()});
  const Bytes value = ValueOf(1, 1, 1000);
  ASSERT_TRUE(IsOk(Put(*store, "a", value)));
  server.Kill();
  const std::string address = absl::StrCat("127.0.0.1:", server.port());
  const std::vector<std::string_view> keys = {"a"};
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Fails(Put(*store, "a", value), Code::kUnavailable, address, "refused"));
    EXPECT_TRUE(Fails(Get(*store, "a"), Code::kUnavailable, address));
    EXPECT_TRUE(Fails(store->Exists(keys, Soon()), Code::kUnavailable, address));
    EXPECT_TRUE(Fails(store->Erase("a", Soon()), Code::kUnavailable, address));
  }
  EXPECT_EQ(store->stats().errors, 12);
  server.Start();
  EXPECT_TRUE(Fails(Get(*store, "a"), Code::kNotFound));  // It had nothing on disk.
  EXPECT_TRUE(IsOk(Put(*store, "a", value)));
  EXPECT_EQ(Must(Get(*store, "a")), value);
}

TEST_F(RedisStoreTest, KilledAmongBatchesOfManyThreads) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port(), .connections = 3});
  std::atomic<bool> stop = false;
  std::atomic<int64_t> put = 0, lost = 0, wrong = 0;
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint64_t version = 1; !stop; ++version) {
        const std::string key = absl::StrCat(thread);
        const absl::Status status = Put(*store, key, WholeValue(thread, version));
        const absl::StatusOr<Bytes> got = Get(*store, key);
        if (got.ok() && !IsWholeValue(thread, *got)) ++wrong;
        status.ok() ? ++put : ++lost;
        if (!status.ok() && !absl::IsUnavailable(status)) ++wrong;
      }
    });
  }
  const auto more = [&](const std::atomic<int64_t>& count) {
    const int64_t before = count;
    return WaitFor([&] { return count > before + 20; }, Soon());
  };
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(more(put));
    server.Kill();
    EXPECT_TRUE(more(lost));
    server.Start();
  }
  EXPECT_TRUE(more(put));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(RedisStoreTest, AStoppedServerCostsTheDeadlineAndNoLateReplyIsBelieved) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port(), .connections = 1});
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 1000))));
  ASSERT_TRUE(IsOk(Put(*store, "b", ValueOf(2, 1, 1000))));
  server.Signal(SIGSTOP);
  const Deadline begin = Clock::now();
  EXPECT_TRUE(Fails(Get(*store, "a", DeadlineInMs(100)), Code::kDeadlineExceeded));
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 1.1);
  server.Signal(SIGCONT);  // And now it answers for "a".
  EXPECT_EQ(Must(Get(*store, "b")), ValueOf(2, 1, 1000));
  EXPECT_EQ(Must(Get(*store, "a")), ValueOf(1, 1, 1000));
  EXPECT_EQ(store->stats().errors, 1);
}

// ---------------------------------------------------------------- writes that were broken off

class RedisWritesBrokenOff : public RedisStoreTest {
 protected:
  // So many that nobody uses: what is broken off on one is not alone when the server goes on.
  static testing::AssertionResult HasConnections(size_t count, const RedisProcess& server,
                                                 KvStore& store) {
    const auto enough = [&] {
      std::vector<std::thread> threads;
      for (size_t thread = 0; thread < count; ++thread) {
        threads.emplace_back([&store, key = absl::StrCat("key ", thread)] {
          for (int i = 0; i < 50; ++i) EXPECT_TRUE(IsOk(Put(store, key, ValueOf(1, 1, 1000))));
        });
      }
      for (std::thread& thread : threads) thread.join();
      const std::vector<std::string> clients =
          absl::StrSplit(Command(server, {"CLIENT", "LIST"}), '\n');
      return std::ranges::count_if(clients, [](const std::string& client) {
               return absl::StrContains(client, "cmd=set ");
             }) >= static_cast<ptrdiff_t>(count);
    };
    return WaitFor(enough, Soon()) ? testing::AssertionSuccess()
                                   : testing::AssertionFailure() << "never " << count;
  }
};

// It lies in the server's kernel when the caller has long gone on to something else.
TEST_F(RedisWritesBrokenOff, AreNotCarriedOutAfterALaterOne) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port()});
  const Bytes late = ValueOf(1, 2, 1 << 20), newer = ValueOf(1, 3, 100);
  for (int round = 0; round < 10; ++round) {
    SCOPED_TRACE(round);
    ASSERT_TRUE(HasConnections(2, server, *store));
    const bool erases = round % 2 == 0;
    server.Signal(SIGSTOP);
    EXPECT_TRUE(Fails(Put(*store, "a", late, DeadlineInMs(150)), Code::kDeadlineExceeded));
    auto next = std::async(std::launch::async, [&] {
      return erases ? store->Erase("a", Soon()) : Put(*store, "a", newer);
    });
    next.wait_for(std::chrono::milliseconds(50));  // It is on its way by then.
    server.Signal(SIGCONT);
    EXPECT_TRUE(IsOk(next.get()));
    const auto is_another = [&] {
      const absl::StatusOr<Bytes> got = Get(*store, "a");
      return erases ? !absl::IsNotFound(got.status()) : !got.ok() || *got != newer;
    };
    EXPECT_FALSE(WaitFor(is_another, DeadlineInMs(100)));
  }
}

// Each of those who write next ends all of them, or knows that somebody has.
TEST_F(RedisWritesBrokenOff, BySeveralAtATime) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port(), .connections = 5});
  const Bytes late = ValueOf(1, 2, 1 << 20);
  const auto at_once = [&](int count, const std::function<absl::Status()>& call) {
    std::vector<std::future<absl::Status>> calls;
    for (int i = 0; i < count; ++i) calls.push_back(std::async(std::launch::async, call));
    return calls;
  };
  for (int round = 0; round < 5; ++round) {
    SCOPED_TRACE(round);
    ASSERT_TRUE(HasConnections(5, server, *store));
    server.Signal(SIGSTOP);
    for (auto& put : at_once(4, [&] { return Put(*store, "a", late, DeadlineInMs(150)); })) {
      EXPECT_TRUE(Fails(put.get(), Code::kDeadlineExceeded));
    }
    auto erasures = at_once(3, [&] { return store->Erase("a", Soon()); });
    erasures[0].wait_for(std::chrono::milliseconds(50));  // They are on their way by then.
    server.Signal(SIGCONT);
    for (auto& erasure : erasures) EXPECT_TRUE(IsOk(erasure.get()));
    EXPECT_FALSE(WaitFor([&] { return Get(*store, "a").ok(); }, DeadlineInMs(100)));
  }
}

// A server that was started anew counts its clients from 1 again.
TEST_F(RedisWritesBrokenOff, DoNotEndOthersConnectionsOfALaterServer) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port()});
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 100))));
  server.Signal(SIGSTOP);
  EXPECT_TRUE(
      Fails(Put(*store, "a", ValueOf(1, 2, 100), DeadlineInMs(50)), Code::kDeadlineExceeded));
  server.Kill();
  server.Start();
  std::vector<std::unique_ptr<RedisConnection>> others;
  const RedisServer address = {.port = server.port(), .max_reply_bytes = 1 << 20};
  RedisCommands ping;
  ping.Add({"PING"});
  for (int i = 0; i < 20; ++i) {
    others.push_back(Must(Connect(address)));
    ASSERT_TRUE(IsOk(others.back()->Exchange(ping, Soon(), [](int64_t, const redisReply&) {})));
  }
  EXPECT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 3, 100))));
  for (const auto& other : others) EXPECT_TRUE(other->usable());
  EXPECT_EQ(Must(Get(*store, "a")), ValueOf(1, 3, 100));
}

TEST_F(RedisWritesBrokenOff, AUserWithoutTheRightToEndThemIsSaidOnce) {
  const CapturedLog log;
  const RedisProcess server({"--user", "eve", "on", ">hers", "~kvferry:*", "+set", "+del",
                             "+getrange", "+exists", "+client|id"});
  const auto store =
      MakeStore({.port = server.port(), .username = "eve", .password = "hers", .connections = 1});
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 100))));
    server.Signal(SIGSTOP);
    EXPECT_FALSE(Put(*store, "a", ValueOf(1, 2, 100), DeadlineInMs(50)).ok());
    server.Signal(SIGCONT);
    EXPECT_TRUE(IsOk(store->Erase("a", Soon())));
  }
  int said = 0;
  for (const std::string& line : log.lines()) said += absl::StrContains(line, "CLIENT KILL");
  EXPECT_EQ(said, 1) << log.ToString();
  EXPECT_TRUE(log.Has({absl::StrCat("127.0.0.1:", server.port()), "NOPERM", "may be carried out"}))
      << log.ToString();
}

// docs/stores.md names them.
TEST_F(RedisWritesBrokenOff, TheRightsThatAUserNeeds) {
  const CapturedLog log;
  const RedisProcess server({"--user", "ann", "on", ">hers", "~kvferry:*", "+client|id",
                             "+client|kill", "+info", "+set", "+psetex", "+getrange", "+exists",
                             "+del"});
  const auto store =
      MakeStore({.port = server.port(), .username = "ann", .password = "hers", .connections = 1});
  const std::vector<std::string_view> keys = {"a"};
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 100))));
  server.Signal(SIGSTOP);
  EXPECT_FALSE(Put(*store, "a", ValueOf(1, 2, 100), DeadlineInMs(50)).ok());
  server.Signal(SIGCONT);
  EXPECT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 3, 100))));
  EXPECT_EQ(Must(store->Exists(keys, Soon())), 1);
  EXPECT_EQ(Must(Get(*store, "a")), ValueOf(1, 3, 100));
  EXPECT_TRUE(IsOk(store->Erase("a", Soon())));
  EXPECT_FALSE(log.Has({"refused"})) << log.ToString();
}

// ---------------------------------------------------------------- refusals

TEST_F(RedisStoreTest, AFullServerRefusesAndKeepsWhatItHad) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port()});
  const Bytes value = ValueOf(1, 1, 1 << 20);
  ASSERT_TRUE(IsOk(Put(*store, "a", value)));
  Command(server, {"CONFIG", "SET", "maxmemory", "1mb"});
  EXPECT_TRUE(Fails(Put(*store, "a", ValueOf(1, 2, 1 << 20)), Code::kResourceExhausted, "OOM",
                    absl::StrCat("127.0.0.1:", server.port())));
  EXPECT_TRUE(Fails(Put(*store, "b", value), Code::kResourceExhausted, "OOM"));
  EXPECT_EQ(Must(Get(*store, "a")), value);
  Command(server, {"CONFIG", "SET", "maxmemory", "0"});
  EXPECT_TRUE(IsOk(Put(*store, "b", value)));
  EXPECT_EQ(store->stats().errors, 2);
  EXPECT_EQ(store->stats().puts, 2);
}

TEST_F(RedisStoreTest, PasswordsUsersAndDatabases) {
  RedisProcess server(
      {"--requirepass", "secret", "--user", "eve", "on", ">hers", "~kvferry:*", "+@all"});
  const auto put = [&](RedisStore::Options options) {
    options.port = server.port();
    return Put(*MakeStore(options), "a", ValueOf(1, 1, 10));
  };
  EXPECT_TRUE(Fails(put({}), Code::kPermissionDenied, "NOAUTH"));
  EXPECT_TRUE(Fails(put({.password = "guess"}), Code::kPermissionDenied, "WRONGPASS"));
  EXPECT_TRUE(
      Fails(put({.username = "eve", .password = "x"}), Code::kPermissionDenied, "WRONGPASS"));
  EXPECT_TRUE(Fails(put({.username = "eve", .password = "hers", .key_prefix = "other:"}),
                    Code::kPermissionDenied, "NOPERM"));
  EXPECT_TRUE(
      Fails(put({.password = "secret", .database = 99}), Code::kFailedPrecondition, "database 99"));
  // What was wrong first is said, and not what became of the rest.
  EXPECT_TRUE(
      Fails(put({.password = "guess", .database = 3}), Code::kPermissionDenied, "WRONGPASS"));
  EXPECT_TRUE(IsOk(put({.password = "secret", .database = 3})));
  EXPECT_TRUE(IsOk(put({.username = "eve", .password = "hers"})));
  const auto other = MakeStore({.port = server.port(), .password = "secret", .database = 4});
  EXPECT_TRUE(Fails(Get(*other, "a"), Code::kNotFound));
  const auto same = MakeStore({.port = server.port(), .password = "secret", .database = 3});
  EXPECT_EQ(Must(Get(*same, "a")), ValueOf(1, 1, 10));
}

TEST_F(RedisStoreTest, APasswordOfAFileIsReadForEachConnection) {
  const RedisProcess server({"--requirepass", " se cret"});
  const std::string path = absl::StrCat(testing::TempDir(), "/kvferry_redis_", getpid());
  const absl::Cleanup remove = [&] { std::remove(path.c_str()); };
  const auto write = [&](const std::string& text) { std::ofstream(path) << text; };
  const std::vector<std::byte> value = ValueOf(1, 1, 10);
  const auto create = [&](const RedisStore::Options& options) {
    return RedisStore::Create(options).status();
  };
  EXPECT_TRUE(Fails(create({.password_file = path}), Code::kInvalidArgument, path, "cannot be read",
                    "No such file"));
  write("\n");
  EXPECT_TRUE(Fails(create({.password_file = path}), Code::kInvalidArgument, "no password"));
  write(std::string(5000, 'x'));
  EXPECT_TRUE(Fails(create({.password_file = path}), Code::kInvalidArgument, "more than 4096"));
  EXPECT_TRUE(Fails(create({.password = "x", .password_file = path}), Code::kInvalidArgument,
                    "exclude each other"));
  write("an old one\n");
  const auto store =
      MakeStore({.port = server.port(), .username = "default", .password_file = path});
  EXPECT_TRUE(Fails(Put(*store, "a", value), Code::kPermissionDenied, "WRONGPASS"));
  std::remove(path.c_str());
  EXPECT_TRUE(Fails(Put(*store, "a", value), Code::kPermissionDenied, path, "cannot be read"));
  write(" se cret\r\n");
  EXPECT_TRUE(IsOk(Put(*store, "a", value)));
  EXPECT_EQ(Must(Get(*MakeStore({.port = server.port(), .password_file = path}), "a")), value);
}

TEST_F(RedisStoreTest, APasswordForAServerWithoutOne) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port(), .password = "secret"});
  EXPECT_TRUE(Fails(Get(*store, "a"), Code::kPermissionDenied, "AUTH"));
}

// ---------------------------------------------------------------- values behind our back

TEST_F(RedisStoreTest, AValueThatIsNotWhatWasPutIsAMiss) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port(), .key_prefix = "p:"});
  const std::string foreign(5000, 'x');
  const auto spoil = [&](std::initializer_list<absl::string_view> words) {
    Command(server, {"DEL", "p:a"});
    ASSERT_TRUE(IsOk(Put(*store, "b", ValueOf(2, 1, 1000))));
    ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 1000))));
    Command(server, words);
    const int64_t errors = store->stats().errors;
    EXPECT_TRUE(Fails(Get(*store, "a"), Code::kNotFound)) << *words.begin();
    Bytes out(1000);
    const std::span<std::byte> part = out;
    EXPECT_TRUE(Fails(store->Get("a", {&part, 1}, Soon()), Code::kNotFound)) << *words.begin();
    EXPECT_EQ(store->stats().errors, errors + 2);
    Command(server, {"DEL", "p:a"});
    ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 3, 10))));
    EXPECT_EQ(Must(Get(*store, "a")), ValueOf(1, 3, 10));
  };
  spoil({"SETRANGE", "p:a", "500", "?"});    // In the middle.
  spoil({"SETRANGE", "p:a", "16", "????"});  // The checksum.
  spoil({"SETRANGE", "p:a", "0", "K"});      // The magic number.
  spoil({"APPEND", "p:a", "more"});          // Something behind it.
  spoil({"SET", "p:a", foreign});            // Not ours.
  spoil({"SET", "p:a", "kvferry"});          // Shorter than a header.
  spoil({"RENAME", "p:b", "p:a"});           // Under another key.
  spoil({"EVAL", "redis.call('SET', 'p:a', string.sub(redis.call('GET', 'p:a'), 1, 700))", "0"});
  spoil({"EVAL", "redis.call('DEL', 'p:a') redis.call('RPUSH', 'p:a', 'x')", "0"});
}

// Others may put longer ones than we take. It is whole, and no miss: nobody has to make it anew.
TEST_F(RedisStoreTest, AValueLongerThanOursIsNoMiss) {
  RedisProcess server;
  const auto theirs = MakeStore({.port = server.port()});
  const auto ours = MakeStore({.port = server.port(), .max_value_bytes = 1000});
  ASSERT_TRUE(IsOk(Put(*theirs, "a", ValueOf(1, 1, 1001))));
  ASSERT_TRUE(IsOk(Put(*theirs, "b", ValueOf(2, 1, 1000))));
  Bytes out(1001);
  const std::span<std::byte> part = out;
  for (const absl::Status& status :
       {Get(*ours, "a").status(), ours->Get("a", {&part, 1}, Soon())}) {
    EXPECT_TRUE(Fails(status, Code::kFailedPrecondition, "1001 bytes", "max_value_bytes", "1000"));
  }
  EXPECT_EQ(Must(Get(*ours, "b")), ValueOf(2, 1, 1000));
  EXPECT_EQ(ours->stats().misses, 0);
  EXPECT_EQ(ours->stats().errors, 0);
  // One that only says that it is so long is damaged.
  const std::string header = Command(server, {"GETRANGE", "kvferry:a", "0", "23"});
  Command(server, {"SET", "kvferry:b", header + std::string(500, 'x')});
  EXPECT_TRUE(Fails(Get(*ours, "b"), Code::kNotFound, "length or checksum"));
}

TEST_F(RedisStoreTest, ATtlEnds) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port(), .ttl_ms = 50});
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 10))));
  EXPECT_TRUE(WaitFor([&] { return absl::IsNotFound(Get(*store, "a").status()); }, Soon()));
}

TEST_F(RedisStoreTest, BatchesOfManyRounds) {
  RedisProcess server;
  const auto store = MakeStore({.port = server.port()});
  constexpr uint64_t kItems = 5 * RedisStore::kPipelined / 2;
  std::vector<std::string> names;
  std::vector<Bytes> values, outs;
  std::vector<std::span<const std::byte>> value_parts;
  std::vector<std::span<std::byte>> out_parts;
  for (uint64_t i = 0; i < kItems; ++i) {
    names.push_back(absl::StrCat("key ", i));
    values.push_back(ValueOf(i, 1, static_cast<int64_t>(1 + 997 * i % 50000)));
    outs.emplace_back(values[i].size());
  }
  std::vector<KvStore::PutItem> puts;
  std::vector<KvStore::GetItem> gets;
  for (uint64_t i = 0; i < kItems; ++i) {
    value_parts.emplace_back(values[i]);
    out_parts.emplace_back(outs[i]);
  }
  for (uint64_t i = 0; i < kItems; ++i) {
    puts.push_back({names[i], {&value_parts[i], 1}});
    gets.push_back({names[i], {&out_parts[i], 1}});
  }
  for (const absl::Status& status : store->PutBatch(puts, Soon())) ASSERT_TRUE(IsOk(status));
  for (const absl::Status& status : store->GetBatch(gets, Soon())) ASSERT_TRUE(IsOk(status));
  EXPECT_TRUE(outs == values);
  server.Kill();
  const std::vector<absl::Status> failed = store->GetBatch(gets, Soon());
  ASSERT_EQ(failed.size(), kItems);
  for (const absl::Status& status : failed) EXPECT_TRUE(Fails(status, Code::kUnavailable));
  EXPECT_EQ(store->stats().errors, 1);  // It is not waited for again in each round.
}

// ---------------------------------------------------------------- the header

TEST(ValueHeader, TellsAValueFromWhatIsNone) {
  const Bytes value = ValueOf(1, 1, 100);
  const std::vector<std::span<const std::byte>> parts = {
      std::span(value).first(30), {}, std::span(value).subspan(30)};
  const ValueHeader header = MakeValueHeader("key", parts);
  Bytes whole(header.begin(), header.end());
  whole.insert(whole.end(), value.begin(), value.end());
  ASSERT_TRUE(CheckedValue("key", whole).has_value());
  EXPECT_EQ(Bytes(CheckedValue("key", whole)->begin(), CheckedValue("key", whole)->end()), value);
  EXPECT_EQ(LengthInHeader(whole), 100);
  EXPECT_FALSE(CheckedValue("kez", whole).has_value());
  EXPECT_FALSE(CheckedValue("key", MakeValueHeader("key", {})).has_value());  // None has 0 bytes.
  for (size_t length = 0; length < kValueHeaderBytes; ++length) {
    EXPECT_FALSE(LengthInHeader(std::span(whole).first(length)).has_value()) << length;
  }
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(CheckedValue("key", std::span(whole).first(length)).has_value()) << length;
  }
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    Bytes altered = whole;
    altered[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(CheckedValue("key", altered).has_value()) << bit;
  }
}

}  // namespace
}  // namespace kvferry
