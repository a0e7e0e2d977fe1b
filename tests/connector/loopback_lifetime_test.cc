// Ends that come from one side: releases, expiries, endpoints that go away.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "base/random.h"
#include "tests/support/control_relay.h"
#include "tests/support/endpoints.h"
#include "transport/node.h"

namespace kvferry {
namespace {

constexpr uint64_t kSourceSeed = 1;
constexpr uint64_t kOwnSeed = 2;

class Lifetime : public testing::Test {
 protected:
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 32, kSourceSeed);
  std::shared_ptr<KvPool> target_ = MakePatternPool(SmallLayout(), 32, kOwnSeed);
  std::unique_ptr<PrefillEndpoint> prefill_ = MakePrefill(source_, SmallChunks());
  std::unique_ptr<DecodeEndpoint> decode_ = MakeDecode(target_, SmallChunks());
  const std::vector<int64_t> pages_ = {4, 9, 2};

  // A fetch with one layer done, that waits for the second.
  std::shared_ptr<FetchHandle> HeldFetch(const Ticket& ticket) {
    auto handle = Fetch(*decode_, ticket, pages_);
    EXPECT_TRUE(IsOk(handle->WaitLayer(0, Soon())));
    return handle;
  }
};

TEST_F(Lifetime, ReleaseDuringAFetchEndsBoth) {
  const Ticket ticket = Publish(*prefill_, *source_, pages_, 1);
  const auto handle = HeldFetch(ticket);
  ASSERT_TRUE(IsOk(prefill_->Release(ticket.lease_id, Soon())));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(ticket.lease_id, Clock::now()), "released")
      << "Release() returned before the lease had ended";
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kAborted, "given up by",
                    "took the request back"));
  EXPECT_EQ(handle->missing_pages(), pages_);
  EXPECT_TRUE(Fails(prefill_->Release(ticket.lease_id, Soon()),
                    absl::StatusCode::kFailedPrecondition, "released"));
  EXPECT_TRUE(
      Fails(prefill_->LayerReady(ticket.lease_id, 1), absl::StatusCode::kFailedPrecondition));
}

// It shares all connections, and has none of the threads.
TEST_F(Lifetime, AForkedChildThatEndsEndsNothingOfItsParents) {
  const Ticket ticket = Publish(*prefill_, *source_, pages_, 1);
  const auto handle = HeldFetch(ticket);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    prefill_.reset();
    decode_.reset();
    _exit(0);
  }
  int ended = 0;
  ASSERT_EQ(waitpid(child, &ended, 0), child);
  EXPECT_TRUE(WIFEXITED(ended) && WEXITSTATUS(ended) == 0) << ended;
  ASSERT_TRUE(IsOk(prefill_->AllLayersReady(ticket.lease_id)));
  EXPECT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_EQ(Metric(*prefill_, "peers_lost") + Metric(*decode_, "peers_lost"), 0);
}

TEST_F(Lifetime, ReleaseOfTheUnknown) {
  EXPECT_TRUE(Fails(prefill_->Release(RandomId(), Soon()), absl::StatusCode::kNotFound));
}

TEST_F(Lifetime, ReleaseRefusesAParkedFetchAtOnce) {
  // The fetch is parked: its lease is not published yet. Publishing and releasing ends the waiting.
  const Ticket early{prefill_->address(), prefill_->epoch(), RandomId(), 3, 0};
  const auto handle = Fetch(*decode_, early, pages_);
  ASSERT_TRUE(WaitFor([&] { return Metric(*decode_, "peers") == 1; }, Soon()));
  PrefillEndpoint::Publication publication;
  publication.pages = pages_;
  publication.lease_id = early.lease_id;
  ASSERT_TRUE(IsOk(prefill_->Publish(publication)));
  ASSERT_TRUE(IsOk(prefill_->Release(early.lease_id, Soon())));
  const absl::Status status = handle->Wait(Soon());
  EXPECT_TRUE(absl::IsAborted(status) || absl::IsFailedPrecondition(status)) << status.ToString();
}

// A fetch holds its lease; it expires soon after the fetch has ended without success, without
// anything else having to happen (the heartbeat timeout is far away here).
TEST_F(Lifetime, ExpiryWaitsForTheFetchAndComesSoonAfterIt) {
  Config config = SmallChunks();
  config.heartbeat_interval_ms = 100000;
  config.heartbeat_timeout_ms = 1000000;
  decode_ = MakeDecode(target_, config);
  prefill_ = MakePrefill(source_, config);
  EndedLeases ended(prefill_.get());
  const Ticket ticket = Publish(*prefill_, *source_, pages_, 1, 2000);
  const auto handle = HeldFetch(ticket);
  const Ticket other = Publish(*prefill_, *source_, {1}, 0, 2100);
  EXPECT_EQ(ended.Wait(other.lease_id), "expired");  // So the first one's time is over too.
  EXPECT_FALSE(ended.Contains(ticket.lease_id)) << "expired in the middle of a fetch";
  EXPECT_FALSE(handle->done());
  handle->Cancel();
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kCancelled));
  EXPECT_EQ(ended.Wait(ticket.lease_id, DeadlineInMs(10000)), "expired");
}

