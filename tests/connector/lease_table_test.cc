#include "connector/lease_table.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <tuple>

#include "tests/support/failing_new.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr uint64_t kLease = 0xabc;

PageRuns Pages(std::vector<int64_t> pages) { return Must(PageRuns::FromPages(pages)); }

class Leases : public testing::Test {
 protected:
  Deadline At(int64_t ms) const { return start_ + std::chrono::milliseconds(ms); }
  absl::Status Publish(uint64_t lease = kLease, int64_t expires_ms = 100) {
    return table_.Publish(lease, Pages({3, 4, 9}), 0, At(expires_ms));
  }
  // The one lease that has ended since the last call.
  std::string Ended() {
    const std::vector<EndedLease> ended = table_.TakeEnded();
    if (ended.empty()) return "none";
    EXPECT_EQ(ended.size(), 1u);
    EXPECT_EQ(ended[0].lease_id, kLease);
    return std::string(LeaseOutcomeName(ended[0].outcome));
  }

  const Deadline start_ = Clock::now();
  LeaseTable table_{Config()};
};

// One test for each row of the table in lease_table.h.

TEST_F(Leases, UnneededEndsWhenItIsPublished) {
  table_.NothingNeeded(kLease, {});
  EXPECT_EQ(Ended(), "none");
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, {}), absl::StatusCode::kFailedPrecondition,
                    "needs nothing"));
  EXPECT_TRUE(Fails(table_.Take(kLease), absl::StatusCode::kFailedPrecondition));
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_EQ(Ended(), "fetched");
  EXPECT_EQ(table_.num_live(), 0);
  EXPECT_TRUE(Fails(Publish(), absl::StatusCode::kAlreadyExists));  // As any other.
  EXPECT_TRUE(IsOk(table_.Take(kLease)));
}

TEST_F(Leases, UnknownGivenUp) {
  ASSERT_TRUE(IsOk(table_.GiveUp(kLease)));
  ASSERT_TRUE(IsOk(table_.GiveUp(kLease)));
  EXPECT_EQ(Ended(), "none");  // It never was one.
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, {}), absl::StatusCode::kFailedPrecondition,
                    "gave the request up"));
  table_.NothingNeeded(kLease, {});
  EXPECT_TRUE(Fails(Publish(), absl::StatusCode::kAlreadyExists, "given up"));
}

TEST_F(Leases, WhatWasPublishedIsNotGivenUp) {
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_TRUE(Fails(table_.GiveUp(kLease), absl::StatusCode::kAlreadyExists, "release it"));
  ASSERT_TRUE(IsOk(table_.Withdraw(kLease)));
  EXPECT_TRUE(Fails(table_.GiveUp(kLease), absl::StatusCode::kAlreadyExists));
  EXPECT_EQ(Ended(), "released");
}

TEST_F(Leases, IdleBeginTransferHoldsIt) {
  ASSERT_TRUE(IsOk(Publish()));
  const absl::StatusOr<LeasedMemory> leased = table_.BeginTransfer(kLease, {});
  ASSERT_TRUE(IsOk(leased));
  EXPECT_EQ(leased->pages.ToPages(), (std::vector<int64_t>{3, 4, 9}));
  EXPECT_EQ(table_.Tick(At(1000)), Deadline::max());  // No expiry meanwhile, and none to wait for.
  EXPECT_EQ(Ended(), "none");
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, {}), absl::StatusCode::kFailedPrecondition,
                    "being fetched already"));
}

TEST_F(Leases, IdleExpires) {
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_EQ(table_.Tick(At(99)), At(100));
  EXPECT_EQ(Ended(), "none");
  EXPECT_EQ(table_.Tick(At(100)), Deadline::max());
  EXPECT_EQ(Ended(), "expired");
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, {}), absl::StatusCode::kFailedPrecondition,
                    "expired", "raise lease_ms"));
}

TEST_F(Leases, KeptLastsLonger) {
  ASSERT_TRUE(IsOk(Publish()));
  const std::vector<uint64_t> ids = {kLease, 77};
  EXPECT_EQ(table_.Keep(ids, At(50)), 1);  // It lasts longer anyway.
  EXPECT_EQ(table_.Keep(ids, At(300)), 1);
  EXPECT_EQ(table_.Keep(ids, At(200)), 1);
  EXPECT_LE(table_.Tick(At(299)), At(300));
  EXPECT_EQ(Ended(), "none");
  table_.Tick(At(300));
  EXPECT_EQ(Ended(), "expired");
  EXPECT_EQ(table_.Keep(ids, At(400)), 0);
}

