// Sessions that peers give up, begin anew or leave silent, and what is asked over them.

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <optional>
#include <vector>

#include "tests/connector/unmapped_peers.h"
#include "tests/support/captured_log.h"
#include "tests/support/endpoints.h"
#include "tests/support/files.h"
#include "tests/support/raw_peer.h"
#include "tests/support/wait_for.h"
#include "transport/control/codec.h"
#include "transport/node.h"

namespace kvferry {
namespace {

// It would be dialled until the deadline, as fast as it answers.
TEST_F(HelloToOthersOverTcp, APeerThatForgetsEachSessionAtOnceIsGivenUp) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), config);
  MapsNothing peer;
  const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  int hellos = 0;
  while (!fetch->done() && hellos < 50) {
    peer.Welcome(5);
    ++hellos;
    const auto asked = peer.Receive();
    ASSERT_TRUE(std::holds_alternative<FetchMsg>(asked->second.body));
    peer.Say(asked->first, asked->second.from_epoch, 5,
             RefuseMsg{0, absl::NotFoundError("forgotten")});
    WaitFor([&] { return fetch->done(); }, DeadlineInMs(hellos < 6 ? 0 : 5000));
  }
  EXPECT_EQ(hellos, 6);
  EXPECT_TRUE(Fails(fetch->Wait(Soon()), absl::StatusCode::kNotFound, "forgotten"));
}

// Which may be the network's doing, however short the time is that is given for it.
TEST_F(HelloToOthersOverTcp, APeerThatIsSilentInEachSessionIsNotGivenUp) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  config.heartbeat_interval_ms = 50;
  config.heartbeat_timeout_ms = 500;
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), config);
  MapsNothing peer;
  const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  for (int session = 0; session < 5; ++session) {
    peer.Welcome(5);
    const auto asked = peer.Receive();
    ASSERT_TRUE(asked.has_value() && std::holds_alternative<FetchMsg>(asked->second.body));
    // And that this side has given the session up.
    const auto refused = peer.Receive();
    ASSERT_TRUE(refused.has_value() && std::holds_alternative<RefuseMsg>(refused->second.body));
    EXPECT_FALSE(fetch->done());
  }
}

// The side that is dialled sends no pings of its own: it hears as many as it needs, whatever the
// other would do by itself.
TEST_F(HelloToOthersOverTcp, APeerIsPingedAsOftenAsItHasToBe) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  config.heartbeat_interval_ms = 200000;  // But for the first ping.
  config.heartbeat_timeout_ms = 600000;
  for (const int64_t silence_ms : {1, 100, 300000}) {
    const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), config);
    MapsNothing peer;
    peer.silence_ms = silence_ms;
    peer.pongs_as = 5;
    const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
    const Deadline began = Clock::now();
    peer.Welcome(5);
    while (peer.pings < 4 && Clock::now() < began + std::chrono::milliseconds(1000)) {
      peer.HearOne(DeadlineInMs(20));
    }
    if (silence_ms <= 100) {
      EXPECT_EQ(peer.pings, 4) << silence_ms;
      // 10 ms apart at least, and 50 where that is half.
      EXPECT_GE(Clock::now() - began, std::chrono::milliseconds(silence_ms == 1 ? 20 : 140));
    } else {
      EXPECT_LE(peer.pings, 1);
    }
  }
}

TEST_F(HelloFromOthersOverTcp, ANodeSaysHowMuchSilenceItBears) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  config.heartbeat_timeout_ms = 12345;
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 1), config);
  RawDecode peer(prefill->address());
  peer.Send({42, 0, HelloMsg{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}}});
  const auto answer = peer.Receive(Soon());
  ASSERT_TRUE(answer.has_value());
  const auto* welcome = std::get_if<WelcomeMsg>(&answer->body);
  ASSERT_NE(welcome, nullptr);
  EXPECT_EQ(welcome->silence_ms, 12345);
}

