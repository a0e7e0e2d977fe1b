// The sender where a peer on this host can read the pool.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "base/hash.h"
#include "tests/support/wait_for.h"
#include "tests/transport/sender_alone.h"

namespace kvferry {
namespace {

class SenderInPlace : public SenderAlone {
 protected:
  SenderInPlace() {
    wire().reads_pool = ChunkLinks::ReadsPool::kOnThisHost;
    wire().complete_at_once = false;
  }
  // What a peer reads when it looks where the chunk says.
  std::vector<std::byte> Read(const SentChunk& chunk) {
    EXPECT_NE(chunk.header.flags & kChunkInPool, 0u);
    std::vector<PoolPiece> pieces(chunk.payload.size() / sizeof(PoolPiece));
    std::memcpy(pieces.data(), chunk.payload.data(), chunk.payload.size());
    std::vector<std::byte> bytes;
    for (const PoolPiece& piece : pieces) {
      const std::byte* from = pool_->shared_memory()->data.get() + piece.offset;
      bytes.insert(bytes.end(), from, from + piece.bytes);
    }
    EXPECT_EQ(bytes.size(), chunk.header.bytes);
    return bytes;
  }
  std::vector<std::byte> ReadAll(int64_t from = 0) {
    std::vector<std::byte> stream;
    for (const SentChunk& chunk : wire().chunks) {
      const std::vector<std::byte> bytes = Read(chunk);
      EXPECT_EQ(chunk.header.offset, from + stream.size());
      stream.insert(stream.end(), bytes.begin(), bytes.end());
    }
    return stream;
  }
};

TEST_F(SenderInPlace, OneChunkWhateverTheWindow) {
  sender_.OnFetch(kPeer, kLink, Ask(1, kLease, 6, 4096));
  PumpDry();
  ASSERT_EQ(wire().chunks.size(), 1u);
  EXPECT_EQ(ReadAll(), Want({3, 4, 5, 9, 0, 15}));
  EXPECT_EQ(metrics_.chunks_in_place, 1);
  wire().Complete(0, absl::OkStatus());
  EXPECT_EQ(arena_->num_taken(), 0);
  sender_.OnDone(kPeer, {1, kLease, 6 * SmallLayout().page_bytes()});
  EXPECT_EQ(leases_.num_live(), 0);
}

TEST_F(SenderInPlace, FromTheMiddleOfAnItem) {
  FetchMsg fetch = Ask(1);
  fetch.from_bytes = 5001;
  sender_.OnFetch(kPeer, kLink, fetch);
  PumpDry();
  EXPECT_EQ(ReadAll(5001), Want({3, 4, 5, 9, 0, 15}, 5001));
}

TEST_F(SenderInPlace, ChunksAreAsLongAsTheirReaderWants) {
  FetchMsg fetch = Ask(1, kLease, 6, 4096);
  fetch.in_place_bytes = 5000;  // Not of whole pages.
  sender_.OnFetch(kPeer, kLink, fetch);
  for (size_t i = 0; i == 0 || i < wire().chunks.size(); ++i) {
    PumpDry();
    ASSERT_LT(i, wire().chunks.size());
    wire().Complete(i, absl::OkStatus());
  }
  EXPECT_EQ(ReadAll(), Want({3, 4, 5, 9, 0, 15}));
  const int64_t bytes = 6 * SmallLayout().page_bytes();
  EXPECT_EQ(static_cast<int64_t>(wire().chunks.size()), (bytes + 4999) / 5000);
  EXPECT_EQ(wire().chunks[0].header.bytes, 5000u);
}

TEST_F(SenderInPlace, NorAreTurnsLongerThanThat) {
  Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, {.processors = 1});
  for (uint64_t id = 1; id <= 3; ++id) {
    Publish(100 + id, {3, 4, 5}, 4);
    FetchMsg fetch = Ask(id, 100 + id, 3);
    fetch.in_place_bytes = 5000;
    sender.OnFetch("accepted:" + std::to_string(id), kLink, fetch);
  }
  ASSERT_TRUE(sender.Pump());
  EXPECT_EQ(wire().chunks[0].header.bytes, 5000u);
}

TEST_F(SenderInPlace, NothingBeforeItIsReady) {
  Publish(2, {1, 2, 3}, 0);
  sender_.OnFetch(kPeer, kLink, Ask(1, 2, 3));
  const int64_t layer_bytes = 3 * SmallLayout().layer_page_bytes();
  for (int64_t ready = 0; ready <= 4; ++ready) {
    ASSERT_TRUE(IsOk(leases_.SetReadyLayers(2, ready)));
    sender_.OnLeaseChanged(2);
    PumpDry();
    EXPECT_EQ(static_cast<int64_t>(ReadAll().size()), ready * layer_bytes);
  }
}

// The list of pieces must fit into a chunk of the arena, and only so many are on their way.
TEST_F(SenderInPlace, ManyPieces) {
  pool_ = MakePatternPool(KvLayout::Mha(2, 1, 1, 128, DType::kBFloat16), 4096, 3);
  Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_);
  std::vector<int64_t> pages;
  for (int64_t i = 0; i < 2048; ++i) pages.push_back(2 * i);
  Publish(5, pages, 2);
  sender.OnFetch(kPeer, kLink, Ask(1, 5, 2048));
  size_t seen = 0;
  for (bool more = true; more;) {
    more = sender.Pump();
    EXPECT_LE(wire().chunks.size() - seen, 4u);
    if (more) continue;
    for (; seen < wire().chunks.size(); ++seen, more = true) wire().Complete(seen, {});
  }
  EXPECT_EQ(ReadAll(), Want(pages));
  EXPECT_GE(wire().chunks.size(), 8192u / 256);
  for (const SentChunk& chunk : wire().chunks) EXPECT_LE(chunk.payload.size(), 4096u);
  EXPECT_EQ(arena_->num_taken(), 0);
}