TEST_F(Leases, NothingIsKeptForEver) {
  const int64_t last = 100 + Config().max_fetch_timeout_ms;
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_EQ(table_.Keep({kLease}, At(last + 1000)), 1);
  table_.Tick(At(last - 1));
  EXPECT_EQ(Ended(), "none");
  table_.Tick(At(last));
  EXPECT_EQ(Ended(), "expired");
}

TEST_F(Leases, IdleWithdraw) {
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_EQ(Must(table_.Withdraw(kLease)), true);
  EXPECT_EQ(Ended(), "released");
  EXPECT_TRUE(Fails(table_.Withdraw(kLease), absl::StatusCode::kFailedPrecondition, "released"));
}

TEST_F(Leases, IdleNothingNeeded) {
  ASSERT_TRUE(IsOk(Publish()));
  table_.NothingNeeded(kLease, {});
  EXPECT_EQ(Ended(), "fetched");
}

TEST_F(Leases, TransferringEndsWell) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  table_.EndTransfer(kLease, {}, absl::OkStatus());
  EXPECT_EQ(Ended(), "fetched");
  table_.EndTransfer(kLease, {}, absl::OkStatus());  // Too late to matter.
  EXPECT_EQ(Ended(), "none");
}

TEST_F(Leases, TransferringEndsBadlyAndIsIdleAgain) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  table_.EndTransfer(kLease, {}, absl::UnavailableError("gone"));
  EXPECT_EQ(Ended(), "none");
  EXPECT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  table_.EndTransfer(kLease, {}, absl::UnavailableError("gone"));
  table_.Tick(At(100));
  EXPECT_EQ(Ended(), "expired");
}

TEST_F(Leases, TransferringNothingNeededIsIgnored) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  table_.NothingNeeded(kLease, {});
  EXPECT_EQ(Ended(), "none");
}

TEST_F(Leases, TransferringWithdrawWaitsForTheTransfer) {
  for (const bool arrived : {true, false}) {
    const uint64_t lease = arrived ? 1 : 2;
    ASSERT_TRUE(IsOk(Publish(lease)));
    ASSERT_TRUE(IsOk(table_.BeginTransfer(lease, {})));
    EXPECT_EQ(Must(table_.Withdraw(lease)), false);
    EXPECT_TRUE(table_.TakeEnded().empty());
    table_.Tick(At(1000));
    EXPECT_TRUE(table_.TakeEnded().empty()) << "its pages are still being read";
    EXPECT_TRUE(
        Fails(table_.BeginTransfer(lease, {}), absl::StatusCode::kFailedPrecondition, "withdrawn"));
    EXPECT_EQ(Must(table_.Withdraw(lease)), false);  // Again, to no effect.
    table_.EndTransfer(lease, {}, arrived ? absl::OkStatus() : absl::AbortedError("taken back"));
    const std::vector<EndedLease> ended = table_.TakeEnded();
    ASSERT_EQ(ended.size(), 1u);
    EXPECT_EQ(ended[0].outcome, arrived ? LeaseOutcome::kFetched : LeaseOutcome::kReleased);
  }
}

TEST_F(Leases, IdleTake) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.Take(kLease)));
  EXPECT_EQ(Ended(), "fetched");
  EXPECT_TRUE(IsOk(table_.Take(kLease)));  // The same again.
  EXPECT_EQ(Ended(), "none");
  EXPECT_TRUE(Fails(table_.Withdraw(kLease), absl::StatusCode::kFailedPrecondition, "fetched"));
}

TEST_F(Leases, TransferringGoesOn) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  table_.GoOn(kLease, {}, At(300));
  EXPECT_EQ(table_.Tick(At(299)), At(300));
  EXPECT_EQ(Ended(), "none");
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  table_.GoOn(kLease, {}, At(200));  // Not a shorter time than it had.
  EXPECT_EQ(table_.Tick(At(299)), At(300));
  ASSERT_TRUE(IsOk(table_.Take(kLease)));
  EXPECT_EQ(Ended(), "fetched");
}

