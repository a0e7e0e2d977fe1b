// Bytes from strangers on the control plane: refused, with peer and reason logged, while the
// endpoint goes on serving good peers.

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <random>
#include <thread>

#include "tests/support/captured_log.h"
#include "tests/support/endpoints.h"
#include "tests/support/raw_peer.h"
#include "transport/control/codec.h"
#include "transport/tcp/tcp_frames.h"
#include "transport/tcp/tcp_socket.h"

namespace kvferry {
namespace {

// Lane 0 of a session over TCP.
class LinkByHand {
 public:
  explicit LinkByHand(const TcpAddress& peer) : socket_(Must(DialTcp(peer.host, peer.port))) {
    const std::string hello = TcpHello::With(peer.token, 0).Bytes();
    Send(hello.data(), hello.size());
    TcpHello answer;
    Receive(&answer, sizeof(answer));
    EXPECT_EQ(answer.Bytes(), TcpHello::With(peer.answer, 0).Bytes());
  }
  void Say(const TcpFrame& frame, const std::string& payload) {
    Send(&frame, sizeof(frame));
    Send(payload.data(), payload.size());
  }
  void Close() { socket_ = UniqueFd(); }
  std::pair<TcpFrame, std::string> Hear() {
    TcpFrame frame;
    Receive(&frame, sizeof(frame));
    std::string payload(frame.payload_bytes, '\0');
    Receive(payload.data(), payload.size());
    return {frame, payload};
  }

 private:
  void Await(int16_t events) {
    pollfd fd{socket_.get(), events, 0};
    ASSERT_EQ(poll(&fd, 1, 10000), 1);
  }
  void Send(const void* bytes, size_t size) {
    Await(POLLOUT);
    ASSERT_EQ(send(socket_.get(), bytes, size, MSG_NOSIGNAL), static_cast<ssize_t>(size));
  }
  void Receive(void* bytes, size_t size) {
    for (size_t got = 0; got < size;) {
      Await(POLLIN);
      const ssize_t more = recv(socket_.get(), static_cast<char*>(bytes) + got, size - got, 0);
      ASSERT_GT(more, 0);
      got += static_cast<size_t>(more);
    }
  }

  UniqueFd socket_;
};

class Malformed : public testing::Test {
 protected:
  void ExpectServing() {
    const auto target = MakePatternPool(SmallLayout(), 8, 3);
    const auto decode = MakeDecode(target, SmallChunks());
    ASSERT_TRUE(IsOk(Fetch(*decode, Publish(*prefill_, *source_, {1, 7}), {5, 0})->Wait(Soon())));
    EXPECT_TRUE(
        HoldsExactly(*target, 3, std::vector<int64_t>{5, 0}, 1, std::vector<int64_t>{1, 7}));
  }
  bool CountsMalformed(int64_t count) {
    return WaitFor([&] { return Metric(*prefill_, "messages_malformed") == count; }, Soon());
  }
  // A session by hand: a hello with the UCX address of a real endpoint.
  void Greet(RawDecode& peer) {
    worker_ = MakeDecode(source_, SmallChunks());
    RawPrefill tap;  // Learns the worker's address from the hello of a real decode endpoint.
    const auto probe = Fetch(*worker_, Ticket{tap.address(), 5, 6, 1, 16}, {0});
    auto heard = tap.Receive(Soon());
    ASSERT_TRUE(heard.has_value());
    HelloMsg hello = std::get<HelloMsg>(heard->second.body);
    hello.data.session = 0;  // Answers are to come here.
    peer.Send({kEpoch, 0, hello});
    const std::optional<Message> answer = peer.Receive(Soon());
    ASSERT_TRUE(answer.has_value());
    ASSERT_TRUE(std::holds_alternative<WelcomeMsg>(answer->body));
  }
  // What the prefill side answers to one fetch; only its refusal ends well here.
  absl::Status RefusalOf(RawDecode& peer, const FetchMsg& fetch) {
    peer.Send({kEpoch, prefill_->epoch(), fetch});
    while (const std::optional<Message> answer = peer.Receive(Soon())) {
      if (const auto* refuse = std::get_if<RefuseMsg>(&answer->body)) {
        EXPECT_EQ(refuse->transfer_id, fetch.transfer_id);
        return refuse->status;
      }
    }
    return absl::UnknownError("no answer");
  }
  static FetchMsg FetchOf(uint64_t id, uint64_t lease, std::vector<PageRun> positions) {
    FetchMsg fetch;
    fetch.transfer_id = id;
    fetch.lease_id = lease;
    fetch.positions = Must(PageRuns::FromRuns(positions));
    fetch.timeout_ms = 1000;
    fetch.window_bytes = fetch.chunk_bytes = 4096;
    return fetch;
  }

