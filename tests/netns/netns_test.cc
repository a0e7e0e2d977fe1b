// Two hosts, as far as the kernel is concerned: two network namespaces joined by a veth pair, an
// endpoint in a process in each. Needs root; elsewhere the tests are skipped by name.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/support/child_peer.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr char kPrefillHost[] = "10.211.97.1";
constexpr char kDecodeHost[] = "10.211.97.2";
constexpr int64_t kLayers = 8;
constexpr int64_t kPages = 64;

bool Shell(const std::string& command) {
  // NOLINTNEXTLINE(bugprone-command-processor): nothing but what stands in this file.
  return std::system((command + " 2>/dev/null").c_str()) == 0;
}

class TwoNamespaces : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "network namespaces need root";
    if (!Shell("ip -V >/dev/null")) GTEST_SKIP() << "the 'ip' command (iproute2) is not installed";
    if (!Shell("ip netns add " + prefill_ns_)) {
      GTEST_SKIP() << "this machine lets nobody add a network namespace (ip netns add fails)";
    }
    made_ = true;
    if (!Shell("ip netns add " + decode_ns_) ||
        !Shell(absl::StrCat("ip link add ", prefill_dev_, " netns ", prefill_ns_,
                            " type veth peer name ", decode_dev_, " netns ", decode_ns_))) {
      GTEST_SKIP() << "this machine lets nobody add a veth pair (ip link add type veth fails)";
    }
    ASSERT_TRUE(Up(prefill_ns_, prefill_dev_, kPrefillHost));
    ASSERT_TRUE(Up(decode_ns_, decode_dev_, kDecodeHost));
    // The kernel takes up to a second to believe in the carrier, and UCX takes no interface without
    // one.
    ASSERT_TRUE(WaitFor(
        [&] { return Running(prefill_ns_, prefill_dev_) && Running(decode_ns_, decode_dev_); },
        Soon()));
  }
  void TearDown() override {
    // Deleting a namespace deletes its end of the pair, and so the pair.
    if (made_) {
      Shell("ip netns del " + prefill_ns_);
      Shell("ip netns del " + decode_ns_);
    }
  }
  static bool Up(const std::string& ns, const std::string& device, const std::string& host) {
    return Shell(absl::StrCat("ip -n ", ns, " addr add ", host, "/24 dev ", device)) &&
           Shell(absl::StrCat("ip -n ", ns, " link set lo up")) &&
           Shell(absl::StrCat("ip -n ", ns, " link set ", device, " up"));
  }
  static bool Running(const std::string& ns, const std::string& device) {
    return Shell(absl::StrCat("ip -n ", ns, " -o link show dev ", device, " | grep -q 'state UP'"));
  }
  bool SetLink(const std::string& state) {
    return Shell(absl::StrCat("ip -n ", prefill_ns_, " link set ", prefill_dev_, " ", state));
  }
  ChildPeer::Options Peer(const std::string& role) const {
    const bool prefill = role == "prefill";
    return {
        .role = role,
        .config_json = absl::StrCat(
            R"({"listen_host": ")", prefill ? kPrefillHost : kDecodeHost,
            R"(", "allow_insecure_network": true, "net_device": ")",
            prefill ? prefill_dev_ : decode_dev_, R"(", "allowed_hosts": ")", kPrefillHost,
            R"(", "chunk_bytes": 65536, "heartbeat_interval_ms": 300, "heartbeat_timeout_ms": 3000})"),
        .num_layers = kLayers,
        .num_pages = kPages,
        .seed = prefill ? 11u : 22u,
        .netns = prefill ? prefill_ns_ : decode_ns_};
  }

  // One name for all that this process makes.
  const std::string name_ = absl::StrCat("kvf", getpid());
  const std::string prefill_ns_ = name_ + "p";
  const std::string decode_ns_ = name_ + "d";
  const std::string prefill_dev_ = name_ + "p";
  const std::string decode_dev_ = name_ + "d";
  bool made_ = false;
};

TEST_F(TwoNamespaces, EveryByte) {
  ChildPeer prefill(Peer("prefill"));
  ChildPeer decode(Peer("decode"));
  std::vector<int64_t> from(40);
  std::vector<int64_t> to(40);
  for (int64_t i = 0; i < 40; ++i) {
    from[i] = (i * 37) % kPages;
    to[i] = (i * 11 + 5) % kPages;
  }
  const std::string ticket = prefill.Publish(from, kLayers, 60000);
  EXPECT_NE(ticket.find(kPrefillHost), std::string::npos) << ticket;
  const std::string fetch = decode.Fetch(ticket, to, 20000);
  EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
  EXPECT_EQ(decode.Verify(11, from, to), "OK");
  EXPECT_EQ(prefill.Ask("ended " + LeaseOf(ticket) + " 20000"), "fetched");
}

