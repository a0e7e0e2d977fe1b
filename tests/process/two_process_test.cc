#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <random>

#include "tests/support/child_peer.h"
#include "tests/support/kv_pattern.h"
#include "tests/support/test_config.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

TEST(TwoProcesses, EveryByte) {
  ChildPeer prefill({.role = "prefill", .num_layers = 6, .num_pages = 96, .seed = 11});
  ChildPeer decode({.role = "decode", .num_layers = 6, .num_pages = 96, .seed = 22});
  std::mt19937_64 random(1);
  for (const std::string shape : {"seq", "runs8", "rand"}) {
    const std::vector<int64_t> from = MakePages(shape, 64, 96, &random);
    const std::vector<int64_t> to = MakePages(shape, 64, 96, &random);
    ASSERT_EQ(decode.Ask("reset"), "OK");
    const std::string ticket = prefill.Publish(from, 6, 60000);
    const std::string fetch = decode.Fetch(ticket, to, 20000);
    EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
    EXPECT_EQ(decode.Verify(11, from, to), "OK");
    EXPECT_EQ(prefill.Ask("ended " + LeaseOf(ticket) + " 20000"), "fetched");
  }
}

TEST(TwoProcesses, ManyDecodeProcessesShareOnePrefillProcess) {
  ChildPeer prefill({.role = "prefill", .seed = 11});
  std::vector<std::unique_ptr<ChildPeer>> decodes;
  std::vector<std::string> fetches;
  std::vector<int64_t> to(16);
  for (int64_t i = 0; i < 16; ++i) to[i] = 3 * i + 1;
  std::vector<int64_t> from(16);
  for (int64_t i = 0; i < 16; ++i) from[i] = 63 - 2 * i;
  for (int i = 0; i < 4; ++i) {
    decodes.push_back(
        std::make_unique<ChildPeer>(ChildPeer::Options{.role = "decode", .seed = 22}));
    fetches.push_back(decodes[i]->Fetch(prefill.Publish(from, 4, 60000), to, 20000));
  }
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(decodes[i]->Wait(fetches[i], 20000), "OK");
    EXPECT_EQ(decodes[i]->Verify(11, from, to), "OK");
  }
}

// A call that a signal interrupts is made again; it once ended the process.
TEST(TwoProcesses, SignalsAreTheApplicationsAffair) {
  ChildPeer prefill({.role = "prefill", .seed = 11});
  ChildPeer decode({.role = "decode", .seed = 22});
  const std::vector<int64_t> from = {1, 5, 9, 60}, to = {3, 2, 40, 7};
  std::vector<std::string> tickets;
  for (int i = 0; i < 200; ++i) tickets.push_back(prefill.Publish(from, 4, 60000));
  auto signals = std::async([&] { return prefill.Ask("signals 2000"); });
  size_t fetched = 0;
  for (const std::string& ticket : tickets) {
    fetched += decode.Wait(decode.Fetch(ticket, to, 20000), 20000) == "OK" ? 1 : 0;
    if (signals.wait_for(std::chrono::seconds(0)) == std::future_status::ready) break;
  }
  EXPECT_GT(fetched, 0u);
  EXPECT_EQ(signals.get(), "OK");
  EXPECT_TRUE(prefill.alive());
  EXPECT_EQ(decode.Verify(11, from, to), "OK");
  EXPECT_EQ(decode.Metric("peers_lost"), 0);
  EXPECT_EQ(decode.Metric("fetches_failed"), 0);
}

// From the first fetch on whose sender has heard that its pool is mapped.
class PoolsOnDevices : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(TwoProcesses, PoolsOnDevices, testing::Values("0", "1"),
                         [](const auto& instance) { return "ToDevice" + instance.param; });

TEST_P(PoolsOnDevices, AreReadWhereTheyLie) {
  if (NameOfPath() != "device_in_place") GTEST_SKIP() << "of a path with pools on a device";
  ChildPeer prefill(PeerOptions("prefill", "{}", 64));
  setenv("KVFERRY_TEST_DEVICE", GetParam().c_str(), 1);
  if (memory_of_device()->Allocate(1).status().code() == absl::StatusCode::kUnavailable) {
    unsetenv("KVFERRY_TEST_DEVICE");
    GTEST_SKIP() << "this machine has no device " << GetParam();
  }
  ChildPeer decode(PeerOptions("decode", "{}", 64));
  const auto serves = [&](ChildPeer& to, const std::vector<int64_t>& pages) {
    EXPECT_EQ(to.Ask("reset"), "OK");
    ExpectServes(prefill, to, pages);
  };
  const auto read_in_place = [&] {
    serves(decode, {3, 9, 60, 4, 5, 6});
    return prefill.Metric("transfers_in_place") > 0;
  };
  EXPECT_TRUE(WaitFor(read_in_place, Soon()));
  int64_t in_place = prefill.Metric("chunks_in_place");
  serves(decode, {62, 1, 2, 40});
  EXPECT_GT(prefill.Metric("chunks_in_place"), in_place);
  // The processor would have to make the checksum.
  ChildPeer careful(PeerOptions("decode", R"({"checksum": true})", 64));
  unsetenv("KVFERRY_TEST_DEVICE");
  in_place = prefill.Metric("chunks_in_place");
  for (int64_t page = 0; page < 5; ++page) serves(careful, {page, 50 - page});
  EXPECT_EQ(prefill.Metric("chunks_in_place"), in_place);
}

