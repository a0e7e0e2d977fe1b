// The decode side registers pages, the prefill side pushes to them: the bytes, layer by layer, and
// what either side is told when it is not to be.

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "base/random.h"
#include "tests/support/endpoints.h"
#include "tests/support/failing_new.h"

namespace kvferry {
namespace {

constexpr uint64_t kSourceSeed = 1;
constexpr uint64_t kOwnSeed = 2;
constexpr int64_t kPoolPages = 96;

class PushMove : public testing::TestWithParam<std::tuple<std::string, std::string, int64_t>> {};

TEST_P(PushMove, EveryByteAndNoOther) {
  const auto& [layout_name, shape, first_page] = GetParam();
  std::mt19937_64 random(7);
  const KvLayout layout = LayoutNamed(layout_name);
  const auto source = MakePatternPool(layout, kPoolPages, kSourceSeed);
  const auto target = MakePatternPool(layout, kPoolPages + 3, kOwnSeed);
  const auto prefill = MakePrefill(source, SmallChunks());
  const auto decode = MakePushedDecode(target, SmallChunks());

  const std::vector<int64_t> pushed = MakePages(shape, 40, kPoolPages, &random);
  const std::vector<int64_t> local = MakePages(shape, 40 - first_page, kPoolPages, &random);
  const auto receive = Receive(*decode, local, first_page);
  EXPECT_EQ(receive.ticket.address, decode->address());
  EXPECT_EQ(receive.ticket.epoch, decode->epoch());
  EXPECT_EQ(receive.ticket.num_pages, 40);
  const auto push = Push(*prefill, receive.ticket, *source, pushed);
  ASSERT_TRUE(IsOk(receive.handle->Wait(Soon())));
  ASSERT_TRUE(IsOk(push->Wait(Soon())));

  const std::vector<int64_t> wanted(pushed.begin() + first_page, pushed.end());
  EXPECT_TRUE(HoldsExactly(*target, kOwnSeed, local, kSourceSeed, wanted));
  EXPECT_TRUE(IsUntouched(*source, kSourceSeed));
  EXPECT_EQ(receive.handle->layers_done(), layout.num_layers);
  EXPECT_TRUE(receive.handle->missing_pages().empty());
  const FetchReport report = receive.handle->report();
  EXPECT_EQ(report.total_bytes, static_cast<int64_t>(local.size()) * layout.page_bytes());
  EXPECT_EQ(report.bytes_done, report.total_bytes);
  // A push that has ended has given its pages back.
  EXPECT_EQ(EndedLeases(prefill.get()).Wait(push->lease_id(), Clock::now()), "fetched");
  EXPECT_EQ(Metric(*decode, "receives_waiting"), 0);

  const int64_t mapped = PathIsOverANetwork() ? 0 : 1;
  EXPECT_EQ(Metric(*prefill, "peers_mapped"), mapped);
  EXPECT_EQ(Metric(*decode, "peers_mapped"), mapped);
  const bool in_place = PathReadsThePool() && layout_name != "odd" && !local.empty();
  EXPECT_EQ(Metric(*prefill, "chunks_in_place") > 0, in_place);
}

INSTANTIATE_TEST_SUITE_P(Loopback, PushMove,
                         testing::Combine(testing::Values("mha", "mla", "odd"),
                                          testing::Values("seq", "runs8", "rand"),
                                          testing::Values(0, 13, 40)),
                         [](const auto& instance) {
                           return std::get<0>(instance.param) + "_" + std::get<1>(instance.param) +
                                  "_from" + std::to_string(std::get<2>(instance.param));
                         });

class Pushing : public testing::Test {
 protected:
  void WriteLayer(int64_t layer) {
    const KvLayout layout = SmallLayout();
    WritePattern(*source_,
                 std::vector{layout.buffer_index(layer, 0), layout.buffer_index(layer, 1)}, pages_,
                 kSourceSeed, pages_);
  }
  // Layers [1, all) become final; the first one has been written by the test.
  void FinishLayers(uint64_t lease_id) {
    for (int64_t layer = 1; layer < layers_; ++layer) WriteLayer(layer);
    ASSERT_TRUE(IsOk(prefill_->AllLayersReady(lease_id)));
  }
  struct Under {
    DecodeEndpoint::Receiving receive;
    std::shared_ptr<PushHandle> push;
  };
  // A push of which one layer has come, and that waits for the second.
  Under HeldPush(int64_t receive_ms = 0, int64_t push_ms = 0) {
    WriteLayer(0);
    Under under{Receive(*decode_, local_, 0, receive_ms), nullptr};
    under.push = Push(*prefill_, under.receive.ticket, *source_, pages_, 1, push_ms);
    EXPECT_TRUE(IsOk(under.receive.handle->WaitLayer(0, Soon())));
    return under;
  }
  absl::Status PushStatus(const ReceiveTicket& ticket) {
    return Push(*prefill_, ticket, *source_, pages_)->Wait(Soon());
  }
  // Another push on the same connection: whatever was still on its way has come before it.
  void Fence() {
    const std::vector<int64_t> elsewhere = {30, 31, 32, 33, 34, 35};
    const auto receive = Receive(*decode_, elsewhere);
    ASSERT_TRUE(IsOk(PushStatus(receive.ticket)));
  }

  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 64, kOwnSeed);
  std::shared_ptr<KvPool> target_ = MakePatternPool(SmallLayout(), 64, kOwnSeed);
  std::unique_ptr<PrefillEndpoint> prefill_ = MakePrefill(source_, SmallChunks());
  std::unique_ptr<DecodeEndpoint> decode_ = MakePushedDecode(target_, SmallChunks());
  const std::vector<int64_t> pages_ = {60, 3, 4, 5, 20, 1};
  const std::vector<int64_t> local_ = {7, 8, 2, 50, 51, 52};
  const int64_t layers_ = SmallLayout().num_layers;
};

// ---------------------------------------------------------------- moving

TEST_F(Pushing, ALayerIsReadableBeforeTheNextIsReady) {
  const auto receive = Receive(*decode_, local_);
  const auto push = Push(*prefill_, receive.ticket, *source_, pages_, 0);
  const auto& handle = receive.handle;
  for (int64_t layer = 0; layer < layers_; ++layer) {
    EXPECT_EQ(handle->layers_done(), layer);
    EXPECT_FALSE(handle->done());
    EXPECT_FALSE(push->done());
    WriteLayer(layer);
    ASSERT_TRUE(IsOk(prefill_->LayerReady(push->lease_id(), layer)));
    ASSERT_TRUE(IsOk(handle->WaitLayer(layer, Soon())));
    EXPECT_TRUE(HoldsPages(*target_, local_, kSourceSeed, pages_, 0, layer + 1));
    // Nothing of the next layer can have come.
    if (layer + 1 < layers_) {
      EXPECT_TRUE(HoldsPages(*target_, local_, kOwnSeed, local_, layer + 1, layers_));
    }
  }
  ASSERT_TRUE(IsOk(handle->Wait(Soon())));
  ASSERT_TRUE(IsOk(push->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, pages_));
}

TEST_F(Pushing, ManyAtOnceFromSeveralPrefillSides) {
  FillPattern(*source_, kSourceSeed);
  const auto other_source = MakePatternPool(SmallLayout(), 64, 3);
  const auto other = MakePrefill(other_source, SmallChunks());
  std::vector<Under> pushes;
  for (int64_t i = 0; i < 32; ++i) {
    PrefillEndpoint& from = i % 2 == 0 ? *prefill_ : *other;
    Under under{Receive(*decode_, {i, 63 - i}), nullptr};
    under.push = Push(from, under.receive.ticket, *source_, {63 - i, i}, 1);
    pushes.push_back(std::move(under));
  }
  // The last one first.
  for (int64_t i = 31; i >= 0; --i) {
    PrefillEndpoint& from = i % 2 == 0 ? *prefill_ : *other;
    ASSERT_TRUE(IsOk(pushes[i].receive.handle->WaitLayer(0, Soon())));
    ASSERT_TRUE(IsOk(from.AllLayersReady(pushes[i].push->lease_id())));
    ASSERT_TRUE(IsOk(pushes[i].receive.handle->Wait(Soon())));
    ASSERT_TRUE(IsOk(pushes[i].push->Wait(Soon())));
    EXPECT_TRUE(HoldsPages(*target_, std::vector<int64_t>{i, 63 - i}, i % 2 == 0 ? kSourceSeed : 3,
                           std::vector<int64_t>{63 - i, i}, 0, layers_));
  }
  EXPECT_EQ(Metric(*decode_, "peers"), 2);
}

// Each side has dialled the other then.
TEST_F(Pushing, PushesAndPullsBetweenTheSameTwo) {
  FillPattern(*source_, kSourceSeed);
  for (int round = 0; round < 4; ++round) {
    FillPattern(*target_, kOwnSeed);
    const auto receive = Receive(*decode_, local_);
    const std::vector<int64_t> more = {30, 31, 32, 33, 34, 35};
    const auto fetch = Fetch(*decode_, Publish(*prefill_, *source_, pages_), more);
    const auto push = Push(*prefill_, receive.ticket, *source_, pages_);
    ASSERT_TRUE(IsOk(fetch->Wait(Soon())));
    ASSERT_TRUE(IsOk(receive.handle->Wait(Soon())));
    ASSERT_TRUE(IsOk(push->Wait(Soon())));
    EXPECT_TRUE(HoldsPages(*target_, more, kSourceSeed, pages_, 0, layers_));
    EXPECT_TRUE(HoldsPages(*target_, local_, kSourceSeed, pages_, 0, layers_));
  }
}

// ---------------------------------------------------------------- refusals

TEST_F(Pushing, TicketsAreNotGuessable) {
  const ReceiveTicket first = Receive(*decode_, {1}).ticket;
  const ReceiveTicket second = Receive(*decode_, {2}).ticket;
  EXPECT_GT(first.receive_id ^ second.receive_id, uint64_t{1} << 16);
  ReceiveTicket guessed = first;
  guessed.num_pages = 6;
  guessed.receive_id = RandomId();
  EXPECT_TRUE(Fails(PushStatus(guessed), absl::StatusCode::kNotFound, decode_->address(),
                    "is unknown here; was the ticket made by this process?"));
  EXPECT_EQ(Metric(*decode_, "receives_waiting"), 2);
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
}

TEST_F(Pushing, ARefusedPushGivesItsPagesBack) {
  ReceiveTicket unknown = Receive(*decode_, local_).ticket;
  unknown.receive_id = RandomId();
  const auto push = Push(*prefill_, unknown, *source_, pages_);
  EXPECT_TRUE(Fails(push->Wait(Soon()), absl::StatusCode::kNotFound));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(push->lease_id(), Clock::now()), "released");
}

