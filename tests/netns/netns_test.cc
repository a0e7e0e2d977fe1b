// Endpoints on two hosts, as far as the kernel is concerned: in two network namespaces. Where there
// can be none the tests are skipped by name.

#include <gtest/gtest.h>

#include <fstream>
#include <numeric>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/support/child_peer.h"
#include "tests/support/namespace_pair.h"
#include "tests/support/random_lookups.h"
#include "tests/support/random_peers.h"
#include "tests/support/random_stores.h"
#include "tests/support/status.h"
#include "tests/support/temp_folder.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

constexpr int64_t kLayers = 8;
constexpr int64_t kPages = 64;

template <typename Base>
class BetweenHosts : public Base {
 protected:
  void SetUp() override {
    const absl::Status made = hosts_.Make();
    if (absl::IsFailedPrecondition(made)) GTEST_SKIP() << made.message();
    ASSERT_TRUE(IsOk(made));
  }

  NamespacePair hosts_;
};

class TwoNamespaces : public BetweenHosts<testing::Test> {
 protected:
  ChildPeer::Options Peer(const std::string& role) const {
    const bool prefill = role == "prefill";
    return {.role = role,
            .config_json = absl::StrCat("{", hosts_.ConfigOf(prefill),
                                        R"(, "chunk_bytes": 65536, "heartbeat_interval_ms": 300, )",
                                        R"("heartbeat_timeout_ms": 3000})"),
            .num_layers = kLayers,
            .num_pages = kPages,
            .seed = prefill ? 11u : 22u,
            .netns = prefill ? hosts_.prefill.ns : hosts_.decode.ns};
  }
  // A fetch from one to the other, whose ticket has `where` in it.
  static void ExpectEveryByte(const ChildPeer::Options& prefill_options,
                              const ChildPeer::Options& decode_options, const std::string& where) {
    ChildPeer prefill(prefill_options);
    ChildPeer decode(decode_options);
    std::vector<int64_t> from(40);
    std::vector<int64_t> to(40);
    for (int64_t i = 0; i < 40; ++i) {
      from[i] = (i * 37) % kPages;
      to[i] = (i * 11 + 5) % kPages;
    }
    const std::string ticket = prefill.Publish(from, kLayers, 60000);
    EXPECT_NE(ticket.find(where), std::string::npos) << ticket;
    const std::string fetch = decode.Fetch(ticket, to, 20000);
    EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
    EXPECT_EQ(decode.Verify(11, from, to), "OK");
    EXPECT_EQ(prefill.Ask("ended " + LeaseOf(ticket) + " 20000"), "fetched");
  }
  // Before the decode side's device, which a port of the bridge takes the place of. What is longer
  // than SetWidth() says is lost there without a word, if it is sent packet by packet.
  bool PutABridgeBetween() {
    const auto& [ns, device, address] = hosts_.decode;
    return Ip(ns, absl::StrCat("link set ", device, " down")) &&
           Ip(ns, absl::StrCat("link set ", device, " name ", device, "in")) &&
           Ip(ns, absl::StrCat("addr flush dev ", device, "in")) &&
           Ip(ns, "link add name bridge0 type bridge") && Ip(ns, "link set bridge0 arp off up") &&
           Ip(ns, absl::StrCat("link add ", device, "out type veth peer name ", device)) &&
           Ip(ns, absl::StrCat("addr add ", address, "/24 dev ", device)) &&
           Ip(ns, absl::StrCat("link set ", device, " up")) &&
           Ip(ns, absl::StrCat("link set ", device, "in master bridge0 up")) &&
           Ip(ns, absl::StrCat("link set ", device, "out master bridge0 up")) &&
           Ip(hosts_.prefill.ns,
              absl::StrCat("link set ", hosts_.prefill.device, " gso_max_segs 1"));
  }
  bool SetWidth(int bytes) {
    return Ip(hosts_.decode.ns, absl::StrCat("link set ", hosts_.decode.device, "out mtu ", bytes));
  }
  static bool Ip(const std::string& ns, const std::string& command) {
    return Shell(absl::StrCat("ip -n ", ns, " ", command));
  }
};

