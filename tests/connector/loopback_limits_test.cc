// Every limit is answered with RESOURCE_EXHAUSTED that names it, and what was within it goes on.

#include <gtest/gtest.h>

#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

class Limits : public testing::Test {
 protected:
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 64, 1);
  std::shared_ptr<KvPool> target_ = MakePatternPool(SmallLayout(), 64, 2);
};

TEST_F(Limits, MaxFetchesPerPeer) {
  Config config = SmallChunks();
  config.max_fetches_per_peer = 3;
  const auto prefill = MakePrefill(source_, config);
  const auto decode = MakeDecode(target_, SmallChunks());
  std::vector<Ticket> tickets;
  std::vector<std::shared_ptr<FetchHandle>> held;
  for (int64_t i = 0; i < 3; ++i) {
    tickets.push_back(Publish(*prefill, *source_, {i}, 1));
    held.push_back(Fetch(*decode, tickets.back(), {i}));
    ASSERT_TRUE(IsOk(held.back()->WaitLayer(0, Soon())));
  }
  const Ticket fourth = Publish(*prefill, *source_, {10});
  EXPECT_TRUE(Fails(Fetch(*decode, fourth, {10})->Wait(Soon()),
                    absl::StatusCode::kResourceExhausted, "max_fetches_per_peer (3)"));
  // Another peer has an allowance of its own.
  const auto target = MakePatternPool(SmallLayout(), 64, 3);
  const auto other = MakeDecode(target, SmallChunks());
  const Ticket fifth = Publish(*prefill, *source_, {11});
  EXPECT_TRUE(IsOk(Fetch(*other, fifth, {11})->Wait(Soon())));
  // When one has ended, the next is served: success and failure both give the place back.
  ASSERT_TRUE(IsOk(prefill->AllLayersReady(tickets[0].lease_id)));
  ASSERT_TRUE(IsOk(held[0]->Wait(Soon())));
  ASSERT_TRUE(WaitFor([&] { return Metric(*prefill, "transfers_active") == 2; }, Soon()));
  EXPECT_TRUE(IsOk(Fetch(*decode, fourth, {10})->Wait(Soon())));
  held[1]->Cancel();
  ASSERT_TRUE(WaitFor([&] { return Metric(*prefill, "transfers_active") == 1; }, Soon()));
  const Ticket sixth = Publish(*prefill, *source_, {12});
  EXPECT_TRUE(IsOk(Fetch(*decode, sixth, {12})->Wait(Soon())));
}

// The windows of all fetches that a peer serves have room among the chunks that wait to be read.
TEST_F(Limits, ManyFetchesThatReadFromAfar) {
  if (PathUnderTest() != TestPath::kDirect) GTEST_SKIP() << "nothing is read from afar";
  constexpr int64_t kFetches = 400, kPages = 8;
  const auto source = MakePatternPool(SmallLayout(), kFetches * kPages, 1);
  const auto target = MakePatternPool(SmallLayout(), kFetches * kPages, 2);
  const auto prefill = MakePrefill(source, SmallChunks());
  const auto decode = MakeDecode(target, SmallChunks());
  std::vector<std::vector<int64_t>> pages(kFetches);
  std::vector<Ticket> tickets;
  for (int64_t i = 0; i < kFetches * kPages; ++i) pages[i / kPages].push_back(i);
  for (const auto& each : pages) tickets.push_back(Publish(*prefill, *source, each));
  std::vector<std::shared_ptr<FetchHandle>> handles;
  for (int64_t i = 0; i < kFetches; ++i) handles.push_back(Fetch(*decode, tickets[i], pages[i]));
  for (const auto& handle : handles) EXPECT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_GT(Metric(*prefill, "transfers_direct"), kFetches / 2);
}

// Fetches that wait for their publish count too, and stop counting when they are refused.
TEST_F(Limits, ParkedFetchesCount) {
  Config config = SmallChunks();
  config.max_fetches_per_peer = 2;
  config.publish_grace_ms = 2000;
  const auto prefill = MakePrefill(source_, config);
  const auto decode = MakeDecode(target_, SmallChunks());
  const auto unpublished = [&](uint64_t lease) {
    return Ticket{prefill->address(), prefill->epoch(), lease, 1, 0};
  };
  ASSERT_TRUE(IsOk(Fetch(*decode, Publish(*prefill, *source_, {9}), {9})->Wait(Soon())));
  ASSERT_TRUE(WaitFor([&] { return Metric(*prefill, "transfers_active") == 0; }, Soon()));
  const auto first = Fetch(*decode, unpublished(101), {0});
  const auto second = Fetch(*decode, unpublished(102), {1});
  const auto third = Fetch(*decode, unpublished(103), {2});
  EXPECT_TRUE(Fails(third->Wait(Soon()), absl::StatusCode::kResourceExhausted));
  EXPECT_TRUE(Fails(first->Wait(Soon()), absl::StatusCode::kNotFound));
  EXPECT_TRUE(Fails(second->Wait(Soon()), absl::StatusCode::kNotFound));
  for (int i = 0; i < 4; ++i) {
    const Ticket ticket = Publish(*prefill, *source_, {3});
    EXPECT_TRUE(IsOk(Fetch(*decode, ticket, {3})->Wait(Soon())));
    ASSERT_TRUE(WaitFor([&] { return Metric(*prefill, "transfers_active") == 0; }, Soon()));
  }
}

