#include "transport/mapped/mapped_data_plane.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>

#include "tests/support/files.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"
#include "tests/transport/mapped_planes.h"
#include "transport/messages.h"

namespace kvferry {
namespace {

TEST_F(MappedPlanes, ChunksAndCreditsInOrder) {
  const LinkId there = Must(a_.plane->Connect(b_.plane->address()));
  const LinkId back = Must(b_.plane->Connect(a_.plane->address()));
  EXPECT_GE(there, kFirstMappedLink);
  for (uint8_t i = 1; i <= 10; ++i) a_.Send(there, i, i * 400);
  b_.plane->SendCredit(back, {UINT64_MAX, 7});
  ASSERT_TRUE(ProgressUntil([&] { return a_.done.size() == 10 && !a_.events.credits.empty(); }));
  ASSERT_EQ(b_.events.chunks.size(), 10u);
  for (uint8_t i = 1; i <= 10; ++i) {
    const auto& [header, payload] = b_.events.chunks[i - 1];
    EXPECT_EQ(header.transfer_id, i);
    EXPECT_EQ(payload, std::vector<std::byte>(i * 400, std::byte{i}));
    EXPECT_TRUE(b_.events.whole[i - 1]);
    EXPECT_TRUE(IsOk(a_.done[i - 1]));
  }
  EXPECT_EQ(a_.events.credits[0].transfer_id, UINT64_MAX);
  EXPECT_EQ(a_.arena->num_taken(), 0);
}

// Nor end the connection.
TEST_F(MappedPlanes, APeerHearsOfTheEndDespiteAForkedChild) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  a_.Send(link, 1);
  ASSERT_TRUE(ProgressUntil([&] { return a_.done.size() == 1; }));
  const ForkedChild child;
  b_.plane.reset();
  EXPECT_TRUE(StepUntil([&] { a_.Progress(); }, [&] { return !a_.events.down.empty(); }));
}

// Our end of the connection to whoever listens.
int DialledSocket() {
  for (int fd = 3; fd < 1024; ++fd) {
    int type = 0;
    socklen_t bytes = sizeof(type);
    sockaddr_un peer{};
    socklen_t peer_bytes = sizeof(peer);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && type == SOCK_SEQPACKET &&
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_bytes) == 0 &&
        peer_bytes > sizeof(peer.sun_family)) {
      return fd;
    }
  }
  return -1;
}

// As the system does when it has no memory: a packet is lost, and the socket is well.
TEST_F(MappedPlanes, APacketThatIsNotTakenEndsTheLink) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  a_.Send(link, 1);
  ASSERT_TRUE(ProgressUntil([&] { return a_.done.size() == 1; }));
  EXPECT_TRUE(a_.plane->Arm());
  ASSERT_EQ(shutdown(DialledSocket(), SHUT_WR), 0);
  a_.Send(link, 2);
  EXPECT_FALSE(a_.plane->Arm());
  EXPECT_TRUE(a_.Progress());
  ASSERT_EQ(a_.events.down.size(), 1u);
  EXPECT_EQ(a_.events.down[0].first, link);
  a_.plane->Close(link);
  EXPECT_TRUE(Fails(a_.done.at(1), absl::StatusCode::kUnavailable));
  EXPECT_TRUE(a_.plane->Arm());
}

TEST_F(MappedPlanes, MessagesOfAnyLengthAmongChunks) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  ASSERT_TRUE(a_.plane->carries_messages());
  const std::vector<size_t> sizes = {1, 100, 4071, 4072, 4073, 8144, 100000, kMaxMessageBytes, 1};
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::string text(sizes[i], static_cast<char>('a' + i));
    text.back() = '.';
    ASSERT_TRUE(IsOk(a_.plane->SendMessage(link, {i}, text)));
    a_.Send(link, 1, 1);
  }
  ASSERT_TRUE(ProgressUntil([&] { return a_.done.size() == sizes.size(); }));
  ASSERT_EQ(b_.events.messages.size(), sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto& [session, bytes] = b_.events.messages[i];
    EXPECT_EQ(session, i);
    ASSERT_EQ(bytes.size(), sizes[i]);
    EXPECT_EQ(bytes.back(), std::byte{'.'});
    EXPECT_EQ(std::count(bytes.begin(), bytes.end() - 1, static_cast<std::byte>('a' + i)),
              static_cast<int64_t>(sizes[i]) - 1);
  }
}

