// kill -9 of either side, in the middle of a fetch and while it connects, with the other left to go
// on.

#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "tests/process/old_ucx.h"
#include "tests/support/child_peer.h"
#include "tests/support/test_config.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr int64_t kLeaseMs = 1000;

ChildPeer::Options Peer(const std::string& role, int64_t num_pages) {
  // A killed peer is noticed at once: neither lease nor handle has to wait for a heartbeat. But for
  // connect_timeout_ms it might begin another session.
  return PeerOptions(
      role, R"({"chunk_bytes": 16384, "heartbeat_timeout_ms": 600000, "connect_timeout_ms": 3000})",
      num_pages);
}

std::vector<int64_t> Reversed(int64_t num_pages) {
  std::vector<int64_t> pages(num_pages);
  std::iota(pages.rbegin(), pages.rend(), 0);
  return pages;
}

// The prefill process lives on, gets its pages back at lease expiry and serves another decode
// process.
void KillDecodeOnce(ChildPeer& prefill, int round) {
  SCOPED_TRACE(round);
  const std::vector<int64_t> pages = Reversed(128);  // 16 MiB in all.
  std::string ticket;
  {
    ChildPeer victim(Peer("decode", 128));
    // A session first, so that the lease below is short and still long enough for the fetch to
    // begin.
    const std::string warm = victim.Fetch(prefill.Publish({0}, kPeerLayers, 60000), {0}, 20000);
    ASSERT_EQ(victim.Wait(warm, 20000), "OK");
    const int64_t sent = prefill.Metric("bytes_sent");
    // Even rounds: the fetch waits for a layer. Odd rounds: it moves at full speed.
    const bool held = round % 2 == 0;
    ticket = prefill.Publish(pages, held ? 1 : kPeerLayers, kLeaseMs);
    const std::string fetch = victim.Fetch(ticket, pages, 60000);
    if (held) {
      ASSERT_EQ(victim.WaitLayer(fetch, 0, 20000), "OK");
    } else {
      ASSERT_TRUE(WaitFor([&] { return prefill.Metric("bytes_sent") > sent; }, Soon()));
    }
    victim.Kill();
  }
  const std::string ended = prefill.Ask("ended " + LeaseOf(ticket) + " 10000");
  // At full speed it may just have been through.
  EXPECT_TRUE(ended == "expired" || (ended == "fetched" && round % 2 == 1)) << ended;
  ASSERT_TRUE(prefill.alive());
  EXPECT_EQ(prefill.Metric("transfers_active"), 0);
  EXPECT_TRUE(WaitFor([&] { return prefill.Metric("arena_chunks_taken") == 0; }, Soon()));

  ChildPeer other(Peer("decode", 128));
  const std::string again = other.Fetch(prefill.Publish(pages, kPeerLayers, 60000), pages, 20000);
  EXPECT_EQ(other.Wait(again, 20000), "OK");
  EXPECT_EQ(other.Verify(11, pages, pages), "OK");
}

TEST(KillDecode, PrefillGetsItsPagesBackAndServesAnother) {
  ChildPeer prefill(Peer("prefill", 128));
  for (int round = 0; round < 10 && !HasFailure(); ++round) KillDecodeOnce(prefill, round);
  EXPECT_TRUE(prefill.alive());
  // The decode side may know before this one that it has everything.
  EXPECT_TRUE(WaitFor([&] { return prefill.Metric("leases_live") == 0; }, Soon()));
}

// The decode side's handle fails well within its deadline, nothing is written afterwards, and a new
// prefill process serves it.
void KillPrefillOnce(ChildPeer& decode, int round) {
  SCOPED_TRACE(round);
  const std::vector<int64_t> pages = Reversed(256);
  const bool held = round % 2 == 0;
  std::string fetch;
  {
    ChildPeer victim(Peer("prefill", 256));
    if (!held) {
      // A session first: this is not about one that is being set up.
      ExpectServes(victim, decode);
      ASSERT_EQ(decode.Ask("reset"), "OK");
    }
    const int64_t received = decode.Metric("bytes_received");
    fetch = decode.Fetch(victim.Publish(pages, held ? 1 : kPeerLayers, 60000), pages, 60000);
    if (held) {
      ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
    } else {
      ASSERT_TRUE(WaitFor([&] { return decode.Metric("bytes_received") > received; }, Soon()));
    }
    victim.Kill();
  }
  const Deadline begin = Clock::now();
  const std::string status = decode.Wait(fetch, 20000);
  const bool in_time = status == "OK" && !held;  // At full speed it may just have been through.
  EXPECT_TRUE(in_time || status.rfind("UNAVAILABLE", 0) == 0) << status;
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 20);  // The deadline of the fetch is at 60.
  ASSERT_TRUE(decode.alive());
  ASSERT_EQ(decode.Ask("reset"), "OK");  // The pages are ours again.

  ChildPeer other(Peer("prefill", 256));
  ExpectServes(other, decode);
}

