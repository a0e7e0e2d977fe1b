// Peers that do not fit: refused at hello, and both sides' logs say which field differed and what
// to do.

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <future>
#include <memory>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/random.h"
#include "tests/support/captured_log.h"
#include "tests/support/endpoints.h"
#include "tests/support/files.h"
#include "tests/support/raw_peer.h"
#include "transport/control/codec.h"
#include "transport/mapped/unix_socket.h"
#include "transport/node.h"
#include "transport/tcp/tcp_socket.h"

namespace kvferry {
namespace {

class Hello : public testing::Test {
 protected:
  // A decode endpoint with this model and layout is refused with all of `parts`, in its handle and
  // in both logs; a good one is served afterwards.
  void ExpectRefused(const std::string& model, const KvLayout& layout,
                     const std::vector<absl::string_view>& parts) {
    const auto target = MakePatternPool(layout, 8, 2);
    const auto decode = MakeDecode(target, SmallChunks(), model);
    const Ticket ticket = Publish(*prefill_, *source_, {1, 2});
    const auto handle = Fetch(*decode, ticket, {3, 4});
    const absl::Status status = handle->Wait(Soon());
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status.ToString();
    for (const absl::string_view part : parts) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << part << " in " << status.ToString();
    }
    EXPECT_TRUE(IsUntouched(*target, 2));
    std::vector<absl::string_view> prefill_line = parts;
    prefill_line.push_back("refused peer 'decode'");
    EXPECT_TRUE(log_.Has(prefill_line)) << log_.ToString();
    std::vector<absl::string_view> decode_line = parts;
    decode_line.push_back("ended: FAILED_PRECONDITION: refused by tcp://127.0.0.1");
    EXPECT_TRUE(log_.Has(decode_line)) << log_.ToString();
    EXPECT_EQ(Metric(*prefill_, "hellos_refused"), 1);
    EXPECT_EQ(Metric(*prefill_, "peers"), 0);

    const auto good_target = MakePatternPool(SmallLayout(), 8, 3);
    const auto good = MakeDecode(good_target, SmallChunks());
    EXPECT_TRUE(IsOk(Fetch(*good, ticket, {5, 6})->Wait(Soon())));
    EXPECT_TRUE(
        HoldsExactly(*good_target, 3, std::vector<int64_t>{5, 6}, 1, std::vector<int64_t>{1, 2}));
  }

  CapturedLog log_;
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 8, 1);
  std::unique_ptr<PrefillEndpoint> prefill_ = MakePrefill(source_, SmallChunks());
};

TEST_F(Hello, AnotherModel) {
  ExpectRefused(
      "other/model", SmallLayout(),
      {"model: 'test/model' here, 'other/model' there", "start both sides with the same model"});
}

// Over a network one side would listen for what the other never sends.
TEST_F(Hello, AnotherNetwork) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  config.ucx_tls = PathUnderTest() == TestPath::kUcx ? "" : "tcp";
  const auto target = MakePatternPool(SmallLayout(), 8, 2);
  const auto decode = MakeDecode(target, config);
  const absl::Status status =
      Fetch(*decode, Publish(*prefill_, *source_, {1, 2}), {3, 4})->Wait(Soon());
  EXPECT_TRUE(Fails(status, absl::StatusCode::kFailedPrecondition, "ucx_tls", "over TCP"));
  EXPECT_TRUE(Fails(status, absl::StatusCode::kFailedPrecondition, "UCX"));
  EXPECT_TRUE(IsUntouched(*target, 2));
}

// Values are cast, bytes of an engine's own are not.
TEST_F(Hello, AnotherDtypeThatIsNoNumbers) {
  KvLayout layout = SmallLayout();
  layout.dtype = DType::kUint8;
  ExpectRefused(kTestModel, layout,
                {"KV layout: dtype: bfloat16 here, uint8 there",
                 "values of 'k' are not cast between bfloat16 and uint8", "start both sides"});
}

// And not those that lie nobody else knows how.
TEST_F(Hello, AnotherDtypeInAnArrangementOfAnEnginesOwn) {
  KvLayout layout = SmallLayout();
  layout.dtype = DType::kFloat16;
  layout.page_format = "engine's-HND";
  ExpectRefused(kTestModel, layout,
                {"KV layout: dtype: bfloat16 here, float16 there",
                 "engine's-HND is an arrangement of an engine's own, which may be another one",
                 "start both sides"});
}