// The end of one connection is heard before what came over the other.
TEST_F(MappedPlanes, WhatWasSaidBeforeTheEndIsHeard) {
  // Its words about chunks find nobody, or lie unread when the peer goes.
  enum class Chunk { kNone, kIsRead, kIsToBeRead };
  for (const Chunk chunk : {Chunk::kNone, Chunk::kIsRead, Chunk::kIsToBeRead}) {
    Side gone;
    const LinkId link = Must(gone.plane->Connect(b_.plane->address()));
    const LinkId back = Must(b_.plane->Connect(gone.plane->address()));
    ASSERT_TRUE(
        ProgressBoth(gone, b_, [&] { return gone.plane->IsOpen(link) && b_.plane->IsOpen(back); }));
    if (chunk != Chunk::kNone) gone.Send(link, 5);
    if (chunk == Chunk::kIsRead) {
      ASSERT_TRUE(StepUntil([&] { b_.Progress(); }, [&] { return !b_.events.chunks.empty(); }));
    }
    for (uint64_t i = 1; i <= 3; ++i) {
      ASSERT_TRUE(IsOk(gone.plane->SendMessage(link, {i}, std::string(5000, 'x'))));
    }
    gone.plane.reset();
    ASSERT_TRUE(StepUntil([&] { b_.Progress(); }, [&] { return !b_.events.down.empty(); }));
    EXPECT_EQ(b_.events.messages.size(), 3u);
    b_.plane->Close(back);
    b_.events = {};
  }
}

TEST_F(MappedPlanes, APeerThatTakesNoMessages) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  EXPECT_TRUE(Fails(a_.plane->SendMessage(99, {1}, "x"), absl::StatusCode::kUnavailable));
  absl::Status status;
  int sent = 0;
  for (; status.ok() && sent < 100000; ++sent) {
    status = a_.plane->SendMessage(link, {1}, std::string(4000, 'x'));
  }
  EXPECT_TRUE(Fails(status, absl::StatusCode::kResourceExhausted, "takes none"));
  EXPECT_GT(a_.plane->BacklogOf(link).waiting, kMaxMessagesWaiting);
  const int64_t taken = a_.plane->BacklogOf(link).taken;
  const auto& messages = b_.events.messages;
  EXPECT_TRUE(ProgressUntil([&] { return messages.size() + 1 == static_cast<size_t>(sent); }));
  EXPECT_EQ(a_.plane->BacklogOf(link).waiting, 0);
  EXPECT_GT(a_.plane->BacklogOf(link).taken, taken + kMaxMessagesWaiting);
}

// Of messages alone: what it says of chunks, and of credits, is another matter.
TEST(MappedPlane, ABacklogIsOfMessages) {
  Side sender(3000);
  Side reader;
  const LinkId link = Must(sender.plane->Connect(reader.plane->address()));
  for (int i = 0; i < 3000; ++i) sender.Send(link, 1, 1);
  EXPECT_EQ(sender.plane->BacklogOf(link).waiting, 0);
  ASSERT_TRUE(IsOk(sender.plane->SendMessage(link, {1}, "some words")));
  EXPECT_GT(sender.plane->BacklogOf(link).waiting, 0);
  EXPECT_LT(sender.plane->BacklogOf(link).waiting, 200);
  ASSERT_TRUE(ProgressBoth(reader, sender, [&] { return !reader.events.messages.empty(); }));
  EXPECT_EQ(sender.plane->BacklogOf(link).waiting, 0);
}

// It sends chunk after chunk meanwhile: of each transfer it is told the last credit, when it reads.
TEST_F(MappedPlanes, APeerThatTakesNoCredits) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  for (uint64_t i = 1; i <= 100000; ++i) a_.plane->SendCredit(link, {i % 3, i});
  ASSERT_TRUE(IsOk(a_.plane->SendMessage(link, {1}, "x")));
  std::vector<uint64_t> last(3);
  ASSERT_TRUE(ProgressUntil([&] {
    for (const CreditHeader& credit : b_.events.credits) {
      last[credit.transfer_id] = credit.bytes_done;
    }
    return last == std::vector<uint64_t>{99999, 100000, 99998};
  }));
  EXPECT_LT(b_.events.credits.size(), 10000u);  // What the socket had room for, and three.
}