// The pages are the caller's again after the first push: a second one must not come near them.
TEST_F(Pushing, AnEndedReceiveTakesNoSecondPush) {
  FillPattern(*source_, kSourceSeed);
  const auto receive = Receive(*decode_, local_);
  ASSERT_TRUE(IsOk(PushStatus(receive.ticket)));
  FillPattern(*target_, kOwnSeed);
  EXPECT_TRUE(Fails(PushStatus(receive.ticket), absl::StatusCode::kFailedPrecondition,
                    "has already ended: OK"));
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
}

TEST_F(Pushing, AReceiveThatIsBeingPushedToTakesNoSecondPush) {
  Under under = HeldPush();
  const auto other_source = MakePatternPool(SmallLayout(), 64, 3);
  const auto other = MakePrefill(other_source, SmallChunks());
  EXPECT_TRUE(Fails(PushStatus(under.receive.ticket), absl::StatusCode::kFailedPrecondition,
                    "is being pushed to already"));
  EXPECT_TRUE(Fails(Push(*other, under.receive.ticket, *other_source, pages_)->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "is being pushed to already"));
  FinishLayers(under.push->lease_id());
  ASSERT_TRUE(IsOk(under.push->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, pages_));
}

TEST_F(Pushing, AnotherNumberOfPagesOrTokens) {
  FillPattern(*source_, kSourceSeed);
  DecodeEndpoint::Reception reception;
  reception.pages = local_;
  reception.num_tokens = 90;
  const auto receive = Must(decode_->Receive(reception));
  PrefillEndpoint::Publication publication;
  publication.pages = {60, 3};
  EXPECT_TRUE(Fails(Must(prefill_->Push(receive.ticket, publication, 0))->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "is of 6 pages, the push of 2"));
  publication.num_tokens = 90;  // It says as many, but they are elsewhere.
  EXPECT_TRUE(Fails(Must(prefill_->Push(receive.ticket, publication, 0))->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "is of 6 pages, the push of 2"));
  publication.num_tokens = 0;
  ReceiveTicket altered = receive.ticket;  // Whoever carried it has changed it.
  altered.num_pages = 2;
  EXPECT_TRUE(Fails(Must(prefill_->Push(altered, publication, 0))->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "is of 6 pages, the push of 2"));
  publication.pages = pages_;
  publication.ready_layers = layers_;
  publication.num_tokens = 91;
  EXPECT_TRUE(Fails(Must(prefill_->Push(receive.ticket, publication, 0))->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "is of 90 tokens, the push of 91"));
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
  EXPECT_FALSE(receive.handle->done());  // It waits for a push that fits.
  publication.num_tokens = 90;
  EXPECT_TRUE(IsOk(Must(prefill_->Push(receive.ticket, publication, 0))->Wait(Soon())));
}

