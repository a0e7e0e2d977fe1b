// SIGSTOP: the process is there, its sockets too, and nothing moves. Only our own heartbeats and
// deadlines see it.

#include <gtest/gtest.h>

#include <csignal>
#include <numeric>

#include "absl/strings/str_replace.h"
#include "tests/support/child_peer.h"
#include "tests/support/control_relay.h"
#include "tests/support/test_config.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr int64_t kPages = 256;

ChildPeer::Options Peer(const std::string& role, const std::string& config) {
  return PeerOptions(role, config, kPages);
}

constexpr char kQuickHeart[] =
    R"({"chunk_bytes": 16384, "heartbeat_interval_ms": 300, "heartbeat_timeout_ms": 1500})";
constexpr char kSlowHeart[] = R"({"chunk_bytes": 16384, "heartbeat_timeout_ms": 600000})";

std::vector<int64_t> AllPages() {
  std::vector<int64_t> pages(kPages);
  std::iota(pages.begin(), pages.end(), 0);
  return pages;
}

TEST(StoppedPeer, PrefillIsMissedByTheHeartbeat) {
  const std::string quick =
      absl::StrReplaceAll(kQuickHeart, {{"}", R"(, "connect_timeout_ms": 1500})"}});
  ChildPeer prefill(Peer("prefill", quick));
  ChildPeer decode(Peer("decode", quick));
  const std::vector<int64_t> pages = AllPages();
  const std::string fetch = decode.Fetch(prefill.Publish(pages, 1, 60000), pages, 60000);
  ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
  prefill.Signal(SIGSTOP);
  const Deadline begin = Clock::now();
  const std::string status = decode.Wait(fetch, 20000);
  // It tries once more, for so long.
  EXPECT_NE(status.find("connect_timeout_ms"), std::string::npos) << status;
  EXPECT_EQ(decode.Metric("fetches_restarted"), 1);
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 15);
  EXPECT_TRUE(decode.alive());
  prefill.Signal(SIGCONT);
  // It wakes up as a peer that was given up; the next fetch says hello anew.
  ASSERT_EQ(decode.Ask("reset"), "OK");
  ExpectServes(prefill, decode);
}

// Nothing has come yet when the prefill side falls silent: the fetch tries again on a new session,
// and gets through once the process runs again.
TEST(StoppedPeer, AFetchOutlivesASilentSession) {
  ChildPeer prefill(Peer("prefill", kQuickHeart));
  ChildPeer decode(Peer("decode", kQuickHeart));
  const std::vector<int64_t> pages = AllPages();
  ExpectServes(prefill, decode);  // There is a session.
  ASSERT_EQ(decode.Ask("reset"), "OK");
  const std::string ticket = prefill.Publish(pages, kPeerLayers, 60000);
  prefill.Signal(SIGSTOP);
  const std::string fetch = decode.Fetch(ticket, pages, 60000);
  ASSERT_TRUE(WaitFor([&] { return decode.Metric("fetches_restarted") == 1; }, Soon()));
  prefill.Signal(SIGCONT);
  EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
  EXPECT_EQ(decode.Verify(11, pages, pages), "OK");
  EXPECT_EQ(prefill.Ask("ended " + LeaseOf(ticket) + " 15000"), "fetched");
}

// Nor is a layer fetched again that has come before.
TEST(StoppedPeer, AFetchGoesOnBehindWhatHasCome) {
  ChildPeer prefill(Peer("prefill", kQuickHeart));
  ChildPeer decode(Peer("decode", kQuickHeart));
  const std::vector<int64_t> pages = AllPages();
  const std::string ticket = prefill.Publish(pages, kPeerLayers / 2, 60000);
  const std::string fetch = decode.Fetch(ticket, pages, 60000);
  ASSERT_EQ(decode.WaitLayer(fetch, kPeerLayers / 2 - 1, 20000), "OK");
  prefill.Signal(SIGSTOP);
  ASSERT_TRUE(WaitFor([&] { return decode.Metric("fetches_restarted") == 1; }, Soon()));
  const int64_t half = decode.Metric("bytes_received");
  prefill.Signal(SIGCONT);
  ASSERT_EQ(prefill.Ask("ready " + LeaseOf(ticket)), "OK");
  EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
  EXPECT_EQ(decode.Verify(11, pages, pages), "OK");
  EXPECT_EQ(decode.Metric("bytes_received"), 2 * half);
  EXPECT_EQ(prefill.Ask("ended " + LeaseOf(ticket) + " 15000"), "fetched");
}

