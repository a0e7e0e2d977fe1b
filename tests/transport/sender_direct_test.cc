// The sender where a peer reads the pool from afar.

#include <gtest/gtest.h>

#include <cstring>

#include "base/hash.h"
#include "tests/transport/sender_alone.h"
#include "transport/direct_reads.h"
#include "transport/pool_regions.h"

namespace kvferry {
namespace {

constexpr ReadCosts kReads{500, 50000};

class SenderDirect : public SenderAlone {
 protected:
  SenderDirect() { Use(&sender_); }
  static Config MakeConfig(const std::string& path) {
    Config config = SenderAlone::MakeConfig();
    config.network_path = path;
    return config;
  }
  void Use(Sender* sender) {
    wire().reads_pool = ChunkLinks::ReadsPool::kFromAfar;
    sender->UseGuards(guards_.get());
  }
  static FetchMsg AskToRead(uint64_t id, uint64_t lease = kLease, int64_t count = 6,
                            int64_t window = 1 << 30) {
    FetchMsg fetch = Ask(id, lease, count, window);
    fetch.reads = kReads;
    return fetch;
  }
  struct List {
    GuardHead guard;
    std::vector<PoolPiece> pieces;
  };
  static List ListOf(const SentChunk& chunk) {
    EXPECT_NE(chunk.header.flags & kChunkInPool, 0u);
    List list;
    std::memcpy(&list.guard, chunk.payload.data(), sizeof(GuardHead));
    list.pieces.resize(chunk.payload.size() / sizeof(PoolPiece) - 1);
    std::memcpy(list.pieces.data(), chunk.payload.data() + sizeof(GuardHead),
                list.pieces.size() * sizeof(PoolPiece));
    return list;
  }
  std::vector<std::byte> Read(const SentChunk& chunk) {
    const PoolRegions regions(*pool_);
    std::vector<std::byte> row;
    for (const PoolRegions::Region region : regions.regions()) {
      row.insert(row.end(), region.begin(), region.end());
    }
    std::vector<std::byte> bytes;
    for (const PoolPiece& piece : ListOf(chunk).pieces) {
      const auto from = row.begin() + static_cast<ptrdiff_t>(piece.offset);
      bytes.insert(bytes.end(), from, from + static_cast<ptrdiff_t>(piece.bytes));
    }
    EXPECT_EQ(bytes.size(), chunk.header.bytes);
    return bytes;
  }
  bool GuardHolds(const SentChunk& chunk) {
    const GuardHead guard = ListOf(chunk).guard;
    return guards_->Generation(static_cast<int64_t>(guard.index)) == guard.generation;
  }

