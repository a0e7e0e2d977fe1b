// Calls that wait at a server of a store: in turn, within bounds, and not for longer than their
// callers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "connector/store/call_rooms.h"
#include "tests/connector/fake_store.h"
#include "tests/connector/remote_stores.h"
#include "tests/support/control_relay.h"

namespace kvferry {
namespace {

using Heard = ControlRelay::Heard;

// Of calls by the dozen megabytes, which take a loaded machine a while.
constexpr int64_t kPatientMs = 50000;

// A call's time at the server begins a little later than at its caller.
void LetTheServersDeadlinePass() {
  const Deadline over = DeadlineInMs(300);
  WaitFor([&] { return Clock::now() >= over; }, over);
}

TEST_F(RemotePages, WhatStoodInLineForTooLongIsNotCarriedOut) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto client = Dial(server->address(), source_), other = Dial(server->address(), target_);
  const std::vector<std::string> keys = Keys(2);
  ASSERT_TRUE(AllOk(client->PutPages(Views({keys[0]}), *source_, std::vector<int64_t>{1}, Soon())));
  ASSERT_TRUE(AllOk(lower->PutPages(Views({keys[1]}), *source_, std::vector<int64_t>{2}, Soon())));
  auto slow = std::async(std::launch::async, [&] { return other->GetBytes(keys[1], Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  EXPECT_TRUE(
      Fails(client->Erase(keys[0], DeadlineInMs(200)), absl::StatusCode::kDeadlineExceeded));
  LetTheServersDeadlinePass();
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(slow.get()));
  EXPECT_EQ(Must(client->Exists(Views({keys[0]}), Soon())), 1);
}

// Its caller is gone, and may have done something else in its place.
TEST_F(RemotePages, WhatNobodyWaitsForIsNotCarriedOut) {
  const auto host = MakeHost(4);
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(host, lower);
  const auto other = Dial(server->address(), source_);
  const std::vector<int64_t> page = {1};
  ASSERT_TRUE(AllOk(other->PutPages(Views({"here"}), *source_, page, Soon())));
  ASSERT_TRUE(AllOk(lower->PutPages(Views({"slow"}), *source_, page, Soon())));
  std::atomic<bool> broken = false;
  ControlRelay relay(server->address(), [&broken](Heard&) {
    return broken ? ControlRelay::Verdict::kBreak : ControlRelay::Verdict::kPass;
  });
  const auto client = Dial(relay.address(), target_);
  auto slow = std::async(std::launch::async, [&] { return other->GetBytes("slow", Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  const int64_t served = Metric(*server, "calls_served");
  auto pin = std::async(std::launch::async, [&] { return client->Pin("here", Soon()); });
  ASSERT_TRUE(WaitFor([&] { return Metric(*server, "calls_served") == served + 1; }, Soon()));
  broken = true;
  EXPECT_TRUE(Fails(pin.get(), absl::StatusCode::kUnavailable));
  ASSERT_TRUE(WaitFor([&] { return Metric(*server, "peers_lost") == 1; }, Soon()));
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(slow.get()));
  EXPECT_TRUE(IsOk(other->Erase("nowhere", Soon())));  // Served after the pin.
  EXPECT_EQ(host->stats().pinned, 0);
}

TEST_F(RemotePages, WhatIsInMemoryDoesNotWaitForTheTierBelow) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto client = Dial(server->address(), target_), other = Dial(server->address(), source_);
  const std::vector<std::string> keys = Keys(3);
  const std::vector<std::string> above = {keys[0], keys[1]};
  const std::vector<int64_t> pages = {1, 2};
  ASSERT_TRUE(AllOk(other->PutPages(Views(above), *source_, pages, Soon())));
  ASSERT_TRUE(AllOk(lower->PutPages(Views({keys[2]}), *source_, std::vector<int64_t>{3}, Soon())));
  auto slow = std::async(std::launch::async, [&] { return other->GetBytes(keys[2], Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  EXPECT_EQ(Must(client->Exists(Views(above), Soon())), 2);
  EXPECT_EQ(Must(client->ExistsEach(Views(above), Soon())), std::vector<bool>(2, true));
  EXPECT_TRUE(AllOk(client->GetPages(Views(above), *target_, std::vector<int64_t>{8, 9}, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, std::vector<int64_t>{8, 9}, 1, pages));
  EXPECT_TRUE(IsOk(client->GetBytes(keys[0], Soon())));
  EXPECT_EQ(slow.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(slow.get()));
}

TEST_F(RemotePages, WhatIsThereIsSaidWhileAValueIsWaitedFor) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto client = Dial(server->address(), target_), other = Dial(server->address(), source_);
  const std::vector<int64_t> page = {1};
  ASSERT_TRUE(AllOk(lower->PutPages(Views({"slow"}), *source_, page, Soon())));
  ASSERT_TRUE(AllOk(other->PutPages(Views({"here"}), *source_, page, Soon())));
  auto slow = std::async(std::launch::async, [&] { return other->GetBytes("slow", Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  EXPECT_EQ(Must(client->Exists(Views({"slow", "nowhere"}), Soon())), 1);
  EXPECT_EQ(Must(client->ExistsEach(Views({"nowhere", "slow"}), Soon())),
            std::vector<bool>({false, true}));
  EXPECT_EQ(client->stats().puts, 1);
  EXPECT_EQ(slow.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(slow.get()));
}

// Says what it was asked for, in this order; the first question waits until it may go on.
class OrderedStore : public FakeStore {
 public:
  using FakeStore::FakeStore;
  Latch asked, go_on;

  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override {
    {
      const MutexLock lock(&mutex_);
      order_ += keys[0];
    }
    asked.Open();
    go_on.Wait(DeadlineInMs(kPatientMs));
    return FakeStore::Exists(keys, deadline);
  }
  std::string order() const {
    const MutexLock lock(&mutex_);
    return order_;
  }

 private:
  mutable Mutex mutex_;
  std::string order_ ABSL_GUARDED_BY(mutex_);
};

// One client's many calls are before another's one call.
TEST_F(RemotePages, ClientsAreServedInTurn) {
  const auto lower = std::make_shared<OrderedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto eager = StartNode(source_), modest = StartNode(target_);
  ASSERT_TRUE(AllOk(Dial(server->address(), source_)
                        ->PutPages(Views({"here"}), *source_, std::vector<int64_t>{1}, Soon())));
  const auto ask = [&](Node& node, const std::string& key) {
    return BeginCall(node, server->address(), store_call::kExists, KeyArgs(key));
  };
  auto first = ask(*eager, "-");
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  std::vector<std::future<absl::StatusOr<Fields>>> many;
  for (int i = 0; i < 200; ++i) many.push_back(ask(*eager, "e"));
  auto one = ask(*modest, "m");
  // What is in memory is said by the thread that has posted those before it by then.
  for (Node* node : {eager.get(), modest.get()}) EXPECT_TRUE(IsOk(ask(*node, "here").get()));
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(first.get()));
  EXPECT_TRUE(IsOk(one.get()));
  for (auto& reply : many) EXPECT_TRUE(IsOk(reply.get()));
  // Whose call of the two came first is the network's business.
  EXPECT_THAT(lower->order(),
              testing::AnyOf("-em" + std::string(199, 'e'), "-me" + std::string(199, 'e')));
}

// What its calls carry is bounded, and others' calls are taken all the same.
TEST_F(RemotePages, WhoAsksForTooMuchAtOnceIsRefused) {
  const auto lower = std::make_shared<OrderedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto eager = StartNode(source_), modest = StartNode(target_);
  const Fields long_args = KeyArgs("e").Set("more", std::string(1500 << 10, 'x'));
  std::vector<std::future<absl::StatusOr<Fields>>> many;
  for (int i = 0; i < 100; ++i) {
    many.push_back(BeginCall(*eager, server->address(), store_call::kExists, long_args,
                             DeadlineInMs(kPatientMs)));
  }
  const auto is_refused = [](auto& reply) {
    return reply.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  ASSERT_TRUE(WaitFor([&] { return is_refused(many.back()); }, DeadlineInMs(kPatientMs)));
  EXPECT_TRUE(Fails(many.back().get(), absl::StatusCode::kResourceExhausted, "bytes of calls",
                    absl::StrCat(CallRooms::kMaxBytes)));
  auto one = BeginCall(*modest, server->address(), store_call::kExists, KeyArgs("m"));
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(one.get()));
  EXPECT_TRUE(IsOk(many.front().get()));
}

// Though they have not had their turn.
TEST_F(RemotePages, CallsOfClientsThatHaveGoneTakeNoRoom) {
  const auto lower = std::make_shared<OrderedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto first = StartNode(source_), last = StartNode(target_);
  const auto ask = [&](Node& node, const Fields& args) {
    return BeginCall(node, server->address(), store_call::kExists, args, DeadlineInMs(kPatientMs));
  };
  auto blocks = ask(*first, KeyArgs("b"));
  const Fields long_args = KeyArgs("e").Set("more", std::string(1500 << 10, 'x'));
  constexpr int64_t kEach = 8;
  // The last ones take less each: as much as is left for others, or one call.
  const int64_t fill_the_room = CallRooms::kMaxBytes / (kEach * (1500 << 10)) + 3;
  for (int64_t i = 0; i < fill_the_room; ++i) {
    const auto gone = StartNode(source_);
    const int64_t served = Metric(*server, "calls_served");
    std::vector<std::future<absl::StatusOr<Fields>>> replies;
    while (std::ssize(replies) < kEach) replies.push_back(ask(*gone, long_args));
    ASSERT_TRUE(WaitFor([&] { return Metric(*server, "calls_served") == served + kEach; }, Soon()));
  }
  ASSERT_TRUE(WaitFor([&] { return Metric(*server, "peers") <= 1; }, Soon()));
  const int64_t served = Metric(*server, "calls_served");
  std::vector<std::future<absl::StatusOr<Fields>>> several;
  for (int i = 0; i < 3; ++i) several.push_back(ask(*last, long_args));
  ASSERT_TRUE(WaitFor([&] { return Metric(*server, "calls_served") == served + 3; }, Soon()));
  lower->go_on.Open();
  for (auto& reply : several) EXPECT_TRUE(IsOk(reply.get()));
  EXPECT_TRUE(IsOk(blocks.get()));
}

// It uses up what it is given: that is less than the client waits.
TEST_F(RemotePages, ATierThatHangsMakesNothingInMemoryTooLate) {
  const std::vector<std::string> keys = {"here", "nowhere"};
  const auto with_silent_tier = [&](const auto& call) {
    const auto lower = std::make_shared<FakeStore>(SmallLayout().page_bytes());
    const auto server = Serve(MakeHost(4), lower);
    const auto client = Dial(server->address(), target_);
    const std::vector<int64_t> page = {1};
    ASSERT_TRUE(AllOk(client->PutPages(Views({"here"}), *target_, page, Soon())));
    lower->hangs = true;
    call(*client, DeadlineInMs(4000));  // A quarter of it is for the way back.
  };
  with_silent_tier([&](RemoteStore& client, Deadline deadline) {
    EXPECT_EQ(Must(client.Exists(Views(keys), deadline)), 1);
  });
  with_silent_tier([&](RemoteStore& client, Deadline deadline) {
    EXPECT_EQ(Must(client.ExistsEach(Views(keys), deadline)), std::vector<bool>({true, false}));
  });
  with_silent_tier([&](RemoteStore& client, Deadline deadline) {
    const std::vector<int64_t> pages = {8, 9};
    const auto statuses = client.GetPages(Views(keys), *target_, pages, deadline);
    EXPECT_TRUE(IsOk(statuses[0]));
    EXPECT_TRUE(Fails(statuses[1], absl::StatusCode::kDeadlineExceeded));
  });
  with_silent_tier([&](RemoteStore& client, Deadline deadline) {
    const std::vector<int64_t> pages = {8};
    EXPECT_TRUE(Fails(client.PutPages(Views({"new"}), *target_, pages, deadline)[0],
                      absl::StatusCode::kDeadlineExceeded, "store"));
  });
}

// One with much time keeps those with little from the tier for a while, and no longer.
TEST_F(RemotePages, WhoWaitsLongForATierThatHangsDoesNotMakeOthersWaitAsLong) {
  constexpr int64_t kLongMs = 60000;
  const std::vector<int64_t> page = {1}, pages = {8, 9};
  const std::vector<std::string> keys = {"here", "nowhere"};
  const auto lower = std::make_shared<FakeStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto patient = Dial(server->address(), source_), other = Dial(server->address(), target_);
  ASSERT_TRUE(AllOk(patient->PutPages(Views({"here"}), *source_, page, Soon())));
  EXPECT_EQ(Must(other->Exists(Views({"here"}), Soon())), 1);  // It has a session.
  lower->hangs = true;
  lower->num_calls = 0;
  const Deadline begin = Clock::now();
  auto question = std::async(std::launch::async, [&] {
    return patient->Exists(Views({"nobody's"}), DeadlineInMs(kLongMs)).status();
  });
  auto get = std::async(std::launch::async, [&] {
    return patient->GetBytes("nobody's", DeadlineInMs(kLongMs)).status();
  });
  ASSERT_TRUE(WaitFor([&] { return lower->num_calls == 2; }, Soon()));
  const auto exists = [&] {
    const absl::StatusOr<int64_t> there = other->Exists(Views(keys), DeadlineInMs(200));
    return there.ok() && *there == 1;
  };
  EXPECT_TRUE(WaitFor(exists, Soon()));
  const auto gets = [&] {
    return other->GetPages(Views(keys), *target_, pages, DeadlineInMs(1000))[0].ok();
  };
  EXPECT_TRUE(WaitFor(gets, Soon()));
  EXPECT_TRUE(Fails(other->Erase("here", Soon()), absl::StatusCode::kUnavailable, "not asked"));
  EXPECT_TRUE(IsOk(question.get()));
  EXPECT_TRUE(Fails(get.get(), absl::StatusCode::kDeadlineExceeded));
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 15);
}

TEST_F(RemotePages, NoMoreIsReadForACallThatIsOver) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(8), lower);
  const auto client = Dial(server->address(), source_);
  const std::vector<std::string> keys = Keys(4);
  const std::vector<int64_t> pages = {1, 2, 3, 4};
  ASSERT_TRUE(AllOk(lower->PutPages(Views(keys), *source_, pages, Soon())));
  EXPECT_EQ(Must(client->Exists(Views(keys), Soon())), 4);
  const auto statuses = client->GetPages(Views(keys), *source_, pages, DeadlineInMs(200));
  EXPECT_TRUE(Fails(statuses[0], absl::StatusCode::kDeadlineExceeded));
  LetTheServersDeadlinePass();
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(client->Erase("nowhere", Soon())));  // Served when that is done.
  EXPECT_LE(lower->num_gets, 1);
}

// Its caller has given up; others need the memory.
TEST_F(RemotePages, WhatIsFoundTooLateIsNotHeld) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(1), lower);
  const auto client = Dial(server->address(), source_), other = Dial(server->address(), target_);
  const std::vector<int64_t> page = {1};
  ASSERT_TRUE(AllOk(lower->PutPages(Views({"slow"}), *source_, page, Soon())));
  EXPECT_TRUE(Fails(client->GetPages(Views({"slow"}), *source_, page, DeadlineInMs(200))[0],
                    absl::StatusCode::kDeadlineExceeded));
  LetTheServersDeadlinePass();
  lower->go_on.Open();
  EXPECT_TRUE(
      WaitFor([&] { return AllOk(other->PutPages(Views({"new"}), *target_, page, Soon())); },
              DeadlineInMs(10000)));
}

// As what is found too late, long before its deadline.
TEST_F(RemotePages, WhatIsFoundForACallerWhoIsGoneIsNotHeld) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(1), lower);
  const auto other = Dial(server->address(), source_);
  const std::vector<int64_t> page = {1};
  ASSERT_TRUE(AllOk(lower->PutPages(Views({"slow"}), *source_, page, Soon())));
  std::atomic<bool> broken = false;
  ControlRelay relay(server->address(), [&broken](Heard&) {
    return broken ? ControlRelay::Verdict::kBreak : ControlRelay::Verdict::kPass;
  });
  const auto client = Dial(relay.address(), target_);
  auto get = std::async(std::launch::async, [&] {
    return client->GetPages(Views({"slow"}), *target_, page, Soon())[0];
  });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  broken = true;
  EXPECT_TRUE(Fails(get.get(), absl::StatusCode::kUnavailable));
  ASSERT_TRUE(WaitFor([&] { return Metric(*server, "peers_lost") == 1; }, Soon()));
  lower->go_on.Open();
  EXPECT_TRUE(
      WaitFor([&] { return AllOk(other->PutPages(Views({"new"}), *source_, page, Soon())); },
              DeadlineInMs(10000)));
}

}  // namespace
}  // namespace kvferry
