#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "connector/lease_table.h"
#include "tests/support/endpoints.h"
#include "tests/transport/fake_outbox.h"
#include "transport/sender.h"

namespace kvferry {

inline constexpr uint64_t kLease = 9;
inline constexpr LinkId kLink = 3;
inline const PeerKey kPeer = "accepted:1";

// A sender with a pool, leases and a wire that remembers.
class SenderAlone : public testing::Test {
 protected:
  SenderAlone() { Publish(kLease, {3, 4, 5, 9, 0, 15}, 4); }

  static Config MakeConfig() {
    Config config;
    config.chunk_bytes = 4096;
    config.arena_bytes = 64 << 10;
    config.max_fetches_per_peer = 8;
    return config;
  }
  void Publish(uint64_t lease, const std::vector<int64_t>& pages, int64_t ready) {
    ASSERT_TRUE(
        IsOk(leases_.Publish(lease, Must(PageRuns::FromPages(pages)), ready, DeadlineInMs(60000))));
  }
  static FetchMsg Ask(uint64_t id, uint64_t lease = kLease, int64_t count = 6,
                      int64_t window = 1 << 30) {
    FetchMsg fetch;
    fetch.transfer_id = id;
    fetch.lease_id = lease;
    const PageRun all{0, count};
    fetch.positions = Must(PageRuns::FromRuns({&all, 1}));
    fetch.timeout_ms = 60000;
    fetch.window_bytes = window;
    fetch.chunk_bytes = 1 << 30;
    return fetch;
  }
  void PumpDry() {
    while (sender_.Pump()) {
    }
  }
  // The stream that was sent, put together; each byte from `from` on must have been sent once, in
  // order.
  std::vector<std::byte> Sent(uint64_t id, int64_t from = 0) {
    std::vector<std::byte> stream;
    for (const SentChunk& chunk : wire().chunks) {
      if (chunk.header.transfer_id != id) continue;
      EXPECT_EQ(chunk.header.offset, from + stream.size());
      EXPECT_EQ(chunk.header.bytes, chunk.payload.size());
      stream.insert(stream.end(), chunk.payload.begin(), chunk.payload.end());
    }
    return stream;
  }
  std::vector<std::byte> Want(const std::vector<int64_t>& pages, int64_t from = 0) {
    const StreamPlan plan = Must(StreamPlan::Create(pool_, Must(PageRuns::FromPages(pages))));
    std::vector<std::byte> stream(plan.total_bytes() - from);
    EXPECT_TRUE(IsOk(plan.Gather(from, stream)));
    return stream;
  }
  FakeLinks& wire() { return outbox_.data(); }

  const Config config_ = MakeConfig();
  std::shared_ptr<KvPool> pool_ = MakePatternPool(SmallLayout(), 16, 1);
  LeaseTable leases_{config_};
  std::unique_ptr<Arena> arena_ = Must(Arena::Create(config_.arena_bytes, config_.chunk_bytes));
  FakeOutbox outbox_;
  Metrics metrics_;
  Sender sender_{config_, pool_, &leases_, arena_.get(), &outbox_, &metrics_};
};

}  // namespace kvferry
