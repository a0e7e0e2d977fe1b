// Chunks that come part by part, as TCP brings them.

#include <gtest/gtest.h>

#include "base/hash.h"
#include "tests/pool/guarded_memory.h"
#include "tests/transport/receiver_alone.h"

namespace kvferry {
namespace {

class ReceiverInParts : public ReceiverAlone {
 protected:
  std::vector<Chunk> Checked(int64_t chunk_bytes) {
    std::vector<Chunk> chunks = Stream(chunk_bytes);
    for (Chunk& chunk : chunks) {
      chunk.header.flags = kChunkHasChecksum;
      chunk.header.checksum = Xxh3(std::span<const std::byte>(chunk.payload));
    }
    return chunks;
  }
  static bool Copy(ChunkSink* sink, std::span<const std::byte> part) {
    std::shared_ptr<const MovesUnderWay> reading;
    const bool wanted = sink->Copy(part, &reading);
    EXPECT_EQ(reading, nullptr);  // The pages lie on the host.
    return wanted;
  }
  // By Fill and by Copy in turn, `part_bytes` at a time; how many parts were taken.
  static int Feed(ChunkSink* sink, std::span<const std::byte> payload, size_t part_bytes) {
    int taken = 0;
    for (; !payload.empty(); ++taken) {
      const auto part = payload.first(std::min(part_bytes, payload.size()));
      const auto fill = [&](MutablePieces pieces) {
        size_t at = 0;
        for (const std::span<std::byte> piece : pieces) {
          const size_t bytes = std::min(piece.size(), part.size() - at);
          std::copy_n(part.begin() + static_cast<int64_t>(at), bytes, piece.begin());
          at += bytes;
        }
        return static_cast<int64_t>(at);
      };
      if (taken % 2 == 0 ? !sink->Fill(fill) : !Copy(sink, part)) return taken;
      payload = payload.subspan(part.size());
    }
    return taken;
  }
};

// As a store's value is that lies in no page.
TEST_F(ReceiverInParts, ATailThatIsAllThereIsGoesStraightToItsPlace) {
  std::vector<std::byte> tail(20000);
  const auto plan = std::make_shared<const StreamPlan>(
      Must(StreamPlan::Create(target_, PageRuns(), StreamTail{tail.data(), 20000})));
  const auto landing =
      std::make_shared<Landing>(plan, HandleOf(*plan), 0, /*max_chunk_bytes=*/15000,
                                /*checksum=*/false, &metrics_);
  PieceCopy copy(threads_.get());
  std::vector<std::byte> want(20000);
  for (size_t i = 0; i < want.size(); ++i) want[i] = static_cast<std::byte>(i % 251);
  int landed = 0;
  for (const auto& [offset, bytes] : {std::pair(uint64_t{15000}, 5000u), {uint64_t{0}, 15000u}}) {
    const ChunkHeader header{kId, offset, 0, bytes, 0};
    ASSERT_TRUE(IsOk(landing->Begin(header)));
    LandingChunk chunk(header, landing, &copy, [&](const ChunkHeader&, const absl::Status& status) {
      landed += status.ok() ? 1 : 0;
    });
    EXPECT_TRUE(chunk.prefers_fill());
    Feed(&chunk, std::span(want).subspan(offset, bytes), 777);
    chunk.End();
  }
  EXPECT_EQ(landed, 2);
  EXPECT_EQ(tail, want);
  EXPECT_EQ(landing->num_bytes(), 20000);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
}

TEST_F(ReceiverInParts, EveryByteWithItsChecksum) {
  config_.checksum = true;
  const auto handle = Begin();
  for (const Chunk& chunk : Checked(5000)) {
    const std::unique_ptr<ChunkSink> sink = receiver_.OnChunkBegins(chunk.header);
    ASSERT_NE(sink, nullptr);
    EXPECT_GT(Feed(sink.get(), chunk.payload, 777), 1);
    sink->End();
  }
  ASSERT_TRUE(handle->done());
  EXPECT_TRUE(IsOk(handle->status()));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, remote_));
  EXPECT_NE(outbox_.Last<DoneMsg>(), nullptr);
}

TEST_F(ReceiverInParts, AWrongByteFailsTheFetch) {
  config_.checksum = true;
  const auto handle = Begin();
  Chunk chunk = Checked(5000)[1];
  chunk.payload[4321] ^= std::byte{1};
  const std::unique_ptr<ChunkSink> sink = receiver_.OnChunkBegins(chunk.header);
  Feed(sink.get(), chunk.payload, 1000);
  EXPECT_FALSE(handle->done());
  sink->End();
  EXPECT_EQ(metrics_.checksum_failures, 1);
  ExpectDataLoss(*handle, "checksum");
}

// What has no end does not count, whether or not all its bytes came.
TEST_F(ReceiverInParts, AChunkWithoutItsEnd) {
  const auto handle = Begin();
  const std::vector<Chunk> chunks = Stream(3000);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const std::unique_ptr<ChunkSink> sink = receiver_.OnChunkBegins(chunks[i].header);
    Feed(sink.get(), chunks[i].payload, 1000);
    if (i != 1) sink->End();
  }
  EXPECT_FALSE(handle->done());
  receiver_.OnPeerGone(kPeer, absl::UnavailableError("gone"));
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kUnavailable, "gone"));
  EXPECT_FALSE(handle->missing_pages().empty());
}

