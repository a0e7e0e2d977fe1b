// What goes over the connections of the TCP data plane, by itself.

#include "transport/tcp/tcp_data_plane.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/status.h"
#include "tests/transport/tcp_planes.h"
#include "transport/tcp/tcp_frames.h"

namespace kvferry {
namespace {

FillChunk FilledWith(const std::vector<std::byte>& bytes) {
  return [&bytes](ChunkHeader*) { return std::span<const std::byte>(bytes); };
}
// In pieces of `piece_bytes`, while `open`.
LendChunk LentFrom(const std::vector<std::byte>& bytes, size_t piece_bytes, const bool* open) {
  return [&bytes, piece_bytes, open](int64_t from, int64_t most,
                                     absl::FunctionRef<void(Pieces)> read) {
    if (!*open) return false;
    std::vector<std::span<const std::byte>> pieces;
    const auto rest = std::span<const std::byte>(bytes).subspan(from);
    for (auto left = rest.first(std::min<size_t>(rest.size(), most)); !left.empty();) {
      const size_t take = std::min(left.size(), piece_bytes);
      pieces.push_back(left.first(take));
      left = left.subspan(take);
    }
    read(pieces);
    return true;
  };
}

TEST_F(TcpPlanes, ChunksOfAllSizesHoweverTheyAreSentAndTaken) {
  Connect();
  const bool open = true;
  const std::vector<size_t> sizes = {1, 2, 7, 8, 64, 1000, 4096, 8191, 65536, 262145, 3000000};
  std::vector<std::vector<std::byte>> payloads;
  for (size_t i = 0; i < sizes.size(); ++i) payloads.push_back(RandomBytes(sizes[i], i));
  for (const bool fills : {false, true}) {
    at_a_.prefers_fill = fills;
    at_a_.chunks.clear();
    size_t sent = 0;
    for (size_t i = 0; i < 3 * sizes.size(); ++i) {
      const std::vector<std::byte>& payload = payloads[i / 3];
      const ChunkHeader header{1000 + i, i << 40, ~i, static_cast<uint32_t>(payload.size()),
                               kChunkHasChecksum};
      ChunkSource source = FilledWith(payload);
      if (i % 3 == 1) source = LentFrom(payload, 1 << 20, &open);
      if (i % 3 == 2) source = LentFrom(payload, 700, &open);  // More pieces than a call takes.
      b_->SendChunk(link_b_, header, source, [&](const absl::Status& status) {
        EXPECT_TRUE(IsOk(status));
        ++sent;
      });
      if (i % 5 == 0) b_->SendCredit(link_b_, {i, i});
    }
    ASSERT_TRUE(StepsUntil([&] { return at_a_.chunks.size() == 3 * sizes.size(); }));
    EXPECT_EQ(sent, 3 * sizes.size());
    for (size_t i = 0; i < at_a_.chunks.size(); ++i) {
      const auto& [header, payload] = at_a_.chunks[i];
      EXPECT_EQ(header.transfer_id, 1000 + i);
      EXPECT_EQ(header.offset, i << 40);
      EXPECT_EQ(header.checksum, ~i);
      EXPECT_EQ(payload, payloads[i / 3]) << i;
    }
  }
  EXPECT_EQ(at_a_.credits.size(), 2 * ((3 * sizes.size() + 4) / 5));
  EXPECT_EQ(arrived_, std::vector<int64_t>{0});
}

// Buffers of a few KiB: frames, payloads and ends are cut anywhere.
TEST_F(TcpPlanes, HoweverTheSystemCutsThem) {
  small_buffers_ = true;
  Connect();
  const bool open = true;
  const std::vector<std::byte> bytes = RandomBytes(20000, 1);
  std::mt19937_64 random(2);
  std::vector<std::vector<std::byte>> payloads(3000);
  for (size_t i = 0; i < payloads.size(); ++i) {
    payloads[i].assign(bytes.begin(), bytes.begin() + 1 + static_cast<int64_t>(random() % 20000));
    const ChunkHeader header{i, 0, 0, static_cast<uint32_t>(payloads[i].size()), 0};
    ChunkSource source = FilledWith(payloads[i]);
    if (i % 2 == 0) source = LentFrom(payloads[i], 1 + random() % 3000, &open);
    b_->SendChunk(link_b_, header, source,
                  [](const absl::Status& status) { EXPECT_TRUE(IsOk(status)); });
  }
  at_a_.prefers_fill = true;
  ASSERT_TRUE(
      StepsUntil([&] { return at_a_.chunks.size() == payloads.size() || !at_b_.down.empty(); }));
  ASSERT_EQ(at_a_.chunks.size(), payloads.size());
  for (size_t i = 0; i < payloads.size(); ++i) ASSERT_EQ(at_a_.chunks[i].second, payloads[i]) << i;
}

// What has come of a chunk that is not whole goes on to where it belongs when another connection
// has something to read, or with its own connection.
TEST_F(TcpPlanes, ConnectionsThatTakeTurnsInTheMiddleOfTheirChunks) {
  constexpr size_t kBytes = 100000, kSlice = 7000;
  std::vector<UniqueFd> sockets;
  std::vector<LinkId> links;
  std::vector<std::string> words;
  std::vector<std::vector<std::byte>> payloads;
  for (uint64_t i = 0; i < 3; ++i) {
    Await();
    links.push_back(link_b_);
    sockets.push_back(Says(TcpHello::With(address_.token, 0).Bytes()));
    ASSERT_TRUE(StepsUntil([&] { return arrived_.size() == i + 1; }));
    payloads.push_back(RandomBytes(kBytes, i));
    words.push_back(TextOf(TcpFrame::Of(kTcpChunk, ChunkHeader{i, 0, 0, kBytes, 0}, kBytes)) +
                    TextOf(payloads[i]) + TextOf(kTcpWhole));
  }
  for (size_t at = 0; at < words[0].size(); at += kSlice) {
    for (size_t i = 0; i < sockets.size(); ++i) {
      if (!sockets[i].valid()) continue;
      const std::string slice = words[i].substr(at, kSlice);
      ASSERT_EQ(send(sockets[i].get(), slice.data(), slice.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(slice.size()));
      Step();
      // While the bytes that wait are those of this one.
      if (i == 1 && at == 5 * kSlice) {
        b_->Close(links[1]);
        sockets[1] = UniqueFd();
      }
      if (i == 2 && at == 8 * kSlice) sockets[2] = UniqueFd();
    }
  }
  ASSERT_TRUE(StepsUntil([&] { return !at_b_.chunks.empty() && !at_b_.down.empty(); }));
  ASSERT_EQ(at_b_.chunks.size(), 1u);
  EXPECT_EQ(at_b_.chunks[0].second, payloads[0]);
  EXPECT_EQ(at_b_.down[0].first, links[2]);
}

// What is listed and not taken is listed, and fetched from memory, again.
TEST_F(TcpPlanes, AsMuchIsListedAsTheSocketIsLikelyToTake) {
  constexpr int64_t kBytes = 2 << 20;
  const bool open = true;
  const std::vector<std::byte> payload = RandomBytes(kBytes, 1);
  for (const bool small : {false, true}) {
    small_buffers_ = small;
    Connect();
    std::vector<int64_t> asked;
    int64_t listed = 0;
    LendChunk lend = [&, lent = LentFrom(payload, 2048, &open)](
                         int64_t from, int64_t most, absl::FunctionRef<void(Pieces)> read) {
      asked.push_back(most);
      listed += std::min(most, kBytes - from);
      return lent(from, most, read);
    };
    b_->SendChunk(link_b_, {1, 0, 0, kBytes, 0}, std::move(lend),
                  [](const absl::Status& status) { EXPECT_TRUE(IsOk(status)); });
    at_a_.chunks.clear();
    ASSERT_TRUE(StepsUntil([&] { return !at_a_.chunks.empty(); }));
    EXPECT_EQ(at_a_.chunks[0].second, payload);
    EXPECT_EQ(asked.front(), 1 << 20);
    if (small) {
      EXPECT_GT(asked.size(), 20u);
      EXPECT_LT(*std::max_element(asked.begin() + 2, asked.end()), 256 << 10);
    } else {
      EXPECT_LT(listed, 3 * kBytes);
    }
  }
}

TEST_F(TcpPlanes, CreditsGoBothWaysAndBeforeChunksThatWait) {
  Connect();
  const std::vector<std::byte> payload = RandomBytes(4 << 20, 1);
  for (uint64_t i = 0; i < 8; ++i) {
    b_->SendChunk(link_b_, {i, 0, 0, 4 << 20, 0}, FilledWith(payload), [](const absl::Status&) {});
  }
  b_->SendCredit(link_b_, {9, 10});
  a_->SendCredit(link_a_, {11, 12});
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.credits.empty() && !at_b_.credits.empty(); }));
  EXPECT_LT(at_a_.chunks.size(), 8u);
  EXPECT_EQ(at_a_.credits[0].bytes_done, 10u);
  EXPECT_EQ(at_b_.credits[0].transfer_id, 11u);
}