// Credit comes another way than the word that a chunk was read, and may come before it.
TEST_F(SenderInPlace, TheTailGoesOnAfterALateWord) {
  constexpr int64_t kWindow = 16 << 10;
  constexpr int64_t kTail = 100 << 10;
  const std::vector<int64_t> pages = {1, 2};
  ASSERT_TRUE(IsOk(leases_.Publish(6, Must(PageRuns::FromPages(pages)), 4, DeadlineInMs(60000),
                                   std::make_shared<std::vector<std::byte>>(kTail))));
  FetchMsg fetch = Ask(1, 6, 2, kWindow);
  fetch.tail_bytes = kTail;
  sender_.OnFetch(kPeer, kLink, fetch);
  PumpDry();
  EXPECT_EQ(wire().chunks.size(), 1u) << "no room for the tail before the pages were read";
  const int64_t pages_bytes = 2 * SmallLayout().page_bytes();
  sender_.OnCredit({1, static_cast<uint64_t>(pages_bytes)});
  PumpDry();
  EXPECT_EQ(metrics_.bytes_sent, pages_bytes + kWindow);
  for (size_t i = 1; i < wire().chunks.size(); ++i) wire().Complete(i, absl::OkStatus());
  sender_.OnCredit({1, static_cast<uint64_t>(pages_bytes + kWindow)});
  wire().Complete(0, absl::OkStatus());
  PumpDry();
  EXPECT_EQ(metrics_.bytes_sent, pages_bytes + 2 * kWindow) << "the credit was taken back";
}

TEST_F(SenderInPlace, SmallPagesAreGathered) {
  pool_ = MakePatternPool(KvLayout::Mha(2, 1, 1, 64, DType::kBFloat16), 16, 3);
  Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_);
  Publish(5, {1, 2}, 2);
  sender.OnFetch(kPeer, kLink, Ask(1, 5, 2));
  while (sender.Pump()) {
  }
  EXPECT_EQ(Sent(1), Want({1, 2}));
  EXPECT_EQ(metrics_.chunks_in_place, 0);
}

// A sender that believes the arena to be ten times as quick, or the pages.
class SenderChooses : public SenderInPlace {
 protected:
  SenderChooses() { wire().complete_at_once = true; }
  static MachineTraits Costs(double page_to_page, double chunks) {
    return {.copies = {{page_to_page, 0}, {chunks, 0}, {chunks, 0}}};
  }
  // Whether a fetch of all pages is read in place by a sender of these costs.
  bool InPlace(Sender* sender, uint64_t id, uint64_t lease = kLease) {
    const int64_t before = metrics_.transfers_in_place;
    if (lease != kLease) Publish(lease, {3, 4, 5, 9, 0, 15}, 4);
    sender->OnFetch(kPeer, kLink, Ask(id, lease));
    while (sender->Pump()) {
    }
    return metrics_.transfers_in_place > before;
  }
  static constexpr double kQuick = 1e-12;
  static constexpr double kSlow = 1e-11;
};