TEST_F(TwoNamespaces, LinkDownMidFetch) {
  ChildPeer prefill(Peer("prefill"));
  ChildPeer decode(Peer("decode"));
  std::vector<int64_t> pages(kPages);
  std::iota(pages.begin(), pages.end(), 0);
  const std::string ticket = prefill.Publish(pages, 1, 1000);
  const std::string fetch = decode.Fetch(ticket, pages, 8000);
  ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
  ASSERT_TRUE(SetLink("down"));
  const Deadline begin = Clock::now();
  const std::string status = decode.Wait(fetch, 12000);
  EXPECT_TRUE(status.rfind("UNAVAILABLE", 0) == 0 || status.rfind("DEADLINE_EXCEEDED", 0) == 0)
      << status;
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 10);
  EXPECT_EQ(prefill.Ask("ended " + LeaseOf(ticket) + " 15000"), "expired");
  EXPECT_TRUE(prefill.alive());
  EXPECT_TRUE(decode.alive());

  ASSERT_TRUE(SetLink("up"));
  ASSERT_EQ(decode.Ask("reset"), "OK");
  // The first hellos after an outage may go missing while the link settles.
  std::string last;
  ASSERT_TRUE(WaitFor(
      [&] {
        const std::string again =
            decode.Fetch(prefill.Publish({7, 8}, kLayers, 60000), {9, 3}, 3000);
        last = decode.Wait(again, 5000);
        return last == "OK";
      },
      DeadlineInMs(30000)))
      << last;
  EXPECT_EQ(decode.Verify(11, {7, 8}, {9, 3}), "OK");
}

// The connection passes nothing on for longer than a peer may be silent; the fetch goes on over
// another one, behind the layers that have come.
TEST_F(TwoNamespaces, AFetchOutlivesAnOutage) {
  ChildPeer prefill(Peer("prefill"));
  ChildPeer decode(Peer("decode"));
  std::vector<int64_t> pages(kPages);
  std::iota(pages.begin(), pages.end(), 0);
  const std::string ticket = prefill.Publish(pages, kLayers / 2, 60000);
  const std::string fetch = decode.Fetch(ticket, pages, 60000);
  ASSERT_EQ(decode.WaitLayer(fetch, kLayers / 2 - 1, 20000), "OK");
  ASSERT_TRUE(SetLink("down"));
  ASSERT_TRUE(WaitFor([&] { return decode.Metric("fetches_restarted") > 0; }, Soon()));
  const int64_t half = decode.Metric("bytes_received");
  ASSERT_TRUE(SetLink("up"));
  ASSERT_EQ(prefill.Ask("ready " + LeaseOf(ticket)), "OK");
  EXPECT_EQ(decode.Wait(fetch, 30000), "OK");
  EXPECT_EQ(decode.Verify(11, pages, pages), "OK");
  EXPECT_EQ(decode.Metric("bytes_received"), 2 * half);
}

// Control and bytes take different ways, and that of the bytes dies.
TEST_F(TwoNamespaces, AFetchOutlivesADeadDataPath) {
  ASSERT_TRUE(Shell(absl::StrCat("ip link add ", prefill_dev_, "2 netns ", prefill_ns_,
                                 " type veth peer name ", decode_dev_, "2 netns ", decode_ns_)));
  ASSERT_TRUE(Up(prefill_ns_, prefill_dev_ + "2", "10.211.98.1"));
  ASSERT_TRUE(Up(decode_ns_, decode_dev_ + "2", "10.211.98.2"));
  ASSERT_TRUE(WaitFor([&] { return Running(decode_ns_, decode_dev_ + "2"); }, Soon()));
  // As behind a router: what is sent into the dead way is lost, and no neighbour is missed.
  ASSERT_TRUE(Shell(absl::StrCat("ip -n ", decode_ns_, " neigh replace 10.211.98.1 dev ",
                                 decode_dev_, "2 nud permanent lladdr $(ip netns exec ",
                                 prefill_ns_, " cat /sys/class/net/", prefill_dev_, "2/address)")));
  ChildPeer::Options options = Peer("prefill");
  options.config_json = absl::StrReplaceAll(
      options.config_json, {{absl::StrCat(prefill_dev_, "\""), prefill_dev_ + "2\""}});
  ChildPeer prefill(options);
  ChildPeer decode(Peer("decode"));
  const std::string first = decode.Fetch(prefill.Publish({7, 8}, kLayers, 60000), {9, 3}, 20000);
  ASSERT_EQ(decode.Wait(first, 20000), "OK");
  ASSERT_TRUE(Shell(absl::StrCat("ip -n ", prefill_ns_, " link set ", prefill_dev_, "2 down")));
  const std::string ticket = prefill.Publish({7, 8}, kLayers, 60000);
  const std::string fetch = decode.Fetch(ticket, {9, 3}, 60000);
  ASSERT_TRUE(WaitFor([&] { return decode.Metric("fetches_restarted") > 0; }, Soon()));
  ASSERT_TRUE(Shell(absl::StrCat("ip -n ", prefill_ns_, " link set ", prefill_dev_, "2 up")));
  EXPECT_EQ(decode.Wait(fetch, 30000), "OK");
  EXPECT_EQ(decode.Verify(11, {7, 8}, {9, 3}), "OK");
}

}  // namespace
}  // namespace kvferry