// By the one that is to fetch them, which has no room yet.
TEST_F(Lifetime, LeasesThatWillBeFetchedAreKept) {
  Config config = SmallChunks();
  config.lease_ms = 20000;
  prefill_ = MakePrefill(source_, config);
  EndedLeases ended(prefill_.get());
  const Ticket kept = Publish(*prefill_, *source_, pages_, -1, 4000);
  const Ticket early = Publish(*prefill_, *source_, {1}, -1, 4000);
  const Ticket other = Publish(*prefill_, *source_, {3}, -1, 4000);
  Ticket without_epoch = early, nowhere = other;
  without_epoch.epoch = 0;
  nowhere.address = "tcp://127.0.0.1:1";
  decode_->Keep({kept, nowhere, without_epoch});
  EXPECT_EQ(ended.Wait(other.lease_id), "expired");
  EXPECT_FALSE(ended.Contains(kept.lease_id) || ended.Contains(early.lease_id));
  EXPECT_TRUE(IsOk(Fetch(*decode_, kept, pages_)->Wait(Soon())));
  EXPECT_TRUE(IsOk(Fetch(*decode_, early, {20})->Wait(Soon())));
  EXPECT_EQ(ended.Wait(kept.lease_id), "fetched");
}

TEST_F(Lifetime, WhatIsNoListOfLeasesToKeepIsRefused) {
  const auto pool = MakePatternPool(SmallLayout(), 8, 3);
  const auto node = Must(Node::Start({SmallChunks(), kTestModel, "asks", pool}));
  const auto answer = [&](const std::string& function, const Fields& args) {
    return BeginCall(*node, prefill_->address(), function, args).get();
  };
  const auto kept = answer("keep", Fields().Set("leases", std::string(16, '\1')));
  EXPECT_EQ(Must(Must(kept).Uint("kept")), 0);
  EXPECT_EQ(Must(Must(answer("keep", Fields().Set("leases", ""))).Uint("kept")), 0);
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_TRUE(Fails(answer("keep", Fields().Set("leases", "1234567")), kInvalid, "7 bytes"));
  EXPECT_TRUE(Fails(answer("keep", Fields()), kInvalid, "leases"));
  EXPECT_TRUE(Fails(answer("keep", Fields().Set("leases", std::string(8 * 4097, 'x'))), kInvalid));
  EXPECT_TRUE(Fails(answer("keeps", Fields()), absl::StatusCode::kUnimplemented, "'keeps'"));
}

// The same when the decode endpoint goes away.
TEST_F(Lifetime, ExpiryComesSoonAfterTheDecodeSideWentAway) {
  Config config = SmallChunks();
  config.heartbeat_interval_ms = 100000;
  config.heartbeat_timeout_ms = 1000000;
  decode_ = MakeDecode(target_, config);
  prefill_ = MakePrefill(source_, config);
  EndedLeases ended(prefill_.get());
  const Ticket ticket = Publish(*prefill_, *source_, pages_, 1, 2000);
  const auto handle = HeldFetch(ticket);
  decode_.reset();
  EXPECT_EQ(ended.Wait(ticket.lease_id, DeadlineInMs(10000)), "expired");
}

TEST_F(Lifetime, DecodeEndpointDestroyedMidFetch) {
  const Ticket ticket = Publish(*prefill_, *source_, pages_, 1, 60000);
  const auto handle = HeldFetch(ticket);
  const Deadline begin = Clock::now();
  decode_.reset();
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 15);  // The fetch's deadline is at 30.
  EXPECT_TRUE(handle->done());
  EXPECT_TRUE(Fails(handle->status(), absl::StatusCode::kCancelled, "closing"));
  EXPECT_EQ(handle->missing_pages(), pages_);
  handle->Cancel();  // On a handle that has outlived its endpoint.
  // The prefill side serves on: the same lease, to another decode endpoint.
  ASSERT_TRUE(IsOk(prefill_->AllLayersReady(ticket.lease_id)));
  decode_ = MakeDecode(target_, SmallChunks());
  FillPattern(*target_, kOwnSeed);
  // The transfer of the old one ends when its goodbye has come.
  ASSERT_TRUE(WaitFor([&] { return Metric(*prefill_, "transfers_active") == 0; }, Soon()));
  ASSERT_TRUE(IsOk(Fetch(*decode_, ticket, pages_)->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, pages_, kSourceSeed, pages_));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(ticket.lease_id), "fetched");
}

