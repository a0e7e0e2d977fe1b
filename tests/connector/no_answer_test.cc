// Peers that are there, and from which no answer comes to a hello or to a connection for data: what
// was there when that was asked for has had its time at connect_timeout_ms, what came later has as
// much, and nothing counts as asked that could not leave.

#include <gtest/gtest.h>

#include <future>
#include <optional>

#include "connector/store/remote_store.h"
#include "tests/support/endpoints.h"
#include "tests/support/raw_peer.h"
#include "transport/control/codec.h"
#include "transport/tcp/tcp_socket.h"

namespace kvferry {
namespace {

using Code = absl::StatusCode;

constexpr int64_t kTimeoutMs = 1500;

// Says what it is told to say, and reads nothing of what comes to its data port.
class PeerByHand {
 public:
  struct Asked {
    std::string from;
    Message message;
  };

  const std::string& address() const { return peer_.address(); }
  // The next message of that type; before it come none but pings and goodbyes.
  template <typename Body>
  std::optional<Asked> Receive(Deadline deadline = Soon()) {
    while (const auto received = peer_.Receive(deadline)) {
      const auto& [from, message] = *received;
      if (std::holds_alternative<Body>(message.body)) return Asked{from, message};
      EXPECT_TRUE(std::holds_alternative<ByeMsg>(message.body) ||
                  std::holds_alternative<PingMsg>(message.body))
          << message.body.index();
    }
    return std::nullopt;
  }
  // session 0: it takes no messages over the network.
  void Welcome(const Asked& hello, uint64_t session) {
    WelcomeMsg welcome{"by hand", {}};
    welcome.data.session = session;
    welcome.data.tcp = {1, "127.0.0.1", Must(PortOf(door_)), std::string(16, 't'),
                        std::string(16, 'a')};
    Say(hello, welcome);
  }
  void Say(const Asked& to, const MessageBody& body) {
    peer_.SendBytes(to.from, EncodeMessage({5, to.message.from_epoch, body}));
  }
  // The next connection for data, which nobody has said anything over.
  void CloseNextLink() {
    UniqueFd link;
    EXPECT_TRUE(WaitFor([&] { return (link = AcceptTcp(door_)).valid(); }, Soon()));
  }

