// Layers that become final one after the other while a fetch is under way.

#include <gtest/gtest.h>

#include "base/random.h"
#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

constexpr uint64_t kSourceSeed = 1;
constexpr uint64_t kOwnSeed = 2;

class Streaming : public testing::Test {
 protected:
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 64, kOwnSeed);
  std::shared_ptr<KvPool> target_ = MakePatternPool(SmallLayout(), 64, kOwnSeed);
  const std::vector<int64_t> pages_ = {60, 3, 4, 5, 20, 1};
  const std::vector<int64_t> local_ = {7, 8, 2, 50, 51, 52};
  const int64_t layers_ = SmallLayout().num_layers;

  // A layer is written only just before it is announced: bytes read too early would be wrong.
  void WriteLayer(int64_t layer) { WriteLayer(layer, pages_); }
  // What belongs into pages_, into others.
  void WriteLayer(int64_t layer, const std::vector<int64_t>& into) {
    const KvLayout layout = SmallLayout();
    WritePattern(*source_,
                 std::vector{layout.buffer_index(layer, 0), layout.buffer_index(layer, 1)}, into,
                 kSourceSeed, pages_);
  }
};

TEST_F(Streaming, ALayerIsReadableBeforeTheNextIsReady) {
  const auto prefill = MakePrefill(source_, SmallChunks());
  const auto decode = MakeDecode(target_, SmallChunks());
  const Ticket ticket = Publish(*prefill, *source_, pages_, 0);
  const auto handle = Fetch(*decode, ticket, local_);
  for (int64_t layer = 0; layer < layers_; ++layer) {
    EXPECT_EQ(handle->layers_done(), layer);
    EXPECT_FALSE(handle->done());
    WriteLayer(layer);
    ASSERT_TRUE(IsOk(prefill->LayerReady(ticket.lease_id, layer)));
    ASSERT_TRUE(IsOk(handle->WaitLayer(layer, Soon())));
    EXPECT_TRUE(HoldsPages(*target_, local_, kSourceSeed, pages_, 0, layer + 1));
    // Nothing of the next layer can have come.
    if (layer + 1 < layers_) {
      EXPECT_TRUE(HoldsPages(*target_, local_, kOwnSeed, local_, layer + 1, layers_));
    }
  }
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, pages_));
}

