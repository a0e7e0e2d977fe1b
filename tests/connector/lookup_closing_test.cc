// Lookup buffers that are closed: by several threads, and while callbacks ask for more.

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <optional>
#include <thread>

#include "tests/support/control_relay.h"
#include "tests/support/failing_new.h"
#include "tests/support/lookup_buffers.h"
#include "transport/command_queue.h"

namespace kvferry {
namespace {

using Tokens = std::vector<int32_t>;
using Pages = std::vector<int64_t>;
using Code = absl::StatusCode;
using Heard = ControlRelay::Heard;
using Verdict = ControlRelay::Verdict;
constexpr uint64_t kTheirs = 11, kOurs = 22;
const Tokens kTokens = {1, 2, 3};

class LookupClosing : public testing::Test {
 protected:
  std::unique_ptr<LookupConsumer> Consumer(const std::string& producer) const {
    return Must(LookupConsumer::Create(ConsumerOptions(pool_, {producer})));
  }
  // What a callback of the consumer asks for while it is closed.
  void AskAgain() {
    ++num_done_;
    LookupConsumer::Request request = Lookup(kTokens, {5});
    request.on_done = [this] { AskAgain(); };
    asked_again_ = used_->DropSelect(std::move(request)).status();
  }
  std::shared_ptr<LookupHandle> AskWhoAsksAgain() {
    LookupConsumer::Request request = Lookup(kTokens, {7});
    request.on_done = [this] { AskAgain(); };
    return Must(used_->DropSelect(std::move(request)));
  }

