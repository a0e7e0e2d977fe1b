#include <gtest/gtest.h>

#include <random>

#include "tests/support/child_peer.h"
#include "tests/support/kv_pattern.h"

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

}  // namespace
}  // namespace kvferry