// Of orders that are known they are converted; an engine's own only fits itself.
TEST_F(Hello, AnotherPageSizeOfAnArrangementOfAnEnginesOwn) {
  KvLayout layout = SmallLayout();
  layout.page_size = 32;
  layout.page_format = "vllm-cpu-neon-HND";
  ExpectRefused(
      kTestModel, layout,
      {"page_size: 16 here, 32 there", "vllm-cpu-neon-HND is an arrangement of an engine's own",
       "only pages of NHD and HND are converted", "start both sides"});
}

// A peer of before there were other pages would not say which it wants, and one that keeps pages
// for others to ask for counts in its own.
TEST_F(Hello, OtherPagesOfPeersThatConvertNone) {
  HelloMsg hello{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}};
  const auto answer_to = [&](const HelloMsg& said) {
    RawDecode peer(prefill_->address());
    peer.Send({42, 0, said});
    const std::optional<Message> answer = peer.Receive(Soon());
    if (!answer.has_value()) return absl::UnknownError("no answer");
    const auto* refuse = std::get_if<RefuseMsg>(&answer->body);
    return refuse == nullptr ? absl::OkStatus() : refuse->status;
  };
  const absl::Status as_is =
      answer_to(hello);  // Where the network is UCX's it is refused for that.
  const bool over_tcp = as_is.ok();
  EXPECT_EQ(over_tcp, PathUnderTest() != TestPath::kUcx) << as_is;
  for (const auto& [page_size, format] :
       std::vector<std::pair<int64_t, std::string>>{{32, "NHD"}, {16, "HND"}, {8, "HND"}}) {
    hello.layout.page_size = page_size;
    hello.layout.page_format = format;
    hello.converts = false;
    EXPECT_TRUE(Fails(answer_to(hello), absl::StatusCode::kFailedPrecondition,
                      "the other side converts no pages", "page_"));
    hello.converts = true;
    EXPECT_EQ(answer_to(hello).ok(), over_tcp);
  }
  // So it is with values.
  hello.layout.dtype = DType::kFloat16;
  EXPECT_TRUE(Fails(answer_to(hello), absl::StatusCode::kFailedPrecondition, "dtype: bfloat16 here",
                    "the other side casts no values"));
  hello.casts = true;
  EXPECT_EQ(answer_to(hello).ok(), over_tcp);
  // Everything else has to be the same as ever.
  hello.layout.num_layers = 5;
  EXPECT_TRUE(Fails(answer_to(hello), absl::StatusCode::kFailedPrecondition, "num_layers: 4 here"));
}

TEST_F(Hello, OtherPagesOfAnEndpointThatConvertsNone) {
  const auto node =
      Must(Node::Start({SmallChunks(), kTestModel, "keeper", source_, nullptr, nullptr, true}));
  KvLayout layout = SmallLayout();
  layout.page_size = 32;
  const auto target = MakePatternPool(layout, 8, 2);
  const auto decode = MakeDecode(target, SmallChunks());
  const Ticket ticket{node->listen_address(), node->epoch(), 6, 2, 32};
  EXPECT_TRUE(Fails(Fetch(*decode, ticket, {1})->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "page_size: 16 here, 32 there",
                    "counts in pages like its own alone"));
  EXPECT_EQ(Metric(*node, "hellos_refused"), 1);
  KvLayout other_dtype = SmallLayout();
  other_dtype.dtype = DType::kFloat16;
  const auto caster = MakeDecode(MakePatternPool(other_dtype, 8, 2), SmallChunks());
  EXPECT_TRUE(Fails(Fetch(*caster, ticket, {1})->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "dtype: bfloat16 here, float16 there",
                    "this endpoint gives out values as they are"));
  // Or of one that could, and whose owner counts otherwise.
  EndpointOptions options{SmallChunks(), kTestModel, "decode"};
  options.converts_pages = false;
  const auto counts = Must(DecodeEndpoint::Create(target, options));
  EXPECT_TRUE(Fails(Fetch(*counts, Publish(*prefill_, *source_, {1, 2}), {1})->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "page_size: 16 here, 32 there",
                    "the other side converts no pages"));
  const auto prefill = Must(PrefillEndpoint::Create(source_, options));
  EXPECT_TRUE(Fails(prefill->Push({"tcp://127.0.0.1:1", 5, 6, 1, 32}, {{1, 2}}, 0).status(),
                    absl::StatusCode::kFailedPrecondition, "of 1 pages, the push of 2"));
}

