// kill -9 of the decode process in the middle of a fetch: the prefill process lives on, gets its
// pages back at lease expiry and serves another decode process.

#include <gtest/gtest.h>

#include <csignal>
#include <numeric>

#include "tests/support/child_peer.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr int64_t kLayers = 8;
constexpr int64_t kPages = 128;  // 16 MiB in all.
constexpr int64_t kLeaseMs = 1000;

ChildPeer::Options Peer(const std::string& role) {
  return {.role = role,
          // The lease must not have to wait for a heartbeat: a killed peer is seen at once.
          .config_json = R"({"chunk_bytes": 16384, "heartbeat_timeout_ms": 600000})",
          .num_layers = kLayers,
          .num_pages = kPages,
          .seed = role == "prefill" ? 11u : 22u};
}

void KillDecodeOnce(ChildPeer& prefill, int round) {
  SCOPED_TRACE(round);
  std::vector<int64_t> pages(kPages);
  std::iota(pages.rbegin(), pages.rend(), 0);
  std::string ticket;
  {
    ChildPeer victim(Peer("decode"));
    // A session first, so that the lease below is short and still long enough for the fetch to
    // begin.
    const std::string warm = victim.Fetch(prefill.Publish({0}, kLayers, 60000), {0}, 20000);
    ASSERT_EQ(victim.Wait(warm, 20000), "OK");
    const int64_t sent = prefill.Metric("bytes_sent");
    // Even rounds: the fetch waits for a layer. Odd rounds: it moves at full speed.
    const bool held = round % 2 == 0;
    ticket = prefill.Publish(pages, held ? 1 : kLayers, kLeaseMs);
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

  ChildPeer other(Peer("decode"));
  const std::string again = other.Fetch(prefill.Publish(pages, kLayers, 60000), pages, 20000);
  EXPECT_EQ(other.Wait(again, 20000), "OK");
  EXPECT_EQ(other.Verify(11, pages, pages), "OK");
}

TEST(KillDecode, PrefillGetsItsPagesBackAndServesAnother) {
  ChildPeer prefill(Peer("prefill"));
  for (int round = 0; round < 10 && !HasFailure(); ++round) KillDecodeOnce(prefill, round);
  EXPECT_TRUE(prefill.alive());
  EXPECT_EQ(prefill.Metric("leases_live"), 0);
}

}  // namespace
}  // namespace kvferry
