// Producers and consumers of lookup buffers in one process, over the real planes.

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <numeric>
#include <thread>

#include "absl/strings/match.h"
#include "connector/kv_tensors.h"
#include "tests/pool/guarded_memory.h"
#include "tests/support/failing_new.h"
#include "tests/support/lookup_buffers.h"

namespace kvferry {
namespace {

using Tokens = std::vector<int32_t>;
using Pages = std::vector<int64_t>;
using Code = absl::StatusCode;
constexpr uint64_t kTheirs = 11, kOurs = 22;
constexpr int64_t kPageSize = 16;  // Of SmallLayout().

// first, first + 1, ...
Tokens Count(int32_t first, int64_t count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

class LookupBuffers : public testing::Test {
 protected:
  static std::unique_ptr<LookupProducer> Producer(const std::shared_ptr<KvPool>& pool,
                                                  int64_t reply_lease_ms = 1000) {
    LookupProducer::Options options = ProducerOptions(pool);
    options.reply_lease_ms = reply_lease_ms;
    return Must(LookupProducer::Create(options));
  }
  std::unique_ptr<LookupConsumer> Consumer(std::vector<std::string> producers) const {
    return Must(LookupConsumer::Create(ConsumerOptions(pool_, std::move(producers))));
  }
  std::unique_ptr<LookupConsumer> Consumer() const { return Consumer({producer_->address()}); }

  uint64_t Insert(const Tokens& tokens, const Pages& pages) const {
    return Must(producer_->Insert(tokens, std::nullopt, pages, Soon()));
  }
  // Waits for the end.
  static absl::Status Take(LookupConsumer& consumer, LookupConsumer::Request request,
                           LookupResult* result = nullptr) {
    const auto handle = Must(consumer.DropSelect(std::move(request)));
    absl::Status status = handle->Wait(Soon());
    if (result != nullptr) *result = handle->result();
    return status;
  }
  // The producer's entries that are gone, in time.
  static std::vector<GoneEntry> Gone(LookupProducer& producer, size_t count) {
    std::vector<GoneEntry> gone;
    WaitFor(
        [&] {
          for (const GoneEntry& entry : producer.TakeGone()) gone.push_back(entry);
          return gone.size() >= count;
        },
        Soon());
    return gone;
  }

  const std::shared_ptr<KvPool> their_pool_ = MakePatternPool(SmallLayout(), 16, kTheirs);
  const std::shared_ptr<KvPool> pool_ = MakePatternPool(SmallLayout(), 16, kOurs);
  std::unique_ptr<LookupProducer> producer_ = Producer(their_pool_);
};

TEST_F(LookupBuffers, AnEntryMovesFromPagesToPages) {
  const uint64_t entry = Insert(Count(5, 40), {3, 9, 4});
  const auto consumer = Consumer();
  LookupResult result;
  ASSERT_TRUE(IsOk(Take(*consumer, Lookup(Count(5, 50), {7, 1, 2, 6}), &result)));
  EXPECT_EQ(result.tokens, Count(5, 40));
  EXPECT_EQ(result.num_matched, 40);
  EXPECT_EQ(result.pages, (Pages{7, 1, 2}));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{7, 1, 2}, kTheirs, Pages{3, 9, 4}));
  EXPECT_EQ(Gone(*producer_, 1), (std::vector<GoneEntry>{{entry, true}}));
  EXPECT_EQ(producer_->num_entries() + producer_->bytes(), 0);
  EXPECT_TRUE(Fails(Take(*consumer, Lookup(Count(5, 40), {0}, 50)), Code::kDeadlineExceeded,
                    "no matching entry came in time"));
  EXPECT_TRUE(WaitFor([&] { return producer_->num_waiting() == 0; }, Soon()));
}

// Whether what is missing was never given, or is where nobody could ask for it.
TEST_F(LookupBuffers, ADeadlineSaysWhichProducersWereNotReached) {
  const std::string gone = Producer(their_pool_)->address();
  const auto consumer = Consumer({producer_->address(), gone});
  const absl::Status late = Take(*consumer, Lookup(Count(5, 40), {0}, 2000));
  EXPECT_TRUE(Fails(late, Code::kDeadlineExceeded, "no matching entry came in time", gone));
  EXPECT_FALSE(absl::StrContains(late.message(), producer_->address())) << late;
}

// A producer that lets nobody wait for so long says so, and is asked again.
TEST_F(LookupBuffers, ALookupOutlastsWhatItsProducerAllows) {
  LookupProducer::Options options = ProducerOptions(their_pool_);
  options.config.fetch_timeout_ms = options.config.max_fetch_timeout_ms = 50;
  const auto producer = Must(LookupProducer::Create(options));
  const auto consumer = Consumer({producer->address()});
  const auto lookup = Must(consumer->DropSelect(Lookup(Count(5, 4), {0})));
  ASSERT_TRUE(WaitFor([&] { return Metric(*producer, "calls_served") >= 3; }, Soon()));
  ASSERT_TRUE(producer->Insert(Count(5, 4), std::nullopt, Pages{3}, Soon()).ok());
  EXPECT_TRUE(IsOk(lookup->Wait(Soon())));
}

TEST_F(LookupBuffers, ALookupWaitsForItsEntryAndNobodyElseDoes) {
  const auto consumer = Consumer();
  const auto first = Must(consumer->DropSelect(Lookup(Count(100, 20), {0, 1})));
  const auto any = Must(consumer->DropSelect(Lookup(std::nullopt, {2, 3})));
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 2; }, Soon()));
  Insert(Count(7, 3), {5});
  ASSERT_TRUE(IsOk(any->Wait(Soon())));
  EXPECT_EQ(any->result().tokens, Count(7, 3));
  EXPECT_FALSE(first->done());
  EXPECT_TRUE(Fails(first->status(), Code::kUnavailable, "under way"));
  Insert(Count(100, 20), {8, 9});
  ASSERT_TRUE(IsOk(first->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{2, 0, 1}, kTheirs, Pages{5, 8, 9}));
}

