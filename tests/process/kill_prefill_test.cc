// kill -9 of the prefill process in the middle of a fetch: the decode side's handle fails well
// within its deadline, nothing is written afterwards, and a new prefill process serves it.

#include <gtest/gtest.h>

#include <numeric>

#include "tests/support/child_peer.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr int64_t kLayers = 8;
constexpr int64_t kPages = 256;

ChildPeer::Options Peer(const std::string& role) {
  return {.role = role,
          // A killed peer is noticed without heartbeats.
          .config_json = R"({"chunk_bytes": 16384, "heartbeat_timeout_ms": 600000})",
          .num_layers = kLayers,
          .num_pages = kPages,
          .seed = role == "prefill" ? 11u : 22u};
}

void KillPrefillOnce(ChildPeer& decode, int round) {
  SCOPED_TRACE(round);
  std::vector<int64_t> pages(kPages);
  std::iota(pages.rbegin(), pages.rend(), 0);
  const bool held = round % 2 == 0;
  std::string fetch;
  {
    ChildPeer victim(Peer("prefill"));
    const int64_t received = decode.Metric("bytes_received");
    fetch = decode.Fetch(victim.Publish(pages, held ? 1 : kLayers, 60000), pages, 60000);
    if (held) {
      ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
    } else {
      ASSERT_TRUE(WaitFor([&] { return decode.Metric("bytes_received") > received; }, Soon()));
    }
    victim.Kill();
  }
  const Deadline begin = Clock::now();
  const std::string status = decode.Wait(fetch, 10000);
  const bool in_time = status == "OK" && !held;  // At full speed it may just have been through.
  EXPECT_TRUE(in_time || status.rfind("UNAVAILABLE", 0) == 0) << status;
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 10);  // The deadline of the fetch is at 60.
  ASSERT_TRUE(decode.alive());
  ASSERT_EQ(decode.Ask("reset"), "OK");  // The pages are ours again.

  ChildPeer other(Peer("prefill"));
  const std::vector<int64_t> few = {200, 3, 4, 77};
  const std::string again = decode.Fetch(other.Publish(few, kLayers, 60000), few, 20000);
  EXPECT_EQ(decode.Wait(again, 20000), "OK");
  EXPECT_EQ(decode.Verify(11, few, few), "OK");
}

TEST(KillPrefill, HandleFailsWithinItsDeadlineAndAnotherServes) {
  ChildPeer decode(Peer("decode"));
  for (int round = 0; round < 10 && !HasFailure(); ++round) KillPrefillOnce(decode, round);
  EXPECT_TRUE(decode.alive());
  EXPECT_EQ(decode.Metric("fetches_active"), 0);
}

}  // namespace
}  // namespace kvferry