// Nor does its lease expire while it is between two sessions, if it has begun in time.
TEST(StoppedPeer, AFetchGoesOnWhenTheTimeOfItsLeaseIsOver) {
  const std::string network =
      absl::StrReplaceAll(kQuickHeart, {{"}", R"(, "same_host_path": "network"})"}});
  ChildPeer prefill(Peer("prefill", network));
  ChildPeer decode(Peer("decode", network));
  const std::vector<int64_t> pages = AllPages();
  const std::string ticket = prefill.Publish(pages, kPeerLayers / 2, 1000);
  const std::string fetch = decode.Fetch(ticket, pages, 60000);
  ASSERT_EQ(decode.WaitLayer(fetch, kPeerLayers / 2 - 1, 20000), "OK");
  prefill.Signal(SIGSTOP);
  ASSERT_TRUE(WaitFor([&] { return decode.Metric("fetches_restarted") == 1; }, Soon()));
  prefill.Signal(SIGCONT);
  ASSERT_EQ(prefill.Ask("ready " + LeaseOf(ticket)), "OK");
  EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
  EXPECT_EQ(decode.Verify(11, pages, pages), "OK");
  EXPECT_EQ(prefill.Ask("ended " + LeaseOf(ticket) + " 15000"), "fetched");
}

// What was moved to the new session, and is given up before that is welcomed, is nobody's business
// there.
TEST(StoppedPeer, OneThatIsCancelledMeanwhileEndsNoOther) {
  ChildPeer prefill(Peer("prefill", kQuickHeart));
  ChildPeer decode(Peer("decode", kQuickHeart));
  std::vector<int64_t> first = AllPages();
  const std::vector<int64_t> second(first.begin() + kPages / 2, first.end());
  first.resize(kPages / 2);
  const std::string ticket = prefill.Publish(first, 1, 60000);
  const std::string fetch = decode.Fetch(ticket, first, 60000);
  const std::string other = decode.Fetch(prefill.Publish(second, 1, 60000), second, 60000);
  ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
  ASSERT_EQ(decode.WaitLayer(other, 0, 20000), "OK");
  prefill.Signal(SIGSTOP);
  ASSERT_TRUE(WaitFor([&] { return decode.Metric("fetches_restarted") == 2; }, Soon()));
  ASSERT_EQ(decode.Ask("cancel " + other), "OK");
  EXPECT_EQ(decode.Wait(other, 20000).rfind("CANCELLED", 0), 0u);
  prefill.Signal(SIGCONT);
  ASSERT_EQ(prefill.Ask("ready " + LeaseOf(ticket)), "OK");
  EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
  EXPECT_EQ(decode.Metric("fetches_restarted"), 2);
  EXPECT_EQ(decode.Metric("peers_lost"), 1);
}

TEST(StoppedPeer, AFetchDoesNotTryForEver) {
  const std::string config = R"({"heartbeat_interval_ms": 300, "heartbeat_timeout_ms": 1500,
                                 "connect_timeout_ms": 1500})";
  ChildPeer prefill(Peer("prefill", config));
  ChildPeer decode(Peer("decode", config));
  ExpectServes(prefill, decode);
  const std::string ticket = prefill.Publish({1, 2}, kPeerLayers, 60000);
  prefill.Signal(SIGSTOP);
  const std::string status = decode.Wait(decode.Fetch(ticket, {3, 4}, 60000), 20000);
  EXPECT_NE(status.find("connect_timeout_ms"), std::string::npos) << status;
  EXPECT_GE(decode.Metric("fetches_restarted"), 1);
}

TEST(StoppedPeer, PrefillIsMissedByTheFetchsDeadline) {
  ChildPeer prefill(Peer("prefill", kSlowHeart));
  ChildPeer decode(Peer("decode", kSlowHeart));
  const std::vector<int64_t> pages = AllPages();
  const std::string ticket = prefill.Publish(pages, 1, 60000);
  const std::string fetch = decode.Fetch(ticket, pages, 1500);
  ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
  prefill.Signal(SIGSTOP);
  const std::string status = decode.Wait(fetch, 10000);
  EXPECT_EQ(status.rfind("DEADLINE_EXCEEDED", 0), 0u) << status;
  prefill.Signal(SIGCONT);
  ASSERT_EQ(decode.Ask("reset"), "OK");
  ExpectServes(prefill, decode);  // And nothing else has come late.
}

