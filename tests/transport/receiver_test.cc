// The receiver against a hostile or broken network: chunks that are dropped, doubled, reordered,
// cut, forged or late. Whatever comes, only pages of a live fetch are written, and success means
// all bytes.

#include "transport/receiver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/hash.h"
#include "base/thread_pool.h"
#include "tests/support/endpoints.h"
#include "tests/support/failing_new.h"
#include "tests/support/wait_for.h"
#include "tests/transport/receiver_alone.h"
#include "transport/command_queue.h"

namespace kvferry {
namespace {

TEST_F(ReceiverAlone, AsksForTheStream) {
  Begin();
  const FetchMsg* fetch = outbox_.Last<FetchMsg>();
  ASSERT_NE(fetch, nullptr);
  EXPECT_EQ(fetch->transfer_id, kId);
  EXPECT_EQ(fetch->lease_id, 9u);
  EXPECT_EQ(fetch->positions.num_pages(), 6);
  EXPECT_EQ(fetch->chunk_bytes, config_.chunk_bytes);
  EXPECT_EQ(fetch->window_bytes, 4 * config_.chunk_bytes);
  EXPECT_GT(fetch->timeout_ms, 0);
  EXPECT_LE(fetch->timeout_ms, 60000);
}

// What a thread reads in place at a time, for each that copies; but a checksum is the sender's
// work.
TEST_F(ReceiverAlone, AsksForChunksThatKeepItsThreadsBusy) {
  const auto asked = [&](int64_t copy_threads, bool checksum) {
    config_.copy_threads = copy_threads;
    config_.checksum = checksum;
    Begin();
    receiver_.CancelAll(absl::CancelledError("enough"));
    return outbox_.Last<FetchMsg>()->in_place_bytes;
  };
  EXPECT_EQ(asked(1, false), 8 << 20);
  EXPECT_EQ(asked(4, false), 32 << 20);
  EXPECT_EQ(asked(64, false), 64 << 20);
  EXPECT_EQ(asked(4, true), 8 << 20);
}

// The others are asked for when the peer has taken some of what it was sent.
TEST_F(ReceiverAlone, AsksForNoMoreThanThereIsRoomFor) {
  outbox_.room = 2;
  for (uint64_t id = kId; id < kId + 5; ++id) Begin(id);
  EXPECT_EQ(outbox_.Count<FetchMsg>(), 2);
  receiver_.CancelAll(absl::CancelledError("enough"));
  EXPECT_EQ(outbox_.Count<CancelMsg>(), 2);
  const auto handle = Begin(kId);
  EXPECT_FALSE(handle->done());
  outbox_.room = 100;
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{3});
  EXPECT_EQ(outbox_.Count<FetchMsg>(), 3);
}

TEST_F(ReceiverAlone, WhatIsAskedForAnewWaitsForRoomToo) {
  outbox_.data().costs_of_reads = {700, 60000};
  for (uint64_t id = kId; id < kId + 5; ++id) Begin(id);
  ASSERT_EQ(outbox_.Count<FetchMsg>(), 5);
  outbox_.room = static_cast<int>(outbox_.sent.size());  // Nothing more has room.
  for (uint64_t id = kId; id < kId + 5; ++id) {
    HasNoRoomToRead(id);
  }
  EXPECT_EQ(outbox_.Count<FetchMsg>(), 5);
}

// Its peer still has it under the id that it had, until it is asked for anew.
TEST_F(ReceiverAlone, WhatWaitsToBeAskedForAnewIsCancelledAsItWas) {
  outbox_.data().costs_of_reads = {700, 60000};
  const auto handle = Begin();
  outbox_.room = 0;
  HasNoRoomToRead();
  EXPECT_FALSE(handle->done());
  receiver_.Cancel(kId, absl::CancelledError("enough"));
  ASSERT_EQ(outbox_.Count<CancelMsg>(), 1);
  EXPECT_EQ(outbox_.Last<CancelMsg>()->transfer_id, kId);
}

// Of another session its peer has not heard of it; said while that is greeting, a word would end
// it.
TEST_F(ReceiverAlone, WhatWaitsForAnotherSessionIsCancelledInSilence) {
  outbox_.data().costs_of_reads = {700, 60000};
  for (const bool asked_anew_before : {false, true}) {
    SCOPED_TRACE(asked_anew_before);
    outbox_.room = 1 << 30;
    const auto handle = Begin();
    outbox_.room = 0;
    if (asked_anew_before) {
      HasNoRoomToRead();
    }
    Receiver::Fetch taken = TakeOnly();
    taken.peer = "dialled:2";
    receiver_.Add(std::move(taken));
    receiver_.Cancel(kId, absl::CancelledError("enough"));
    EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kCancelled));
    EXPECT_EQ(outbox_.Count<CancelMsg>(), 0);
  }
}

TEST_F(ReceiverAlone, AsksInTheOrderInWhichFetchesBegan) {
  outbox_.room = 0;
  for (uint64_t id = kId; id < kId + 50; ++id) Begin(id);
  outbox_.room = 50;
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{3});
  std::vector<uint64_t> order;
  for (const auto& [peer, body] : outbox_.sent) {
    if (const auto* f = std::get_if<FetchMsg>(&body)) order.push_back(f->transfer_id - kId);
  }
  EXPECT_EQ(order.size(), 50);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end())) << testing::PrintToString(order);
}