// Cut anywhere, with chunks and credits between them.
TEST_F(TcpPlanes, MessagesOfAnyLengthInOrder) {
  small_buffers_ = true;
  Await();
  const bool open = true;
  const std::vector<std::byte> payload = RandomBytes(5000, 1);
  std::vector<std::vector<std::byte>> messages;
  const auto say = [&](size_t size) {
    messages.push_back(RandomBytes(size, size));
    const std::string_view text(reinterpret_cast<const char*>(messages.back().data()), size);
    ASSERT_TRUE(IsOk(b_->SendMessage(link_b_, {messages.size()}, text)));
  };
  for (size_t i = 1; i < 20; ++i) say(i);  // Before the other side has come.
  link_a_ = Must(a_->Open(Connection(address_.token, address_.answer), DeadlineInMs(5000)));
  size_t sent = 0;
  for (const size_t size : {1, 40, 48, 3000, 70000, 300000, 8, 2 << 20, 1}) {
    say(size);
    b_->SendChunk(link_b_, {size, 0, 0, 5000, 0}, LentFrom(payload, 700, &open),
                  [&](const absl::Status& status) {
                    EXPECT_TRUE(IsOk(status));
                    ++sent;
                  });
    b_->SendCredit(link_b_, {messages.size(), size});
    for (int i = 0; i < 3; ++i) Step();
  }
  ASSERT_TRUE(StepsUntil([&] { return sent == 9 && at_a_.messages.size() == messages.size(); }));
  for (size_t i = 0; i < messages.size(); ++i) {
    EXPECT_EQ(at_a_.messages[i].first, i + 1);
    EXPECT_EQ(at_a_.messages[i].second, messages[i]) << i;
  }
  ASSERT_TRUE(StepsUntil([&] { return at_a_.chunks.size() == 9; }));
  for (const auto& [header, bytes] : at_a_.chunks) EXPECT_EQ(bytes, payload);
  EXPECT_EQ(at_a_.credits.size(), 9u);
}