TEST_F(LookupBuffers, WithoutTokensTheOldestOfAProducerComes) {
  const auto consumer = Consumer();
  for (const int32_t n : {5, 3, 4}) Insert({n}, {n});
  for (const int32_t n : {5, 3, 4}) {
    LookupResult result;
    ASSERT_TRUE(IsOk(Take(*consumer, Lookup(std::nullopt, {n}), &result)));
    EXPECT_EQ(result.tokens, Tokens{n});
  }
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{3, 4, 5}, kTheirs, Pages{3, 4, 5}));
}

// Only what the query asked for is moved; the rest of the entry is gone with it.
TEST_F(LookupBuffers, ALongerEntryMovesInPart) {
  Insert(Count(1, 60), {0, 1, 2, 3});
  const auto consumer = Consumer();
  LookupResult result;
  ASSERT_TRUE(IsOk(Take(*consumer, Lookup(Count(1, 17), {9, 8}), &result)));
  EXPECT_EQ(result.num_matched, 17);
  EXPECT_EQ(result.tokens.size(), 60);
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{9, 8}, kTheirs, Pages{0, 1}));
  EXPECT_EQ(Gone(*producer_, 1).size(), 1);
}

TEST_F(LookupBuffers, HiddenStatesTravelWithTheEntry) {
  std::vector<std::byte> hidden(10001);
  PatternBytes(5, 0, 0, hidden);
  ASSERT_TRUE(IsOk(producer_->Insert(Count(1, 20), {}, Pages{3, 4}, Soon(), hidden)));
  const auto consumer = Consumer();
  LookupResult result;
  EXPECT_TRUE(Fails(Take(*consumer, Lookup(Count(1, 20), {0}), &result), Code::kResourceExhausted));
  ASSERT_TRUE(IsOk(Take(*consumer, Lookup(Count(1, 2), {0}), &result)));
  ASSERT_EQ(result.hidden_bytes, 10001);
  EXPECT_TRUE(std::equal(hidden.begin(), hidden.end(), result.hidden.get()));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{0}, kTheirs, Pages{3}));
  Insert({1}, {1});
  ASSERT_TRUE(IsOk(Take(*consumer, Lookup(Tokens{1}, {1}), &result)));
  EXPECT_EQ(result.hidden, nullptr);
  EXPECT_EQ(result.hidden_bytes, 0);
}

TEST_F(LookupBuffers, RoiOnBothSides) {
  const Tokens tokens = {1, 2, 3, 4, 5, 6};
  const std::vector<bool> odd = {true, false, true, false, true, false};
  ASSERT_TRUE(IsOk(producer_->Insert(tokens, odd, Pages{4}, Soon())));
  const auto consumer = Consumer();
  LookupConsumer::Request request = Lookup(Tokens{9, 1, 3, 9, 5}, {0});
  request.roi = std::vector<bool>{false, true, true, false, true};
  LookupResult result;
  ASSERT_TRUE(IsOk(Take(*consumer, request, &result)));
  EXPECT_EQ(result.tokens, (Tokens{1, 3, 5}));
  EXPECT_EQ(result.num_matched, 3);
}

