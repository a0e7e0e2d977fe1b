// The data plane to peers on this host by itself: two of them in one process, progressed by hand,
// and strangers at its socket.

#include "transport/mapped/mapped_data_plane.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/random.h"
#include "tests/support/captured_log.h"
#include "tests/support/files.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"
#include "tests/transport/recorder.h"
#include "transport/mapped/unix_socket.h"
#include "transport/messages.h"

namespace kvferry {
namespace {

constexpr int64_t kChunkBytes = 4096;
constexpr int64_t kPoolBytes = 64 << 10;

// A list of so many places and what else it has: all entries are two numbers each.
std::vector<PoolPiece> ListOf(std::vector<PoolPiece> entries, uint64_t places = 0) {
  entries.insert(entries.begin(), {places, 0});
  return entries;
}

constexpr int64_t kAnswerTimeoutMs = 20000;
// What is said to a hello: its kind, and how it was taken.
constexpr uint64_t kMapped[] = {8, 0}, kCannot[] = {8, 1}, kNotNow[] = {8, 2};

struct Side {
  explicit Side(int64_t num_chunks = 16)
      : arena(Must(Arena::Create(num_chunks * kChunkBytes, kChunkBytes))),
        plane(Must(MakeMappedDataPlane(arena.get(), {.shared = &pool}, kAnswerTimeoutMs))) {}

  // A chunk full of `fill`; it is given back when its send is done.
  int64_t Send(LinkId link, uint8_t fill, uint32_t bytes = kChunkBytes) {
    const int64_t chunk = arena->Take();
    const auto payload = arena->Bytes(chunk).first(bytes);
    std::fill(payload.begin(), payload.end(), std::byte{fill});
    plane->SendPayload(link, {fill, 0, 0, bytes, 0}, payload,
                       [this, chunk](const absl::Status& status) {
                         arena->GiveBack(chunk);
                         done.push_back(status);
                       });
    return chunk;
  }
  bool Progress() { return plane->Progress(&events); }

  // A chunk that lies in those pieces of the pool.
  int64_t SendInPool(LinkId link, const std::vector<PoolPiece>& pieces, uint32_t bytes) {
    return SendList(link, ListOf(pieces), bytes);
  }
  int64_t SendList(LinkId link, const std::vector<PoolPiece>& entries, uint32_t bytes) {
    const int64_t chunk = arena->Take();
    const auto list = std::as_bytes(std::span(entries));
    std::copy(list.begin(), list.end(), arena->Bytes(chunk).begin());
    plane->SendPayload(link, {1, 0, 0, bytes, kChunkInPool}, arena->Bytes(chunk).first(list.size()),
                       [this, chunk](const absl::Status& status) {
                         arena->GiveBack(chunk);
                         done.push_back(status);
                       });
    return chunk;
  }

  Recorder events;
  std::vector<absl::Status> done;
  SharedMemory pool = Must(SharedMemory::Create("test-pool", kPoolBytes));
  std::unique_ptr<Arena> arena;
  std::unique_ptr<AddressedPlane> plane;  // Goes first, and completes what is under way.
};

template <typename Predicate>
bool ProgressBoth(Side& a, Side& b, const Predicate& holds) {
  return StepUntil([&] { a.Progress(), b.Progress(); }, holds);
}

class MappedPlanes : public testing::Test {
 protected:
  template <typename Predicate>
  bool ProgressUntil(const Predicate& holds) {
    return ProgressBoth(a_, b_, holds);
  }