// More than the system holds on its way.
TEST_F(TcpPlanes, NothingIsSaidInTheMiddleOfAChunk) {
  Connect();
  const std::vector<std::byte> payload = RandomBytes(16000000, 1);
  b_->SendChunk(link_b_, {1, 0, 0, 16000000, 0}, FilledWith(payload), [](const absl::Status&) {});
  ASSERT_TRUE(StepsUntil([&] { return at_a_.begun == 1; }));
  ASSERT_TRUE(at_a_.chunks.empty());
  b_->SendCredit(link_b_, {1, 2});
  ASSERT_TRUE(IsOk(b_->SendMessage(link_b_, {5}, "words")));
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.messages.empty() || !at_a_.down.empty(); }));
  ASSERT_EQ(at_a_.chunks.size(), 1u);
  EXPECT_EQ(at_a_.chunks[0].second, payload);
  EXPECT_EQ(at_a_.credits.size(), 1u);
}

// Nor do chunks keep messages from their turn.
TEST_F(TcpPlanes, LongMessagesAndChunksTakeTurns) {
  Connect();
  const std::vector<std::byte> payload = RandomBytes(5000, 1);
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(IsOk(b_->SendMessage(link_b_, {1}, std::string(1 << 20, 'x'))));
  }
  for (uint64_t i = 0; i < 8; ++i) {
    b_->SendChunk(link_b_, {i, 0, 0, 5000, 0}, FilledWith(payload), [](const absl::Status&) {});
  }
  ASSERT_TRUE(StepsUntil([&] { return at_a_.chunks.size() == 8; }));
  EXPECT_GE(at_a_.messages.size(), 8u);
}