// Looked at one by one, or listed, they would cost each other the more the more there are.
TEST_F(ReceiverAlone, WhatWaitsForRoomIsLeftAloneByWhatComes) {
  constexpr uint64_t kWaiting = 20000;
  constexpr uint64_t kMore = 2000;
  outbox_.room = 0;
  for (uint64_t id = kId; id < kId + kWaiting; ++id) Add(id);
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{3});
  outbox_.asked_for_room = 0;
  for (uint64_t id = kId + kWaiting; id < kId + kWaiting + kMore; ++id) {
    Add(id);
    const FailingNew no_lists(0);
    receiver_.OnPeerReady(kPeer, kEpoch, LinkId{3});
  }
  EXPECT_EQ(outbox_.asked_for_room, kMore);
  outbox_.room = 3;
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{3});
  EXPECT_EQ(outbox_.Last<FetchMsg>()->transfer_id, kId + 2);
}

// It keeps the turn that it has had.
TEST_F(ReceiverAlone, WhatIsAskedForAnewHasItsTurn) {
  outbox_.data().costs_of_reads = {700, 60000};
  Begin(kId);
  outbox_.room = 0;
  Begin(kId + 1);
  HasNoRoomToRead();
  outbox_.room = 2;
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{3});
  EXPECT_EQ(outbox_.Last<FetchMsg>()->replaces, kId);
  outbox_.room = 3;
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{3});
  EXPECT_EQ(outbox_.Last<FetchMsg>()->transfer_id, kId + 1);
}

TEST_F(ReceiverAlone, SaysThatThereWasNoRoomInTime) {
  outbox_.data().costs_of_reads = {700, 60000};
  const auto asked = Begin(kId, DeadlineInMs(1));
  outbox_.room = 0;
  HasNoRoomToRead();
  const auto waits = Begin(kId + 1, DeadlineInMs(1));
  const auto unanswered = Begin(kId + 2, DeadlineInMs(1), "dialled:2");
  receiver_.Tick(DeadlineInMs(10));
  const auto code = absl::StatusCode::kDeadlineExceeded;
  EXPECT_TRUE(Fails(asked->status(), code, "took so little that it was not asked again"));
  EXPECT_TRUE(Fails(waits->status(), code, "took so little that it was never asked"));
  EXPECT_TRUE(Fails(unanswered->status(), code, "the peer never answered"));
}

// Of a fetch that was never requested the sender knows no id.
TEST_F(ReceiverAlone, WhatWaitedForRoomReplacesNothing) {
  outbox_.room = 0;
  Begin();
  Receiver::Fetch taken = TakeOnly();
  EXPECT_EQ(taken.replaces, 0u);
  taken.peer = kPeer;
  outbox_.room = 1;
  receiver_.Add(std::move(taken));
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{4});
  EXPECT_EQ(outbox_.Count<FetchMsg>(), 1);
  EXPECT_EQ(metrics_.fetches_started, 1);
  EXPECT_EQ(metrics_.fetches_restarted, 1);
}

TEST_F(ReceiverAlone, AnyOrderAndAnyChunkSizes) {
  std::mt19937_64 random(1);
  for (const int64_t chunk_bytes : {1000, 4096, 777, 49152}) {
    FillPattern(*target_, kOwnSeed);
    const auto handle = Begin();
    std::vector<Chunk> chunks = Stream(chunk_bytes);
    std::shuffle(chunks.begin(), chunks.end(), random);
    for (size_t i = 0; i < chunks.size(); ++i) {
      EXPECT_FALSE(handle->done()) << "success before all bytes";
      Deliver(chunks[i]);
    }
    ASSERT_TRUE(handle->done());
    EXPECT_TRUE(IsOk(handle->status()));
    EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, remote_));
    const DoneMsg* done = outbox_.Last<DoneMsg>();
    ASSERT_NE(done, nullptr);
    EXPECT_EQ(done->bytes, 6 * SmallLayout().page_bytes());
  }
}

TEST_F(ReceiverAlone, LayersAreDoneInOrderOnly) {
  const auto handle = Begin();
  const int64_t layer_bytes = 6 * SmallLayout().layer_page_bytes();
  std::vector<Chunk> layers = Stream(layer_bytes);
  ASSERT_EQ(layers.size(), 4u);
  Deliver(layers[2]);
  EXPECT_EQ(handle->layers_done(), 0);
  Deliver(layers[0]);
  EXPECT_EQ(handle->layers_done(), 1);
  Deliver(layers[1]);
  EXPECT_EQ(handle->layers_done(), 3);
}

TEST_F(ReceiverAlone, ADroppedChunkIsMissedAtTheDeadlineAndItsPagesAreNamed) {
  const auto handle = Begin(kId, DeadlineInMs(1));
  const int64_t item = SmallLayout().item_bytes(0);
  std::vector<Chunk> chunks = Stream(item);  // One page of one tensor each.
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (i != 2 && i != 10) Deliver(chunks[i]);  // Position 2 of K, position 4 of V of layer 0.
  }
  receiver_.Tick(DeadlineInMs(10));
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(handle->missing_pages(), (std::vector<int64_t>{local_[2], local_[4]}));
  EXPECT_EQ(handle->report().bytes_done, handle->report().total_bytes - 2 * item);
  ASSERT_NE(outbox_.Last<CancelMsg>(), nullptr);
}

TEST_F(ReceiverAlone, DoubledChunk) {
  const auto handle = Begin();
  const std::vector<Chunk> chunks = Stream(4096);
  Deliver(chunks[0]);
  Deliver(chunks[1]);
  Deliver(chunks[1]);
  ExpectDataLoss(*handle, "overlaps");
}