TEST_F(Streaming, WaitLayerTimesOutAndTheFetchGoesOn) {
  const auto prefill = MakePrefill(source_, SmallChunks());
  const auto decode = MakeDecode(target_, SmallChunks());
  const Ticket ticket = Publish(*prefill, *source_, pages_, 0);
  const auto handle = Fetch(*decode, ticket, local_);
  EXPECT_TRUE(Fails(handle->WaitLayer(0, DeadlineInMs(50)), absl::StatusCode::kDeadlineExceeded));
  EXPECT_TRUE(Fails(handle->Wait(DeadlineInMs(50)), absl::StatusCode::kDeadlineExceeded));
  EXPECT_TRUE(Fails(handle->WaitLayer(layers_, Soon()), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(handle->WaitLayer(-1, Soon()), absl::StatusCode::kOutOfRange));
  for (int64_t layer = 0; layer < layers_; ++layer) WriteLayer(layer);
  ASSERT_TRUE(IsOk(prefill->AllLayersReady(ticket.lease_id)));
  EXPECT_TRUE(IsOk(handle->WaitLayer(layers_ - 1, Soon())));
}

TEST_F(Streaming, ReadyLayersNeverShrink) {
  const auto prefill = MakePrefill(source_, SmallChunks());
  const auto decode = MakeDecode(target_, SmallChunks());
  for (int64_t layer = 0; layer < layers_; ++layer) WriteLayer(layer);
  const Ticket ticket = Publish(*prefill, *source_, pages_, 0);
  ASSERT_TRUE(IsOk(prefill->AllLayersReady(ticket.lease_id)));
  ASSERT_TRUE(IsOk(prefill->LayerReady(ticket.lease_id, 0)));
  ASSERT_TRUE(IsOk(Fetch(*decode, ticket, local_)->Wait(Soon())));
}

TEST_F(Streaming, LayersThatDoNotExist) {
  const auto prefill = MakePrefill(source_, SmallChunks());
  const Ticket ticket = Publish(*prefill, *source_, pages_, 0);
  EXPECT_TRUE(Fails(prefill->LayerReady(ticket.lease_id, layers_), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(prefill->LayerReady(ticket.lease_id, -1), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(prefill->LayerReady(ticket.lease_id + 1, 0), absl::StatusCode::kNotFound));
}

// Nothing of a fetch that has ended is ever written, although its layers become ready afterwards.
TEST_F(Streaming, DeadlineWithoutLayersThenLateLayersWriteNothing) {
  const auto prefill = MakePrefill(source_, SmallChunks());
  const auto decode = MakeDecode(target_, SmallChunks());
  const Ticket ticket = Publish(*prefill, *source_, pages_, 0);
  WriteLayer(0);
  ASSERT_TRUE(IsOk(prefill->LayerReady(ticket.lease_id, 0)));
  const auto handle = Fetch(*decode, ticket, local_, 0, 2000);
  ASSERT_TRUE(IsOk(handle->WaitLayer(0, Soon())));
  const absl::Status status = handle->Wait(Soon());
  EXPECT_TRUE(Fails(status, absl::StatusCode::kDeadlineExceeded, prefill->address()));
  EXPECT_EQ(handle->missing_pages(), local_);
  EXPECT_EQ(handle->layers_done(), 1);

  for (int64_t layer = 1; layer < layers_; ++layer) WriteLayer(layer);
  ASSERT_TRUE(IsOk(prefill->AllLayersReady(ticket.lease_id)));
  // A second fetch on the same connection, so that whatever the first still sent has come before
  // it.
  const std::vector<int64_t> elsewhere = {30, 31, 32, 33, 34, 35};
  ASSERT_TRUE(IsOk(Fetch(*decode, ticket, elsewhere)->Wait(Soon())));
  EXPECT_TRUE(HoldsPages(*target_, elsewhere, kSourceSeed, pages_, 0, layers_));
  EXPECT_TRUE(HoldsPages(*target_, local_, kOwnSeed, local_, 1, layers_));
}

TEST_F(Streaming, CancelledFetchIsNeverWrittenForAgainAndItsLeaseCanBeFetchedAgain) {
  const auto prefill = MakePrefill(source_, SmallChunks());
  const auto decode = MakeDecode(target_, SmallChunks());
  const Ticket ticket = Publish(*prefill, *source_, pages_, 0);
  WriteLayer(0);
  ASSERT_TRUE(IsOk(prefill->LayerReady(ticket.lease_id, 0)));
  const auto handle = Fetch(*decode, ticket, local_);
  ASSERT_TRUE(IsOk(handle->WaitLayer(0, Soon())));
  handle->Cancel();
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kCancelled));
  handle->Cancel();  // Of no effect.

  for (int64_t layer = 1; layer < layers_; ++layer) WriteLayer(layer);
  ASSERT_TRUE(IsOk(prefill->AllLayersReady(ticket.lease_id)));
  const std::vector<int64_t> elsewhere = {30, 31, 32, 33, 34, 35};
  ASSERT_TRUE(IsOk(Fetch(*decode, ticket, elsewhere)->Wait(Soon())));
  EXPECT_TRUE(HoldsPages(*target_, elsewhere, kSourceSeed, pages_, 0, layers_));
  EXPECT_TRUE(HoldsPages(*target_, local_, kOwnSeed, local_, 1, layers_));
  EXPECT_EQ(EndedLeases(prefill.get()).Wait(ticket.lease_id), "fetched");
}

// Cancelling at full speed, over and over: the pages are the caller's at once, and stay as they
// are.
TEST_F(Streaming, CancelRaceLeavesPagesAlone) {
  const KvLayout layout = KvLayout::Mha(8, 16, 4, 64, DType::kBFloat16);
  const auto source = MakePatternPool(layout, 64, kSourceSeed);
  const auto target = MakePatternPool(layout, 64, kOwnSeed);
  const auto prefill = MakePrefill(source, SmallChunks());
  const auto decode = MakeDecode(target, SmallChunks());
  std::mt19937_64 random(5);
  const std::vector<int64_t> pages = MakePages("rand", 64, 64, &random);
  for (int round = 0; round < 30; ++round) {
    const auto handle = Fetch(*decode, Publish(*prefill, *source, pages), pages);
    const int64_t until = static_cast<int64_t>(random() % 4);
    (void)handle->WaitLayer(until, Soon());
    handle->Cancel();
    const absl::Status status = handle->Wait(Soon());
    ASSERT_TRUE(status.ok() || absl::IsCancelled(status)) << status.ToString();
    FillPattern(*target, 1000 + round);  // The pages are ours again.
    // The next fetch's first layer, on the same connection, is behind all that was still on its
    // way.
    const auto fence = Fetch(*decode, Publish(*prefill, *source, {pages[0]}), {pages[0]});
    ASSERT_TRUE(IsOk(fence->Wait(Soon())));
    ASSERT_TRUE(HoldsExactly(*target, 1000 + round, std::vector{pages[0]}, kSourceSeed,
                             std::vector{pages[0]}))
        << "round " << round;
  }
}

TEST_F(Streaming, FetchBeforePublishWaitsForIt) {
  const auto prefill = MakePrefill(source_, SmallChunks());
  const auto decode = MakeDecode(target_, SmallChunks());
  for (int64_t layer = 0; layer < layers_; ++layer) WriteLayer(layer);
  const Ticket early{prefill->address(), prefill->epoch(), RandomId(),
                     static_cast<int64_t>(pages_.size()), 0};
  const auto handle = Fetch(*decode, early, local_);
  // The session is up, so the fetch is at the prefill side or on its way there.
  ASSERT_TRUE(WaitFor([&] { return Metric(*decode, "peers") == 1; }, Soon()));
  EXPECT_FALSE(handle->done());
  PrefillEndpoint::Publication publication;
  publication.pages = pages_;
  publication.lease_id = early.lease_id;
  publication.ready_layers = layers_;
  ASSERT_TRUE(IsOk(prefill->Publish(publication)));
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, pages_));
}

