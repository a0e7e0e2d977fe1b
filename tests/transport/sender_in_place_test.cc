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
#include "tests/pool/guarded_memory.h"
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
    std::vector<std::byte> bytes;
    for (const PoolPiece& piece : PiecesOf(chunk)) {
      const std::vector<std::byte> more = ReadPiece(piece);
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    EXPECT_EQ(bytes.size(), chunk.header.bytes);
    return bytes;
  }
  virtual std::vector<std::byte> ReadPiece(const PoolPiece& piece) {
    const std::byte* from = pool_->shared_memory()->data.get() + piece.offset;
    return {from, from + piece.bytes};
  }
  // All of them, one by one, in the order of the stream.
  static std::vector<PoolPiece> PiecesOf(const SentChunk& chunk) {
    std::vector<PoolPiece> list(chunk.payload.size() / sizeof(PoolPiece));
    std::memcpy(list.data(), chunk.payload.data(), chunk.payload.size());
    const auto places = static_cast<size_t>(PlacesOf(chunk));
    const std::span<const PoolPiece> entries = std::span(list).subspan(1 + places);
    if (places == 0) return {entries.begin(), entries.end()};
    std::vector<PoolPiece> pieces;
    for (const PoolPiece& place : std::span(list).subspan(1, places)) {
      for (const PoolPiece& run : entries) {
        pieces.push_back({place.offset + run.offset * place.bytes, run.bytes * place.bytes});
      }
    }
    return pieces;
  }
  // What readers of the arena's chunks compare with what they were told.
  std::vector<uint64_t> Generations() {
    std::vector<uint64_t> all;
    for (int64_t i = 0; i < arena_->num_chunks(); ++i) all.push_back(arena_->Generation(i));
    return all;
  }
  static uint64_t PlacesOf(const SentChunk& chunk) {
    PoolListHead head;
    std::memcpy(&head, chunk.payload.data(), sizeof head);
    return head.places;
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

// Pools on a device are named tensor by tensor: their pages once.
class SenderOnDevice : public SenderInPlace {
 protected:
  std::vector<std::byte> ReadPiece(const PoolPiece& piece) override {
    const PoolRegions regions(*pool_);
    EXPECT_EQ(regions.regions().size(), 1u);
    return memory_->Read(regions.regions()[0].data() + piece.offset,
                         static_cast<int64_t>(piece.bytes));
  }
  // Sends those pages of a pool of that layout; `chunk_bytes` is what their reader asks for.
  void Send(const KvLayout& layout, const std::vector<int64_t>& pages, int64_t chunk_bytes,
            int64_t from = 0, HeadShare heads = {}, HeadRange wanted = {}) {
    pool_ = Must(KvPool::CreateIn(layout, 4096, memory_));
    FillPattern(*pool_, 5);
    Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, {}, heads);
    sender.UseOnDevice({.pages = true});
    Publish(5, pages, layout.num_layers);
    FetchMsg fetch = Ask(1, 5, static_cast<int64_t>(pages.size()));
    fetch.in_place_bytes = chunk_bytes;
    fetch.from_bytes = from;
    fetch.heads = wanted;
    sender.OnFetch(kPeer, kLink, fetch);
    for (size_t i = 0; i == 0 || i < wire().chunks.size(); ++i) {
      while (sender.Pump()) {
      }
      ASSERT_LT(i, wire().chunks.size());
      wire().Complete(i, absl::OkStatus());
    }
  }
  std::vector<uint64_t> Places() {
    std::vector<uint64_t> places;
    for (const SentChunk& chunk : wire().chunks) places.push_back(PlacesOf(chunk));
    return places;
  }

  std::shared_ptr<GuardedMemory> memory_ = std::make_shared<GuardedMemory>();
  const KvLayout layout_ = KvLayout::Mha(4, 1, 1, 128, DType::kBFloat16);  // 256 bytes an item.
};

TEST_F(SenderOnDevice, NamesTensors) {
  const std::vector<int64_t> pages = {9, 8, 7, 100, 3, 4};
  Send(layout_, pages, 1 << 30);
  EXPECT_EQ(Places(), std::vector<uint64_t>{8});
  EXPECT_EQ(wire().chunks[0].payload.size(), (1 + 8 + 5) * sizeof(PoolPiece));
  EXPECT_EQ(ReadAll(), Want(pages));
}

