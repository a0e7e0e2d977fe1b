// The UCX data plane by itself: two workers in one process, progressed by hand.

#include "transport/data_plane.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <random>
#include <string_view>

#include "base/config.h"
#include "tests/support/captured_log.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"
#include "tests/transport/recorder.h"
#include "transport/messages.h"
#include "transport/ucx/ucx_data_plane.h"

namespace kvferry {
namespace {

// The transport that is everywhere.
Config OverUcx() {
  Config config;
  config.ucx_tls = "tcp";
  return config;
}

class Planes : public testing::Test {
 protected:
  static std::unique_ptr<AddressedPlane> Make() { return Must(MakeUcxDataPlane(OverUcx())); }
  template <typename Predicate>
  bool ProgressUntil(const Predicate& holds) {
    return StepUntil(
        [&] {
          if (a_ != nullptr) a_->Progress(&at_a_);
          if (b_ != nullptr) b_->Progress(&at_b_);
        },
        holds);
  }
  static std::vector<std::byte> RandomBytes(size_t size, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::byte> bytes(size);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
  }

  std::unique_ptr<AddressedPlane> a_ = Make();
  std::unique_ptr<AddressedPlane> b_ = Make();
  Recorder at_a_;
  Recorder at_b_;
};

TEST_F(Planes, ChunksOfAllSizesInOrder) {
  const LinkId link = Must(a_->Connect(b_->address()));
  const std::vector<size_t> sizes = {1,    2,     7,      8,      64,     1000,  4096,
                                     8191, 65536, 131072, 200000, 262143, 262144};
  std::vector<std::vector<std::byte>> payloads;
  size_t sent = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    payloads.push_back(RandomBytes(sizes[i], i));
    const ChunkHeader header{1000 + i, i << 40, ~i, static_cast<uint32_t>(sizes[i]),
                             kChunkHasChecksum};
    a_->SendPayload(link, header, payloads.back(), [&](const absl::Status& status) {
      EXPECT_TRUE(IsOk(status));
      ++sent;
    });
  }
  ASSERT_TRUE(
      ProgressUntil([&] { return at_b_.chunks.size() == sizes.size() && sent == sizes.size(); }));
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto& [header, payload] = at_b_.chunks[i];
    EXPECT_EQ(header.transfer_id, 1000 + i);
    EXPECT_EQ(header.offset, i << 40);
    EXPECT_EQ(header.checksum, ~i);
    EXPECT_EQ(header.bytes, sizes[i]);
    EXPECT_EQ(header.flags, kChunkHasChecksum);
    EXPECT_EQ(payload, payloads[i]);
  }
}

TEST_F(Planes, CreditsGoTheOtherWay) {
  const LinkId there = Must(a_->Connect(b_->address()));
  const LinkId back = Must(b_->Connect(a_->address()));
  a_->SendCredit(there, {1, 2});
  b_->SendCredit(back, {UINT64_MAX, 7});
  b_->SendCredit(back, {8, UINT64_MAX});
  ASSERT_TRUE(
      ProgressUntil([&] { return at_b_.credits.size() == 1 && at_a_.credits.size() == 2; }));
  EXPECT_EQ(at_b_.credits[0].bytes_done, 2u);
  EXPECT_EQ(at_a_.credits[0].transfer_id, UINT64_MAX);
  EXPECT_EQ(at_a_.credits[1].bytes_done, UINT64_MAX);
}

TEST_F(Planes, AHeaderThatLiesAboutItsBytesIsDropped) {
  const LinkId link = Must(a_->Connect(b_->address()));
  const std::vector<std::byte> payload = RandomBytes(100, 1);
  const auto ignore = [](const absl::Status&) {};
  a_->SendPayload(link, {1, 0, 0, 99, 0}, payload, ignore);
  a_->SendPayload(link, {2, 0, 0, 101, 0}, payload, ignore);
  a_->SendPayload(link, {3, 0, 0, 100, 0}, payload, ignore);
  ASSERT_TRUE(ProgressUntil([&] { return !at_b_.chunks.empty(); }));
  ASSERT_EQ(at_b_.chunks.size(), 1u);
  EXPECT_EQ(at_b_.chunks[0].first.transfer_id, 3u);
}

TEST_F(Planes, EverySendCompletesOnceWhenThePeerGoesAway) {
  const LinkId link = Must(a_->Connect(b_->address()));
  const std::vector<std::byte> payload = RandomBytes(256 << 10, 1);
  std::vector<int> completions(200, 0);
  const auto send = [&](size_t i) {
    a_->SendPayload(link, {i, 0, 0, 256 << 10, 0}, payload,
                    [&, i](const absl::Status&) { ++completions[i]; });
  };
  send(0);
  ASSERT_TRUE(ProgressUntil([&] { return !at_b_.chunks.empty(); }));
  for (size_t i = 1; i < completions.size(); ++i) send(i);
  b_.reset();  // With most of it still on its way.
  ASSERT_TRUE(ProgressUntil([&] { return !at_a_.down.empty(); }));
  EXPECT_EQ(at_a_.down[0].first, link);
  EXPECT_FALSE(at_a_.down[0].second.ok());
  a_->Close(link);
  a_->Close(link);  // No-op.
  a_.reset();       // Waits for what is left.
  for (size_t i = 0; i < completions.size(); ++i) EXPECT_EQ(completions[i], 1) << i;
}