TEST_F(Lifetime, PrefillEndpointDestroyedMidFetch) {
  const auto handle = HeldFetch(Publish(*prefill_, *source_, pages_, 1));
  const Deadline begin = Clock::now();
  prefill_.reset();
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kUnavailable, "closing"));
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 15);  // The fetch's deadline is at 30.
  // Another prefill endpoint is another peer; the decode side goes on with it.
  prefill_ = MakePrefill(source_, SmallChunks());
  FillPattern(*target_, kOwnSeed);
  ASSERT_TRUE(IsOk(Fetch(*decode_, Publish(*prefill_, *source_, pages_), pages_)->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, pages_, kSourceSeed, pages_));
}

// The same port, another process as far as the decode side can tell.
TEST_F(Lifetime, PrefillEndpointRestartedAtItsAddress) {
  const Ticket old = Publish(*prefill_, *source_, pages_);
  ASSERT_TRUE(IsOk(Fetch(*decode_, Publish(*prefill_, *source_, pages_), pages_)->Wait(Soon())));
  Config config = SmallChunks();
  config.listen_port = PortOf(old.address);
  prefill_.reset();
  prefill_ = MakePrefill(source_, config);
  ASSERT_TRUE(WaitFor([&] { return Metric(*decode_, "peers") == 0; }, Soon()));
  EXPECT_TRUE(
      Fails(Fetch(*decode_, old, pages_)->Wait(Soon()), absl::StatusCode::kNotFound, "restarted"));
  EXPECT_TRUE(IsOk(Fetch(*decode_, Publish(*prefill_, *source_, pages_), pages_)->Wait(Soon())));
}

TEST_F(Lifetime, EndpointsDestroyedInTheMiddleOfFullSpeed) {
  const KvLayout layout = KvLayout::Mha(8, 16, 8, 64, DType::kBFloat16);
  const auto source = MakePatternPool(layout, 128, kSourceSeed);
  std::mt19937_64 random(9);
  const std::vector<int64_t> pages = MakePages("rand", 128, 128, &random);
  for (int round = 0; round < 6; ++round) {
    const auto target = MakePatternPool(layout, 128, kOwnSeed);
    auto prefill = MakePrefill(source, SmallChunks());
    auto decode = MakeDecode(target, SmallChunks());
    const auto handle = Fetch(*decode, Publish(*prefill, *source, pages), pages);
    (void)handle->WaitLayer(round / 2, Soon());
    if (round % 2 == 0) {
      prefill.reset();
    } else {
      decode.reset();
    }
    const absl::Status status = handle->Wait(Soon());
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status) || absl::IsCancelled(status))
        << status.ToString();
    FillPattern(*target, kOwnSeed);
    prefill.reset();
    decode.reset();
    EXPECT_TRUE(IsUntouched(*target, kOwnSeed)) << "written after the fetch had ended";
  }
}

// A handle and the pools may outlive everything else.
TEST_F(Lifetime, HandleOutlivesBothEndpoints) {
  auto handle = HeldFetch(Publish(*prefill_, *source_, pages_, 1));
  prefill_.reset();
  decode_.reset();
  source_.reset();
  EXPECT_TRUE(handle->done());
  EXPECT_FALSE(handle->Wait(Clock::now()).ok());
  EXPECT_FALSE(handle->WaitLayer(3, Clock::now()).ok());
  EXPECT_TRUE(IsOk(handle->WaitLayer(0, Clock::now())));
  handle->Cancel();
}

// Nothing passes on the control connection any more, and the data connection is well. The side that
// finds out first closes both; the other one cannot know why. (On one host it does not notice, and
// finds out by itself.)
TEST_F(Lifetime, AFetchOutlivesItsControlConnection) {
  Config config = SmallChunks();
  config.key_file = "";  // The relay has none.
  config.heartbeat_interval_ms = 50;
  config.heartbeat_timeout_ms = 1000;
  prefill_ = MakePrefill(source_, config);
  config.heartbeat_timeout_ms = 4000;
  decode_ = MakeDecode(target_, config);
  std::atomic<bool> silent = false;
  ControlRelay relay(prefill_->address(), [&](ControlRelay::Heard& heard) {
    if (std::holds_alternative<HelloMsg>(heard.message.body)) silent = false;
    return silent ? ControlRelay::Verdict::kDrop : ControlRelay::Verdict::kPass;
  });
  Ticket ticket = Publish(*prefill_, *source_, pages_, 1, 60000);
  ticket.address = relay.address();
  const auto handle = HeldFetch(ticket);
  silent = true;
  ASSERT_TRUE(
      WaitFor([&] { return handle->done() || Metric(*decode_, "fetches_restarted") > 0; }, Soon()));
  ASSERT_TRUE(IsOk(prefill_->AllLayersReady(ticket.lease_id)));
  EXPECT_TRUE(IsOk(handle->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, pages_, kSourceSeed, pages_));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(ticket.lease_id), "fetched");
  decode_.reset();  // While somebody passes its goodbye on.
}

}  // namespace
}  // namespace kvferry