TEST_F(TcpPlanes, APeerThatTakesNoMessages) {
  Await();
  EXPECT_TRUE(Fails(b_->SendMessage(99, {1}, "x"), absl::StatusCode::kUnavailable));
  absl::Status status;
  size_t sent = 0;
  for (; status.ok() && sent < 1000; ++sent) {
    status = b_->SendMessage(link_b_, {1}, std::string(1 << 20, 'x'));
  }
  EXPECT_TRUE(Fails(status, absl::StatusCode::kResourceExhausted, "takes none"));
  link_a_ = Must(a_->Open(Connection(address_.token, address_.answer), DeadlineInMs(5000)));
  EXPECT_TRUE(StepsUntil([&] { return at_a_.messages.size() + 1 == sent; }));
}

// It sends chunk after chunk meanwhile: of each transfer it is told the last credit, when it reads.
TEST_F(TcpPlanes, APeerThatTakesNoCredits) {
  Await();
  for (uint64_t i = 1; i <= 100000; ++i) b_->SendCredit(link_b_, {i % 3, i});
  ASSERT_TRUE(IsOk(b_->SendMessage(link_b_, {1}, "x")));
  link_a_ = Must(a_->Open(Connection(address_.token, address_.answer), DeadlineInMs(5000)));
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.messages.empty(); }));
  std::vector<uint64_t> last(3);
  for (const CreditHeader& credit : at_a_.credits) last[credit.transfer_id] = credit.bytes_done;
  EXPECT_EQ(last, (std::vector<uint64_t>{99999, 100000, 99998}));
  EXPECT_EQ(at_a_.credits.size(), 3u);
  EXPECT_FALSE(b_->BacklogOf(link_b_).waiting > 0);
}

// However many wait at any time.
TEST_F(TcpPlanes, MessagesWithoutEndKeepNoChunkFromBeginning) {
  Connect();
  const bool open = true;
  const std::vector<std::byte> payload = RandomBytes(5000, 1);
  int chunks = 0, messages = 0;
  const auto refill = [&] {
    for (; b_->BacklogOf(link_b_).waiting < 8 << 20; ++messages) {
      ASSERT_TRUE(IsOk(b_->SendMessage(link_b_, {1}, std::string(1 << 20, 'x'))));
    }
  };
  refill();
  for (uint64_t i = 0; i < 2; ++i) {
    b_->SendChunk(link_b_, {i, 0, 0, 5000, 0}, LentFrom(payload, 700, &open),
                  [&](const absl::Status& status) { chunks += status.ok() ? 1 : 0; });
  }
  EXPECT_TRUE(StepsUntil([&] {
    refill();
    return chunks == 2 || messages > 100;
  }));
  EXPECT_LT(messages, 20);
  EXPECT_GE(b_->BacklogOf(link_b_).taken, 2 * 5000);
}