// The prefill side dials to push: it is the one that has to say that it converts and casts.
TEST(HelloToOthers, SaysThatItConvertsInEitherDirection) {
  RawPrefill peer;
  const auto pool = MakePatternPool(SmallLayout(), 8, 3);
  const auto converts = [&] {
    const auto hello = peer.Receive(Soon());
    if (!hello.has_value()) return false;
    const auto& said = std::get<HelloMsg>(hello->second.body);
    return said.converts && said.casts;
  };
  const auto decode = MakeDecode(pool, SmallChunks());
  const auto handle = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  EXPECT_TRUE(converts());
  const auto prefill = MakePrefill(pool, SmallChunks());
  const auto push = Push(*prefill, ReceiveTicket{peer.address(), 5, 6, 1, 16}, *pool, {0});
  EXPECT_TRUE(converts());
}

TEST_F(Hello, AnotherNumberOfLayers) {
  KvLayout layout = SmallLayout();
  layout.num_layers = 5;
  ExpectRefused(kTestModel, layout, {"num_layers: 4 here, 5 there", "start both sides"});
}

TEST_F(Hello, AnotherPageFormat) {
  KvLayout layout = SmallLayout();
  layout.page_format = "engine's-HND";
  ExpectRefused(kTestModel, layout,
                {"page_format: NHD here, engine's-HND there", "start both sides"});
}

TEST_F(Hello, OtherTensors) {
  ExpectRefused(
      kTestModel, KvLayout::Mha(4, 16, 4, 16, DType::kBFloat16),
      {"tensors: k[2 heads x 32]+v[2 heads x 32] here, k[4 heads x 16]+v[4 heads x 16] there",
       "start both sides"});
}

// A decode process of a later release, against a prefill process of this one.
TEST_F(Hello, DecodeSideOfAnotherVersion) {
  RawDecode peer(prefill_->address());
  const Message hello{42, 0, HelloMsg{"later", kTestModel, SmallLayout(), {"address"}}};
  peer.SendFrames({WithVersion(EncodeMessage(hello), 2)});
  const std::optional<Message> answer = peer.Receive(Soon());
  ASSERT_TRUE(answer.has_value());
  const auto* refuse = std::get_if<RefuseMsg>(&answer->body);
  ASSERT_NE(refuse, nullptr);
  EXPECT_EQ(refuse->transfer_id, 0u);
  EXPECT_EQ(answer->from_epoch, prefill_->epoch());
  EXPECT_TRUE(Fails(refuse->status, absl::StatusCode::kFailedPrecondition,
                    "protocol version: 1 here, 2 there",
                    "run the same kvferry release on both sides"));
  EXPECT_TRUE(log_.Has({"protocol version: 1 here, 2 there", "run the same kvferry release"}))
      << log_.ToString();
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto good = MakeDecode(target, SmallChunks());
  EXPECT_TRUE(IsOk(Fetch(*good, Publish(*prefill_, *source_, {1}), {5})->Wait(Soon())));
}

// A decode process of this release, against a prefill process of a later one, which refuses in its
// own version: a refusal is understood across versions.
TEST(HelloToOthers, PrefillSideOfAnotherVersionRefuses) {
  CapturedLog log;
  RawPrefill prefill;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, SmallChunks());
  const auto handle = Fetch(*decode, Ticket{prefill.address(), 5, 6, 1, 16}, {0});
  const auto hello = prefill.Receive(Soon());
  ASSERT_TRUE(hello.has_value());
  ASSERT_TRUE(std::holds_alternative<HelloMsg>(hello->second.body));
  EXPECT_EQ(hello->second.to_epoch, 0u);
  const Message refuse{
      5, 0, RefuseMsg{0, absl::FailedPreconditionError("protocol version: 2 here, 1 there")}};
  prefill.SendBytes(hello->first, WithVersion(EncodeMessage(refuse), 2));
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kFailedPrecondition, "refused by",
                    prefill.address(), "protocol version: 2 here, 1 there"));
  EXPECT_TRUE(log.Has({"ended", "protocol version: 2 here, 1 there"})) << log.ToString();
}