TEST_F(Pushing, BeforeAnythingIsSent) {
  const ReceiveTicket ticket = Receive(*decode_, local_).ticket;
  PrefillEndpoint::Publication publication;
  publication.pages = pages_;
  const auto push = [&](const ReceiveTicket& to, const PrefillEndpoint::Publication& what,
                        int64_t timeout_ms = 0) {
    return prefill_->Push(to, what, timeout_ms).status();
  };
  ReceiveTicket elsewhere = ticket;
  elsewhere.address = "tcp://192.0.2.1:4000";
  EXPECT_TRUE(Fails(push(elsewhere, publication), absl::StatusCode::kPermissionDenied, "192.0.2.1",
                    "allowed_hosts"));
  elsewhere.address = "";
  EXPECT_TRUE(Fails(push(elsewhere, publication), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(
      Fails(push(ticket, publication, -1), absl::StatusCode::kInvalidArgument, "timeout_ms"));
  EXPECT_TRUE(Fails(push(ticket, publication, Config().max_fetch_timeout_ms + 1),
                    absl::StatusCode::kInvalidArgument, "timeout_ms"));
  PrefillEndpoint::Publication bad = publication;
  bad.lease_ms = 5;
  EXPECT_TRUE(Fails(push(ticket, bad), absl::StatusCode::kInvalidArgument, "lease_ms"));
  bad = publication;
  bad.num_tokens = PageRuns::kMaxPages + 1;
  EXPECT_TRUE(Fails(push(ticket, bad), absl::StatusCode::kInvalidArgument, "num_tokens"));
  bad = publication;
  bad.pages[2] = 64;
  EXPECT_TRUE(Fails(push(ticket, bad), absl::StatusCode::kOutOfRange, "64 pages"));
  EXPECT_EQ(Metric(*prefill_, "peers"), 0);
  EXPECT_EQ(prefill_->num_live_leases(), 0);
  EXPECT_TRUE(prefill_->TakeEnded().empty());

  const auto receive = [&](int64_t first_page, std::vector<int64_t> pages, int64_t tokens = 0,
                           int64_t timeout_ms = 0) {
    return decode_->Receive({first_page, std::move(pages), tokens, timeout_ms}).status();
  };
  EXPECT_TRUE(Fails(receive(0, {}), absl::StatusCode::kInvalidArgument, "0 pages"));
  EXPECT_TRUE(Fails(receive(-1, {0, 1}), absl::StatusCode::kInvalidArgument, "first_page"));
  EXPECT_TRUE(Fails(receive(INT64_MAX, {0}), absl::StatusCode::kInvalidArgument, "first_page"));
  EXPECT_TRUE(Fails(receive(0, {64}), absl::StatusCode::kOutOfRange, "64 pages"));
  EXPECT_TRUE(Fails(receive(0, {-1}), absl::StatusCode::kInvalidArgument));
  for (const int64_t tokens : {int64_t{-1}, PageRuns::kMaxPages + 1}) {
    EXPECT_TRUE(Fails(receive(0, {0}, tokens), absl::StatusCode::kInvalidArgument, "num_tokens"));
  }
  EXPECT_TRUE(Fails(receive(0, {0}, 0, -1), absl::StatusCode::kInvalidArgument, "timeout_ms"));
  EXPECT_EQ(Metric(*decode_, "receives_waiting"), 1);
}

TEST_F(Pushing, EndpointsThatTakeNone) {
  const auto pulls = MakeDecode(target_, SmallChunks());
  EXPECT_EQ(pulls->address(), "");
  EXPECT_TRUE(Fails(pulls->Receive({0, {1}, 0, 0}).status(), absl::StatusCode::kFailedPrecondition,
                    "accept_pushes"));
  const auto other = MakePrefill(source_, SmallChunks());
  const ReceiveTicket at_prefill{other->address(), other->epoch(), 77, 6, 0};
  EXPECT_TRUE(Fails(PushStatus(at_prefill), absl::StatusCode::kUnimplemented, other->address()));
  // And a decode side that takes pushes has nothing to fetch.
  const Ticket at_decode{decode_->address(), decode_->epoch(), 77, 1, 0};
  EXPECT_TRUE(Fails(Fetch(*pulls, at_decode, {0})->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "publishes nothing"));
}

TEST_F(Pushing, AnotherModel) {
  const auto other = MakePrefill(source_, SmallChunks(), "other/model");
  EXPECT_TRUE(Fails(Push(*other, Receive(*decode_, local_).ticket, *source_, pages_)->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "test/model", "other/model"));
}

// The same port, another process.
TEST_F(Pushing, DecodeEndpointRestartedAtItsAddress) {
  FillPattern(*source_, kSourceSeed);
  const ReceiveTicket old = Receive(*decode_, local_).ticket;
  Config config = SmallChunks();
  config.listen_port = PortOf(old.address);
  decode_.reset();
  decode_ = MakePushedDecode(target_, config);
  EXPECT_TRUE(Fails(PushStatus(old), absl::StatusCode::kNotFound, "made by this process?"));
  const auto receive = Receive(*decode_, local_);
  ASSERT_TRUE(IsOk(PushStatus(receive.ticket)));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, local_, kSourceSeed, pages_));
  // With a session with the new process up, which a stale ticket does no harm.
  const Under under = HeldPush();
  EXPECT_TRUE(Fails(PushStatus(old), absl::StatusCode::kNotFound, "has restarted since"));
  FinishLayers(under.push->lease_id());
  EXPECT_TRUE(IsOk(under.push->Wait(Soon())));
}

