// What arrives over TCP for pages on a device, which copies it while more arrives.

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/pool/guarded_memory.h"
#include "tests/support/status.h"
#include "tests/transport/tcp_planes.h"
#include "transport/tcp/tcp_data_plane.h"
#include "transport/tcp/tcp_frames.h"

namespace kvferry {
namespace {

// Somebody says what a peer would, in pieces of the test's choice.
class TcpToDevice : public TcpPlanes {
 protected:
  TcpToDevice() {
    a_ = nullptr;
    b_ = Must(TcpDataPlane::Create(memory_));
    at_b_.copies_late = true;
  }
  UniqueFd Peer() {
    Await();
    UniqueFd socket = Says(TcpHello::With(address_.token, 0).Bytes());
    const size_t arrived = arrived_.size();
    EXPECT_TRUE(StepsUntil([&] { return arrived_.size() > arrived; }));
    return socket;
  }
  // A chunk as it goes over the wire; its number is its transfer's id.
  std::string ChunkOf(size_t bytes) {
    payloads_.push_back(RandomBytes(bytes, payloads_.size()));
    const auto size = static_cast<uint32_t>(bytes);
    return TextOf(
               TcpFrame::Of(kTcpChunk, ChunkHeader{payloads_.size() - 1, 0, 0, size, 0}, bytes)) +
           TextOf(payloads_.back()) + TextOf(kTcpWhole);
  }
  // What the system takes at once is there at the next step.
  static void Send(const UniqueFd& socket, const std::string& words) {
    ASSERT_EQ(send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(words.size()));
  }
  // As much as the receiver takes, until all has come.
  void SendAll(const UniqueFd& socket, std::string words) {
    ASSERT_TRUE(StepsUntil([&] {
      const ssize_t sent =
          send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) words.erase(0, sent);
      return words.empty();
    }));
  }
  void ExpectAllChunks() {
    ASSERT_TRUE(StepsUntil([&] { return at_b_.chunks.size() == payloads_.size(); }));
    for (const auto& [header, bytes] : at_b_.chunks) {
      EXPECT_EQ(bytes, payloads_.at(header.transfer_id)) << header.transfer_id;
    }
  }