TEST_F(ReceiverAlone, OverlappingChunkIsNotWritten) {
  const auto handle = Begin();
  Deliver(Stream(4096)[0]);
  Chunk forged = Stream(4096)[1];
  forged.header.offset = 4095;
  std::fill(forged.payload.begin(), forged.payload.end(), std::byte{0xee});
  const std::vector<std::byte> before(target_->page(0, 0, 2).begin(), target_->page(0, 0, 2).end());
  Deliver(forged);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), target_->page(0, 0, 2).begin()));
  ExpectDataLoss(*handle, "overlaps");
}

TEST_F(ReceiverAlone, ChunkOutsideTheStream) {
  const uint64_t total = 6 * SmallLayout().page_bytes();
  for (const auto& [offset, bytes] :
       std::vector<std::pair<uint64_t, uint32_t>>{{total, 1},
                                                  {total - 1, 2},
                                                  {UINT64_MAX, 1},
                                                  {UINT64_MAX - 10, 100},
                                                  {uint64_t{1} << 63, 4096},
                                                  {0, 0},
                                                  {total + 1, 0}}) {
    SCOPED_TRACE(offset);
    FillPattern(*target_, kOwnSeed);
    outbox_.sent.clear();
    const auto handle = Begin();
    Chunk forged;
    forged.header.transfer_id = kId;
    forged.header.offset = offset;
    forged.header.bytes = bytes;
    forged.payload.assign(bytes, std::byte{0xee});
    Deliver(forged);
    EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
    ExpectDataLoss(*handle, "a stream of");
  }
}

// More than was asked for would be the progress thread's for as long as that takes.
TEST_F(ReceiverAlone, ChunksThatALandingRefuses) {
  std::vector<std::byte> tail(100, std::byte{0x5a});
  const auto plan = std::make_shared<const StreamPlan>(Must(StreamPlan::Create(
      target_, Must(PageRuns::FromPages(local_)), StreamTail{tail.data(), 100})));
  Landing landing(plan, HandleOf(*plan), 0, /*max_chunk_bytes=*/1000, /*checksum=*/false,
                  &metrics_);
  const auto threads = Must(ThreadPool::Create(0));
  PieceCopy copy(threads.get());
  const auto accept = [&](int64_t offset, uint32_t bytes, uint16_t flags) {
    const std::vector<std::byte> payload(bytes);
    const std::span<const std::byte> piece = payload;
    const ChunkHeader header{kId, static_cast<uint64_t>(offset), 0, bytes, flags};
    return landing.Accept(
        header, Pieces(&piece, 1), [] { return true; }, &copy);
  };
  EXPECT_TRUE(Fails(accept(0, 1001, 0), absl::StatusCode::kDataLoss, "1001 bytes, where 1000"));
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  // A tail is in nobody's pool.
  const int64_t end = plan->pages_bytes();
  EXPECT_TRUE(Fails(accept(end - 10, 11, kChunkInPool), absl::StatusCode::kDataLoss, "in a pool"));
  EXPECT_TRUE(Fails(accept(end, 100, kChunkInPool), absl::StatusCode::kDataLoss, "in a pool"));
  EXPECT_EQ(tail, std::vector<std::byte>(100, std::byte{0x5a}));
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  EXPECT_TRUE(IsOk(accept(end - 10, 10, kChunkInPool)));
  EXPECT_TRUE(IsOk(accept(end, 100, 0)));
  EXPECT_EQ(tail, std::vector<std::byte>(100));
}

// A lane may have found it before its fetch ended.
TEST_F(ReceiverAlone, AClosedLandingTakesNothing) {
  const auto plan = std::make_shared<const StreamPlan>(Plan(target_, local_));
  Landing landing(plan, HandleOf(*plan), 0, 4096, /*checksum=*/false, &metrics_);
  const std::vector<Chunk> chunks = Stream(4096);
  EXPECT_TRUE(IsOk(landing.Begin(chunks[0].header)));
  landing.Close();
  const auto ended = [](const absl::Status& status) {
    return Fails(status, absl::StatusCode::kCancelled, "has ended");
  };
  EXPECT_FALSE(landing.Write([&] { FillPattern(*target_, 9); }));
  EXPECT_TRUE(ended(landing.End(chunks[0].header, 0)));
  EXPECT_TRUE(ended(landing.Begin(chunks[1].header)));
  PieceCopy copy(threads_.get());
  const std::span<const std::byte> payload = chunks[2].payload;
  EXPECT_TRUE(ended(landing.Accept(
      chunks[2].header, Pieces(&payload, 1), [] { return true; }, &copy)));
  EXPECT_EQ(landing.num_bytes(), 0);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
}

TEST_F(ReceiverAlone, WrongChecksumIsNotWritten) {
  const auto handle = Begin();
  Chunk chunk = Stream(4096)[0];
  chunk.header.flags = kChunkHasChecksum;
  chunk.header.checksum = Xxh3(chunk.payload);
  chunk.payload[100] ^= std::byte{1};
  Deliver(chunk);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  EXPECT_EQ(metrics_.checksum_failures, 1);
  ExpectDataLoss(*handle, "checksum");
}

TEST_F(ReceiverAlone, MissingChecksumThatWasAskedFor) {
  config_.checksum = true;
  const auto handle = Begin();
  EXPECT_TRUE(outbox_.Last<FetchMsg>()->checksum);
  Deliver(Stream(4096)[0]);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  ExpectDataLoss(*handle, "without the checksum");
}