// Releases of a while said so of what they had fetched over an earlier session.
TEST_F(HelloFromOthersOverTcp, WhatIsSaidInTheHopeOfAWelcomeEndsNoSession) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 1), config);
  RawDecode peer(prefill->address());
  peer.Send({42, 0, HelloMsg{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}}});
  peer.Send({42, 0, CancelMsg{9, "enough"}});
  const auto welcome = peer.Receive(Soon());
  ASSERT_TRUE(welcome.has_value() && std::holds_alternative<WelcomeMsg>(welcome->body));
  peer.Send({42, welcome->from_epoch, PingMsg{}});
  const auto pong = peer.Receive(Soon());
  ASSERT_TRUE(pong.has_value() && std::holds_alternative<PongMsg>(pong->body));
  EXPECT_EQ(Metric(*prefill, "messages_stale"), 1);
}

// Or was said by the one that was there before, and is heard only now.
TEST_F(HelloFromOthersOverTcp, WhatAnotherProcessSaysIsNotOfTheSession) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 1), config);
  RawDecode peer(prefill->address());
  peer.Send({42, 0, HelloMsg{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}}});
  const auto welcome = peer.Receive(Soon());
  ASSERT_TRUE(welcome.has_value() && std::holds_alternative<WelcomeMsg>(welcome->body));
  peer.Send({43, welcome->from_epoch, PingMsg{}});
  const auto refused = peer.Receive(Soon());
  ASSERT_TRUE(refused.has_value() && std::holds_alternative<RefuseMsg>(refused->body));
  EXPECT_TRUE(Fails(std::get<RefuseMsg>(refused->body).status, absl::StatusCode::kNotFound,
                    "no session with that epoch"));
}

TEST_F(HelloFromOthersOverTcp, ASecondHelloEndsTheSessionOfTheFirst) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 1), config);
  RawDecode peer(prefill->address());
  for (const int64_t lost : {0, 1, 2}) {
    peer.Send({42, 0, HelloMsg{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}}});
    const auto welcome = peer.Receive(Soon());
    ASSERT_TRUE(welcome.has_value() && std::holds_alternative<WelcomeMsg>(welcome->body));
    EXPECT_EQ(Metric(*prefill, "peers_lost"), lost);
    EXPECT_EQ(Metric(*prefill, "peers"), 1);
  }
}

// A peer whose call has begun a fetch when the peer begins its session anew.
class HelloAgainAfterACall : public HelloFromOthersOverTcp {
 protected:
  struct Handler : CallHandler {
    void OnCall(const CallKey& call, const std::string&, const Fields&, Deadline) override {
      caller.set_value(call.peer);
    }
    void OnCallDropped(const CallKey&) override {}
    std::promise<PeerKey> caller;
  };
  static Config MakeConfig() {
    Config config = SmallChunks();
    config.same_host_path = "auto";
    config.connect_timeout_ms = 1000;
    return config;
  }
  // The peer's second session has begun, and is a while in coming; `lanes` over TCP it offers then.
  std::shared_ptr<FetchHandle> FetchWhileItBeginsAnew(int64_t lanes) {
    HelloMsg hello{"", kTestModel, SmallLayout(), {}};
    hello.data.tcp.lanes = 1;
    peer_.Send({42, 0, hello});
    EXPECT_TRUE(peer_.Receive(Soon()).has_value());
    peer_.Send({42, node_->epoch(), CallMsg{5, "f", 60000, {}}});
    Node::FetchRequest fetch;
    fetch.peer = handler_.caller.get_future().get();
    hello.data.local = memory_.local();
    hello.data.tcp.lanes = lanes;
    peer_.Send({42, 0, hello});
    memory_.Answer(Takes::kSaysNothing);
    const PageRun one{0, 1};
    fetch.ticket.lease_id = 9;
    fetch.ticket.num_pages = 1;
    fetch.positions = fetch.pages = Must(PageRuns::FromRuns({&one, 1}));
    fetch.deadline = DeadlineInMs(60000);
    return Must(node_->Fetch(std::move(fetch)));
  }