// vLLM's buffer compared with allclose, which takes neighbours of this size for equal.
TEST_F(LookupBuffers, NeighbouringTokenIdsAreDifferent) {
  for (int32_t n = 0; n < 8; ++n) Insert({150000 + n, 1}, {n});
  const auto consumer = Consumer();
  for (const int32_t n : {6, 0, 3}) {
    LookupResult result;
    ASSERT_TRUE(IsOk(Take(*consumer, Lookup(Tokens{150000 + n, 1}, {n}), &result)));
    EXPECT_EQ(result.tokens[0], 150000 + n);
  }
  EXPECT_TRUE(Fails(Take(*consumer, Lookup(Tokens{150006, 1}, {6}, 50)), Code::kDeadlineExceeded));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{6, 0, 3}, kTheirs, Pages{6, 0, 3}));
}

// The reference's deadlock: the buffer is full, and what is asked for waits for room.
TEST_F(LookupBuffers, AFullBufferStillServes) {
  LookupProducer::Options options = ProducerOptions(their_pool_);
  options.max_bytes = their_pool_->layout().page_bytes();
  producer_ = Must(LookupProducer::Create(options));
  const auto consumer = Consumer();
  const auto waiting = Must(consumer->DropSelect(Lookup(Tokens{2}, {2})));
  Insert({1}, {1});
  Insert({2}, {2});  // Straight to who waits for it.
  ASSERT_TRUE(IsOk(waiting->Wait(Soon())));
  std::thread inserting([&] { Insert({3}, {3}); });
  ASSERT_TRUE(WaitFor([&] { return producer_->num_entries() == 2; }, Soon()));
  EXPECT_TRUE(IsOk(Take(*consumer, Lookup(Tokens{3}, {3}))));
  inserting.join();
  EXPECT_TRUE(Fails(producer_->Insert(Tokens{4}, std::nullopt, Pages{4}, DeadlineInMs(10)),
                    Code::kDeadlineExceeded, "no room"));
  EXPECT_TRUE(IsOk(Take(*consumer, Lookup(Tokens{1}, {1}))));
}

TEST_F(LookupBuffers, TwoConsumersAskForTheSameEntry) {
  const auto one = Consumer(), other = Consumer();
  const auto first = Must(one->DropSelect(Lookup(Tokens{1, 2}, {1})));
  const auto second = Must(other->DropSelect(Lookup(Tokens{1, 2}, {2})));
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 2; }, Soon()));
  Insert({1, 2, 3}, {9});
  ASSERT_TRUE(WaitFor([&] { return first->done() || second->done(); }, Soon()));
  EXPECT_NE(first->done(), second->done());
  EXPECT_EQ(producer_->num_waiting(), 1);
  Insert({1, 2, 3}, {9});
  EXPECT_TRUE(IsOk(first->Wait(Soon())));
  EXPECT_TRUE(IsOk(second->Wait(Soon())));
}

TEST_F(LookupBuffers, TheFirstOfSeveralProducersServes) {
  const auto other_pool = MakePatternPool(SmallLayout(), 16, 33);
  const auto other = Producer(other_pool);
  const auto consumer = Consumer({producer_->address(), other->address()});
  // Both have it: one keeps it.
  Insert({1, 2}, {1});
  ASSERT_TRUE(IsOk(other->Insert(Tokens{1, 2}, std::nullopt, Pages{2}, Soon())));
  ASSERT_TRUE(IsOk(Take(*consumer, Lookup(Tokens{1, 2}, {4}))));
  EXPECT_TRUE(WaitFor(
      [&] {
        return producer_->num_entries() + other->num_entries() == 1 &&
               producer_->num_waiting() + other->num_waiting() == 0;
      },
      Soon()));
  ASSERT_TRUE(IsOk(Take(*consumer, Lookup(Tokens{1, 2}, {5}))));
  EXPECT_TRUE(WaitFor([&] { return producer_->bytes() + other->bytes() == 0; }, Soon()));
  // The other one gets it while the first is asked.
  const auto handle = Must(consumer->DropSelect(Lookup(Tokens{7}, {6})));
  ASSERT_TRUE(
      WaitFor([&] { return producer_->num_waiting() == 1 && other->num_waiting() == 1; }, Soon()));
  ASSERT_TRUE(IsOk(other->Insert(Tokens{7}, std::nullopt, Pages{3}, Soon())));
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsPages(*pool_, Pages{6}, 33, Pages{3}, 0, 4));
  EXPECT_TRUE(WaitFor([&] { return producer_->num_waiting() == 0; }, Soon()));
}