// The same, when the later one welcomes instead.
TEST(HelloToOthers, PrefillSideOfAnotherVersionWelcomes) {
  RawPrefill prefill;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, SmallChunks());
  const auto handle = Fetch(*decode, Ticket{prefill.address(), 5, 6, 1, 16}, {0});
  const auto hello = prefill.Receive(Soon());
  ASSERT_TRUE(hello.has_value());
  const Message welcome{5, hello->second.from_epoch, WelcomeMsg{"later", {"address"}}};
  prefill.SendBytes(hello->first, WithVersion(EncodeMessage(welcome), 2));
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kFailedPrecondition,
                    "protocol version: 1 here, 2 there"));
}

TEST(HelloToOthers, NoAnswerEndsAtTheConnectTimeout) {
  RawPrefill prefill;  // Takes the hello and says nothing.
  Config config = SmallChunks();
  config.connect_timeout_ms = 150;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, config);
  const auto handle = Fetch(*decode, Ticket{prefill.address(), 5, 6, 1, 16}, {0});
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kUnavailable,
                    "connect_timeout_ms (150)", prefill.address(), "is an endpoint of kvferry's"));
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

// Those of this process to whoever listens at the address.
void BreakConnectionsTo(const std::string& address) {
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
  EXPECT_GT(broken, 0);
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
        BreakConnectionsTo(peer.address());
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
  config.connect_timeout_ms = 1000;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, config);
  const auto handle = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  int hellos = 0;
  while (!handle->done() && hellos < 100) {
    if (!peer.Receive(DeadlineInMs(20)).has_value()) continue;
    ++hellos;
    BreakConnectionsTo(peer.address());
  }
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kUnavailable,
                    "within connect_timeout_ms (1000)", peer.address()));
  EXPECT_GT(hellos, 3);
  EXPECT_LT(hellos, 30);  // ZeroMQ waits for 50 ms at least.
}

// These play a peer whose data goes over plain connections.
class HelloToOthersOverTcp : public testing::Test {
 protected:
  void SetUp() override {
    if (PathUnderTest() == TestPath::kUcx || PathUnderTest() == TestPath::kDirect) {
      GTEST_SKIP() << "the network is UCX's here";
    }
  }
};

using HelloFromOthersOverTcp = HelloToOthersOverTcp;

// The prefill side reaches this one through shared memory, and so has offered nothing else, but is
// not reached that way: the next hello does not offer it.
TEST_F(HelloToOthersOverTcp, APeerThatIsOnlyReachedOneWayIsReachedOverTheNetwork) {
  RawPrefill prefill;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  Config config = SmallChunks();
  config.same_host_path = "auto";
  const auto decode = MakeDecode(target, config);
  const auto handle = Fetch(*decode, Ticket{prefill.address(), 5, 6, 1, 16}, {0});
  const auto first = prefill.Receive(Soon());
  ASSERT_TRUE(first.has_value());
  ASSERT_FALSE(std::get<HelloMsg>(first->second.body).data.local.empty());
  WelcomeMsg welcome{"prefill", {}};
  welcome.data.local = std::get<HelloMsg>(first->second.body).data.local;
  welcome.data.local.back() ^= 1;  // Nobody who has that token listens there.
  welcome.data.local[1] ^= 1;
  prefill.SendBytes(first->first, EncodeMessage({5, first->second.from_epoch, welcome}));
  std::optional<HelloMsg> second;
  bool said_bye = false;
  while (!second) {
    const auto next = prefill.Receive(Soon());
    ASSERT_TRUE(next.has_value());
    said_bye |= std::holds_alternative<ByeMsg>(next->second.body);
    if (const auto* hello = std::get_if<HelloMsg>(&next->second.body)) second = *hello;
  }
  EXPECT_TRUE(second->data.local.empty());
  EXPECT_GT(second->data.tcp.lanes, 0);
  EXPECT_TRUE(said_bye);
  EXPECT_FALSE(handle->done());
}

// How a process says that it has taken the memory which it is given.
enum class Takes : uint64_t { kAndReadsNothing = 0, kNever = 1, kNotNow = 2, kSaysNothing };

