// Servers that misbehave, played by a script.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "connector/store/value_header.h"
#include "tests/connector/redis_stores.h"
#include "tests/connector/store_values.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

using Code = absl::StatusCode;

// Listens on 127.0.0.1 and does with each connection, one after another, what it is told to.
class ScriptedServer {
 public:
  using Script = std::function<void(int fd, int connection)>;
  explicit ScriptedServer(Script script) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    EXPECT_EQ(listen(listener_, 64), 0);
    port_ = ntohs(address.sin_port);
    if (script) thread_ = std::thread([this, script = std::move(script)] { Run(script); });
  }
  ~ScriptedServer() {
    shutdown(listener_, SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
    for (const int fd : accepted_) close(fd);
    close(listener_);
  }
  int64_t port() const { return port_; }

  // The next bytes of a request; false when the other side has closed.
  static bool Read(int fd) {
    char bytes[4096];
    return recv(fd, bytes, sizeof(bytes), 0) > 0;
  }
  // How many commands begin in them; 0 when the other side has closed.
  static int ReadCommands(int fd) {
    char bytes[4096];
    const ssize_t got = recv(fd, bytes, sizeof(bytes), 0);
    return got <= 0 ? 0 : static_cast<int>(std::count(bytes, bytes + got, '*'));
  }
  static void Say(int fd, absl::string_view text) {
    // Nobody may be listening any more.
    (void)send(fd, text.data(), text.size(), MSG_NOSIGNAL);
  }

 private:
  void Run(const Script& script) {
    for (;;) {
      const int fd = accept(listener_, nullptr, nullptr);
      if (fd < 0) return;
      accepted_.push_back(fd);
      script(fd, static_cast<int>(accepted_.size()));
    }
  }

  int listener_ = -1;
  int64_t port_ = 0;
  std::vector<int> accepted_;
  std::thread thread_;
};

TEST(RedisStoreAgainst, AServerThatNeverAnswers) {
  const ScriptedServer silent(nullptr);         // Accepts, as the kernel does for it.
  const Bytes value = ValueOf(1, 1, 32 << 20);  // More than sockets hold.
  const auto store = MakeStore({.port = silent.port(), .connections = 1});
  Deadline begin = Clock::now();
  EXPECT_TRUE(Fails(Put(*store, "a", value, DeadlineInMs(100)), Code::kDeadlineExceeded));
  EXPECT_TRUE(Fails(Get(*store, "a", DeadlineInMs(100)), Code::kDeadlineExceeded));
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 1.5);
  const auto login = MakeStore({.port = silent.port(), .password = "p", .connect_timeout_ms = 50});
  begin = Clock::now();
  EXPECT_TRUE(Fails(Get(*login, "a"), Code::kUnavailable));
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 1.0);
}

TEST(RedisStoreAgainst, CallsThatWaitForAConnectionKeepTheirDeadline) {
  const ScriptedServer silent(nullptr);
  const auto store = MakeStore({.port = silent.port(), .connections = 1});
  std::thread first(
      [&] { EXPECT_TRUE(Fails(Get(*store, "a", DeadlineInMs(700)), Code::kDeadlineExceeded)); });
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Fails(Get(*store, "a", DeadlineInMs(50)), Code::kDeadlineExceeded));
  }
  first.join();
}

TEST(RedisStoreAgainst, AServerThatTricklesForEver) {
  const ScriptedServer server([](int fd, int) {
    ScriptedServer::Read(fd);
    ScriptedServer::Say(fd, "$1000000\r\n");
    while (send(fd, "x", 1, MSG_NOSIGNAL) == 1) {
      pollfd gone = {fd, POLLIN, 0};
      if (poll(&gone, 1, 1) != 0) return;
    }
  });
  const auto store = MakeStore({.port = server.port()});
  const Deadline begin = Clock::now();
  EXPECT_TRUE(Fails(Get(*store, "a", DeadlineInMs(150)), Code::kDeadlineExceeded));
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 1.15);
}

TEST(RedisStoreAgainst, AServerThatTalksNonsense) {
  const std::vector<std::string> nonsense = {
      "HTTP/1.1 400 Bad Request\r\n\r\n",
      "*1000000000\r\n",
      "*1\r\n$1\r\nx\r\n",
      "$-5\r\n",
      "$99999999999999999999\r\n",
      std::string(3 << 20, 'x'),
      "$3\r\nabcde\r\n",
      "+OK\r\n",
      ":7\r\n",
      "",
      ":\r\n",
      "$5000000\r\n" + std::string(5000000, 'x'),
      "$5000000\r\n" + std::string(5000000, 'x') + "\r\n",
  };
  for (const std::string& text : nonsense) {
    SCOPED_TRACE(text.substr(0, 20));
    const ScriptedServer server([&](int fd, int) {
      ScriptedServer::Read(fd);
      ScriptedServer::Say(fd, text);
      shutdown(fd, SHUT_RDWR);
    });
    const auto store = MakeStore({.port = server.port(), .max_value_bytes = 1000});
    const absl::Status status = Get(*store, "a").status();
    // "abc" might have been somebody's value.
    EXPECT_TRUE(
        Fails(status, absl::StrContains(text, "abc") ? Code::kNotFound : Code::kUnavailable));
    EXPECT_EQ(store->stats().hits, 0);
    EXPECT_GE(store->stats().errors, 1);
  }
}