 private:
  RawPrefill peer_;
  const UniqueFd door_ = Must(ListenTcp("127.0.0.1", 0));
};

class NoAnswer : public testing::Test {
 protected:
  void SetUp() override {
    if (PathUnderTest() == TestPath::kUcx || PathUnderTest() == TestPath::kDirect) {
      GTEST_SKIP() << "the network is UCX's here";
    }
  }
  static Config MakeConfig() {
    Config config = SmallChunks();
    config.same_host_path = "network";
    config.key_file.clear();
    config.connect_timeout_ms = kTimeoutMs;
    config.heartbeat_interval_ms = 200000;  // But for the first ping.
    config.heartbeat_timeout_ms = 600000;
    return config;
  }
  auto BeginFetch(PeerByHand& peer) {
    return Fetch(*decode_, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  }
  auto BeginPush(PeerByHand& peer) {
    return Push(*prefill_, ReceiveTicket{peer.address(), 5, 6, 1, 16}, *pool_, {0});
  }
  // When a third of the time of what has begun at `begin` is over.
  static void Await(Deadline begin) {
    const Deadline until = begin + std::chrono::milliseconds(kTimeoutMs / 3);
    ASSERT_TRUE(WaitFor([&] { return Clock::now() > until; }, Soon()));
  }
  // The first one is told `why` when its time is over; a later one is asked over the next session.
  template <typename Body, typename Begin, typename Answer>
  void ExpectLaterOneGetsThrough(absl::string_view why, const Begin& begin, const Answer& answer) {
    PeerByHand peer;
    const Deadline began = Clock::now();
    const auto first = begin(peer);
    const auto hello = peer.Receive<HelloMsg>();
    ASSERT_TRUE(hello.has_value());
    answer(peer, *hello);
    Await(began);
    const auto later = begin(peer);
    EXPECT_TRUE(Fails(first->Wait(Soon()), Code::kUnavailable, why));
    const auto again = peer.Receive<HelloMsg>();
    ASSERT_TRUE(again.has_value());
    EXPECT_FALSE(later->done());
    peer.Welcome(*again, 0);
    const auto asked = peer.Receive<Body>();
    ASSERT_TRUE(asked.has_value());
    peer.Say(*asked, RefuseMsg{0, absl::DataLossError("by hand")});
    EXPECT_TRUE(Fails(later->Wait(Soon()), Code::kDataLoss, "by hand"));
  }
  // Nor does it begin anew for ever.
  template <typename Begin, typename Answer>
  void ExpectLaterOneFailsInItsTime(absl::string_view why, const Begin& begin,
                                    const Answer& answer) {
    PeerByHand peer;
    const Deadline began = Clock::now();
    const auto first = begin(peer);
    std::optional<decltype(begin(peer))> later;
    for (int session = 0; session < 2; ++session) {
      const auto hello = peer.Receive<HelloMsg>();
      ASSERT_TRUE(hello.has_value());
      answer(peer, *hello);
      if (later.has_value()) continue;
      Await(began);
      later = begin(peer);
    }
    EXPECT_TRUE(Fails(first->Wait(Soon()), Code::kUnavailable, why));
    EXPECT_TRUE(Fails((*later)->Wait(Soon()), Code::kUnavailable, why));
    EXPECT_FALSE(peer.Receive<HelloMsg>(DeadlineInMs(100)).has_value());
  }

  const std::shared_ptr<KvPool> pool_ = MakePatternPool(SmallLayout(), 8, 3);
  const std::unique_ptr<DecodeEndpoint> decode_ = MakeDecode(pool_, MakeConfig());
  const std::unique_ptr<PrefillEndpoint> prefill_ = MakePrefill(pool_, MakeConfig());
};

constexpr char kNoWelcome[] = "no answer to the hello from";
constexpr char kNoLink[] = "no connection for data to";

void SayNothing(PeerByHand&, const PeerByHand::Asked&) {}
// And let nobody in.
void SayWelcome(PeerByHand& peer, const PeerByHand::Asked& hello) { peer.Welcome(hello, 9); }

TEST_F(NoAnswer, ToAHelloSaysNothingOfLaterRequests) {
  ExpectLaterOneGetsThrough<FetchMsg>(
      kNoWelcome, [&](PeerByHand& peer) { return BeginFetch(peer); }, SayNothing);
  ExpectLaterOneGetsThrough<CallMsg>(
      kNoWelcome, [&](PeerByHand& peer) { return BeginPush(peer); }, SayNothing);
}

TEST_F(NoAnswer, ToAConnectionForDataSaysNothingOfLaterRequests) {
  ExpectLaterOneGetsThrough<FetchMsg>(
      kNoLink, [&](PeerByHand& peer) { return BeginFetch(peer); }, SayWelcome);
  ExpectLaterOneGetsThrough<CallMsg>(
      kNoLink, [&](PeerByHand& peer) { return BeginPush(peer); }, SayWelcome);
}

TEST_F(NoAnswer, ToAnythingIsWaitedForTwiceAtMost) {
  ExpectLaterOneFailsInItsTime(
      kNoWelcome, [&](PeerByHand& peer) { return BeginFetch(peer); }, SayNothing);
  ExpectLaterOneFailsInItsTime(
      kNoLink, [&](PeerByHand& peer) { return BeginPush(peer); }, SayWelcome);
}

// What a connection that never opens was to carry has been asked of nobody: it is tried again, and
// not said to have been carried out, perhaps.
TEST_F(NoAnswer, ToAConnectionForDataMeansThatNothingWasAsked) {
  PeerByHand peer;
  const auto store =
      Must(RemoteStore::Create({{MakeConfig(), kTestModel, "client"}, peer.address(), pool_}));
  auto pinned = std::async(std::launch::async, [&] { return store->Pin("key", Soon()); });
  for (int session = 0; session < 3; ++session) {
    const auto hello = peer.Receive<HelloMsg>();
    ASSERT_TRUE(hello.has_value());
    peer.Welcome(*hello, 9);
    peer.CloseNextLink();
  }
  const absl::Status status = pinned.get();
  EXPECT_TRUE(Fails(status, Code::kUnavailable, "store at ", "tcp: the connection to"));
  EXPECT_EQ(status.message().find("carried out"), std::string::npos) << status;
}

}  // namespace
}  // namespace kvferry