// It was read where the sender keeps it, and the sender has used that memory again meanwhile.
// That sender may have thought us dead.
TEST_F(ReceiverAlone, AChunkThatDidNotStayIntactIsAskedForAgain) {
  const auto handle = Begin();
  const std::vector<Chunk> chunks = Stream(1000);
  Deliver(chunks[0]);
  Deliver(chunks[1], /*intact=*/false);
  const FetchMsg* again = outbox_.Last<FetchMsg>();
  EXPECT_NE(again->transfer_id, kId);
  EXPECT_EQ(again->replaces, kId);
  EXPECT_EQ(again->from_bytes, 1000);
  EXPECT_FALSE(handle->done());
  const uint64_t new_id = again->transfer_id;
  for (const Chunk& chunk : Stream(1000, new_id)) {
    if (chunk.header.offset >= 1000) Deliver(chunk);
  }
  EXPECT_TRUE(IsOk(handle->status()));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, remote_));
  EXPECT_EQ(metrics_.fetches_restarted, 1);
}

// Its sum was computed of what was another chunk's already: nobody's bytes were damaged.
TEST_F(ReceiverAlone, AWrongChecksumOfWhatDidNotStayIntactIsNone) {
  Begin();
  Chunk chunk = Stream(1000)[0];
  chunk.header.flags = kChunkHasChecksum;
  chunk.header.checksum = Xxh3(chunk.payload);
  chunk.payload[100] ^= std::byte{1};
  Deliver(chunk, /*intact=*/false);
  EXPECT_EQ(metrics_.checksum_failures, 0);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  const FetchMsg* again = outbox_.Last<FetchMsg>();
  EXPECT_EQ(again->replaces, kId);
  EXPECT_EQ(again->from_bytes, 0);
}

// It waits for the lease to be published, and the sender has taken that back to publish it again.
TEST_F(ReceiverAlone, AFetchThatWaitsGoesOnWhenItsLeaseIsTakenBack) {
  const auto handle = Begin(kId, DeadlineInMs(60000), kPeer, /*redial=*/true, /*early=*/true);
  const std::vector<Chunk> chunks = Stream(1000);
  Deliver(chunks[0]);
  receiver_.OnAbort(kPeer, {kId, absl::AbortedError("preempted"), /*again=*/true});
  EXPECT_FALSE(handle->done());
  const FetchMsg* again = outbox_.Last<FetchMsg>();
  EXPECT_EQ(again->replaces, kId);
  EXPECT_EQ(again->from_bytes, 1000);
  EXPECT_GT(again->wait_ms, 0);
  Deliver(chunks[1]);  // Was on its way still: of the pages that are another request's by now.
  EXPECT_EQ(handle->report().bytes_done, 0);
  for (const Chunk& chunk : Stream(1000, again->transfer_id)) {
    if (chunk.header.offset >= 1000) Deliver(chunk);
  }
  EXPECT_TRUE(IsOk(handle->status()));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, remote_));
}

// An honest sender has it wait until there is something to send.
TEST_F(ReceiverAlone, AFetchThatIsTakenBackAgainAndAgainFails) {
  const auto handle = Begin(kId, DeadlineInMs(60000), kPeer, /*redial=*/true, /*early=*/true);
  int times = 0;
  while (!handle->done() && times < 1000) {
    const uint64_t id = outbox_.Last<FetchMsg>()->transfer_id;
    if (++times == 50) Deliver(Stream(1000, id)[0]);  // That counts.
    receiver_.OnAbort(kPeer, {id, absl::AbortedError("taken back"), /*again=*/true});
  }
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kAborted, "taken back"));
  EXPECT_EQ(times, 50 + 101);
}

TEST_F(ReceiverAlone, AFetchThatDoesNotWaitFailsWhenItsLeaseIsTakenBack) {
  const auto handle = Begin();
  receiver_.OnAbort(kPeer, {kId, absl::AbortedError("preempted"), /*again=*/true});
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kAborted, "preempted"));
}

// A push has nobody to ask.
TEST_F(ReceiverAlone, AChunkThatDidNotStayIntactEndsAPush) {
  const auto handle = Begin(kId, DeadlineInMs(60000), kPeer, /*redial=*/false);
  Deliver(Stream(49152)[0], /*intact=*/false);
  ExpectGivenUp(*handle, absl::StatusCode::kUnavailable, "took the chunk at byte 0 back");
  EXPECT_EQ(handle->missing_pages(), local_);
  EXPECT_EQ(handle->layers_done(), 0);
}

// What its words say lies there may not even be what they meant: nothing of it is looked at.
TEST_F(ReceiverAlone, AChunkThatWasTakenBackIsNotLookedAt) {
  const auto handle = Begin(kId, DeadlineInMs(60000), kPeer, /*redial=*/false);
  const Chunk chunk = Stream(49152)[0];
  receiver_.OnChunk(chunk.header, {}, [] { return false; });
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  ExpectGivenUp(*handle, absl::StatusCode::kUnavailable, "took the chunk at byte 0 back");
}

TEST_F(ReceiverAlone, ChunksOfUnknownTransfersAreDropped) {
  const auto handle = Begin();
  for (const Chunk& chunk : Stream(4096, kId + 1)) Deliver(chunk);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  EXPECT_FALSE(handle->done());
  EXPECT_EQ(metrics_.chunks_dropped, metrics_.chunks_received);
}

TEST_F(ReceiverAlone, ChunksBeforeTheRequestAreDropped) {
  StreamPlan plan = Plan(target_, local_);
  auto handle = HandleOf(plan);
  const PageRun all{0, 6};
  receiver_.Add({kId, handle, Ticket{"tcp://127.0.0.1:4000", kEpoch, 9, 6, 0},
                 Must(PageRuns::FromRuns({&all, 1})),
                 std::make_shared<const StreamPlan>(std::move(plan)), DeadlineInMs(60000),
                 Clock::now(), kPeer});
  for (const Chunk& chunk : Stream(4096)) Deliver(chunk);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  EXPECT_FALSE(handle->done());
}

