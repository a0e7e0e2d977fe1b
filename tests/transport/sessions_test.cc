#include "transport/sessions.h"

#include <gtest/gtest.h>

#include <iterator>
#include <map>

namespace kvferry {
namespace {

class SessionTable : public testing::Test {
 protected:
  Deadline At(int64_t ms) const { return start_ + std::chrono::milliseconds(ms); }
  std::map<PeerKey, Sessions::Due> TakeDue(int64_t now_ms) {
    std::map<PeerKey, Sessions::Due> due;
    for (const auto& [peer, what] : sessions_.TakeDue(At(now_ms), 100, 500, &next_)) {
      EXPECT_TRUE(due.emplace(peer, what).second) << "two things due for " << peer;
    }
    return due;
  }
  void AddReady(const PeerKey& peer, bool dialled, int64_t heard_ms) {
    Session session;
    session.state = Session::State::kReady;
    session.dialled = dialled;
    session.address = "tcp://" + peer;
    session.link = ++links_;
    session.last_heard = At(heard_ms);
    session.next_ping = At(heard_ms + 100);
    sessions_.Insert(peer, session);
  }

  using Due = Sessions::Due;
  using Map = std::map<PeerKey, Sessions::Due>;
  const Deadline start_ = Clock::now();
  Sessions sessions_;
  Deadline next_;
  LinkId links_ = 0;
};

TEST_F(SessionTable, EmptyNeverNeedsAsking) {
  EXPECT_TRUE(TakeDue(0).empty());
  EXPECT_EQ(next_, Deadline::max());
}

TEST_F(SessionTable, TheDiallerPings) {
  AddReady("a", true, 0);
  EXPECT_TRUE(TakeDue(99).empty());
  EXPECT_EQ(next_, At(100));
  EXPECT_EQ(TakeDue(100), (Map{{"a", Due::kPing}}));
  EXPECT_EQ(next_, At(200));
  EXPECT_TRUE(TakeDue(150).empty());  // Counted as pinged.
  EXPECT_EQ(TakeDue(450), (Map{{"a", Due::kPing}}));
  EXPECT_EQ(next_, At(500));  // Its death comes before the next ping.
  EXPECT_EQ(sessions_.Find("a")->pings, 2);
}

// Or it would take this side for dead.
TEST_F(SessionTable, APeerThatBearsLessSilenceIsPingedMoreOften) {
  AddReady("a", true, 0);
  AddReady("b", true, 0);
  AddReady("c", true, 0);
  sessions_.Find("b")->most_between_pings_ms = 30;
  sessions_.Find("c")->most_between_pings_ms = 5000;
  EXPECT_EQ(TakeDue(100), (Map{{"a", Due::kPing}, {"b", Due::kPing}, {"c", Due::kPing}}));
  EXPECT_EQ(next_, At(130));
  EXPECT_EQ(TakeDue(130), (Map{{"b", Due::kPing}}));
  EXPECT_EQ(next_, At(160));
  EXPECT_EQ(TakeDue(200), (Map{{"a", Due::kPing}, {"b", Due::kPing}, {"c", Due::kPing}}));
}

TEST_F(SessionTable, TheAcceptedAreNotPingedButMayDie) {
  AddReady("a", false, 0);
  EXPECT_TRUE(TakeDue(499).empty());
  EXPECT_EQ(next_, At(500));
  EXPECT_EQ(TakeDue(500), (Map{{"a", Due::kDead}}));
}

TEST_F(SessionTable, HearingPutsDeathOff) {
  AddReady("a", true, 0);
  TakeDue(400);
  sessions_.Find("a")->last_heard = At(450);
  TakeDue(700);
  EXPECT_EQ(TakeDue(940), (Map{{"a", Due::kPing}}));
  EXPECT_EQ(next_, At(950));
  EXPECT_EQ(TakeDue(950), (Map{{"a", Due::kDead}}));
}

// The process, or its machine, stood still: nobody could be heard. Peers get as long as they had
// left.
TEST_F(SessionTable, TimeInWhichNobodyAskedIsNoSilence) {
  AddReady("pinged", true, 0);
  AddReady("accepted", false, 0);
  TakeDue(100);
  EXPECT_EQ(next_, At(200));
  EXPECT_FALSE(sessions_.StoppedLately(At(150), 500));
  EXPECT_TRUE(sessions_.StoppedLately(At(40200), 500));  // Before TakeDue() has seen it, too.
  EXPECT_EQ(TakeDue(40200), (Map{{"pinged", Due::kPing}}));
  EXPECT_EQ(next_, At(40300));
  EXPECT_EQ(TakeDue(40300), (Map{{"pinged", Due::kPing}}));
  EXPECT_EQ(TakeDue(40400), (Map{{"pinged", Due::kPing}}));
  EXPECT_EQ(TakeDue(40500), (Map{{"pinged", Due::kDead}, {"accepted", Due::kDead}}));
  EXPECT_TRUE(sessions_.StoppedLately(At(40700), 500));
  TakeDue(41000);
  EXPECT_FALSE(sessions_.StoppedLately(At(41201), 500));
}

TEST_F(SessionTable, Greeting) {
  Session session;
  session.dialled = true;
  session.address = "tcp://a";
  session.greeting_until = At(300);
  sessions_.Insert("a", session);
  EXPECT_TRUE(TakeDue(299).empty());  // No ping, although nothing was ever heard.
  EXPECT_EQ(next_, At(300));
  EXPECT_EQ(TakeDue(300), (Map{{"a", Due::kGreetingFailed}}));
}

// Each process once, however many sessions it has; who has not said which it is may be any.
TEST_F(SessionTable, CountsTheNodesThatPeersAre) {
  constexpr uint64_t kEpochs[] = {8, 8, 9, 0, 0};
  for (size_t i = 0; i < std::size(kEpochs); ++i) {
    const PeerKey peer(1, static_cast<char>('a' + i));
    AddReady(peer, false, 0);
    sessions_.Find(peer)->epoch = kEpochs[i];
  }
  EXPECT_EQ(sessions_.CountOthers(7), 4);
  EXPECT_EQ(sessions_.CountOthers(8), 3);
  EXPECT_EQ(sessions_.CountOthers(9), 3);
}

TEST_F(SessionTable, EachForItself) {
  AddReady("dead", false, -500);
  AddReady("pinged", true, -100);
  AddReady("quiet", true, 0);
  EXPECT_EQ(TakeDue(0), (Map{{"dead", Due::kDead}, {"pinged", Due::kPing}}));
}

TEST_F(SessionTable, Finding) {
  AddReady("a", true, 0);
  AddReady("b", false, 0);
  sessions_.Find("a")->epoch = 8;
  EXPECT_EQ(sessions_.FindDialled("tcp://a", 8), "a");
  EXPECT_EQ(sessions_.FindDialled("tcp://a", 9), "");  // Another process.
  EXPECT_EQ(sessions_.FindDialled("tcp://b", 0), "");  // Accepted, not dialled.
  EXPECT_EQ(sessions_.FindLink(2), "b");
  EXPECT_EQ(sessions_.FindLink(3), "");
  const uint64_t own_id = sessions_.Find("a")->own_id;
  EXPECT_EQ(sessions_.FindOwnId(own_id), "a");
  Session greeting;
  sessions_.Insert("c", greeting);
  EXPECT_EQ(sessions_.FindLink(0), "");  // A greeting session has no link.
  sessions_.Erase("a");
  EXPECT_EQ(sessions_.Find("a"), nullptr);
  EXPECT_EQ(sessions_.FindOwnId(own_id), "");
  EXPECT_EQ(sessions_.FindDialled("tcp://a", 8), "");
  EXPECT_EQ(sessions_.size(), 2u);
}

// A greeting session will do for any epoch, but not while a ready one has the right epoch: the
// greeting may turn out to be one too many, and take its fetches along.
TEST_F(SessionTable, AReadySessionIsBetterThanAGreetingOne) {
  for (const PeerKey ready : {"a", "b", "c", "d", "e", "f", "g", "h"}) {
    sessions_ = Sessions();
    AddReady(ready, true, 0);
    sessions_.Find(ready)->address = "tcp://x";
    sessions_.Find(ready)->epoch = 8;
    Session greeting;
    greeting.dialled = true;
    greeting.address = "tcp://x";
    sessions_.Insert("greeting", greeting);
    EXPECT_EQ(sessions_.FindDialled("tcp://x", 8), ready);
    EXPECT_EQ(sessions_.FindDialled("tcp://x", 9), "greeting");
    EXPECT_EQ(sessions_.FindTwin("greeting"), ready);
    EXPECT_EQ(sessions_.FindTwin(ready), "");
  }
}

}  // namespace
}  // namespace kvferry