  Handler handler_;
  const std::shared_ptr<KvPool> pool_ = MakePatternPool(SmallLayout(), 8, 1);
  const std::unique_ptr<Node> node_ =
      Must(Node::Start({MakeConfig(), kTestModel, "keeper", pool_, nullptr, &handler_, true}));
  UnmappedMemory memory_;
  RawDecode peer_{node_->listen_address()};
};

// Nobody else would end it before its deadline.
TEST_F(HelloAgainAfterACall, WhatIsFetchedEndsWithASessionThatIsNotToBe) {
  const auto handle = FetchWhileItBeginsAnew(/*lanes=*/0);
  const auto answer = peer_.Receive(Soon());
  ASSERT_TRUE(answer.has_value() && std::holds_alternative<RefuseMsg>(answer->body));
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kFailedPrecondition,
                    "the peer over shared memory"));
}

// What a peer's call has begun is asked of that peer's next session, if that has begun already.
TEST_F(HelloAgainAfterACall, WhatIsFetchedIsAskedThen) {
  const auto handle = FetchWhileItBeginsAnew(/*lanes=*/1);
  const auto welcome = peer_.Receive(Soon());
  ASSERT_TRUE(welcome.has_value() && std::holds_alternative<WelcomeMsg>(welcome->body));
  const auto asked = peer_.Receive(Soon());
  ASSERT_TRUE(asked.has_value() && std::holds_alternative<FetchMsg>(asked->body));
  EXPECT_EQ(std::get<FetchMsg>(asked->body).lease_id, 9u);
  peer_.Send(
      {42, node_->epoch(),
       RefuseMsg{std::get<FetchMsg>(asked->body).transfer_id, absl::DataLossError("by hand")}});
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kDataLoss, "a peer without a name"));
}

// It may have been thought dead, and goes on over another session.
TEST_F(HelloFromOthersOverTcp, APeerThatHasGivenItsSessionUpTakesNoPlace) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  config.connect_timeout_ms = config.heartbeat_timeout_ms = 600000;
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 1), config);
  RawDecode peer(prefill->address());
  HelloMsg hello{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}};
  peer.Send({42, 0, hello});
  const auto welcome = peer.Receive(Soon());
  ASSERT_TRUE(welcome.has_value() && std::holds_alternative<WelcomeMsg>(welcome->body));
  EXPECT_EQ(Metric(*prefill, "peers"), 1);
  peer.Send({42, welcome->from_epoch, RefuseMsg{0, absl::NotFoundError("given up")}});
  EXPECT_TRUE(WaitFor([&] { return Metric(*prefill, "peers") == 0; }, Soon()));
}

// This side only answers pings, and has sent none.
TEST(HelloSessions, ASilentPeerThatDialledIsSaidToHaveSentNoPing) {
  const CapturedLog log;
  Config config = SmallChunks();
  config.heartbeat_interval_ms = 20;
  config.heartbeat_timeout_ms = 100;
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 1), config);
  RawDecode peer(prefill->address());
  peer.Send({42, 0, HelloMsg{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}}});
  EXPECT_TRUE(WaitFor(
      [&] {
        return log.Has({"'by hand' was silent", "(100)", "none of its pings came"});
      },
      Soon()));
}

// The end of the session that it has given up may be heard of later than that of the next one's
// beginning.
TEST_F(HelloFromOthersOverTcp, APeerThatBeginsAnewTakesOnePlace) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  config.connect_timeout_ms = config.heartbeat_timeout_ms = 600000;
  config.max_peers = 2;
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 1), config);
  std::vector<std::unique_ptr<RawDecode>> peers;
  const auto is_taken = [&](uint64_t epoch) {
    peers.push_back(std::make_unique<RawDecode>(prefill->address()));
    peers.back()->Send(
        {epoch, 0, HelloMsg{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}}});
    const auto answer = peers.back()->Receive(Soon());
    return answer.has_value() && std::holds_alternative<WelcomeMsg>(answer->body);
  };
  for (const uint64_t epoch : {42, 43, 42, 43}) EXPECT_TRUE(is_taken(epoch)) << epoch;
  EXPECT_FALSE(is_taken(44));
  EXPECT_FALSE(is_taken(42));  // Nor as often as it likes.
}