TEST_F(Streaming, FetchThatIsNeverPublishedIsRefusedAfterTheGrace) {
  Config config = SmallChunks();
  config.publish_grace_ms = 200;
  const auto prefill = MakePrefill(source_, config);
  const auto decode = MakeDecode(target_, config);
  const Ticket early{prefill->address(), prefill->epoch(), RandomId(), 6, 0};
  const Deadline begin = Clock::now();
  const absl::Status status = Fetch(*decode, early, local_)->Wait(Soon());
  EXPECT_TRUE(Fails(status, absl::StatusCode::kNotFound, "refused by", "unknown"));
  EXPECT_GE(SecondsBetween(begin, Clock::now()), 0.2);
  EXPECT_EQ(Metric(*prefill, "fetches_refused"), 1);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
}

// Both sides have agreed on a lease beforehand: the decode side has no ticket of the prefill
// side's.
class Announced : public Streaming {
 protected:
  static Config Impatient() {
    Config config = SmallChunks();
    config.publish_grace_ms = 0;  // The fetch itself says how long it waits.
    return config;
  }
  static Ticket Of(const PrefillEndpoint& prefill, uint64_t lease_id) {
    return {prefill.address(), 0, lease_id, 6, 0};
  }
  PrefillEndpoint::Publication Publication(uint64_t lease_id) {
    PrefillEndpoint::Publication publication;
    publication.pages = pages_;
    publication.lease_id = lease_id;
    publication.ready_layers = layers_;
    return publication;
  }
  // Its fetch is at the prefill side when one that comes after it has been served.
  void AwaitArrival(PrefillEndpoint& prefill, DecodeEndpoint& decode) {
    ASSERT_TRUE(
        IsOk(Fetch(decode, ::kvferry::Publish(prefill, *source_, {63}), {63})->Wait(Soon())));
  }
};