// Where a process on this host is given memory of others, which it does not map.
class UnmappedMemory {
 public:
  // What a hello or welcome says of it.
  std::string local() const { return absl::StrCat("\x05", name_, std::string(16, 't')); }
  // The next one that gives memory is told so.
  void Answer(Takes takes) {
    Packet hello;
    UniqueFd taken;
    EXPECT_TRUE(WaitFor([&] { return (taken = AcceptUnix(listener_)).valid(); }, Soon()));
    EXPECT_TRUE(WaitFor([&] { return ReceivePacket(taken, &hello) == SocketResult::kOk; }, Soon()));
    if (takes != Takes::kSaysNothing) {
      const uint64_t answer[] = {8, static_cast<uint64_t>(takes)};
      EXPECT_EQ(SendPacket(taken, std::as_bytes(std::span(answer))), SocketResult::kOk);
    }
    const bool ends = takes == Takes::kNever || takes == Takes::kNotNow;
    if (!ends) held_.push_back(std::move(taken));
  }
  // What its socket holds, or about so much.
  void ReadSome() {
    Packet packet;
    for (int left = 100; left > 0; --left) {
      if (ReceivePacket(held_.back(), &packet) != SocketResult::kOk) return;
    }
  }

 private:
  const std::string name_ = RandomBytes16();
  const UniqueFd listener_ =
      Must(ListenUnix(absl::StrCat("kvferry/", absl::BytesToHexString(name_))));
  std::vector<UniqueFd> held_;
};

// Welcomes whoever says hello as such a process.
class MapsNothing {
 public:
  // The next message that is no goodbye and no ping; none: the test has failed.
  std::optional<std::pair<std::string, Message>> Receive() {
    for (const Deadline by = Soon();;) {
      auto received = peer_.Receive(by);
      if (received.has_value() && IsPing(*received)) continue;
      if (received.has_value() && std::holds_alternative<ByeMsg>(received->second.body)) {
        ++byes;
        continue;
      }
      EXPECT_TRUE(received.has_value());
      return received;
    }
  }
  // Until then, of a peer that says nothing else.
  void AnswerPings(Deadline until) {
    while (const auto received = peer_.Receive(until)) EXPECT_TRUE(IsPing(*received));
  }
  // Of what it is told over the connection that was made last.
  void ReadSome() { memory_.ReadSome(); }
  // The next hello, which is answered as by the process of that epoch: by shared memory where that
  // is offered, else by a port where nobody is in a hurry. Without `takes` no memory is to be
  // given.
  HelloMsg Welcome(uint64_t epoch, std::optional<Takes> takes = Takes::kNever) {
    const auto received = Receive();
    if (!received.has_value() || !std::holds_alternative<HelloMsg>(received->second.body)) {
      ADD_FAILURE() << "no hello";
      return {};
    }
    const auto& [from, message] = *received;
    const HelloMsg hello = std::get<HelloMsg>(message.body);
    WelcomeMsg welcome{"prefill", {}};
    welcome.data.session = session;
    if (hello.data.local.empty()) {
      welcome.data.tcp = {1, "127.0.0.1", Must(PortOf(door_)), std::string(16, 't'),
                          std::string(16, 'a')};
    } else {
      welcome.data.local = memory_.local();
      welcome.data.session = 9;  // Messages over the link, too.
    }
    Say(from, message.from_epoch, epoch, welcome);
    if (takes && !hello.data.local.empty()) memory_.Answer(*takes);
    return hello;
  }
  void Say(const std::string& to, uint64_t to_epoch, uint64_t epoch, const MessageBody& body) {
    peer_.SendBytes(to, EncodeMessage({epoch, to_epoch, body}));
  }
  const std::string& address() const { return peer_.address(); }
  // Whoever has been welcomed over the network finds a door that closes.
  void CloseNextLink() {
    UniqueFd link;
    EXPECT_TRUE(WaitFor([&] { return (link = AcceptTcp(door_)).valid(); }, Soon()));
  }

  int byes = 0;
  int pings = 0;
  // Not 0: it takes messages over the network, and reads none.
  uint64_t session = 0;
  // Not 0: the epoch that its answers to pings are from.
  uint64_t pongs_as = 0;

 private:
  bool IsPing(const std::pair<std::string, Message>& received) {
    const auto& [from, message] = received;
    if (!std::holds_alternative<PingMsg>(message.body)) return false;
    ++pings;
    if (pongs_as != 0) Say(from, message.from_epoch, pongs_as, PongMsg{});
    return true;
  }

  RawPrefill peer_;
  UnmappedMemory memory_;
  const UniqueFd door_ = Must(ListenTcp("127.0.0.1", 0));
};