// A decode process that stands still with chunks on their way to it uses up its own credits and its
// own share of the arena; another one is served meanwhile.
TEST(StoppedPeer, DecodeDoesNotHoldUpAnother) {
  // A window far larger than the arena: the stopped peer could take all of it.
  ChildPeer prefill(Peer("prefill", R"({"chunk_bytes": 16384, "arena_bytes": 524288,
                                        "heartbeat_timeout_ms": 600000})"));
  const std::string greedy = R"({"chunk_bytes": 16384, "credits_per_transfer": 4096,
                                 "heartbeat_timeout_ms": 600000})";
  ChildPeer stopped(Peer("decode", greedy));
  ChildPeer other(Peer("decode", kSlowHeart));
  const std::vector<int64_t> pages = AllPages();
  const std::string ticket = prefill.Publish(pages, 1, 60000);
  const std::string fetch = stopped.Fetch(ticket, pages, 60000);
  ASSERT_EQ(stopped.WaitLayer(fetch, 0, 20000), "OK");
  stopped.Signal(SIGSTOP);
  ASSERT_EQ(prefill.Ask("ready " + LeaseOf(ticket)), "OK");
  // Until nothing more fits: the transfer to the stopped one stands still. Lists of where pages lie
  // all fit, into the socket, and pages that are sent straight take no room in the arena.
  const bool lists = PathUnderTest() == TestPath::kDirect || PathUnderTest() == TestPath::kTcp;
  int64_t sent = -1;
  ASSERT_TRUE(WaitFor(
      [&] {
        const int64_t now = prefill.Metric("bytes_sent");
        const bool stuck = prefill.Metric("arena_chunks_taken") > 0;
        return now == std::exchange(sent, now) && (stuck || lists);
      },
      Soon()));
  for (int i = 0; i < 3; ++i) {
    const std::string served =
        other.Fetch(prefill.Publish(pages, kPeerLayers, 60000), pages, 20000);
    EXPECT_EQ(other.Wait(served, 20000), "OK");
  }
  EXPECT_EQ(other.Verify(11, pages, pages), "OK");
  // And the stopped one gets the rest when it wakes up.
  stopped.Signal(SIGCONT);
  EXPECT_EQ(stopped.Wait(fetch, 20000), "OK");
  EXPECT_EQ(stopped.Verify(11, pages, pages), "OK");
}

// All its chunks are on their way when it stops. It is given up, and what its chunks lay in carries
// other transfers: when it goes on, none of their bytes may pass for its own.
TEST(StoppedPeer, NoBytesOfAnotherTransfer) {
  ChildPeer prefill(Peer("prefill", R"({"chunk_bytes": 16384, "arena_bytes": 4194304,
                             "heartbeat_interval_ms": 300, "heartbeat_timeout_ms": 1500})"));
  // When it goes on, it has not missed the prefill side yet.
  const std::string patient = R"({"chunk_bytes": 16384, "credits_per_transfer": 4096,
                                  "heartbeat_timeout_ms": 600000})";
  ChildPeer stopped(Peer("decode", patient));
  ChildPeer other(Peer("decode", patient));
  const std::vector<int64_t> few = {7, 5};  // So few chunks that they are read in one go.
  const std::string ticket = prefill.Publish(few, 1, 60000);
  const std::string fetch = stopped.Fetch(ticket, few, 60000);
  ASSERT_EQ(stopped.WaitLayer(fetch, 0, 20000), "OK");
  stopped.Signal(SIGSTOP);
  const int64_t sent = prefill.Metric("bytes_sent");
  ASSERT_EQ(prefill.Ask("ready " + LeaseOf(ticket)), "OK");
  ASSERT_TRUE(WaitFor([&] { return prefill.Metric("bytes_sent") == sent * kPeerLayers; }, Soon()));
  ASSERT_TRUE(WaitFor([&] { return prefill.Metric("peers") == 0; }, Soon()));
  const std::vector<int64_t> pages = AllPages();
  const std::string served = other.Fetch(prefill.Publish(pages, kPeerLayers, 60000), pages, 20000);
  ASSERT_EQ(other.Wait(served, 20000), "OK");
  stopped.Signal(SIGCONT);
  const std::string status = stopped.Wait(fetch, 20000);
  if (status == "OK") {  // Over a network the bytes themselves were on their way.
    EXPECT_EQ(stopped.Verify(11, few, few), "OK");
  }
  EXPECT_TRUE(stopped.alive());
}

