// The sender over a plane that takes chunks from where they lie.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/transport/sender_alone.h"
#include "transport/sender.h"

namespace kvferry {
namespace {

// Pages of 16 KiB, which are sent from where they lie where the plane can.
class SenderLends : public SenderAlone {
 protected:
  static KvLayout LongPages() {
    KvLayout layout = SmallLayout();
    for (KvTensor& tensor : layout.tensors) tensor.head_dim *= 64;
    return layout;
  }
  static Config LongChunks() {
    Config config;
    config.arena_bytes = config.chunk_bytes;
    return config;
  }
  SenderLends() {
    outbox_.data().lends = true;
    outbox_.data().fill_at_once = false;
    lender_.OnFetch(kPeer, kLink, Ask(1));
  }

  const Config long_config_ = LongChunks();
  std::shared_ptr<KvPool> long_pool_ = MakePatternPool(LongPages(), 16, 1);
  std::unique_ptr<Arena> small_arena_ =
      Must(Arena::Create(long_config_.arena_bytes, long_config_.chunk_bytes));
  Sender lender_{long_config_, long_pool_, &leases_, small_arena_.get(), &outbox_, &metrics_};
};

TEST_F(SenderLends, TheSameStreamWithoutTheArena) {
  while (lender_.Pump()) {
  }
  EXPECT_EQ(small_arena_->num_taken(), 0);
  EXPECT_EQ(metrics_.chunks_lent, metrics_.chunks_sent);
  EXPECT_GT(metrics_.chunks_lent, 1);
  wire().FillLater();
  const StreamPlan plan =
      Must(StreamPlan::Create(long_pool_, Must(PageRuns::FromPages({{3, 4, 5, 9, 0, 15}}))));
  std::vector<std::byte> want(plan.total_bytes());
  ASSERT_TRUE(IsOk(plan.Gather(0, want)));
  EXPECT_EQ(Sent(1), want);
}

// However short their layers are.
TEST_F(SenderLends, TurnsOfTransfersAreAMebibyte) {
  pool_ =
      MakePatternPool(KvLayout::Mha(8, 64, 2, 512, DType::kBFloat16), 2, 3);  // 256 KiB a layer.
  Sender sender(long_config_, pool_, &leases_, small_arena_.get(), &outbox_, &metrics_);
  for (const uint64_t id : {2, 3}) {
    Publish(100 + id, {1}, 8);
    sender.OnFetch("accepted:" + std::to_string(id), kLink, Ask(id, 100 + id, 1));
  }
  sender.Pump();
  wire().FillLater();
  std::vector<uint64_t> order;
  for (const SentChunk& chunk : wire().chunks) order.push_back(chunk.header.transfer_id);
  EXPECT_EQ(order, (std::vector<uint64_t>{2, 2, 2, 2, 3, 3, 3, 3}));
  EXPECT_EQ(metrics_.bytes_sent, 2 << 20);
}

// The pages are their owner's again: not one is read, and the wire is told so.
TEST_F(SenderLends, NotAfterTheTransferHasEnded) {
  while (lender_.Pump()) {
  }
  lender_.AbortLease(kLease, absl::AbortedError("taken back"));
  wire().FillLater();
  EXPECT_TRUE(wire().chunks.empty());
}

TEST_F(SenderLends, ASendThatFailsEndsTheTransfer) {
  lender_.Pump();
  for (FakeLinks::Unfilled& chunk : std::exchange(wire().later, {})) {
    chunk.done(absl::UnavailableError("reset"));
  }
  lender_.Pump();
  EXPECT_EQ(metrics_.transfers_active, 0);
  ASSERT_NE(outbox_.Last<AbortMsg>(), nullptr);
  EXPECT_TRUE(Fails(outbox_.Last<AbortMsg>()->status, absl::StatusCode::kUnavailable, "reset"));
}

// How many chunks wait to be sent is not the peer's to choose.
TEST_F(SenderLends, NotMoreChunksThanAWindowOfOursHas) {
  constexpr uint64_t kTailLease = 7;
  const auto tail = std::make_shared<const std::vector<std::byte>>(33 << 20);
  ASSERT_TRUE(IsOk(leases_.Publish(kTailLease, PageRuns(), 4, DeadlineInMs(60000), tail)));
  FetchMsg fetch = Ask(2, kTailLease);
  const PageRuns none;
  fetch.positions = none;
  fetch.tail_bytes = static_cast<int64_t>(tail->size());
  fetch.chunk_bytes = 4096;
  fetch.window_bytes = int64_t{1} << 40;
  lender_.OnCancel(kPeer, {1, "another one instead"});
  lender_.OnFetch(kPeer, kLink, fetch);
  for (int i = 0; i < 10000; ++i) lender_.Pump();
  EXPECT_EQ(metrics_.chunks_lent, 4096);
  wire().FillLater();
  for (int i = 0; i < 10000; ++i) lender_.Pump();
  EXPECT_EQ(metrics_.chunks_lent, 2 * 4096);
}

// As a store's value is that lies in no page.
TEST_F(SenderLends, ATailThatIsAllThereIs) {
  constexpr uint64_t kTailLease = 7;
  auto tail = std::make_shared<std::vector<std::byte>>(3 << 20);
  for (size_t i = 0; i < tail->size(); ++i) (*tail)[i] = static_cast<std::byte>(i % 251);
  const std::vector<std::byte> want = *tail;
  ASSERT_TRUE(IsOk(leases_.Publish(kTailLease, PageRuns(), 4, DeadlineInMs(60000), tail)));
  FetchMsg fetch = Ask(2, kTailLease);
  const PageRuns none;
  fetch.positions = none;
  fetch.tail_bytes = static_cast<int64_t>(tail->size());
  lender_.OnCancel(kPeer, {1, "another one instead"});
  lender_.OnFetch(kPeer, kLink, fetch);
  while (lender_.Pump()) {
  }
  EXPECT_EQ(small_arena_->num_taken(), 0);
  EXPECT_EQ(metrics_.chunks_lent, 3);
  wire().FillLater();
  EXPECT_EQ(Sent(2), want);
  // Whoever reads it may do so for as long as the transfer is there, and no longer.
  const std::weak_ptr<std::vector<std::byte>> kept = tail;
  tail.reset();
  EXPECT_FALSE(kept.expired());
  lender_.OnDone(kPeer, {2, kTailLease, static_cast<int64_t>(want.size()), {}});
  EXPECT_TRUE(kept.expired());
}

TEST_F(SenderLends, NotWhereAChecksumComesFirst) {
  FetchMsg fetch = Ask(2);
  fetch.checksum = true;
  lender_.OnCancel(kPeer, {1, "another one instead"});
  lender_.OnFetch(kPeer, kLink, fetch);
  lender_.Pump();
  EXPECT_EQ(metrics_.chunks_lent, 0);
  EXPECT_EQ(small_arena_->num_taken(), 1);
}

}  // namespace
}  // namespace kvferry