  Side a_;
  Side b_;
};

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
  for (int count = 100; count < 500; ++count) {
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
// Memory whose parts are named by where they lie in this process: so can strangers name them.
class NamedMemory final : public PoolMemory {
 public:
  std::string name() const override { return "named memory"; }
  bool on_host() const override { return false; }
  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes) const override {
    return HostMemory()->Allocate(bytes);
  }
  absl::Status Run(std::span<const TokenCopy> copies, ThreadPool* threads) const override {
    return HostMemory()->Run(copies, threads);
  }
  absl::Status RunQuantized(std::span<const QuantizedCopy> copies,
                            ThreadPool* threads) const override {
    return HostMemory()->RunQuantized(copies, threads);
  }
  absl::Status RunApart(std::span<const TokenCopy> copies) const override {
    return HostMemory()->RunApart(copies);
  }
  absl::Status MoveApart(std::span<const BytesMove> moves) const override {
    return HostMemory()->MoveApart(moves);
  }
  absl::StatusOr<std::shared_ptr<const void>> Pin(
      std::span<const std::span<std::byte>> /*pieces*/) const override {
    return nullptr;
  }
  absl::StatusOr<std::vector<SharedPart>> Share(std::span<const std::byte> bytes) const override {
    const std::byte* const begin = bytes.data();
    return std::vector<SharedPart>{{std::string(reinterpret_cast<const char*>(&begin), 8),
                                    static_cast<int64_t>(bytes.size())}};
  }
  absl::StatusOr<std::shared_ptr<const std::byte>> MapShared(absl::string_view name,
                                                             int64_t /*bytes*/) const override {
    const std::byte* begin = nullptr;
    if (name.size() != sizeof begin) return absl::UnavailableError("another device's");
    std::memcpy(&begin, name.data(), sizeof begin);
    return std::shared_ptr<const std::byte>(std::shared_ptr<void>(), begin);
  }
};

// A side whose pool lies on a device.
struct DeviceSide : Side {
  explicit DeviceSide(const std::vector<PoolMemory::SharedPart>& parts) { Offer(parts); }
  explicit DeviceSide(int64_t num_parts) { Offer(Parts(num_parts)); }

  void Offer(const std::vector<PoolMemory::SharedPart>& parts) {
    plane = Must(MakeMappedDataPlane(arena.get(), {nullptr, parts, &memory}, kAnswerTimeoutMs));
  }
  // The pool, in as many parts: the last bytes are the first part.
  std::vector<PoolMemory::SharedPart> Parts(int64_t num_parts) const {
    std::vector<PoolMemory::SharedPart> parts;
    for (int64_t i = num_parts - 1; i >= 0; --i) {
      const auto bytes = static_cast<size_t>(kPoolBytes / num_parts);
      parts.push_back(Must(memory.Share({pool.data.get() + i * bytes, bytes}))[0]);
    }
    return parts;
  }

  NamedMemory memory;
};

TEST(MappedDevicePools, PiecesLieInAnyOfTheParts) {
  constexpr int64_t kParts = 8, kPartBytes = kPoolBytes / kParts;
  DeviceSide a(kParts), b(0);
  for (int64_t i = 0; i < kPoolBytes; ++i) a.pool.data.get()[i] = static_cast<std::byte>(i / 100);
  const LinkId link = Must(a.plane->Connect(b.plane->address()));
  EXPECT_FALSE(a.plane->ReadsPool(link));
  ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.plane->ReadsPool(link); }));
  EXPECT_FALSE(a.plane->ReadsPool(link + 1));
  // In one part, over the border of two, over several whole ones.
  const std::vector<PoolPiece> pieces = {{10, 20}, {kPartBytes - 5, 11}, {100, 40000}};
  a.SendInPool(link, pieces, 40031);
  ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.done.size() == 1; }));
  ASSERT_EQ(b.events.chunks.size(), 1u);
  std::vector<std::byte> want;
  for (const PoolPiece& piece : pieces) {
    for (uint64_t at = piece.offset; at < piece.offset + piece.bytes; ++at) {
      const uint64_t part = kParts - 1 - at / kPartBytes;
      want.push_back(a.pool.data.get()[part * kPartBytes + at % kPartBytes]);
    }
  }
  EXPECT_EQ(b.events.chunks[0].second, want);
}

TEST(MappedDevicePools, RunsAtPlaces) {
  constexpr int64_t kParts = 4, kPartBytes = kPoolBytes / kParts;
  DeviceSide a(kParts), b(0);
  for (int64_t i = 0; i < kPoolBytes; ++i) {
    a.pool.data.get()[i] = static_cast<std::byte>(i * i / 300);
  }
  const LinkId link = Must(a.plane->Connect(b.plane->address()));
  ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.plane->ReadsPool(link); }));
  // Up to the end of a part; items of other sizes in another one; the same ones again.
  const std::vector<PoolPiece> places = {
      {kPartBytes - 190, 10}, {3 * kPartBytes, 100}, {kPartBytes + 7, 1}, {kPartBytes + 7, 1}};
  const std::vector<PoolPiece> runs = {{18, 1}, {0, 3}, {5, 1}};
  std::vector<PoolPiece> entries = places;
  entries.insert(entries.end(), runs.begin(), runs.end());
  a.SendList(link, ListOf(entries, places.size()), 5 * 112);
  ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.done.size() == 1; }));
  std::vector<std::byte> want;
  for (const PoolPiece& place : places) {
    for (const PoolPiece& run : runs) {
      for (uint64_t i = 0; i < run.bytes * place.bytes; ++i) {
        const uint64_t at = place.offset + run.offset * place.bytes + i;
        const uint64_t part = kParts - 1 - at / kPartBytes;
        want.push_back(a.pool.data.get()[part * kPartBytes + at % kPartBytes]);
      }
    }
  }
  ASSERT_EQ(b.events.chunks.size(), 1u);
  EXPECT_EQ(b.events.chunks[0].second, want);
  EXPECT_TRUE(b.events.whole[0]);
  EXPECT_TRUE(b.events.down.empty());
}