class ReceiverEnds : public ReceiverAlone {
 protected:
  // All that ends a fetch before it is whole.
  const std::vector<std::pair<std::string, std::function<void()>>> ends_ = {
      {"cancel", [&] { receiver_.Cancel(kId, absl::CancelledError("x")); }},
      {"deadline", [&] { receiver_.Tick(DeadlineInMs(120000)); }},
      {"refuse",
       [&] {
         receiver_.OnRefuse(kPeer, {kId, absl::NotFoundError("x")});
       }},
      {"abort",
       [&] {
         receiver_.OnAbort(kPeer, {kId, absl::AbortedError("x")});
       }},
      {"peer gone", [&] { receiver_.OnPeerGone(kPeer, absl::UnavailableError("x")); }},
      {"close", [&] { receiver_.CancelAll(absl::CancelledError("x")); }},
  };
};

// However a fetch ends, nothing is written afterwards.
TEST_F(ReceiverEnds, NothingIsWrittenAfterAnyEnd) {
  for (const auto& [name, end] : ends_) {
    SCOPED_TRACE(name);
    const auto handle = Begin();
    const std::vector<Chunk> chunks = Stream(4096);
    Deliver(chunks[0]);
    EXPECT_FALSE(handle->done());
    end();
    EXPECT_TRUE(handle->done());
    EXPECT_FALSE(handle->status().ok());
    FillPattern(*target_, kOwnSeed);
    for (const Chunk& chunk : chunks) Deliver(chunk);
    EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
    EXPECT_EQ(outbox_.Last<DoneMsg>(), nullptr);
  }
  EXPECT_EQ(metrics_.fetches_active, 0);
}

// Chunks of several lanes, each on its thread, in any order.
TEST_F(ReceiverAlone, LanesLandAtOnce) {
  const auto handle = Begin();
  const std::vector<Chunk> chunks = Stream(1000);
  const auto threads = Must(ThreadPool::Create(0));
  std::vector<std::thread> lanes;
  for (size_t lane = 0; lane < 3; ++lane) {
    lanes.emplace_back([&, lane] {
      PieceCopy copy(threads.get());
      for (size_t i = chunks.size(); i-- > 0;) {
        if (i % 3 != lane) continue;
        const std::span<const std::byte> payload = chunks[i].payload;
        EXPECT_TRUE(IsOk(receiver_.Land(
            chunks[i].header, Pieces(&payload, 1), [] { return true; }, &copy)));
      }
    });
  }
  for (std::thread& lane : lanes) lane.join();
  EXPECT_FALSE(handle->done());
  EXPECT_EQ(handle->layers_done(), 4);
  receiver_.OnLanded(chunks[0].header, absl::OkStatus());
  EXPECT_TRUE(IsOk(handle->status()));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, remote_));
  const int64_t bytes = Plan(target_, local_).total_bytes();
  EXPECT_EQ(metrics_.bytes_received, bytes);
  // The word of the others comes when all is over.
  for (const Chunk& chunk : chunks) receiver_.OnLanded(chunk.header, absl::OkStatus());
  EXPECT_EQ(metrics_.bytes_received, bytes);
  EXPECT_EQ(outbox_.Count<DoneMsg>(), 1);
}

// The pages are the caller's again when the handle is done: not while a lane still copies.
TEST_F(ReceiverAlone, AFetchDoesNotEndWhileALaneIsInside) {
  const auto handle = Begin();
  const Chunk chunk = Stream(49152)[0];
  const auto threads = Must(ThreadPool::Create(0));
  Latch inside;
  Latch go_on;
  std::thread lane([&] {
    PieceCopy copy(threads.get());
    const std::span<const std::byte> payload = chunk.payload;
    const auto intact = [&] {
      inside.Open();
      return go_on.Wait(Soon());
    };
    EXPECT_TRUE(IsOk(receiver_.Land(chunk.header, Pieces(&payload, 1), intact, &copy)));
  });
  ASSERT_TRUE(inside.Wait(Soon()));
  std::thread progress([&] { receiver_.Cancel(kId, absl::CancelledError("x")); });
  // Whatever comes now is of no fetch any more; and yet it is not done.
  PieceCopy copy(threads.get());
  const auto taken = [] { return false; };
  ASSERT_TRUE(WaitFor(
      [&] { return absl::IsNotFound(receiver_.Land(chunk.header, {}, taken, &copy)); }, Soon()));
  EXPECT_TRUE(Fails(handle->Wait(DeadlineInMs(20)), absl::StatusCode::kDeadlineExceeded));
  go_on.Open();
  lane.join();
  progress.join();
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kCancelled, "x"));
}

TEST_F(ReceiverAlone, OnlyItsOwnPeerCanEndAFetch) {
  const auto handle = Begin();
  receiver_.OnRefuse("dialled:2", {kId, absl::NotFoundError("x")});
  receiver_.OnAbort("dialled:2", {kId, absl::NotFoundError("x")});
  receiver_.OnPeerGone("dialled:2", absl::UnavailableError("x"));
  EXPECT_FALSE(handle->done());
}

TEST_F(ReceiverAlone, WhoseSessionHasEndedIsSaidOnce) {
  const std::string address = "tcp://127.0.0.1:4000";
  const std::string named = absl::StrCat("cannot connect to ", address);
  for (const auto& [end, error] :
       {std::pair<std::string, std::string>{
            "it is gone", absl::StrCat("the session with ", address, " ended: it is gone")},
        {named, named}}) {
    const auto handle = Begin();
    receiver_.OnPeerGone(kPeer, absl::UnavailableError(end));
    EXPECT_EQ(handle->status(), absl::UnavailableError(error));
  }
}

