// Who is let in over TCP, and what becomes of strangers who say what no side of ours would.

#include "transport/tcp/tcp_door.h"

#include <gtest/gtest.h>
#include <netinet/tcp.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/files.h"
#include "tests/support/status.h"
#include "tests/transport/tcp_planes.h"
#include "transport/tcp/tcp_frames.h"
#include "transport/tcp/tcp_socket.h"

namespace kvferry {
namespace {

TEST_F(TcpPlanesInTime, APeerThatNeverConnectsIsMissed) {
  Await();
  ASSERT_TRUE(StepsUntil([&] { return !at_b_.down.empty(); }));
  EXPECT_TRUE(Fails(at_b_.down[0].second, absl::StatusCode::kUnavailable, "connect_timeout_ms",
                    "data_port"));
  for (int i = 0; i < 100; ++i) Step();
  EXPECT_EQ(at_b_.down.size(), 1u);
  // Its token is no good any more.
  const UniqueFd late = Says(TcpHello::With(address_.token, 0).Bytes());
  EXPECT_TRUE(IsClosed(late));
  EXPECT_TRUE(arrived_.empty());
}

TEST_F(TcpPlanes, NobodyListens) {
  Await();
  door_ = Must(TcpDoor::Create(config_, "127.0.0.1", &metrics_));  // At another port.
  link_a_ = Must(a_->Open(Connection(address_.token, address_.answer), DeadlineInMs(5000)));
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.down.empty(); }));
  EXPECT_TRUE(Fails(at_a_.down[0].second, absl::StatusCode::kUnavailable, "Connection refused",
                    "data_port"));
}

TEST_F(TcpPlanes, AnAnswerThatIsNotThePeers) {
  Await();
  link_a_ = Must(a_->Open(Connection(address_.token, std::string(16, 'x')), DeadlineInMs(5000)));
  const std::vector<std::byte> secret = RandomBytes(5000, 1);
  bool asked = false;
  a_->SendChunk(link_a_, {1, 0, 0, 5000, 0}, FillChunk([&](ChunkHeader*) {
                  asked = true;
                  return std::span<const std::byte>(secret);
                }),
                [](const absl::Status&) {});
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.down.empty(); }));
  EXPECT_TRUE(Fails(at_a_.down[0].second, absl::StatusCode::kPermissionDenied, "not who"));
  EXPECT_FALSE(asked);
}

TEST_F(TcpPlanes, StrangersAreClosedAndHarmNobody) {
  Await();
  TcpHello other_version = TcpHello::With(address_.token, 0);
  other_version.version = 2;
  TcpHello other_magic = TcpHello::With(address_.token, 0);
  other_magic.magic ^= 1;
  const std::vector<std::string> lies = {
      TcpHello::With(std::string(16, 'x'), 0).Bytes(),
      TcpHello::With(address_.token, 1).Bytes(),  // There is no such lane.
      TcpHello::With(address_.token, UINT32_MAX).Bytes(),
      other_version.Bytes(),
      other_magic.Bytes(),
      std::string(5000, 'G'),
  };
  for (const std::string& words : lies) {
    const UniqueFd socket = Says(words);
    EXPECT_TRUE(IsClosed(socket));
  }
  EXPECT_TRUE(arrived_.empty());
  Connect();
  b_->SendCredit(link_b_, {1, 2});
  EXPECT_TRUE(StepsUntil([&] { return !at_a_.credits.empty(); }));
}

// By who writes a line for each time somebody connects the log is as long as somebody likes, and
// the thread stands still where nobody reads it.
TEST_F(TcpPlanes, ManyStrangersAreCountedAndSeldomLogged) {
  Await();
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(IsClosed(Says(std::string(sizeof(TcpHello), 'x'))));
  EXPECT_EQ(metrics_.strangers, 1000);
  EXPECT_GE(log_.lines().size(), 1u);
  EXPECT_LE(log_.lines().size(), 2u) << log_.ToString();
  EXPECT_TRUE(log_.Has({"presented no token"})) << log_.ToString();
}

TEST_F(TcpPlanes, ManySecondConnectionsAreSeldomLogged) {
  address_ = door_->Expect(/*link=*/1, /*lanes=*/2, DeadlineInMs(60000));
  const std::string hello = TcpHello::With(address_.token, 0).Bytes();
  const UniqueFd first = Says(hello);
  size_t arrived = 0;
  ASSERT_TRUE(
      StepUntil([&] { arrived += door_->Progress().size(); }, [&] { return arrived == 1; }));
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(IsClosed(Says(hello)));
  EXPECT_LE(log_.lines().size(), 2u) << log_.ToString();
  EXPECT_TRUE(log_.Has({"a second connection for lane 0"})) << log_.ToString();
  EXPECT_EQ(metrics_.strangers, 0);
}

TEST_F(TcpPlanesInTime, StrangersThatSayNothingOrTooLittle) {
  Await();
  const UniqueFd silent = Says("");
  const UniqueFd slow = Says(address_.token.substr(0, 3));
  EXPECT_TRUE(IsClosed(silent));
  EXPECT_TRUE(IsClosed(slow));
}