// More entries are found at once than the producer lets one consumer fetch at once.
TEST_F(LookupBuffers, FetchesWaitForTheirTurn) {
  LookupProducer::Options options = ProducerOptions(their_pool_);
  options.config.max_fetches_per_peer = 1;
  producer_ = Must(LookupProducer::Create(options));
  const auto consumer = Consumer();
  std::vector<std::shared_ptr<LookupHandle>> handles;
  Pages pages;
  for (int32_t n = 0; n < 12; ++n) {
    Insert({n, 7}, {n});
    handles.push_back(Must(consumer->DropSelect(Lookup(Tokens{n}, {n}))));
    pages.push_back(n);
  }
  for (const auto& handle : handles) EXPECT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, pages, kTheirs, pages));
}

TEST_F(LookupBuffers, TooFewPagesAndTheEntryComesBack) {
  Insert(Count(1, 40), {0, 1, 2});
  const auto consumer = Consumer();
  EXPECT_TRUE(Fails(Take(*consumer, Lookup(Count(1, 33), {0, 1})), Code::kResourceExhausted,
                    "needs 3 pages but 2"));
  LookupConsumer::Request request = Lookup(std::nullopt, {});
  request.allocate = [](int64_t) { return absl::ResourceExhaustedError("no pages left"); };
  EXPECT_TRUE(Fails(Take(*consumer, request), Code::kResourceExhausted, "no pages left"));
  EXPECT_TRUE(IsUntouched(*pool_, kOurs));
  request.allocate = [](int64_t count) {
    Pages pages(static_cast<size_t>(count));
    std::iota(pages.begin(), pages.end(), 4);
    return pages;
  };
  LookupResult result;
  EXPECT_TRUE(IsOk(Take(*consumer, request, &result)));
  EXPECT_EQ(result.pages, (Pages{4, 5, 6}));
  EXPECT_EQ(Gone(*producer_, 1).size(), 1);
}

TEST_F(LookupBuffers, ACancelledLookupTakesNothing) {
  const auto consumer = Consumer();
  std::promise<void> done;
  LookupConsumer::Request request = Lookup(Tokens{1}, {1});
  request.on_done = [&] { done.set_value(); };
  const auto handle = Must(consumer->DropSelect(request));
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 1; }, Soon()));
  handle->Cancel();
  done.get_future().wait();
  EXPECT_TRUE(Fails(handle->status(), Code::kCancelled));
  handle->Cancel();
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 0; }, Soon()));
  Insert({1}, {1});
  EXPECT_EQ(producer_->num_entries(), 1);
  EXPECT_TRUE(IsUntouched(*pool_, kOurs));
}

// Cancelled at any moment: then it was delivered, or it is there again.
TEST_F(LookupBuffers, CancelledAnywhereTheEntryIsDeliveredOrComesBack) {
  const auto consumer = Consumer();
  int64_t delivered = 0;
  for (int i = 0; i < 200; ++i) {
    const auto handle = Must(consumer->DropSelect(Lookup(Tokens{i}, {i % 16})));
    std::thread canceller([&] {
      for (int spin = 0; spin < 50 * (i % 40); ++spin) handle->done();
      handle->Cancel();
    });
    Insert({i}, {0});
    canceller.join();
    const absl::Status status = handle->Wait(Soon());
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
    if (status.ok()) {
      ++delivered;
    } else {
      EXPECT_TRUE(IsOk(Take(*consumer, Lookup(Tokens{i}, {i % 16}))));
    }
  }
  EXPECT_EQ(Gone(*producer_, 200).size(), 200);
  RecordProperty("delivered_at_once", std::to_string(delivered));
}

// A consumer that leaves with an entry on its way: another one gets it.
TEST_F(LookupBuffers, AConsumerThatLeavesLosesNothing) {
  Insert({1, 2}, {3});
  auto leaving = Consumer();
  std::promise<void> found;
  LookupConsumer::Request request = Lookup(Tokens{1}, {});
  request.allocate = [&](int64_t) -> absl::StatusOr<Pages> {
    found.set_value();
    return absl::AbortedError("leaving");
  };
  const auto handle = Must(leaving->DropSelect(request));
  found.get_future().wait();
  leaving.reset();
  EXPECT_TRUE(handle->done());
  const auto consumer = Consumer();
  EXPECT_TRUE(IsOk(Take(*consumer, Lookup(Tokens{1}, {5}))));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{5}, kTheirs, Pages{3}));
}