// ---------------------------------------------------------------- ends from one side

TEST_F(Pushing, NobodyPushes) {
  const auto receive = Receive(*decode_, local_, 0, 1000);
  EXPECT_EQ(Metric(*decode_, "receives_waiting"), 1);
  const Deadline begin = Clock::now();
  EXPECT_TRUE(Fails(receive.handle->WaitLayer(0, Soon()), absl::StatusCode::kDeadlineExceeded,
                    "nobody has pushed"));
  EXPECT_TRUE(receive.handle->done());
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 15);
  EXPECT_EQ(receive.handle->missing_pages(), local_);
  // The handle is done first.
  EXPECT_TRUE(WaitFor([&] { return Metric(*decode_, "receives_waiting") == 0; }, Soon()));
  EXPECT_TRUE(Fails(PushStatus(receive.ticket), absl::StatusCode::kFailedPrecondition,
                    "has already ended: DEADLINE_EXCEEDED"));
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
}

TEST_F(Pushing, TheDecodeSideCancelsBeforeThePush) {
  const auto receive = Receive(*decode_, local_);
  receive.handle->Cancel();
  EXPECT_TRUE(Fails(receive.handle->Wait(Soon()), absl::StatusCode::kCancelled));
  EXPECT_TRUE(Fails(PushStatus(receive.ticket), absl::StatusCode::kFailedPrecondition,
                    "has already ended: CANCELLED"));
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
}