TEST_F(ReceiverAlone, CreditsGrowAndNeverExceedWhatWasWritten) {
  Begin();
  uint64_t credited = 0;
  uint64_t delivered = 0;
  for (const Chunk& chunk : Stream(1000)) {
    Deliver(chunk);
    delivered += chunk.header.bytes;
    for (const CreditHeader& credit : std::exchange(outbox_.data().credits, {})) {
      EXPECT_GT(credit.bytes_done, credited);
      EXPECT_LE(credit.bytes_done, delivered);
      credited = credit.bytes_done;
    }
    // A sender with a window of four chunks always has room for a whole chunk.
    EXPECT_LT(delivered - credited, 3u * 4096);
  }
}

// The next chunk may need all of it.
TEST_F(ReceiverAlone, AWindowOfOneChunkIsPaidBackAtOnce) {
  config_.credits_per_transfer = 1;
  Begin();
  Deliver(Stream(1000)[0]);
  ASSERT_EQ(outbox_.data().credits.size(), 1u);
  EXPECT_EQ(outbox_.data().credits[0].bytes_done, 1000u);
}

// It takes no room here, and its sender hears in another way that it has been read.
TEST_F(ReceiverAlone, NoCreditIsPaidForWhatIsReadInPlace) {
  Begin();
  for (Chunk& chunk : Stream(4096)) {
    chunk.header.flags = kChunkInPool;
    Deliver(chunk);
  }
  EXPECT_NE(outbox_.Last<DoneMsg>(), nullptr);
  EXPECT_TRUE(outbox_.data().credits.empty());
}

TEST_F(ReceiverAlone, AnotherEpochEndsTheFetchBeforeItIsAskedFor) {
  StreamPlan plan = Plan(target_, local_);
  auto handle = HandleOf(plan);
  const PageRun all{0, 6};
  receiver_.Add({kId, handle, Ticket{"tcp://127.0.0.1:4000", kEpoch, 9, 6, 0},
                 Must(PageRuns::FromRuns({&all, 1})),
                 std::make_shared<const StreamPlan>(std::move(plan)), DeadlineInMs(60000),
                 Clock::now(), kPeer});
  receiver_.OnPeerReady(kPeer, kEpoch + 1, LinkId{3});
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kNotFound, "restarted"));
  EXPECT_EQ(outbox_.Last<FetchMsg>(), nullptr);
}

// The peer fell silent: the fetch goes on under another id, behind what has come in one piece, and
// chunks of the first attempt are late ones.
TEST_F(ReceiverAlone, AFetchTakenFromASilentPeerGoesOn) {
  const auto handle = Begin();
  const std::vector<Chunk> old_chunks = Stream(1000);
  for (const int chunk : {0, 1, 3}) Deliver(old_chunks[chunk]);
  Receiver::Fetch taken = TakeOnly();
  const uint64_t new_id = taken.transfer_id;
  EXPECT_NE(new_id, kId);
  FillPattern(*target_, kOwnSeed);
  for (const Chunk& chunk : old_chunks) Deliver(chunk);
  taken.peer = "dialled:2";
  receiver_.Add(std::move(taken));
  receiver_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  receiver_.OnPeerReady("dialled:2", kEpoch, LinkId{4});
  for (const Chunk& chunk : old_chunks) Deliver(chunk);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  for (const int chunk : {0, 1}) {
    ASSERT_TRUE(IsOk(Plan(target_, local_).Scatter(1000 * chunk, old_chunks[chunk].payload)));
  }
  EXPECT_EQ(outbox_.Last<FetchMsg>()->transfer_id, new_id);
  EXPECT_EQ(outbox_.Last<FetchMsg>()->replaces, kId);
  EXPECT_EQ(outbox_.Last<FetchMsg>()->from_bytes, 2000);
  EXPECT_FALSE(handle->done());
  outbox_.data().credits.clear();
  for (const Chunk& chunk : Stream(1000, new_id)) {
    if (chunk.header.offset >= 2000) Deliver(chunk);
  }
  ASSERT_FALSE(outbox_.data().credits.empty());
  EXPECT_GT(outbox_.data().credits[0].bytes_done, 2000u);
  EXPECT_TRUE(IsOk(handle->status()));
  EXPECT_EQ(handle->report().bytes_done, handle->report().total_bytes);
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, remote_));
  EXPECT_EQ(outbox_.Last<DoneMsg>()->transfer_id, new_id);
  EXPECT_EQ(outbox_.Last<DoneMsg>()->bytes, handle->report().total_bytes);
  EXPECT_EQ(metrics_.fetches_started, 1);
  EXPECT_EQ(metrics_.fetches_restarted, 1);
}

// What had come beyond a gap, and was paid for, comes again: its sender begins with a whole window
// behind the gap, and has none left if nothing is paid before all of that is here again.
TEST_F(ReceiverAlone, WhatComesAgainIsPaidForAgain) {
  Begin();
  const std::vector<Chunk> chunks = Stream(4096);
  for (size_t i = 1; i < 9; ++i) Deliver(chunks[i]);
  ASSERT_FALSE(outbox_.data().credits.empty());
  Receiver::Fetch taken = TakeOnly();
  EXPECT_EQ(taken.from_bytes, 0);
  const uint64_t new_id = taken.transfer_id;
  taken.peer = kPeer;
  receiver_.Add(std::move(taken));
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{4});
  outbox_.data().credits.clear();
  const std::vector<Chunk> again = Stream(4096, new_id);
  for (size_t i = 0; i < 4; ++i) Deliver(again[i]);
  EXPECT_FALSE(outbox_.data().credits.empty());
}

