// Sessions of several connections for data, of which not all are made.

#include <gtest/gtest.h>

#include <memory>
#include <variant>
#include <vector>

#include "tests/connector/unmapped_peers.h"
#include "tests/support/captured_log.h"
#include "tests/support/endpoints.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

class HelloWithLanes : public HelloToOthersOverTcp {
 protected:
  static Config TwoLanes() {
    Config config = SmallChunks();
    config.same_host_path = "network";
    config.lanes = 2;
    config.connect_timeout_ms = 1500;
    return config;
  }
  HelloWithLanes() {
    peer_.lanes = 2;
    peer_.pongs_as = 5;
  }
  // The id of the next fetch that the peer is asked for, and what it goes on with.
  std::pair<uint64_t, uint64_t> NextFetch() {
    const auto asked = peer_.Receive();
    const auto* fetch = asked ? std::get_if<FetchMsg>(&asked->second.body) : nullptr;
    if (fetch == nullptr) {
      ADD_FAILURE() << "no fetch";
      return {};
    }
    return {fetch->transfer_id, fetch->replaces};
  }

  MapsNothing peer_;
};

// What the first one carries goes on; the next session may have all of them.
TEST_F(HelloWithLanes, OneThatIsNeverMadeBeginsTheSessionAnew) {
  CapturedLog log;
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), TwoLanes());
  const auto first = Fetch(*decode, Ticket{peer_.address(), 5, 6, 1, 16}, {0});
  peer_.Welcome(5);
  peer_.TakeLanes(1);
  const auto [first_id, nothing] = NextFetch();
  EXPECT_EQ(nothing, 0u);
  const auto later = Fetch(*decode, Ticket{peer_.address(), 5, 7, 1, 16}, {1});
  const auto [later_id, nothing_either] = NextFetch();
  const auto refused = peer_.Receive();
  ASSERT_TRUE(refused.has_value());
  ASSERT_TRUE(std::holds_alternative<RefuseMsg>(refused->second.body));
  EXPECT_TRUE(Fails(std::get<RefuseMsg>(refused->second.body).status, absl::StatusCode::kNotFound,
                    "lane 1 (the first is 0)", "within connect_timeout_ms"));
  peer_.Welcome(5);
  peer_.TakeLanes(2);
  EXPECT_EQ(NextFetch().second, first_id);
  EXPECT_EQ(NextFetch().second, later_id);
  EXPECT_FALSE(first->done()) << first->status();
  EXPECT_FALSE(later->done()) << later->status();
  EXPECT_TRUE(log.Has({"session with peer 'prefill' ended", "lane 1 (the first is 0)"}));
}

// It would be begun for ever, as fast as the peer can close.
TEST_F(HelloWithLanes, OneThatIsClosedEachTimeIsGivenUp) {
  const auto decode = MakeDecode(MakePatternPool(SmallLayout(), 8, 3), TwoLanes());
  const auto fetch = Fetch(*decode, Ticket{peer_.address(), 5, 6, 1, 16}, {0});
  int sessions = 0;
  for (; !fetch->done() && sessions < 20; ++sessions) {
    peer_.Welcome(5);
    peer_.TakeLanes(1);
    NextFetch();
    peer_.CloseLane(1);
    peer_.Receive();  // That this session is given up, or a goodbye.
    WaitFor([&] { return fetch->done(); }, DeadlineInMs(sessions < 5 ? 0 : 3000));
  }
  EXPECT_EQ(sessions, 6);
  EXPECT_TRUE(Fails(fetch->Wait(Soon()), absl::StatusCode::kUnavailable, "lane 1"));
}

// Until all are made: it would wait for one that never is.
TEST_F(HelloWithLanes, WhatIsPushedGoesOverThoseThatAreMade) {
  const auto pool = MakePatternPool(SmallLayout(), 8, 1);
  const auto prefill = MakePrefill(pool, TwoLanes());
  const std::vector<int64_t> pages = {1, 2, 3, 4};
  const auto push = Push(*prefill, ReceiveTicket{peer_.address(), 5, 6, 4, 64}, *pool, pages);
  peer_.Welcome(5);
  peer_.TakeLanes(1);
  const auto call = peer_.Receive();
  ASSERT_TRUE(call.has_value() && std::holds_alternative<CallMsg>(call->second.body));
  FetchMsg fetch;
  fetch.transfer_id = 9;
  fetch.lease_id = Must(std::get<CallMsg>(call->second.body).args.Uint("lease"));
  const PageRun all{0, 4};
  fetch.positions = Must(PageRuns::FromRuns({&all, 1}));
  fetch.timeout_ms = 60000;
  fetch.chunk_bytes = 4096;
  fetch.window_bytes = 1 << 20;
  peer_.Say(call->first, call->second.from_epoch, 5, fetch);
  int64_t bytes = 0;
  EXPECT_TRUE(WaitFor([&] { return (bytes += peer_.ReadLane(0)) > 4 * SmallLayout().page_bytes(); },
                      Soon()));
  EXPECT_EQ(Metric(*prefill, "chunks_in_lanes"), 0);
}

}  // namespace
}  // namespace kvferry