// It stops with pages named to it, which then get other contents: where it reads them in place it
// must find out.
TEST(StoppedPeer, NoPagesOfAnotherRequest) {
  const std::string no_key = absl::StrReplaceAll(kSlowHeart, {{"}", R"(, "key_file": ""})"}});
  ChildPeer prefill(Peer("prefill", no_key));  // The relay has none either.
  ChildPeer decode(Peer("decode", no_key));
  // Nobody tells the reader: only what it reads can.
  ControlRelay relay(prefill.address(), [](ControlRelay::Heard& heard) {
    return std::holds_alternative<AbortMsg>(heard.message.body) ? ControlRelay::Verdict::kDrop
                                                                : ControlRelay::Verdict::kPass;
  });
  const std::vector<int64_t> pages = {7, 5};  // All of it fits into the window.
  const auto publish = [&](int64_t layers) {
    return absl::StrReplaceAll(prefill.Publish(pages, layers, 60000),
                               {{prefill.address(), relay.address()}});
  };
  const auto read_in_place = [&] {
    const std::string fetch = decode.Fetch(publish(kPeerLayers), pages, 60000);
    return decode.Wait(fetch, 20000) == "OK" && prefill.Metric("transfers_in_place") > 0;
  };
  // A pool on a device is read where it lies from when its reader has mapped it on.
  if (NameOfPath() == "device_in_place") {
    ASSERT_TRUE(WaitFor(read_in_place, Soon()));
  }
  const int64_t before = prefill.Metric("bytes_sent");
  const std::string ticket = publish(1);
  const std::string fetch = decode.Fetch(ticket, pages, 60000);
  ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
  decode.Signal(SIGSTOP);
  const int64_t sent = prefill.Metric("bytes_sent") - before;
  ASSERT_EQ(prefill.Ask("ready " + LeaseOf(ticket)), "OK");
  ASSERT_TRUE(
      WaitFor([&] { return prefill.Metric("bytes_sent") - before == sent * kPeerLayers; }, Soon()));
  ASSERT_EQ(prefill.Ask("release " + LeaseOf(ticket)), "OK");
  ASSERT_EQ(prefill.Ask("fill 99"), "OK");
  decode.Signal(SIGCONT);
  const std::string status = decode.Wait(fetch, 20000);
  if (status == "OK") {  // Where the bytes themselves were on their way.
    EXPECT_EQ(decode.Verify(11, pages, pages), "OK");
  }
  if (PathReadsThePool()) {
    EXPECT_NE(status, "OK");
  }
}

// What was on its way to the decode process is taken back when that is given up, and asked for
// again when it goes on, though the time of its lease is over by then.
TEST(StoppedPeer, DecodeGoesOnBehindWhatHasCome) {
  ChildPeer prefill(Peer("prefill", kQuickHeart));
  ChildPeer decode(Peer("decode", kQuickHeart));
  const std::vector<int64_t> pages = AllPages();
  const std::string ticket = prefill.Publish(pages, 1, 1000);
  const std::string fetch = decode.Fetch(ticket, pages, 60000);
  ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
  decode.Signal(SIGSTOP);
  ASSERT_EQ(prefill.Ask("ready " + LeaseOf(ticket)), "OK");
  ASSERT_TRUE(WaitFor([&] { return prefill.Metric("peers") == 0; }, Soon()));
  decode.Signal(SIGCONT);
  // Whether it finds the closed connection first, or the word that it was given up.
  EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
  EXPECT_EQ(decode.Verify(11, pages, pages), "OK");
}

// Its session ends at the heartbeat timeout, and when it has not begun another one within
// connect_timeout_ms, the pages come back.
TEST(StoppedPeer, DecodeLosesItsLease) {
  ChildPeer prefill(Peer(
      "prefill", absl::StrReplaceAll(kQuickHeart, {{"}", R"(, "connect_timeout_ms": 2500})"}})));
  ChildPeer decode(Peer("decode", kQuickHeart));
  const std::vector<int64_t> pages = AllPages();
  const std::string ticket = prefill.Publish(pages, 1, 2000);
  const std::string fetch = decode.Fetch(ticket, pages, 60000);
  ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
  decode.Signal(SIGSTOP);
  EXPECT_EQ(prefill.Ask("ended " + LeaseOf(ticket) + " 15000"), "expired");
  EXPECT_EQ(prefill.Metric("peers"), 0);
  decode.Signal(SIGCONT);
  const std::string status = decode.Wait(fetch, 20000);
  // It asks for the rest again.
  EXPECT_NE(status.find("has already expired"), std::string::npos) << status;
  EXPECT_TRUE(decode.alive());
}

}  // namespace
}  // namespace kvferry