TEST_F(Pushing, TheDecodeSideCancelsInTheMiddle) {
  const Under under = HeldPush();
  under.receive.handle->Cancel();
  EXPECT_TRUE(Fails(under.receive.handle->Wait(Soon()), absl::StatusCode::kCancelled));
  EXPECT_EQ(under.receive.handle->missing_pages(), local_);
  EXPECT_TRUE(Fails(under.push->Wait(Soon()), absl::StatusCode::kCancelled, decode_->address()));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(under.push->lease_id(), Clock::now()), "released");
  EXPECT_TRUE(Fails(prefill_->AllLayersReady(under.push->lease_id()),
                    absl::StatusCode::kFailedPrecondition));
  for (int64_t layer = 1; layer < layers_; ++layer) WriteLayer(layer);
  Fence();
  EXPECT_TRUE(HoldsPages(*target_, local_, kOwnSeed, local_, 1, layers_));
}

TEST_F(Pushing, TheDecodeSidesDeadlineInTheMiddle) {
  Fence();
  const Under under = HeldPush(/*receive_ms=*/1000);
  EXPECT_TRUE(Fails(under.receive.handle->Wait(Soon()), absl::StatusCode::kDeadlineExceeded,
                    "the fetch from prefill", "bytes arrived"));
  EXPECT_TRUE(Fails(under.push->Wait(Soon()), absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(under.push->lease_id(), Clock::now()), "released");
}

TEST_F(Pushing, ThePrefillSideCancelsInTheMiddle) {
  const Under under = HeldPush();
  under.push->Cancel();
  EXPECT_TRUE(Fails(under.push->Wait(Soon()), absl::StatusCode::kCancelled));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(under.push->lease_id(), Clock::now()), "released")
      << "the push had ended before its lease";
  EXPECT_TRUE(Fails(under.receive.handle->Wait(Soon()), absl::StatusCode::kAborted,
                    "the prefill side gave the push up"));
  EXPECT_EQ(under.receive.handle->missing_pages(), local_);
  under.push->Cancel();  // Of no effect.
  EXPECT_TRUE(Fails(PushStatus(under.receive.ticket), absl::StatusCode::kFailedPrecondition,
                    "has already ended: ABORTED"));
  EXPECT_TRUE(HoldsPages(*target_, local_, kOwnSeed, local_, 1, layers_));
}