// As many as the reader asks for; of other sizes, too.
TEST_F(SenderOnDevice, ChunksEndWhereTensorsDo) {
  const std::vector<int64_t> pages = {9, 8, 7};
  KvLayout layout = layout_;
  layout.tensors[1].head_dim = 384;
  Send(layout, pages, 3 * (256 + 768 + 256) + 100);
  EXPECT_EQ(Places(), (std::vector<uint64_t>{3, 2, 2, 1}));
  EXPECT_EQ(ReadAll(), Want(pages));
}

// From the middle of one its end comes first; one that is longer than a chunk goes in pieces, and
// the next one begins anew.
TEST_F(SenderOnDevice, PartsOfTensorsInPieces) {
  const std::vector<int64_t> pages = {9, 7, 5};
  Send(layout_, pages, 1 << 30, 768 + 5);
  EXPECT_EQ(Places(), (std::vector<uint64_t>{0, 6}));
  EXPECT_EQ(ReadAll(768 + 5), Want(pages, 768 + 5));
}

TEST_F(SenderOnDevice, LongTensorsInPieces) {
  const std::vector<int64_t> pages = {9, 7, 5};
  Send(layout_, pages, 600);
  ASSERT_EQ(wire().chunks.size(), 16u);
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(wire().chunks[i].header.bytes, i % 2 == 0 ? 600u : 168u);
  }
  EXPECT_EQ(ReadAll(), Want(pages));
}

// The list must fit into a chunk of the arena: here of 4 KiB, so that it has 255 entries.
TEST_F(SenderOnDevice, AsManyAsTheListHasRoomFor) {
  std::vector<int64_t> pages;
  for (int64_t i = 0; i < 250; ++i) pages.push_back(2 * i);
  Send(layout_, pages, 1 << 30);
  EXPECT_EQ(Places(), (std::vector<uint64_t>{5, 3}));
  EXPECT_EQ(wire().chunks[0].payload.size(), 4096u);
  EXPECT_EQ(ReadAll(), Want(pages));
}

TEST_F(SenderOnDevice, TooManyRunsForAList) {
  std::vector<int64_t> pages;
  for (int64_t i = 0; i < 255; ++i) pages.push_back(2 * i);
  Send(layout_, pages, 1 << 30);
  for (const SentChunk& chunk : wire().chunks) {
    EXPECT_EQ(PlacesOf(chunk), 0u);
    EXPECT_LE(chunk.payload.size(), 4096u);
  }
  EXPECT_EQ(wire().chunks.size(), 16u);
  EXPECT_EQ(ReadAll(), Want(pages));
}

TEST_F(SenderOnDevice, AnAbortTakesTheTensorsFromTheirReader) {
  pool_ = Must(KvPool::CreateIn(layout_, 16, memory_));
  Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_);
  sender.UseOnDevice({.pages = true});
  FetchMsg fetch = Ask(1);
  fetch.in_place_bytes = 1 << 30;
  sender.OnFetch(kPeer, kLink, fetch);
  sender.Pump();
  EXPECT_EQ(Places(), std::vector<uint64_t>{8});
  const std::vector<uint64_t> before = Generations();
  sender.AbortLease(kLease, absl::AbortedError("taken back"));
  EXPECT_NE(Generations(), before);
  wire().Complete(0, absl::OkStatus());
}

TEST_F(SenderOnDevice, SomeHeads) {
  const std::vector<int64_t> pages = {9, 8, 7, 100};
  const KvLayout layout = KvLayout::Mha(3, 4, 4, 256, DType::kBFloat16);
  Send(layout, pages, 1 << 30, 0, {0, 8}, {2, 2});
  EXPECT_EQ(Places(), std::vector<uint64_t>{6});
  const StreamPlan plan =
      Must(StreamPlan::Create(pool_, Must(PageRuns::FromPages(pages)), {}, {2, 2}));
  std::vector<std::byte> want(static_cast<size_t>(plan.total_bytes()));
  ASSERT_TRUE(IsOk(plan.Gather(0, want)));
  EXPECT_EQ(ReadAll(), want);
}