TEST_F(Announced, AFetchWaitsForItsLease) {
  const auto prefill = MakePrefill(source_, Impatient());
  const auto decode = MakeDecode(target_, Impatient());
  for (int64_t layer = 0; layer < layers_; ++layer) WriteLayer(layer);
  const uint64_t lease = RandomId();
  EXPECT_TRUE(prefill->AskedFor({lease}).empty());
  const auto handle = Fetch(*decode, Of(*prefill, lease), local_);
  // A session's first fetches may be asked for in any order.
  EXPECT_TRUE(WaitFor([&] { return prefill->AskedFor({lease}) == std::vector{lease}; }, Soon()));
  EXPECT_FALSE(handle->done());
  ASSERT_TRUE(IsOk(prefill->Publish(Publication(lease))));
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsPages(*target_, local_, kSourceSeed, pages_, 0, layers_));
}

TEST_F(Announced, NotLongerThanItsDeadline) {
  const auto prefill = MakePrefill(source_, Impatient());
  const auto decode = MakeDecode(target_, Impatient());
  const auto handle = Fetch(*decode, Of(*prefill, RandomId()), local_, 0, /*timeout_ms=*/2000);
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kDeadlineExceeded,
                    "was the prefill side given the same request?"));
  EXPECT_EQ(handle->missing_pages(), local_);
}

TEST_F(Announced, GivenUp) {
  const auto prefill = MakePrefill(source_, Impatient());
  const auto decode = MakeDecode(target_, Impatient());
  const uint64_t lease = RandomId();
  const auto handle = Fetch(*decode, Of(*prefill, lease), local_);
  AwaitArrival(*prefill, *decode);
  ASSERT_TRUE(IsOk(prefill->GiveUp(lease)));
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kFailedPrecondition, "refused by",
                    "gave the request up"));
  // Who comes later is told the same.
  EXPECT_TRUE(Fails(Fetch(*decode, Of(*prefill, lease), local_)->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "gave the request up"));
}

// The prefill side needs the pages for another request, in the middle of a fetch, and computes this
// one again later, in other pages.
TEST_F(Announced, TakenBackAndPublishedAgain) {
  const auto prefill = MakePrefill(source_, Impatient());
  const auto decode = MakeDecode(target_, Impatient());
  const uint64_t lease = RandomId();
  const auto handle = Fetch(*decode, Of(*prefill, lease), local_);
  PrefillEndpoint::Publication publication = Publication(lease);
  publication.ready_layers = 0;
  ASSERT_TRUE(IsOk(prefill->Publish(publication)));
  WriteLayer(0);
  ASSERT_TRUE(IsOk(prefill->LayerReady(lease, 0)));
  ASSERT_TRUE(IsOk(handle->WaitLayer(0, Soon())));
  ASSERT_TRUE(IsOk(prefill->Unpublish(lease, Soon())));
  FillPattern(*source_, kOwnSeed);
  EXPECT_TRUE(Fails(prefill->LayerReady(lease, 1), absl::StatusCode::kNotFound));
  EXPECT_TRUE(prefill->TakeEnded().empty());
  AwaitArrival(*prefill, *decode);
  EXPECT_FALSE(handle->done());

  publication.pages = {9, 10, 11, 40, 33, 32};
  ASSERT_TRUE(IsOk(prefill->Publish(publication)));
  for (int64_t layer = 0; layer < layers_; ++layer) {
    WriteLayer(layer, publication.pages);
    ASSERT_TRUE(IsOk(prefill->LayerReady(lease, layer)));
    ASSERT_TRUE(IsOk(handle->WaitLayer(layer, Soon())));
  }
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsPages(*target_, local_, kSourceSeed, pages_, 0, layers_));
  EXPECT_EQ(EndedLeases(prefill.get()).Wait(lease), "fetched");
  EXPECT_TRUE(
      Fails(prefill->Unpublish(lease, Soon()), absl::StatusCode::kFailedPrecondition, "fetched"));
}