// Each is dropped, whatever its numbers come to where they overflow.
TEST(MappedDevicePools, HostilePlaces) {
  struct Case {
    uint64_t places;
    std::vector<PoolPiece> entries;
    uint32_t bytes;
    std::string why;
  };
  constexpr uint64_t kHalf = uint64_t{1} << 63, kAll = UINT64_MAX, kPart = kPoolBytes / 2;
  const std::vector<Case> cases = {
      {65537, {{0, 1}, {0, 1}}, 1, "65537 places"},
      {3, {{0, 1}, {0, 1}}, 2, "3 places in a list of 3"},
      {kAll, {{0, 1}, {0, 1}}, 1, "places in a list"},
      {1, {{0, 1}}, 1, "places without runs"},
      {1, {{0, 1}, {0, 0}}, 0, "items 0 + 0"},
      {1, {{0, 1}, {0, 1}, {0, 0}}, 1, "items 0 + 0"},
      {1, {{0, 1}, {kAll, 1}}, 1, "+ 1 after 0"},
      {1, {{0, 1}, {0, kAll}}, 1, "after 0 of a chunk of 1"},
      {1, {{0, 1}, {0, 1}, {0, kAll}}, 1, "after 1 of a chunk of 1"},
      {1, {{0, 1}, {0, 6}, {0, 6}}, 11, "items 0 + 6 after 6"},
      {1, {{0, 0}, {0, 1}}, 1, "items of 0 bytes"},
      {1, {{0, kHalf}, {0, 2}}, 2, "2 items of 9223372036854775808 bytes"},
      {2, {{0, 10}, {0, kHalf}, {0, 2}}, 20, "0 left"},
      {1, {{0, 10}, {0, 2}}, 19, "2 items of 10 bytes"},
      {1, {{0, 10}, {0, 2}}, 21, "places of 20 bytes for a chunk of 21"},
      {2, {{0, 10}, {0, 10}, {0, 2}}, 39, "19 left"},
      {2, {{0, 10}, {0, 10}, {0, 2}}, 41, "places of 40 bytes"},
      {1, {{kPoolBytes, 1}, {0, 1}}, 1, "of a pool's part"},
      {1, {{kAll, 1}, {0, 1}}, 1, "of a pool's part"},
      {1, {{kAll, 1}, {1, 1}}, 1, "of a pool's part"},
      {1, {{0, 1}, {kPart, 1}}, 1, "of a pool's part"},
      {1, {{0, 2}, {kPart / 2, 1}}, 2, "of a pool's part"},
      {1, {{kPart - 10, 1}, {0, 11}}, 11, "of a pool's part"},
      {2, {{0, 1}, {kPart - 10, 1}, {10, 1}, {0, 1}}, 4, "of a pool's part"},
      // Ends at byte 2^64.
      {1, {{0, uint64_t{1} << 31}, {(uint64_t{1} << 33) - 1, 1}}, 1U << 31, "of a pool's part"},
  };
  for (const Case& c : cases) {
    CapturedLog log;
    DeviceSide a(2), b(0);
    const LinkId link = Must(a.plane->Connect(b.plane->address()));
    ASSERT_TRUE(ProgressBoth(a, b, [&] { return a.plane->ReadsPool(link); }));
    a.SendList(link, ListOf(c.entries, c.places), c.bytes);
    EXPECT_TRUE(ProgressBoth(a, b, [&] { return !a.events.down.empty(); })) << c.why;
    EXPECT_TRUE(log.Has({"dropped a peer on this host", c.why})) << c.why << log.ToString();
    EXPECT_TRUE(b.events.chunks.empty());
  }
}