TEST_F(LookupBuffers, AProducerThatStartsLaterIsFound) {
  const std::string address = producer_->address();
  producer_.reset();
  const auto consumer = Consumer({address});
  const auto handle = Must(consumer->DropSelect(Lookup(Tokens{1}, {5})));
  EXPECT_TRUE(Fails(Take(*consumer, Lookup(Tokens{1}, {6}, 100)), Code::kDeadlineExceeded));
  LookupProducer::Options options = ProducerOptions(their_pool_);
  options.config.listen_port = PortOf(address);
  producer_ = Must(LookupProducer::Create(options));
  Insert({1}, {3});
  EXPECT_TRUE(IsOk(handle->Wait(Soon())));
  // And one that restarts while it is asked.
  const auto again = Must(consumer->DropSelect(Lookup(Tokens{2}, {6})));
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 1; }, Soon()));
  producer_.reset();
  producer_ = Must(LookupProducer::Create(options));
  Insert({2}, {4});
  EXPECT_TRUE(IsOk(again->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{5, 6}, kTheirs, Pages{3, 4}));
}

TEST_F(LookupBuffers, ClosingAnswersEverybody) {
  const auto consumer = Consumer();
  LookupProducer::Options options = ProducerOptions(their_pool_);
  options.max_bytes = their_pool_->layout().page_bytes();
  producer_ = Must(LookupProducer::Create(options));
  const uint64_t kept = Insert({1}, {1});
  absl::StatusOr<uint64_t> inserted;
  std::thread inserting([&] { inserted = producer_->Insert(Tokens{2}, {}, Pages{2}, Soon()); });
  ASSERT_TRUE(WaitFor([&] { return producer_->num_entries() == 2; }, Soon()));
  producer_->Close();
  inserting.join();
  EXPECT_TRUE(Fails(inserted, Code::kCancelled, "closed"));
  EXPECT_EQ(producer_->TakeGone(), (std::vector<GoneEntry>{{kept, false}}));
  EXPECT_TRUE(Fails(producer_->Insert(Tokens{2}, {}, Pages{2}, Soon()), Code::kCancelled));
  producer_->Close();
}

TEST_F(LookupBuffers, AConsumerThatIsDestroyedEndsItsLookups) {
  auto consumer = Consumer();
  const auto handle = Must(consumer->DropSelect(Lookup(Tokens{1}, {5})));
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 1; }, Soon()));
  consumer.reset();
  EXPECT_TRUE(Fails(handle->status(), Code::kCancelled, "closed"));
  handle->Cancel();
  EXPECT_TRUE(WaitFor([&] { return producer_->num_waiting() == 0; }, Soon()));
}

// ---------------------------------------------------------------- refusals

TEST_F(LookupBuffers, AnotherPartitionIsRefused) {
  LookupConsumer::Options options = ConsumerOptions(pool_, {producer_->address()});
  options.partition = 3;
  const auto consumer = Must(LookupConsumer::Create(options));
  EXPECT_TRUE(Fails(Take(*consumer, Lookup(Tokens{1}, {1})), Code::kFailedPrecondition,
                    "partition: 0 here, 3 there", producer_->address()));
}

TEST_F(LookupBuffers, AnotherModelIsRefused) {
  LookupConsumer::Options options = ConsumerOptions(pool_, {producer_->address()});
  options.model = "other/model";
  const auto consumer = Must(LookupConsumer::Create(options));
  EXPECT_TRUE(Fails(Take(*consumer, Lookup(Tokens{1}, {1})), Code::kFailedPrecondition,
                    "test/model", "other/model"));
}

TEST_F(LookupBuffers, WhatIsNoProducerRefuses) {
  const auto prefill = MakePrefill(their_pool_, SmallChunks());
  const auto consumer = Consumer({prefill->address()});
  EXPECT_TRUE(Fails(Take(*consumer, Lookup(Tokens{1}, {1})), Code::kUnimplemented));
}