// It has begun in time, and may go on over another session.
TEST_F(Leases, TransferringLosesItsReaderAndIsIdleForAWhile) {
  const int64_t while_ms = Config().connect_timeout_ms;
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  const Deadline before = Clock::now();
  table_.OnReaderGone(kLease, {}, absl::UnavailableError("gone"));
  const Deadline expiry = table_.Tick(At(101));
  EXPECT_GE(expiry, before + std::chrono::milliseconds(while_ms));
  EXPECT_LE(expiry, DeadlineInMs(while_ms));
  EXPECT_EQ(Ended(), "none");
  EXPECT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  table_.EndTransfer(kLease, {}, absl::CancelledError("x"));
  table_.Tick(expiry);
  EXPECT_EQ(Ended(), "expired");
}

// However often that is.
TEST_F(Leases, ReadersThatAreLostKeepNoLeaseForEver) {
  Config config;
  config.connect_timeout_ms = 60000;
  config.max_fetch_timeout_ms = 5000;
  LeaseTable table(config);
  ASSERT_TRUE(IsOk(table.Publish(1, Pages({3}), 0, At(1000))));
  ASSERT_TRUE(IsOk(table.Publish(2, Pages({4}), 0, At(100000))));  // Nothing takes time away.
  for (int i = 0; i < 3; ++i) {
    for (const uint64_t lease : {1, 2}) {
      ASSERT_TRUE(IsOk(table.BeginTransfer(lease, {})));
      table.OnReaderGone(lease, {}, absl::UnavailableError("gone"));
    }
  }
  EXPECT_EQ(table.Tick(At(5999)), At(6000));
  EXPECT_EQ(table.Tick(At(6000)), At(100000));
}

TEST_F(Leases, AReaderThatIsLostKeepsNoLeaseBehindItsLastExpiry) {
  Config config;
  config.connect_timeout_ms = 60000;
  LeaseTable table(config);
  ASSERT_TRUE(IsOk(table.Publish(1, Pages({3}), 0, At(1000), nullptr, At(3000))));
  ASSERT_TRUE(IsOk(table.BeginTransfer(1, {})));
  table.OnReaderGone(1, {}, absl::UnavailableError("gone"));
  EXPECT_EQ(table.Tick(At(2999)), At(3000));
  EXPECT_EQ(table.Tick(At(3000)), Deadline::max());
}

TEST_F(Leases, TransferringTakeWaitsForTheTransfer) {
  for (const int end : {0, 1, 2}) {
    const uint64_t lease = 1 + end;
    ASSERT_TRUE(IsOk(Publish(lease)));
    ASSERT_TRUE(IsOk(table_.BeginTransfer(lease, {})));
    ASSERT_TRUE(IsOk(table_.Take(lease)));
    ASSERT_TRUE(IsOk(table_.Take(lease)));
    EXPECT_EQ(table_.Tick(At(1000)), Deadline::max());
    EXPECT_TRUE(
        Fails(table_.BeginTransfer(lease, {}), absl::StatusCode::kFailedPrecondition, "already"));
    EXPECT_EQ(Must(table_.Withdraw(lease)), false);  // To no effect.
    EXPECT_TRUE(table_.TakeEnded().empty()) << "its pages are still being read";
    if (end == 0) table_.EndTransfer(lease, {}, absl::OkStatus());
    if (end == 1) table_.EndTransfer(lease, {}, absl::UnavailableError("gone"));
    if (end == 2) table_.GoOn(lease, {}, At(100));
    const std::vector<EndedLease> ended = table_.TakeEnded();
    ASSERT_EQ(ended.size(), 1u);
    EXPECT_EQ(ended[0].outcome, LeaseOutcome::kFetched);
  }
}

TEST_F(Leases, WithdrawingIsNotTakenAndDoesNotGoOn) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  EXPECT_EQ(Must(table_.Withdraw(kLease)), false);
  EXPECT_TRUE(Fails(table_.Take(kLease), absl::StatusCode::kFailedPrecondition, "withdrawn"));
  table_.GoOn(kLease, {}, At(1000));
  EXPECT_EQ(Ended(), "released");
  EXPECT_TRUE(Fails(table_.Take(kLease), absl::StatusCode::kFailedPrecondition, "released"));
}