TEST(RedisStoreAgainst, AReplyNobodyAskedForEndsTheConnection) {
  std::atomic<int> connections = 0;
  const ScriptedServer server([&](int fd, int connection) {
    connections = connection;
    ScriptedServer::Read(fd);
    ScriptedServer::Say(fd, connection == 1 ? ":1\r\n:1\r\n" : ":0\r\n");
  });
  const auto store = MakeStore({.port = server.port(), .connections = 1});
  const std::vector<std::string_view> keys = {"a"};
  // Whether the second reply is seen already now is a matter of luck.
  const absl::StatusOr<int64_t> first = store->Exists(keys, Soon());
  EXPECT_TRUE(first.ok() ? *first == 1 : absl::IsUnavailable(first.status()));
  EXPECT_EQ(Must(store->Exists(keys, Soon())), 0);  // And not 1, the first connection's.
  EXPECT_EQ(connections, 2);
}

// Of which the rest would be taken for the next one's.
TEST(RedisStoreAgainst, AConnectionWithPartOfAnotherReplyIsNotUsedAgain) {
  const ScriptedServer server([&](int fd, int connection) {
    ScriptedServer::Read(fd);
    ScriptedServer::Say(fd, connection == 1 ? ":1\r\n:" : ":0\r\n");
    if (connection == 1 && ScriptedServer::Read(fd)) ScriptedServer::Say(fd, "1\r\n");
  });
  const auto store = MakeStore({.port = server.port(), .connections = 1});
  const std::vector<std::string_view> keys = {"a"};
  EXPECT_EQ(Must(store->Exists(keys, Soon())), 1);
  EXPECT_EQ(Must(store->Exists(keys, Soon())), 0);
}

// It would take what comes next for the rest of the value.
TEST(RedisStoreAgainst, AConnectionWithHalfACommandIsNotUsedAgain) {
  const ScriptedServer server([&](int fd, int connection) {
    ScriptedServer::Read(fd);
    if (connection > 1) return ScriptedServer::Say(fd, ":1\r\n");
    ScriptedServer::Say(fd, "-ERR unknown command\r\n-ERR unknown command\r\n");
    ScriptedServer::Read(fd);
    ScriptedServer::Say(fd, "+OK\r\n");  // And reads no more of it.
  });
  const auto store = MakeStore({.port = server.port(), .connections = 1});
  EXPECT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 32 << 20))));  // More than sockets hold.
  const std::vector<std::string_view> keys = {"a"};
  EXPECT_EQ(Must(store->Exists(keys, Soon())), 1);
}

TEST(RedisStoreAgainst, AConnectionOfWhichAReplyIsDueIsNotUsedAgain) {
  const ScriptedServer server([](int fd, int connection) {
    ScriptedServer::Read(fd);
    // The first one is answered when a second request comes on it, which must not be.
    if (connection == 1 && !ScriptedServer::Read(fd)) return;
    ScriptedServer::Say(fd, connection == 1 ? ":1\r\n" : ":0\r\n");
  });
  const auto store = MakeStore({.port = server.port(), .connections = 1});
  const std::vector<std::string_view> keys = {"a"};
  EXPECT_TRUE(Fails(store->Exists(keys, DeadlineInMs(50)), Code::kDeadlineExceeded));
  EXPECT_EQ(Must(store->Exists(keys, Soon())), 0);
}