TEST_F(Pushing, ThePrefillSideReleasesInTheMiddle) {
  const Under under = HeldPush();
  ASSERT_TRUE(IsOk(prefill_->Release(under.push->lease_id(), Soon())));
  EXPECT_TRUE(Fails(under.receive.handle->Wait(Soon()), absl::StatusCode::kAborted, "given up by",
                    "took the request back"));
  EXPECT_TRUE(Fails(under.push->Wait(Soon()), absl::StatusCode::kAborted));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(under.push->lease_id()), "released");
}

TEST_F(Pushing, ThePrefillSidesDeadlineInTheMiddle) {
  Fence();
  const Under under = HeldPush(0, /*push_ms=*/1000);
  EXPECT_TRUE(Fails(under.push->Wait(Soon()), absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(under.push->lease_id(), Clock::now()), "released");
  EXPECT_TRUE(Fails(under.receive.handle->Wait(Soon()), absl::StatusCode::kAborted));
}

TEST_F(Pushing, NobodyListens) {
  Config config = SmallChunks();
  config.connect_timeout_ms = 600000;  // Not what ends it.
  prefill_ = MakePrefill(source_, config);
  const ReceiveTicket ticket{"tcp://127.0.0.1:1", 5, 6, 6, 0};  // tcpmux; nothing here listens.
  EXPECT_TRUE(Fails(PushStatus(ticket), absl::StatusCode::kUnavailable,
                    "cannot connect to tcp://127.0.0.1:1"));
  const auto push = Push(*prefill_, ticket, *source_, pages_, -1, 50);
  EXPECT_TRUE(Fails(push->Wait(Soon()), absl::StatusCode::kDeadlineExceeded,
                    "no answer to 'push' in time"));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(push->lease_id(), Clock::now()), "released");
}