// Of which there is always some: the peer would send no more chunks.
TEST(MappedPlane, CreditsDoNotWaitForWhatComesLater) {
  Side sender(1000);
  Side reader;
  const LinkId link = Must(sender.plane->Connect(reader.plane->address()));
  for (int i = 0; i < 600; ++i) sender.Send(link, 1, 1);
  const auto arrives = [&](const auto& send_more) {
    reader.events.credits.clear();
    sender.plane->SendCredit(link, {1, 7});
    int rounds = 0;
    return ProgressBoth(reader, sender,
                        [&] {
                          send_more();
                          return ++rounds == 5000 || !reader.events.credits.empty();
                        }) &&
           rounds < 5000;
  };
  EXPECT_TRUE(arrives([&] {
    while (sender.arena->num_taken() < 600) sender.Send(link, 1, 1);
  }));
  EXPECT_TRUE(arrives([&] {
    while (sender.plane->BacklogOf(link).waiting < kMaxMessagesWaiting) {
      EXPECT_TRUE(IsOk(sender.plane->SendMessage(link, {1}, std::string(4000, 'x'))));
    }
  }));
}

// Nor the other way round: more of them than the socket takes at once.
TEST_F(MappedPlanes, MessagesDoNotWaitForCreditsThatComeLater) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  uint64_t bytes = 0;
  const auto credit_all = [&] {
    ++bytes;
    for (uint64_t id = 1; id <= 2000; ++id) a_.plane->SendCredit(link, {id, bytes});
  };
  credit_all();
  ASSERT_TRUE(IsOk(a_.plane->SendMessage(link, {1}, "x")));
  ASSERT_TRUE(ProgressUntil([&] {
    credit_all();
    return !b_.events.messages.empty() || bytes == 2000;
  }));
  EXPECT_FALSE(b_.events.messages.empty());
}

// A chunk may be megabytes to copy: whoever has sent many of them waits after each.
TEST_F(MappedPlanes, PeersTakeTurnsChunkByChunk) {
  Side c;
  for (Side* side : {&a_, &c}) {
    const LinkId link = Must(side->plane->Connect(b_.plane->address()));
    for (int i = 0; i < 5; ++i) side->Send(link, side == &a_ ? 1 : 2);
  }
  const auto& chunks = b_.events.chunks;
  ASSERT_TRUE(ProgressUntil([&] { return chunks.size() == 10; }));
  for (size_t i = 0; i < 10; i += 2) {
    EXPECT_NE(chunks[i].first.transfer_id, chunks[i + 1].first.transfer_id) << i;
  }
}

// More than a socket holds: the rest waits here, and goes in order.
TEST(MappedPlane, ManyChunksAtOnce) {
  Side sender(3000);
  Side reader;
  const LinkId link = Must(sender.plane->Connect(reader.plane->address()));
  for (int i = 0; i < 3000; ++i) sender.Send(link, static_cast<uint8_t>(i % 251), 1);
  ASSERT_TRUE(ProgressBoth(reader, sender, [&] { return sender.done.size() == 3000; }));
  ASSERT_EQ(reader.events.chunks.size(), 3000u);
  for (size_t i = 0; i < 3000; ++i) {
    ASSERT_EQ(reader.events.chunks[i].second[0], static_cast<std::byte>(i % 251)) << i;
  }
}

// However many did not fit, nobody is kept awake once they have gone.
TEST(MappedPlane, SleepsAfterAFullSocket) {
  const Deadline enough = DeadlineInMs(20000);  // However few a loaded machine has tried by then.
  for (int count = 100; count < 500 && Clock::now() < enough; ++count) {
    Side sender(count);
    Side reader(1);
    const LinkId link = Must(sender.plane->Connect(reader.plane->address()));
    for (int i = 0; i < count; ++i) sender.Send(link, 1, 1);
    ASSERT_TRUE(ProgressBoth(reader, sender,
                             [&] { return sender.done.size() == static_cast<size_t>(count); }));
    pollfd fd = {sender.plane->event_fd(), POLLIN, 0};
    sender.Progress();
    ASSERT_EQ(poll(&fd, 1, 0), 0) << count;
  }
}