  GuardedMemory memory_;
  std::vector<std::vector<std::byte>> payloads_;
};

TEST_F(TcpToDevice, ReadsOnWhileAChunkIsCopied) {
  const UniqueFd peer = Peer();
  Send(peer, ChunkOf(20000) + ChunkOf(30000) + ChunkOf(10000));
  ExpectAllChunks();
  // The first two had their ends when the next one had come, the last one when nothing more did.
  EXPECT_EQ(at_b_.copies_at_end, (std::vector<size_t>{2, 3, 3}));
}

TEST_F(TcpToDevice, WaitsForAChunkWhenNothingMoreComes) {
  const UniqueFd peer = Peer();
  Send(peer, ChunkOf(20000) + ChunkOf(30000).substr(0, 10000));
  ASSERT_TRUE(StepsUntil([&] { return at_b_.begun == 2; }));
  EXPECT_EQ(at_b_.chunks.size(), 1u);
}

TEST_F(TcpToDevice, EndsAChunkAsSoonAsItIsCopied) {
  const UniqueFd peer = Peer();
  at_b_.wants = [&] {  // Is asked when a chunk begins.
    for (const auto& copy : at_b_.copies) EXPECT_TRUE(IsOk(copy->Wait()));
    return true;
  };
  Send(peer, ChunkOf(20000) + ChunkOf(30000) + ChunkOf(10000));
  ExpectAllChunks();
  EXPECT_EQ(at_b_.begun_at_end, (std::vector<int>{2, 3, 3}));
  EXPECT_EQ(at_b_.copies_at_end, (std::vector<size_t>{1, 2, 3}));
}

TEST_F(TcpToDevice, ChunksOfAllSizes) {
  const UniqueFd peer = Peer();
  std::string words;
  for (const size_t bytes : {1, 700000, 1 << 20, 1, 3000000, 1048577, 5, 2 << 20, 100}) {
    words += ChunkOf(bytes);
  }
  SendAll(peer, words);
  ExpectAllChunks();
}

TEST_F(TcpToDevice, AMessageComesBehindTheChunksBeforeIt) {
  const UniqueFd peer = Peer();
  const std::string message = "seven b";
  Send(peer, ChunkOf(20000) + TextOf(TcpFrame::Of(kTcpMessage, MessageHeader{3}, message.size())) +
                 message + ChunkOf(10));
  ASSERT_TRUE(StepsUntil([&] { return !at_b_.messages.empty(); }));
  ExpectAllChunks();
  EXPECT_EQ(at_b_.begun_at_end, (std::vector<int>{1, 2}));
}

// A chunk that had come when the connection broke counts.
TEST_F(TcpToDevice, AChunkBeforeTheConnectionEnds) {
  UniqueFd peer = Peer();
  Send(peer, ChunkOf(20000) + ChunkOf(30000));
  peer = UniqueFd();
  ASSERT_TRUE(StepsUntil([&] { return !at_b_.down.empty(); }));
  ExpectAllChunks();
}

TEST_F(TcpToDevice, AChunkBeforeWhatIsNoFrame) {
  const UniqueFd peer = Peer();
  Send(peer, ChunkOf(20000) + TextOf(TcpFrame{99, 0}));
  ASSERT_TRUE(StepsUntil([&] { return !at_b_.down.empty(); }));
  ExpectAllChunks();
}

TEST_F(TcpToDevice, ConnectionsTakeTurnsInTheMiddleOfTheirChunks) {
  constexpr size_t kSlice = 7000;
  std::vector<UniqueFd> peers;
  std::vector<std::string> words;
  for (int i = 0; i < 3; ++i) {
    peers.push_back(Peer());
    words.push_back(ChunkOf(100000) + ChunkOf(50000));
  }
  for (size_t at = 0; at < words[0].size(); at += kSlice) {
    for (size_t i = 0; i < peers.size(); ++i) {
      Send(peers[i], words[i].substr(at, kSlice));
      if (i != 1) Step();
    }
  }
  ExpectAllChunks();
}

// Nobody else is given the memory that it is read from.
TEST_F(TcpToDevice, WhatIsCopiedWhenAConnectionIsClosed) {
  const UniqueFd first = Peer();
  const LinkId link = link_b_;
  const std::string words = ChunkOf(20000);
  Send(first, words.substr(0, 20000));
  ASSERT_TRUE(StepsUntil([&] { return at_b_.begun == 1; }));
  const UniqueFd second = Peer();
  Send(second, ChunkOf(10000));  // Has the first one's part copied on.
  ASSERT_TRUE(StepsUntil([&] { return at_b_.chunks.size() == 1; }));
  const std::vector<std::byte> part(payloads_[0].begin(), payloads_[0].begin() + 100);
  ASSERT_EQ(at_b_.copies.size(), 2u);
  EXPECT_FALSE(at_b_.copies[0]->done());
  b_->Close(link);
  Send(second, ChunkOf(10000) + ChunkOf(10000));
  ASSERT_TRUE(StepsUntil([&] { return at_b_.chunks.size() == 3; }));
  EXPECT_TRUE(at_b_.copies[0]->done());
}

TEST_F(TcpToDevice, WhatIsCopiedWhenThePlaneGoes) {
  const UniqueFd first = Peer();
  Send(first, ChunkOf(20000).substr(0, 20000));
  ASSERT_TRUE(StepsUntil([&] { return at_b_.begun == 1; }));
  const UniqueFd second = Peer();
  Send(second, ChunkOf(10000));
  ASSERT_TRUE(StepsUntil([&] { return at_b_.chunks.size() == 1; }));
  EXPECT_FALSE(at_b_.copies.at(0)->done());
  b_ = nullptr;
  EXPECT_TRUE(at_b_.copies.at(0)->done());
}

}  // namespace
}  // namespace kvferry