TEST_F(Pushing, DecodeEndpointDestroyedInTheMiddle) {
  const Under under = HeldPush();
  const auto waiting = Receive(*decode_, {40});
  const Deadline begin = Clock::now();
  decode_.reset();
  EXPECT_TRUE(under.receive.handle->done());
  EXPECT_TRUE(Fails(under.receive.handle->status(), absl::StatusCode::kCancelled, "closing"));
  EXPECT_TRUE(waiting.handle->done());
  EXPECT_TRUE(Fails(waiting.handle->status(), absl::StatusCode::kCancelled, "closing"));
  waiting.handle->Cancel();  // On a handle that has outlived its endpoint.
  const absl::Status status = under.push->Wait(Soon());
  EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsCancelled(status)) << status.ToString();
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(under.push->lease_id(), Clock::now()), "released");
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 15);
}

TEST_F(Pushing, PrefillEndpointDestroyedInTheMiddle) {
  const Under under = HeldPush();
  prefill_.reset();
  EXPECT_TRUE(under.push->done());
  EXPECT_TRUE(Fails(under.push->status(), absl::StatusCode::kCancelled, "closing"));
  under.push->Cancel();
  const absl::Status status = under.receive.handle->Wait(Soon());
  EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsAborted(status)) << status.ToString();
  EXPECT_EQ(under.receive.handle->missing_pages(), local_);
  // The decode side serves on.
  prefill_ = MakePrefill(source_, SmallChunks());
  for (int64_t layer = 0; layer < layers_; ++layer) WriteLayer(layer);
  Fence();
}