// Its pings are answered. While it takes something now and then the session goes on; when what it
// is sent is not read any more, what it has been asked ends, and what waits for room goes to
// another session.
TEST_F(HelloToOthersOverTcp, APeerThatTakesNoMoreMessagesIsGivenUp) {
  Config config = SmallChunks();
  config.same_host_path = "auto";
  config.heartbeat_interval_ms = 50;
  config.heartbeat_timeout_ms = 3000;  // Far more than this test's thread may have to wait.
  const auto pool = MakePatternPool(SmallLayout(), 8, 3);
  const auto node = Must(Node::Start({config, kTestModel, "asks", pool}));
  MapsNothing peer;
  peer.pongs_as = 5;
  std::vector<std::future<absl::StatusOr<Fields>>> replies;
  for (int i = 0; i < 12; ++i) {
    replies.push_back(BeginCall(*node, peer.address(), "f",
                                Fields().Set("x", std::string(1500000, 'x')),
                                DeadlineInMs(600000)));
  }
  peer.Welcome(5, Takes::kAndReadsNothing);
  for (const Deadline longer = DeadlineInMs(3500); Clock::now() < longer;) {
    peer.AnswerPings(DeadlineInMs(200));
    peer.ReadSome();
  }
  EXPECT_EQ(Metric(*node, "peers_lost"), 0);
  const auto refused = peer.Receive();
  ASSERT_TRUE(refused.has_value() && std::holds_alternative<RefuseMsg>(refused->second.body));
  const absl::Status ended = replies[0].get().status();
  EXPECT_TRUE(Fails(ended, absl::StatusCode::kUnavailable, "took nothing for heartbeat_timeout_ms",
                    "bytes of messages wait"));
  EXPECT_EQ(CutOffOf(ended), CutOff::kAsked);
  peer.Welcome(5, Takes::kAndReadsNothing);
  EXPECT_EQ(replies[11].wait_for(std::chrono::seconds(0)), std::future_status::timeout);
}

// The session that a stale ticket opens is one too many from its welcome on: were it linked first,
// it would be taken for the good one meanwhile, as that would for a newer one when it is linked at
// last.
TEST_F(HelloToOthersOverTcp, AStaleTicketsSessionIsNeverLinked) {
  MapsNothing peer;
  Config config = SmallChunks();
  config.same_host_path = "auto";
  config.connect_timeout_ms = config.heartbeat_timeout_ms = 600000;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, config);
  const auto good = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  peer.Welcome(5, Takes::kSaysNothing);  // Being linked, and for long.
  const auto stale = Fetch(*decode, Ticket{peer.address(), 4, 6, 1, 16}, {1});
  peer.Welcome(5, std::nullopt);
  EXPECT_TRUE(Fails(stale->Wait(Soon()), absl::StatusCode::kNotFound, peer.address(),
                    "has restarted since it gave out the ticket", "prefilled, or received, anew"));
  EXPECT_EQ(Metric(*decode, "peers"), 1);
  const auto more = Fetch(*decode, Ticket{peer.address(), 5, 7, 1, 16}, {2});
  EXPECT_FALSE(more->done() || good->done());
  // A new process shows that the first session is a ghost.
  const auto newer = Fetch(*decode, Ticket{peer.address(), 8, 6, 1, 16}, {3});
  peer.Welcome(8, Takes::kSaysNothing);
  peer.ExpectByes(1);
  for (const auto& handle : {good, more}) {
    EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kUnavailable,
                      "another process has taken its address"));
  }
  EXPECT_FALSE(newer->done());
}