TEST_F(ReceiverAlone, WhatHasComeIsNotMissedWhileTheFetchWaits) {
  const auto handle = Begin();
  const std::vector<Chunk> chunks = Stream(1000);
  for (size_t i = 0; i + 1 < chunks.size(); ++i) Deliver(chunks[i]);
  Receiver::Fetch taken = TakeOnly();
  taken.peer = kPeer;
  receiver_.Add(std::move(taken));
  receiver_.Cancel(kId, absl::CancelledError("x"));
  EXPECT_EQ(handle->missing_pages(), std::vector<int64_t>{local_.back()});
}

// It has nobody to ask for the rest.
TEST_F(ReceiverAlone, APushIsNotTakenFromASilentPeer) {
  const auto handle = Begin(kId, DeadlineInMs(60000), kPeer, /*redial=*/false);
  EXPECT_TRUE(receiver_.TakeUnfinished(kPeer).empty());
  EXPECT_FALSE(handle->done());
}

TEST_F(ReceiverAlone, APeerThatIsGoneIsReadyNoMore) {
  Begin();
  receiver_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  const auto handle = Add(kId + 1, DeadlineInMs(1));
  receiver_.Tick(DeadlineInMs(10));
  EXPECT_TRUE(
      Fails(handle->status(), absl::StatusCode::kDeadlineExceeded, "the peer never answered"));
}

// Its caller may be reading that layer; a peer that does not know "from" sends it again.
TEST_F(ReceiverAlone, ALayerThatIsDoneIsNotWrittenAgain) {
  const auto handle = Begin();
  const int64_t layer_bytes = 6 * SmallLayout().layer_page_bytes();
  Deliver(Stream(layer_bytes)[0]);
  EXPECT_TRUE(receiver_.TakeUnfinished("dialled:2").empty());
  Receiver::Fetch taken = TakeOnly();
  EXPECT_EQ(taken.from_bytes, layer_bytes);
  const uint64_t new_id = taken.transfer_id;
  taken.peer = kPeer;
  receiver_.Add(std::move(taken));
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{4});
  EXPECT_EQ(handle->layers_done(), 1);
  FillPattern(*target_, kOwnSeed);
  Deliver(Stream(layer_bytes, new_id)[0]);
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kDataLoss, "overlaps"));
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
}

// It is taken out a second time before the first new session is there.
TEST_F(ReceiverAlone, WhatHasComeIsKeptWhileTheFetchWaits) {
  const auto handle = Begin();
  const std::vector<Chunk> chunks = Stream(1000);
  Deliver(chunks[0]);
  Receiver::Fetch taken = TakeOnly();
  taken.peer = kPeer;
  receiver_.Add(std::move(taken));
  const Receiver::Fetch again = TakeOnly();
  EXPECT_EQ(again.from_bytes, 1000);
  EXPECT_EQ(again.replaces, kId);  // What the sender knows of: the other was never requested.
  EXPECT_FALSE(handle->done());
}

// The sender may have heard of the second request, or not.
TEST_F(ReceiverAlone, WhatBroughtNothingIsNotNamedAsReplaced) {
  Begin();
  const auto ask_again = [&] {
    Receiver::Fetch taken = TakeOnly();
    taken.peer = kPeer;
    receiver_.Add(std::move(taken));
    receiver_.OnPeerReady(kPeer, kEpoch, LinkId{4});
    return *outbox_.Last<FetchMsg>();
  };
  const FetchMsg second = ask_again();
  EXPECT_EQ(second.replaces, kId);
  const FetchMsg third = ask_again();
  EXPECT_NE(third.transfer_id, second.transfer_id);
  EXPECT_EQ(third.replaces, kId);
  EXPECT_GT(third.attempt, second.attempt);
  Deliver(Stream(1000, third.transfer_id)[0]);
  const FetchMsg fourth = ask_again();
  EXPECT_EQ(fourth.replaces, third.transfer_id);
  EXPECT_EQ(fourth.from_bytes, 1000);
}

// A lane has the last chunk in its page, and has not told the progress thread.
TEST_F(ReceiverAlone, AFetchThatIsWholeWhenItIsTakenOutIsDone) {
  const auto handle = Begin();
  LandAllUnheard();
  EXPECT_TRUE(receiver_.TakeUnfinished(kPeer).empty());
  ExpectWhole(*handle);
}

// The same, and something else that would have ended it comes first.
TEST_F(ReceiverEnds, AFetchThatIsWholeDoesNotFail) {
  for (const auto& [name, end] : ends_) {
    SCOPED_TRACE(name);
    outbox_ = {};
    FillPattern(*target_, kOwnSeed);
    const auto handle = Begin();
    LandAllUnheard();
    end();
    ExpectWhole(*handle);
    EXPECT_TRUE(handle->missing_pages().empty());
    EXPECT_EQ(outbox_.Last<CancelMsg>(), nullptr);
  }
}

TEST_F(ReceiverAlone, AFetchThatGoesOnIsCancelledByItsFirstId) {
  const auto handle = Begin();
  Receiver::Fetch taken = TakeOnly();
  const uint64_t new_id = taken.transfer_id;
  taken.peer = kPeer;
  receiver_.Add(std::move(taken));
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{4});
  receiver_.Cancel(kId, absl::CancelledError("x"));
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kCancelled));
  EXPECT_EQ(outbox_.Last<CancelMsg>()->transfer_id, new_id);
}

