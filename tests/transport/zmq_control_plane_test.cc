// The control plane by itself, where the system gives it nothing.

#include "transport/control/zmq_control_plane.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <set>

#include "base/config.h"
#include "base/cpu_seconds.h"
#include "tests/support/captured_log.h"
#include "tests/support/endpoints.h"
#include "tests/support/failing_threads.h"
#include "tests/support/files.h"
#include "tests/support/raw_peer.h"
#include "tests/support/sanitized.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

class WithoutFiles : public testing::Test {
 protected:
  void SetUp() override { KVFERRY_SKIP_WHERE_DESCRIPTORS_ARE_NEEDED(); }
};

// ZeroMQ aborts the process where there is no descriptor for its threads.
TEST_F(WithoutFiles, ThereIsNoControlPlane) {
  int made = 0;
  for (int free = 0; free < 32; ++free) {
    const FileLimit limit(free);
    const absl::StatusOr<std::unique_ptr<ControlPlane>> plane =
        MakeZmqControlPlane(Config(), /*listen=*/false);
    if (plane.ok()) ++made;
    if (plane.ok()) continue;
    EXPECT_EQ(made, 0) << free;
    EXPECT_TRUE(absl::IsResourceExhausted(plane.status())) << plane.status();
  }
  EXPECT_GT(made, 0);
}

// And where there is none of its threads.
TEST(WithoutThreads, ThereIsNoControlPlane) {
#ifdef KVFERRY_SANITIZED
  GTEST_SKIP() << "sanitizers start threads in a way of their own";
#endif
  for (const int room : {0, 1}) {
    const ScarceThreads scarce(room);
    EXPECT_TRUE(Fails(MakeZmqControlPlane(Config(), /*listen=*/false).status(),
                      absl::StatusCode::kResourceExhausted, "ulimit -u"))
        << room;
  }
  const ScarceThreads enough(2);
  EXPECT_TRUE(IsOk(MakeZmqControlPlane(Config(), /*listen=*/false).status()));
}

TEST_F(WithoutFiles, DialsAreNoBadAddresses) {
  const std::unique_ptr<ControlPlane> plane = Must(MakeZmqControlPlane(Config(), /*listen=*/false));
  for (int free = 0; free < 16; ++free) {
    const FileLimit limit(free);
    const absl::Status status = plane->Dial("tcp://127.0.0.1:1").status();
    EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << free << " " << status;
    if (free == 0) {
      EXPECT_TRUE(Fails(status, absl::StatusCode::kResourceExhausted, "open files"));
    }
  }
  EXPECT_TRUE(IsOk(plane->Dial("tcp://127.0.0.1:1").status()));
  EXPECT_TRUE(Fails(plane->Dial("127.0.0.1").status(), absl::StatusCode::kInvalidArgument));
}

std::unique_ptr<ControlPlane> MakeHere(bool listen) {
  Config config;
  config.listen_host = "127.0.0.1";
  return Must(MakeZmqControlPlane(config, listen));
}

TEST(ZmqControlPlane, APeerThatWasHungUpIsNone) {
  const std::unique_ptr<ControlPlane> plane = MakeHere(/*listen=*/true);
  const PeerKey peer = Must(plane->Dial("tcp://127.0.0.1:1"));
  plane->Hangup(peer);
  EXPECT_TRUE(
      Fails(plane->Send(peer, {1, 2, PingMsg{}}), absl::StatusCode::kUnavailable, "no such peer"));
}

struct Heard : ControlEvents {
  void OnMessage(const PeerKey& from, Message message) override {
    peer = from;
    peers.insert(from);
    messages.push_back(std::move(message.body));
  }
  void OnMalformed(const PeerKey&, const absl::Status& status) override { ADD_FAILURE() << status; }
  void OnAttemptFailed(const PeerKey&, Attempt) override {}
  void OnMade(const PeerKey&) override {}
  void OnMadeAgain(const PeerKey&) override {}
  void OnStranger() override {}