// Of what cannot be read where it lies: peers map a part of the device's memory instead.
class NamedMemory : public GuardedMemory {
 public:
  absl::StatusOr<std::vector<SharedPart>> Share(std::span<const std::byte> bytes) const override {
    if (!share_failure.ok()) return share_failure;
    return std::vector<SharedPart>{{"some", static_cast<int64_t>(bytes.size())}};
  }
  absl::Status share_failure;
};

class SenderGathersOnDevice : public SenderInPlace {
 protected:
  static constexpr uint64_t kArenaAt = 1 << 20;

  SenderGathersOnDevice() {
    pool_ = device_pool_;
    Use(sender_on_device_);
  }
  void Use(Sender& sender, bool pages = false) {
    sender.UseOnDevice({.pages = pages, .arena = device_arena_.get(), .arena_at = kArenaAt});
  }
  std::vector<std::byte> ReadPiece(const PoolPiece& piece) override {
    EXPECT_GE(piece.offset, kArenaAt);
    const std::byte* const arena = device_arena_->Bytes(0).data();
    return memory_->Read(arena + (piece.offset - kArenaAt), static_cast<int64_t>(piece.bytes));
  }
  // All that may be on its way is, then what has been read makes room for more.
  std::vector<std::byte> SendAll(Sender& sender, int64_t from = 0) {
    std::vector<std::byte> stream;
    size_t seen = 0;
    for (bool more = true; more;) {
      while (sender.Pump()) {
      }
      more = seen < wire().chunks.size();
      for (; seen < wire().chunks.size(); ++seen) {
        const SentChunk& chunk = wire().chunks[seen];
        EXPECT_EQ(chunk.header.offset, from + stream.size());
        const bool listed = (chunk.header.flags & kChunkInPool) != 0;
        const std::vector<std::byte> bytes = listed ? Read(chunk) : chunk.payload;
        stream.insert(stream.end(), bytes.begin(), bytes.end());
        wire().Complete(seen, absl::OkStatus());
      }
    }
    EXPECT_EQ(arena_->num_taken(), 0);
    return stream;
  }

  std::shared_ptr<NamedMemory> memory_ = std::make_shared<NamedMemory>();
  const std::unique_ptr<DeviceArena> device_arena_ =
      Must(DeviceArena::Create(*memory_, int64_t{DeviceArena::kNumChunks} * 4096));
  const std::shared_ptr<KvPool> device_pool_ = [&] {
    auto pool = Must(KvPool::CreateIn(SmallLayout(), 16, memory_));
    FillPattern(*pool, 5);
    return pool;
  }();
  Sender sender_on_device_{config_, device_pool_, &leases_, arena_.get(), &outbox_, &metrics_};
};

TEST_F(SenderGathersOnDevice, PagesThatPeersCannotMap) {
  sender_on_device_.OnFetch(kPeer, kLink, Ask(1));
  while (sender_on_device_.Pump()) {
  }
  EXPECT_EQ(wire().chunks.size(), 4u) << "of eight, a peer's share";
  EXPECT_EQ(SendAll(sender_on_device_), Want({3, 4, 5, 9, 0, 15}));
  EXPECT_EQ(metrics_.transfers_on_device, 1);
  EXPECT_EQ(metrics_.transfers_in_place, 0);
  EXPECT_EQ(metrics_.chunks_in_place, 0);
  EXPECT_EQ(wire().chunks[0].header.bytes, 4096u) << "a chunk of the device's arena";
  EXPECT_EQ(wire().chunks[0].payload.size(), 2 * sizeof(PoolPiece));
}

TEST_F(SenderGathersOnDevice, WhatTheConfigSays) {
  Config config = config_;
  config.same_host_path = "arena";
  Sender sender(config, device_pool_, &leases_, arena_.get(), &outbox_, &metrics_);
  Use(sender, /*pages=*/true);
  sender.OnFetch(kPeer, kLink, Ask(1));
  EXPECT_EQ(SendAll(sender), Want({3, 4, 5, 9, 0, 15}));
  EXPECT_EQ(metrics_.transfers_on_device, 1);
}