// Control and bytes take different ways between them.
class TwoWays : public TwoNamespaces {
 protected:
  void SetUp() override {
    TwoNamespaces::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    ASSERT_TRUE(IsOk(NamespacePair::Join(prefill_side_, decode_side_)));
  }
  ChildPeer::Options PrefillPeer() const {
    ChildPeer::Options options = Peer("prefill");
    options.config_json = absl::StrReplaceAll(
        options.config_json,
        {{absl::StrCat(hosts_.prefill.device, "\""), absl::StrCat(prefill_side_.device, "\"")}});
    return options;
  }
  // Of `ip`, on the way of the bytes.
  static bool Ip(const NamespacePair::Host& side, const std::string& command) {
    return TwoNamespaces::Ip(side.ns, absl::StrCat(command, " dev ", side.device));
  }
  // A fetch that meets no way for its bytes until `mend`, once `missed` says that it has.
  template <typename Missed, typename Mend>
  void ExpectWaits(ChildPeer& prefill, const Missed& missed, const Mend& mend) {
    ChildPeer decode(Peer("decode"));
    const std::string ticket = prefill.Publish({7, 8}, kLayers, 60000);
    const std::string fetch = decode.Fetch(ticket, {9, 3}, 60000);
    ASSERT_TRUE(WaitFor([&] { return missed(decode); }, Soon()));
    ASSERT_TRUE(mend());
    EXPECT_EQ(decode.Wait(fetch, 30000), "OK");
    EXPECT_EQ(decode.Verify(11, {7, 8}, {9, 3}), "OK");
    EXPECT_EQ(decode.Metric("peers_lost"), 0);
  }

  const NamespacePair::Host prefill_side_ = {hosts_.prefill.ns, hosts_.prefill.device + "2",
                                             "10.211.98.1"};
  const NamespacePair::Host decode_side_ = {hosts_.decode.ns, hosts_.decode.device + "2",
                                            "10.211.98.2"};
};

TEST_F(TwoNamespaces, EveryByte) {
  ExpectEveryByte(Peer("prefill"), Peer("decode"), hosts_.prefill.address);
}

// The same two hosts, by what a cluster without IPv4 calls them.
TEST_F(TwoNamespaces, EveryByteOverIpV6) {
  const std::string prefill = "fd53:77::1", decode = "fd53:77::2";
  const auto add = [](const NamespacePair::Host& host, const std::string& address) {
    return Ip(host.ns, absl::StrCat("-4 addr flush dev ", host.device)) &&
           Ip(host.ns, absl::StrCat("addr add ", address, "/64 dev ", host.device, " nodad"));
  };
  if (!add(hosts_.prefill, prefill) || !add(hosts_.decode, decode)) {
    GTEST_SKIP() << "this machine has no IPv6";
  }
  const auto renamed = [&](ChildPeer::Options options) {
    absl::StrReplaceAll({{hosts_.prefill.address, prefill}, {hosts_.decode.address, decode}},
                        &options.config_json);
    return options;
  };
  ExpectEveryByte(renamed(Peer("prefill")), renamed(Peer("decode")), "tcp://[" + prefill + "]:");
}

// Off loopback: with the deployment's key nothing else has to be allowed, and who has none gets
// nothing.
TEST_F(TwoNamespaces, WithAKey) {
  const TempFolder folder;
  const std::string key_file = folder.path() + "/key";
  std::ofstream(key_file) << std::string(64, '7');
  const auto with_key = [&](ChildPeer::Options options) {
    EXPECT_EQ(absl::StrReplaceAll({{R"("allow_insecure_network": true)",
                                    absl::StrCat(R"("key_file": ")", key_file, R"(")")}},
                                  &options.config_json),
              1);
    return options;
  };
  ChildPeer prefill(with_key(Peer("prefill")));
  ChildPeer decode(with_key(Peer("decode")));
  const std::string fetch = decode.Fetch(prefill.Publish({7, 8}, kLayers, 60000), {9, 3}, 20000);
  EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
  EXPECT_EQ(decode.Verify(11, {7, 8}, {9, 3}), "OK");

  ChildPeer without(Peer("decode"));
  const std::string refused = without.Fetch(prefill.Publish({5}, kLayers, 60000), {1}, 20000);
  const std::string status = without.Wait(refused, 20000);
  EXPECT_NE(status.find("the same key_file"), std::string::npos) << status;
  EXPECT_GT(prefill.Metric("strangers"), 0);
}