// What waited for it has been said to nobody before.
TEST_F(HelloToOthersOverTcp, APeerThatMapsNothingIsReachedOverTheNetwork) {
  Config config = SmallChunks();
  config.same_host_path = "auto";
  const auto pool = MakePatternPool(SmallLayout(), 8, 3);
  const auto prefill = MakePrefill(pool, config);
  MapsNothing peer;
  const ReceiveTicket ticket{peer.address(), 5, 6, 1, 16};
  const auto ends = [&](const auto& message, const auto& handle) {
    peer.Say(message.first, message.second.from_epoch, 5,
             RefuseMsg{0, absl::DataLossError("by hand")});
    EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kDataLoss, "refused by"));
  };
  {
    const auto push = Push(*prefill, ticket, *pool, {0});
    EXPECT_FALSE(peer.Welcome(5).data.local.empty());
    EXPECT_TRUE(peer.Welcome(5).data.local.empty());
    const auto asked = peer.Receive();
    ASSERT_TRUE(std::holds_alternative<CallMsg>(asked->second.body));
    EXPECT_EQ(std::get<CallMsg>(asked->second.body).function, "push");
    EXPECT_EQ(*std::get<CallMsg>(asked->second.body).args.Uint("receive"), 6u);
    EXPECT_FALSE(push->done());
    ends(*asked, push);
  }
  {  // As long as the process is there.
    const auto push = Push(*prefill, ticket, *pool, {0});
    EXPECT_TRUE(peer.Welcome(5).data.local.empty());
    EXPECT_EQ(peer.byes, 1);
    ends(*peer.Receive(), push);
  }
  {  // Until another one answers.
    const auto push = Push(*prefill, ticket, *pool, {0});
    EXPECT_TRUE(peer.Welcome(7).data.local.empty());
    ends(*peer.Receive(), push);
  }
  const auto decode = MakeDecode(pool, config);
  const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  EXPECT_FALSE(peer.Welcome(5).data.local.empty());
  EXPECT_TRUE(peer.Welcome(5).data.local.empty());
  const auto asked = peer.Receive();
  ASSERT_TRUE(std::holds_alternative<FetchMsg>(asked->second.body));
  EXPECT_EQ(std::get<FetchMsg>(asked->second.body).from_bytes, 0);
  ends(*asked, fetch);
  // And one after that is asked what it can do.
  const auto push = Push(*prefill, ticket, *pool, {0});
  const auto last = peer.Receive();
  ASSERT_TRUE(std::holds_alternative<HelloMsg>(last->second.body));
  EXPECT_FALSE(std::get<HelloMsg>(last->second.body).data.local.empty());
}

// What a process is short of it may have later.
TEST_F(HelloToOthersOverTcp, APeerThatMapsNothingJustNowIsAskedAgainNextTime) {
  for (const Takes takes : {Takes::kNotNow, Takes::kSaysNothing}) {
    Config config = SmallChunks();
    config.same_host_path = "auto";
    config.connect_timeout_ms = takes == Takes::kNotNow ? 600000 : 500;
    const auto pool = MakePatternPool(SmallLayout(), 8, 3);
    const auto decode = MakeDecode(pool, config);
    MapsNothing peer;
    for (int session = 0; session < 2; ++session) {
      const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
      EXPECT_FALSE(peer.Welcome(5, takes).data.local.empty());
      EXPECT_TRUE(peer.Welcome(5, takes).data.local.empty());
      const auto asked = peer.Receive();
      ASSERT_TRUE(std::holds_alternative<FetchMsg>(asked->second.body));
      peer.Say(asked->first, asked->second.from_epoch, 5,
               RefuseMsg{0, absl::DataLossError("by hand")});
      EXPECT_TRUE(Fails(fetch->Wait(Soon()), absl::StatusCode::kDataLoss, "refused by"));
    }
    EXPECT_EQ(peer.byes, 2);
  }
}

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
  config.heartbeat_timeout_ms = 200;
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), config);
  MapsNothing peer;
  const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  for (int session = 0; session < 8; ++session) {
    peer.Welcome(5);
    const auto asked = peer.Receive();
    ASSERT_TRUE(asked.has_value() && std::holds_alternative<FetchMsg>(asked->second.body));
    // And that this side has given the session up.
    const auto refused = peer.Receive();
    ASSERT_TRUE(refused.has_value() && std::holds_alternative<RefuseMsg>(refused->second.body));
    EXPECT_FALSE(fetch->done());
  }
}