TEST_F(SenderChooses, WhatIsQuicker) {
  Sender arena(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, Costs(kSlow, kQuick));
  EXPECT_FALSE(InPlace(&arena, 1));
  EXPECT_EQ(Sent(1), Want({3, 4, 5, 9, 0, 15}));
  Sender pages(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, Costs(kQuick, kSlow));
  EXPECT_TRUE(InPlace(&pages, 2, kLease + 1));
}

TEST_F(SenderChooses, WhatTheConfigSays) {
  Config config = config_;
  config.same_host_path = "in_place";
  Sender pages(config, pool_, &leases_, arena_.get(), &outbox_, &metrics_, Costs(kSlow, kQuick));
  EXPECT_TRUE(InPlace(&pages, 1));
  Config other = config_;
  other.same_host_path = "arena";
  Sender arena(other, pool_, &leases_, arena_.get(), &outbox_, &metrics_, Costs(kQuick, kSlow));
  EXPECT_FALSE(InPlace(&arena, 2, kLease + 1));
}

TEST_F(SenderChooses, LearnsFromTransfersThatHadTheNodeToThemselves) {
  Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, Costs(kSlow, kQuick));
  const int64_t bytes = 6 * SmallLayout().page_bytes();
  const auto expected = [&] {
    return sender.paths().ExpectedSeconds(PageWay::kArena, {bytes, 3072});
  };
  const auto fetch = [&](uint64_t id) { EXPECT_FALSE(InPlace(&sender, id, 100 + id)); };
  const auto end = [&](uint64_t id) { sender.OnDone(kPeer, {id, 100 + id, bytes}); };
  const double before = expected();
  fetch(1);
  fetch(2);
  end(1);
  end(2);
  EXPECT_DOUBLE_EQ(expected(), before) << "learnt from two beside each other";
  fetch(3);
  sender.OnCancel(kPeer, {3, "enough"});
  EXPECT_DOUBLE_EQ(expected(), before) << "learnt from half a transfer";
  // Far slower than a picosecond a byte.
  fetch(4);
  end(4);
  EXPECT_GT(expected(), before);
}

// Of many at once nothing is learnt, so none of them is sent the slower way to find out.
TEST_F(SenderChooses, TriesNothingWhileOthersAreUnderWay) {
  Config config = config_;
  config.max_fetches_per_peer = 100;
  Sender sender(config, pool_, &leases_, arena_.get(), &outbox_, &metrics_, Costs(kQuick, kQuick));
  for (uint64_t id = 1; id <= 2 * PathModel::kTryEvery; ++id) {
    EXPECT_TRUE(InPlace(&sender, id, 100 + id)) << id;
  }
}

// Of any number of peers, two a processor read at a time; one that does not come to it holds up the
// others for a moment only.
TEST_F(SenderInPlace, ReadersTakeTurns) {
  Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, {.processors = 1});
  for (uint64_t id = 1; id <= 4; ++id) {
    Publish(100 + id, {3, 4, 5}, 4);
    sender.OnFetch("accepted:" + std::to_string(id), kLink, Ask(id, 100 + id, 3));
  }
  while (sender.Pump()) {
  }
  EXPECT_EQ(wire().chunks.size(), 2u);
  EXPECT_TRUE(sender.waits_for_readers());
  wire().Complete(0, absl::OkStatus());
  while (sender.Pump()) {
  }
  EXPECT_EQ(wire().chunks.size(), 3u);
  // Neither of these two ever says that it is through.
  const Deadline now = Clock::now();
  EXPECT_LE(sender.Tick(now), now + std::chrono::milliseconds(10));
  EXPECT_TRUE(WaitFor([&] { return sender.Pump(); }, Soon()));
  EXPECT_EQ(wire().chunks.size(), 4u);
  while (sender.Pump()) {
  }
  EXPECT_FALSE(sender.waits_for_readers());
}

TEST_F(SenderInPlace, NobodyWaitsWhenAllHaveGone) {
  Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, {.processors = 1});
  for (uint64_t id = 1; id <= 4; ++id) {
    Publish(100 + id, {3, 4, 5}, 4);
    sender.OnFetch(kPeer, kLink, Ask(id, 100 + id, 3));
  }
  while (sender.Pump()) {
  }
  ASSERT_TRUE(sender.waits_for_readers());
  sender.OnPeerGone(kPeer, absl::UnavailableError("it has ended"));
  sender.Pump();
  EXPECT_FALSE(sender.waits_for_readers());
}