TEST_F(SenderGathersOnDevice, ButNotPagesThatPeersHaveMapped) {
  Use(sender_on_device_, /*pages=*/true);
  sender_on_device_.OnFetch(kPeer, kLink, Ask(1));
  sender_on_device_.Pump();
  EXPECT_EQ(metrics_.transfers_in_place, 1);
  EXPECT_EQ(metrics_.transfers_on_device, 0);
}

TEST_F(SenderGathersOnDevice, ValuesThatAreCast) {
  const ValueFormat values = ValueFormatOf(SmallLayout(), {});
  Sender sender(config_, device_pool_, &leases_, arena_.get(), &outbox_, &metrics_, {}, {}, values);
  Use(sender, /*pages=*/true);
  FetchMsg fetch = Ask(1);
  fetch.values = values;
  fetch.values.dtypes.assign(values.dtypes.size(), DType::kFloat8E4M3);
  // Chunks that begin inside of a value, where values are longer than that.
  fetch.in_place_bytes = 1001;
  const std::vector<int64_t> ids = {3, 4, 5, 9, 0, 15};
  const PageRuns pages = Must(PageRuns::FromPages(ids));
  const PageRun all{0, 6};
  const StreamPlan plan = Must(
      StreamPlan::CreateIn(fetch.form, device_pool_, pages, Must(PageRuns::FromRuns({&all, 1})), {},
                           {}, Must(ValueCasts::Make(SmallLayout(), values, fetch.values))));
  std::vector<std::byte> want(static_cast<size_t>(plan.total_bytes()));
  ASSERT_TRUE(IsOk(plan.Gather(0, want)));
  sender.OnFetch(kPeer, kLink, fetch);
  EXPECT_EQ(SendAll(sender), want);
  EXPECT_EQ(metrics_.transfers_on_device, 1);
  EXPECT_EQ(wire().chunks[0].header.bytes, 1001u);
}

TEST_F(SenderGathersOnDevice, FromAnyByte) {
  FetchMsg fetch = Ask(1);
  fetch.from_bytes = 5001;
  sender_on_device_.OnFetch(kPeer, kLink, fetch);
  EXPECT_EQ(SendAll(sender_on_device_, 5001), Want({3, 4, 5, 9, 0, 15}, 5001));
}

// The processor makes checksums, and reads what lies behind the pages.
TEST_F(SenderGathersOnDevice, ThroughTheHostWhatTheProcessorHasToSee) {
  FetchMsg fetch = Ask(1);
  fetch.checksum = true;
  sender_on_device_.OnFetch(kPeer, kLink, fetch);
  EXPECT_EQ(SendAll(sender_on_device_), Want({3, 4, 5, 9, 0, 15}));
  EXPECT_EQ(metrics_.transfers_on_device, 0);
}

TEST_F(SenderGathersOnDevice, ThenTheTail) {
  const auto tail = std::make_shared<std::vector<std::byte>>(10000, std::byte{7});
  const std::vector<int64_t> pages = {1, 2};
  ASSERT_TRUE(
      IsOk(leases_.Publish(6, Must(PageRuns::FromPages(pages)), 4, DeadlineInMs(60000), tail)));
  FetchMsg fetch = Ask(1, 6, 2, /*window=*/16 << 10);
  fetch.tail_bytes = static_cast<int64_t>(tail->size());
  sender_on_device_.OnFetch(kPeer, kLink, fetch);
  std::vector<std::byte> want = Want(pages);
  want.insert(want.end(), tail->begin(), tail->end());
  EXPECT_EQ(SendAll(sender_on_device_), want);
  EXPECT_EQ(metrics_.transfers_on_device, 1);
}

// A layer that is not ready is not gathered.
TEST_F(SenderGathersOnDevice, NothingBeforeItIsReady) {
  Publish(2, {1, 2, 3}, 1);
  sender_on_device_.OnFetch(kPeer, kLink, Ask(1, 2, 3));
  const int64_t layer_bytes = 3 * SmallLayout().layer_page_bytes();
  EXPECT_EQ(static_cast<int64_t>(SendAll(sender_on_device_).size()), layer_bytes);
}

