// Peers on this host that map nothing, or are not reached that way: they meet over the network.

#include <gtest/gtest.h>

#include <optional>

#include "tests/connector/unmapped_peers.h"

namespace kvferry {
namespace {

// The prefill side reaches this one through shared memory, and so has offered nothing else, but is
// not reached that way: the next hello does not offer it.
TEST_F(HelloToOthersOverTcp, APeerThatIsOnlyReachedOneWayIsReachedOverTheNetwork) {
  RawPrefill prefill;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  Config config = SmallChunks();
  config.same_host_path = "auto";
  const auto decode = MakeDecode(target, config);
  const auto handle = Fetch(*decode, Ticket{prefill.address(), 5, 6, 1, 16}, {0});
  const auto first = prefill.Receive(Soon());
  ASSERT_TRUE(first.has_value());
  ASSERT_FALSE(std::get<HelloMsg>(first->second.body).data.local.empty());
  WelcomeMsg welcome{"prefill", {}};
  welcome.data.local = std::get<HelloMsg>(first->second.body).data.local;
  welcome.data.local.back() ^= 1;  // Nobody who has that token listens there.
  welcome.data.local[1] ^= 1;
  prefill.SendBytes(first->first, EncodeMessage({5, first->second.from_epoch, welcome}));
  std::optional<HelloMsg> second;
  bool said_bye = false;
  while (!second) {
    const auto next = prefill.Receive(Soon());
    ASSERT_TRUE(next.has_value());
    said_bye |= std::holds_alternative<ByeMsg>(next->second.body);
    if (const auto* hello = std::get_if<HelloMsg>(&next->second.body)) second = *hello;
  }
  EXPECT_TRUE(second->data.local.empty());
  EXPECT_GT(second->data.tcp.lanes, 0);
  EXPECT_TRUE(said_bye);
  EXPECT_FALSE(handle->done());
}

// What waited for it has been said to nobody before.
TEST_F(HelloToOthersOverTcp, APeerThatMapsNothingIsReachedOverTheNetwork) {
  Config config = SmallChunks();
  config.same_host_path = "auto";
  const auto pool = MakePatternPool(SmallLayout(), 8, 3);
  const auto prefill = MakePrefill(pool, config);
  MapsNothing peer;
  const ReceiveTicket ticket{peer.address(), 5, 6, 1, 16};
  const auto ends = [&](const auto& message, const auto& handle) {
    peer.Say(message.first, message.second.from_epoch, 5,
             RefuseMsg{0, absl::DataLossError("by hand")});
    EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kDataLoss, "refused by"));
  };
  {
    const auto push = Push(*prefill, ticket, *pool, {0});
    EXPECT_FALSE(peer.Welcome(5).data.local.empty());
    EXPECT_TRUE(peer.Welcome(5).data.local.empty());
    const auto asked = peer.Receive();
    ASSERT_TRUE(std::holds_alternative<CallMsg>(asked->second.body));
    EXPECT_EQ(std::get<CallMsg>(asked->second.body).function, "push");
    EXPECT_EQ(*std::get<CallMsg>(asked->second.body).args.Uint("receive"), 6u);
    EXPECT_FALSE(push->done());
    ends(*asked, push);
  }
  {  // As long as the process is there.
    const auto push = Push(*prefill, ticket, *pool, {0});
    EXPECT_TRUE(peer.Welcome(5).data.local.empty());
    peer.ExpectByes(1);
    ends(*peer.Receive(), push);
  }
  {  // Until another one answers.
    const auto push = Push(*prefill, ticket, *pool, {0});
    EXPECT_TRUE(peer.Welcome(7).data.local.empty());
    ends(*peer.Receive(), push);
  }
  const auto decode = MakeDecode(pool, config);
  const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  EXPECT_FALSE(peer.Welcome(5).data.local.empty());
  EXPECT_TRUE(peer.Welcome(5).data.local.empty());
  const auto asked = peer.Receive();
  ASSERT_TRUE(std::holds_alternative<FetchMsg>(asked->second.body));
  EXPECT_EQ(std::get<FetchMsg>(asked->second.body).from_bytes, 0);
  ends(*asked, fetch);
  // And one after that is asked what it can do.
  const auto push = Push(*prefill, ticket, *pool, {0});
  const auto last = peer.Receive();
  ASSERT_TRUE(std::holds_alternative<HelloMsg>(last->second.body));
  EXPECT_FALSE(std::get<HelloMsg>(last->second.body).data.local.empty());
}

