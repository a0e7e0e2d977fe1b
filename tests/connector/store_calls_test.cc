// How a server of stores shares its threads, and the room for calls, among clients.

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "connector/store/call_rooms.h"
#include "connector/store/change_eras.h"
#include "connector/store/task_thread.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"
#include "transport/command_queue.h"

namespace kvferry {
namespace {

using Code = absl::StatusCode;
using Rooms = std::vector<std::shared_ptr<void>>;

TEST(TaskThread, PeersHaveTurnsAndEachKeepsItsOrder) {
  std::string order;  // The thread's until it has ended.
  Latch done;
  TaskThread thread;
  const auto post = [&](const PeerKey& peer, char name) {
    const auto id = static_cast<uint64_t>(static_cast<unsigned char>(name));
    ASSERT_TRUE(IsOk(thread.Post({peer, id}, [&order, name] { order += name; })));
  };
  for (const char name : {'1', '2', '3', '4', '5'}) post("a", name);
  for (const char name : {'x', 'y'}) post("b", name);
  post("c", 'C');
  ASSERT_TRUE(IsOk(thread.Post({"a", 1}, [&] { done.Open(); })));
  ASSERT_TRUE(IsOk(thread.Start("tasks")));
  ASSERT_TRUE(done.Wait(Soon()));
  thread.Stop();
  EXPECT_EQ(order, "1xC2y345");
}

TEST(TaskThread, WhatFindsNoMemoryIsNotPosted) {
  int done = 0;
  Latch last;
  TaskThread thread;
  // Its own closure takes none.
  CallWithoutMemory(
      [&] {
        (void)thread.Post({std::string(100, 'p'), 1}, [&done] { ++done; });
      },
      [] {});
  ASSERT_TRUE(IsOk(thread.Post({std::string(100, 'p'), 2}, [&] { last.Open(); })));
  ASSERT_TRUE(IsOk(thread.Start("tasks")));
  ASSERT_TRUE(last.Wait(Soon()));
  thread.Stop();
  EXPECT_EQ(done, 1);
}

TEST(TaskThread, WhatNobodyWaitsForLeavesTheLine) {
  std::string order;
  Latch done;
  TaskThread thread;
  const auto held = std::make_shared<int>();
  const auto post = [&](const PeerKey& peer, uint64_t id, char name) {
    ASSERT_TRUE(IsOk(thread.Post({peer, id}, [&order, name, held] { order += name; })));
  };
  post("a", 1, '1');
  post("a", 2, '2');
  post("a", 3, '3');
  post("gone", 1, 'x');
  post("gone", 2, 'y');
  post("b", 1, 'B');
  for (const uint64_t id : {2, 1}) thread.Drop({"gone", id});
  thread.Drop({"a", 2});
  thread.Drop({"a", 2});
  thread.Drop({"nobody", 1});
  EXPECT_EQ(held.use_count(), 4);
  ASSERT_TRUE(IsOk(thread.Post({"c", 1}, [&] { done.Open(); })));
  ASSERT_TRUE(IsOk(thread.Start("tasks")));
  ASSERT_TRUE(done.Wait(Soon()));
  thread.Drop({"a", 1});  // It has been done.
  thread.Stop();
  EXPECT_EQ(order.substr(0, 2), "1B");
  EXPECT_EQ(order.find_first_of("2xy"), std::string::npos);
}

TEST(TaskThread, WhatWaitsWhenItStopsIsDropped) {
  const auto held = std::make_shared<int>();
  TaskThread thread;
  ASSERT_TRUE(IsOk(thread.Post({"a", 1}, [held] { FAIL(); })));
  thread.Stop();
  EXPECT_EQ(held.use_count(), 1);
  EXPECT_TRUE(Fails(thread.Post({"a", 2}, [] {}), Code::kUnavailable));
}

// As many as it is granted.
Rooms TakeAll(CallRooms& rooms, const PeerKey& peer, int64_t bytes) {
  Rooms taken;
  for (;;) {
    absl::StatusOr<std::shared_ptr<void>> room = rooms.Take(peer, bytes);
    if (!room.ok()) return taken;
    taken.push_back(*std::move(room));
  }
}

TEST(CallRooms, WhoHasMostLeavesSomeToOthers) {
  const auto rooms = CallRooms::Create();
  constexpr int64_t kBytes = 1 << 20;
  Rooms first = TakeAll(*rooms, "a", kBytes);
  EXPECT_EQ(std::ssize(first) * kBytes, CallRooms::kMaxBytes / 2);
  EXPECT_TRUE(Fails(rooms->Take("a", kBytes), Code::kResourceExhausted, "134217728 bytes of calls",
                    "268435456 together", "134217728 are left for others"));
  const Rooms second = TakeAll(*rooms, "b", kBytes);
  EXPECT_EQ(std::ssize(second) * kBytes, CallRooms::kMaxBytes / 4);
  first.clear();
  EXPECT_TRUE(IsOk(rooms->Take("b", kBytes)));
  EXPECT_EQ(std::ssize(TakeAll(*rooms, "a", 0)), CallRooms::kMaxCalls / 2 - 32);
}

TEST(CallRooms, OneCallEachHasInAnyCase) {
  const auto rooms = CallRooms::Create();
  EXPECT_TRUE(IsOk(rooms->Take("b", 1)));  // It is over when that of the other one comes.
  const auto all = rooms->Take("a", CallRooms::kMaxBytes);
  ASSERT_TRUE(IsOk(all));
  EXPECT_TRUE(Fails(rooms->Take("a", 1), Code::kResourceExhausted, "0 are left"));
  const auto one = rooms->Take("b", 1);
  EXPECT_TRUE(IsOk(one));
  EXPECT_TRUE(Fails(rooms->Take("b", 1), Code::kResourceExhausted, "0 are left"));
}

TEST(ChangeEras, ALaterOneBeginsWithAKeyThatWasAbandoned) {
  const std::vector<std::string_view> a = {"a"}, b = {"b"}, both = {"b", "a"};
  ChangeEras eras;
  EXPECT_EQ(eras.Of(a), 0);
  eras.Abandon(0, a);
  EXPECT_EQ(eras.Of(b), 0);
  EXPECT_EQ(eras.Of(both), 1);
  EXPECT_EQ(eras.Of(a), 1);
  eras.Abandon(0, b);  // Ended by what came since.
  EXPECT_EQ(eras.Of(b), 1);
}

// The list of those that were is bounded.
TEST(ChangeEras, ManyThatWereAbandonedAreAsAll) {
  ChangeEras eras;
  for (int i = 0; i <= 65536; ++i) {
    const std::string key = absl::StrCat(i);
    const std::string_view view = key;
    EXPECT_EQ(eras.Of({&view, 1}), 0);
    eras.Abandon(0, {&view, 1});
  }
  const std::string_view other = "other";
  EXPECT_EQ(eras.Of({&other, 1}), 1);
}

TEST(CallRooms, WhatFindsNoMemoryTakesNothing) {
  const auto rooms = CallRooms::Create();
  CallWithoutMemory([&] { (void)rooms->Take(std::string(100, 'p'), CallRooms::kMaxBytes); }, [] {});
  EXPECT_EQ(std::ssize(TakeAll(*rooms, std::string(100, 'p'), CallRooms::kMaxBytes)), 1);
}

}  // namespace
}  // namespace kvferry