// However many wait, and however short they are: what another connection has to say is heard
// between them.
class TcpTurns : public TcpPlanes {
 protected:
  void SetUp() override {
    Connect();
    ASSERT_TRUE(StepsUntil([&] { return arrived_.size() == 1; }));
    quiet_a_ = link_a_;
    Await();
    noisy_ = Says(TcpHello::With(address_.token, 0).Bytes());
    ASSERT_TRUE(StepsUntil([&] { return arrived_.size() == 2; }));
  }
  // At the most that comes of `count` such frames in one turn.
  size_t MostInATurn(size_t count, const std::string& frame, const std::function<size_t()>& come) {
    std::string frames;
    for (size_t i = 0; i < count; ++i) frames += frame;
    size_t sent = 0;  // As much as the socket takes at once, which the system decides.
    const auto say_more = [&] {
      const ssize_t taken =
          send(noisy_.get(), &frames[sent], frames.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (taken > 0) sent += static_cast<size_t>(taken);
    };
    say_more();
    EXPECT_TRUE(IsOk(a_->SendMessage(quiet_a_, {1}, std::string(100, 'q'))));
    size_t most = 0, before = 0;
    EXPECT_TRUE(StepsUntil([&] {
      most = std::max(most, come() - before);
      before = come();
      say_more();
      return come() == count;
    }));
    return most;
  }

  LinkId quiet_a_ = 0;
  UniqueFd noisy_;
};

TEST_F(TcpTurns, OfManyShortMessages) {
  const std::string frame = TextOf(TcpFrame::Of(kTcpMessage, MessageHeader{9}, 1)) + "x";
  const auto noise = [&] {
    return static_cast<size_t>(
        std::ranges::count_if(at_b_.messages, [](const auto& of) { return of.first == 9; }));
  };
  EXPECT_LE(MostInATurn(2000, frame, noise), 64u);
  // The other one's came among them, and not behind them all.
  const auto quiet =
      std::ranges::find_if(at_b_.messages, [](const auto& of) { return of.first == 1; });
  EXPECT_LT(quiet - at_b_.messages.begin(), 1000);
}

TEST_F(TcpTurns, OfFewLongMessages) {
  const std::string frame = TextOf(TcpFrame::Of(kTcpMessage, MessageHeader{9}, 40000)) +
                            std::string(40000, 'x');  // Counts as three.
  const auto noise = [&] {
    return static_cast<size_t>(
        std::ranges::count_if(at_b_.messages, [](const auto& of) { return of.first == 9; }));
  };
  EXPECT_LE(MostInATurn(40, frame, noise), 22u);
}

TEST_F(TcpTurns, OfCredits) {
  EXPECT_LE(MostInATurn(2000, TextOf(TcpFrame::Of(kTcpCredit, CreditHeader{1, 1}, 0)),
                        [&] { return at_b_.credits.size(); }),
            256u);
}

TEST_F(TcpTurns, OfShortChunks) {
  const std::string frame = TextOf(TcpFrame::Of(kTcpChunk, ChunkHeader{1, 0, 0, 1, 0}, 1)) + "x" +
                            TextOf(TcpChunkEnd{kTcpWhole});
  EXPECT_LE(MostInATurn(2000, frame, [&] { return at_b_.chunks.size(); }), 256u);
}

TEST_F(TcpPlanes, ManyShortChunksAreNotWrittenInOneTurn) {
  Connect();
  ASSERT_TRUE(StepsUntil([&] { return !arrived_.empty(); }));
  const std::vector<std::byte> payload = RandomBytes(1, 1);
  size_t sent = 0, before = 0, most = 0;
  for (uint64_t i = 0; i < 2000; ++i) {
    b_->SendChunk(link_b_, {i, 0, 0, 1, 0}, FilledWith(payload),
                  [&](const absl::Status& status) { sent += status.ok() ? 1 : 0; });
  }
  EXPECT_TRUE(StepsUntil([&] {
    most = std::max(most, sent - before);
    before = sent;
    return at_a_.chunks.size() == 2000;
  }));
  EXPECT_LE(most, 256u);
}

TEST_F(TcpPlanes, AListGoesToWhoeverReadsFromAfar) {
  Connect();
  const std::vector<std::byte> list = RandomBytes(160, 1);
  b_->SendChunk(link_b_, {5, 0, 0, 1 << 20, kChunkInPool}, FilledWith(list),
                [](const absl::Status&) {});
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.elsewhere.empty(); }));
  EXPECT_EQ(at_a_.elsewhere[0].second, list);
  EXPECT_EQ(at_a_.elsewhere[0].first.bytes, 1u << 20);
  EXPECT_EQ(at_a_.begun, 0);
}