// The reader was stopped: when it goes on, the chunk may hold something else.
TEST_F(MappedPlanes, AChunkThatWasTakenBackIsNotIntact) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  ASSERT_TRUE(ProgressUntil([&] { return a_.plane->IsOpen(link); }));
  const int64_t chunk = a_.Send(link, 1);
  a_.plane->Close(link);
  ASSERT_EQ(a_.done.size(), 1u);
  EXPECT_TRUE(Fails(a_.done[0], absl::StatusCode::kUnavailable, "closed"));
  const LinkId next = Must(a_.plane->Connect(b_.plane->address()));
  ASSERT_EQ(a_.Send(next, 2), chunk) << "the same chunk is used again";
  ASSERT_TRUE(ProgressUntil([&] { return b_.events.whole.size() == 2; }));
  EXPECT_FALSE(b_.events.whole[0]);
  EXPECT_TRUE(b_.events.whole[1]);
  EXPECT_EQ(b_.events.chunks[1].second[0], std::byte{2});
}

TEST_F(MappedPlanes, AChunkThatIsTakenBackWhileItIsReadIsNotIntact) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  a_.Send(link, 1);
  b_.events.before_intact = [&] { a_.plane->Close(link); };
  ASSERT_TRUE(ProgressUntil([&] { return !b_.events.whole.empty(); }));
  EXPECT_FALSE(b_.events.whole[0]);
}

TEST_F(MappedPlanes, ChunksThatLieInThePool) {
  for (int64_t i = 0; i < kPoolBytes; ++i) a_.pool.data.get()[i] = static_cast<std::byte>(i % 251);
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  EXPECT_TRUE(a_.plane->ReadsPool(link));
  const std::vector<PoolPiece> pieces = {{5000, 3000}, {0, 1}, {kPoolBytes - 7, 7}, {5000, 100}};
  a_.SendInPool(link, pieces, 3108);
  ASSERT_TRUE(ProgressUntil([&] { return a_.done.size() == 1; }));
  std::vector<std::byte> want;
  for (const PoolPiece& piece : pieces) {
    const std::byte* from = a_.pool.data.get() + piece.offset;
    want.insert(want.end(), from, from + piece.bytes);
  }
  ASSERT_EQ(b_.events.chunks.size(), 1u);
  EXPECT_EQ(b_.events.chunks[0].second, want);
  EXPECT_TRUE(b_.events.whole[0]);
}

// What the slot says is another chunk's by the time it is read: no reason to drop the peer.
TEST_F(MappedPlanes, AListThatWasTakenBack) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  const int64_t chunk = a_.SendInPool(link, {{0, 100}}, 100);
  a_.arena->TakeFromReaders(chunk);
  const auto bytes = a_.arena->Bytes(chunk);
  std::fill(bytes.begin(), bytes.end(), std::byte{0xff});
  ASSERT_TRUE(ProgressUntil([&] { return a_.done.size() == 1; }));
  EXPECT_TRUE(IsOk(a_.done[0])) << "it is through with it";
  ASSERT_EQ(b_.events.whole.size(), 1u);
  EXPECT_FALSE(b_.events.whole[0]);
}

TEST_F(MappedPlanes, EverySendCompletesOnceWhenThePeerGoesAway) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  for (uint8_t i = 0; i < 16; ++i) a_.Send(link, i);
  b_.plane.reset();
  ASSERT_TRUE(WaitFor([&] { return a_.Progress(), !a_.events.down.empty(); }, Soon()));
  EXPECT_EQ(a_.events.down[0].first, link);
  EXPECT_FALSE(a_.Progress()) << "it is reported once, and keeps nobody awake";
  a_.plane->Close(link);
  a_.plane->Close(link);  // No-op.
  EXPECT_EQ(a_.done.size(), 16u);
  EXPECT_EQ(a_.events.down.size(), 1u);
}

// One that drops the connection before it has read anything is not asked again, so that the next
// session goes over UCX; one that has read, and then went away, is.
TEST_F(MappedPlanes, WhoRefusesOnceIsLeftAlone) {
  std::string address = b_.plane->address();
  address.back() = static_cast<char>(address.back() + 1);  // As if b_ could not take it.
  ASSERT_TRUE(IsOk(a_.plane->Connect(address)));
  ASSERT_TRUE(ProgressUntil([&] { return !a_.events.down.empty(); }));
  EXPECT_TRUE(Fails(a_.plane->Connect(address), absl::StatusCode::kFailedPrecondition, "before"));
  const std::string good = b_.plane->address();
  const LinkId link = Must(a_.plane->Connect(good));
  a_.Send(link, 1);
  ASSERT_TRUE(ProgressUntil([&] { return a_.done.size() == 1; }));
  b_.plane.reset();
  ASSERT_TRUE(WaitFor(
      [&] {
        a_.Progress();
        return a_.events.down.size() == 2;
      },
      Soon()));
  // Nobody is there, which is another matter.
  EXPECT_FALSE(absl::IsFailedPrecondition(a_.plane->Connect(good).status()));
}

