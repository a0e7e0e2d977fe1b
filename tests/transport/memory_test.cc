// What a transfer of very many runs of pages holds on either side while it is under way.

#include <gtest/gtest.h>
#include <malloc.h>

#include "connector/lease_table.h"
#include "tests/support/endpoints.h"
#include "tests/support/sanitized.h"
#include "tests/support/wait_for.h"
#include "tests/transport/fake_outbox.h"
#include "transport/node.h"
#include "transport/sender.h"

namespace kvferry {
namespace {

constexpr int64_t kRuns = 200000;
constexpr uint64_t kLease = 9;
constexpr double kMostBytesARun = 16;

class MemoryOfManyRuns : public testing::Test {
 protected:
  void SetUp() override {
#ifdef KVFERRY_SANITIZED
    GTEST_SKIP() << "a sanitizer's malloc does not say how much is in use";
#endif
  }

  static KvLayout OneByteAPage() { return KvLayout::Mha(1, 1, 1, 1, DType::kUint8); }
  static std::vector<int64_t> EveryOtherPage() {
    std::vector<int64_t> pages;
    for (int64_t i = 0; i < kRuns; ++i) pages.push_back(2 * i);
    return pages;
  }
  static double BytesInUse() {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<double>(info.uordblks + info.hblkhd);
  }

  const std::vector<int64_t> pages_ = EveryOtherPage();
  const PageRun all_{0, kRuns};
  std::shared_ptr<KvPool> pool_ = MakePatternPool(OneByteAPage(), 2 * kRuns, 1);
};

TEST_F(MemoryOfManyRuns, OfAFetch) {
  Node::Options options;
  options.model = kTestModel;
  options.pool = pool_;
  const auto node = Must(Node::Start(std::move(options)));
  const double before = BytesInUse();
  Node::FetchRequest request;
  request.ticket.num_pages = kRuns;
  request.positions = PageRuns(all_);
  request.pages = Must(PageRuns::FromPages(pages_));
  request.deadline = Soon();
  request.await_id = 7;  // Nobody comes.
  const auto handle = Must(node->Fetch(std::move(request)));
  ASSERT_TRUE(WaitFor([&] { return Metric(*node, "fetches_active") == 1; }, Soon()));
  EXPECT_LE((BytesInUse() - before) / kRuns, kMostBytesARun);
  EXPECT_EQ(handle->missing_pages(), pages_);
}

TEST_F(MemoryOfManyRuns, OfALeaseAndItsTransfer) {
  const Config config;
  LeaseTable leases(config);
  const auto arena = Must(Arena::Create(config.arena_bytes, config.chunk_bytes));
  FakeOutbox outbox;
  Metrics metrics;
  Sender sender(config, pool_, &leases, arena.get(), &outbox, &metrics);
  const double before = BytesInUse();
  ASSERT_TRUE(
      IsOk(leases.Publish(kLease, Must(PageRuns::FromPages(pages_)), 1, DeadlineInMs(60000))));
  FetchMsg fetch;
  fetch.transfer_id = 1;
  fetch.lease_id = kLease;
  fetch.positions = PageRuns(all_);
  fetch.timeout_ms = 60000;
  fetch.window_bytes = fetch.chunk_bytes = config.chunk_bytes;
  sender.OnFetch("accepted:1", 3, std::move(fetch));
  ASSERT_EQ(metrics.transfers_active, 1);
  EXPECT_LE((BytesInUse() - before) / kRuns, kMostBytesARun + 0.1);  // What is not a run's.
}

}  // namespace
}  // namespace kvferry