// A pool on the host takes copies of what lies on a device in any case: that it cannot map it is no news,
// and nothing that other settings of containers would change.
TEST(MappedDevicePools, OfWhichAPoolOnTheHostSaysNothing) {
  const CapturedLog log;
  DeviceSide a(8);
  Side host;
  host.plane =
      Must(MakeMappedDataPlane(host.arena.get(), {.memory = HostMemory().get()}, kAnswerTimeoutMs));
  const LinkId link = Must(a.plane->Connect(host.plane->address()));
  a.Send(link, 1);
  ASSERT_TRUE(ProgressBoth(a, host, [&] { return a.done.size() == 1; }));
  EXPECT_FALSE(a.plane->ReadsPool(link));
  EXPECT_TRUE(log.lines().empty()) << log.ToString();
}

TEST(MappedDevicePools, WhoCannotMapThemGetsCopies) {
  DeviceSide a(0), other(0);
  std::vector<PoolMemory::SharedPart> parts = a.Parts(8);
  parts[5].name = "of another device";
  a.Offer(parts);
  Side host;
  const LinkId to_other = Must(a.plane->Connect(other.plane->address()));
  const LinkId to_host = Must(a.plane->Connect(host.plane->address()));
  a.Send(to_other, 1);
  a.Send(to_host, 2);
  ASSERT_TRUE(StepUntil([&] { a.Progress(), other.Progress(), host.Progress(); },
                        [&] { return a.done.size() == 2; }));
  EXPECT_TRUE(IsOk(a.done[0]));
  EXPECT_TRUE(IsOk(a.done[1]));
  EXPECT_FALSE(a.plane->ReadsPool(to_other));
  EXPECT_FALSE(a.plane->ReadsPool(to_host));
  EXPECT_EQ(other.events.chunks.size(), 1u);
  // And is not sent pieces of them.
  a.SendInPool(to_other, {{0, 10}}, 10);
  EXPECT_TRUE(ProgressBoth(a, other, [&] { return a.events.down.size() == 1; }));
}

// Each is dropped: what such a peer says is not to be believed.
TEST(MappedDevicePools, HostileParts) {
  const auto is_dropped = [](const std::vector<PoolMemory::SharedPart>& parts, const auto& send) {
    DeviceSide a(parts), b(0);
    const LinkId link = Must(a.plane->Connect(b.plane->address()));
    ProgressBoth(a, b, [&] { return a.plane->ReadsPool(link) || !a.events.down.empty(); });
    if (a.events.down.empty()) send(a, link);
    return ProgressBoth(a, b, [&] { return !a.events.down.empty(); });
  };
  const auto nothing = [](DeviceSide&, LinkId) {};
  static std::byte memory[100];
  const auto part = [&](int64_t bytes) {
    return PoolMemory::SharedPart{Must(NamedMemory().Share(memory))[0].name, bytes};
  };
  EXPECT_TRUE(is_dropped({part(0)}, nothing));
  EXPECT_TRUE(is_dropped({part(-1)}, nothing));
  EXPECT_TRUE(is_dropped({part(int64_t{1} << 45), part(1)}, nothing));
  EXPECT_TRUE(is_dropped({{"", 1}}, nothing));
  EXPECT_TRUE(is_dropped({part(100)}, [](DeviceSide& a, LinkId link) {
    a.SendInPool(link, {{90, 11}}, 11);
  }));
  EXPECT_TRUE(is_dropped({part(100)}, [](DeviceSide& a, LinkId link) {
    a.SendInPool(link, {{UINT64_MAX, 2}}, 2);
  }));
  EXPECT_TRUE(is_dropped({part(100)}, [](DeviceSide& a, LinkId link) {
    const std::vector<PoolPiece> pieces = ListOf({{0, 10}});
    const auto list = std::as_bytes(std::span(pieces));
    const auto chunk = a.arena->Bytes(a.arena->Take());
    std::copy(list.begin(), list.end(), chunk.begin());
    a.plane->SendPayload(link, {1, 0, 0, 10, kChunkInPool | kChunkHasChecksum},
                         chunk.first(list.size()), [](const absl::Status&) {});
  }));
}

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

// ---------------------------------------------------------------- strangers

struct HelloBytes {
  uint32_t kind = 1;
  uint32_t zero = 0;
  uint64_t magic = 0x6b7666657272792f;
  uint64_t version = 5;
  char token[16] = {};
  uint64_t num_chunks = 4;
  uint64_t chunk_bytes = kChunkBytes;
  uint64_t pool_bytes = 0;
};
struct ChunkBytes {
  uint32_t kind = 2;
  uint32_t zero = 0;
  ChunkHeader header{1, 0, 0, 100, 0};
  uint64_t slot = 0;
  uint64_t generation = 0;
  uint64_t payload_bytes = 100;
};