TEST_F(MappedPlanes, SleepsUntilSomethingComes) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  while (b_.Progress()) {
  }
  pollfd fd = {b_.plane->event_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&fd, 1, 0), 0);
  a_.plane->SendCredit(link, {1, 2});
  EXPECT_EQ(poll(&fd, 1, 1000), 1);
}

TEST_F(MappedPlanes, BadArguments) {
  const std::string address = b_.plane->address();
  EXPECT_TRUE(Fails(a_.plane->Connect("").status(), absl::StatusCode::kInvalidArgument, "0 bytes"));
  EXPECT_TRUE(Fails(a_.plane->Connect(address + "x").status(), absl::StatusCode::kInvalidArgument,
                    "34 bytes"));
  std::string newer = address;
  ++newer[0];
  EXPECT_TRUE(Fails(a_.plane->Connect(newer).status(), absl::StatusCode::kInvalidArgument,
                    "another version"));
  std::string nobody = address;
  nobody[1] = static_cast<char>(nobody[1] + 1);
  EXPECT_TRUE(Fails(a_.plane->Connect(nobody).status(), absl::StatusCode::kUnavailable, "connect"));
  absl::Status status;
  const auto keep = [&](const absl::Status& s) { status = s; };
  a_.plane->SendPayload(99, {}, a_.arena->Bytes(0), keep);
  EXPECT_TRUE(Fails(status, absl::StatusCode::kUnavailable, "closed"));
  const LinkId link = Must(a_.plane->Connect(address));
  const std::vector<std::byte> elsewhere(10);
  a_.plane->SendPayload(link, {}, elsewhere, keep);
  EXPECT_TRUE(Fails(status, absl::StatusCode::kInvalidArgument, "no chunk of the arena"));
}

// Before the answer nothing says that the peer will read what it is told.
TEST_F(MappedPlanes, ALinkIsOpenOnceThePeerHasMapped) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  EXPECT_FALSE(a_.plane->IsOpen(link));
  EXPECT_TRUE(ProgressUntil([&] { return !a_.events.open.empty(); }));
  EXPECT_TRUE(a_.plane->IsOpen(link));
  EXPECT_EQ(a_.events.open, std::vector<LinkId>{link});
  EXPECT_EQ(a_.plane->Tick(Deadline::max()), Deadline::max());
}

// It has been taken for one that does not answer, and is reached another way.
TEST_F(MappedPlanes, ALinkThatHasBeenGivenUpDoesNotOpen) {
  const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
  pollfd answer{a_.plane->event_fd(), POLLIN, 0};
  ASSERT_TRUE(StepUntil([&] { b_.Progress(); }, [&] { return poll(&answer, 1, 0) == 1; }));
  a_.plane->Tick(DeadlineInMs(kAnswerTimeoutMs + 1));
  a_.Progress();
  ASSERT_FALSE(a_.events.down.empty());
  EXPECT_TRUE(Fails(a_.events.down[0].second, absl::StatusCode::kResourceExhausted, "within"));
  EXPECT_TRUE(a_.events.open.empty());
  EXPECT_FALSE(a_.plane->IsOpen(link));
}

// What is handed out cannot be written through.
TEST(SharedMemory, OnlyItsOwnerWrites) {
  const SharedMemory memory = Must(SharedMemory::Create("test", 8192));
  memory.data.get()[8191] = std::byte{7};
  EXPECT_EQ(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd.get(), 0),
            MAP_FAILED);
  EXPECT_NE(ftruncate(memory.fd.get(), 0), 0);
  EXPECT_NE(ftruncate(memory.fd.get(), 16384), 0);
  EXPECT_NE(fcntl(memory.fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);  // They stay as they are.
  EXPECT_NE(write(memory.fd.get(), "x", 1), 1);
  const auto seen = Must(MapPeersMemory(memory.fd, 8192));
  EXPECT_EQ(seen.get()[8191], std::byte{7});
  EXPECT_TRUE(Fails(SharedMemory::Create("test", int64_t{1} << 62).status(),
                    absl::StatusCode::kResourceExhausted, "the system refused"));
}

}  // namespace
}  // namespace kvferry