TEST_F(TwoNamespaces, LinkDownMidFetch) {
  ChildPeer prefill(Peer("prefill"));
  ChildPeer decode(Peer("decode"));
  std::vector<int64_t> pages(kPages);
  std::iota(pages.begin(), pages.end(), 0);
  const std::string ticket = prefill.Publish(pages, 1, 1000);
  const std::string fetch = decode.Fetch(ticket, pages, 8000);
  ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
  ASSERT_TRUE(hosts_.SetLink("down"));
  const Deadline begin = Clock::now();
  const std::string status = decode.Wait(fetch, 12000);
  EXPECT_TRUE(status.rfind("UNAVAILABLE", 0) == 0 || status.rfind("DEADLINE_EXCEEDED", 0) == 0)
      << status;
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 10);
  EXPECT_EQ(prefill.Ask("ended " + LeaseOf(ticket) + " 15000"), "expired");
  EXPECT_TRUE(prefill.alive());
  EXPECT_TRUE(decode.alive());

  ASSERT_TRUE(hosts_.SetLink("up"));
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
  ASSERT_TRUE(hosts_.SetLink("down"));
  ASSERT_TRUE(WaitFor([&] { return decode.Metric("fetches_restarted") > 0; }, Soon()));
  const int64_t half = decode.Metric("bytes_received");
  ASSERT_TRUE(hosts_.SetLink("up"));
  ASSERT_EQ(prefill.Ask("ready " + LeaseOf(ticket)), "OK");
  EXPECT_EQ(decode.Wait(fetch, 30000), "OK");
  EXPECT_EQ(decode.Verify(11, pages, pages), "OK");
  EXPECT_EQ(decode.Metric("bytes_received"), 2 * half);
}

// Only long packets are lost, which the prefill side alone sends: the decode side, which dialled,
// hears an answer to all that it says.
TEST_F(TwoNamespaces, AFetchOutlivesAWayThatGetsNarrow) {
  ASSERT_TRUE(PutABridgeBetween());
  ChildPeer prefill(Peer("prefill"));
  ChildPeer decode(Peer("decode"));
  const std::string first = decode.Fetch(prefill.Publish({7, 8}, kLayers, 60000), {9, 3}, 20000);
  ASSERT_EQ(decode.Wait(first, 20000), "OK");
  ASSERT_EQ(decode.Ask("reset"), "OK");
  ASSERT_TRUE(SetWidth(600));
  const std::string fetch = decode.Fetch(prefill.Publish({5, 6}, kLayers, 60000), {2, 4}, 60000);
  ASSERT_TRUE(WaitFor([&] { return decode.Metric("fetches_restarted") > 0; }, Soon()));
  ASSERT_TRUE(SetWidth(1500));
  EXPECT_EQ(decode.Wait(fetch, 30000), "OK");
  EXPECT_EQ(decode.Verify(11, {5, 6}, {2, 4}), "OK");
}

// That of the bytes dies.
TEST_F(TwoWays, AFetchOutlivesADeadDataPath) {
  // As behind a router: what is sent into the dead way is lost, and no neighbour is missed.
  ASSERT_TRUE(
      Ip(decode_side_, absl::StrCat("neigh replace ", prefill_side_.address,
                                    " nud permanent lladdr $(ip netns exec ", prefill_side_.ns,
                                    " cat /sys/class/net/", prefill_side_.device, "/address)")));
  ChildPeer prefill(PrefillPeer());
  ChildPeer decode(Peer("decode"));
  const std::string first = decode.Fetch(prefill.Publish({7, 8}, kLayers, 60000), {9, 3}, 20000);
  ASSERT_EQ(decode.Wait(first, 20000), "OK");
  const std::string set_link =
      absl::StrCat("ip -n ", prefill_side_.ns, " link set ", prefill_side_.device, " ");
  ASSERT_TRUE(Shell(set_link + "down"));
  const std::string ticket = prefill.Publish({7, 8}, kLayers, 60000);
  const std::string fetch = decode.Fetch(ticket, {9, 3}, 60000);
  ASSERT_TRUE(WaitFor([&] { return decode.Metric("fetches_restarted") > 0; }, Soon()));
  ASSERT_TRUE(Shell(set_link + "up"));
  EXPECT_EQ(decode.Wait(fetch, 30000), "OK");
  EXPECT_EQ(decode.Verify(11, {7, 8}, {9, 3}), "OK");
}

// connect(2) says so.
TEST_F(TwoWays, AFetchWaitsForAMissingRoute) {
  ChildPeer prefill(PrefillPeer());
  ASSERT_TRUE(Ip(decode_side_, "route del 10.211.98.0/24"));
  ExpectWaits(
      prefill,
      [](ChildPeer& decode) { return decode.Metric("peers") + decode.Metric("peers_lost") > 0; },
      [&] { return Ip(decode_side_, "route add 10.211.98.0/24"); });
}