// Pages that are their owner's again in the middle of a chunk: not a byte more is read, what has
// come does not count, and the next chunk is found where it begins.
TEST_F(TcpPlanes, AChunkThatIsGivenUpInTheMiddleDoesNotCount) {
  const std::vector<std::byte> payload = RandomBytes(64 << 20, 1);
  Connect();
  for (const bool fills : {false, true}) {
    bool open = true;
    absl::Status last;
    at_a_.prefers_fill = fills;
    at_a_.chunks.clear();
    const int begun = at_a_.begun;
    for (uint64_t i = 0; i < 3; ++i) {  // The others have not begun by then.
      b_->SendChunk(link_b_, {i, 0, 0, 64 << 20, 0}, LentFrom(payload, 4096, &open),
                    [&](const absl::Status& status) { last = status; });
    }
    ASSERT_TRUE(StepsUntil([&] { return at_a_.begun == begun + 1; }));
    open = false;
    b_->SendChunk(link_b_, {7, 0, 0, 100, 0}, LentFrom(payload, 100, &open),
                  [](const absl::Status&) {});
    const std::vector<std::byte> small = RandomBytes(100, 2);
    b_->SendChunk(link_b_, {8, 0, 0, 100, 0}, FilledWith(small), [](const absl::Status&) {});
    ASSERT_TRUE(StepsUntil([&] { return !at_a_.chunks.empty(); }));
    ASSERT_EQ(at_a_.chunks.size(), 1u);
    EXPECT_EQ(at_a_.chunks[0].first.transfer_id, 8u);
    EXPECT_EQ(at_a_.chunks[0].second, small);
    EXPECT_EQ(at_a_.begun, begun + 2);
    EXPECT_TRUE(absl::IsCancelled(last));
  }
}

TEST_F(TcpPlanes, WhatNobodyWantsIsReadIntoNowhere) {
  Connect();
  const std::vector<std::byte> payload = RandomBytes(8 << 20, 1);
  for (const bool fills : {false, true}) {
    int asked = 0;
    at_a_.prefers_fill = fills;
    at_a_.wants = [&] { return ++asked < 3; };  // Ends in the middle of the first one.
    at_a_.chunks.clear();
    for (uint64_t i = 0; i < 2; ++i) {
      b_->SendChunk(link_b_, {i, 0, 0, 8 << 20, 0}, FilledWith(payload),
                    [](const absl::Status&) {});
    }
    ASSERT_TRUE(StepsUntil([&] { return asked >= 4; }));  // The second one was refused.
    at_a_.wants = nullptr;
    b_->SendChunk(link_b_, {2, 0, 0, 8 << 20, 0}, FilledWith(payload), [](const absl::Status&) {});
    ASSERT_TRUE(StepsUntil([&] { return !at_a_.chunks.empty(); }));
    EXPECT_EQ(at_a_.chunks[0].first.transfer_id, 2u);
    EXPECT_EQ(at_a_.chunks[0].second, payload);
  }
}

TEST_F(TcpPlanes, EverySendCompletesOnceWhenThePeerGoesAway) {
  Connect();
  const std::vector<std::byte> payload = RandomBytes(1 << 20, 1);
  std::vector<int> completions(100, 0);
  for (size_t i = 0; i < completions.size(); ++i) {
    b_->SendChunk(link_b_, {i, 0, 0, 1 << 20, 0}, FilledWith(payload),
                  [&, i](const absl::Status&) { ++completions[i]; });
  }
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.chunks.empty(); }));
  a_.reset();
  ASSERT_TRUE(StepsUntil([&] { return !at_b_.down.empty(); }));
  EXPECT_EQ(at_b_.down[0].first, link_b_);
  EXPECT_TRUE(Fails(at_b_.down[0].second, absl::StatusCode::kUnavailable, "ended"));
  b_->Close(link_b_);
  b_->Close(link_b_);  // No-op.
  for (size_t i = 0; i < completions.size(); ++i) EXPECT_EQ(completions[i], 1) << i;
  absl::Status late;
  b_->SendChunk(link_b_, {1, 0, 0, 1 << 20, 0}, FilledWith(payload),
                [&](const absl::Status& status) { late = status; });
  EXPECT_TRUE(Fails(late, absl::StatusCode::kUnavailable, "closed"));
}

