#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "tests/support/endpoints.h"
#include "tests/transport/fake_outbox.h"
#include "transport/receiver.h"

namespace kvferry {

inline constexpr uint64_t kId = 77;
inline constexpr uint64_t kEpoch = 5;
inline constexpr uint64_t kSourceSeed = 1;
inline constexpr uint64_t kOwnSeed = 2;
inline const PeerKey kPeer = "dialled:1";

// A receiver with two pools and a wire that remembers.
class ReceiverAlone : public testing::Test {
 protected:
  struct Chunk {
    ChunkHeader header;
    std::vector<std::byte> payload;
  };

  static Config MakeConfig() {
    Config config = SmallChunks();
    config.credits_per_transfer = 4;
    return config;
  }
  StreamPlan Plan(const std::shared_ptr<KvPool>& pool, const std::vector<int64_t>& pages) {
    return Must(StreamPlan::Create(pool, Must(PageRuns::FromPages(pages))));
  }
  static std::shared_ptr<FetchHandle> HandleOf(const StreamPlan& plan) {
    return std::make_shared<FetchHandle>(std::make_shared<const PageRuns>(plan.pages()),
                                         plan.num_layers(), plan.total_bytes(), [] {});
  }
  std::shared_ptr<FetchHandle> Begin(uint64_t id = kId, Deadline deadline = DeadlineInMs(60000),
                                     const PeerKey& peer = kPeer, bool redial = true,
                                     bool early = false) {
    auto handle = Add(id, deadline, peer, redial, early);
    receiver_.OnPeerReady(kPeer, kEpoch, LinkId{3});
    return handle;
  }
  std::shared_ptr<FetchHandle> Add(uint64_t id, Deadline deadline = DeadlineInMs(60000),
                                   const PeerKey& peer = kPeer, bool redial = true,
                                   bool early = false) {
    StreamPlan plan = Plan(target_, local_);
    auto handle = HandleOf(plan);
    const Ticket ticket{"tcp://127.0.0.1:4000", kEpoch, 9, 6, 0};
    const PageRun all{0, static_cast<int64_t>(local_.size())};
    receiver_.Add({id, handle, ticket, Must(PageRuns::FromRuns({&all, 1})),
                   std::make_shared<const StreamPlan>(std::move(plan)), deadline, Clock::now(),
                   peer, redial, early});
    return handle;
  }
  // What it was to read has no room here: it is asked for anew.
  void HasNoRoomToRead(uint64_t id = kId) {
    receiver_.OnReadFailed({id, 0, 0, 4096, 0}, absl::ResourceExhaustedError("no room"));
  }
  // The one fetch there is, for another session.
  Receiver::Fetch TakeOnly() {
    std::vector<Receiver::Fetch> taken = receiver_.TakeUnfinished(kPeer);
    EXPECT_EQ(taken.size(), 1u);
    return std::move(taken.at(0));
  }
  // The stream as the other side would send it.
  std::vector<Chunk> Stream(int64_t chunk_bytes, uint64_t id = kId) {
    const StreamPlan plan = Plan(source_, remote_);
    std::vector<Chunk> chunks;
    for (int64_t at = 0; at < plan.total_bytes(); at += chunk_bytes) {
      Chunk chunk;
      chunk.payload.resize(std::min(chunk_bytes, plan.total_bytes() - at));
      EXPECT_TRUE(IsOk(plan.Gather(at, chunk.payload)));
      chunk.header.transfer_id = id;
      chunk.header.offset = at;
      chunk.header.bytes = static_cast<uint32_t>(chunk.payload.size());
      chunks.push_back(std::move(chunk));
    }
    return chunks;
  }
  void Deliver(const Chunk& chunk, bool intact = true) {
    // Taken back while it is read: it was there when the reader began.
    int looks = 0;
    const std::span<const std::byte> payload = chunk.payload;
    receiver_.OnChunk(chunk.header, Pieces(&payload, 1), [&] { return intact || looks++ == 0; });
  }
  // By a lane, which has not told the progress thread.
  void LandAllUnheard() {
    PieceCopy copy(threads_.get());
    for (const Chunk& chunk : Stream(1000)) {
      const std::span<const std::byte> payload = chunk.payload;
      ASSERT_TRUE(IsOk(receiver_.Land(
          chunk.header, Pieces(&payload, 1), [] { return true; }, &copy)));
    }
  }
  // The fetch has ended well and said so, and was asked for once.
  void ExpectWhole(const FetchHandle& handle) {
    ASSERT_TRUE(handle.done());
    EXPECT_TRUE(IsOk(handle.status()));
    EXPECT_EQ(outbox_.Last<FetchMsg>()->transfer_id, kId);
    ASSERT_NE(outbox_.Last<DoneMsg>(), nullptr);
    EXPECT_EQ(outbox_.Last<DoneMsg>()->transfer_id, kId);
    EXPECT_EQ(outbox_.Last<DoneMsg>()->bytes, handle.report().total_bytes);
    EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, remote_));
  }
  void ExpectDataLoss(const FetchHandle& handle, absl::string_view part) {
    ExpectGivenUp(handle, absl::StatusCode::kDataLoss, part);
  }
  // The fetch failed, said so to the peer, and takes no more.
  void ExpectGivenUp(const FetchHandle& handle, absl::StatusCode code, absl::string_view part) {
    ASSERT_TRUE(handle.done());
    EXPECT_TRUE(Fails(handle.status(), code, part));
    ASSERT_NE(outbox_.Last<CancelMsg>(), nullptr);
    EXPECT_EQ(outbox_.Last<CancelMsg>()->transfer_id, kId);
    EXPECT_EQ(outbox_.Last<DoneMsg>(), nullptr);
    FillPattern(*target_, kOwnSeed);
    for (const Chunk& chunk : Stream(3000)) Deliver(chunk);
    EXPECT_TRUE(IsUntouched(*target_, kOwnSeed)) << "written after the fetch had ended";
  }

  Config config_ = MakeConfig();
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 16, kSourceSeed);
  std::shared_ptr<KvPool> target_ = MakePatternPool(SmallLayout(), 16, kOwnSeed);
  const std::vector<int64_t> remote_ = {3, 4, 5, 9, 0, 15};
  const std::vector<int64_t> local_ = {8, 1, 2, 3, 14, 7};
  FakeOutbox outbox_;
  Metrics metrics_;
  std::unique_ptr<ThreadPool> threads_ = Must(ThreadPool::Create(1));
  Receiver receiver_{config_, threads_.get(), &outbox_, &metrics_};
};

}  // namespace kvferry