// A peer that dies while the connection to it is being set up: the kernel accepted it, UCX never
// did.
TEST_F(Planes, ThePeerGoesAwayBeforeItAnswers) {
  const CapturedLog log;
  const std::vector<std::byte> payload = RandomBytes(256 << 10, 1);
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE(round);
    std::unique_ptr<AddressedPlane> silent = Make();
    const LinkId link = Must(a_->Connect(silent->address()));
    int completions = 0;
    for (uint64_t i = 0; i < 3; ++i) {
      a_->SendPayload(link, {i, 0, 0, 256 << 10, 0}, payload,
                      [&](const absl::Status&) { ++completions; });
    }
    for (int i = 0; i < 100 * round; ++i) a_->Progress(&at_a_);
    silent.reset();
    ASSERT_TRUE(ProgressUntil([&] { return !at_a_.down.empty(); }));
    EXPECT_EQ(at_a_.down[0].first, link);
    at_a_.down.clear();
    a_->Close(link);
    ASSERT_TRUE(ProgressUntil([&] { return completions == 3; }));
  }
  const LinkId link = Must(a_->Connect(b_->address()));
  a_->SendCredit(link, {4, 4});
  ASSERT_TRUE(ProgressUntil([&] { return !at_b_.credits.empty(); }));
  EXPECT_TRUE(at_a_.down.empty());
  // What UCX has to say of it is in our log, not on standard output.
  EXPECT_TRUE(log.Has({"ucx: ", "connect"})) << log.ToString();
}

// The ports on which this process listens.
std::vector<uint16_t> ListeningPorts() {
  std::vector<uint16_t> ports;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    int listens = 0;
    socklen_t bytes = sizeof(listens);
    sockaddr_in name{};
    socklen_t name_bytes = sizeof(name);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens != 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&name), &name_bytes) == 0) {
      ports.push_back(name.sin_port);
    }
  }
  return ports;
}

// A port on which nobody answers: its queue is full, and the kernel drops what asks to connect, as
// a firewall does.
class SilentPort {
 public:
  SilentPort() {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(name);
    auto* address = reinterpret_cast<sockaddr*>(&name);
    fds_.push_back(socket(AF_INET, SOCK_STREAM, 0));
    EXPECT_EQ(bind(fds_[0], address, bytes), 0);
    EXPECT_EQ(listen(fds_[0], 0), 0);
    EXPECT_EQ(getsockname(fds_[0], address, &bytes), 0);
    port_ = name.sin_port;
    for (int i = 0; i < 4; ++i) {
      fds_.push_back(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
      static_cast<void>(connect(fds_.back(), address, bytes));
    }
  }
  ~SilentPort() {
    for (const int fd : fds_) close(fd);
  }
  uint16_t port() const { return port_; }  // As it is on the wire.

 private:
  std::vector<int> fds_;
  uint16_t port_ = 0;
};

// The thread that connects serves everybody else: it must not wait for two minutes.
TEST_F(Planes, APeerThatIsNotReachedDoesNotHoldUsUp) {
  const SilentPort silent;
  std::string address = b_->address();
  for (const uint16_t port : ListeningPorts()) {
    const std::string_view own(reinterpret_cast<const char*>(&port), sizeof(port));
    const size_t at = address.find(own);
    const uint16_t other = silent.port();
    if (at != std::string::npos) std::memcpy(&address[at], &other, sizeof(other));
  }
  ASSERT_NE(address, b_->address());
  const Deadline begin = Clock::now();
  const LinkId lost = Must(a_->Connect(address));
  const LinkId link = Must(a_->Connect(b_->address()));
  a_->SendCredit(link, {4, 4});
  ASSERT_TRUE(ProgressUntil([&] { return !at_b_.credits.empty(); }));
  a_->Close(lost);
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 20);
}

TEST_F(Planes, ClosedLinks) {
  const LinkId link = Must(a_->Connect(b_->address()));
  a_->Close(link);
  absl::Status status;
  a_->SendPayload(link, {1, 0, 0, 1, 0}, RandomBytes(1, 1),
                  [&](const absl::Status& s) { status = s; });
  EXPECT_TRUE(Fails(status, absl::StatusCode::kUnavailable, "closed"));
  a_->SendCredit(link, {1, 1});
  const LinkId next = Must(a_->Connect(b_->address()));
  EXPECT_NE(next, link) << "link ids are never used again";
  a_->SendCredit(next, {4, 4});
  ASSERT_TRUE(ProgressUntil([&] { return !at_b_.credits.empty(); }));
}

TEST_F(Planes, SleepsUntilSomethingComes) {
  const LinkId link = Must(a_->Connect(b_->address()));
  a_->SendCredit(link, {1, 1});
  ASSERT_TRUE(ProgressUntil([&] { return at_b_.credits.size() == 1; }));
  // Idle: it can be armed, and its fd stays quiet.
  ASSERT_TRUE(WaitFor([&] { return !b_->Progress(&at_b_) && b_->Arm(); }, Soon()));
  pollfd fd = {b_->event_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&fd, 1, 0), 0);
  a_->SendCredit(link, {2, 2});
  ASSERT_TRUE(WaitFor(
      [&] {
        a_->Progress(&at_a_);
        return poll(&fd, 1, 0) == 1;
      },
      Soon()));
  ASSERT_TRUE(ProgressUntil([&] { return at_b_.credits.size() == 2; }));
}

TEST_F(Planes, WorkerAddressesOfAWrongSize) {
  EXPECT_TRUE(Fails(a_->Connect(""), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(a_->Connect(std::string(kMaxWorkerAddressBytes + 1, 'x')),
                    absl::StatusCode::kInvalidArgument));
}

TEST(UcxPlane, TransportThatDoesNotExist) {
  Config config;
  config.ucx_tls = "nosuch";
  EXPECT_TRUE(Fails(MakeUcxDataPlane(config), absl::StatusCode::kUnavailable, "ucx_tls"));
}

}  // namespace
}  // namespace kvferry