// The system says so seconds later.
TEST_F(TwoWays, AFetchWaitsForAHostThatIsMissed) {
  ChildPeer prefill(PrefillPeer());
  const std::string address = absl::StrCat(prefill_side_.address, "/24");
  ASSERT_TRUE(Ip(prefill_side_, "addr del " + address));
  ExpectWaits(
      prefill,
      [&](ChildPeer&) {
        return Shell(absl::StrCat("ip -n ", decode_side_.ns, " neigh show ", prefill_side_.address,
                                  " nud failed | grep -q ."));
      },
      [&] { return Ip(prefill_side_, "addr add " + address); });
}

// Nobody says goodbye for it. Sessions end by the heartbeat; ZeroMQ's connections have none.
TEST_F(TwoNamespaces, AHostThatIsGoneLeavesNothingOpen) {
  ChildPeer prefill(Peer("prefill"));
  const int64_t first = prefill.num_fds();
  ChildPeer decode(Peer("decode"));
  const std::string fetch = decode.Fetch(prefill.Publish({7, 8}, kLayers, 60000), {9, 3}, 20000);
  ASSERT_EQ(decode.Wait(fetch, 20000), "OK");
  EXPECT_GT(prefill.num_fds(), first);
  ASSERT_TRUE(hosts_.SetLink("down"));
  decode.Kill();
  EXPECT_TRUE(WaitFor([&] { return prefill.num_fds() == first; }, Soon()))
      << prefill.num_fds() << " files are open, and were " << first;
}

// What processes do at random, between the two hosts, over a link that fails now and then.
template <typename Base>
class OnTwoHosts : public BetweenHosts<Base> {
 protected:
  using Process = typename Base::Process;

  void SetUp() override {
    BetweenHosts<Base>::SetUp();
    if (this->IsSkipped() || this->HasFatalFailure()) return;
    // As slow as transfers have to be to be met by what happens, if the machine can do that.
    for (const NamespacePair::Host& host : {this->hosts_.prefill, this->hosts_.decode}) {
      Shell(absl::StrCat("tc -n ", host.ns, " qdisc add dev ", host.device,
                         " root tbf rate 400mbit burst 64k latency 20ms"));
    }
  }
  std::string MoreConfig(const Process& process) override {
    return absl::StrCat(Base::MoreConfig(process), ", ",
                        this->hosts_.ConfigOf(this->IsSource(process)));
  }
  std::string NetnsOf(const Process& process) override {
    return this->IsSource(process) ? this->hosts_.prefill.ns : this->hosts_.decode.ns;
  }
  void Break() override {
    if (this->OneIn(2)) return this->Stop();
    if (down_until_) return;
    const int64_t ms = 20 + this->AnyMs(kLongestOutageMs);
    this->Log(absl::StrCat("the link is down for ", ms));
    EXPECT_TRUE(this->hosts_.SetLink("down"));
    down_until_ = DeadlineInMs(ms);
  }
  void Mend(Deadline now) override {
    this->Continue(now);
    if (!down_until_ || now < *down_until_) return;
    this->Log("the link is up");
    EXPECT_TRUE(this->hosts_.SetLink("up"));
    down_until_.reset();
  }

 private:
  static constexpr int64_t kLongestOutageMs = 3000;

  std::optional<Deadline> down_until_;
};

using RandomPeersOnTwoHosts = OnTwoHosts<RandomPeers>;
TEST_F(RandomPeersOnTwoHosts, WithALinkThatFails) { RunAtRandom(); }

using RandomPeersOfOtherPagesOnTwoHosts = OnTwoHosts<RandomPeersOfOtherPages>;
TEST_F(RandomPeersOfOtherPagesOnTwoHosts, WithALinkThatFails) { RunAtRandom(); }

using RandomLookupsOnTwoHosts = OnTwoHosts<RandomLookups>;
TEST_F(RandomLookupsOnTwoHosts, WithALinkThatFails) { RunAtRandom(); }

using RandomStoresOnTwoHosts = OnTwoHosts<RandomStores>;
TEST_F(RandomStoresOnTwoHosts, WithALinkThatFails) { RunAtRandom(); }

}  // namespace
}  // namespace kvferry