TEST_F(LookupBuffers, BadInsertsChangeNothing) {
  const auto insert = [&](const Tokens& tokens, const std::optional<std::vector<bool>>& roi,
                          const Pages& pages) {
    return producer_->Insert(tokens, roi, pages, Soon());
  };
  EXPECT_TRUE(Fails(insert({}, {}, {}), Code::kInvalidArgument, "0 tokens"));
  EXPECT_TRUE(Fails(insert({1, 2}, std::vector<bool>{true}, {1}), Code::kInvalidArgument,
                    "roi has 1", "2 tokens"));
  EXPECT_TRUE(Fails(insert({1}, std::vector<bool>{false}, {}), Code::kInvalidArgument, "0 tokens"));
  EXPECT_TRUE(Fails(insert(Count(0, kMaxLookupTokens + 1), {}, {}), Code::kInvalidArgument,
                    "262145", "262144"));
  EXPECT_TRUE(Fails(insert(Count(0, 17), {}, {1}), Code::kInvalidArgument, "1 pages for 17 tokens",
                    "fill 2"));
  EXPECT_TRUE(Fails(insert({1}, {}, {1, 2}), Code::kInvalidArgument, "2 pages for 1"));
  EXPECT_TRUE(Fails(insert({1}, {}, {16}), Code::kOutOfRange, "16"));
  EXPECT_TRUE(Fails(insert({1}, {}, {-1}), Code::kInvalidArgument));
  EXPECT_EQ(producer_->num_entries() + producer_->bytes(), 0);
  EXPECT_TRUE(producer_->TakeGone().empty());
}

TEST_F(LookupBuffers, AnOversizeItemIsRefusedAtOnce) {
  LookupProducer::Options options = ProducerOptions(their_pool_);
  options.max_bytes = their_pool_->layout().page_bytes();
  producer_ = Must(LookupProducer::Create(options));
  EXPECT_TRUE(Fails(producer_->Insert(Count(0, kPageSize + 1), {}, Pages{1, 2}, Soon()),
                    Code::kResourceExhausted, "can never fit", std::to_string(options.max_bytes)));
  EXPECT_TRUE(Fails(producer_->Insert(Tokens{1}, {}, Pages{1}, Soon(), std::vector<std::byte>(1)),
                    Code::kResourceExhausted, std::to_string(options.max_bytes + 1)));
}

// Else the list of them would grow without end.
TEST_F(LookupBuffers, WhoDoesNotTakeWhatIsGoneInsertsNoMore) {
  LookupProducer::Options options = ProducerOptions(their_pool_);
  options.config.max_leases = 2;
  producer_ = Must(LookupProducer::Create(options));
  const auto consumer = Consumer();
  for (int32_t i = 0; i < 2; ++i) {
    Insert({i}, {i});
    EXPECT_TRUE(IsOk(Take(*consumer, Lookup(Tokens{i}, {i}))));
  }
  absl::Status refused;
  EXPECT_TRUE(WaitFor(
      [&] {
        refused = producer_->Insert(Tokens{7}, {}, Pages{7}, Clock::now()).status();
        return absl::IsResourceExhausted(refused);
      },
      Soon()));
  EXPECT_TRUE(Fails(refused, Code::kResourceExhausted, "max_leases (2)", "have not been taken"));
  EXPECT_EQ(producer_->TakeGone().size(), 2u);
  EXPECT_FALSE(
      absl::IsResourceExhausted(producer_->Insert(Tokens{8}, {}, Pages{8}, Clock::now()).status()));
}

TEST_F(LookupBuffers, BadOptions) {
  const auto producer = [&](const auto& change) {
    LookupProducer::Options options = ProducerOptions(their_pool_);
    change(options);
    return LookupProducer::Create(options).status();
  };
  EXPECT_TRUE(
      Fails(producer([](auto& o) { o.pool = nullptr; }), Code::kInvalidArgument, "no pool"));
  EXPECT_TRUE(Fails(producer([](auto& o) {
                      const auto memory = std::make_shared<GuardedMemory>();
                      o.pool = Must(KvPool::CreateIn(o.pool->layout(), 8, memory));
                      o.config.network_path = "direct";
                    }),
                    Code::kFailedPrecondition, "network_path is 'direct'",
                    "lies in guarded memory"));
  EXPECT_TRUE(
      Fails(producer([](auto& o) { o.max_bytes = 0; }), Code::kInvalidArgument, "max_bytes is 0"));
  EXPECT_TRUE(Fails(producer([](auto& o) { o.partition = -1; }), Code::kInvalidArgument,
                    "partition is -1"));
  EXPECT_TRUE(Fails(producer([](auto& o) { o.reply_lease_ms = 0; }), Code::kInvalidArgument,
                    "reply_lease_ms is 0"));
  EXPECT_TRUE(Fails(producer([](auto& o) { o.copy_pages = 17; }), Code::kInvalidArgument,
                    "copy_pages is 17", "16"));
  const auto consumer = [&](std::vector<std::string> producers) {
    return LookupConsumer::Create(ConsumerOptions(pool_, std::move(producers))).status();
  };
  EXPECT_TRUE(Fails(consumer({}), Code::kInvalidArgument, "no producers"));
  EXPECT_TRUE(Fails(consumer({"nonsense"}), Code::kInvalidArgument));
  EXPECT_TRUE(Fails(consumer({"tcp://10.9.8.7:1"}), Code::kPermissionDenied));
  LookupConsumer::Options of_rank = ConsumerOptions(pool_, {producer_->address()});
  for (const int64_t partition : {int64_t{-1}, kMaxLookupPartition + 1}) {
    of_rank.partition = partition;
    EXPECT_TRUE(Fails(LookupConsumer::Create(of_rank), Code::kInvalidArgument,
                      "partition is " + std::to_string(partition)));
  }
}