TEST_F(Leases, WhatExpiredIsNotTaken) {
  ASSERT_TRUE(IsOk(Publish()));
  table_.Tick(At(100));
  EXPECT_EQ(Ended(), "expired");
  EXPECT_TRUE(Fails(table_.Take(kLease), absl::StatusCode::kFailedPrecondition, "expired"));
  table_.GoOn(kLease, {}, At(1000));
  EXPECT_EQ(table_.num_live(), 0);
}

TEST_F(Leases, UnknownIsNotFound) {
  EXPECT_TRUE(Fails(table_.BeginTransfer(1, {}), absl::StatusCode::kNotFound, "unknown"));
  EXPECT_TRUE(Fails(table_.Withdraw(1), absl::StatusCode::kNotFound));
  EXPECT_TRUE(Fails(table_.Take(1), absl::StatusCode::kNotFound));
  table_.GoOn(1, {}, At(100));
  EXPECT_TRUE(Fails(table_.SetReadyLayers(1, 1), absl::StatusCode::kNotFound));
  EXPECT_EQ(table_.ReadyLayers(1), 0);
  table_.EndTransfer(1, {}, absl::OkStatus());
  EXPECT_TRUE(table_.TakeEnded().empty());
}

TEST_F(Leases, AnIdIsUsedOnce) {
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_TRUE(Fails(Publish(), absl::StatusCode::kAlreadyExists));
  ASSERT_TRUE(IsOk(table_.Withdraw(kLease)));
  EXPECT_TRUE(Fails(Publish(), absl::StatusCode::kAlreadyExists));
}

TEST_F(Leases, ReadyLayersOnlyGrow) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.SetReadyLayers(kLease, 3)));
  ASSERT_TRUE(IsOk(table_.SetReadyLayers(kLease, 1)));
  EXPECT_EQ(table_.ReadyLayers(kLease), 3);
}

