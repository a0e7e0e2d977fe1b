// The sender against receivers that lie about credits, ask for too much or never answer.

#include "transport/sender.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/hash.h"
#include "tests/transport/sender_alone.h"

namespace kvferry {
namespace {

TEST_F(SenderAlone, SendsTheStream) {
  sender_.OnFetch(kPeer, kLink, Ask(1));
  PumpDry();
  EXPECT_EQ(Sent(1), Want({3, 4, 5, 9, 0, 15}));
  EXPECT_EQ(leases_.num_live(), 1);
  sender_.OnDone(kPeer, {1, kLease, 6 * SmallLayout().page_bytes()});
  EXPECT_EQ(leases_.num_live(), 0);
  EXPECT_EQ(arena_->num_taken(), 0);
}

TEST_F(SenderAlone, PositionsPickPagesOfTheLease) {
  FetchMsg fetch = Ask(1);
  fetch.positions = Must(PageRuns::FromRuns(std::vector<PageRun>{{4, 2}, {1, 1}}));
  sender_.OnFetch(kPeer, kLink, fetch);
  PumpDry();
  EXPECT_EQ(Sent(1), Want({0, 15, 4}));
}

// Positions count in the pages that the fetch says.
TEST_F(SenderAlone, PagesOfAnotherForm) {
  FetchMsg fetch = Ask(1);
  fetch.positions = PageRuns(PageRun{1, 2});
  fetch.form = {32, ValueOrder::kOther};  // Two of this side's, in its order.
  sender_.OnFetch(kPeer, kLink, fetch);
  PumpDry();
  EXPECT_EQ(Sent(1), Want({5, 9, 0, 15}));
  sender_.OnCancel(kPeer, {1, "enough"});
  fetch = Ask(2);
  fetch.form = {16, ValueOrder::kNhd};  // Its own.
  sender_.OnFetch(kPeer, kLink, fetch);
  PumpDry();
  EXPECT_EQ(Sent(2), Want({3, 4, 5, 9, 0, 15}));
  sender_.OnCancel(kPeer, {2, "enough"});
  const auto refused = [&](uint64_t id, const PageForm& form, absl::StatusCode code,
                           const char* what) {
    fetch = Ask(id);
    fetch.form = form;
    sender_.OnFetch(kPeer, kLink, fetch);
    return Fails(outbox_.Last<RefuseMsg>()->status, code, what);
  };
  EXPECT_TRUE(refused(3, {32, ValueOrder::kNhd}, absl::StatusCode::kOutOfRange,
                      "outside 6 pages of 16 tokens, which are 3 of 32"));
  EXPECT_TRUE(refused(4, {KvLayout::kMaxPageSize, ValueOrder::kNhd},
                      absl::StatusCode::kInvalidArgument, "the most is 65536"));
  EXPECT_EQ(leases_.num_live(), 1);
}

// The stream is as long as the values that are asked for.
TEST_F(SenderAlone, ValuesOfAnotherFormat) {
  FetchMsg fetch = Ask(1);
  fetch.values = {{DType::kFloat8E4M3, DType::kFloat32}, {}};
  fetch.from_bytes = 77;  // In the middle of one.
  sender_.OnFetch(kPeer, kLink, fetch);
  PumpDry();
  const auto own = static_cast<int64_t>(Want({3, 4, 5, 9, 0, 15}).size());
  EXPECT_EQ(static_cast<int64_t>(Sent(1, 77).size()), own / 2 / 2 + own / 2 * 2 - 77);
  EXPECT_EQ(metrics_.transfers_cast, 1);
  sender_.OnCancel(kPeer, {1, "enough"});
  const auto refused = [&](uint64_t id, const ValueFormat& values, const char* what) {
    fetch = Ask(id);
    fetch.values = values;
    sender_.OnFetch(kPeer, kLink, fetch);
    return Fails(outbox_.Last<RefuseMsg>()->status, absl::StatusCode::kInvalidArgument, what);
  };
  EXPECT_TRUE(refused(2, {{DType::kFloat32}, {}}, "dtypes of 1 tensors asked of pages of 2"));
  EXPECT_TRUE(refused(3, {{DType::kUint8, DType::kUint8}, {}}, "'k' are not cast"));
  EXPECT_TRUE(refused(4, {{DType::kFloat32, DType::kFloat32}, {1}}, "1 scales"));
  EXPECT_EQ(metrics_.transfers_cast, 1);
  EXPECT_EQ(leases_.num_live(), 1);
}

TEST_F(SenderAlone, NoChunkRunsAheadOfWhatIsReady) {
  Publish(2, {1, 2, 3}, 0);
  sender_.OnFetch(kPeer, kLink, Ask(1, 2, 3));
  const int64_t layer_bytes = 3 * SmallLayout().layer_page_bytes();
  for (int64_t ready = 0; ready <= 4; ++ready) {
    ASSERT_TRUE(IsOk(leases_.SetReadyLayers(2, ready)));
    sender_.OnLeaseChanged(2);
    PumpDry();
    EXPECT_EQ(static_cast<int64_t>(Sent(1).size()), ready * layer_bytes);
  }
  for (const SentChunk& chunk : wire().chunks) {
    const auto offset = static_cast<int64_t>(chunk.header.offset);
    EXPECT_EQ(offset / layer_bytes, (offset + chunk.header.bytes - 1) / layer_bytes);
  }
}

// Whole ones, as many as a chunk has room for.
TEST_F(SenderAlone, ShortLayersGoTogether) {
  const int64_t layer_bytes = SmallLayout().layer_page_bytes();
  Config config = MakeConfig();
  config.chunk_bytes = 8 * layer_bytes;
  const auto arena = Must(Arena::Create(config.arena_bytes, config.chunk_bytes));
  Sender sender(config, pool_, &leases_, arena.get(), &outbox_, &metrics_);
  for (const int64_t together : {1, 2, 3, 4}) {
    Publish(10 + together, {7}, 4);
    FetchMsg fetch = Ask(10 + together, 10 + together, 1);
    fetch.chunk_bytes = together * layer_bytes + layer_bytes / 2;
    sender.OnFetch(kPeer, kLink, fetch);
    while (sender.Pump()) {
    }
    EXPECT_EQ(Sent(10 + together), Want({7}));
    std::vector<int64_t> layers;
    for (const SentChunk& chunk : wire().chunks) {
      if (chunk.header.transfer_id == fetch.transfer_id) {
        layers.push_back(chunk.header.bytes / layer_bytes);
        EXPECT_EQ(chunk.header.bytes % layer_bytes, 0);
      }
    }
    const std::vector<std::vector<int64_t>> want = {{1, 1, 1, 1}, {2, 2}, {3, 1}, {4}};
    EXPECT_EQ(layers, want[together - 1]);
  }
}

// A decode side that was cut off asks again over another session, before the first one has ended
// here.
TEST_F(SenderAlone, AFetchThatReplacesAnotherEndsIt) {
  sender_.OnFetch(kPeer, kLink, Ask(1, kLease, 6, 8192));
  PumpDry();
  FetchMsg again = Ask(2);
  sender_.OnFetch("accepted:2", 4, again);
  ASSERT_NE(outbox_.Last<RefuseMsg>(), nullptr);  // Without saying so, it is refused.
  EXPECT_EQ(outbox_.Last<RefuseMsg>()->transfer_id, 2u);
  again.transfer_id = 3;
  again.replaces = 1;
  sender_.OnFetch("accepted:2", 4, again);
  PumpDry();
  EXPECT_EQ(Sent(1).size(), 8192u);
  EXPECT_EQ(Sent(3), Want({3, 4, 5, 9, 0, 15}));
  sender_.OnPeerGone(kPeer, absl::UnavailableError("x"));  // The first session ends only now.
  EXPECT_EQ(metrics_.transfers_active, 1);
  sender_.OnDone("accepted:2", {3, kLease, 6 * SmallLayout().page_bytes()});
  EXPECT_EQ(leases_.num_live(), 0);
}

// Nothing of what has arrived is sent again, and it takes nothing of the window.
TEST_F(SenderAlone, AFetchFromTheMiddleOfAStream) {
  const int64_t total = 6 * SmallLayout().page_bytes();
  const int64_t from = 5000, window = 8192;
  FetchMsg fetch = Ask(1, kLease, 6, window);
  fetch.from_bytes = from;
  sender_.OnFetch(kPeer, kLink, fetch);
  int64_t sent = from;
  while (sent < total) {
    PumpDry();
    const int64_t before = std::exchange(sent, from + Sent(1, from).size());
    ASSERT_LE(sent - before, window);
    ASSERT_GT(sent, before) << "stuck";
    sender_.OnCredit({1, static_cast<uint64_t>(sent)});
  }
  EXPECT_EQ(Sent(1, from), Want({3, 4, 5, 9, 0, 15}, from));
  sender_.OnDone(kPeer, {1, kLease, total});
  EXPECT_EQ(leases_.num_live(), 0);
}

TEST_F(SenderAlone, AFetchFromALayerThatIsNotReady) {
  Publish(2, {1, 2, 3}, 1);
  const int64_t from = 2 * 3 * SmallLayout().layer_page_bytes() + 100;
  FetchMsg fetch = Ask(1, 2, 3);
  fetch.from_bytes = from;
  sender_.OnFetch(kPeer, kLink, fetch);
  for (const int64_t ready : {1, 2, 3, 4}) {
    ASSERT_TRUE(IsOk(leases_.SetReadyLayers(2, ready)));
    sender_.OnLeaseChanged(2);
    PumpDry();
    EXPECT_EQ(Sent(1, from).empty(), ready < 3);
  }
  EXPECT_EQ(Sent(1, from), Want({1, 2, 3}, from));
}

TEST_F(SenderAlone, NothingBehindTheEndOfAStreamIsSent) {
  FetchMsg fetch = Ask(1);
  fetch.from_bytes = 6 * SmallLayout().page_bytes();
  sender_.OnFetch(kPeer, kLink, fetch);
  ASSERT_NE(outbox_.Last<RefuseMsg>(), nullptr);
  EXPECT_TRUE(Fails(outbox_.Last<RefuseMsg>()->status, absl::StatusCode::kOutOfRange, "from byte"));
  sender_.OnFetch(kPeer, kLink, Ask(2));  // The lease is there as before.
  EXPECT_EQ(metrics_.transfers_active, 1);
}

// The receiver has heard nothing of the second, whose session fell silent as well, and cannot know
// whether the sender has that one or still the first.
TEST_F(SenderAlone, WhatReplacesTheSameIsReplacedToo) {
  for (const bool second_came : {true, false}) {
    SCOPED_TRACE(second_came);
    const uint64_t lease = second_came ? kLease : 2;
    if (!second_came) Publish(lease, {1, 2, 6, 7, 8, 10}, 4);
    const uint64_t first = lease * 100;
    sender_.OnFetch(kPeer, kLink, Ask(first, lease));
    FetchMsg next = Ask(first + 1, lease);
    next.replaces = first;
    next.attempt = 1;
    if (second_came) sender_.OnFetch("accepted:2", 4, next);
    FetchMsg last = next;
    last.transfer_id = first + 2;
    last.attempt = 2;
    sender_.OnFetch("accepted:3", 5, last);
    EXPECT_EQ(outbox_.Count<RefuseMsg>(), 0);
    if (!second_came) {  // It comes now.
      sender_.OnFetch("accepted:2", 4, next);
      EXPECT_EQ(outbox_.Last<RefuseMsg>()->transfer_id, next.transfer_id);
    }
    EXPECT_EQ(metrics_.transfers_active, 1);
    sender_.OnDone("accepted:3", {first + 2, lease, 0});
    EXPECT_EQ(metrics_.transfers_active, 0);
  }
}

TEST_F(SenderAlone, OnlyAFetchOfTheSameLeaseIsReplaced) {
  Publish(2, {1, 2, 3}, 4);
  sender_.OnFetch(kPeer, kLink, Ask(1));
  FetchMsg other = Ask(2, 2, 3);
  other.replaces = 1;
  sender_.OnFetch(kPeer, kLink, other);
  EXPECT_EQ(metrics_.transfers_active, 2);
}

TEST_F(SenderAlone, NorOneOfAnotherLeaseThatWaits) {
  sender_.OnFetch(kPeer, kLink, Ask(1, 50, 2));
  FetchMsg other = Ask(2, 51, 2);
  other.replaces = 1;
  sender_.OnFetch(kPeer, kLink, other);
  Publish(50, {7, 8}, 4);
  sender_.OnLeaseChanged(50);
  PumpDry();
  EXPECT_EQ(Sent(1), Want({7, 8}));
}

TEST_F(SenderAlone, AFetchThatWaitsForItsPublishIsReplacedToo) {
  sender_.OnFetch(kPeer, kLink, Ask(1, 5));
  FetchMsg again = Ask(2, 5);
  again.replaces = 1;
  sender_.OnFetch("accepted:2", 4, again);
  Publish(5, {1, 2, 3, 4, 5, 6}, 4);
  sender_.OnLeaseChanged(5);
  PumpDry();
  EXPECT_TRUE(Sent(1).empty());
  EXPECT_EQ(Sent(2), Want({1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(outbox_.Last<RefuseMsg>(), nullptr);
}

TEST_F(SenderAlone, AndWhatReplacesTheSame) {
  sender_.OnFetch(kPeer, kLink, Ask(1, 5));
  FetchMsg again = Ask(2, 5);
  again.replaces = again.attempt = 1;
  sender_.OnFetch("accepted:2", 4, again);
  again.transfer_id = 3;
  again.attempt = 2;
  sender_.OnFetch("accepted:3", 5, again);
  EXPECT_EQ(outbox_.Count<RefuseMsg>(), 0);
  // What both go on with, over an older session than theirs.
  sender_.OnFetch("accepted:4", 6, Ask(1, 5));
  EXPECT_EQ(outbox_.Last<RefuseMsg>()->transfer_id, 1u);
  Publish(5, {1, 2, 3, 4, 5, 6}, 4);
  sender_.OnLeaseChanged(5);
  PumpDry();
  EXPECT_TRUE(Sent(1).empty());
  EXPECT_TRUE(Sent(2).empty());
  EXPECT_EQ(Sent(3), Want({1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(outbox_.Count<RefuseMsg>(), 1);
}

TEST_F(SenderAlone, NeverMoreThanTheWindow) {
  const int64_t window = 10000;
  sender_.OnFetch(kPeer, kLink, Ask(1, kLease, 6, window));
  const auto total = static_cast<int64_t>(Want({3, 4, 5, 9, 0, 15}).size());
  int64_t credited = 0;
  while (credited < total) {
    PumpDry();
    const auto sent = static_cast<int64_t>(Sent(1).size());
    ASSERT_LE(sent - credited, window);
    ASSERT_GT(sent, credited) << "stuck";
    credited = sent;
    sender_.OnCredit({1, static_cast<uint64_t>(credited)});
  }
}

TEST_F(SenderAlone, ForgedCreditsOpenNothing) {
  sender_.OnFetch(kPeer, kLink, Ask(1, kLease, 6, 8192));
  PumpDry();
  const size_t sent = Sent(1).size();
  EXPECT_EQ(sent, 8192u);
  sender_.OnCredit({2, 1 << 20});  // Of another transfer.
  sender_.OnCredit({1, 0});        // Less than before.
  PumpDry();
  EXPECT_EQ(Sent(1).size(), sent);
  sender_.OnCredit({1, UINT64_MAX});  // More than was sent counts as what was sent.
  PumpDry();
  EXPECT_EQ(Sent(1).size(), 2 * sent);
  sender_.OnCredit({1, 1});
  PumpDry();
  EXPECT_EQ(Sent(1).size(), 2 * sent);
  sender_.OnCredit({1, 2 * sent});
  sender_.OnCredit({1, 1});  // Comes late: takes nothing back.
  PumpDry();
  EXPECT_EQ(Sent(1).size(), 3 * sent);
}

TEST_F(SenderAlone, ChecksumsWhenAsked) {
  FetchMsg fetch = Ask(1);
  fetch.checksum = true;
  sender_.OnFetch(kPeer, kLink, fetch);
  PumpDry();
  for (const SentChunk& chunk : wire().chunks) {
    EXPECT_EQ(chunk.header.flags, kChunkHasChecksum);
    EXPECT_EQ(chunk.header.checksum, Xxh3(chunk.payload));
  }
}

TEST_F(SenderAlone, HostileChunkAndWindowSizes) {
  constexpr int64_t kLeast = 4096, kMost = int64_t{1} << 50;
  uint64_t id = 100;
  for (const auto& [window, chunk] : std::vector<std::pair<int64_t, int64_t>>{
           {kLeast, kLeast}, {kLeast, kMost}, {kMost, kLeast}, {kMost, kMost}, {kMost, 5000}}) {
    wire().chunks.clear();
    Publish(++id, {1}, 4);
    FetchMsg fetch = Ask(id, id, 1);
    fetch.window_bytes = window;
    fetch.chunk_bytes = chunk;
    sender_.OnFetch(kPeer, kLink, fetch);
    for (int i = 0; i < 50; ++i) sender_.Pump();
    for (const SentChunk& sent : wire().chunks) EXPECT_LE(sent.header.bytes, 4096u);
    EXPECT_FALSE(wire().chunks.empty());
    sender_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  }
}

// Else it would have no room for any.
TEST_F(SenderAlone, ChunksAreNoLongerThanTheWindow) {
  Config config = MakeConfig();
  config.chunk_bytes = 8192;
  const auto arena = Must(Arena::Create(config.arena_bytes, config.chunk_bytes));
  Sender sender(config, pool_, &leases_, arena.get(), &outbox_, &metrics_);
  sender.OnFetch(kPeer, kLink, Ask(1, kLease, 6, 5000));
  while (sender.Pump()) {
  }
  EXPECT_EQ(Sent(1).size(), 5000u);
}

// Each chunk costs others their time, however little is in it.
TEST_F(SenderAlone, ShorterChunksThanOursAreRefused) {
  constexpr int64_t kLeast = 4096, kMost = int64_t{1} << 50;
  uint64_t id = 100;
  for (const auto& [window, chunk] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, kMost}, {kMost, 1}, {kLeast - 1, kMost}, {kMost, kLeast - 1}}) {
    FetchMsg fetch = Ask(++id);
    fetch.window_bytes = window;
    fetch.chunk_bytes = chunk;
    sender_.OnFetch(kPeer, kLink, fetch);
    ASSERT_NE(outbox_.Last<RefuseMsg>(), nullptr);
    EXPECT_EQ(outbox_.Last<RefuseMsg>()->transfer_id, id);
    EXPECT_TRUE(Fails(outbox_.Last<RefuseMsg>()->status, absl::StatusCode::kInvalidArgument,
                      "4096 at least"));
  }
  PumpDry();
  EXPECT_TRUE(wire().chunks.empty());
  EXPECT_EQ(leases_.num_live(), 1);
  // What ours may ask for is served.
  Config config;
  config.chunk_bytes = kLeast;
  EXPECT_TRUE(IsOk(config.Validate()));
  config.chunk_bytes = kLeast - 1;
  EXPECT_FALSE(config.Validate().ok());
}

TEST_F(SenderAlone, AStuckPeerLeavesRoomInTheArena) {
  wire().complete_at_once = false;
  sender_.OnFetch(kPeer, kLink, Ask(1));
  Publish(2, {1}, 4);
  PumpDry();
  const int64_t taken = arena_->num_taken();
  EXPECT_EQ(taken, arena_->num_chunks() / 2);
  sender_.OnFetch("accepted:2", kLink + 1, Ask(2, 2, 1));
  PumpDry();
  EXPECT_GT(arena_->num_taken(), taken);
  EXPECT_FALSE(Sent(2).empty());
}

// Nor does it when its transfers have ended, which takes no chunk from it: several that are stuck
// leave some to the next one.
TEST_F(SenderAlone, StuckPeersLeaveRoomAfterTheirTransfersToo) {
  wire().complete_at_once = false;
  for (uint64_t id = 1; id <= 4; ++id) {
    const PeerKey peer = "accepted:" + std::to_string(id);
    const int64_t before = arena_->num_taken();
    Publish(100 + id, {3, 4, 5, 9, 0, 15}, 4);
    sender_.OnFetch(peer, kLink, Ask(id, 100 + id));
    PumpDry();
    EXPECT_EQ(arena_->num_taken(), before + (16 - before) / 2) << "half of what was free";
    sender_.OnCancel(peer, CancelMsg{id, "too late"});
  }
}

// Who waits for leases that are not published holds nothing.
TEST_F(SenderAlone, PeersThatWaitTakeNoShareOfTheArena) {
  wire().complete_at_once = false;
  for (uint64_t id = 2; id <= 16; ++id) {
    sender_.OnFetch("accepted:" + std::to_string(id), kLink, Ask(id, 1000 + id));
  }
  sender_.OnFetch(kPeer, kLink, Ask(1));
  PumpDry();
  EXPECT_EQ(arena_->num_taken(), arena_->num_chunks() / 2);
}

// What is being sent lies in the arena: a transfer that has ended reads no page, and its chunks
// come back when their sends complete, however late.
TEST_F(SenderAlone, ChunksOfEndedTransfersComeBackLate) {
  wire().complete_at_once = false;
  sender_.OnFetch(kPeer, kLink, Ask(1));
  PumpDry();
  EXPECT_GT(arena_->num_taken(), 0);
  sender_.OnPeerGone(kPeer, absl::UnavailableError("gone"));
  EXPECT_EQ(leases_.TakeEnded().size(), 0u);
  ASSERT_TRUE(IsOk(leases_.Withdraw(kLease)));
  EXPECT_EQ(leases_.num_live(), 0);
  const size_t sent = wire().chunks.size();
  PumpDry();
  EXPECT_EQ(wire().chunks.size(), sent);
  for (size_t i = 0; i < sent; ++i) wire().Complete(i, absl::CancelledError("closed"));
  EXPECT_EQ(arena_->num_taken(), 0);
}

TEST_F(SenderAlone, AFailedSendEndsTheTransferAndNotTheLease) {
  wire().complete_at_once = false;
  sender_.OnFetch(kPeer, kLink, Ask(1));
  PumpDry();
  wire().Complete(0, absl::UnavailableError("reset"));
  PumpDry();
  EXPECT_TRUE(sender_.wants_tick());  // The lease may have expired meanwhile.
  ASSERT_NE(outbox_.Last<AbortMsg>(), nullptr);
  EXPECT_EQ(outbox_.Last<AbortMsg>()->transfer_id, 1u);
  EXPECT_EQ(metrics_.transfers_active, 0);
  EXPECT_TRUE(IsOk(leases_.BeginTransfer(kLease, {})));  // Idle again.
}

TEST_F(SenderAlone, AbortLeaseReadsNothingMore) {
  Publish(2, {1, 2}, 1);
  sender_.OnFetch(kPeer, kLink, Ask(1, 2, 2));
  PumpDry();
  EXPECT_EQ(Must(leases_.Withdraw(2)), false);
  sender_.AbortLease(2, absl::AbortedError("taken back"));
  EXPECT_EQ(leases_.TakeEnded().size(), 1u);
  const size_t sent = wire().chunks.size();
  sender_.OnLeaseChanged(2);
  PumpDry();
  EXPECT_EQ(wire().chunks.size(), sent);
  ASSERT_NE(outbox_.Last<AbortMsg>(), nullptr);
}

// Its owner needs the pages for something else, and will publish the lease again in others.
TEST_F(SenderAlone, AFetchThatWaitsIsServedWhenAnUnpublishedLeaseComesAgain) {
  Publish(2, {1, 2}, 1);
  sender_.OnFetch(kPeer, kLink, Ask(1, 2, 2));
  PumpDry();
  EXPECT_EQ(Must(leases_.Unpublish(2)), false);
  FetchMsg again = Ask(5, 2, 2);
  again.wait_ms = 60000;
  again.replaces = 1;
  sender_.OnFetch(kPeer, kLink, again);  // Even before the owner has its pages back.
  EXPECT_EQ(outbox_.Last<RefuseMsg>(), nullptr);
  Publish(3, {4, 5}, 1);
  sender_.OnFetch(kPeer, kLink, Ask(6, 3, 2));
  EXPECT_EQ(Must(leases_.Unpublish(3)), false);
  sender_.AbortLease(3, absl::AbortedError("taken back"), /*again=*/true);
  ASSERT_NE(outbox_.Last<AbortMsg>(), nullptr);
  EXPECT_EQ(outbox_.Last<AbortMsg>()->transfer_id, 6u);
  EXPECT_TRUE(outbox_.Last<AbortMsg>()->again);
  EXPECT_TRUE(leases_.TakeEnded().empty());
  EXPECT_EQ(metrics_.transfers_active, 0);
  Publish(2, {6, 7}, 1);
  sender_.OnLeaseChanged(2);
  EXPECT_EQ(metrics_.transfers_active, 1);
}

// The receiver has everything, and says so before it hears that the lease was taken back: nobody
// comes when it is published again, and its owner must not wait for that.
TEST_F(SenderAlone, ADoneThatCrossesTheEndOfAnUnpublishedLeaseCounts) {
  const auto bytes = static_cast<int64_t>(Want({1}).size());
  const auto take_back = [&](uint64_t transfer_id, uint64_t lease) {
    Publish(lease, {1}, 4);
    sender_.OnFetch(kPeer, kLink, Ask(transfer_id, lease, 1));
    PumpDry();
    EXPECT_EQ(static_cast<int64_t>(Sent(transfer_id).size()), bytes);
    EXPECT_EQ(Must(leases_.Unpublish(lease)), false);
    sender_.AbortLease(lease, absl::AbortedError("taken back"), /*again=*/true);
  };
  take_back(1, 2);
  sender_.OnDone("accepted:9", {.transfer_id = 1, .lease_id = 2, .bytes = bytes});  // Not its own.
  Publish(2, {6, 7}, 1);
  EXPECT_TRUE(leases_.TakeEnded().empty());
  sender_.OnDone(kPeer, {.transfer_id = 1, .lease_id = 2, .bytes = bytes});
  ASSERT_EQ(leases_.TakeEnded().size(), 1u);

  take_back(3, 4);
  sender_.OnDone(kPeer, {.transfer_id = 3, .lease_id = 4, .bytes = bytes});
  Publish(4, {6, 7}, 1);
  EXPECT_EQ(leases_.TakeEnded().size(), 1u);

  take_back(5, 6);
  sender_.OnDone(kPeer, {.transfer_id = 5, .lease_id = 6, .bytes = bytes - 1});
  Publish(6, {6, 7}, 1);
  EXPECT_TRUE(leases_.TakeEnded().empty());
}

// Before all of it was sent it cannot be done, whatever the receiver says.
TEST_F(SenderAlone, ADoneForWhatWasNotSentDoesNotCount) {
  Publish(2, {1}, 1);
  sender_.OnFetch(kPeer, kLink, Ask(1, 2, 1));
  PumpDry();
  EXPECT_EQ(Must(leases_.Unpublish(2)), false);
  sender_.AbortLease(2, absl::AbortedError("taken back"), /*again=*/true);
  const auto bytes = static_cast<int64_t>(Want({1}).size());
  sender_.OnDone(kPeer, {.transfer_id = 1, .lease_id = 2, .bytes = bytes});
  const auto sent = static_cast<int64_t>(Sent(1).size());
  sender_.OnDone(kPeer, {.transfer_id = 1, .lease_id = 2, .bytes = sent});
  Publish(2, {1}, 1);
  EXPECT_TRUE(leases_.TakeEnded().empty());
}

// As many as a peer may have under way: of an older one nothing is known any more.
TEST_F(SenderAlone, OfThoseThatWereTakenBackTheLastFewAreKnown) {
  constexpr uint64_t kKnown = 1024;
  const auto bytes = static_cast<int64_t>(Want({1}).size());
  for (uint64_t id = 100; id <= 100 + kKnown; ++id) {
    Publish(id, {1}, 4);
    sender_.OnFetch(kPeer, kLink, Ask(id, id, 1));
    PumpDry();
    EXPECT_EQ(Must(leases_.Unpublish(id)), false);
    sender_.AbortLease(id, absl::AbortedError("taken back"), /*again=*/true);
  }
  for (const uint64_t id : {100, 101}) {
    sender_.OnDone(kPeer, {.transfer_id = id, .lease_id = id, .bytes = bytes});
    Publish(id, {1}, 4);
  }
  EXPECT_EQ(leases_.TakeEnded().size(), 1u);
}

TEST_F(SenderAlone, ADoneOfOtherBytesThanThereAreDoesNotEndTheLease) {
  sender_.OnFetch(kPeer, kLink, Ask(1));
  PumpDry();
  const auto bytes = static_cast<int64_t>(Sent(1).size());
  sender_.OnDone(kPeer, {.transfer_id = 1, .lease_id = kLease, .bytes = bytes - 1});
  ASSERT_NE(outbox_.Last<AbortMsg>(), nullptr);
  EXPECT_TRUE(Fails(outbox_.Last<AbortMsg>()->status, absl::StatusCode::kInternal, "reports"));
  EXPECT_EQ(metrics_.transfers_active, 0);
  EXPECT_EQ(leases_.num_live(), 1);
}

TEST_F(SenderAlone, DeadlineOfAReceiverThatCannotSaySo) {
  FetchMsg fetch = Ask(1, kLease, 6, 4096);
  fetch.timeout_ms = 100;
  sender_.OnFetch(kPeer, kLink, fetch);
  PumpDry();
  EXPECT_LE(sender_.Tick(DeadlineInMs(90)), DeadlineInMs(5000));
  EXPECT_EQ(metrics_.transfers_active, 1);
  sender_.Tick(DeadlineInMs(5000));
  EXPECT_EQ(metrics_.transfers_active, 0);
  ASSERT_NE(outbox_.Last<AbortMsg>(), nullptr);
  EXPECT_TRUE(absl::IsDeadlineExceeded(outbox_.Last<AbortMsg>()->status));
}

TEST_F(SenderAlone, TimeoutsAreCapped) {
  FetchMsg fetch = Ask(1);
  fetch.timeout_ms = int64_t{1} << 50;
  sender_.OnFetch(kPeer, kLink, fetch);
  sender_.Tick(DeadlineInMs(config_.max_fetch_timeout_ms - 2000));
  EXPECT_EQ(metrics_.transfers_active, 1);
  sender_.Tick(DeadlineInMs(config_.max_fetch_timeout_ms + 2000));
  EXPECT_EQ(metrics_.transfers_active, 0);
  ASSERT_NE(outbox_.Last<AbortMsg>(), nullptr);
  EXPECT_TRUE(Fails(outbox_.Last<AbortMsg>()->status, absl::StatusCode::kDeadlineExceeded,
                    "max_fetch_timeout_ms (600000)"));
}

TEST_F(SenderAlone, SoIsHowLongAFetchWaitsForItsLease) {
  sender_.Tick(DeadlineInMs(120000));  // There is no lease to look after.
  FetchMsg fetch = Ask(1, 50, 2);
  fetch.wait_ms = int64_t{1} << 50;
  sender_.OnFetch(kPeer, kLink, fetch);
  EXPECT_LE(sender_.Tick(Clock::now()), DeadlineInMs(config_.max_fetch_timeout_ms + 2000));
  EXPECT_EQ(outbox_.Count<RefuseMsg>(), 0);
  // It waits still, and is not to think that there is no such lease.
  sender_.Tick(DeadlineInMs(config_.max_fetch_timeout_ms + 2000));
  ASSERT_NE(outbox_.Last<RefuseMsg>(), nullptr);
  EXPECT_TRUE(Fails(outbox_.Last<RefuseMsg>()->status, absl::StatusCode::kDeadlineExceeded,
                    "lease 32 was not published", "max_fetch_timeout_ms (600000)"));
}

TEST_F(SenderAlone, MessagesOfOtherPeersAboutItChangeNothing) {
  sender_.OnFetch(kPeer, kLink, Ask(1));
  PumpDry();
  sender_.OnCancel("accepted:2", {1, "x"});
  sender_.OnDone("accepted:2", {1, kLease, 6 * SmallLayout().page_bytes()});
  EXPECT_EQ(metrics_.transfers_active, 1);
  EXPECT_EQ(leases_.num_live(), 1);
}

TEST_F(SenderAlone, ParkedFetchIsServedWhenPublished) {
  sender_.OnFetch(kPeer, kLink, Ask(1, 50, 2));
  EXPECT_FALSE(sender_.Pump());
  EXPECT_EQ(outbox_.Count<RefuseMsg>(), 0);
  Publish(50, {7, 8}, 4);
  sender_.OnLeaseChanged(50);
  PumpDry();
  EXPECT_EQ(Sent(1), Want({7, 8}));
}

TEST_F(SenderAlone, AFetchWaitsForItsLeaseAsLongAsItSays) {
  const Deadline now = Clock::now();
  FetchMsg patient = Ask(1, 50, 2);
  patient.wait_ms = 30000;
  sender_.OnFetch(kPeer, kLink, patient);
  EXPECT_NEAR(SecondsBetween(now, sender_.Tick(now)), 30, 5);
  // Who does not say so waits for as long as the sender likes.
  FetchMsg hasty = Ask(2, 51, 2);
  hasty.wait_ms = 0;
  sender_.OnFetch(kPeer, kLink, hasty);
  EXPECT_NEAR(SecondsBetween(now, sender_.Tick(now)), config_.publish_grace_ms / 1e3, 0.5);
  Publish(50, {7, 8}, 4);
  sender_.OnLeaseChanged(50);
  PumpDry();
  EXPECT_EQ(Sent(1), Want({7, 8}));
}

TEST_F(SenderAlone, ParkedFetchCanBeCancelled) {
  sender_.OnFetch(kPeer, kLink, Ask(1, 50, 2));
  sender_.OnCancel(kPeer, {1, "x"});
  Publish(50, {7, 8}, 4);
  sender_.OnLeaseChanged(50);
  PumpDry();
  EXPECT_TRUE(Sent(1).empty());
  EXPECT_TRUE(IsOk(leases_.BeginTransfer(50, {})));
}

// Of the fetches that a peer may have at once.
TEST_F(SenderAlone, WhatIsRefusedTakesNoPlace) {
  Publish(2, {1, 2, 3}, 4);
  sender_.OnFetch(kPeer, kLink, Ask(1));
  for (uint64_t id = 100; id < 120; ++id) {
    sender_.OnFetch(kPeer, kLink, Ask(id));            // The lease is being fetched.
    sender_.OnFetch(kPeer, kLink, Ask(1000 + id, 2));  // It has no such pages.
  }
  sender_.OnFetch(kPeer, kLink, Ask(2, 2, 3));
  EXPECT_EQ(metrics_.transfers_active, 2);
}

TEST_F(SenderAlone, NorDoesAFetchThatWaitedAndWasCancelled) {
  for (uint64_t id = 100; id < 120; ++id) {
    sender_.OnFetch(kPeer, kLink, Ask(id, id));
    sender_.OnCancel(kPeer, {id, "x"});
  }
  sender_.OnFetch(kPeer, kLink, Ask(1));
  EXPECT_EQ(metrics_.transfers_active, 1);
}

// Who comes again by the same name has all of its places.
TEST_F(SenderAlone, WhoIsGoneWaitsForNothing) {
  for (uint64_t id = 100; id < 108; ++id) sender_.OnFetch(kPeer, kLink, Ask(id, id, 1));
  sender_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  Publish(100, {1}, 4);
  sender_.OnLeaseChanged(100);
  EXPECT_EQ(metrics_.transfers_active, 0);
  sender_.OnFetch(kPeer, kLink, Ask(1));
  EXPECT_EQ(metrics_.transfers_active, 1);
}

TEST_F(SenderAlone, NobodyElseCancelsAFetchThatWaits) {
  sender_.OnFetch(kPeer, kLink, Ask(1, 50, 2));
  sender_.OnCancel("accepted:2", {1, "x"});
  Publish(50, {7, 8}, 4);
  sender_.OnLeaseChanged(50);
  PumpDry();
  EXPECT_EQ(Sent(1), Want({7, 8}));
}

TEST_F(SenderAlone, TheIdOfAFetchThatWaitsIsInUse) {
  sender_.OnFetch(kPeer, kLink, Ask(1, 50, 2));
  sender_.OnFetch("accepted:2", kLink, Ask(1, 51, 2));
  ASSERT_NE(outbox_.Last<RefuseMsg>(), nullptr);
  EXPECT_TRUE(Fails(outbox_.Last<RefuseMsg>()->status, absl::StatusCode::kAlreadyExists, "in use"));
  Publish(50, {7, 8}, 4);
  sender_.OnLeaseChanged(50);
  PumpDry();
  EXPECT_EQ(Sent(1), Want({7, 8}));
}

// Random peers, fetches, credits, cancels and completions: limits hold, nothing leaks.
TEST_F(SenderAlone, RandomRun) {
  std::mt19937_64 random(4);
  wire().complete_at_once = false;
  uint64_t next_id = 1000;
  std::vector<std::pair<PeerKey, uint64_t>> known;
  for (int step = 0; step < 20000; ++step) {
    const PeerKey peer = "accepted:" + std::to_string(random() % 5);
    switch (random() % 8) {
      case 0: {
        const uint64_t lease = next_id++;
        if (random() % 4 != 0) {
          if (!leases_
                   .Publish(lease, Must(PageRuns::FromPages(std::vector<int64_t>{1, 2})), 4,
                            DeadlineInMs(600000))
                   .ok())
            break;
        }
        const uint64_t id = next_id++;
        sender_.OnFetch(peer, kLink, Ask(id, lease, 2, static_cast<int64_t>(1 + random() % 20000)));
        known.emplace_back(peer, id);
        break;
      }
      case 1:
        if (!known.empty())
          sender_.OnCredit({known[random() % known.size()].second, random() % 40000});
        break;
      case 2:
        if (!known.empty()) {
          const auto& [owner, id] = known[random() % known.size()];
          sender_.OnCancel(owner, {id, "x"});
        }
        break;
      case 3:
        if (random() % 20 == 0) sender_.OnPeerGone(peer, absl::UnavailableError("x"));
        break;
      case 4:
        for (SentChunk& chunk : wire().chunks) {
          if (!chunk.done || random() % 2 == 0) continue;
          std::exchange(chunk.done, nullptr)(random() % 30 == 0 ? absl::UnavailableError("x")
                                                                : absl::OkStatus());
        }
        std::erase_if(wire().chunks, [](const SentChunk& chunk) { return !chunk.done; });
        break;
      case 5:
        sender_.Tick(Clock::now());
        leases_.TakeEnded();
        break;
      default:
        sender_.Pump();
    }
    ASSERT_LE(arena_->num_taken(), arena_->num_chunks());
    ASSERT_EQ(arena_->num_taken(), static_cast<int64_t>(wire().chunks.size()));
  }
  for (int i = 0; i < 5; ++i)
    sender_.OnPeerGone("accepted:" + std::to_string(i), absl::UnavailableError("x"));
  for (SentChunk& chunk : wire().chunks) std::exchange(chunk.done, nullptr)(absl::OkStatus());
  EXPECT_EQ(arena_->num_taken(), 0);
  sender_.Tick(Clock::now());
  EXPECT_EQ(metrics_.transfers_active, 0);
  EXPECT_EQ(metrics_.transfers_started, metrics_.transfers_ok + metrics_.transfers_failed);
}

TEST(SenderOfADecodeEndpoint, RefusesEverything) {
  const Config config;
  const auto arena = Must(Arena::Create(1 << 20, 256 << 10));
  FakeOutbox outbox;
  Metrics metrics;
  Sender sender(config, MakePatternPool(SmallLayout(), 2, 1), nullptr, arena.get(), &outbox,
                &metrics);
  FetchMsg fetch;
  fetch.transfer_id = fetch.lease_id = 1;
  sender.OnFetch("p", 1, fetch);
  ASSERT_NE(outbox.Last<RefuseMsg>(), nullptr);
  EXPECT_TRUE(Fails(outbox.Last<RefuseMsg>()->status, absl::StatusCode::kFailedPrecondition,
                    "publishes nothing"));
  sender.OnDone("p", {1, 1, 0});
  EXPECT_EQ(sender.Tick(Clock::now()), Deadline::max());
}

// ---------------------------------------------------------------- gathered by another thread

TEST_F(SenderAlone, LanesGatherWhatWasTheirsInAnyOrder) {
  wire().fill_at_once = false;
  sender_.OnFetch(kPeer, kLink, Ask(1));
  std::vector<SentChunk> sent;
  while (sender_.Pump()) {
    PumpDry();
    EXPECT_TRUE(wire().chunks.empty());
    std::reverse(wire().later.begin(), wire().later.end());
    wire().FillLater();
    for (SentChunk& chunk : wire().chunks) sent.push_back(std::move(chunk));
    wire().chunks.clear();
  }
  std::sort(sent.begin(), sent.end(), [](const SentChunk& a, const SentChunk& b) {
    return a.header.offset < b.header.offset;
  });
  wire().chunks = std::move(sent);
  EXPECT_EQ(Sent(1), Want({3, 4, 5, 9, 0, 15}));
  EXPECT_EQ(arena_->num_taken(), 0);
}

// The pages are their owner's again when the abort returns: a lane that comes to its chunk later
// finds that out.
TEST_F(SenderAlone, NoLaneGathersForATransferThatHasEnded) {
  wire().fill_at_once = false;
  sender_.OnFetch(kPeer, kLink, Ask(1));
  PumpDry();
  ASSERT_FALSE(wire().later.empty());
  sender_.AbortLease(kLease, absl::AbortedError("taken back"));
  wire().FillLater();
  EXPECT_TRUE(wire().chunks.empty());
  EXPECT_EQ(arena_->num_taken(), 0);
  EXPECT_FALSE(sender_.Pump());
}

}  // namespace
}  // namespace kvferry