  const std::shared_ptr<KvPool> their_pool_ = MakePatternPool(SmallLayout(), 16, kTheirs);
  const std::shared_ptr<KvPool> pool_ = MakePatternPool(SmallLayout(), 16, kOurs);
  std::unique_ptr<LookupProducer> producer_ =
      Must(LookupProducer::Create(ProducerOptions(their_pool_)));
  int num_done_ = 0;
  absl::Status asked_again_;
  Latch reached_;
  // A judge uses what stands above.
  std::optional<ControlRelay> relay_;
  std::unique_ptr<LookupConsumer> consumer_;
  LookupConsumer* used_ = nullptr;  // The same, also while it is being destroyed.
};

// ---------------------------------------------------------------- consumers

// How far a lookup has come.
enum class At { kAsking, kFetching, kTaking };

class LookupClosingAt : public LookupClosing, public testing::WithParamInterface<At> {
 protected:
  static bool IsReached(const Heard& heard) {
    if (GetParam() == At::kAsking) return heard.function() == kLookupFunction;
    if (GetParam() == At::kTaking) return heard.function() == kLookupTakeFunction;
    return std::holds_alternative<FetchMsg>(heard.message.body);
  }
};

TEST_P(LookupClosingAt, WhoAsksAgainIsRefused) {
  Must(producer_->Insert(kTokens, std::nullopt, Pages{3}, Soon()));
  relay_.emplace(producer_->address(), [this](Heard& heard) {
    if (!IsReached(heard)) return Verdict::kPass;
    reached_.Open();
    return Verdict::kDrop;
  });
  consumer_ = Consumer(relay_->address());
  used_ = consumer_.get();
  const auto lookup = AskWhoAsksAgain();
  const auto other = Must(used_->DropSelect(Lookup(Tokens{9}, {9})));
  ASSERT_TRUE(reached_.Wait(Soon()));
  consumer_.reset();
  EXPECT_TRUE(Fails(lookup->status(), Code::kCancelled));
  EXPECT_TRUE(Fails(other->status(), Code::kCancelled));
  EXPECT_TRUE(Fails(asked_again_, Code::kCancelled, "closed"));
  EXPECT_EQ(num_done_, 1);
}

INSTANTIATE_TEST_SUITE_P(All, LookupClosingAt,
                         testing::Values(At::kAsking, At::kFetching, At::kTaking));

TEST_F(LookupClosing, AnEntryIsFoundWhileTheConsumerCloses) {
  Must(producer_->Insert(kTokens, std::nullopt, Pages{3}, Soon()));
  consumer_ = Consumer(producer_->address());
  used_ = consumer_.get();
  LookupConsumer::Request request = Lookup(kTokens, {});
  request.allocate = [this](int64_t) -> absl::StatusOr<Pages> {
    reached_.Open();
    EXPECT_TRUE(WaitFor([this] { return used_->Metrics().empty(); }, Soon()));
    AskAgain();
    return Pages{7};
  };
  const auto lookup = Must(used_->DropSelect(std::move(request)));
  ASSERT_TRUE(reached_.Wait(Soon()));
  consumer_.reset();
  EXPECT_TRUE(Fails(lookup->status(), Code::kCancelled));
  EXPECT_TRUE(Fails(asked_again_, Code::kCancelled, "closed"));
  // And nothing is lost.
  EXPECT_TRUE(WaitFor([this] { return producer_->num_entries() == 1; }, Soon()));
}

TEST_F(LookupClosing, AClosedConsumerRefuses) {
  consumer_ = Consumer(producer_->address());
  consumer_->Close();
  EXPECT_TRUE(Fails(consumer_->DropSelect(Lookup(kTokens, {7})), Code::kCancelled, "closed"));
  EXPECT_TRUE(consumer_->Metrics().empty());
  consumer_->Close();
}

// It uses the consumer, perhaps.
TEST_F(LookupClosing, AConsumerIsThereUntilItsCallbacksAreThrough) {
  consumer_ = Consumer(producer_->address());
  std::atomic<bool> destroyed = false;
  LookupConsumer::Request request = Lookup(kTokens, {7});
  request.on_done = [&] {
    reached_.Open();
    EXPECT_FALSE(WaitFor([&] { return destroyed.load(); }, DeadlineInMs(500)));
  };
  const auto lookup = Must(consumer_->DropSelect(std::move(request)));
  std::thread cancelling([&] { lookup->Cancel(); });
  EXPECT_TRUE(reached_.Wait(Soon()));
  consumer_.reset();
  destroyed = true;
  cancelling.join();
}

// What a request holds may end other lookups when it goes.
TEST_F(LookupClosing, WhatARequestHoldsMayCallBack) {
  consumer_ = Consumer(producer_->address());
  const auto other = Must(consumer_->DropSelect(Lookup(Tokens{9}, {9})));
  LookupConsumer::Request request = Lookup(kTokens, {});
  request.allocate = [held = std::shared_ptr<void>(nullptr, [other](void*) { other->Cancel(); })](
                         int64_t) -> absl::StatusOr<Pages> { return Pages{7}; };
  const auto lookup = Must(consumer_->DropSelect(std::move(request)));
  auto cancelling = std::async(std::launch::async, [&] { lookup->Cancel(); });
  ASSERT_EQ(cancelling.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_TRUE(Fails(lookup->status(), Code::kCancelled));
  EXPECT_TRUE(Fails(other->status(), Code::kCancelled));
}

TEST_F(LookupClosing, WhatAllocateHoldsIsFreeWhenTheLookupIsDone) {
  Must(producer_->Insert(kTokens, std::nullopt, Pages{3}, Soon()));
  consumer_ = Consumer(producer_->address());
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> weak = held;
  std::atomic<int> freed = -1;
  LookupConsumer::Request request = Lookup(kTokens, {});
  request.allocate = [held = std::move(held)](int64_t) -> absl::StatusOr<Pages> {
    return absl::ResourceExhaustedError("none");
  };
  request.on_done = [&] { freed = weak.expired() ? 1 : 0; };
  const auto lookup = Must(consumer_->DropSelect(std::move(request)));
  EXPECT_TRUE(Fails(lookup->Wait(Soon()), Code::kResourceExhausted));
  EXPECT_TRUE(WaitFor([&] { return freed >= 0; }, Soon()));
  EXPECT_EQ(freed, 1);
}

TEST_F(LookupClosing, ACancelThatFindsNoMemoryCanBeMadeAgain) {
  consumer_ = Consumer(producer_->address());
  std::shared_ptr<LookupHandle> lookup = Must(consumer_->DropSelect(Lookup(kTokens, {7})));
  CallWithoutMemory([&] { lookup->Cancel(); },
                    [&] {
                      lookup->Cancel();
                      EXPECT_TRUE(Fails(lookup->Wait(Soon()), Code::kCancelled));
                      lookup = Must(consumer_->DropSelect(Lookup(kTokens, {7})));
                    });
  EXPECT_TRUE(Fails(lookup->Wait(Soon()), Code::kCancelled));
}

// Nor does a callback that finds none keep the consumer from closing.
TEST_F(LookupClosing, ACancelWhoseCallbackFindsNoMemoryIsNotWaitedFor) {
  consumer_ = Consumer(producer_->address());
  LookupConsumer::Request request = Lookup(kTokens, {7});
  request.on_done = [] { throw std::bad_alloc(); };
  const auto lookup = Must(consumer_->DropSelect(std::move(request)));
  EXPECT_THROW(lookup->Cancel(), std::bad_alloc);
  EXPECT_TRUE(Fails(lookup->Wait(Soon()), Code::kCancelled));
  auto closing = std::async(std::launch::async, [&] { consumer_->Close(); });
  ASSERT_EQ(closing.wait_for(std::chrono::seconds(20)), std::future_status::ready);
}

// Replies that find no room say nothing of their entries, which are leased by then.
TEST(LookupBursts, ManyLongEntriesAllCome) {
  const auto theirs = MakePatternPool(SmallLayout(), 1024, kTheirs);
  const auto ours = MakePatternPool(SmallLayout(), 16, kOurs);
  LookupProducer::Options options = ProducerOptions(theirs);
  options.max_bytes = int64_t{1} << 50;
  options.reply_lease_ms = 60000;  // Longer than any lookup waits.
  const auto producer = Must(LookupProducer::Create(options));
  Pages pages;
  for (int64_t i = 0; i < 1024; ++i) pages.push_back(i);
  constexpr int kEntries = 500;
  for (int i = 0; i < kEntries; ++i) {
    Must(producer->Insert(Tokens(16384, i + 1), std::nullopt, pages, Soon()));
  }
  const auto consumer = Must(LookupConsumer::Create(ConsumerOptions(ours, {producer->address()})));
  std::vector<std::shared_ptr<LookupHandle>> lookups;
  for (int i = 0; i < kEntries; ++i) {
    lookups.push_back(Must(consumer->DropSelect(Lookup(Tokens{i + 1}, {i % 16}, 30000))));
  }
  int failed = 0;
  std::string first;
  for (const auto& lookup : lookups) {
    const absl::Status status = lookup->Wait(Soon());
    if (!status.ok() && failed++ == 0) first = status.ToString();
  }
  EXPECT_EQ(failed, 0) << first;
}

// ---------------------------------------------------------------- producers

// Whoever hears that it is closed may use the pages again, and the address.
TEST_F(LookupClosing, ASecondThreadThatClosesWaitsForTheFirst) {
  LookupProducer::Options options = ProducerOptions(their_pool_);
  const std::string address = producer_->address();
  options.config.listen_port = PortOf(address);
  Must(producer_->Insert(kTokens, std::nullopt, Pages{3}, Soon()));
  consumer_ = Consumer(address);
  Latch go_on;
  LookupConsumer::Request request = Lookup(kTokens, {});
  // Nor does it answer the producer's goodbye meanwhile, which is waited for.
  request.allocate = [&](int64_t) -> absl::StatusOr<Pages> {
    reached_.Open();
    EXPECT_TRUE(go_on.Wait(Soon()));
    return Pages{7};
  };
  const auto lookup = Must(consumer_->DropSelect(std::move(request)));
  ASSERT_TRUE(reached_.Wait(Soon()));
  std::thread closing([&] { producer_->Close(); });
  const auto has_node = [&] { return producer_->Metrics().size() > 4; };
  EXPECT_TRUE(WaitFor([&] { return !has_node(); }, Soon()));
  producer_->Close();
  EXPECT_EQ(producer_->TakeGone().size(), 1);
  EXPECT_TRUE(IsOk(LookupProducer::Create(options).status()));
  go_on.Open();
  closing.join();
  consumer_ = nullptr;  // Its thread may still be in `go_on`.
}

TEST_F(LookupClosing, ManyCloseBesideThoseWhoInsert) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([this, i] {
      absl::Status status;
      while (status.ok()) {
        status = producer_->Insert(Tokens{i}, std::nullopt, Pages{i}, Soon()).status();
      }
      EXPECT_TRUE(Fails(status, Code::kCancelled, "closed"));
    });
  }
  ASSERT_TRUE(WaitFor([&] { return producer_->num_entries() > 16; }, Soon()));
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([this] {
      producer_->Close();
      EXPECT_EQ(producer_->num_entries(), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  producer_ = nullptr;
}

// They try again, so many that one of them is always under way.
TEST_F(LookupClosing, ClosingDoesNotWaitForInsertsThatComeLater) {
  const Tokens tokens(kMaxLookupTokens, 1);
  std::atomic<bool> closed = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 24; ++i) {
    threads.emplace_back([&] {
      while (!closed) producer_->Insert(tokens, std::nullopt, Pages{1}, Soon()).IgnoreError();
    });
  }
  auto closing = std::async(std::launch::async, [&] { producer_->Close(); });
  EXPECT_EQ(closing.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  closed = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace kvferry