TEST_F(Leases, AskedForBeforeAndAfterTheyArePublished) {
  const std::vector<uint64_t> all = {1, 2, 3, 4};
  ASSERT_TRUE(IsOk(Publish(1)));
  EXPECT_TRUE(table_.AskedFor(all).empty());
  ASSERT_TRUE(IsOk(table_.BeginTransfer(1, {})));
  EXPECT_FALSE(IsOk(table_.BeginTransfer(2, {})));  // Not published yet.
  table_.NothingNeeded(3, {});
  EXPECT_EQ(table_.AskedFor(all), (std::vector<uint64_t>{1, 2, 3}));
  ASSERT_TRUE(IsOk(Publish(2)));
  ASSERT_TRUE(Must(table_.Unpublish(2)));
  table_.EndTransfer(1, {}, absl::OkStatus());
  EXPECT_EQ(table_.AskedFor(all), (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_TRUE(table_.AskedFor({}).empty());
}

TEST_F(Leases, MemoryOfEndedLeasesIsBounded) {
  for (uint64_t lease = 1; lease <= 70000; ++lease) {
    ASSERT_TRUE(IsOk(Publish(lease)));
    ASSERT_TRUE(IsOk(table_.Withdraw(lease)));
    table_.TakeEnded();
  }
  EXPECT_TRUE(Fails(table_.Withdraw(70000), absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Fails(table_.Withdraw(1), absl::StatusCode::kNotFound));  // Forgotten.
  // A peer can name as many as it likes.
  for (uint64_t lease = 100000; lease < 170000; ++lease) table_.NothingNeeded(lease, {});
  EXPECT_TRUE(Fails(table_.Withdraw(100000), absl::StatusCode::kNotFound));
  EXPECT_TRUE(Fails(table_.Withdraw(169999), absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(table_.AskedFor({100000, 169999}), std::vector<uint64_t>{169999});
}

// Of ids that they invent, without end.
TEST_F(Leases, WhatPeersSayOfOthersIsNotForgottenInPlaceOfOurs) {
  constexpr uint64_t kFetched = 1, kGivenUp = 2, kUnpublished = 3, kUnneeded = 4, kLive = 5;
  constexpr uint64_t kAwaited = 6;  // To be published again.
  ASSERT_TRUE(IsOk(Publish(kFetched)));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kFetched, {})));
  table_.EndTransfer(kFetched, {}, absl::OkStatus());
  ASSERT_TRUE(IsOk(table_.GiveUp(kGivenUp)));
  for (const uint64_t lease : {kUnpublished, kUnneeded}) {
    ASSERT_TRUE(IsOk(Publish(lease)));
    table_.NothingNeeded(lease, {0, 2});
    ASSERT_TRUE(Must(table_.Unpublish(lease)));
  }
  table_.NothingNeeded(kUnneeded, {1, 2});
  EXPECT_FALSE(IsOk(table_.BeginTransfer(kLive, {})));  // Not published yet.
  ASSERT_TRUE(IsOk(Publish(kLive, 60000)));
  ASSERT_TRUE(IsOk(Publish(kAwaited)));
  ASSERT_TRUE(Must(table_.Unpublish(kAwaited)));
  for (const uint64_t lease : {kGivenUp, kAwaited}) {
    EXPECT_FALSE(IsOk(table_.BeginTransfer(lease, {})));
  }
  for (uint64_t lease = 100000; lease < 170000; ++lease) {
    EXPECT_TRUE(Fails(table_.BeginTransfer(lease, {0, 2}), absl::StatusCode::kNotFound));
    table_.NothingNeeded(lease, {0, 2});
    table_.NothingNeeded(lease + 100000, {});
  }
  const std::vector<uint64_t> asked = {kFetched, kUnpublished, kUnneeded,
                                       kLive,    kGivenUp,     kAwaited};
  EXPECT_EQ(table_.AskedFor(asked), asked);
  EXPECT_TRUE(Fails(table_.BeginTransfer(kFetched, {}), absl::StatusCode::kFailedPrecondition,
                    "has already been fetched"));
  EXPECT_TRUE(IsOk(table_.Take(kFetched)));
  EXPECT_TRUE(Fails(table_.BeginTransfer(kGivenUp, {}), absl::StatusCode::kFailedPrecondition,
                    "gave the request up"));
  EXPECT_TRUE(Fails(Publish(kGivenUp), absl::StatusCode::kAlreadyExists));
  EXPECT_TRUE(Fails(table_.BeginTransfer(kUnneeded, {}), absl::StatusCode::kFailedPrecondition,
                    "needs nothing"));
  ASSERT_TRUE(IsOk(Publish(kUnpublished)));
  EXPECT_TRUE(Fails(table_.BeginTransfer(kUnpublished, {0, 2}),
                    absl::StatusCode::kFailedPrecondition, "already been fetched by reader 0"));
}

TEST_F(Leases, IdleUnpublishedIsUnknown) {
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_EQ(Must(table_.Unpublish(kLease)), true);
  EXPECT_EQ(Ended(), "none");
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, {}), absl::StatusCode::kNotFound));
  EXPECT_TRUE(Fails(table_.Unpublish(kLease), absl::StatusCode::kNotFound));
  EXPECT_TRUE(IsOk(table_.CheckNotEnded(kLease)));
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_EQ(table_.num_live(), 1);
}

TEST_F(Leases, TransferringUnpublishedWaitsForTheTransfer) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  EXPECT_EQ(Must(table_.Unpublish(kLease)), false);
  EXPECT_EQ(Must(table_.Unpublish(kLease)), false);                 // Again, to no effect.
  EXPECT_TRUE(Fails(Publish(), absl::StatusCode::kAlreadyExists));  // Its pages are read still.
  // Who asks now may wait for it.
  EXPECT_TRUE(
      Fails(table_.BeginTransfer(kLease, {}), absl::StatusCode::kNotFound, "not published now"));
  EXPECT_TRUE(Fails(table_.Take(kLease), absl::StatusCode::kFailedPrecondition));
  table_.EndTransfer(kLease, {}, absl::AbortedError("x"));
  EXPECT_EQ(Ended(), "none");
  EXPECT_EQ(table_.num_live(), 0);
  ASSERT_TRUE(IsOk(Publish()));
}

// Between the end of the transfer and its owner's look: the owner has its pages all the same.
TEST_F(Leases, UnpublishedAndUnneededRightAway) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  EXPECT_EQ(Must(table_.Unpublish(kLease)), false);
  table_.EndTransfer(kLease, {}, absl::AbortedError("x"));
  table_.NothingNeeded(kLease, {});
  EXPECT_TRUE(IsOk(table_.CheckNotEnded(kLease)));
  EXPECT_EQ(Ended(), "none");
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_EQ(Ended(), "fetched");
}

