// Strangers at the socket of a data plane for this host, and peers that are given its memory: all
// of them by hand.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
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
#include "tests/transport/mapped_planes.h"
#include "transport/mapped/unix_socket.h"
#include "transport/messages.h"

namespace kvferry {
namespace {

// What is said to a hello: its kind, and how it was taken.
constexpr uint64_t kMapped[] = {8, 0}, kCannot[] = {8, 1}, kNotNow[] = {8, 2};

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
  // The last two are as long as the memory is, modulo 2^64.
  const std::pair<uint64_t, uint64_t> shapes[] = {
      {0, 4096},
      {4, 0},
      {uint64_t{1} << 63, 2},
      {UINT64_MAX, UINT64_MAX},
      {(uint64_t{1} << 61) + 4, kChunkBytes},
      {4, (uint64_t{1} << 62) + kChunkBytes},
  };
  for (const auto& [chunks, bytes] : shapes) {
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

TEST_F(Stranger, AListWithoutAHead) {
  for (const uint64_t bytes : {0, 15}) {
    const UniqueFd socket = Dial();
    HelloBytes hello = Hello();
    hello.pool_bytes = 8192;
    const UniqueFd arena(Memory(kEnough, true)), pool = Memory(8192, true);
    SayWith(socket, hello, std::vector<int>{arena.get(), pool.get()});
    ChunkBytes chunk;
    chunk.header.flags = kChunkInPool;
    chunk.payload_bytes = bytes;
    Say(socket, chunk);
    a_.done.clear();
    b_.events.chunks.clear();
    ExpectHangUp(socket, "a list without a head");
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

// All that is kept for who asks for more and more and takes no answer is bounded.
TEST_F(Stranger, WhoReadsNothingOfWhatItIsTold) {
  const UniqueFd socket = Dial();
  Say(socket, Hello(), Memory(kEnough, true).get());
  const ChunkBytes chunk;
  SocketResult result = SocketResult::kOk;
  for (int said = 0; said < 40000 && result != SocketResult::kBroken; ++said) {
    result = SendPacket(socket, std::as_bytes(std::span(&chunk, 1)));
    b_.Progress();
  }
  EXPECT_EQ(result, SocketResult::kBroken);
  EXPECT_TRUE(log_.Has({"a peer on this host", "does not read"})) << log_.ToString();
  EXPECT_GT(b_.events.chunks.size(), 16384u);
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

}  // namespace
}  // namespace kvferry