// Of two peers none has more than its share, and who reads nothing leaves the other its own.
TEST_F(SenderGathersOnDevice, AStuckReaderHasItsShare) {
  Publish(101, {3, 4, 5, 9, 0, 15}, 4);
  sender_on_device_.OnFetch("accepted:1", kLink, Ask(1, 101));
  sender_on_device_.OnFetch("accepted:2", kLink, Ask(2));
  while (sender_on_device_.Pump()) {
  }
  std::map<uint64_t, int> chunks;
  for (const SentChunk& chunk : wire().chunks) ++chunks[chunk.header.transfer_id];
  EXPECT_EQ(chunks, (std::map<uint64_t, int>{{1, 2}, {2, 2}}));  // Of eight, 1 / (peers + 1).
  // The second one reads all it gets.
  for (size_t i = 0; i < wire().chunks.size(); ++i) {
    if (wire().chunks[i].header.transfer_id == 2) wire().Complete(i, absl::OkStatus());
    while (sender_on_device_.Pump()) {
    }
  }
  chunks.clear();
  for (const SentChunk& chunk : wire().chunks) ++chunks[chunk.header.transfer_id];
  const int64_t all = 6 * SmallLayout().page_bytes() / 4096;
  EXPECT_LE(chunks[1], 4);
  EXPECT_EQ(chunks[2], all);
  sender_on_device_.OnPeerGone("accepted:1", absl::UnavailableError("gone"));
  for (size_t i = 0; i < wire().chunks.size(); ++i) {
    if (wire().chunks[i].header.transfer_id == 1) wire().Complete(i, absl::OkStatus());
  }
  for (int64_t i = 0; i < DeviceArena::kNumChunks; ++i) {
    EXPECT_GE(device_arena_->Take(), 0) << "chunks of who is gone were not given back";
  }
}

// Peers that read nothing hold all of it, one after another, some beyond the end of their
// transfers: the next one gets chunks of the arena instead.
TEST_F(SenderGathersOnDevice, StuckReadersKeepNobodyWaiting) {
  Sender sender(config_, device_pool_, &leases_, arena_.get(), &outbox_, &metrics_,
                {.processors = 64});
  Use(sender);
  const auto begin = [&](uint64_t id) {
    Publish(100 + id, {3, 4, 5, 9, 0, 15}, 4);
    sender.OnFetch("accepted:" + std::to_string(id), kLink, Ask(id, 100 + id));
    while (sender.Pump()) {
    }
  };
  begin(1);
  sender.AbortLease(101, absl::DeadlineExceededError("too late"));
  begin(2);
  begin(3);
  EXPECT_EQ(device_arena_->num_free(), 0);
  const size_t before = wire().chunks.size();
  EXPECT_EQ(before, 8u);
  begin(4);
  ASSERT_GT(wire().chunks.size(), before);
  for (size_t i = before; i < wire().chunks.size(); ++i) {
    EXPECT_EQ(wire().chunks[i].header.flags & kChunkInPool, 0u);
    wire().Complete(i, absl::OkStatus());
    while (sender.Pump()) {
    }
  }
  EXPECT_EQ(Sent(4), Want({3, 4, 5, 9, 0, 15}));
  // Once there is room again, on the device.
  wire().Complete(0, absl::OkStatus());
  Publish(200, {1, 2}, 4);
  sender.OnFetch("accepted:4", kLink, Ask(5, 200, 2));
  sender.Pump();
  EXPECT_NE(wire().chunks.back().header.flags & kChunkInPool, 0u);
}

// Who waits for leases that are not published, or reads in place, has no part in it.
TEST_F(SenderGathersOnDevice, PeersThatHoldNoneOfItHaveNoShare) {
  const auto long_arena = Must(Arena::Create(1 << 20, config_.chunk_bytes));
  Sender sender(config_, device_pool_, &leases_, long_arena.get(), &outbox_, &metrics_);
  Use(sender);
  for (uint64_t id = 2; id < 10; ++id) {
    sender.OnFetch("accepted:" + std::to_string(id), kLink, Ask(id, 1000 + id));
  }
  sender.OnFetch(kPeer, kLink, Ask(1));
  while (sender.Pump()) {
  }
  EXPECT_EQ(wire().chunks.size(), 4u);
  // Which are done with an arena that is gone by then otherwise.
  for (size_t i = 0; i < wire().chunks.size(); ++i) wire().Complete(i, absl::OkStatus());
}