  PeerKey peer;  // The last one.
  std::set<PeerKey> peers;
  std::vector<MessageBody> messages;
};

// Of a peer that brings none, the first one that comes.
PeerKey IdGivenBy(ControlPlane* listens) {
  const std::unique_ptr<ControlPlane> dials = MakeHere(/*listen=*/false);
  Heard heard;
  EXPECT_TRUE(IsOk(dials->Send(Must(dials->Dial(listens->listen_address())), {1, 2, PingMsg{}})));
  EXPECT_TRUE(WaitFor(
      [&] {
        listens->Progress(&heard);
        return !heard.messages.empty();
      },
      Soon()));
  return heard.peer;
}

// It is no host that cannot be reached, as the system's word for it says.
TEST(ZmqControlPlane, APeerThatHasHungUpIsSaidToHave) {
  const std::unique_ptr<ControlPlane> plane = MakeHere(/*listen=*/true);
  const PeerKey peer = IdGivenBy(plane.get());
  Heard heard;
  absl::Status sent;
  EXPECT_TRUE(WaitFor(
      [&] {
        plane->Progress(&heard);
        sent = plane->Send(peer, {1, 2, PongMsg{}});
        return !sent.ok();
      },
      Soon()));
  EXPECT_TRUE(Fails(sent, absl::StatusCode::kUnavailable, "the peer's connection is closed"));
}

// Each time it is asked, however much those have sent that dial it.
TEST(ZmqControlPlane, WhoIsDialledIsHeardBesideAFlood) {
  const std::unique_ptr<ControlPlane> plane = MakeHere(/*listen=*/true);
  const std::unique_ptr<ControlPlane> other = MakeHere(/*listen=*/true);
  Heard heard, others;
  const PeerKey dialled = Must(plane->Dial(other->listen_address()));
  EXPECT_TRUE(IsOk(plane->Send(dialled, {1, 2, PingMsg{}})));
  ASSERT_TRUE(WaitFor(
      [&] {
        other->Progress(&others);
        return !others.messages.empty();
      },
      Soon()));
  EXPECT_FALSE(plane->Progress(&heard));  // It was made.
  RawDecode stranger(plane->listen_address());
  for (int round = 0; round < 20; ++round) {  // Of the flood not always much has come.
    ASSERT_TRUE(WaitFor([&] { return plane->Arm(); }, Soon()));
    EXPECT_TRUE(IsOk(other->Send(others.peer, {1, 2, PongMsg{}})));
    ASSERT_TRUE(WaitFor([&] { return !plane->Arm(); }, Soon()));  // It has come.
    for (int i = 0; i < 900; ++i) stranger.Send({1, 2, PingMsg{}});
    Heard once;
    plane->Progress(&once);
    EXPECT_TRUE(once.peers.contains(dialled));
    const size_t all = heard.messages.size() + 901 - once.messages.size();
    ASSERT_TRUE(WaitFor(
        [&] {
          plane->Progress(&heard);
          return heard.messages.size() == all;
        },
        Soon()));
  }
}