// The welcome waits until it is known how this side will send.
TEST_F(HelloFromOthersOverTcp, APeerThatMapsNothingIsWelcomedOverTheNetwork) {
  for (const Takes takes : {Takes::kNever, Takes::kNotNow, Takes::kSaysNothing}) {
    Config config = SmallChunks();
    config.same_host_path = "auto";
    if (takes == Takes::kSaysNothing) config.connect_timeout_ms = 500;
    const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 3), config);
    UnmappedMemory memory;
    HelloMsg hello{"by hand", kTestModel, SmallLayout(), {}};
    hello.data.tcp.lanes = 1;
    hello.data.local = memory.local();
    RawDecode peer(prefill->address());
    peer.Send({42, 0, hello});
    memory.Answer(takes);
    const std::optional<Message> answer = peer.Receive(Soon());
    ASSERT_TRUE(answer.has_value() && std::holds_alternative<WelcomeMsg>(answer->body));
    EXPECT_GT(std::get<WelcomeMsg>(answer->body).data.tcp.port, 0);
  }
}

TEST_F(HelloFromOthersOverTcp, WhatIsAskedBeforeTheWelcomeIsNotHeard) {
  const auto pool = MakePatternPool(SmallLayout(), 8, 3);
  const auto prefill = MakePrefill(pool, SmallChunks());
  const Ticket ticket = Publish(*prefill, *pool, {0}, 1);
  UnmappedMemory memory;
  HelloMsg hello{"by hand", kTestModel, SmallLayout(), {}};
  hello.data.local = memory.local();
  RawDecode peer(prefill->address());
  peer.Send({42, 0, hello});
  memory.Answer(Takes::kSaysNothing);
  FetchMsg fetch;
  fetch.transfer_id = 7;
  fetch.lease_id = ticket.lease_id;
  const PageRun first{0, 1};
  fetch.positions = Must(PageRuns::FromRuns({&first, 1}));
  fetch.timeout_ms = 10000;
  fetch.window_bytes = fetch.chunk_bytes = 65536;
  peer.Send({42, ticket.epoch, fetch});
  EXPECT_TRUE(WaitFor([&] { return Metric(*prefill, "messages_stale") == 1; }, Soon()));
  EXPECT_EQ(Metric(*prefill, "transfers_started"), 0);
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

TEST_F(HelloFromOthersOverTcp, HeadsThatTheModelHasNot) {
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 1), SmallChunks());
  RawDecode peer(prefill->address());
  HelloMsg hello{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}};
  hello.heads = {1, SmallLayout().num_heads()};
  peer.Send({42, 0, hello});
  const auto refused = peer.Receive(Soon());
  ASSERT_TRUE(refused.has_value() && std::holds_alternative<RefuseMsg>(refused->body));
  EXPECT_TRUE(Fails(std::get<RefuseMsg>(refused->body).status, absl::StatusCode::kInvalidArgument,
                    "not within the model's"));
}

// What a peer's call has begun is asked of that peer's next session, if that has begun already.
TEST_F(HelloFromOthersOverTcp, WhatIsFetchedWhileAPeerBeginsAnewIsAskedThen) {
  struct : CallHandler {
    void OnCall(const CallKey& call, const std::string&, const Fields&, Deadline) override {
      caller.set_value(call.peer);
    }
    void OnCallDropped(const CallKey&) override {}
    std::promise<PeerKey> caller;
  } handler;
  Config config = SmallChunks();
  config.same_host_path = "auto";
  config.connect_timeout_ms = 1000;
  const auto pool = MakePatternPool(SmallLayout(), 8, 1);
  const auto node =
      Must(Node::Start({config, kTestModel, "keeper", pool, nullptr, &handler, true}));
  RawDecode peer(node->listen_address());
  HelloMsg hello{"", kTestModel, SmallLayout(), {}};
  hello.data.tcp.lanes = 1;
  peer.Send({42, 0, hello});
  ASSERT_TRUE(peer.Receive(Soon()).has_value());
  peer.Send({42, node->epoch(), CallMsg{5, "f", 60000, {}}});
  UnmappedMemory memory;
  Node::FetchRequest fetch;
  fetch.peer = handler.caller.get_future().get();
  hello.data.local = memory.local();
  peer.Send({42, 0, hello});
  memory.Answer(Takes::kSaysNothing);  // So that the session is a while in coming.
  const PageRun one{0, 1};
  fetch.ticket.lease_id = 9;
  fetch.ticket.num_pages = 1;
  fetch.positions = fetch.pages = Must(PageRuns::FromRuns({&one, 1}));
  fetch.deadline = Soon();
  const auto handle = Must(node->Fetch(std::move(fetch)));
  const auto welcome = peer.Receive(Soon());
  ASSERT_TRUE(welcome.has_value() && std::holds_alternative<WelcomeMsg>(welcome->body));
  const auto asked = peer.Receive(Soon());
  ASSERT_TRUE(asked.has_value() && std::holds_alternative<FetchMsg>(asked->body));
  EXPECT_EQ(std::get<FetchMsg>(asked->body).lease_id, 9u);
  peer.Send(
      {42, node->epoch(),
       RefuseMsg{std::get<FetchMsg>(asked->body).transfer_id, absl::DataLossError("by hand")}});
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kDataLoss, "a peer without a name"));
}

