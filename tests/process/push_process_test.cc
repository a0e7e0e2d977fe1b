// A push between processes, with either of them killed or stopped in its middle.

#include <gtest/gtest.h>

#include <csignal>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/support/child_peer.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr int64_t kPages = 128;  // 16 MiB in all.

// A killed peer is noticed at once: nobody has to wait for a heartbeat.
constexpr char kSlowHeart[] = R"({"chunk_bytes": 16384, "heartbeat_timeout_ms": 600000})";
constexpr char kQuickHeart[] =
    R"({"chunk_bytes": 16384, "heartbeat_interval_ms": 300, "heartbeat_timeout_ms": 1500})";

std::vector<int64_t> Reversed() {
  std::vector<int64_t> pages(kPages);
  std::iota(pages.rbegin(), pages.rend(), 0);
  return pages;
}

// A handle's number, and the ticket or lease that came with it.
using Begun = std::pair<std::string, std::string>;

Begun Receive(ChildPeer& decode, const std::vector<int64_t>& pages) {
  return absl::StrSplit(decode.Ask(absl::StrCat("receive ", absl::StrJoin(pages, ","), " 60000")),
                        absl::MaxSplits(' ', 1));
}

Begun Push(ChildPeer& prefill, const std::string& ticket, const std::vector<int64_t>& pages,
           int64_t ready_layers) {
  return absl::StrSplit(prefill.Ask(absl::StrCat("push ", ticket, " ", absl::StrJoin(pages, ","),
                                                 " ", ready_layers, " 60000")),
                        absl::MaxSplits(' ', 1));
}

std::string Pushed(ChildPeer& prefill, const std::string& push) {
  return prefill.Ask(absl::StrCat("pushed ", push, " 10000"));
}

void ExpectPushes(ChildPeer& prefill, ChildPeer& decode) {
  const std::vector<int64_t> pages = Reversed();
  const std::vector<int64_t> ascending(pages.rbegin(), pages.rend());
  const Begun receive = Receive(decode, ascending);
  const Begun push = Push(prefill, receive.second, pages, kPeerLayers);
  EXPECT_EQ(decode.Wait(receive.first, 20000), "OK");
  EXPECT_EQ(Pushed(prefill, push.first), "OK");
  EXPECT_EQ(prefill.Ask(absl::StrCat("ended ", push.second, " 0")), "fetched");
  EXPECT_EQ(decode.Verify(11, pages, ascending), "OK");
}

// A push of which the first layer has come.
struct Under {
  Begun receive;
  Begun push;
};
Under HeldPush(ChildPeer& prefill, ChildPeer& decode) {
  Under under;
  under.receive = Receive(decode, Reversed());
  under.push = Push(prefill, under.receive.second, Reversed(), 1);
  EXPECT_EQ(decode.WaitLayer(under.receive.first, 0, 20000), "OK");
  return under;
}

TEST(KillPush, TheDecodeSideDies) {
  ChildPeer prefill(PeerOptions("prefill", kSlowHeart, kPages));
  for (int round = 0; round < 6 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    Begun push;
    const bool held = round % 2 == 0;
    {
      ChildPeer victim(PeerOptions("receiver", kSlowHeart, kPages));
      if (held) {
        push = HeldPush(prefill, victim).push;
      } else {
        ExpectPushes(prefill, victim);  // A session first: this is not about setting one up.
        const int64_t sent = prefill.Metric("bytes_sent");
        push = Push(prefill, Receive(victim, Reversed()).second, Reversed(), kPeerLayers);
        ASSERT_TRUE(WaitFor([&] { return prefill.Metric("bytes_sent") > sent; }, Soon()));
      }
      victim.Kill();
    }
    const std::string status = Pushed(prefill, push.first);
    // At full speed it may just have been through.
    EXPECT_TRUE(status.rfind("UNAVAILABLE", 0) == 0 || (status == "OK" && !held)) << status;
    const std::string ended = prefill.Ask(absl::StrCat("ended ", push.second, " 0"));
    EXPECT_TRUE(ended == "released" || (ended == "fetched" && !held)) << ended;
    ChildPeer other(PeerOptions("receiver", kSlowHeart, kPages));
    ExpectPushes(prefill, other);
  }
  EXPECT_TRUE(prefill.alive());
  EXPECT_EQ(prefill.Metric("leases_live"), 0);
}

