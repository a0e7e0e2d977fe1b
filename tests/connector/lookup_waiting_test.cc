// Which lookups wait at a producer, and what becomes of those that may not.

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "connector/lookup_crowd.h"
#include "connector/lookup_service.h"
#include "tests/support/control_relay.h"
#include "tests/support/lookup_buffers.h"
#include "transport/command_queue.h"

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
    options_.reply_lease_ms = 20000;  // Many fetches wait in turn here.
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

  void Produce(int64_t max_calls_per_peer, int64_t max_waiting_bytes = kRoom) {
    producer_.emplace(their_pool_, max_calls_per_peer, max_waiting_bytes);
    consumer_ = Consumer();
  }
  std::unique_ptr<LookupConsumer> Consumer() const {
    return Must(LookupConsumer::Create(ConsumerOptions(pool_, {producer_->address()})));
  }
  static std::shared_ptr<LookupHandle> Ask(LookupConsumer& consumer, Tokens tokens,
                                           int64_t timeout_ms = 60000) {
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
  EXPECT_TRUE(Fails(Ask(*consumer_, kTokens, 2000)->Wait(Soon()), Code::kDeadlineExceeded,
                    "8192 bytes of tokens", "16384"));
  // And wait as soon as others do not any more.
  for (int32_t i = 0; i < 8; ++i) lookups_[static_cast<size_t>(i)]->Cancel();
  producer_->Insert(Tokens(256, 1015));
  EXPECT_TRUE(IsOk(lookups_.back()->Wait(Soon())));
}

// Else each that waits for a place loses its turn by one, and it is 7 s until the first asks again.
TEST_F(LookupsThatWait, OneThatFindsItsEntryAtOnceLeavesNoPlace) {
  constexpr int32_t kLong = 60;
  Produce(/*max_calls_per_peer=*/1, /*max_waiting_bytes=*/256 << 20);
  const auto waiting = Ask(Tokens{8});
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 1; }, Soon()));
  for (int32_t i = 0; i < kLong; ++i) lookups_.push_back(Ask(Tokens(250000, 1000 + i)));
  ASSERT_TRUE(WaitFor([&] { return producer_->num_served() >= kLong; }, Soon()));
  const auto find = [&](int number) {  // At once, so that some are under way as others are refused.
    for (int i = 0; i < number; ++i) producer_->Insert({9});
    std::vector<std::shared_ptr<LookupHandle>> found;
    for (int i = 0; i < number; ++i) found.push_back(Ask(Tokens{9}));
    for (const auto& lookup : found) ASSERT_TRUE(IsOk(lookup->Wait(Soon())));
  };
  for (int i = 0; i < kLong + 5; ++i) find(8);
  EXPECT_EQ(producer_->num_waiting(), 1);
  waiting->Cancel();
  find(1);  // Asked after that: it does not wait there any more.
  EXPECT_TRUE(WaitFor([&] { return producer_->num_waiting() == 1; }, DeadlineInMs(5000)));
}