TEST_F(Announced, TakenBackAndGivenUp) {
  const auto prefill = MakePrefill(source_, Impatient());
  const auto decode = MakeDecode(target_, Impatient());
  const uint64_t lease = RandomId();
  const auto handle = Fetch(*decode, Of(*prefill, lease), local_);
  PrefillEndpoint::Publication publication = Publication(lease);
  publication.ready_layers = 1;
  ASSERT_TRUE(IsOk(prefill->Publish(publication)));
  ASSERT_TRUE(IsOk(handle->WaitLayer(0, Soon())));
  ASSERT_TRUE(IsOk(prefill->Unpublish(lease, Soon())));
  ASSERT_TRUE(IsOk(prefill->GiveUp(lease)));
  EXPECT_TRUE(
      Fails(handle->Wait(Soon()), absl::StatusCode::kFailedPrecondition, "gave the request up"));
  EXPECT_EQ(handle->missing_pages(), local_);
}

// A ticket with an epoch promises what is there: nobody waits for it to come again.
TEST_F(Announced, TakenBackFromAFetchByTicket) {
  const auto prefill = MakePrefill(source_, Impatient());
  const auto decode = MakeDecode(target_, Impatient());
  const Ticket ticket = ::kvferry::Publish(*prefill, *source_, pages_, 1);
  const auto handle = Fetch(*decode, ticket, local_);
  ASSERT_TRUE(IsOk(handle->WaitLayer(0, Soon())));
  ASSERT_TRUE(IsOk(prefill->Unpublish(ticket.lease_id, Soon())));
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kAborted, "for now"));
}

// The decode side has all of it cached, and says so before there is a lease.
TEST_F(Announced, NothingNeeded) {
  const auto prefill = MakePrefill(source_, Impatient());
  const auto decode = MakeDecode(target_, Impatient());
  const uint64_t lease = RandomId();
  ASSERT_TRUE(IsOk(Fetch(*decode, Of(*prefill, lease), {})->Wait(Soon())));
  AwaitArrival(*prefill, *decode);
  EXPECT_EQ(prefill->AskedFor({lease}), std::vector{lease});
  ASSERT_TRUE(IsOk(prefill->Publish(Publication(lease))));
  EndedLeases ended(prefill.get());
  EXPECT_EQ(ended.Wait(lease), "fetched");
}

// It is the process's that it has begun with: another one at the same address may know the same
// lease.
TEST_F(Announced, AnotherProcessIsNotTakenForIt) {
  auto prefill = MakePrefill(source_, Impatient());
  const auto decode = MakeDecode(target_, Impatient());
  const uint64_t lease = RandomId();
  const Ticket ticket = Of(*prefill, lease);
  const auto handle = Fetch(*decode, ticket, local_);
  AwaitArrival(*prefill, *decode);
  Config same = Impatient();
  same.listen_port = PortOf(ticket.address);
  prefill.reset();
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kUnavailable));
  // A new fetch is: nobody has said which process it means.
  prefill = MakePrefill(source_, same);
  const auto again = Fetch(*decode, ticket, local_);
  ASSERT_TRUE(IsOk(prefill->Publish(Publication(lease))));
  EXPECT_TRUE(IsOk(again->Wait(Soon())));
}

}  // namespace
}  // namespace kvferry