// Whoever has waited longest is next, whichever reader makes room.
TEST_F(SenderInPlace, ReadersAreServedEqually) {
  pool_ = MakePatternPool(KvLayout::Mha(2, 1, 1, 128, DType::kBFloat16), 4096, 3);
  Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, {.processors = 1});
  std::vector<int64_t> pages;
  for (int64_t i = 0; i < 1024; ++i) pages.push_back(2 * i);
  for (uint64_t id = 0; id < 5; ++id) {
    Publish(100 + id, pages, 2);
    sender.OnFetch("accepted:" + std::to_string(id), kLink, Ask(id, 100 + id, 1024));
  }
  std::map<uint64_t, int64_t> turns;
  std::set<size_t> open;
  std::mt19937 random(1);
  size_t seen = 0;
  for (int round = 0; round < 40; ++round) {
    sender.Pump();
    for (; seen < wire().chunks.size(); ++seen) {
      open.insert(seen);
      ++turns[wire().chunks[seen].header.transfer_id];
    }
    const auto [least, most] = std::minmax_element(
        turns.begin(), turns.end(), [](auto& a, auto& b) { return a.second < b.second; });
    if (round >= 5) {
      EXPECT_LE(most->second - least->second, 1) << "round " << round;
    }
    if (round == 25) {  // Nobody's turn is lost with one that ends.
      sender.OnCancel("accepted:0", {0, "enough"});
      turns.erase(0);
    }
    const auto one = std::next(open.begin(), static_cast<int64_t>(random() % open.size()));
    wire().Complete(*one, absl::OkStatus());
    open.erase(one);
  }
  EXPECT_GE(turns[1], 6);
}

// Long turns at first, for what a turn costs, and short ones at the end, so that nobody is through
// long before the others.
TEST_F(SenderInPlace, TurnsOfManyReadersGetShorter) {
  constexpr int64_t kMiB = 1 << 20;
  pool_ = MakePatternPool(KvLayout::Mha(1, 256, 1, 512, DType::kBFloat16), 24, 3);
  Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, {.processors = 1});
  std::vector<int64_t> pages(24);
  std::iota(pages.begin(), pages.end(), 0);
  for (uint64_t id = 1; id <= 3; ++id) {
    Publish(100 + id, pages, 1);
    sender.OnFetch("accepted:" + std::to_string(id), kLink, Ask(id, 100 + id, 24));
  }
  std::vector<int64_t> turns;
  for (size_t seen = 0; metrics_.bytes_sent < 3 * 12 * kMiB; ++seen) {
    sender.Pump();
    ASSERT_LT(seen, wire().chunks.size());
    const ChunkHeader& header = wire().chunks[seen].header;
    if (header.transfer_id == 1) turns.push_back(header.bytes);
    wire().Complete(seen, absl::OkStatus());
  }
  EXPECT_EQ(turns, (std::vector<int64_t>{4 * kMiB, 4 * kMiB, 2 * kMiB, kMiB, kMiB}));
}

TEST_F(SenderInPlace, TheChecksumIsOfTheBytes) {
  FetchMsg fetch = Ask(1);
  fetch.checksum = true;
  sender_.OnFetch(kPeer, kLink, fetch);
  PumpDry();
  ASSERT_EQ(wire().chunks.size(), 1u);
  EXPECT_NE(wire().chunks[0].header.flags & kChunkHasChecksum, 0u);
  EXPECT_EQ(wire().chunks[0].header.checksum, Xxh3(std::span<const std::byte>(ReadAll())));
}

// Their owner may write to the pages as soon as this returns: who is still reading must find out.
TEST_F(SenderInPlace, AnAbortTakesTheChunksFromTheirReader) {
  sender_.OnFetch(kPeer, kLink, Ask(1));
  PumpDry();
  ASSERT_EQ(wire().chunks.size(), 1u);
  ASSERT_EQ(arena_->num_taken(), 1);
  std::vector<uint64_t> before;
  for (int64_t i = 0; i < arena_->num_chunks(); ++i) before.push_back(arena_->Generation(i));
  sender_.AbortLease(kLease, absl::AbortedError("taken back"));
  int changed = 0;
  for (int64_t i = 0; i < arena_->num_chunks(); ++i) changed += arena_->Generation(i) != before[i];
  EXPECT_EQ(changed, 1);
  EXPECT_EQ(arena_->num_taken(), 1) << "its reader may still be looking at it";
  wire().Complete(0, absl::OkStatus());
  EXPECT_EQ(arena_->num_taken(), 0);
}

}  // namespace
}  // namespace kvferry