TEST(KillPrefill, HandleFailsWithinItsDeadlineAndAnotherServes) {
  ChildPeer decode(Peer("decode", 256));
  for (int round = 0; round < 10 && !HasFailure(); ++round) KillPrefillOnce(decode, round);
  EXPECT_TRUE(decode.alive());
  EXPECT_EQ(decode.Metric("fetches_active"), 0);
}

// Nobody has to wait for connect_timeout_ms to learn that the process of a ticket is no more.
TEST(KillPrefill, ATicketOfAProcessThatHasEnded) {
  const std::string patient = R"({"connect_timeout_ms": 600000})";
  ChildPeer decode(PeerOptions("decode", patient, 256));
  std::string ticket;
  {
    ChildPeer victim(PeerOptions("prefill", patient, 256));
    ticket = victim.Publish({1, 2, 3}, kPeerLayers, 60000);
    victim.Kill();
  }
  const std::string status = decode.Wait(decode.Fetch(ticket, {1, 2, 3}, 60000), 20000);
  EXPECT_TRUE(absl::StartsWith(status, "UNAVAILABLE")) << status;
  EXPECT_TRUE(absl::StrContains(status, "cannot connect to")) << status;
  ASSERT_EQ(decode.Ask("reset"), "OK");
  ChildPeer other(PeerOptions("prefill", patient, 256));
  ExpectServes(other, decode);
}

// Whoever is killed within these times of a fetch that opens a session is connecting, or has just
// done so.
void KillSoon(ChildPeer& victim, int round) {
  std::mt19937 random(round);
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 15000));
  victim.Kill();
}

class KillConnecting : public testing::Test {
 protected:
  static constexpr int kRounds = 10;

  void SetUp() override {
    if (UcxDiesWithConnectingPeers()) GTEST_SKIP() << kUcxDies;
  }
};

TEST_F(KillConnecting, PrefillOutlivesTheDecodeSide) {
  ChildPeer prefill(Peer("prefill", 256));
  for (int round = 0; round < kRounds && prefill.alive(); ++round) {
    ChildPeer victim(Peer("decode", 256));
    victim.Fetch(prefill.Publish({1, 2, 3}, kPeerLayers, kLeaseMs), {1, 2, 3}, 60000);
    KillSoon(victim, round);
  }
  ASSERT_TRUE(prefill.alive());
  ChildPeer other(Peer("decode", 256));
  ExpectServes(prefill, other);
  EXPECT_TRUE(WaitFor([&] { return prefill.Metric("leases_live") == 0; }, Soon()));
}

TEST_F(KillConnecting, DecodeOutlivesThePrefillSide) {
  ChildPeer decode(Peer("decode", 256));
  for (int round = 0; round < kRounds && decode.alive(); ++round) {
    ChildPeer victim(Peer("prefill", 256));
    const std::string fetch =
        decode.Fetch(victim.Publish({1, 2, 3}, kPeerLayers, 60000), {1, 2, 3}, 500);
    KillSoon(victim, round);
    const std::string status = decode.Wait(fetch, 20000);  // Perhaps nobody answers any more.
    EXPECT_TRUE(status == "OK" || absl::StartsWith(status, "UNAVAILABLE") ||
                absl::StartsWith(status, "DEADLINE_EXCEEDED"))
        << status;
  }
  ASSERT_TRUE(decode.alive());
  ASSERT_EQ(decode.Ask("reset"), "OK");
  ChildPeer other(Peer("prefill", 256));
  ExpectServes(other, decode);
}

}  // namespace
}  // namespace kvferry