// Who is not reached for data takes no place at a peer that has accepted it, and sees nothing of
// it. Pings that were answered say nothing of how a path is.
TEST_F(HelloToOthersOverTcp, APeerWhoseDataConnectionEndsIsToldSo) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  config.heartbeat_interval_ms = 500;
  config.heartbeat_timeout_ms = 10000;
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), config);
  MapsNothing peer;
  peer.session = 9;
  peer.pongs_as = 5;
  const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  peer.Welcome(5);
  while (peer.pings < 2 && !HasFailure()) peer.AnswerPings(DeadlineInMs(100));
  peer.CloseNextLink();
  EXPECT_TRUE(Fails(fetch->Wait(Soon()), absl::StatusCode::kUnavailable));
  const auto next = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  peer.Welcome(5);
  peer.ExpectByes(1);
}

TEST_F(HelloToOthersOverTcp, SessionsThatHaveEndedLeaveNoFilesOpen) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), config);
  const auto session = [&] {
    MapsNothing peer;
    const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
    peer.Welcome(5);
    const auto asked = peer.Receive();
    ASSERT_TRUE(asked.has_value());
    peer.Say(asked->first, asked->second.from_epoch, 5, ByeMsg{});
    EXPECT_TRUE(Fails(fetch->Wait(Soon()), absl::StatusCode::kUnavailable, "has closed"));
  };
  session();
  const int64_t before = OpenFiles();
  for (int i = 0; i < 10; ++i) session();
  EXPECT_TRUE(WaitFor([&] { return OpenFiles() <= before; }, Soon()))
      << OpenFiles() << " instead of " << before;
}

TEST_F(HelloToOthersOverTcp, SoIsOneThatOffersNoWayToIt) {
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), SmallChunks());
  RawPrefill peer;
  const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  const auto hello = peer.Receive(Soon());
  ASSERT_TRUE(hello.has_value());
  peer.SendBytes(hello->first, EncodeMessage({5, hello->second.from_epoch, WelcomeMsg{"p", {}}}));
  EXPECT_FALSE(fetch->Wait(Soon()).ok());
  const auto bye = peer.Receive(Soon());
  ASSERT_TRUE(bye.has_value());
  EXPECT_TRUE(std::holds_alternative<ByeMsg>(bye->second.body));
}

// Whatever a peer says that it has.
TEST_F(HelloToOthersOverTcp, APeersLanesAreAsManyAsThisSideHas) {
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), SmallChunks());
  RawPrefill peer;
  const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  const auto hello = peer.Receive(Soon());
  ASSERT_TRUE(hello.has_value());
  WelcomeMsg welcome{"p", {}};
  // Nobody listens there.
  welcome.data.tcp = {8, "127.0.0.1", 1, std::string(16, 't'), std::string(16, 'a')};
  peer.SendBytes(hello->first, EncodeMessage({5, hello->second.from_epoch, welcome}));
  EXPECT_TRUE(Fails(fetch->Wait(Soon()), absl::StatusCode::kUnavailable));
}

// Fetches that go on may find a hello that a stale ticket has said long before, and nobody has
// answered.
TEST_F(HelloToOthersOverTcp, WhatGoesOnHasTheTimeOfANewSession) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  config.connect_timeout_ms = 1600;
  config.heartbeat_interval_ms = 200;
  config.heartbeat_timeout_ms = 1000;
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), config);
  MapsNothing peer;
  const Deadline begin = Clock::now();
  const auto good = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  peer.Welcome(5);
  ASSERT_TRUE(std::holds_alternative<FetchMsg>(peer.Receive()->second.body));
  const auto stale = Fetch(*decode, Ticket{peer.address(), 4, 6, 1, 16}, {1});
  const auto hello = peer.Receive();  // It has no answer.
  ASSERT_TRUE(std::holds_alternative<HelloMsg>(hello->second.body));
  ASSERT_TRUE(WaitFor([&] { return Metric(*decode, "fetches_restarted") == 1; }, Soon()));
  ASSERT_TRUE(
      WaitFor([&] { return Clock::now() > begin + std::chrono::milliseconds(1800); }, Soon()));
  EXPECT_FALSE(good->done()) << good->status();
  EXPECT_TRUE(
      Fails(good->Wait(Soon()), absl::StatusCode::kUnavailable, "within connect_timeout_ms"));
}

}  // namespace
}  // namespace kvferry