TEST_F(TcpPlanes, MoreStrangersThanThereIsRoomForDoNotKeepThePeerOut) {
  Await();
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 300; ++i) {
    crowd.push_back(Says("x"));
    Step();
  }
  EXPECT_TRUE(IsClosed(crowd[0]));
  Connect();
  b_->SendCredit(link_b_, {1, 2});
  EXPECT_TRUE(StepsUntil([&] { return !at_a_.credits.empty(); }));
}

// It may have said who it is just before it has to make room.
TEST_F(TcpPlanes, WhoHasToMakeRoomIsHeardOnceMore) {
  Await();
  const UniqueFd first = Says("");
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 255; ++i) {
    crowd.push_back(Says("x"));
    Step();
  }
  crowd.push_back(Says("x"));
  const std::string words = TcpHello::With(address_.token, 0).Bytes();
  ASSERT_EQ(send(first.get(), words.data(), words.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(words.size()));
  EXPECT_TRUE(StepsUntil([&] { return !arrived_.empty(); }));
}

// A process that did not run for a moment finds all its peers at the door at once, and they have
// said who they are.
TEST_F(TcpPlanes, MorePeersAtOnceThanThereIsRoomForStrangers) {
  constexpr LinkId kPeers = 320;
  std::vector<UniqueFd> peers;
  for (LinkId link = 1; link <= kPeers; ++link) {
    address_ = door_->Expect(link, 1, DeadlineInMs(config_.connect_timeout_ms));
    peers.push_back(Says(TcpHello::With(address_.token, 0).Bytes()));
  }
  size_t arrived = 0;
  EXPECT_TRUE(
      StepUntil([&] { arrived += door_->Progress().size(); }, [&] { return arrived == kPeers; }))
      << arrived;
}

TEST_F(TcpPlanes, WhoHasComeHasADeadline) {
  address_ = door_->Expect(1, 1, DeadlineInMs(10 * config_.connect_timeout_ms));
  EXPECT_FALSE(door_->TakeAccepted());
  const UniqueFd silent = Says("");
  bool came = false;
  ASSERT_TRUE(StepsUntil([&] { return came |= door_->TakeAccepted(); }));
  EXPECT_FALSE(door_->TakeAccepted());
  EXPECT_LE(door_->Tick(Clock::now()), DeadlineInMs(config_.connect_timeout_ms));
}

// What the process cannot take now neither keeps its thread turning nor is forgotten.
TEST_F(TcpPlanes, WithoutADescriptorAPeerWaits) {
  KVFERRY_SKIP_WHERE_DESCRIPTORS_ARE_NEEDED();
  Await();
  const UniqueFd unconnected(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(static_cast<uint16_t>(address_.port));
  inet_pton(AF_INET, address_.host.c_str(), &where.sin_addr);
  {
    const FileLimit none(0);
    EXPECT_EQ(connect(unconnected.get(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)),
              0);
    door_->Progress();
    EXPECT_FALSE(IsReadable(door_->event_fd()));
  }
  EXPECT_TRUE(log_.Has({"a peer waits to connect", "open files"})) << log_.ToString();
  EXPECT_FALSE(door_->TakeAccepted());
  bool came = false;
  EXPECT_TRUE(StepsUntil([&] { return came |= door_->TakeAccepted(); }));
}

// Closing a descriptor that a child has too neither ends the connection nor takes it out of an
// epoll.
TEST_F(TcpPlanes, AForkedChildKeepsNothingAlive) {
  Connect();
  b_->SendCredit(link_b_, {1, 2});
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.credits.empty(); }));
  bool came = false;
  door_->TakeAccepted();
  const UniqueFd stranger = Says("k");
  ASSERT_TRUE(StepsUntil([&] { return came |= door_->TakeAccepted(); }));
  const ForkedChild child;
  shutdown(stranger.get(), SHUT_RDWR);
  ASSERT_TRUE(WaitFor([&] { return IsReadable(door_->event_fd()); }, Soon()));
  door_->Progress();
  EXPECT_FALSE(IsReadable(door_->event_fd()));
  a_->Close(link_a_);
  EXPECT_TRUE(StepsUntil([&] { return !at_b_.down.empty(); }));
}

TEST_F(TcpPlanes, ASilentPathIsNoticed) {
  int on_a_side = 0;
  Await();
  TcpConnection connection = Connection(address_.token, address_.answer);
  connection.silence_ms = 4321;
  const int fd = connection.socket.get();
  const auto timeout_ms = [&] {
    unsigned ms = 0;
    socklen_t bytes = sizeof(ms);
    getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, &bytes);
    return ms;
  };
  link_a_ = Must(a_->Open(std::move(connection), DeadlineInMs(5000)));
  EXPECT_EQ(timeout_ms(), 0u);  // How long connecting may take is said elsewhere.
  ASSERT_TRUE(StepsUntil([&] { return timeout_ms() != 0; }));
  EXPECT_EQ(timeout_ms(), 4321u);
  socklen_t bytes = sizeof(on_a_side);
  getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on_a_side, &bytes);
  EXPECT_EQ(on_a_side, 1);
}