TEST_F(ReceiverInParts, NothingIsWrittenAfterTheFetchHasEnded) {
  const auto handle = Begin();
  const Chunk chunk = Stream(3000)[0];
  const std::unique_ptr<ChunkSink> sink = receiver_.OnChunkBegins(chunk.header);
  ASSERT_EQ(Feed(sink.get(), std::span<const std::byte>(chunk.payload).first(1000), 500), 2);
  receiver_.Cancel(kId, absl::CancelledError("enough"));
  ASSERT_TRUE(handle->done());
  FillPattern(*target_, kOwnSeed);
  const auto rest = std::span<const std::byte>(chunk.payload).subspan(1000);
  EXPECT_EQ(Feed(sink.get(), rest, 500), 0);
  EXPECT_FALSE(Copy(sink.get(), rest));
  sink->End();
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  EXPECT_EQ(outbox_.Last<DoneMsg>(), nullptr);
}

TEST_F(ReceiverInParts, ChunksThatAreRefusedBeforeTheirFirstByte) {
  const auto handle = Begin();
  ChunkHeader unknown = Stream(3000)[0].header;
  unknown.transfer_id = 4711;
  EXPECT_EQ(receiver_.OnChunkBegins(unknown), nullptr);
  EXPECT_EQ(metrics_.chunks_dropped, 1);
  EXPECT_FALSE(handle->done());
  ChunkHeader beyond = Stream(3000)[0].header;
  beyond.offset = UINT64_MAX - 10;
  EXPECT_EQ(receiver_.OnChunkBegins(beyond), nullptr);
  ExpectDataLoss(*handle, "of a stream of");
}

TEST_F(ReceiverInParts, TheSameBytesTwice) {
  const auto handle = Begin();
  const Chunk chunk = Stream(3000)[0];
  const std::unique_ptr<ChunkSink> sink = receiver_.OnChunkBegins(chunk.header);
  ASSERT_NE(sink, nullptr);
  EXPECT_EQ(receiver_.OnChunkBegins(chunk.header), nullptr);
  ExpectDataLoss(*handle, "overlaps");
}

// A device copies what arrives while more does.
class ReceiverInPartsOfADevice : public ReceiverInParts {
 protected:
  ReceiverInPartsOfADevice() {
    target_ = Must(KvPool::CreateIn(SmallLayout(), 16, memory_));
    FillPattern(*target_, kOwnSeed);
  }
  // A chunk of which all has come and nothing has been copied.
  std::unique_ptr<ChunkSink> Taken(const Chunk& chunk) {
    std::unique_ptr<ChunkSink> sink = receiver_.OnChunkBegins(chunk.header);
    const auto payload = std::span<const std::byte>(chunk.payload);
    const size_t half = payload.size() / 2;
    for (const auto part : {payload.first(half), payload.subspan(half)}) {
      EXPECT_TRUE(sink->Copy(part, &reading_));
      EXPECT_NE(reading_, nullptr);
    }
    EXPECT_FALSE(reading_->done());
    EXPECT_FALSE(sink->settled());
    return sink;
  }

  const std::shared_ptr<GuardedMemory> memory_ = std::make_shared<GuardedMemory>();
  std::shared_ptr<const MovesUnderWay> reading_;  // The last part.
};

TEST_F(ReceiverInPartsOfADevice, WhatIsUnderWayDoesNotCount) {
  config_.checksum = true;
  const auto handle = Begin();
  const std::vector<Chunk> chunks = Checked(5000);
  for (const Chunk& chunk : chunks) {
    const std::unique_ptr<ChunkSink> sink = Taken(chunk);
    EXPECT_FALSE(handle->done());
    sink->End();
    EXPECT_TRUE(reading_->done());
  }
  ExpectWhole(*handle);
}

TEST_F(ReceiverInPartsOfADevice, AChunkIsSettledWhenItsPartsAre) {
  const auto handle = Begin();
  const Chunk chunk = Stream(3000)[0];
  const std::unique_ptr<ChunkSink> sink = Taken(chunk);
  EXPECT_TRUE(IsOk(reading_->Wait()));
  EXPECT_FALSE(sink->settled());  // The first half is not.
  receiver_.Cancel(kId, absl::CancelledError("enough"));
  EXPECT_TRUE(sink->settled());
}

// Else it would be written into pages that are somebody else's by then.
TEST_F(ReceiverInPartsOfADevice, WhoeverEndsTheFetchWaitsForWhatIsUnderWay) {
  const auto handle = Begin();
  const Chunk chunk = Stream(3000)[0];
  const std::unique_ptr<ChunkSink> sink = Taken(chunk);
  receiver_.Cancel(kId, absl::CancelledError("enough"));
  ASSERT_TRUE(handle->done());
  EXPECT_TRUE(reading_->done());
  FillPattern(*target_, kOwnSeed);
  sink->End();
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
}

TEST_F(ReceiverInPartsOfADevice, ThatFailsWhenItIsWaitedFor) {
  const auto handle = Begin();
  const Chunk chunk = Stream(3000)[0];
  const std::unique_ptr<ChunkSink> sink = Taken(chunk);
  memory_->failure = absl::UnavailableError("fell off the bus");
  sink->End();
  ASSERT_TRUE(handle->done());
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kInternal,
                    "pages in guarded memory could not be copied: fell off the bus"));
  EXPECT_EQ(outbox_.Last<DoneMsg>(), nullptr);
}

}  // namespace
}  // namespace kvferry
