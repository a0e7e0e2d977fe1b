// Which lookups wait at a producer, and what becomes of those that may not.

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "connector/lookup_service.h"
#include "tests/support/lookup_buffers.h"

namespace kvferry {
namespace {

using Tokens = std::vector<int32_t>;
using Code = absl::StatusCode;
constexpr uint64_t kTheirs = 11, kOurs = 22;
const Tokens kTokens = {1, 2, 3};

// A LookupProducer, but for how many bytes of tokens may wait.
class NarrowProducer {
 public:
  NarrowProducer(const std::shared_ptr<KvPool>& pool, int64_t max_calls_per_peer,
                 int64_t max_waiting_bytes)
      : table_(Must(LookupTable::Create({.max_bytes = 1000,
                                         .max_waiting_bytes = max_waiting_bytes,
                                         .max_tokens = kMaxLookupTokens}))),
        options_(ProducerOptions(pool)) {
    options_.config.max_calls_per_peer = max_calls_per_peer;
    service_ = std::make_unique<LookupService>(
        LookupService::Options{options_.config, 0, pool->layout().num_layers,
                               options_.reply_lease_ms},
        table_);
    Node::Options node;
    node.config = options_.config;
    node.model = options_.model;
    node.pool = options_.pool;
    node.source = service_.get();
    node.handler = service_.get();
    node.listen = true;
    node_ = Must(Node::Start(std::move(node)));
    service_->Attach(node_.get());
  }
  ~NarrowProducer() {
    table_->Close();
    service_->Close();
    node_.reset();
    service_->DropLeased();
  }
  NarrowProducer(const NarrowProducer&) = delete;
  NarrowProducer& operator=(const NarrowProducer&) = delete;

  std::string address() const { return node_->listen_address(); }
  void Insert(const Tokens& tokens) const {
    const PageRun run{0, PagesOfTokens(std::ssize(tokens), options_.pool->layout().page_size)};
    auto entry = std::make_shared<LookupEntry>();
    entry->pages = Must(PageRuns::FromRuns({&run, 1}));
    EXPECT_TRUE(IsOk(table_->Insert(tokens, 1, std::move(entry), Soon())));
  }
  int64_t num_waiting() const { return table_->num_waiting(); }
  int64_t num_served() const { return Metric(*node_, "calls_served"); }

 private:
  const std::shared_ptr<LookupTable> table_;
  LookupProducer::Options options_;
  std::unique_ptr<LookupService> service_;
  std::unique_ptr<Node> node_;
};

class LookupsThatWait : public testing::Test {
 protected:
  static constexpr int64_t kRoom = 16 << 10;

  void Produce(int64_t max_calls_per_peer) {
    producer_.emplace(their_pool_, max_calls_per_peer, kRoom);
    consumer_ = Consumer();
  }
  std::unique_ptr<LookupConsumer> Consumer() const {
    return Must(LookupConsumer::Create(ConsumerOptions(pool_, {producer_->address()})));
  }
  static std::shared_ptr<LookupHandle> Ask(LookupConsumer& consumer, Tokens tokens,
                                           int64_t timeout_ms = 20000) {
    std::vector<int64_t> pages(16);
    std::iota(pages.begin(), pages.end(), 0);
    return Must(consumer.DropSelect(Lookup(std::move(tokens), std::move(pages), timeout_ms)));
  }
  std::shared_ptr<LookupHandle> Ask(Tokens tokens) const {
    return Ask(*consumer_, std::move(tokens));
  }
  // For as many tokens as may wait.
  void AskForAllThatMayWait() {
    for (int32_t i = 0; i < 16; ++i) lookups_.push_back(Ask(Tokens(256, 1000 + i)));
    ASSERT_TRUE(WaitFor([&] { return producer_->num_served() >= 16; }, Soon()));
  }

  const std::shared_ptr<KvPool> their_pool_ = MakePatternPool(SmallLayout(), 16, kTheirs);
  const std::shared_ptr<KvPool> pool_ = MakePatternPool(SmallLayout(), 16, kOurs);
  std::optional<NarrowProducer> producer_;
  std::unique_ptr<LookupConsumer> consumer_;
  std::vector<std::shared_ptr<LookupHandle>> lookups_;
};

TEST_F(LookupsThatWait, LeaveRoomForThoseOfAnotherConsumer) {
  Produce(/*max_calls_per_peer=*/1024);
  AskForAllThatMayWait();
  EXPECT_EQ(producer_->num_waiting(), 8);
  const auto other = Consumer();
  const auto lookup = Ask(*other, kTokens);
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 9; }, Soon()));
  producer_->Insert(kTokens);
  EXPECT_TRUE(IsOk(lookup->Wait(Soon())));
  EXPECT_EQ(Metric(*other, "calls_started"), 2);  // The lookup, and that it takes the entry.
}

TEST_F(LookupsThatWait, ThoseAboveAConsumersShareFindWhatIsThere) {
  Produce(/*max_calls_per_peer=*/1024);
  producer_->Insert(kTokens);
  AskForAllThatMayWait();
  EXPECT_TRUE(IsOk(Ask(kTokens)->Wait(Soon())));
  EXPECT_TRUE(Fails(Ask(*consumer_, kTokens, 100)->Wait(Soon()), Code::kDeadlineExceeded,
                    "8192 bytes of tokens", "16384"));
  // And wait as soon as others do not any more.
  for (int32_t i = 0; i < 8; ++i) lookups_[static_cast<size_t>(i)]->Cancel();
  producer_->Insert(Tokens(256, 1015));
  EXPECT_TRUE(IsOk(lookups_.back()->Wait(Soon())));
}

}  // namespace
}  // namespace kvferry