TEST_F(TcpPlanes, SendsWaitForTheConnection) {
  Await();
  const std::vector<std::byte> payload = RandomBytes(5000, 1);
  b_->SendChunk(link_b_, {1, 0, 0, 5000, 0}, FilledWith(payload), [](const absl::Status&) {});
  for (int i = 0; i < 10; ++i) Step();
  EXPECT_TRUE(b_->Arm());  // Nothing to do meanwhile.
  EXPECT_FALSE(b_->BacklogOf(link_b_).open);
  link_a_ = Must(a_->Open(Connection(address_.token, address_.answer), DeadlineInMs(5000)));
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.chunks.empty(); }));
  EXPECT_EQ(at_a_.chunks[0].second, payload);
  EXPECT_TRUE(b_->BacklogOf(link_b_).open);
}

TEST_F(TcpPlanes, AConnectionThatIsMadeHasNoDeadlineAnyMore) {
  Connect();
  b_->SendCredit(link_b_, {1, 2});
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.credits.empty(); }));
  for (TcpDataPlane* plane : {a_.get(), b_.get()}) {
    EXPECT_EQ(plane->Tick(DeadlineInMs(10 * config_.connect_timeout_ms)), Deadline::max());
  }
  Step();
  EXPECT_TRUE(at_a_.down.empty());
  EXPECT_TRUE(at_b_.down.empty());
}

// A route that is missing for a moment, or a host that does not answer for its address.
TEST_F(TcpPlanes, WhereThereIsNoWayYetIsDialledAgain) {
  Await();
  int dials = 0;
  TcpConnection connection = ToDial([&]() -> absl::StatusOr<UniqueFd> {
    if (++dials < 4) return absl::DeadlineExceededError("no way");
    return DialTcp(address_.host, address_.port);
  });
  link_a_ = Must(a_->Open(std::move(connection), DeadlineInMs(20000)));
  EXPECT_TRUE(a_->TakeNewDeadline());
  EXPECT_LE(a_->Tick(Clock::now()), DeadlineInMs(100));
  const std::vector<std::byte> payload = RandomBytes(5000, 1);
  a_->SendChunk(link_a_, {1, 0, 0, 5000, 0}, FilledWith(payload), [](const absl::Status&) {});
  EXPECT_TRUE(a_->Arm());  // Nothing to do meanwhile.
  ASSERT_TRUE(StepsUntil([&] { return !at_b_.chunks.empty() || !at_a_.down.empty(); }));
  ASSERT_EQ(at_b_.chunks.size(), 1u);
  EXPECT_EQ(at_b_.chunks[0].second, payload);
  EXPECT_EQ(dials, 4);
}

TEST_F(TcpPlanes, WhereThereIsNoWayInTimeIsSaidWhy) {
  int dials = 0;
  TcpConnection connection = ToDial([&]() -> absl::StatusOr<UniqueFd> {
    ++dials;
    return absl::DeadlineExceededError("No route to host");
  });
  link_a_ = Must(a_->Open(std::move(connection), DeadlineInMs(250)));
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.down.empty(); }));
  EXPECT_TRUE(Fails(at_a_.down[0].second, absl::StatusCode::kUnavailable, "connect_timeout_ms",
                    "No route to host"));
  EXPECT_GT(dials, 1);
  EXPECT_LT(dials, 5);
}

TEST_F(TcpPlanes, WhatElseFailsIsNotDialledAgain) {
  int dials = 0;
  TcpConnection connection = ToDial([&]() -> absl::StatusOr<UniqueFd> {
    if (++dials == 1) return absl::DeadlineExceededError("no way");
    return absl::UnavailableError("Connection refused");
  });
  link_a_ = Must(a_->Open(std::move(connection), DeadlineInMs(20000)));
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.down.empty(); }));
  EXPECT_TRUE(Fails(at_a_.down[0].second, absl::StatusCode::kUnavailable, "Connection refused"));
  for (int i = 0; i < 10; ++i) Step();
  EXPECT_EQ(at_a_.down.size(), 1u);
  EXPECT_EQ(dials, 2);
}

