// Questions and answers between two ends that forget, repeat and contradict.

#include "transport/calls.h"

#include <gtest/gtest.h>

#include <optional>

#include "tests/support/status.h"
#include "tests/support/wait_for.h"
#include "tests/transport/fake_outbox.h"

namespace kvferry {
namespace {

const PeerKey kPeer = "dialled:1";
const PeerKey kOther = "dialled:2";

struct Recorder : CallHandler {
  void OnCall(const CallKey& call, const std::string& function, const Fields& args,
              Deadline) override {
    calls.push_back(call);
    last_function = function;
    last_args = args;
  }
  void OnCallDropped(const CallKey& call) override { dropped.push_back(call); }
  bool MayWait(const std::string& function) const override { return function != "quick"; }

  std::vector<CallKey> calls;
  std::vector<CallKey> dropped;
  std::string last_function;
  Fields last_args;
};

class CallsAlone : public testing::Test {
 protected:
  static Config MakeConfig() {
    Config config;
    config.max_calls_per_peer = 3;
    return config;
  }
  // Answers land in answers_[id], once.
  void Ask(uint64_t id, const PeerKey& peer = kPeer, Deadline deadline = DeadlineInMs(60000)) {
    calls_.Add(id,
               {peer, "f", Fields().Set("x", 5), deadline, [this, id](absl::StatusOr<Fields> r) {
                  EXPECT_TRUE(answers_.emplace(id, std::move(r)).second) << "answered twice";
                }});
  }
  bool Answered(uint64_t id) const { return answers_.contains(id); }
  // Those that were created after `since` wait for another session with their peer.
  int64_t Move(Deadline since = Deadline::min()) {
    auto taken = calls_.TakeUnasked(kPeer, since);
    for (auto& [id, call] : taken) {
      call.peer = kOther;
      calls_.Add(id, std::move(call));
    }
    return std::ssize(taken);
  }