// What was gathered stays as it is when its transfer ends: a reader that has not come to it may
// have it.
TEST_F(SenderGathersOnDevice, AnAbortLeavesTheChunksToTheirReader) {
  sender_on_device_.OnFetch(kPeer, kLink, Ask(1));
  while (sender_on_device_.Pump()) {
  }
  ASSERT_EQ(wire().chunks.size(), 4u);
  const std::vector<uint64_t> before = Generations();
  const std::vector<std::byte> want = Want({3, 4, 5, 9, 0, 15});
  sender_on_device_.AbortLease(kLease, absl::AbortedError("taken back"));
  FillPattern(*device_pool_, 77);
  EXPECT_EQ(Generations(), before);
  EXPECT_EQ(arena_->num_taken(), 4) << "its reader may still be looking at it";
  std::vector<std::byte> got;
  for (size_t i = 0; i < 4; ++i) {
    const std::vector<std::byte> bytes = Read(wire().chunks[i]);
    got.insert(got.end(), bytes.begin(), bytes.end());
    wire().Complete(i, absl::OkStatus());
  }
  EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin()));
  EXPECT_EQ(arena_->num_taken(), 0);
}

// Lists of pieces are bounded, however long a chunk could be.
TEST_F(SenderGathersOnDevice, ManyTinyPieces) {
  const KvLayout layout = KvLayout::Mha(1, 1, 1, 8, DType::kBFloat16);  // 16 bytes an item.
  const int64_t num_pages = 100 << 10;
  const auto pool = Must(KvPool::CreateIn(layout, num_pages, memory_));
  const auto large = Must(DeviceArena::Create(*memory_, DeviceArena::kNumChunks * (4 << 20)));
  Sender sender(config_, pool, &leases_, arena_.get(), &outbox_, &metrics_);
  sender.UseOnDevice({.pages = true, .arena = large.get()});
  std::vector<int64_t> pages(static_cast<size_t>(num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  Publish(5, pages, 1);
  sender.OnFetch(kPeer, kLink, Ask(1, 5, num_pages));
  sender.Pump();
  EXPECT_EQ(metrics_.transfers_on_device, 1);
  EXPECT_EQ(wire().chunks[0].header.bytes, (64u << 10) * 16);
}

TEST_F(SenderGathersOnDevice, ADeviceThatFails) {
  sender_on_device_.OnFetch(kPeer, kLink, Ask(1));
  memory_->failure = absl::UnavailableError("fell off the bus");
  sender_on_device_.Pump();
  memory_->failure = absl::OkStatus();
  sender_on_device_.Pump();
  EXPECT_EQ(metrics_.transfers_failed, 1);
  EXPECT_EQ(arena_->num_taken(), 0);
  for (int64_t i = 0; i < DeviceArena::kNumChunks; ++i) EXPECT_GE(device_arena_->Take(), 0);
  EXPECT_EQ(device_arena_->Take(), -1);
}

TEST(DeviceArenas, OfNoMemoryOrNoName) {
  NamedMemory memory;
  memory.share_failure = absl::UnavailableError("no handle");
  EXPECT_TRUE(Fails(DeviceArena::Create(memory, 1 << 20).status(), absl::StatusCode::kUnavailable,
                    "no handle"));
  memory.failure = absl::ResourceExhaustedError("out of memory");
  EXPECT_TRUE(Fails(DeviceArena::Create(memory, 1 << 20).status(),
                    absl::StatusCode::kResourceExhausted, "out of memory"));
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
  EXPECT_TRUE(sender.wants_tick());
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
  EXPECT_FALSE(sender.wants_tick());
}

TEST_F(SenderInPlace, NobodyWaitsWhenAllHaveGone) {
  Sender sender(config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_, {.processors = 1});
  for (uint64_t id = 1; id <= 4; ++id) {
    Publish(100 + id, {3, 4, 5}, 4);
    sender.OnFetch(kPeer, kLink, Ask(id, 100 + id, 3));
  }
  while (sender.Pump()) {
  }
  ASSERT_TRUE(sender.wants_tick());
  sender.OnPeerGone(kPeer, absl::UnavailableError("it has ended"));
  sender.Pump();
  EXPECT_FALSE(sender.wants_tick());
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
  const std::vector<uint64_t> before = Generations();
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