TEST_F(Leases, UnpublishingEndsIfAllHasArrived) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  EXPECT_EQ(Must(table_.Unpublish(kLease)), false);
  table_.EndTransfer(kLease, {}, absl::OkStatus());
  EXPECT_EQ(Ended(), "fetched");
  EXPECT_TRUE(
      Fails(table_.CheckNotEnded(kLease), absl::StatusCode::kFailedPrecondition, "fetched"));
  EXPECT_TRUE(Fails(table_.Unpublish(kLease), absl::StatusCode::kFailedPrecondition, "fetched"));
}

TEST_F(Leases, UnpublishingIsWithdrawn) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  EXPECT_EQ(Must(table_.Unpublish(kLease)), false);
  EXPECT_EQ(Must(table_.Withdraw(kLease)), false);
  table_.GoOn(kLease, {}, At(500));
  EXPECT_EQ(Ended(), "released");
}

// ---------------------------------------------------------------- memory that is not there

// Tables grow when they are full.
TEST_F(Leases, APublishThatFindsNoMemoryChangesNothing) {
  for (const int64_t published : {0, 7, 14, 200}) {
    SCOPED_TRACE(published);
    LeaseTable table{Config()};
    for (int64_t i = 0; i < published; ++i) {
      ASSERT_TRUE(IsOk(table.Publish(1000 + i, Pages({1}), 0, At(100000))));
    }
    CallWithoutMemory([&] { ASSERT_TRUE(IsOk(table.Publish(kLease, PageRuns(), 0, At(100000)))); },
                      [&] { EXPECT_EQ(table.num_live(), published); });
    EXPECT_TRUE(IsOk(table.Publish(kLease + 1, Pages({1}), 0, At(100000))));
    EXPECT_EQ(table.num_live(), published + 2);
    EXPECT_TRUE(Must(table.Withdraw(kLease)));
  }
}

TEST_F(Leases, AnEndThatFindsNoMemoryChangesNothing) {
  ASSERT_TRUE(IsOk(Publish()));
  CallWithoutMemory([&] { EXPECT_TRUE(table_.Withdraw(kLease).ok()); },
                    [&] {
                      EXPECT_EQ(Ended(), "none");
                      EXPECT_EQ(table_.num_live(), 1);
                    });
  EXPECT_EQ(Ended(), "released");
}

TEST_F(Leases, AnUnneededOneThatFindsNoMemoryWhenItIsPublishedIsUnneededStill) {
  table_.NothingNeeded(kLease, {});
  CallWithoutMemory([&] { ASSERT_TRUE(IsOk(Publish())); }, [&] { EXPECT_EQ(Ended(), "none"); });
  EXPECT_EQ(Ended(), "fetched");
}

TEST_F(Leases, RetractedIsUnknown) {
  EXPECT_FALSE(table_.Retract(kLease));
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_TRUE(table_.Retract(kLease));
  EXPECT_FALSE(table_.Retract(kLease));
  EXPECT_EQ(table_.num_live(), 0);
  EXPECT_EQ(Ended(), "none");
}

// Its owner would take the pages for its own again.
TEST_F(Leases, WhatIsBeingReadIsNotRetracted) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  EXPECT_FALSE(table_.Retract(kLease));
  table_.EndTransfer(kLease, {}, absl::OkStatus());
  EXPECT_FALSE(table_.Retract(kLease));
  EXPECT_EQ(Ended(), "fetched");
}

// ---------------------------------------------------------------- against a naive model

struct Model {
  enum State { kIdle, kTransferring, kWithdrawing, kUnpublishing, kTaken };
  struct Lease {
    State state = kIdle;
    int64_t expires = 0;
    int64_t ready = 0;
  };
  std::map<uint64_t, Lease> live;
  std::map<uint64_t, LeaseOutcome> ended;
  std::map<uint64_t, LeaseOutcome> never;  // Unneeded (fetched) or given up (released).
  std::vector<std::pair<uint64_t, LeaseOutcome>> untaken;

  void End(uint64_t id, LeaseOutcome outcome) {
    live.erase(id);
    ended[id] = outcome;
    untaken.emplace_back(id, outcome);
  }
  absl::StatusCode NotLive(uint64_t id) const {
    return ended.contains(id) || never.contains(id) ? absl::StatusCode::kFailedPrecondition
                                                    : absl::StatusCode::kNotFound;
  }
};