TEST_F(Hello, OfPeersWithoutANameTheLogSaysSo) {
  RawDecode peer(prefill_->address());
  peer.Send({42, 0, HelloMsg{"", "other/model", SmallLayout(), {"", "", {}, "", {1}, 7}}});
  ASSERT_TRUE(peer.Receive(Soon()).has_value());
  EXPECT_TRUE(log_.Has({"refused peer without a name: ", "model"})) << log_.ToString();
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

// And one that has no other way is told why it is refused.
TEST_F(HelloFromOthersOverTcp, APeerThatMapsNothingAndOffersNoNetworkIsRefused) {
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 3), SmallChunks());
  UnmappedMemory memory;
  HelloMsg hello{"by hand", kTestModel, SmallLayout(), {}};
  hello.data.local = memory.local();
  RawDecode peer(prefill->address());
  peer.Send({42, 0, hello});
  memory.Answer(Takes::kNever);
  const std::optional<Message> answer = peer.Receive(Soon());
  ASSERT_TRUE(answer.has_value() && std::holds_alternative<RefuseMsg>(answer->body));
  EXPECT_TRUE(Fails(std::get<RefuseMsg>(answer->body).status, absl::StatusCode::kFailedPrecondition,
                    "the peer over shared memory"));
  EXPECT_TRUE(WaitFor([&] { return Metric(*prefill, "peers") == 0; }, Soon()));
  EXPECT_EQ(Metric(*prefill, "hellos_refused"), 1);
}

// Its pings are answered. While it takes something now and then the session goes on; when what it
// is sent is not read any more, what it has been asked ends, and what waits for room goes to
// another session.
TEST_F(HelloToOthersOverTcp, APeerThatTakesNoMoreMessagesIsGivenUp) {
  Config config = SmallChunks();
  config.same_host_path = "auto";
  config.heartbeat_interval_ms = 50;
  config.heartbeat_timeout_ms = 1500;
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
  for (int i = 0; i < 5; ++i) {
    peer.AnswerPings(DeadlineInMs(400));
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
  EXPECT_EQ(peer.byes, 1);
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
  EXPECT_EQ(peer.byes, 1);
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

// A welcome that is meant for another process at the same address is none.
TEST(HelloToOthers, WelcomeForAnotherEpochIsStale) {
  RawPrefill prefill;
  Config config = SmallChunks();
  config.connect_timeout_ms = 300;
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

// Names that peers choose end up in logs; they must not be able to forge a line of one.
TEST_F(Hello, LogsStayOnOneLine) {
  testing::internal::CaptureStderr();
  RawDecode peer(prefill_->address());
  KvLayout layout = SmallLayout();
  layout.page_format = "NHD\nforged format";
  peer.Send({42, 0, HelloMsg{"x\nforged name", "y\nforged model", layout, {"address"}}});
  ASSERT_TRUE(peer.Receive(Soon()).has_value());
  peer.Send({42, 0, HelloMsg{"x", kTestModel, layout, {"address"}}});
  ASSERT_TRUE(peer.Receive(Soon()).has_value());
  const std::string stderr_text = testing::internal::GetCapturedStderr();
  EXPECT_NE(stderr_text.find("y\\x0aforged model"), std::string::npos) << stderr_text;
  EXPECT_NE(stderr_text.find("NHD\\x0aforged format"), std::string::npos) << stderr_text;
  EXPECT_EQ(stderr_text.find("\nforged"), std::string::npos) << stderr_text;
}

}  // namespace
}  // namespace kvferry