  const Config config_ = MakeConfig();
  Recorder handler_;
  FakeOutbox outbox_;
  Metrics metrics_;
  Calls calls_{config_, &handler_, &outbox_, &metrics_};
  std::map<uint64_t, absl::StatusOr<Fields>> answers_;
};

TEST_F(CallsAlone, AsksOnceItsPeerIsReady) {
  Ask(1);
  calls_.OnPeerReady(kOther);
  EXPECT_EQ(outbox_.Count<CallMsg>(), 0);
  calls_.OnPeerReady(kPeer);
  calls_.OnPeerReady(kPeer);
  ASSERT_EQ(outbox_.Count<CallMsg>(), 1);
  EXPECT_EQ(outbox_.Last<CallMsg>()->call_id, 1u);
  EXPECT_EQ(outbox_.Last<CallMsg>()->function, "f");
  EXPECT_EQ(*outbox_.Last<CallMsg>()->args.Uint("x"), 5u);
  EXPECT_GT(outbox_.Last<CallMsg>()->timeout_ms, 50000);
}

// More than the peer is given to take waits, and what came first goes first.
TEST_F(CallsAlone, AsksInTurnAsFarAsThereIsRoom) {
  std::vector<uint64_t> asked;
  const auto ask = [&](int room) {
    outbox_.room = room;
    calls_.OnPeerReady(kPeer);
    asked.clear();
    for (const auto& [peer, body] : outbox_.sent) asked.push_back(std::get<CallMsg>(body).call_id);
    return asked;
  };
  for (const uint64_t id : {7, 3, 9, 1, 5}) Ask(id);
  Ask(4, kOther);
  EXPECT_EQ(ask(2), (std::vector<uint64_t>{7, 3}));
  calls_.Cancel(9, absl::CancelledError("x"));
  EXPECT_EQ(ask(2).size(), 2u);
  EXPECT_EQ(ask(3), (std::vector<uint64_t>{7, 3, 1}));
  calls_.OnPeerGone(kOther, absl::UnavailableError("x"));
  EXPECT_EQ(Move(), 1);
  calls_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  EXPECT_EQ(CutOffOf(answers_.at(1).status()), CutOff::kAsked);
  EXPECT_FALSE(Answered(5));
  calls_.Tick(DeadlineInMs(70000));
  EXPECT_TRUE(Fails(answers_.at(5), absl::StatusCode::kDeadlineExceeded, "or took no more"));
  EXPECT_EQ(CutOffOf(answers_.at(5).status()), CutOff::kNotAsked);
  EXPECT_EQ(ask(100).size(), 3u);
}

TEST_F(CallsAlone, TheFirstReplyOfItsPeerCounts) {
  Ask(1);
  Ask(2);
  calls_.OnPeerReady(kPeer);
  calls_.OnReplyMsg(kOther, {1, absl::OkStatus(), Fields().Set("y", 1)});
  calls_.OnReplyMsg(kPeer, {3, absl::OkStatus(), {}});
  EXPECT_TRUE(answers_.empty());
  calls_.OnReplyMsg(kPeer, {1, absl::OkStatus(), Fields().Set("y", 2)});
  calls_.OnReplyMsg(kPeer, {1, absl::OkStatus(), Fields().Set("y", 3)});
  ASSERT_TRUE(IsOk(answers_.at(1)));
  EXPECT_EQ(*answers_.at(1)->Uint("y"), 2u);
  calls_.OnReplyMsg(kPeer, {2, absl::NotFoundError("x"), {}});
  EXPECT_TRUE(Fails(answers_.at(2), absl::StatusCode::kNotFound, "x"));
}

// Its peer cannot be reached the way it was to be, and is dialled again.
TEST_F(CallsAlone, WaitsForAnotherSessionWithItsPeer) {
  Ask(1);
  calls_.OnPeerReady(kPeer);
  Ask(2);
  EXPECT_EQ(Move(), 1);
  EXPECT_EQ(metrics_.calls_started, 2);
  calls_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  EXPECT_EQ(CutOffOf(answers_.at(1).status()), CutOff::kAsked);
  EXPECT_FALSE(answers_.contains(2));
  calls_.OnPeerReady(kOther);
  EXPECT_EQ(outbox_.Count<CallMsg>(), 2);
  EXPECT_EQ(outbox_.Last<CallMsg>()->call_id, 2u);
  EXPECT_EQ(*outbox_.Last<CallMsg>()->args.Uint("x"), 5u);
  calls_.OnReplyMsg(kOther, {2, absl::OkStatus(), {}});
  EXPECT_TRUE(IsOk(answers_.at(2)));
}

// What was there before has had its time, and what has moved keeps its turn.
TEST_F(CallsAlone, OnlyWhatIsYoungerMoves) {
  for (const uint64_t id : {9, 4}) Ask(id);
  const Deadline since = Clock::now();
  ASSERT_TRUE(WaitFor([&] { return Clock::now() > since; }, Soon()));
  for (const uint64_t id : {7, 3, 5}) Ask(id);
  EXPECT_EQ(Move(since), 3);
  EXPECT_EQ(Move(since), 0);
  calls_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  EXPECT_EQ(answers_.size(), 2u);
  EXPECT_EQ(CutOffOf(answers_.at(9).status()), CutOff::kNotAsked);
  calls_.OnPeerReady(kOther);
  std::vector<uint64_t> asked;
  for (const auto& [peer, body] : outbox_.sent) asked.push_back(std::get<CallMsg>(body).call_id);
  EXPECT_EQ(asked, (std::vector<uint64_t>{7, 3, 5}));
}

// Who asks for more than this side allows would wait on for nothing.
TEST_F(CallsAlone, ACallBeyondTheLimitIsAnsweredWhenItIsGivenUp) {
  calls_.OnCallMsg(kPeer, {1, "f", config_.max_fetch_timeout_ms, {}});
  calls_.OnCallMsg(kPeer, {2, "f", 2 * config_.max_fetch_timeout_ms, {}});
  calls_.Tick(DeadlineInMs(config_.max_fetch_timeout_ms + 1000));
  EXPECT_EQ(handler_.dropped.size(), 2u);
  ASSERT_EQ(outbox_.Count<ReplyMsg>(), 1);
  EXPECT_EQ(outbox_.Last<ReplyMsg>()->call_id, 2u);
  EXPECT_TRUE(Fails(outbox_.Last<ReplyMsg>()->status, absl::StatusCode::kDeadlineExceeded,
                    "max_fetch_timeout_ms"));
}

TEST_F(CallsAlone, EveryEndIsAnswered) {
  Ask(1, kPeer, DeadlineInMs(1));
  Ask(2, kPeer);
  Ask(3, kPeer);
  Ask(4, kOther);
  calls_.OnPeerReady(kPeer);
  const Deadline next = calls_.Tick(DeadlineInMs(2));
  EXPECT_TRUE(Fails(answers_.at(1), absl::StatusCode::kDeadlineExceeded, "no answer to 'f'"));
  EXPECT_EQ(outbox_.Last<CancelMsg>()->transfer_id, 1u);
  EXPECT_LE(next, DeadlineInMs(60000));
  calls_.Cancel(2, absl::CancelledError("x"));
  EXPECT_TRUE(Fails(answers_.at(2), absl::StatusCode::kCancelled));
  EXPECT_EQ(outbox_.Last<CancelMsg>()->transfer_id, 2u);
  calls_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  EXPECT_TRUE(Fails(answers_.at(3), absl::StatusCode::kUnavailable));
  EXPECT_FALSE(Answered(4));
  calls_.CancelAll(absl::CancelledError("x"));
  EXPECT_TRUE(Answered(4));
  EXPECT_EQ(outbox_.Count<CancelMsg>(), 2);  // Nothing to take back where nothing was asked.
  EXPECT_EQ(metrics_.calls_failed, 4);
}

// What an answer brings about may end the others.
TEST_F(CallsAlone, AnAnswerMayCancelOtherCalls) {
  const auto ask = [&] {
    answers_.clear();
    for (uint64_t id = 1; id <= 4; ++id) {
      calls_.Add(id, {kPeer, "f", {}, DeadlineInMs(1), [this, id](absl::StatusOr<Fields> reply) {
                        EXPECT_TRUE(answers_.emplace(id, std::move(reply)).second);
                        for (uint64_t other = 1; other <= 4; ++other) {
                          calls_.Cancel(other, absl::CancelledError("x"));
                        }
                      }});
    }
  };
  ask();
  calls_.Tick(DeadlineInMs(2));
  EXPECT_EQ(answers_.size(), 4u);
  ask();
  calls_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  EXPECT_EQ(answers_.size(), 4u);
}

TEST_F(CallsAlone, ServesAndReplies) {
  calls_.OnCallMsg(kPeer, {9, "g", 1000, Fields().Set("x", 6)});
  ASSERT_EQ(handler_.calls.size(), 1u);
  EXPECT_EQ(handler_.calls[0], (CallKey{kPeer, 9}));
  EXPECT_EQ(handler_.last_function, "g");
  EXPECT_EQ(*handler_.last_args.Uint("x"), 6u);
  calls_.Reply({kOther, 9}, Fields());
  EXPECT_EQ(outbox_.Last<ReplyMsg>(), nullptr);
  calls_.Reply({kPeer, 9}, Fields().Set("y", 7));
  calls_.Reply({kPeer, 9}, Fields().Set("y", 8));
  ASSERT_EQ(outbox_.Count<ReplyMsg>(), 1);
  EXPECT_EQ(*outbox_.Last<ReplyMsg>()->result.Uint("y"), 7u);
  EXPECT_TRUE(handler_.dropped.empty());
}

TEST_F(CallsAlone, AReplyThatCannotBeSentIsAnError) {
  calls_.OnCallMsg(kPeer, {9, "g", 1000, {}});
  calls_.Reply({kPeer, 9}, Fields().Set("y", std::string(2 << 20, 'x')));
  EXPECT_TRUE(Fails(outbox_.Last<ReplyMsg>()->status, absl::StatusCode::kInvalidArgument, "limit"));
}

TEST_F(CallsAlone, WhatNobodyWaitsForIsDroppedOnce) {
  calls_.OnCallMsg(kPeer, {1, "g", 1000, {}});
  calls_.OnCallMsg(kPeer, {2, "g", 1, {}});
  calls_.OnCallMsg(kPeer, {3, "g", 1000, {}});
  calls_.OnCallMsg(kOther, {3, "g", 1000, {}});
  calls_.OnCancelMsg(kOther, 1);  // Another's.
  EXPECT_TRUE(handler_.dropped.empty());
  calls_.OnCancelMsg(kPeer, 1);
  calls_.OnCancelMsg(kPeer, 1);
  EXPECT_EQ(handler_.dropped, (std::vector<CallKey>{{kPeer, 1}}));
  EXPECT_LE(calls_.Tick(DeadlineInMs(10)), DeadlineInMs(1000));
  EXPECT_EQ(handler_.dropped.back(), (CallKey{kPeer, 2}));
  calls_.OnPeerGone(kPeer, absl::UnavailableError("x"));
  EXPECT_EQ(handler_.dropped, (std::vector<CallKey>{{kPeer, 1}, {kPeer, 2}, {kPeer, 3}}));
  for (const CallKey& key : handler_.dropped) calls_.Reply(key, Fields());
  EXPECT_EQ(outbox_.Count<ReplyMsg>(), 0);
  calls_.Reply({kOther, 3}, Fields());
  EXPECT_EQ(outbox_.Count<ReplyMsg>(), 1);
}

TEST_F(CallsAlone, LimitsAPeerAndNotTheOthers) {
  for (uint64_t id = 1; id <= 3; ++id) calls_.OnCallMsg(kPeer, {id, "g", 1000, {}});
  calls_.OnCallMsg(kPeer, {2, "g", 1000, {}});
  EXPECT_TRUE(Fails(outbox_.Last<ReplyMsg>()->status, absl::StatusCode::kAlreadyExists));
  calls_.OnCallMsg(kPeer, {4, "g", 1000, {}});
  EXPECT_TRUE(Fails(outbox_.Last<ReplyMsg>()->status, absl::StatusCode::kResourceExhausted,
                    "max_calls_per_peer (3)"));
  calls_.OnCallMsg(kOther, {4, "g", 1000, {}});
  EXPECT_EQ(handler_.calls.size(), 4u);
  calls_.Reply({kPeer, 1}, Fields());
  calls_.OnCallMsg(kPeer, {4, "g", 1000, {}});
  EXPECT_EQ(handler_.calls.size(), 5u);
}

TEST_F(CallsAlone, WhatDoesNotWaitIsNotLimited) {
  for (uint64_t id = 1; id <= 3; ++id) calls_.OnCallMsg(kPeer, {id, "g", 1000, {}});
  for (uint64_t id = 4; id <= 9; ++id) calls_.OnCallMsg(kPeer, {id, "quick", 1000, {}});
  EXPECT_EQ(handler_.calls.size(), 9u);
  EXPECT_EQ(outbox_.Count<ReplyMsg>(), 0);
  // And makes no room for what does.
  for (uint64_t id = 4; id <= 9; ++id) calls_.Reply({kPeer, id}, Fields());
  calls_.OnCallMsg(kPeer, {10, "g", 1000, {}});
  EXPECT_TRUE(Fails(outbox_.Last<ReplyMsg>()->status, absl::StatusCode::kResourceExhausted));
}

TEST_F(CallsAlone, WithoutAHandlerNothingIsServed) {
  Calls deaf(config_, nullptr, &outbox_, &metrics_);
  deaf.OnCallMsg(kPeer, {1, "g", 1000, {}});
  EXPECT_TRUE(Fails(outbox_.Last<ReplyMsg>()->status, absl::StatusCode::kUnimplemented));
  EXPECT_EQ(deaf.Tick(Clock::now()), Deadline::max());
}

}  // namespace
}  // namespace kvferry