class ModelRun {
 public:
  explicit ModelRun(uint64_t seed) : random_(seed) {
    config_.max_leases = 40;
    table_ = std::make_unique<LeaseTable>(config_);
  }
  void Run(int64_t operations) {
    for (int64_t i = 0; i < operations && !testing::Test::HasFailure(); ++i) Step();
    Compare();
  }

 private:
  void Take(uint64_t id, bool live) {
    const absl::Status status = table_->Take(id);
    if (!live) {
      const bool fetched = model_.ended.contains(id) && model_.ended[id] == LeaseOutcome::kFetched;
      ASSERT_EQ(status.code(), fetched ? absl::StatusCode::kOk : model_.NotLive(id));
      return;
    }
    Model::Lease& lease = model_.live.at(id);
    ASSERT_EQ(status.code(),
              lease.state == Model::kWithdrawing || lease.state == Model::kUnpublishing
                  ? absl::StatusCode::kFailedPrecondition
                  : absl::StatusCode::kOk);
    if (lease.state == Model::kIdle) {
      model_.End(id, LeaseOutcome::kFetched);
    } else if (lease.state == Model::kTransferring) {
      lease.state = Model::kTaken;
    }
  }

  void Unpublish(uint64_t id, bool live) {
    const absl::StatusOr<bool> result = table_->Unpublish(id);
    ASSERT_EQ(result.status().code(), live ? absl::StatusCode::kOk : model_.NotLive(id));
    if (!live) return;
    Model::Lease& lease = model_.live.at(id);
    ASSERT_EQ(*result, lease.state == Model::kIdle);
    if (*result) {
      model_.live.erase(id);
    } else if (lease.state == Model::kTransferring) {
      lease.state = Model::kUnpublishing;
    }
  }

  // Ids come from a window that moves on, so that most of them exist and none is used after the
  // table may have forgotten it.
  uint64_t AnyId() { return base_ + random_() % 60; }

  void Step() {
    if (random_() % 32 == 0) ++base_;
    const uint64_t id = AnyId();
    const auto found = model_.live.find(id);
    const bool live = found != model_.live.end();
    switch (random_() % 15) {
      case 14: {
        const int64_t expires = now_ + static_cast<int64_t>(random_() % 100);
        ASSERT_EQ(table_->Keep({id, base_ + 1000000}, At(expires)), live ? 1 : 0);
        if (live) found->second.expires = std::max(found->second.expires, expires);
        break;
      }
      case 13:
        Unpublish(id, live);
        break;
      case 12: {
        const bool was = live || model_.ended.contains(id);
        ASSERT_EQ(table_->GiveUp(id).code(),
                  was ? absl::StatusCode::kAlreadyExists : absl::StatusCode::kOk);
        if (!was) model_.never.emplace(id, LeaseOutcome::kReleased);
        break;
      }
      case 0:
      case 1:
        Publish(id, live);
        break;
      case 2: {
        const int64_t layers = static_cast<int64_t>(random_() % 9);
        const absl::Status status = table_->SetReadyLayers(id, layers);
        ASSERT_EQ(status.code(), live ? absl::StatusCode::kOk : model_.NotLive(id));
        if (live) found->second.ready = std::max(found->second.ready, layers);
        break;
      }
      case 3: {
        const absl::StatusOr<bool> result = table_->Withdraw(id);
        ASSERT_EQ(result.status().code(), live ? absl::StatusCode::kOk : model_.NotLive(id));
        if (!live) break;
        ASSERT_EQ(*result, found->second.state == Model::kIdle);
        if (*result) {
          model_.End(id, LeaseOutcome::kReleased);
        } else if (found->second.state == Model::kTransferring ||
                   found->second.state == Model::kUnpublishing) {
          found->second.state = Model::kWithdrawing;
        }
        break;
      }
      case 4:
      case 5: {
        const absl::StatusCode want =
            !live                                         ? model_.NotLive(id)
            : found->second.state == Model::kUnpublishing ? absl::StatusCode::kNotFound
            : found->second.state == Model::kIdle         ? absl::StatusCode::kOk
                                                          : absl::StatusCode::kFailedPrecondition;
        const absl::StatusOr<LeasedMemory> leased = table_->BeginTransfer(id, {});
        ASSERT_EQ(leased.status().code(), want);
        if (!leased.ok()) break;
        ASSERT_EQ(leased->pages.PageAt(0), static_cast<int64_t>(id % 1000));
        found->second.state = Model::kTransferring;
        break;
      }
      case 6:
      case 7: {
        // Only whoever began a transfer ends it.
        if (live && found->second.state == Model::kIdle) break;
        const bool ok = random_() % 3 == 0;
        const bool goes_on = !ok && random_() % 2 == 0;
        const int64_t expires = now_ + static_cast<int64_t>(random_() % 100);
        if (goes_on) {
          table_->GoOn(id, {}, At(expires));
        } else {
          table_->EndTransfer(id, {}, ok ? absl::OkStatus() : absl::UnavailableError("x"));
        }
        if (!live) break;
        if (goes_on) found->second.expires = std::max(found->second.expires, expires);
        if (ok || found->second.state == Model::kTaken) {
          model_.End(id, LeaseOutcome::kFetched);
        } else if (found->second.state == Model::kWithdrawing) {
          model_.End(id, LeaseOutcome::kReleased);
        } else if (found->second.state == Model::kUnpublishing) {
          model_.live.erase(found);
        } else {
          found->second.state = Model::kIdle;
        }
        break;
      }
      case 8:
      case 9:
        Take(id, live);
        break;
      case 10:
        table_->NothingNeeded(id, {});
        if (live && found->second.state == Model::kIdle) model_.End(id, LeaseOutcome::kFetched);
        if (!live && !model_.ended.contains(id)) model_.never.emplace(id, LeaseOutcome::kFetched);
        break;
      default:
        Tick();
    }
    if (random_() % 16 == 0) Compare();
  }