TEST_F(ReceiverAlone, AFetchWithoutAPeerAsksNobodyUntilItIsGivenOne) {
  const auto handle = Begin(kId, DeadlineInMs(60000), "");
  for (const Chunk& chunk : Stream(1000)) Deliver(chunk);
  receiver_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{3});
  EXPECT_EQ(outbox_.Last<FetchMsg>(), nullptr);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  EXPECT_FALSE(handle->done());

  EXPECT_EQ(receiver_.Assign(kId + 1, kPeer, 33), nullptr);
  ASSERT_NE(receiver_.Assign(kId, kPeer, 33), nullptr);
  EXPECT_EQ(receiver_.Assign(kId, "dialled:2", 34), nullptr);  // Once.
  receiver_.OnPeerReady(kPeer, kEpoch, LinkId{3});
  ASSERT_NE(outbox_.Last<FetchMsg>(), nullptr);
  EXPECT_EQ(outbox_.Last<FetchMsg>()->lease_id, 33u);
  for (const Chunk& chunk : Stream(1000)) Deliver(chunk);
  EXPECT_TRUE(IsOk(handle->status()));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, remote_));
  EXPECT_EQ(receiver_.Assign(kId, kPeer, 35), nullptr);
}

TEST_F(ReceiverAlone, AFetchThatIsNeverGivenAPeerEndsAtItsDeadline) {
  const auto handle = Begin(kId, Clock::now(), "");
  receiver_.Tick(Clock::now());
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kDeadlineExceeded, "nobody has pushed"));
  EXPECT_EQ(outbox_.Last<CancelMsg>(), nullptr);
  EXPECT_EQ(receiver_.Assign(kId, kPeer, 33), nullptr);
}

TEST_F(ReceiverAlone, TickSaysWhenToComeBack) {
  EXPECT_EQ(receiver_.Tick(Clock::now()), Deadline::max());
  const Deadline deadline = DeadlineInMs(5000);
  Begin(kId, deadline);
  Begin(kId + 1, deadline + std::chrono::seconds(1));
  EXPECT_EQ(receiver_.Tick(Clock::now()), deadline);
}

TEST_F(ReceiverAlone, WhatThereIsNoRoomToReadComesPacked) {
  outbox_.data().costs_of_reads = {700, 60000};
  const auto handle = Begin();
  const std::vector<Chunk> chunks = Stream(4096);
  Deliver(chunks[0]);
  receiver_.OnReadFailed(chunks[1].header, absl::ResourceExhaustedError("no room"));
  EXPECT_FALSE(handle->done());
  const auto* again = outbox_.Last<FetchMsg>();
  EXPECT_EQ(again->replaces, kId);
  EXPECT_EQ(again->from_bytes, 4096);
  EXPECT_FALSE(again->reads.possible());
  Begin(kId + 100);  // Others are read still.
  EXPECT_TRUE(outbox_.Last<FetchMsg>()->reads.possible());
}

// Who was not told that this side can read has nothing to list: nobody would ever read it.
TEST_F(ReceiverAlone, AChunkElsewhereThatWasNotAskedForFailsTheFetch) {
  const auto handle = Begin();
  ASSERT_FALSE(outbox_.Last<FetchMsg>()->reads.possible());
  const std::vector<std::byte> list(32, std::byte{5});
  receiver_.OnChunkElsewhere({kId, 4096, 0, 100, kChunkInPool}, list);
  EXPECT_TRUE(outbox_.data().reads.empty());
  EXPECT_EQ(metrics_.chunks_dropped, 1);
  ExpectDataLoss(*handle, "a chunk to be read out of the sender's memory, which was not asked for");
}

// A fetch says what reads take this side, and lists are read out of the memory of its own peer
// only.
TEST_F(ReceiverAlone, ChunksElsewhereAreReadFromTheFetchsPeer) {
  outbox_.data().costs_of_reads = {700, 60000};
  const auto handle = Begin();
  const auto* fetch = outbox_.Last<FetchMsg>();
  ASSERT_NE(fetch, nullptr);
  EXPECT_EQ(fetch->reads.read_ns, 700);
  EXPECT_EQ(fetch->reads.mib_ns, 60000);
  const std::vector<std::byte> list(32, std::byte{5});
  receiver_.OnChunkElsewhere({kId + 1, 0, 0, 100, kChunkInPool}, list);
  EXPECT_TRUE(outbox_.data().reads.empty());
  EXPECT_EQ(metrics_.chunks_dropped, 1);
  receiver_.OnChunkElsewhere({kId, 4096, 0, 100, kChunkInPool}, list);
  ASSERT_EQ(outbox_.data().reads.size(), 1u);
  EXPECT_EQ(outbox_.data().reads[0].link, LinkId{3});
  EXPECT_EQ(outbox_.data().reads[0].header.offset, 4096u);
  EXPECT_EQ(outbox_.data().reads[0].payload, list);
  // What fails for the network's sake is asked for again; nothing else is.
  receiver_.OnLanded({kId, 4096, 0, 100, 0}, absl::UnavailableError("the network failed"));
  EXPECT_FALSE(handle->done());
  EXPECT_EQ(outbox_.Last<FetchMsg>()->replaces, kId);
  const uint64_t new_id = outbox_.Last<FetchMsg>()->transfer_id;
  receiver_.OnLanded({new_id, 4096, 0, 100, 0}, absl::InternalError("reading failed"));
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kInternal, "reading failed"));
}

}  // namespace
}  // namespace kvferry