// What a process is short of it may have later.
TEST_F(HelloToOthersOverTcp, APeerThatMapsNothingJustNowIsAskedAgainNextTime) {
  for (const Takes takes : {Takes::kNotNow, Takes::kSaysNothing}) {
    Config config = SmallChunks();
    config.same_host_path = "auto";
    config.connect_timeout_ms = takes == Takes::kNotNow ? 600000 : 500;
    const auto pool = MakePatternPool(SmallLayout(), 8, 3);
    const auto decode = MakeDecode(pool, config);
    MapsNothing peer;
    for (int session = 0; session < 2; ++session) {
      const auto fetch = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
      EXPECT_FALSE(peer.Welcome(5, takes).data.local.empty());
      EXPECT_TRUE(peer.Welcome(5, takes).data.local.empty());
      const auto asked = peer.Receive();
      ASSERT_TRUE(std::holds_alternative<FetchMsg>(asked->second.body));
      peer.Say(asked->first, asked->second.from_epoch, 5,
               RefuseMsg{0, absl::DataLossError("by hand")});
      EXPECT_TRUE(Fails(fetch->Wait(Soon()), absl::StatusCode::kDataLoss, "refused by"));
    }
    peer.ExpectByes(2);
  }
}

// The welcome waits until it is known how this side will send.
TEST_F(HelloFromOthersOverTcp, APeerThatMapsNothingIsWelcomedOverTheNetwork) {
  for (const Takes takes : {Takes::kNever, Takes::kNotNow, Takes::kSaysNothing}) {
    Config config = SmallChunks();
    config.same_host_path = "auto";
    if (takes == Takes::kSaysNothing) config.connect_timeout_ms = 500;
    const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 3), config);
    UnmappedMemory memory;
    HelloMsg hello{"by hand", kTestModel, SmallLayout(), {}};
    hello.data.tcp.lanes = 1;
    hello.data.local = memory.local();
    RawDecode peer(prefill->address());
    peer.Send({42, 0, hello});
    memory.Answer(takes);
    const std::optional<Message> answer = peer.Receive(Soon());
    ASSERT_TRUE(answer.has_value() && std::holds_alternative<WelcomeMsg>(answer->body));
    EXPECT_GT(std::get<WelcomeMsg>(answer->body).data.tcp.port, 0);
  }
}

TEST_F(HelloFromOthersOverTcp, WhatIsAskedBeforeTheWelcomeIsNotHeard) {
  const auto pool = MakePatternPool(SmallLayout(), 8, 3);
  const auto prefill = MakePrefill(pool, SmallChunks());
  const Ticket ticket = Publish(*prefill, *pool, {0}, 1);
  UnmappedMemory memory;
  HelloMsg hello{"by hand", kTestModel, SmallLayout(), {}};
  hello.data.local = memory.local();
  RawDecode peer(prefill->address());
  peer.Send({42, 0, hello});
  memory.Answer(Takes::kSaysNothing);
  FetchMsg fetch;
  fetch.transfer_id = 7;
  fetch.lease_id = ticket.lease_id;
  const PageRun first{0, 1};
  fetch.positions = Must(PageRuns::FromRuns({&first, 1}));
  fetch.timeout_ms = 10000;
  fetch.window_bytes = fetch.chunk_bytes = 65536;
  peer.Send({42, ticket.epoch, fetch});
  EXPECT_TRUE(WaitFor([&] { return Metric(*prefill, "messages_stale") == 1; }, Soon()));
  EXPECT_EQ(Metric(*prefill, "transfers_started"), 0);
}

// And one that has no other way is told why it is refused.
TEST_F(HelloFromOthersOverTcp, APeerThatMapsNothingAndOffersNoNetworkIsRefused) {
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 3), SmallChunks());
  UnmappedMemory memory;
  HelloMsg hello{"by hand", kTestModel, SmallLayout(), {}};
  hello.data.local = memory.local();
  RawDecode peer(prefill->address());
  peer.Send({42, 0, hello});
  memory.Answer(Takes::kNever);
  const std::optional<Message> answer = peer.Receive(Soon());
  ASSERT_TRUE(answer.has_value() && std::holds_alternative<RefuseMsg>(answer->body));
  EXPECT_TRUE(Fails(std::get<RefuseMsg>(answer->body).status, absl::StatusCode::kFailedPrecondition,
                    "the peer over shared memory"));
  EXPECT_TRUE(WaitFor([&] { return Metric(*prefill, "peers") == 0; }, Soon()));
  EXPECT_EQ(Metric(*prefill, "hellos_refused"), 1);
}

}  // namespace
}  // namespace kvferry