TEST_F(LookupBuffers, BadRequestsStartNothing) {
  const auto consumer = Consumer();
  const auto select = [&](LookupConsumer::Request request) {
    return consumer->DropSelect(std::move(request));
  };
  EXPECT_TRUE(Fails(select(Lookup(Tokens{}, {1})), Code::kInvalidArgument, "0 tokens"));
  EXPECT_TRUE(
      Fails(select(Lookup(Count(0, kMaxLookupTokens + 1), {1})), Code::kInvalidArgument, "262145"));
  EXPECT_TRUE(Fails(select(Lookup(Tokens{1}, {16})), Code::kOutOfRange, "16"));
  EXPECT_TRUE(
      Fails(select(Lookup(Tokens{1}, {1}, 600001)), Code::kInvalidArgument, "600001", "600000"));
  LookupConsumer::Request request = Lookup(std::nullopt, {1});
  request.roi = std::vector<bool>{true};
  EXPECT_TRUE(Fails(select(request), Code::kInvalidArgument, "roi", "without tokens"));
  request.tokens = Tokens{1, 2};
  EXPECT_TRUE(Fails(select(request), Code::kInvalidArgument, "roi has 1", "2 tokens"));
  EXPECT_EQ(Metric(*consumer, "calls_started"), 0);
}

// What a hostile or broken consumer could ask.
TEST_F(LookupBuffers, BadCallsAreRefused) {
  Node::Options options;
  options.config = SmallChunks();
  options.model = kTestModel;
  options.pool = pool_;
  const auto node = Must(Node::Start(std::move(options)));
  const auto ask = [&](const std::string& function, Fields args) {
    return BeginCall(*node, producer_->address(), function, std::move(args)).get();
  };
  const auto args = [] { return Fields().Set("lease", 5).Set("partition", 0); };
  EXPECT_TRUE(Fails(ask("cook", {}), Code::kUnimplemented, "'cook'"));
  EXPECT_TRUE(Fails(ask("lookup", {}), Code::kInvalidArgument, "lease"));
  EXPECT_TRUE(Fails(ask("lookup", args().Set("lease", 0)), Code::kInvalidArgument, "lease is 0"));
  EXPECT_TRUE(Fails(ask("lookup", Fields().Set("lease", 5)), Code::kInvalidArgument, "partition"));
  EXPECT_TRUE(Fails(ask("lookup", args().Set("tokens", "abc")), Code::kInvalidArgument, "3 bytes"));
  EXPECT_TRUE(Fails(ask("lookup", args().Set("tokens", "")), Code::kInvalidArgument, "0 tokens"));
  EXPECT_TRUE(Fails(ask("lookup", args().Set("tokens", std::string(4 * kMaxLookupTokens + 4, 'x'))),
                    Code::kInvalidArgument, "262145"));
  EXPECT_TRUE(IsOk(ask("lookup_back", Fields().Set("lease", 77))));
  EXPECT_EQ(producer_->num_waiting(), 0);
  // A lease that is in use: the entry is still there for somebody else.
  Insert({1}, {1});
  Insert({2}, {2});
  EXPECT_TRUE(IsOk(ask("lookup", args())));
  EXPECT_TRUE(Fails(ask("lookup", args()), Code::kAlreadyExists));
  EXPECT_EQ(producer_->num_entries(), 1);
  // And nobody fetches the first: it comes back.
  EXPECT_TRUE(WaitFor([&] { return producer_->num_entries() == 2; }, Soon()));
}

// ---------------------------------------------------------------- without memory

TEST_F(LookupBuffers, AnInsertThatFindsNoMemoryChangesNothing) {
  CallWithoutMemory(
      [&] { EXPECT_TRUE(producer_->Insert(Tokens{1}, std::nullopt, Pages{3}, Soon()).ok()); },
      [&] {
        EXPECT_EQ(producer_->num_entries(), 0);
        EXPECT_TRUE(producer_->TakeGone().empty());
      });
  EXPECT_TRUE(IsOk(Take(*Consumer(), Lookup(Tokens{1}, {5}))));
}