  void Publish(uint64_t id, bool live) {
    const int64_t expires = now_ + 1 + static_cast<int64_t>(random_() % 50);
    const absl::Status status =
        table_->Publish(id, Pages({static_cast<int64_t>(id % 1000)}), 0, At(expires));
    const auto never = model_.never.find(id);
    const bool unneeded = never != model_.never.end() && never->second == LeaseOutcome::kFetched;
    if (live || model_.ended.contains(id) || (never != model_.never.end() && !unneeded)) {
      ASSERT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
    } else if (model_.live.size() + model_.untaken.size() >= 40) {
      ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    } else {
      ASSERT_TRUE(status.ok()) << status;
      if (unneeded) {
        model_.never.erase(id);
        model_.End(id, LeaseOutcome::kFetched);
      } else {
        model_.live[id] = {Model::kIdle, expires, 0};
      }
    }
  }

  void Tick() {
    now_ += static_cast<int64_t>(random_() % 4);
    const Deadline next = table_->Tick(At(now_));
    Deadline want = Deadline::max();
    std::vector<uint64_t> expired;
    for (const auto& [id, lease] : model_.live) {
      if (lease.state != Model::kIdle) continue;
      if (lease.expires <= now_) {
        expired.push_back(id);
      } else {
        want = std::min(want, At(lease.expires));
      }
    }
    for (const uint64_t id : expired) model_.End(id, LeaseOutcome::kExpired);
    // Perhaps sooner, for one that has ended meanwhile; and when asked then, that is over.
    ASSERT_LE(next, want);
    ASSERT_GT(next, At(now_));
  }

  void Compare() {
    std::vector<std::pair<uint64_t, LeaseOutcome>> got;
    for (const EndedLease& lease : table_->TakeEnded())
      got.emplace_back(lease.lease_id, lease.outcome);
    // Leases that expire in one tick have no order.
    std::sort(got.begin(), got.end());
    std::sort(model_.untaken.begin(), model_.untaken.end());
    ASSERT_EQ(got, model_.untaken);
    model_.untaken.clear();
    ASSERT_EQ(table_->num_live(), static_cast<int64_t>(model_.live.size()));
    for (const auto& [id, lease] : model_.live) ASSERT_EQ(table_->ReadyLayers(id), lease.ready);
  }

  Deadline At(int64_t ms) const { return start_ + std::chrono::milliseconds(ms); }

  std::mt19937_64 random_;
  Config config_;
  std::unique_ptr<LeaseTable> table_;
  Model model_;
  uint64_t base_ = 1;
  int64_t now_ = 0;
  const Deadline start_ = Clock::now();
};

TEST(LeasesAgainstModel, AMillionRandomOperations) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(seed);
    ModelRun(seed).Run(100000);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace kvferry