class Stranger : public MappedPlanes {
 protected:
  UniqueFd Dial() {
    const std::string name =
        absl::StrCat("kvferry/", absl::BytesToHexString(b_.plane->address().substr(1, 16)));
    return Must(ConnectUnix(name));
  }
  HelloBytes Hello() {
    HelloBytes hello;
    b_.plane->address().copy(hello.token, 16, 17);
    return hello;
  }
  template <typename Message>
  static void Say(const UniqueFd& socket, const Message& message, int passed = -1) {
    const std::vector<int> fds(passed < 0 ? 0 : 1, passed);
    SayWith(socket, message, fds);
  }
  template <typename Message>
  static void SayWith(const UniqueFd& socket, const Message& message, std::span<const int> passed) {
    ASSERT_EQ(SendPacket(socket, std::as_bytes(std::span(&message, 1)), passed), SocketResult::kOk);
  }
  // It answers our hello, if it does, hangs up on us, says why, and goes on serving others.
  void ExpectHangUp(const UniqueFd& socket, const std::string& why,
                    std::span<const uint64_t> answer = kMapped) {
    Packet packet;
    std::vector<uint64_t> heard(2);
    const auto is_down = [&] {
      b_.Progress();
      const SocketResult result = ReceivePacket(socket, &packet);
      if (result == SocketResult::kOk && packet.size == 16 && packet.bytes[0] == std::byte{8}) {
        std::memcpy(heard.data(), packet.bytes, packet.size);
      }
      return result == SocketResult::kBroken;
    };
    EXPECT_TRUE(WaitFor(is_down, Soon()));
    EXPECT_TRUE(std::equal(heard.begin(), heard.end(), answer.begin())) << heard[1];
    if (!why.empty()) {
      EXPECT_TRUE(log_.Has({"a peer on this host", why})) << log_.ToString();
    }
    EXPECT_TRUE(b_.events.chunks.empty());
    const LinkId link = Must(a_.plane->Connect(b_.plane->address()));
    a_.Send(link, 5);
    EXPECT_TRUE(ProgressUntil([&] { return a_.done.size() == 1; }));
    EXPECT_TRUE(IsOk(a_.done[0]));
  }
  // A memfd as an arena is, or one whose owner could still shrink it.
  static UniqueFd Memory(int64_t bytes, bool sealed) {
    UniqueFd fd(memfd_create("stranger", MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
    if (sealed) {
      EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    }
    return fd;
  }
  static constexpr int64_t kEnough = 4096 + 4 * kChunkBytes;
  CapturedLog log_;
};

// Closing a descriptor that a child has too does not take it out of an epoll.
TEST_F(Stranger, WhoLeavesIsGoneAlsoFromAForkedChild) {
  const UniqueFd socket = Dial();
  Say(socket, Hello(), Memory(kEnough, true).get());
  ASSERT_TRUE(ProgressUntil([&] { return !IsReadable(b_.plane->event_fd()); }));
  const ForkedChild child;
  shutdown(socket.get(), SHUT_RDWR);
  ASSERT_TRUE(IsReadable(b_.plane->event_fd()));
  EXPECT_TRUE(b_.Progress());
  EXPECT_FALSE(IsReadable(b_.plane->event_fd()));
}

TEST_F(Stranger, OfAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  UniqueFd socket;
  // The user of a thread, for the call is the system's own; libc's would change all threads.
  std::thread other([&] {
    ASSERT_EQ(syscall(SYS_setresuid, -1, 65534, -1), 0);
    socket = Dial();
  });
  other.join();
  ExpectHangUp(socket, "runs as user 65534", kCannot);
}

// Where this process has no descriptors left for it.
TEST_F(Stranger, WhoseMemoryIsLostOnTheWay) {
  const UniqueFd socket = Dial();
  const UniqueFd memory = Memory(kEnough, true);
  b_.Progress();
  Say(socket, Hello(), memory.get());
  {
    const FileLimit none(0);
    b_.Progress();
  }
  ExpectHangUp(socket, "", kNotNow);
}

TEST_F(Stranger, WrongToken) {
  const UniqueFd socket = Dial();
  HelloBytes hello = Hello();
  hello.token[3] ^= 1;
  Say(socket, hello, Memory(kEnough, true).get());
  ExpectHangUp(socket, "token", kCannot);
}

TEST_F(Stranger, WrongVersion) {
  const UniqueFd socket = Dial();
  HelloBytes hello = Hello();
  hello.version = 4;
  Say(socket, hello, Memory(kEnough, true).get());
  ExpectHangUp(socket, "version", kCannot);
}

TEST_F(Stranger, ChunkBeforeHello) {
  const UniqueFd socket = Dial();
  Say(socket, ChunkBytes());
  ExpectHangUp(socket, "hello", kCannot);
}

TEST_F(Stranger, NoMemory) {
  const UniqueFd socket = Dial();
  Say(socket, Hello());
  ExpectHangUp(socket, "hello", kCannot);
}

TEST_F(Stranger, MemoryThatCouldShrink) {
  const UniqueFd socket = Dial();
  Say(socket, Hello(), Memory(kEnough, false).get());
  ExpectHangUp(socket, "shorter", kCannot);
}

TEST_F(Stranger, MemoryThatIsTooShort) {
  const UniqueFd socket = Dial();
  Say(socket, Hello(), Memory(kEnough - 1, true).get());
  ExpectHangUp(socket, "20479 bytes, not 20480", kCannot);
}

TEST_F(Stranger, AnArenaBeyondAllBounds) {
  for (const auto& [chunks, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 4096}, {4, 0}, {uint64_t{1} << 63, 2}, {UINT64_MAX, UINT64_MAX}}) {
    const UniqueFd socket = Dial();
    HelloBytes hello = Hello();
    hello.num_chunks = chunks;
    hello.chunk_bytes = bytes;
    Say(socket, hello, Memory(kEnough, true).get());
    a_.done.clear();
    b_.events.chunks.clear();
    ExpectHangUp(socket, "an arena of", kCannot);
  }
}

TEST_F(Stranger, ChunksOutsideTheArena) {
  ChunkBytes slot;
  slot.slot = 4;
  ChunkBytes huge_slot;
  huge_slot.slot = UINT64_MAX;
  ChunkBytes bytes;
  bytes.header.bytes = kChunkBytes + 1;
  bytes.payload_bytes = kChunkBytes + 1;
  ChunkBytes more;  // Than lie in the slot, which has only so much of it.
  more.header.bytes = 101;
  ChunkBytes pool;  // That was not passed.
  pool.header.flags = kChunkInPool;
  for (const ChunkBytes& chunk : {slot, huge_slot, bytes, more, pool}) {
    const UniqueFd socket = Dial();
    Say(socket, Hello(), Memory(kEnough, true).get());
    Say(socket, chunk);
    a_.done.clear();
    b_.events.chunks.clear();
    ExpectHangUp(socket, "in slot");
  }
}

TEST_F(Stranger, APoolBeyondAllBounds) {
  for (const uint64_t pool_bytes : {uint64_t{1} << 46, UINT64_MAX, uint64_t{4096}}) {
    const UniqueFd socket = Dial();
    HelloBytes hello = Hello();
    hello.pool_bytes = pool_bytes;
    Say(socket, hello, Memory(kEnough, true).get());  // And no pool passed.
    a_.done.clear();
    b_.events.chunks.clear();
    ExpectHangUp(socket, "a pool of", kCannot);
  }
  const UniqueFd socket = Dial();
  HelloBytes hello = Hello();
  hello.pool_bytes = 8192;
  const UniqueFd arena = Memory(kEnough, true);
  const UniqueFd pool = Memory(8191, true);
  SayWith(socket, hello, std::vector<int>{arena.get(), pool.get()});
  a_.done.clear();
  b_.events.chunks.clear();
  ExpectHangUp(socket, "8191 bytes, not 8192", kCannot);
}

TEST_F(Stranger, PiecesOutsideThePool) {
  struct Case {
    std::vector<PoolPiece> pieces;
    uint32_t bytes;
    std::string why;
    uint64_t places = 0;
  };
  for (const Case& c : std::vector<Case>{{{{8192, 1}}, 1, "bytes 8192 + 1 of a pool of 8192"},
                                         {{{0, 8193}}, 8193, "of a pool of"},
                                         {{{UINT64_MAX, 2}}, 1, "of a pool of"},
                                         {{{1, UINT64_MAX}}, 1, "of a pool of"},
                                         {{{0, 100}}, 101, "pieces of 100 bytes"},
                                         {{{0, 100}, {0, 100}}, 150, "pieces of 200 bytes"},
                                         {{}, 1, "pieces of 0 bytes"},
                                         {{{0, 1}, {0, 1}}, 1, "of a pool on the host", 1}}) {
    const UniqueFd socket = Dial();
    HelloBytes hello = Hello();
    hello.pool_bytes = 8192;
    const UniqueFd arena(Memory(kEnough, false));
    const std::vector<PoolPiece> list = ListOf(c.pieces, c.places);
    ASSERT_EQ(pwrite(arena.get(), list.data(), list.size() * sizeof(PoolPiece), 4096),
              static_cast<ssize_t>(list.size() * sizeof(PoolPiece)));
    ASSERT_EQ(fcntl(arena.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    const UniqueFd pool = Memory(8192, true);
    SayWith(socket, hello, std::vector<int>{arena.get(), pool.get()});
    ChunkBytes chunk;
    chunk.header.bytes = c.bytes;
    chunk.header.flags = kChunkInPool;
    chunk.payload_bytes = list.size() * sizeof(PoolPiece);
    Say(socket, chunk);
    a_.done.clear();
    b_.events.chunks.clear();
    ExpectHangUp(socket, c.why);
  }
}

TEST_F(Stranger, OddSizes) {
  for (const size_t size : {1, 8, 23, 56, 63, 64, 4096}) {
    const UniqueFd socket = Dial();
    Say(socket, Hello(), Memory(kEnough, true).get());
    const std::vector<std::byte> bytes(size, std::byte{2});
    ASSERT_EQ(SendPacket(socket, bytes), SocketResult::kOk);
    a_.done.clear();
    b_.events.chunks.clear();
    ExpectHangUp(socket, absl::StrCat("a packet of ", size, " bytes"));
  }
  const UniqueFd socket = Dial();
  ASSERT_EQ(SendPacket(socket, std::vector<std::byte>(5000)), SocketResult::kOk);
  Packet packet;
  EXPECT_TRUE(WaitFor(
      [&] { return b_.Progress(), ReceivePacket(socket, &packet) == SocketResult::kBroken; },
      Soon()));
}

struct MessageBytes {
  uint32_t kind = 5;
  uint32_t zero = 0;
  uint64_t session = 7;
  uint64_t bytes_after = 0;
  std::array<char, 8> bytes{};
};

TEST_F(Stranger, MessagesBeyondAllBounds) {
  const MessageBytes ends;
  const MessageBytes huge{.bytes_after = UINT64_MAX};
  const MessageBytes too_much{.bytes_after = kMaxMessageBytes - 7};
  const MessageBytes promises{.bytes_after = kMaxMessageBytes - 8};
  for (const std::vector<MessageBytes>& parts : std::vector<std::vector<MessageBytes>>{
           {huge}, {too_much}, {ends, huge}, {promises, promises}, {promises, too_much}}) {
    const UniqueFd socket = Dial();
    Say(socket, Hello(), Memory(kEnough, true).get());
    for (const MessageBytes& part : parts) Say(socket, part);
    a_.done.clear();
    b_.events.chunks.clear();
    ExpectHangUp(socket, "bytes, limit 2097152");
  }
  EXPECT_EQ(b_.events.messages.size(), 1u);  // What ended.
}

struct PartBytes {
  uint32_t kind = 6;
  uint32_t zero = 0;
  uint64_t bytes = 8;
  uint64_t parts_after = 0;
  std::array<char, 8> name{};
};

TEST_F(Stranger, PartsWithoutEnd) {
  static const NamedMemory memory;
  b_.plane = Must(MakeMappedDataPlane(b_.arena.get(), {&b_.pool, {}, &memory}, kAnswerTimeoutMs));
  for (const uint64_t parts_after : {uint64_t{1} << 16, UINT64_MAX, UINT64_MAX - 1}) {
    const UniqueFd socket = Dial();
    Say(socket, Hello(), Memory(kEnough, true).get());
    Say(socket, PartBytes{.parts_after = 5});
    Say(socket, PartBytes{.parts_after = 5});
    Say(socket, PartBytes{.parts_after = parts_after});
    a_.done.clear();
    b_.events.chunks.clear();
    ExpectHangUp(socket, absl::StrCat(parts_after, " to come"));
  }
}

// The end of this side's connection to it is noticed before all it has sent is read.
TEST_F(Stranger, NothingIsHeardBehindWhatMakesNoSense) {
  const LinkId link = Must(b_.plane->Connect(a_.plane->address()));
  const UniqueFd socket = Dial();
  Say(socket, Hello(), Memory(kEnough, true).get());
  ASSERT_TRUE(
      ProgressUntil([&] { return b_.plane->IsOpen(link) && !IsReadable(b_.plane->event_fd()); }));
  Say(socket, MessageBytes{.session = 1});
  Say(socket, MessageBytes{.session = 2});
  Say(socket, uint64_t{3});
  Say(socket, MessageBytes{.session = 4});
  a_.plane.reset();
  ASSERT_TRUE(StepUntil([&] { b_.Progress(); }, [&] { return !b_.events.down.empty(); }));
  b_.plane->Close(link);
  Packet packet;
  ASSERT_TRUE(StepUntil([&] { b_.Progress(); },
                        [&] { return ReceivePacket(socket, &packet) == SocketResult::kBroken; }));
  EXPECT_EQ(b_.events.messages.size(), 2u);
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

// Peers by hand that are given memory.
class GivenMemory : public testing::Test {
 protected:
  // With `answer`, unless that is empty, and with what it was sent unread.
  void LetGo(std::span<const uint64_t> answer) {
    const UniqueFd accepted = AcceptUnix(listener_);
    ASSERT_TRUE(accepted.valid());
    if (!answer.empty()) {
      ASSERT_EQ(SendPacket(accepted, std::as_bytes(answer)), SocketResult::kOk);
    }
  }
  absl::Status Down() {
    EXPECT_TRUE(StepUntil([&] { a_.Progress(); }, [&] { return !a_.events.down.empty(); }));
    if (a_.events.down.empty()) return absl::OkStatus();
    EXPECT_TRUE(a_.events.open.empty());
    a_.plane->Close(a_.events.down[0].first);
    return std::exchange(a_.events.down, {})[0].second;
  }

  Side a_;
  const std::string name_ = RandomBytes16();
  const std::string address_ = absl::StrCat("\x05", name_, std::string(16, 't'));
  const UniqueFd listener_ =
      Must(ListenUnix(absl::StrCat("kvferry/", absl::BytesToHexString(name_))));
};

// Whether it listens on says nothing: a process that ends closes one thing after another.
TEST_F(GivenMemory, WhoLetsGoWithoutAWordHasEnded) {
  for (const bool is_sent_more : {false, true}) {
    const LinkId link = Must(a_.plane->Connect(address_));
    LetGo({});
    if (is_sent_more) a_.Send(link, 5);
    EXPECT_TRUE(Fails(Down(), absl::StatusCode::kUnavailable, "gone"));
  }
}

TEST_F(GivenMemory, WhoIsShortOfSomethingMayBeAskedAgain) {
  for (const bool is_sent_more : {false, true}) {
    const LinkId link = Must(a_.plane->Connect(address_));
    LetGo(kNotNow);
    if (is_sent_more) a_.Send(link, 5);
    EXPECT_TRUE(Fails(Down(), absl::StatusCode::kResourceExhausted, "just now"));
  }
}

TEST_F(GivenMemory, WhoCannotMapItIsNotAskedAgain) {
  Must(a_.plane->Connect(address_));
  LetGo(kCannot);
  EXPECT_TRUE(Fails(Down(), absl::StatusCode::kFailedPrecondition, "cannot map"));
  EXPECT_TRUE(Fails(a_.plane->Connect(address_).status(), absl::StatusCode::kFailedPrecondition,
                    "said before"));
}

TEST_F(GivenMemory, WhoAnswersNothingInTimeIsGivenUp) {
  Must(a_.plane->Connect(address_));
  const Deadline end = a_.plane->Tick(Clock::now());
  EXPECT_LE(end, DeadlineInMs(kAnswerTimeoutMs));
  EXPECT_TRUE(a_.plane->Arm());
  EXPECT_EQ(a_.plane->Tick(end), Deadline::max());
  EXPECT_FALSE(a_.plane->Arm());
  EXPECT_TRUE(Fails(Down(), absl::StatusCode::kResourceExhausted, "within 20000 ms"));
}

// What is handed out cannot be written through.
TEST(SharedMemory, OnlyItsOwnerWrites) {
  const SharedMemory memory = Must(SharedMemory::Create("test", 8192));
  memory.data.get()[8191] = std::byte{7};
  EXPECT_EQ(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd.get(), 0),
            MAP_FAILED);
  EXPECT_NE(ftruncate(memory.fd.get(), 0), 0);
  EXPECT_NE(write(memory.fd.get(), "x", 1), 1);
  const auto seen = Must(MapPeersMemory(memory.fd, 8192));
  EXPECT_EQ(seen.get()[8191], std::byte{7});
  EXPECT_TRUE(Fails(SharedMemory::Create("test", int64_t{1} << 62).status(),
                    absl::StatusCode::kResourceExhausted, "the system refused"));
}

}  // namespace
}  // namespace kvferry