// At full speed, over and over, by either side: the pages are their owners' at once, and stay as
// they are.
TEST_F(Pushing, CancelRaceLeavesPagesAlone) {
  const KvLayout layout = KvLayout::Mha(8, 16, 4, 64, DType::kBFloat16);
  const auto source = MakePatternPool(layout, 64, kSourceSeed);
  const auto target = MakePatternPool(layout, 64, kOwnSeed);
  const auto prefill = MakePrefill(source, SmallChunks());
  const auto decode = MakePushedDecode(target, SmallChunks());
  std::mt19937_64 random(5);
  const std::vector<int64_t> pages = MakePages("rand", 64, 64, &random);
  for (int round = 0; round < 30; ++round) {
    const auto receive = Receive(*decode, pages);
    const auto push = Push(*prefill, receive.ticket, *source, pages);
    (void)receive.handle->WaitLayer(static_cast<int64_t>(random() % 4), Soon());
    if (round % 2 == 0) {
      receive.handle->Cancel();
    } else {
      push->Cancel();
    }
    const absl::Status received = receive.handle->Wait(Soon());
    // UNAVAILABLE: what was being read in place was taken back meanwhile.
    ASSERT_TRUE(received.ok() || absl::IsCancelled(received) || absl::IsAborted(received) ||
                absl::IsUnavailable(received))
        << received.ToString();
    FillPattern(*target, 1000 + round);  // The pages are ours again.
    const absl::Status pushed = push->Wait(Soon());
    ASSERT_TRUE(pushed.ok() || absl::IsCancelled(pushed) || absl::IsAborted(pushed) ||
                absl::IsUnavailable(pushed))
        << pushed.ToString();
    ASSERT_TRUE(received.ok() || !pushed.ok());
    const auto fence = Receive(*decode, {pages[0]});
    ASSERT_TRUE(IsOk(Push(*prefill, fence.ticket, *source, {pages[0]})->Wait(Soon())));
    ASSERT_TRUE(HoldsExactly(*target, 1000 + round, std::vector{pages[0]}, kSourceSeed,
                             std::vector{pages[0]}))
        << "round " << round;
  }
  EXPECT_EQ(prefill->num_live_leases(), 0);
}

TEST_F(Pushing, Limits) {
  FillPattern(*source_, kSourceSeed);
  Config config = SmallChunks();
  config.max_calls_per_peer = 1;
  decode_ = MakePushedDecode(target_, config);
  const Under under = HeldPush();
  const auto second = Receive(*decode_, {30, 31, 32, 33, 34, 35});
  EXPECT_TRUE(Fails(PushStatus(second.ticket), absl::StatusCode::kResourceExhausted,
                    "max_calls_per_peer (1)"));
  FinishLayers(under.push->lease_id());
  ASSERT_TRUE(IsOk(under.push->Wait(Soon())));
  EXPECT_TRUE(IsOk(PushStatus(second.ticket)));  // It was refused and so not taken.
}

// ---------------------------------------------------------------- without memory

class PushingWithoutMemory : public Pushing {
 protected:
  void SetUp() override {
    FillPattern(*source_, kSourceSeed);
    // What grows by leaps is not to do so in the middle of a test.
    for (int i = 0; i < kOthers; ++i) Must(prefill_->Publish({{0}}));
    publication_.pages = pages_;
    publication_.ready_layers = layers_;
  }
  static constexpr int64_t kOthers = 60;
  PrefillEndpoint::Publication publication_;
};

TEST_F(PushingWithoutMemory, APushLeavesNoLease) {
  const auto receive = Receive(*decode_, local_);
  std::shared_ptr<PushHandle> push;
  CallWithoutMemory([&] { push = *prefill_->Push(receive.ticket, publication_, 0); },
                    [&] { EXPECT_EQ(prefill_->num_live_leases(), kOthers); });
  EXPECT_TRUE(IsOk(push->Wait(Soon())));
  EXPECT_TRUE(IsOk(receive.handle->Wait(Soon())));
}

TEST_F(PushingWithoutMemory, APublicationLeavesNoLease) {
  CallWithoutMemory([&] { EXPECT_TRUE(prefill_->Publish(publication_).ok()); },
                    [&] { EXPECT_EQ(prefill_->num_live_leases(), kOthers); });
  EXPECT_EQ(prefill_->num_live_leases(), kOthers + 1);
}

TEST_F(PushingWithoutMemory, AReceiveIsNone) {
  DecodeEndpoint::Reception reception;
  reception.pages = local_;
  DecodeEndpoint::Receiving receive;
  // Many: their table grows.
  for (int64_t i = 0; i < 20; ++i) {
    CallWithoutMemory([&] { receive = *decode_->Receive(reception); },
                      [&] { EXPECT_EQ(Metric(*decode_, "receives_waiting"), i); });
  }
  EXPECT_TRUE(IsOk(PushStatus(receive.ticket)));
}

}  // namespace
}  // namespace kvferry