TEST_F(Limits, MaxPeersOfThePrefillSide) {
  Config config = SmallChunks();
  config.max_peers = 2;
  const auto prefill = MakePrefill(source_, config);
  std::vector<std::unique_ptr<DecodeEndpoint>> decodes;
  for (int64_t i = 0; i < 2; ++i) {
    decodes.push_back(MakeDecode(target_, SmallChunks()));
    ASSERT_TRUE(IsOk(Fetch(*decodes[i], Publish(*prefill, *source_, {i}), {i})->Wait(Soon())));
  }
  const auto third = MakeDecode(target_, SmallChunks());
  EXPECT_TRUE(Fails(Fetch(*third, Publish(*prefill, *source_, {5}), {5})->Wait(Soon()),
                    absl::StatusCode::kResourceExhausted, "max_peers (2)", "refused by",
                    "raise it on the side that listens"));
  EXPECT_EQ(Metric(*prefill, "hellos_refused"), 1);
  // One leaves, and there is room.
  decodes.pop_back();
  ASSERT_TRUE(WaitFor([&] { return Metric(*prefill, "peers") == 1; }, Soon()));
  EXPECT_TRUE(IsOk(Fetch(*third, Publish(*prefill, *source_, {6}), {6})->Wait(Soon())));
}

TEST_F(Limits, MaxPeersOfTheDecodeSide) {
  Config config = SmallChunks();
  config.max_peers = 1;
  const auto first = MakePrefill(source_, SmallChunks());
  const auto second = MakePrefill(source_, SmallChunks());
  const auto decode = MakeDecode(target_, config);
  ASSERT_TRUE(IsOk(Fetch(*decode, Publish(*first, *source_, {0}), {0})->Wait(Soon())));
  const auto handle = Fetch(*decode, Publish(*second, *source_, {1}), {1});
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kResourceExhausted, "max_peers (1)"));
  EXPECT_EQ(handle->missing_pages(), std::vector<int64_t>{1});
  EXPECT_TRUE(IsOk(Fetch(*decode, Publish(*first, *source_, {2}), {2})->Wait(Soon())));
}

TEST_F(Limits, MaxLeases) {
  Config config = SmallChunks();
  config.max_leases = 4;
  const auto prefill = MakePrefill(source_, config);
  std::vector<Ticket> tickets;
  for (int64_t i = 0; i < 4; ++i) tickets.push_back(Publish(*prefill, *source_, {i}));
  PrefillEndpoint::Publication publication;
  publication.pages = {9};
  EXPECT_TRUE(
      Fails(prefill->Publish(publication), absl::StatusCode::kResourceExhausted, "max_leases (4)"));
  ASSERT_TRUE(IsOk(prefill->Release(tickets[0].lease_id, Soon())));
  // Its place is free when its end has been taken.
  EXPECT_TRUE(Fails(prefill->Publish(publication), absl::StatusCode::kResourceExhausted,
                    "have not been taken; take those, or raise it"));
  EXPECT_EQ(prefill->TakeEnded().size(), 1u);
  EXPECT_TRUE(IsOk(prefill->Publish(publication)));
}

// A peer whose fetches all wait for layers does not keep another one from being served.
TEST_F(Limits, WaitingFetchesOfOnePeerDoNotHoldUpAnother) {
  Config config = SmallChunks();
  config.arena_bytes = 64 << 10;
  const auto prefill = MakePrefill(source_, config);
  const auto waiting = MakeDecode(target_, SmallChunks());
  std::vector<std::shared_ptr<FetchHandle>> held;
  for (int64_t i = 0; i < 40; ++i) {
    held.push_back(Fetch(*waiting, Publish(*prefill, *source_, {i}, 2), {i}));
  }
  for (const auto& handle : held) ASSERT_TRUE(IsOk(handle->WaitLayer(1, Soon())));
  const auto target = MakePatternPool(SmallLayout(), 64, 3);
  const auto other = MakeDecode(target, SmallChunks());
  std::vector<int64_t> pages(64);
  for (int64_t i = 0; i < 64; ++i) pages[i] = 63 - i;
  ASSERT_TRUE(IsOk(Fetch(*other, Publish(*prefill, *source_, pages), pages)->Wait(Soon())));
  EXPECT_TRUE(HoldsPages(*target, pages, 1, pages, 0, 4));
  for (const auto& handle : held) EXPECT_FALSE(handle->done());
}

}  // namespace
}  // namespace kvferry