// What a peer cannot read where it lies is gathered in memory of the device that it has mapped.
class GatheredOnDevices : public testing::Test {
 protected:
  void SetUp() override {
    if (NameOfPath() != "device_in_place") GTEST_SKIP() << "of a path with pools on a device";
  }
  static void ExpectGathers(const std::function<void()>& fetch, ChildPeer& prefill) {
    const auto on_device = [&] {
      fetch();
      return prefill.Metric("transfers_on_device") > 0;
    };
    EXPECT_TRUE(WaitFor(on_device, Soon()));
    const int64_t before = prefill.Metric("transfers_on_device");
    fetch();
    EXPECT_EQ(prefill.Metric("transfers_on_device"), before + 1);
    EXPECT_EQ(prefill.Metric("transfers_in_place"), 0);
  }
};

TEST_F(GatheredOnDevices, APoolWithoutAName) {
  setenv("KVFERRY_TEST_UNNAMED_POOL", "1", 1);
  ChildPeer prefill(PeerOptions("prefill", R"({"device_arena_bytes": 2097152})", 64));
  unsetenv("KVFERRY_TEST_UNNAMED_POOL");
  ChildPeer decode(PeerOptions("decode", "{}", 64));
  const auto fetch = [&] {
    EXPECT_EQ(decode.Ask("reset"), "OK");
    ExpectServes(prefill, decode, {3, 9, 60, 4, 5, 6});
  };
  ExpectGathers(fetch, prefill);
}

TEST_F(GatheredOnDevices, ValuesOfAnotherDType) {
  ChildPeer prefill(PeerOptions("prefill", "{}", 64));
  ChildPeer::Options narrow = PeerOptions("decode", "{}", 64);
  narrow.pages_are.dtype = "float8_e4m3fn";
  ChildPeer decode(narrow);
  // What the values are is random_test.cc's affair.
  const auto fetch = [&] {
    const std::string ticket = prefill.Publish({3, 9, 60}, kPeerLayers, 60000);
    EXPECT_EQ(decode.Wait(decode.Fetch(ticket, {1, 2, 4}, 20000), 20000), "OK");
  };
  ExpectGathers(fetch, prefill);
}

TEST_F(GatheredOnDevices, OrNot) {
  ChildPeer prefill(
      PeerOptions("prefill", R"({"same_host_path": "arena", "device_arena_bytes": 0})", 64));
  ChildPeer decode(PeerOptions("decode", "{}", 64));
  for (int64_t page = 0; page < 5; ++page) {
    EXPECT_EQ(decode.Ask("reset"), "OK");
    ExpectServes(prefill, decode, {page, 50 - page});
  }
  EXPECT_EQ(prefill.Metric("transfers_on_device"), 0);
  EXPECT_EQ(prefill.Metric("transfers_in_place"), 0);
}

// Whatever was under way is fetched anew, and all that follows comes packed.
TEST(TwoProcesses, ReadsThatStopWorking) {
  if (PathUnderTest() != TestPath::kDirect) GTEST_SKIP() << "of the direct path";
  ChildPeer prefill(PeerOptions("prefill", "{}", 64));
  ChildPeer decode(PeerOptions("decode", "{}", 64));
  ExpectServes(prefill, decode, {3, 9, 60});
  EXPECT_EQ(prefill.Metric("transfers_direct"), 1);
  const std::string forbidden = decode.Ask("forbid_reads");
  if (forbidden != "OK") GTEST_SKIP() << "this machine has no seccomp filters: " << forbidden;
  for (int64_t fetch = 0; fetch < 3; ++fetch) {
    ASSERT_EQ(decode.Ask("reset"), "OK");
    ExpectServes(prefill, decode, {1, 62, 4 + fetch});
    EXPECT_EQ(prefill.Metric("transfers_direct"), 2);
    EXPECT_EQ(decode.Metric("fetches_restarted"), 1);
  }
  // The decode side may know before the other that it has everything.
  EXPECT_TRUE(WaitFor([&] { return prefill.Metric("leases_live") == 0; }, Soon()));
  EXPECT_EQ(decode.Metric("fetches_failed"), 0);
}

// So does one of which layers have come, behind them.
TEST(TwoProcesses, ReadsThatStopWorkingInTheMiddle) {
  if (PathUnderTest() != TestPath::kDirect) GTEST_SKIP() << "of the direct path";
  ChildPeer prefill(PeerOptions("prefill", "{}", 64));
  ChildPeer decode(PeerOptions("decode", "{}", 64));
  const std::string ticket = prefill.Publish({1, 62, 4}, 1, 60000);
  const std::string fetch = decode.Fetch(ticket, {3, 9, 60}, 20000);
  ASSERT_EQ(decode.WaitLayer(fetch, 0, 20000), "OK");
  EXPECT_EQ(prefill.Metric("transfers_direct"), 1);
  const std::string forbidden = decode.Ask("forbid_reads");
  if (forbidden != "OK") GTEST_SKIP() << "this machine has no seccomp filters: " << forbidden;
  ASSERT_EQ(prefill.Ask("ready " + LeaseOf(ticket)), "OK");
  EXPECT_EQ(decode.Wait(fetch, 20000), "OK");
  EXPECT_EQ(decode.Verify(11, {1, 62, 4}, {3, 9, 60}), "OK");
  EXPECT_EQ(decode.Metric("fetches_restarted"), 1);
  EXPECT_EQ(decode.Metric("fetches_failed"), 0);
}

}  // namespace
}  // namespace kvferry