  const std::unique_ptr<Guards> guards_ = Must(Guards::Create());
  const Config direct_config_ = MakeConfig("direct");
  const Config auto_config_ = MakeConfig("auto");
  Sender direct_{direct_config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_};
};

TEST_F(SenderDirect, ListsOfWholeChunksInTheWindow) {
  Use(&direct_);
  direct_.OnFetch(kPeer, kLink, AskToRead(1, kLease, 6, 3 * 4096));
  while (direct_.Pump()) {
  }
  ASSERT_EQ(wire().chunks.size(), 3u) << "the window is three chunks";
  std::vector<std::byte> stream;
  for (size_t i = 0; i < wire().chunks.size(); ++i) {
    EXPECT_EQ(wire().chunks[i].header.offset, stream.size());
    EXPECT_EQ(wire().chunks[i].header.bytes, 4096u);
    const std::vector<std::byte> bytes = Read(wire().chunks[i]);
    stream.insert(stream.end(), bytes.begin(), bytes.end());
    direct_.OnCredit({1, stream.size()});
    while (direct_.Pump()) {
    }
  }
  EXPECT_EQ(stream, Want({3, 4, 5, 9, 0, 15}));
  EXPECT_EQ(metrics_.transfers_direct, 1);
  EXPECT_EQ(metrics_.transfers_in_place, 0);
  EXPECT_EQ(arena_->num_taken(), 0);
  EXPECT_TRUE(GuardHolds(wire().chunks[0]));
  direct_.OnDone(kPeer, {1, kLease, static_cast<int64_t>(stream.size())});
  EXPECT_FALSE(GuardHolds(wire().chunks[0]));
  EXPECT_EQ(leases_.num_live(), 0);
}

TEST_F(SenderDirect, FromTheMiddleOfAnItem) {
  Use(&direct_);
  FetchMsg fetch = AskToRead(1);
  fetch.from_bytes = 5001;
  direct_.OnFetch(kPeer, kLink, fetch);
  while (direct_.Pump()) {
  }
  std::vector<std::byte> stream;
  for (const SentChunk& chunk : wire().chunks) {
    EXPECT_EQ(chunk.header.offset, 5001 + stream.size());
    const std::vector<std::byte> bytes = Read(chunk);
    stream.insert(stream.end(), bytes.begin(), bytes.end());
  }
  EXPECT_EQ(stream, Want({3, 4, 5, 9, 0, 15}, 5001));
}

// However a transfer ends, its guard is raised by the time its pages are their owner's.
TEST_F(SenderDirect, EveryEndRaisesTheGuard) {
  const std::vector<std::function<void()>> ends = {
      [&] {
        direct_.OnCancel(kPeer, {1, "enough"});
      },
      [&] { direct_.AbortLease(kLease, absl::AbortedError("taken back")); },
      [&] { direct_.OnPeerGone(kPeer, absl::UnavailableError("gone")); },
      [&] { direct_.AbortAll(absl::UnavailableError("closing")); },
      [&] { direct_.Tick(DeadlineInMs(3600000)); },
  };
  Use(&direct_);
  for (size_t i = 0; i < ends.size(); ++i) {
    wire().chunks.clear();
    FetchMsg fetch = AskToRead(1);
    direct_.OnFetch(kPeer, kLink, fetch);
    while (direct_.Pump()) {
    }
    ASSERT_FALSE(wire().chunks.empty()) << i;
    EXPECT_TRUE(GuardHolds(wire().chunks[0])) << i;
    ends[i]();
    EXPECT_FALSE(GuardHolds(wire().chunks[0])) << i;
  }
}

// Its guard may be another transfer's by the time the wire comes to it, and its pages another's.
TEST_F(SenderDirect, NoListIsMadeForATransferThatHasEnded) {
  Use(&direct_);
  wire().fill_at_once = false;
  direct_.OnFetch(kPeer, kLink, AskToRead(1));
  while (direct_.Pump()) {
  }
  ASSERT_FALSE(wire().later.empty());
  direct_.AbortLease(kLease, absl::AbortedError("taken back"));
  wire().FillLater();
  EXPECT_TRUE(wire().chunks.empty());
  EXPECT_EQ(arena_->num_taken(), 0);
}

TEST_F(SenderDirect, TwoTransfersHaveTwoGuards) {
  Use(&direct_);
  Publish(2, {1, 2}, 4);
  direct_.OnFetch(kPeer, kLink, AskToRead(1));
  direct_.OnFetch(kPeer, kLink, AskToRead(2, 2, 2));
  while (direct_.Pump()) {
  }
  const auto first_of = [&](uint64_t id) -> const SentChunk& {
    return *std::find_if(wire().chunks.begin(), wire().chunks.end(),
                         [&](const SentChunk& c) { return c.header.transfer_id == id; });
  };
  direct_.OnCancel(kPeer, {1, "enough"});
  EXPECT_FALSE(GuardHolds(first_of(1)));
  EXPECT_TRUE(GuardHolds(first_of(2)));
}

TEST_F(SenderDirect, PackedWithoutAWordFree) {
  Use(&direct_);
  std::vector<int64_t> taken;
  for (int64_t word = guards_->Take(); word >= 0; word = guards_->Take()) taken.push_back(word);
  EXPECT_EQ(taken.size(), static_cast<size_t>(Guards::kNumWords));
  direct_.OnFetch(kPeer, kLink, AskToRead(1));
  while (direct_.Pump()) {
  }
  EXPECT_EQ(Sent(1), Want({3, 4, 5, 9, 0, 15}));
  EXPECT_EQ(metrics_.transfers_direct, 0);
}

TEST_F(SenderDirect, PackedForThoseWhoCannotRead) {
  Use(&direct_);
  direct_.OnFetch(kPeer, kLink, Ask(1));
  while (direct_.Pump()) {
  }
  EXPECT_EQ(Sent(1), Want({3, 4, 5, 9, 0, 15}));
  // Nor where nobody asked for it.
  direct_.OnCancel(kPeer, {1, "enough"});
  wire().chunks.clear();
  sender_.OnFetch(kPeer, kLink, AskToRead(2));
  PumpDry();
  EXPECT_EQ(Sent(2), Want({3, 4, 5, 9, 0, 15}));
}

TEST_F(SenderDirect, ChecksumsAreOfWhatIsRead) {
  Use(&direct_);
  FetchMsg fetch = AskToRead(1);
  fetch.checksum = true;
  direct_.OnFetch(kPeer, kLink, fetch);
  while (direct_.Pump()) {
  }
  for (const SentChunk& chunk : wire().chunks) EXPECT_EQ(chunk.header.checksum, Xxh3(Read(chunk)));
}

// "auto" goes by what the reader says that reads take, for each peer.
TEST_F(SenderDirect, TheQuickerWayByWhatTheReaderSays) {
  const MachineTraits machine{{{1e-10, 0}, {1e-10, 1e-8}, {1e-10, 1e-8}}, 2};
  Sender chooses(auto_config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, machine);
  Use(&chooses);
  Publish(2, {1, 2}, 4);
  FetchMsg slow = AskToRead(1);
  slow.reads = {1000000, 10000000};  // A millisecond a read.
  chooses.OnFetch("slow", kLink, slow);
  EXPECT_EQ(metrics_.transfers_direct, 0);
  FetchMsg quick = AskToRead(2, 2, 2);
  quick.reads = {1, 1};
  chooses.OnFetch("quick", kLink, quick);
  EXPECT_EQ(metrics_.transfers_direct, 1);
}

// An engine's own memory: a buffer here and a buffer there.
TEST(PoolRegions, AreOneRow) {
  const KvLayout layout = KvLayout::Mha(2, 4, 1, 8, DType::kBFloat16);
  const int64_t bytes = 6 * layout.item_bytes(0);
  auto memory = std::make_shared<std::vector<std::byte>>(10 * bytes);
  // K of both layers touch, V of layer 1 lies before that of layer 0, with a gap.
  const std::vector<int64_t> at = {2 * bytes, 3 * bytes, 7 * bytes, 5 * bytes};
  std::vector<BufferInfo> buffers;
  buffers.reserve(at.size());
  for (const int64_t offset : at) {
    buffers.push_back({memory->data() + offset, bytes, layout.item_bytes(0)});
  }
  const auto pool = Must(KvPool::Adopt(layout, buffers, memory));
  const PoolRegions regions(*pool);
  ASSERT_EQ(regions.regions().size(), 3u);
  EXPECT_EQ(regions.regions()[0].size(), static_cast<size_t>(2 * bytes));
  EXPECT_EQ(regions.OffsetOf(memory->data() + at[0]), 0u);
  EXPECT_EQ(regions.OffsetOf(memory->data() + at[1] + 5), static_cast<uint64_t>(bytes + 5));
  EXPECT_EQ(regions.OffsetOf(memory->data() + at[3]), static_cast<uint64_t>(2 * bytes));
  EXPECT_EQ(regions.OffsetOf(memory->data() + at[2] + bytes - 1),
            static_cast<uint64_t>(4 * bytes - 1));
  size_t region = 0;
  for (const int64_t buffer : {1, 3, 3, 2, 0, 2}) {
    const std::byte* const byte = memory->data() + at[buffer] + 5;
    EXPECT_EQ(regions.OffsetOf(byte, &region), regions.OffsetOf(byte)) << buffer;
  }
  EXPECT_EQ(region, 2u);
}

TEST(PoolRegions, EachBufferInOnePart) {
  const KvLayout layout = KvLayout::Mha(1, 4, 1, 8, DType::kBFloat16);
  const int64_t bytes = 6 * layout.item_bytes(0);
  auto memory = std::make_shared<std::vector<std::byte>>(4 * bytes);
  const std::vector<BufferInfo> buffers = {{memory->data(), bytes, layout.item_bytes(0)},
                                           {memory->data() + bytes, bytes, layout.item_bytes(0)}};
  const auto pool = Must(KvPool::Adopt(layout, buffers, memory));
  const PoolRegions regions(*pool);
  const auto in_one = [&](const std::vector<int64_t>& sizes) {
    std::vector<PoolMemory::SharedPart> parts;
    for (const int64_t size : sizes) parts.push_back({"", size});
    return regions.EachInOne(*pool, parts);
  };
  EXPECT_TRUE(in_one({2 * bytes}));
  EXPECT_TRUE(in_one({bytes, bytes}));
  EXPECT_FALSE(in_one({bytes - 1, bytes + 1}));
  EXPECT_FALSE(in_one({bytes + 1, bytes - 1}));
  EXPECT_FALSE(in_one({bytes, bytes - 1}));
  EXPECT_FALSE(in_one({}));
}

// Layers that share all of a cache.
TEST(PoolRegions, BuffersMayBeOne) {
  const KvLayout layout = KvLayout::Mha(2, 4, 1, 8, DType::kBFloat16);
  const int64_t bytes = 6 * layout.item_bytes(0);
  auto memory = std::make_shared<std::vector<std::byte>>(3 * bytes);
  const auto at = [&](int64_t n) {
    return BufferInfo{memory->data() + n * bytes, bytes, layout.item_bytes(0)};
  };
  const auto pool = Must(KvPool::Adopt(layout, {{at(0), at(0), at(2), at(2)}}, memory));
  const PoolRegions regions(*pool);
  ASSERT_EQ(regions.regions().size(), 2u);
  for (const auto& region : regions.regions()) {
    EXPECT_EQ(region.size(), static_cast<size_t>(bytes));
  }
}

}  // namespace
}  // namespace kvferry