TEST_F(TcpPlanes, ATokenOpensOneConnection) {
  Connect();
  b_->SendCredit(link_b_, {1, 2});
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.credits.empty(); }));
  const UniqueFd again = Says(TcpHello::With(address_.token, 0).Bytes());
  EXPECT_TRUE(IsClosed(again));
  EXPECT_EQ(arrived_.size(), 1u);
  EXPECT_TRUE(at_b_.down.empty());
}

// A peer that has let itself in and then talks nonsense is dropped, and says nothing more.
TEST_F(TcpPlanes, FramesThatMakeNoSense) {
  const ChunkHeader chunk{1, 0, 0, 100, 0};
  const ChunkHeader list{1, 0, 0, 100, kChunkInPool};
  const std::string frame = "a frame of kind";
  const std::string of_chunk = "bytes for a chunk of";
  const std::string of_message = "limit 2097152";
  const std::vector<std::pair<std::string, std::string>> lies = {
      {TextOf(TcpFrame::Of(static_cast<TcpFrameKind>(0), chunk, 100)), frame},
      {TextOf(TcpFrame::Of(static_cast<TcpFrameKind>(9), chunk, 100)), frame},
      {TextOf(TcpFrame::Of(kTcpChunk, chunk, 99)), of_chunk},
      {TextOf(TcpFrame::Of(kTcpChunk, chunk, 0)), of_chunk},
      {TextOf(TcpFrame::Of(kTcpChunk, ChunkHeader{1, 0, 0, 0, 0}, 0)), of_chunk},
      {TextOf(TcpFrame::Of(kTcpChunk, list, (4 << 20) + 1)), of_chunk},
      {TextOf(TcpFrame::Of(kTcpCredit, CreditHeader{1, 2}, 1)), frame},
      {TextOf(TcpFrame::Of(kTcpMessage, MessageHeader{1}, 0)), of_message},
      {TextOf(TcpFrame::Of(kTcpMessage, MessageHeader{1}, kMaxMessageBytes + 1)), of_message},
  };
  for (const auto& [lie, why] : lies) {
    at_b_.down.clear();
    Await();
    const UniqueFd socket =
        Says(TcpHello::With(address_.token, 0).Bytes() + lie +
             TextOf(TcpFrame::Of(kTcpCredit, CreditHeader{1, 2}, 0)));  // Makes sense.
    ASSERT_TRUE(StepsUntil([&] { return !at_b_.down.empty(); }));
    EXPECT_TRUE(Fails(at_b_.down[0].second, absl::StatusCode::kInvalidArgument, why));
    for (int i = 0; i < 5; ++i) Step();
    EXPECT_EQ(at_b_.down.size(), 1u);
    b_->Close(link_b_);
  }
  EXPECT_TRUE(at_b_.chunks.empty());
  EXPECT_TRUE(at_b_.credits.empty());
  EXPECT_TRUE(at_b_.messages.empty());
}

TEST_F(TcpPlanes, RandomBytesNeverDoHarm) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    at_b_.down.clear();
    Await();
    const std::vector<std::byte> noise = RandomBytes(3000, seed);
    const std::string hello = TcpHello::With(address_.token, 0).Bytes();
    // A kind that is known, so that the rest is looked at; a message's end falls into noise too.
    TcpFrame frame;
    std::memcpy(&frame, noise.data(), sizeof(frame));
    frame.kind = seed % 3 == 0 ? kTcpMessage : kTcpChunk;
    frame.payload_bytes = 1 + seed * 100;
    const ChunkHeader header{seed, seed, 0, frame.payload_bytes, 0};
    std::memcpy(frame.header.data(), &header, sizeof(header));
    UniqueFd socket = Says(hello + TextOf(frame) + TextOf(noise));
    for (int i = 0; i < 20; ++i) Step();
    socket = UniqueFd();
    ASSERT_TRUE(StepsUntil([&] { return !at_b_.down.empty(); }));
    b_->Close(link_b_);
  }
  EXPECT_TRUE(at_b_.chunks.empty());  // None had an end that says that it is whole.
}

TEST(TcpSocket, AddressesThatAreNone) {
  EXPECT_TRUE(Fails(DialTcp("localhost", 80).status(), absl::StatusCode::kInvalidArgument,
                    "no numeric address"));
  EXPECT_TRUE(Fails(DialTcp("127.0.0.1", 65536).status(), absl::StatusCode::kInvalidArgument,
                    "no numeric address"));
  EXPECT_EQ(Must(AddressOfInterface("lo")), "127.0.0.1");
  EXPECT_TRUE(Fails(AddressOfInterface("nosuchdev0").status(), absl::StatusCode::kInvalidArgument,
                    "net_device", "nosuchdev0"));
  const UniqueFd listener = Must(ListenTcp("127.0.0.1", 0));
  EXPECT_TRUE(Fails(ListenTcp("127.0.0.1", Must(PortOf(listener))).status(),
                    absl::StatusCode::kUnavailable, "data_port"));
  EXPECT_GT(Must(PortOf(Must(ListenTcp("::1", 0)))), 0);
}

}  // namespace
}  // namespace kvferry