// The first ones are too long to wait there at all, and it is 10 s until they may all ask again.
TEST_F(LookupsThatWait, ThePlaceOfOneThatEndsIsForWhoHasRoomThere) {
  constexpr int32_t kLong = 80;
  std::atomic<int> num_long = 0, num_first = 0;  // Times that they, and the first one, asked.
  std::atomic<uint64_t> short_call = 0;
  Latch short_refused;
  producer_.emplace(their_pool_, /*max_calls_per_peer=*/1, kRoom);
  ControlRelay relay(producer_->address(), [&](ControlRelay::Heard& heard) {
    const auto* call = std::get_if<CallMsg>(&heard.message.body);
    if (heard.function() == kLookupFunction) {
      const Tokens tokens = Must(UnpackTokens(Must(call->args.Bytes("tokens"))));
      if (tokens == kTokens) short_call = call->call_id;
      if (tokens[0] >= 1000) ++num_long;
      if (tokens[0] == 1000) ++num_first;
    }
    const auto* reply = std::get_if<ReplyMsg>(&heard.message.body);
    if (reply != nullptr && reply->call_id == short_call) short_refused.Open();
    return ControlRelay::Verdict::kPass;
  });
  consumer_ = Must(LookupConsumer::Create(ConsumerOptions(pool_, {relay.address()})));
  const auto waiting = Ask(Tokens{9});
  for (int32_t i = 0; i < kLong; ++i) lookups_.push_back(Ask(Tokens(250000, 1000 + i)));
  const auto lookup = Ask(kTokens);
  ASSERT_TRUE(short_refused.Wait(Soon()));
  EXPECT_EQ(producer_->num_waiting(), 1);
  const int before = num_long, first_before = num_first;
  producer_->Insert({9});
  EXPECT_TRUE(IsOk(waiting->Wait(Soon())));
  EXPECT_TRUE(WaitFor([&] { return producer_->num_waiting() == 1; }, DeadlineInMs(5000)));
  EXPECT_LE(num_long, before + kLong / 2);
  producer_->Insert(kTokens);
  EXPECT_TRUE(IsOk(lookup->Wait(DeadlineInMs(5000))));
  // Later places are not tried by the same one again. It may have asked once more since: it may not
  // have known of the others when it was first refused.
  for (int i = 0; i < 3; ++i) {
    const auto waits = Ask(Tokens{9});
    EXPECT_TRUE(WaitFor([&] { return producer_->num_waiting() == 1; }, Soon()));
    producer_->Insert({8});  // By whose answer the consumer knows that the other one waits.
    EXPECT_TRUE(IsOk(Ask(Tokens{8})->Wait(Soon())));
    const int asked = num_long;
    producer_->Insert({9});
    EXPECT_TRUE(IsOk(waits->Wait(Soon())));
    EXPECT_TRUE(WaitFor([&] { return num_long > asked; }, DeadlineInMs(5000)));
  }
  EXPECT_LE(num_first, first_before + 2);
  consumer_.reset();  // Before the relay.
}

// ---------------------------------------------------------------- who has no place

TEST(LookupCrowds, APlaceIsForTheOldestInTurn) {
  LookupCrowd crowd;
  EXPECT_EQ(crowd.FirstShorterThan(LookupCrowd::kAnyLength), 0);
  crowd.Join(5, 4096, true);
  crowd.Join(3, 1 << 20, true);
  crowd.Join(4, 5000, true);
  crowd.Join(2, 100000, false);
  EXPECT_EQ(crowd.bytes(), 4096 + (1 << 20) + 5000 + 100000);
  EXPECT_EQ(crowd.FirstShorterThan(LookupCrowd::kAnyLength), 3);
  crowd.Leave(3, 1 << 20);
  crowd.Join(3, 1 << 20, false);
  EXPECT_EQ(crowd.FirstShorterThan(LookupCrowd::kAnyLength), 4);
  crowd.Leave(4, 5000);
  crowd.Leave(2, 100000);
  EXPECT_EQ(crowd.FirstShorterThan(LookupCrowd::kAnyLength), 5);
  crowd.Leave(5, 4096);
  EXPECT_EQ(crowd.FirstShorterThan(LookupCrowd::kAnyLength), 0);
  EXPECT_EQ(crowd.bytes(), 1 << 20);
}

// However many there are, a place is not offered to one after another.
TEST(LookupCrowds, APlaceThatIsTooSmallGoesToFewOthers) {
  LookupCrowd crowd;
  for (uint64_t id = 1; id <= 1000; ++id) {
    crowd.Join(id, (1 << 20) + 4096 - 1000 * static_cast<int64_t>(id), true);
  }
  crowd.Join(1001, 4096, true);
  std::vector<uint64_t> offered;
  int64_t bytes = LookupCrowd::kAnyLength;
  while (const uint64_t id = crowd.FirstShorterThan(bytes)) {
    offered.push_back(id);
    bytes = id == 1001 ? 4096 : (1 << 20) + 4096 - 1000 * static_cast<int64_t>(id);
  }
  // The first of each power of two: of 2^20 bytes, 2^19, ... 2^16 and 2^12.
  EXPECT_EQ(offered, (std::vector<uint64_t>{1, 5, 529, 791, 922, 988, 1001}));
}

}  // namespace
}  // namespace kvferry
