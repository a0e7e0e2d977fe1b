// Hellos that nobody answers, or that are lost with their connection.

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <optional>
#include <set>

#include "tests/support/endpoints.h"
#include "tests/support/raw_peer.h"
#include "transport/control/codec.h"

namespace kvferry {
namespace {

TEST(HelloToOthers, NoAnswerEndsAtTheConnectTimeout) {
  RawPrefill prefill;  // Takes the hello and says nothing.
  Config config = SmallChunks();
  config.connect_timeout_ms = 150;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, config);
  const auto handle = Fetch(*decode, Ticket{prefill.address(), 5, 6, 1, 16}, {0});
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kUnavailable,
                    "connect_timeout_ms (150)", prefill.address(), "is an endpoint of kvferry's",
                    "listen_port"));
}

TEST(HelloToOthers, APeerThatEndsBeforeItAnswersIsNotWaitedFor) {
  std::optional<RawPrefill> prefill(std::in_place);
  Config config = SmallChunks();
  config.connect_timeout_ms = 600000;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, config);
  const auto handle = Fetch(*decode, Ticket{prefill->address(), 5, 6, 1, 16}, {0});
  ASSERT_TRUE(prefill->Receive(Soon()).has_value());
  prefill.reset();
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kUnavailable, "cannot connect to"));
}

// Those of this process to whoever listens at the address; how many there were.
int BreakConnectionsTo(const std::string& address) {
  const int port = PortOf(address);
  int broken = 0;
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_in6 peer{};  // Of which an IPv4 address has its port at the same place.
    socklen_t bytes = sizeof(peer);
    const bool there = getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0 &&
                       (peer.sin6_family == AF_INET || peer.sin6_family == AF_INET6) &&
                       ntohs(peer.sin6_port) == port;
    if (there && shutdown(fd, SHUT_RDWR) == 0) ++broken;
  }
  return broken;
}

// One broken connection, or the peer's quick restart at its address: both sides are well.
TEST(HelloToOthers, AHelloThatIsLostWithItsConnectionIsSaidAgain) {
  Config config = SmallChunks();
  config.connect_timeout_ms = 600000;
  const auto pool = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(pool, config);
  const auto prefill = MakePrefill(pool, config);
  const auto expect_hellos = [](RawPrefill& peer, const auto& handle) {
    std::set<uint64_t> names;
    for (int i = 0; i < 4; ++i) {
      const auto hello = peer.Receive(Soon());
      ASSERT_TRUE(hello.has_value());
      ASSERT_TRUE(std::holds_alternative<HelloMsg>(hello->second.body));
      EXPECT_TRUE(names.insert(std::get<HelloMsg>(hello->second.body).data.session).second);
      EXPECT_FALSE(handle->done());
      if (i < 3) {
        EXPECT_GT(BreakConnectionsTo(peer.address()), 0);
      } else {
        peer.SendBytes(hello->first, EncodeMessage({5, 0, RefuseMsg{0, absl::DataLossError("x")}}));
      }
    }
    EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kDataLoss, "refused by"));
  };
  RawPrefill pulled;
  expect_hellos(pulled, Fetch(*decode, Ticket{pulled.address(), 5, 6, 1, 16}, {0}));
  RawPrefill pushed;
  expect_hellos(pushed, Push(*prefill, ReceiveTicket{pushed.address(), 5, 6, 1, 16}, *pool, {0}));
}

TEST(HelloToOthers, ConnectionsThatBreakAtEachHelloAreNotMadeForEver) {
  RawPrefill peer;
  Config config = SmallChunks();
  config.connect_timeout_ms = 2000;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, config);
  const auto handle = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  int hellos = 0;
  while (!handle->done() && hellos < 100) {
    if (!peer.Receive(DeadlineInMs(20)).has_value()) continue;
    ++hellos;
    // The time may be over as the last one is heard.
    if (BreakConnectionsTo(peer.address()) == 0) break;
  }
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kUnavailable,
                    "within connect_timeout_ms (2000)", peer.address()));
  EXPECT_GT(hellos, 1);
  EXPECT_LT(hellos, 60);  // ZeroMQ waits for 50 ms at least.
}

// A fetch without an epoch waits for a process that gave something out, as one with an epoch does.
TEST(HelloToOthers, AnEarlyFetchWaitsForNobodyWhoIsStillToCome) {
  Config config = SmallChunks();
  config.connect_timeout_ms = 600000;
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), config);
  const std::string nobody = RawPrefill().address();
  for (const uint64_t epoch : {0, 5, 0}) {
    EXPECT_TRUE(Fails(Fetch(*decode, Ticket{nobody, epoch, 6, 1, 16}, {0})->Wait(Soon()),
                      absl::StatusCode::kUnavailable, "tried 3 times"));
    EXPECT_EQ(Metric(*decode, "peers"), 0);
  }
}

// A welcome that is meant for another process at the same address is none.
TEST(HelloToOthers, WelcomeForAnotherEpochIsStale) {
  RawPrefill prefill;
  Config config = SmallChunks();
  config.connect_timeout_ms = 2000;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, config);
  const auto handle = Fetch(*decode, Ticket{prefill.address(), 5, 6, 1, 16}, {0});
  const auto hello = prefill.Receive(Soon());
  ASSERT_TRUE(hello.has_value());
  const Message welcome{5, hello->second.from_epoch ^ 1, WelcomeMsg{"other", {"address"}}};
  prefill.SendBytes(hello->first, EncodeMessage(welcome));
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kUnavailable, "connect_timeout_ms"));
  EXPECT_EQ(Metric(*decode, "messages_stale"), 1);
}

}  // namespace
}  // namespace kvferry