TEST_F(LookupBuffers, ACopyThatFindsNoMemoryKeepsNoPages) {
  LookupProducer::Options options = ProducerOptions(their_pool_);
  options.copy_pages = 1;
  producer_ = Must(LookupProducer::Create(options));
  const std::vector<std::byte> tensor(
      static_cast<size_t>(Must(KvTensorBytes(their_pool_->layout(), 1))));
  const Deadline at_once = Clock::now();
  CallWithoutMemory(
      [&] {
        EXPECT_TRUE(
            producer_->InsertTensors(Tokens{1}, std::nullopt, tensor, tensor, at_once).ok());
      },
      [&] { EXPECT_EQ(producer_->num_entries(), 0); });
}

// Nor where these lie here and there, in no order: all are given back without memory, too.
TEST_F(LookupBuffers, ACopyIntoManyPiecesThatFindsNoMemoryKeepsNoPages) {
  constexpr int32_t kPages = 40;
  LookupProducer::Options options = ProducerOptions(MakePatternPool(SmallLayout(), kPages, 5));
  options.copy_pages = kPages;
  producer_ = Must(LookupProducer::Create(options));
  const auto insert = [&](const Tokens& tokens, const std::vector<std::byte>& tensor) {
    return producer_->InsertTensors(tokens, std::nullopt, tensor, tensor, Soon());
  };
  const auto tensor_of = [](int64_t num_tokens) {
    return std::vector<std::byte>(
        static_cast<size_t>(Must(KvTensorBytes(SmallLayout(), num_tokens))));
  };
  for (int32_t i = 0; i < kPages; ++i) ASSERT_TRUE(IsOk(insert({i}, tensor_of(1))));
  const auto consumer = Consumer();
  for (int32_t i = kPages - 1; i > 0; i -= 2)
    ASSERT_TRUE(IsOk(Take(*consumer, Lookup({{i}}, {5}))));
  const Tokens tokens = Count(100, 12 * SmallLayout().page_size);
  const std::vector<std::byte> tensor = tensor_of(std::ssize(tokens));
  CallWithoutMemory([&] { EXPECT_TRUE(insert(tokens, tensor).ok()); },
                    [&] { EXPECT_EQ(producer_->num_entries(), kPages / 2); });
  EXPECT_EQ(producer_->num_entries(), kPages / 2 + 1);
}

// Not even where one producer has been asked by then.
TEST_F(LookupBuffers, ALookupThatFindsNoMemoryTakesNothing) {
  producer_ = Producer(their_pool_, 200);  // Each that finds none is waited for.
  const auto other = Producer(their_pool_);
  auto consumer = Consumer({producer_->address(), other->address()});
  EXPECT_TRUE(Fails(Take(*consumer, Lookup(Tokens{9}, {9}, 50)), Code::kDeadlineExceeded));
  Insert({1}, {3});
  std::shared_ptr<LookupHandle> handle;
  LookupConsumer::Request request = Lookup(Tokens{1}, {5});
  std::atomic<int> num_done = 0;
  request.on_done = [&] { ++num_done; };
  CallWithoutMemory([&] { handle = *consumer->DropSelect(request); }, [] {});
  EXPECT_TRUE(IsOk(handle->Wait(Soon())));
  consumer.reset();
  EXPECT_EQ(num_done, 1);
}

// Long questions that have waited for the producer leave no more at once than it takes.
TEST_F(LookupBuffers, ManyLongLookupsWaitForAProducerThatIsYetToListen) {
  LookupProducer::Options options = ProducerOptions(their_pool_);
  const std::string address = producer_->address();
  options.config.listen_port = PortOf(address);
  producer_.reset();  // Nobody else is given its port so soon.
  const auto consumer = Consumer({address});
  std::vector<std::shared_ptr<LookupHandle>> waiting;
  for (int i = 0; i < 900; ++i) {
    waiting.push_back(Must(consumer->DropSelect(Lookup(Tokens(12000, 1000000 + i), {0}, 60000))));
  }
  const auto short_one = Must(consumer->DropSelect(Lookup(Count(5, 40), {7, 1, 2})));
  producer_ = Must(LookupProducer::Create(options));
  Insert(Count(5, 40), {3, 9, 4});
  EXPECT_TRUE(IsOk(short_one->Wait(Soon())));
  EXPECT_EQ(Metric(*consumer, "peers_lost"), 0);
  EXPECT_EQ(Metric(*consumer, "calls_failed"), 0);
  EXPECT_TRUE(WaitFor([&] { return producer_->num_waiting() == 900; }, Soon()));
}

}  // namespace
}  // namespace kvferry