  // As a peer that takes messages over a connection of its own; returns where that goes to.
  static DataAddresses GreetOverTcp(RawDecode& peer) {
    const DataAddresses data{"", "", {}, "", {1}, kSession};
    peer.Send({kEpoch, 0, HelloMsg{"by hand", kTestModel, SmallLayout(), data}});
    const std::optional<Message> answer = peer.Receive(Soon());
    const auto* welcome = answer ? std::get_if<WelcomeMsg>(&answer->body) : nullptr;
    EXPECT_NE(welcome, nullptr);
    return welcome == nullptr ? DataAddresses() : welcome->data;
  }

  static constexpr uint64_t kEpoch = 4242;
  static constexpr uint64_t kSession = 77;
  CapturedLog log_;
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 8, 1);
  std::unique_ptr<PrefillEndpoint> prefill_ = MakePrefill(source_, SmallChunks());
  std::unique_ptr<DecodeEndpoint> worker_;
};

TEST_F(Malformed, Garbage) {
  RawDecode peer(prefill_->address());
  std::mt19937_64 random(1);
  for (int i = 0; i < 200; ++i) {
    std::string bytes(random() % 300, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    peer.SendFrames({bytes});
  }
  EXPECT_TRUE(CountsMalformed(200));
  EXPECT_TRUE(log_.Has({"dropped a message from accepted:", "malformed message"}))
      << log_.ToString();
  EXPECT_LE(log_.lines().size(), 2 * 16u) << log_.ToString();
  ExpectServing();
}

TEST_F(Malformed, NotOneFrame) {
  RawDecode peer(prefill_->address());
  const std::string ping = EncodeMessage({kEpoch, prefill_->epoch(), PingMsg{}});
  peer.SendFrames({ping, ping});
  peer.SendFrames(std::vector<std::string>(1000, ping));
  peer.SendFrames({"", ping});
  EXPECT_TRUE(CountsMalformed(3));
  EXPECT_TRUE(log_.Has({"malformed message: not one frame"})) << log_.ToString();
  ExpectServing();
}

TEST_F(Malformed, ThreeMebibytes) {
  RawDecode peer(prefill_->address());
  peer.SendFrames({std::string(3 << 20, 'x')});  // ZeroMQ hangs up on it.
  ExpectServing();
}

TEST_F(Malformed, TwoMebibytesOfNils) {
  RawDecode peer(prefill_->address());
  // An array of 2^21 - 5 elements.
  peer.SendFrames(
      {std::string("\xdd\x00\x1f\xff\xfb", 5) + std::string(kMaxMessageBytes - 5, '\xc0')});
  EXPECT_TRUE(CountsMalformed(1));
  ExpectServing();
}

TEST_F(Malformed, HelloWithoutAKey) {
  const std::string hello =
      EncodeMessage({kEpoch, 0, HelloMsg{"n", kTestModel, SmallLayout(), {"address"}}});
  for (const std::string key : {"name", "model", "layout", "worker", "layers", "page_size", "dtype",
                                "format", "tensors", "heads", "dim"}) {
    // A key of the same length that nobody knows: the right one is missing then.
    std::string bytes = hello;
    const std::string coded = static_cast<char>(0xa0 + key.size()) + key;
    const size_t at = bytes.find(coded);
    ASSERT_NE(at, std::string::npos) << key;
    bytes.replace(at + 1, key.size(), std::string(key.size(), '_'));
    RawDecode peer(prefill_->address());
    peer.SendFrames({bytes});
    EXPECT_TRUE(WaitFor([&] { return log_.Has({"malformed message: no '" + key + "'"}); }, Soon()))
        << key << "\n"
        << log_.ToString();
    // Or its sender would wait for connect_timeout_ms, and not learn why.
    const std::optional<Message> answer = peer.Receive(Soon());
    const auto* refuse = answer ? std::get_if<RefuseMsg>(&answer->body) : nullptr;
    ASSERT_NE(refuse, nullptr) << key;
    EXPECT_EQ(refuse->transfer_id, 0u);
    EXPECT_TRUE(Fails(refuse->status, absl::StatusCode::kInvalidArgument, "no '" + key + "'"));
  }
  EXPECT_EQ(Metric(*prefill_, "peers"), 0);
  ExpectServing();
}

TEST_F(Malformed, EverythingFromAStrangerIsAnsweredWithARefusal) {
  const FetchMsg fetch = FetchOf(1, 2, {{0, 1}});
  for (const MessageBody& body :
       {MessageBody(fetch), MessageBody(DoneMsg{1, 2, 0}), MessageBody(CancelMsg{1, "x"}),
        MessageBody(PingMsg{}), MessageBody(ByeMsg{}), MessageBody(WelcomeMsg{"n", {"address"}}),
        MessageBody(AbortMsg{1, absl::AbortedError("x")})}) {
    RawDecode peer(prefill_->address());
    peer.Send({kEpoch, prefill_->epoch(), body});
    const std::optional<Message> answer = peer.Receive(Soon());
    ASSERT_TRUE(answer.has_value()) << "body " << body.index();
    const auto* refuse = std::get_if<RefuseMsg>(&answer->body);
    ASSERT_NE(refuse, nullptr);
    EXPECT_EQ(refuse->transfer_id, 0u);
    EXPECT_TRUE(absl::IsNotFound(refuse->status)) << refuse->status;
  }
  EXPECT_EQ(Metric(*prefill_, "peers"), 0);
  ExpectServing();
}

TEST_F(Malformed, WhatAPeerSaysEndsNoSession) {
  RawDecode peer(prefill_->address());
  GreetOverTcp(peer);
  peer.SendFrames({"garbage"});
  peer.Send({kEpoch, prefill_->epoch(), PingMsg{}});
  const std::optional<Message> answer = peer.Receive(Soon());
  ASSERT_TRUE(answer.has_value());
  EXPECT_TRUE(std::holds_alternative<PongMsg>(answer->body)) << answer->body.index();
  EXPECT_EQ(Metric(*prefill_, "messages_malformed"), 1);
  EXPECT_EQ(Metric(*prefill_, "peers"), 1);
}

// What comes over a data connection is looked at as what comes by ZeroMQ is.
TEST_F(Malformed, MessagesOverALink) {
  RawDecode peer(prefill_->address());
  const DataAddresses there = GreetOverTcp(peer);
  ASSERT_NE(there.session, 0u);
  LinkByHand link(there.tcp);
  const auto say = [&](uint64_t session, const std::string& bytes) {
    link.Say(TcpFrame::Of(kTcpMessage, MessageHeader{session}, bytes.size()), bytes);
  };
  const std::string fetch = EncodeMessage({kEpoch, prefill_->epoch(), FetchOf(9, 12345, {{0, 1}})});
  say(there.session + 1, fetch);  // Another peer's, perhaps.
  say(there.session, "garbage");
  say(there.session, EncodeMessage({kEpoch, prefill_->epoch() + 1, PingMsg{}}));
  EXPECT_TRUE(WaitFor([&] { return Metric(*prefill_, "messages_stale") == 2; }, Soon()));
  EXPECT_TRUE(CountsMalformed(1));
  say(there.session, fetch);
  const auto [frame, bytes] = link.Hear();
  EXPECT_EQ(frame.kind, kTcpMessage);
  EXPECT_EQ(frame.As<MessageHeader>().session, kSession);
  const Message refusal = Must(DecodeMessage(std::as_bytes(std::span(bytes))));
  EXPECT_TRUE(
      Fails(std::get<RefuseMsg>(refusal.body).status, absl::StatusCode::kNotFound, "lease"));
  ExpectServing();
}

// Nor is what came before a connection's end forgotten with it.
TEST_F(Malformed, DoneAndGone) {
  EndedLeases ended(prefill_.get());
  for (int i = 0; i < 20; ++i) {
    RawDecode peer(prefill_->address());
    const Ticket ticket = Publish(*prefill_, *source_, {1, 7});
    const DataAddresses there = GreetOverTcp(peer);
    LinkByHand link(there.tcp);
    const DoneMsg done{1, ticket.lease_id, 0};  // All of it was in its cache.
    const std::string bytes = EncodeMessage({kEpoch, prefill_->epoch(), done});
    link.Say(TcpFrame::Of(kTcpMessage, MessageHeader{there.session}, bytes.size()), bytes);
    link.Close();
    ASSERT_EQ(ended.Wait(ticket.lease_id), "fetched");
    ASSERT_TRUE(WaitFor([&] { return Metric(*prefill_, "peers") == 0; }, Soon()));
  }
}

// Hostile, but past the hello: positions and ids that do not exist.
TEST_F(Malformed, FetchesThatCannotBe) {
  RawDecode peer(prefill_->address());
  ASSERT_NO_FATAL_FAILURE(Greet(peer));
  const Ticket ticket = Publish(*prefill_, *source_, {4, 5, 6});
  const uint64_t lease = ticket.lease_id;
  EXPECT_TRUE(Fails(RefusalOf(peer, FetchOf(1, lease, {{0, 4}})), absl::StatusCode::kOutOfRange,
                    "3 pages"));
  EXPECT_TRUE(Fails(RefusalOf(peer, FetchOf(2, lease, {{3, 1}})), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(RefusalOf(peer, FetchOf(3, lease, {{PageRuns::kMaxPages - 1, 1}})),
                    absl::StatusCode::kOutOfRange));
  // The same position over and over: more pages than the lease has.
  EXPECT_TRUE(Fails(RefusalOf(peer, FetchOf(4, lease, {{0, 1}, {0, 1}, {0, 1}, {0, 1}})),
                    absl::StatusCode::kOutOfRange));
  FetchMsg longer = FetchOf(6, lease, {{0, 2}});
  longer.form.page_size = 48;
  EXPECT_TRUE(Fails(RefusalOf(peer, longer), absl::StatusCode::kOutOfRange, "which are 1 of 48"));
  // Nothing but the same tokens again, for as long as a number can say.
  FetchMsg endless = FetchOf(7, lease, {{0, 1}});
  endless.form = {65536, ValueOrder::kHnd};
  EXPECT_TRUE(Fails(RefusalOf(peer, endless), absl::StatusCode::kInvalidArgument,
                    "of a pool that has room for 128"));
  FetchMsg empty = FetchOf(5, lease, {});
  EXPECT_TRUE(Fails(RefusalOf(peer, empty), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(log_.Has({"refused a fetch", "3 pages"})) << log_.ToString();
  // None of it ended the lease or the session.
  EXPECT_EQ(prefill_->num_live_leases(), 1);
  EXPECT_EQ(Metric(*prefill_, "peers"), 1);
  ExpectServing();
}

TEST_F(Malformed, TransferIdInUse) {
  RawDecode peer(prefill_->address());
  ASSERT_NO_FATAL_FAILURE(Greet(peer));
  const Ticket first = Publish(*prefill_, *source_, {4}, 0);
  const Ticket second = Publish(*prefill_, *source_, {5}, 0);
  peer.Send({kEpoch, prefill_->epoch(), FetchOf(9, first.lease_id, {{0, 1}})});
  EXPECT_TRUE(Fails(RefusalOf(peer, FetchOf(9, second.lease_id, {{0, 1}})),
                    absl::StatusCode::kAlreadyExists));
  ExpectServing();
}

// One peer cannot end what belongs to another, even if it knows the ids.
TEST_F(Malformed, TransfersOfOthersAreOutOfReach) {
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, SmallChunks());
  const Ticket ticket = Publish(*prefill_, *source_, {4}, 1);
  const auto handle = Fetch(*decode, ticket, {2});
  ASSERT_TRUE(IsOk(handle->WaitLayer(0, Soon())));
  RawDecode peer(prefill_->address());
  ASSERT_NO_FATAL_FAILURE(Greet(peer));
  // The lease is being fetched, so this says nothing about it; then a fetch of it is refused.
  peer.Send({kEpoch, prefill_->epoch(), DoneMsg{77, ticket.lease_id, 0}});
  EXPECT_TRUE(Fails(RefusalOf(peer, FetchOf(1, ticket.lease_id, {{0, 1}})),
                    absl::StatusCode::kFailedPrecondition, "being fetched already"));
  ASSERT_TRUE(IsOk(prefill_->AllLayersReady(ticket.lease_id)));
  EXPECT_TRUE(IsOk(handle->Wait(Soon())));
}

// A claim of completion that contradicts what was sent does not end the lease as fetched.
TEST_F(Malformed, DoneThatIsNotTrue) {
  RawDecode peer(prefill_->address());
  ASSERT_NO_FATAL_FAILURE(Greet(peer));
  const Ticket ticket = Publish(*prefill_, *source_, {4}, 0);
  peer.Send({kEpoch, prefill_->epoch(), FetchOf(1, ticket.lease_id, {{0, 1}})});
  peer.Send({kEpoch, prefill_->epoch(), DoneMsg{1, ticket.lease_id, SmallLayout().page_bytes()}});
  const std::optional<Message> answer = peer.Receive(Soon());
  ASSERT_TRUE(answer.has_value());
  const auto* abort = std::get_if<AbortMsg>(&answer->body);
  ASSERT_NE(abort, nullptr);
  EXPECT_TRUE(Fails(abort->status, absl::StatusCode::kInternal, "0 were sent"));
  EXPECT_EQ(prefill_->num_live_leases(), 1);
}

// What a prefill side may say wrongly to a decode side.
TEST_F(Malformed, DecodeSideSurvivesGarbageToo) {
  RawPrefill hostile;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  Config config = SmallChunks();
  config.connect_timeout_ms = 2500;
  const auto decode = MakeDecode(target, config);
  const auto handle = Fetch(*decode, Ticket{hostile.address(), 5, 6, 1, 16}, {0});
  const auto hello = hostile.Receive(Soon());
  ASSERT_TRUE(hello.has_value());
  const uint64_t epoch = hello->second.from_epoch;
  hostile.SendBytes(hello->first, "garbage");
  hostile.SendBytes(hello->first, std::string(kMaxMessageBytes, '\xc0'));
  // Well-formed, but not what a greeting peer may say.
  hostile.SendBytes(hello->first, EncodeMessage({5, epoch, AbortMsg{1, absl::AbortedError("x")}}));
  hostile.SendBytes(hello->first, EncodeMessage({5, epoch, PongMsg{}}));
  EXPECT_TRUE(WaitFor([&] { return Metric(*decode, "messages_malformed") == 2; }, Soon()));
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kUnavailable, "no answer to the hello",
                    "what came from there cannot be read: malformed message"));
  EXPECT_TRUE(IsOk(Fetch(*decode, Publish(*prefill_, *source_, {1}), {5})->Wait(Soon())));
}

// Whoever floods the port of one who listens is heard, and those whom that one has dialled are too.
TEST_F(Malformed, AFloodKeepsNobodyUnheard) {
  Config config = SmallChunks();
  config.heartbeat_interval_ms = 100;
  config.heartbeat_timeout_ms = 2000;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakePushedDecode(target, config);
  std::atomic<bool> stop = false;
  std::vector<std::thread> strangers;
  for (int i = 0; i < 2; ++i) {
    strangers.emplace_back([&] {
      RawDecode peer(decode->address());
      while (!stop) {
        peer.SendFrames({"", "", ""});
        // Who does not read what is refused is hung up on in the end, and sends nothing more.
        while (peer.Receive(Clock::now())) {
        }
      }
    });
  }
  const Deadline until = DeadlineInMs(4000);
  absl::Status status;
  while (status.ok() && Clock::now() < until) {
    status = Fetch(*decode, Publish(*prefill_, *source_, {1}), {5})->Wait(Soon());
  }
  EXPECT_TRUE(IsOk(status));
  EXPECT_EQ(Metric(*decode, "peers_lost"), 0);
  stop = true;
  for (std::thread& stranger : strangers) stranger.join();
}

TEST_F(Malformed, HelloToADecodeEndpointIsRefused) {
  RawPrefill hostile;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, SmallChunks());
  const auto handle = Fetch(*decode, Ticket{hostile.address(), 5, 6, 1, 16}, {0});
  const auto hello = hostile.Receive(Soon());
  ASSERT_TRUE(hello.has_value());
  hostile.SendBytes(hello->first,
                    EncodeMessage({5, 0, HelloMsg{"n", kTestModel, SmallLayout(), {"address"}}}));
  EXPECT_FALSE(handle->Wait(Soon()).ok());
  // Which is counted before it is said.
  EXPECT_TRUE(WaitFor(
      [&] {
        return log_.Has({"refused peer 'n'", "accepts no peers"});
      },
      Soon()))
      << log_.ToString();
  EXPECT_EQ(Metric(*decode, "hellos_refused"), 1);
}

}  // namespace
}  // namespace kvferry