UniqueFd UnconnectedSocket() { return UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

// As the process's other listeners do. ZeroMQ's thread would turn meanwhile.
TEST_F(WithoutFiles, WhoConnectsWaits) {
  const CapturedLog log;
  const std::unique_ptr<ControlPlane> plane = MakeHere(/*listen=*/true);
  Heard heard;
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  where.sin_port = htons(static_cast<uint16_t>(PortOf(plane->listen_address())));
  // Some of them may come in still: ZeroMQ closes what it has done with in a thread of its own.
  const std::array<UniqueFd, 4> peers = {UnconnectedSocket(), UnconnectedSocket(),
                                         UnconnectedSocket(), UnconnectedSocket()};
  const UniqueFd& last = peers.back();
  const auto said = [&] { return log.Has({"a peer waits to connect", "open files"}); };
  const auto step = [&] {  // As a progress thread does.
    plane->Progress(&heard);
    if (!plane->Arm()) return;
    pollfd entry{plane->event_fd(), POLLIN, 0};
    poll(&entry, 1, 100);
  };
  {
    const FileLimit none(0);
    for (const UniqueFd& peer : peers) {
      ASSERT_EQ(connect(peer.get(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)), 0);
    }
    const Deadline until = Soon();
    while (!said() && Clock::now() < until) step();
    EXPECT_TRUE(said()) << log.ToString();
    const double used = CpuSeconds(CLOCK_PROCESS_CPUTIME_ID);
    const Deadline second = DeadlineInMs(1000);
    while (Clock::now() < second) step();
    EXPECT_LT(CpuSeconds(CLOCK_PROCESS_CPUTIME_ID) - used, 0.5);
    EXPECT_FALSE(IsReadable(last.get()));  // Nor was it hung up on.
  }
  EXPECT_EQ(log.lines().size(), 1) << log.ToString();
  const Deadline until = Soon();
  while (!IsReadable(last.get()) && Clock::now() < until) step();
  char greeting = 0;
  EXPECT_EQ(recv(last.get(), &greeting, 1, MSG_DONTWAIT), 1);  // ZeroMQ's.
  IdGivenBy(plane.get());
}

// Whoever knew it could claim it, and ZeroMQ would abort when its turn comes.
TEST(ZmqControlPlane, NobodyKnowsWhichIdComesNext) {
  std::set<PeerKey> ids;
  for (int i = 0; i < 3; ++i) {
    srand(1);  // As in every process that has just begun.
    const std::unique_ptr<ControlPlane> plane = MakeHere(/*listen=*/true);
    EXPECT_TRUE(ids.insert(IdGivenBy(plane.get())).second);
  }
}

TEST(ZmqControlPlane, TheApplicationsRandomNumbersStayAsTheyAre) {
  srand(7);
  const std::vector<int> want = {rand(), rand(), rand(), rand()};
  srand(7);
  std::vector<int> got = {rand()};
  const std::unique_ptr<ControlPlane> plane = MakeHere(/*listen=*/true);
  got.push_back(rand());
  const std::unique_ptr<ControlPlane> another = MakeHere(/*listen=*/true);
  got.push_back(rand());
  got.push_back(rand());
  EXPECT_EQ(got, want);
}

// Of more than ZeroMQ takes at a time nothing is lost or overtaken, by either way, and what waits
// is known.
class ZmqControlPlanes : public testing::Test {
 protected:
  static Message Cancel(uint64_t id, size_t bytes) {
    return {1, 2, CancelMsg{id, std::string(bytes, 'x')}};
  }
  // Both sides go on until it is so.
  template <typename IsSo>
  bool WaitUntil(const IsSo& is_so) {
    return WaitFor(
        [&] {
          dials_->Progress(&answers_);
          listens_->Progress(&heard_);
          return is_so();
        },
        Soon());
  }
  void SendMany(ControlPlane* from, const PeerKey& to, Heard* from_hears, Heard* hears) {
    constexpr uint64_t kMany = 12000;
    const size_t before = hears->messages.size();
    for (uint64_t id = 1; id <= kMany; ++id) ASSERT_TRUE(IsOk(from->Send(to, Cancel(id, 500))));
    EXPECT_TRUE(WaitUntil([&] { return hears->messages.size() == before + kMany; }));
    for (uint64_t id = 1; id <= kMany; ++id) {
      ASSERT_EQ(std::get<CancelMsg>(hears->messages.at(before + id - 1)).transfer_id, id);
    }
    from->Progress(from_hears);
    EXPECT_EQ(from->BacklogOf(to).waiting, 0);
    EXPECT_FALSE(from->Waits());
  }

  const std::unique_ptr<ControlPlane> listens_ = MakeHere(/*listen=*/true);
  const std::unique_ptr<ControlPlane> dials_ = MakeHere(/*listen=*/false);
  Heard heard_;
  Heard answers_;
};

TEST_F(ZmqControlPlanes, WhatIsNotTakenAtOnceComesInOrder) {
  const PeerKey dialled = Must(dials_->Dial(listens_->listen_address()));
  SendMany(dials_.get(), dialled, &answers_, &heard_);
  SendMany(listens_.get(), heard_.peer, &heard_, &answers_);
}

// What takes long to read must not keep all else of the thread waiting for as many of it.
TEST_F(ZmqControlPlanes, LongMessagesAreHeardOneAtATime) {
  CallMsg call{1, "f", 1, {}};
  call.args.Set("bytes", std::string(Fields::kMaxTotalBytes / 2, 'x'));
  const auto most_at_once = [&](ControlPlane* from, const PeerKey& to, Heard* from_hears,
                                ControlPlane* at, Heard* hears) {
    constexpr size_t kMany = 30;
    size_t most = 0, all = 0;
    for (size_t i = 0; i < kMany; ++i) EXPECT_TRUE(IsOk(from->Send(to, {1, 2, call})));
    EXPECT_TRUE(WaitFor(
        [&] {
          from->Progress(from_hears);
          const size_t before = hears->messages.size();
          at->Progress(hears);
          most = std::max(most, hears->messages.size() - before);
          all += hears->messages.size() - before;
          return all == kMany;
        },
        Soon()));
    return most;
  };
  const PeerKey dialled = Must(dials_->Dial(listens_->listen_address()));
  EXPECT_LE(most_at_once(dials_.get(), dialled, &answers_, listens_.get(), &heard_), 2u);
  EXPECT_LE(most_at_once(listens_.get(), heard_.peer, &heard_, dials_.get(), &answers_), 1u);
}

// Each may have 2 MiB, and whoever sends them need not even be a peer.
TEST_F(ZmqControlPlanes, OfWhatIsNotHeardNotMuchIsTaken) {
  CallMsg call{1, "f", 1, {}};
  call.args.Set("bytes", std::string(400000, 'x'));
  const PeerKey dialled = Must(dials_->Dial(listens_->listen_address()));
  ASSERT_TRUE(IsOk(dials_->Send(dialled, {1, 2, call})));
  EXPECT_TRUE(WaitUntil([&] { return !heard_.messages.empty(); }));  // The connection stands.
  const auto is_taken = [&] {
    dials_->Progress(&answers_);
    return dials_->BacklogOf(dialled).waiting == 0;
  };
  int taken = 0;  // By ZeroMQ of both sides, and by the system between them.
  do {
    ASSERT_TRUE(IsOk(dials_->Send(dialled, {1, 2, call})));
  } while (WaitFor(is_taken, DeadlineInMs(2000)) && ++taken < 400);
  EXPECT_GE(taken, 64);
  EXPECT_LT(taken, 250);
}

TEST_F(ZmqControlPlanes, WhatIsNotTakenIsCountedAndHasALimit) {
  const PeerKey nobody = Must(dials_->Dial("tcp://127.0.0.1:1"));
  EXPECT_EQ(dials_->BacklogOf(nobody).waiting, 0);
  absl::Status status;
  int64_t sent = 0;
  for (; status.ok(); ++sent) status = dials_->Send(nobody, Cancel(1, 1000));
  EXPECT_TRUE(Fails(status, absl::StatusCode::kResourceExhausted, "it takes none"));
  EXPECT_GT(dials_->BacklogOf(nobody).waiting, kMaxMessagesWaiting);
  EXPECT_LT(dials_->BacklogOf(nobody).waiting, kMaxMessagesWaiting + 2000);
  EXPECT_GT(sent, kMaxMessagesWaiting / 2000);
  EXPECT_FALSE(dials_->Progress(&answers_));  // Nothing to be done about it.
  EXPECT_TRUE(dials_->Arm());
  EXPECT_TRUE(dials_->Waits());
  dials_->Hangup(nobody);
  EXPECT_EQ(dials_->BacklogOf(nobody).waiting, 0);
}

}  // namespace
}  // namespace kvferry