TEST(RedisStoreAgainst, AConnectionWhoseValueFoundNoMemoryIsGivenBack) {
  const Bytes value = ValueOf(1, 1, 100003);
  const std::span<const std::byte> part = value;
  const ValueHeader header = MakeValueHeader("a", {&part, 1});
  std::string reply = absl::StrCat("$", header.size() + value.size(), "\r\n");
  for (const auto bytes : {std::span<const std::byte>(header), part}) {
    reply.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  reply += "\r\n";
  const ScriptedServer server([&](int fd, int) {
    while (ScriptedServer::Read(fd)) ScriptedServer::Say(fd, reply);
  });
  const auto store = MakeStore({.port = server.port(), .connections = 1});
  {
    const ScarceNew scarce(ScarceNew::Of::kThisThread, value.size());
    EXPECT_THROW((void)Get(*store, "a"), std::bad_alloc);
  }
  EXPECT_EQ(Must(Get(*store, "a", DeadlineInMs(5000))), value);
}

// For what the server calls its connection, and to say that there was no answer.
TEST(RedisStoreAgainst, AWriteThatIsBrokenOffIsEndedAlsoWhereMemoryRanOut) {
  const std::string run(50, 'f');  // Not as long as what is said late: each is a size of its own.
  std::atomic<bool> answers = true;
  std::atomic<int> num_unanswered = 0, num_ended = 0;
  const ScriptedServer server([&](int fd, int) {
    char bytes[4096];
    for (ssize_t got = 0; (got = recv(fd, bytes, sizeof(bytes), 0)) > 0;) {
      const absl::string_view said(bytes, got);
      if (absl::StrContains(said, "INFO")) {
        const std::string info = absl::StrCat("run_id:", run);
        ScriptedServer::Say(fd, absl::StrCat(":7\r\n$", info.size(), "\r\n", info, "\r\n"));
      } else if (absl::StrContains(said, "KILL")) {
        ++num_ended;
        ScriptedServer::Say(fd, ":1\r\n");
      } else if (answers) {
        ScriptedServer::Say(fd, "+OK\r\n");
      } else {
        ++num_unanswered;
      }
    }
  });
  const std::string late = absl::StrCat("redis 127.0.0.1:", server.port(), ": no answer in time");
  for (const size_t bytes : {run.size() + 1, late.size() + 1}) {
    SCOPED_TRACE(bytes);
    const auto store = MakeStore({.port = server.port(), .connections = 1});
    const Bytes value = ValueOf(1, 1, 100);
    ASSERT_TRUE(IsOk(Put(*store, "a", value)));
    num_unanswered = num_ended = 0;
    answers = false;
    {
      const ScarceNew scarce(ScarceNew::Of::kThisThread, bytes);
      EXPECT_THROW((void)Put(*store, "a", value, DeadlineInMs(100)), std::bad_alloc);
    }
    answers = true;
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(IsOk(Put(*store, "a", value)));
      EXPECT_EQ(num_unanswered, bytes == late.size() + 1 ? 1 : 0);  // Else none was sent.
      EXPECT_EQ(num_ended, num_unanswered);                         // Once.
    }
  }
}

TEST(RedisStoreAgainst, AServerThatIsStillLoading) {
  const ScriptedServer server([](int fd, int) {
    while (const int commands = ScriptedServer::ReadCommands(fd)) {
      for (int i = 0; i < commands; ++i) {
        ScriptedServer::Say(fd, "-LOADING Redis is loading the dataset in memory\r\n");
      }
    }
  });
  auto store = MakeStore({.port = server.port()});
  EXPECT_TRUE(Fails(Get(*store, "a"), Code::kUnavailable, "LOADING"));
  EXPECT_TRUE(Fails(Put(*store, "a", ValueOf(1, 1, 10)), Code::kUnavailable, "LOADING"));
  store.reset();  // It has one connection at a time.
  // Nothing is wrong with what it is told first.
  store = MakeStore({.port = server.port(), .password = "secret", .database = 3});
  EXPECT_TRUE(Fails(Get(*store, "a"), Code::kUnavailable, "LOADING"));
}

// As one that begins to load in between. Without what it did not say the write could come after a
// later one, so it is not sent.
TEST(RedisStoreAgainst, AServerThatCannotSayWhatAWriteNeeds) {
  const std::string loading = "-LOADING Redis is loading the dataset in memory\r\n";
  for (const absl::string_view about : {"CLIENT\r\n$2\r\nID", "KILL"}) {
    SCOPED_TRACE(about);
    std::atomic<bool> loads = about != "KILL", answers = true;
    const ScriptedServer server([&](int fd, int) {
      char bytes[4096];
      for (ssize_t got = 0; (got = recv(fd, bytes, sizeof(bytes), 0)) > 0;) {
        const absl::string_view said(bytes, got);
        if (loads && absl::StrContains(said, about)) {
          for (int64_t i = std::ranges::count(said, '*'); i > 0; --i) {
            ScriptedServer::Say(fd, loading);
          }
        } else if (absl::StrContains(said, "INFO")) {
          ScriptedServer::Say(fd, ":7\r\n$10\r\nrun_id:abc\r\n");
        } else if (answers) {
          ScriptedServer::Say(fd, absl::StrContains(said, "KILL") ? ":1\r\n" : "+OK\r\n");
        }
      }
    });
    const auto store = MakeStore({.port = server.port(), .connections = 1});
    const Bytes value = ValueOf(1, 1, 100);
    if (!loads) {
      answers = false;
      EXPECT_TRUE(Fails(Put(*store, "a", value, DeadlineInMs(100)), Code::kDeadlineExceeded));
      loads = answers = true;
    }
    EXPECT_TRUE(Fails(Put(*store, "a", value), Code::kUnavailable, "LOADING"));
    EXPECT_EQ(store->stats().puts, 0);
    loads = false;
    EXPECT_TRUE(IsOk(Put(*store, "a", value)));
  }
}

}  // namespace
}  // namespace kvferry