TEST(KillPush, ThePrefillSideDies) {
  ChildPeer decode(PeerOptions("receiver", kSlowHeart, kPages));
  for (int round = 0; round < 6 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    Begun receive;
    const bool held = round % 2 == 0;
    {
      ChildPeer victim(PeerOptions("prefill", kSlowHeart, kPages));
      if (held) {
        receive = HeldPush(victim, decode).receive;
      } else {
        ExpectPushes(victim, decode);
        const int64_t received = decode.Metric("bytes_received");
        receive = Receive(decode, Reversed());
        Push(victim, receive.second, Reversed(), kPeerLayers);
        ASSERT_TRUE(WaitFor([&] { return decode.Metric("bytes_received") > received; }, Soon()));
      }
      victim.Kill();
    }
    const std::string status = decode.Wait(receive.first, 10000);  // Its deadline is at 60 s.
    EXPECT_TRUE(status.rfind("UNAVAILABLE", 0) == 0 || (status == "OK" && !held)) << status;
    ASSERT_EQ(decode.Ask("reset"), "OK");  // The pages are ours again.
    ChildPeer other(PeerOptions("prefill", kSlowHeart, kPages));
    ExpectPushes(other, decode);
    ASSERT_EQ(decode.Ask("reset"), "OK");
  }
  EXPECT_TRUE(decode.alive());
  EXPECT_EQ(decode.Metric("fetches_active"), 0);
}

TEST(StoppedPush, ThePrefillSideIsMissedByTheHeartbeat) {
  ChildPeer prefill(PeerOptions("prefill", kQuickHeart, kPages));
  ChildPeer decode(PeerOptions("receiver", kQuickHeart, kPages));
  const Under under = HeldPush(prefill, decode);
  prefill.Signal(SIGSTOP);
  const std::string status = decode.Wait(under.receive.first, 20000);
  EXPECT_NE(status.find("silent for heartbeat_timeout_ms"), std::string::npos) << status;
  prefill.Signal(SIGCONT);
  const std::string pushed = Pushed(prefill, under.push.first);
  // The connection that the other side has closed may be found before its word.
  const bool closed = pushed.find("closed by the other side") != std::string::npos;
  EXPECT_TRUE(closed || pushed.find("given the session up") != std::string::npos) << pushed;
  EXPECT_EQ(prefill.Ask(absl::StrCat("ended ", under.push.second, " 0")), "released");
  ASSERT_EQ(decode.Ask("reset"), "OK");
  ExpectPushes(prefill, decode);
}

TEST(StoppedPush, TheDecodeSideIsMissedByTheHeartbeat) {
  ChildPeer prefill(PeerOptions("prefill", kQuickHeart, kPages));
  ChildPeer decode(PeerOptions("receiver", kQuickHeart, kPages));
  const Under under = HeldPush(prefill, decode);
  decode.Signal(SIGSTOP);
  const std::string status = Pushed(prefill, under.push.first);
  EXPECT_NE(status.find("silent for heartbeat_timeout_ms"), std::string::npos) << status;
  EXPECT_EQ(prefill.Ask(absl::StrCat("ended ", under.push.second, " 0")), "released");
  decode.Signal(SIGCONT);
  EXPECT_NE(decode.Wait(under.receive.first, 20000), "OK");
  ASSERT_EQ(decode.Ask("reset"), "OK");
  ExpectPushes(prefill, decode);
}

}  // namespace
}  // namespace kvferry