// It stands still, and its kernel says so: whether it is there shows elsewhere.
TEST_F(TcpPlanes, WhoTakesNothingIsNotTakenForOneWhoIsNotReached) {
  config_.heartbeat_timeout_ms = 1000;
  door_ = Must(TcpDoor::Create(config_, "127.0.0.1", &metrics_));
  Connect();
  constexpr uint64_t kChunks = 8;  // More than the system keeps for it.
  const std::vector<std::byte> payload = RandomBytes(3000000, 1);
  for (uint64_t i = 0; i < kChunks; ++i) {
    b_->SendChunk(link_b_, {i, 0, 0, 3000000, 0}, FilledWith(payload),
                  [](const absl::Status& status) { EXPECT_TRUE(IsOk(status)); });
  }
  ASSERT_TRUE(StepsUntil([&] { return !arrived_.empty() && a_->BacklogOf(link_a_).open; }));
  const Deadline until = DeadlineInMs(3000);
  EXPECT_TRUE(StepUntil(
      [&] {
        b_->Tick(Clock::now());
        b_->Progress(&at_b_);
      },
      [&] { return Clock::now() > until; }));
  EXPECT_TRUE(at_b_.down.empty()) << at_b_.down[0].second;
  EXPECT_TRUE(StepsUntil([&] { return at_a_.chunks.size() == kChunks; }));
}

TEST_F(TcpPlanes, WhoRefusesIsNotDialledAgain) {
  const int64_t port = Must(PortOf(Must(ListenTcp("127.0.0.1", 0))));  // Nobody's any more.
  int dials = 0;
  TcpConnection connection = ToDial([&] {
    ++dials;
    return DialTcp("127.0.0.1", port);
  });
  link_a_ = Must(a_->Open(std::move(connection), DeadlineInMs(20000)));
  ASSERT_TRUE(StepsUntil([&] { return !at_a_.down.empty(); }));
  EXPECT_TRUE(Fails(at_a_.down[0].second, absl::StatusCode::kUnavailable, "Connection refused"));
  EXPECT_EQ(dials, 1);
}

// A socket that is full cuts what it is given anywhere, in the middle of a chunk's end too.
TEST(TcpOutgoing, HoweverTheSystemCutsIt) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd from(ends[0]);
  const UniqueFd to(ends[1]);
  const int room = 2304;
  ASSERT_EQ(setsockopt(from.get(), SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)), 0);
  const std::vector<std::byte> bytes = RandomBytes(9000, 1);
  std::vector<std::byte> sink(1 << 20);
  const bool open = true;
  TcpOutgoing outgoing;
  int64_t want = 0;
  int64_t got = 0;
  const auto drain = [&] {
    ssize_t count = 0;
    while ((count = recv(to.get(), sink.data(), sink.size(), 0)) > 0) got += count;
  };
  for (size_t i = 0; i < 9000; ++i) {
    const std::vector<std::byte> payload(bytes.begin(), bytes.begin() + 1 + static_cast<int>(i));
    ChunkSource source = LentFrom(payload, 5000, &open);
    if (i % 2 == 0) source = FilledWith(payload);
    int done = 0;
    outgoing.AddChunk({i, 0, 0, static_cast<uint32_t>(payload.size()), 0}, source,
                      [&](const absl::Status&) { ++done; });
    want += static_cast<int64_t>(sizeof(TcpFrame) + payload.size() + sizeof(TcpChunkEnd));
    while (done == 0) {
      ASSERT_NE(outgoing.Write(from.get(), true, 1 << 20).result, Moved::Result::kBroken) << i;
      if (done == 0) drain();
    }
  }
  drain();
  EXPECT_EQ(got, want);
}

}  // namespace
}  // namespace kvferry
