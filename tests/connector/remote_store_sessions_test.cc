// Sessions that end with calls of a store on their way, and what of those comes late.

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "base/interrupt.h"
#include "tests/connector/remote_stores.h"
#include "tests/connector/store_values.h"
#include "tests/support/control_relay.h"
#include "tests/support/failing_new.h"

namespace kvferry {
namespace {

using Code = absl::StatusCode;
using Heard = ControlRelay::Heard;
using Verdict = ControlRelay::Verdict;

bool IsReply(const Heard& heard) { return std::holds_alternative<ReplyMsg>(heard.message.body); }
bool IsHello(const Heard& heard) { return std::holds_alternative<HelloMsg>(heard.message.body); }

// `far_` reaches the server through a relay, whose thread may judge for as long as there is one.
class RemoteSessions : public RemotePages {
 protected:
  void Connect(ControlRelay::Judge judge, int64_t connect_timeout_ms = 3000) {
    far_.reset();
    relay_.emplace(server_->address(), std::move(judge));
    far_ = Dial(relay_->address(), target_, 64 << 20, connect_timeout_ms);
  }
  // For tests whose judge looks at what is theirs: while this lives, which is to be less long.
  auto ConnectWhile(ControlRelay::Judge judge) {
    Connect(std::move(judge));
    return absl::Cleanup([this] {
      far_.reset();
      relay_.reset();
    });
  }
  // Calls hear nothing but what `answer`, which outlives the relay, is by then.
  static ControlRelay::Judge AllAnswered(const Fields& answer) {
    return [&answer](Heard& heard) {
      const auto* call = std::get_if<CallMsg>(&heard.message.body);
      if (call == nullptr) return Verdict::kPass;
      heard.answer = ReplyMsg{call->call_id, absl::OkStatus(), answer};
      return Verdict::kAnswer;
    };
  }
  // What is to happen to the first message of which `at` holds.
  static ControlRelay::Judge Once(Verdict verdict, std::function<bool(const Heard&)> at) {
    return [verdict, at = std::move(at), done = false](Heard& heard) mutable {
      if (done || !at(heard)) return Verdict::kPass;
      done = true;
      return verdict;
    };
  }
  void PutAll() { ASSERT_TRUE(AllOk(writer_->PutPages(Views(keys_), *source_, pages_, Soon()))); }

  const std::vector<std::string> keys_ = Keys(2);
  const std::vector<int64_t> pages_ = {3, 4};
  std::optional<ControlRelay> relay_;
  std::unique_ptr<RemoteStore> far_;
};

// The call that is lost with its session, or the reply.
class RemoteSessionsBroken : public RemoteSessions, public testing::WithParamInterface<bool> {
 protected:
  template <typename Call>
  void Check(const std::string& function, const Call& call) {
    SCOPED_TRACE(function);
    // Only the client learns it, as one that was stopped until the server had given it up.
    Connect(Once(Verdict::kBreakUnnoticed, [function, reply = GetParam()](const Heard& heard) {
      return reply ? IsReply(heard) : heard.function() == function;
    }));
    EXPECT_TRUE(IsOk(call()));
    EXPECT_EQ(Metric(*far_, "peers_lost"), 1);
  }
};

TEST_P(RemoteSessionsBroken, CallsAreMadeAnew) {
  PutAll();
  Check(store_call::kExists, [&] { return far_->Exists(Views(keys_), Soon()); });
  Check(store_call::kExistsEach, [&] { return far_->ExistsEach(Views(keys_), Soon()); });
  Check(store_call::kGet, [&] { return far_->GetBytes(keys_[0], Soon()); });
  Check(store_call::kGetPages,
        [&] { return far_->GetPages(Views(keys_), *target_, pages_, Soon())[1]; });
  EXPECT_TRUE(HoldsExactly(*target_, 2, pages_, 1, pages_));
  Check(store_call::kPutPages,
        [&] { return far_->PutPages(Views(keys_), *target_, pages_, Soon())[1]; });
  Check(store_call::kPut, [&] { return Put(*far_, "value", Bytes(1000)); });
  Check(store_call::kErase, [&] { return far_->Erase("value", Soon()); });
  EXPECT_TRUE(Fails(writer_->GetBytes("value", Soon()), Code::kNotFound));
}

INSTANTIATE_TEST_SUITE_P(At, RemoteSessionsBroken, testing::Bool());

// As when the lease has expired, or is of a process that is no more.
TEST_F(RemoteSessions, AFetchThatIsRefusedIsMadeAnew) {
  PutAll();
  std::atomic<int> num_fetches = 0;
  std::atomic<int> num_refused = 2;
  const auto connected = ConnectWhile([&](Heard& heard) {
    const auto* fetch = std::get_if<FetchMsg>(&heard.message.body);
    if (fetch == nullptr || ++num_fetches > num_refused) return Verdict::kPass;
    heard.answer = RefuseMsg{fetch->transfer_id, num_fetches % 2 == 1
                                                     ? absl::NotFoundError("no such lease")
                                                     : absl::FailedPreconditionError("expired")};
    return Verdict::kAnswer;
  });
  EXPECT_TRUE(IsOk(far_->GetBytes(keys_[0], Soon())));
  EXPECT_EQ(num_fetches, 3);
  num_fetches = 0;
  EXPECT_TRUE(AllOk(far_->GetPages(Views(keys_), *target_, pages_, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, pages_, 1, pages_));
  num_refused = 1000;
  EXPECT_TRUE(Fails(far_->GetBytes(keys_[0], Soon()), Code::kUnavailable, "expired"));
  for (const absl::Status& status : far_->GetPages(Views(keys_), *target_, pages_, Soon())) {
    EXPECT_TRUE(Fails(status, Code::kUnavailable, "no such lease"));
  }
}

// The caller's memory is the transfer's for longer than a second, and the caller finds no memory
// meanwhile.
TEST_F(RemoteSessions, AFetchIsWaitedForWithoutMemoryToo) {
  ASSERT_TRUE(IsOk(Put(*writer_, "value", Bytes(1000))));
  Connect([](const Heard& heard) {
    return std::holds_alternative<FetchMsg>(heard.message.body) ? Verdict::kDrop : Verdict::kPass;
  });
  ASSERT_EQ(Must(far_->Exists(Views({"value"}), Soon())), 1);
  Bytes into(1000);
  const std::span<std::byte> out = into;
  absl::Status got;
  CallWithoutMemory(
      [&] {
        got = far_->Get("value", {&out, 1}, DeadlineInMs(1500));
      },
      [&] { ASSERT_EQ(Metric(*far_, "fetches_active"), 0); });
  EXPECT_TRUE(Fails(got, Code::kDeadlineExceeded));
}

// As by Ctrl-C, while a fetch is under way that would go on until the deadline.
TEST_F(RemoteSessions, WhoIsInterruptedHasHisMemoryBack) {
  class Impatient final : public Interrupter {
    bool Look() noexcept override { return true; }
  };
  PutAll();
  ASSERT_TRUE(IsOk(Put(*writer_, "value", Bytes(1000))));
  std::atomic<int> num_fetches = 0;
  const auto connected = ConnectWhile([&](Heard& heard) {
    const bool is_fetch = std::holds_alternative<FetchMsg>(heard.message.body);
    num_fetches += is_fetch ? 1 : 0;
    return is_fetch ? Verdict::kDrop : Verdict::kPass;
  });
  const Deadline late = DeadlineInMs(600'000);
  const auto interrupted = [&](const auto& call) {
    Impatient impatient;
    Interrupter* const before = SetInterrupter(&impatient);
    const absl::Cleanup restore = [before] { SetInterrupter(before); };
    const Deadline begin = Clock::now();
    EXPECT_FALSE(call().ok());
    EXPECT_LT(SecondsBetween(begin, Clock::now()), 60);
    EXPECT_EQ(Metric(*far_, "fetches_active"), 0);
  };
  // So that what is interrupted are fetches.
  ASSERT_TRUE(IsOk(far_->Exists(Views(keys_), Soon())));
  interrupted([&] { return far_->GetPages(Views(keys_), *target_, pages_, late)[1]; });
  interrupted([&] {
    Bytes out(1000);
    const std::span<std::byte> part = out;
    return far_->Get("value", {&part, 1}, late);
  });
  EXPECT_EQ(num_fetches, 2);
}

TEST_F(RemoteSessions, PagesThatDidNotComeInTimeAreNotThere) {
  PutAll();
  Connect([](const Heard& heard) {
    return std::holds_alternative<FetchMsg>(heard.message.body) ? Verdict::kDrop : Verdict::kPass;
  });
  for (const auto& status : far_->GetPages(Views(keys_), *target_, pages_, DeadlineInMs(500))) {
    EXPECT_TRUE(Fails(status, Code::kDeadlineExceeded));
  }
  EXPECT_TRUE(IsUntouched(*target_, 2));
}

// The server has what it wanted, and the client does not hear that: the caller may write into its
// pages from then on, and nothing of it is sent.
TEST_F(RemoteSessions, NothingIsReadOfPagesWhosePutIsOver) {
  Connect([](const Heard& heard) {
    return std::holds_alternative<DoneMsg>(heard.message.body) ? Verdict::kDrop : Verdict::kPass;
  });
  EXPECT_TRUE(AllOk(far_->PutPages(Views(keys_), *target_, pages_, Soon())));
  EXPECT_EQ(Metric(*far_, "transfers_active"), 0);
  EXPECT_TRUE(IsOk(Put(*far_, "value", Bytes(1000))));
  EXPECT_EQ(Metric(*far_, "transfers_active"), 0);
}

// Else the server would keep it for as long as the call could have lasted.
TEST_F(RemoteSessions, WhatIsOfAnotherLengthIsDeclined) {
  ASSERT_TRUE(IsOk(Put(*writer_, "value", Bytes(1000))));
  std::atomic<int> num_fetches = 0, num_declined = 0;
  const auto connected = ConnectWhile([&](Heard& heard) {
    if (std::holds_alternative<FetchMsg>(heard.message.body)) ++num_fetches;
    if (std::holds_alternative<DoneMsg>(heard.message.body)) ++num_declined;
    return Verdict::kPass;
  });
  Bytes into(10);
  const std::span<std::byte> out = into;
  EXPECT_TRUE(Fails(far_->Get("value", {&out, 1}, Soon()), Code::kFailedPrecondition, "1000 bytes",
                    "for it 10"));
  EXPECT_TRUE(WaitFor([&] { return num_declined == 1; }, Soon()));
  const auto modest = Dial(relay_->address(), target_, /*max_value_bytes=*/100);
  EXPECT_TRUE(Fails(modest->GetBytes("value", Soon()), Code::kFailedPrecondition, "1000 bytes",
                    "1 to 100"));
  EXPECT_TRUE(WaitFor([&] { return num_declined == 2; }, Soon()));
  EXPECT_EQ(num_fetches, 0);
  const int64_t calls = Metric(*modest, "calls_started");
  EXPECT_TRUE(Fails(Put(*modest, "value", Bytes(101)), Code::kInvalidArgument, "1 to 100"));
  EXPECT_EQ(Metric(*modest, "calls_started"), calls);
}

// ---------------------------------------------------------------- what a server says

TEST_F(RemoteSessions, AnswersAboutOtherNumbersOfKeysAreNone) {
  Fields answer;
  const auto connected = ConnectWhile(AllAnswered(answer));
  answer.Set("count", 3);
  EXPECT_TRUE(Fails(far_->Exists(Views(keys_), Soon()), Code::kInternal, "count"));
  for (const std::string there : {"\1", "\1\1\1"}) {
    answer.Set("there", there);
    EXPECT_TRUE(Fails(far_->ExistsEach(Views(keys_), Soon()), Code::kInternal, "server's reply"));
  }
  for (const size_t count : {1, 3}) {
    answer.Set("codes", std::string(count, '\0'));
    for (const auto& status : far_->GetPages(Views(keys_), *target_, pages_, Soon())) {
      EXPECT_TRUE(Fails(status, Code::kInternal, "of 2 keys"));
    }
  }
  EXPECT_TRUE(IsUntouched(*target_, 2));
}

// Which is nothing that the caller has done.
TEST_F(RemoteSessions, AnswersThatLackSomethingAreTheServersFault) {
  Fields answer;
  const auto connected = ConnectWhile(AllAnswered(answer));
  const auto lacks = [](const auto& result, absl::string_view field) {
    return Fails(result, Code::kInternal, "the server's reply", field);
  };
  EXPECT_TRUE(lacks(far_->Exists(Views(keys_), Soon()), "'count' is missing"));
  EXPECT_TRUE(lacks(far_->ExistsEach(Views(keys_), Soon()), "'there' is missing"));
  EXPECT_TRUE(lacks(far_->GetBytes("key", Soon()), "'lease' is missing"));
  answer.Set("lease", 1);
  EXPECT_TRUE(lacks(far_->GetBytes("key", Soon()), "'epoch' is missing"));
  answer.Set("epoch", 1);
  EXPECT_TRUE(lacks(far_->GetBytes("key", Soon()), "'bytes' is missing"));
  const auto pages_lack = [&](absl::string_view field) {
    for (const auto& status : far_->GetPages(Views(keys_), *target_, pages_, Soon())) {
      EXPECT_TRUE(lacks(status, field));
    }
    for (const auto& status : far_->PutPages(Views(keys_), *target_, pages_, Soon())) {
      EXPECT_EQ(lacks(status, field), !answer.Has("codes"));
    }
  };
  pages_lack("'codes' is missing");
  answer = Fields().Set("codes", std::string(2, '\0'));
  pages_lack("'lease' is missing");
  answer.Set("lease", 1);
  pages_lack("'epoch' is missing");
  EXPECT_TRUE(IsUntouched(*target_, 2));
}

// It has heard the call: only a session that ends is reason to make it anew.
TEST_F(RemoteSessions, WhatTheServerCannotDoIsAskedOnce) {
  std::atomic<int> num_calls = 0;
  const auto connected = ConnectWhile([&](Heard& heard) {
    const auto* call = std::get_if<CallMsg>(&heard.message.body);
    if (call == nullptr) return Verdict::kPass;
    ++num_calls;
    heard.answer = ReplyMsg{call->call_id, absl::UnavailableError("the tier below is down"), {}};
    return Verdict::kAnswer;
  });
  EXPECT_TRUE(Fails(far_->GetBytes("key", Soon()), Code::kUnavailable, "tier below is down"));
  EXPECT_TRUE(Fails(far_->Erase("key", Soon()), Code::kUnavailable, "tier below is down"));
  EXPECT_EQ(num_calls, 2);
  EXPECT_EQ(far_->stats().errors, 1);  // It cannot even ask.
}

// As often as it is made anew.
TEST_F(RemoteSessions, AnErasureThatIsCutOffEachTimeMayHaveBeenCarriedOut) {
  PutAll();
  std::atomic<int> num_replies = 0;
  const auto connected = ConnectWhile([&](Heard& heard) {
    if (!IsReply(heard)) return Verdict::kPass;
    ++num_replies;
    return Verdict::kBreakUnnoticed;
  });
  EXPECT_TRUE(Fails(far_->Erase(keys_[0], Soon()), Code::kUnavailable, "store.erase",
                    "may have been carried out"));
  EXPECT_EQ(num_replies, 3);
  EXPECT_EQ(Must(host_->Exists(Views(keys_), Soon())), 0);
}

TEST_F(RemoteSessions, APinIsNotCountedTwice) {
  PutAll();
  Connect(Once(Verdict::kBreakUnnoticed, IsReply));
  EXPECT_TRUE(Fails(far_->Pin(keys_[0], Soon()), Code::kUnavailable, "store.pin",
                    "may have been carried out"));
  EXPECT_EQ(host_->stats().pinned, 1);
  EXPECT_TRUE(IsOk(far_->Unpin(keys_[0], Soon())));
  EXPECT_EQ(host_->stats().pinned, 0);
}

TEST_F(RemoteSessions, APinThatTheServerHasNotHeardOfIsMadeAnew) {
  PutAll();
  Connect(Once(Verdict::kDrop, IsHello), /*connect_timeout_ms=*/500);
  EXPECT_TRUE(IsOk(far_->Pin(keys_[0], Soon())));
  EXPECT_EQ(host_->stats().pinned, 1);
}

// ---------------------------------------------------------------- what comes late

// What a client has sent over a session that ended, or has given up, and has never heard of, may be
// on its way still.
TEST_F(RemoteSessions, WhatComesLateChangesNothing) {
  PutAll();
  const auto node = StartNode(source_);
  const Bytes value(1000);
  for (const bool given_up : {false, true}) {
    for (const std::string function : {store_call::kErase, store_call::kPut, store_call::kPutPages,
                                       store_call::kPin, store_call::kUnpin}) {
      SCOPED_TRACE(testing::Message() << function << given_up);
      // Of the relay, which goes with the next one: after this.
      struct Sent {
        std::optional<Fields> args;
        Latch seen;  // They are there.
      };
      const auto sent = std::make_shared<Sent>();
      Connect([sent, function, given_up](Heard& heard) {
        if (sent->args || heard.function() != function) return Verdict::kPass;
        sent->args = std::get<CallMsg>(heard.message.body).args;
        sent->seen.Open();
        return given_up ? Verdict::kDrop : Verdict::kBreakUnnoticed;
      });
      // One that is given up before it is sent does not count.
      int64_t timeout_ms = given_up ? 100 : 10000;
      do {
        const Deadline deadline = DeadlineInMs(timeout_ms *= 2);
        absl::Status status;
        if (function == store_call::kErase) status = far_->Erase(keys_[0], deadline);
        if (function == store_call::kPut) status = Put(*far_, keys_[0], value, deadline);
        if (function == store_call::kPin) status = far_->Pin(keys_[0], deadline);
        if (function == store_call::kUnpin) status = far_->Unpin(keys_[0], deadline);
        if (function == store_call::kPutPages) {
          status = far_->PutPages(Views(keys_), *target_, pages_, deadline)[0];
        }
        EXPECT_EQ(absl::IsDeadlineExceeded(status), given_up) << status;
      } while (!sent->seen.Wait(Clock::now()) && timeout_ms < 20000);
      ASSERT_TRUE(sent->seen.Wait(Clock::now()));
      ASSERT_TRUE(IsOk(Put(*far_, keys_[0], value)));
      EXPECT_TRUE(Fails(BeginCall(*node, server_->address(), function, *sent->args).get(),
                        Code::kAborted, "given this call up"));
      EXPECT_EQ(Must(writer_->GetBytes(keys_[0], Soon())), value);
      EXPECT_EQ(host_->stats().pinned, 0);
    }
  }
}

// Lends nothing until it may.
class GatedLeases : public LeaseTable {
 public:
  using LeaseTable::LeaseTable;
  Latch asked, go_on;
  absl::StatusOr<LeasedMemory> BeginTransfer(uint64_t lease_id, LeaseReader reader) override {
    asked.Open();
    go_on.Wait(Soon());
    return LeaseTable::BeginTransfer(lease_id, reader);
  }
};

// The server has taken it up, and its bytes come late.
TEST_F(RemotePages, WhatIsFetchedLateIsNotPut) {
  for (const bool as_pages : {false, true}) {
    SCOPED_TRACE(as_pages);
    GatedLeases leases{SmallChunks()};
    const auto late = StartNode(source_, &leases), node = StartNode(target_);
    const std::vector<int64_t> page = {3};
    auto tail = std::make_shared<std::vector<std::byte>>(100);
    ASSERT_TRUE(IsOk(leases.Publish(1, as_pages ? Must(PageRuns::FromPages(page)) : PageRuns(),
                                    SmallLayout().num_layers, Soon(), as_pages ? nullptr : tail)));
    Fields args = KeyArgs("key");
    args.Set("client", as_pages + 1).Set("lease", 1).Set("bytes", 100);
    auto put =
        BeginCall(*late, server_->address(), as_pages ? store_call::kPutPages : store_call::kPut,
                  Fields(args).Set("era", 1));
    ASSERT_TRUE(leases.asked.Wait(Soon()));
    EXPECT_TRUE(
        IsOk(BeginCall(*node, server_->address(), store_call::kErase, Fields(args).Set("era", 2))
                 .get()));
    leases.go_on.Open();
    EXPECT_TRUE(Fails(put.get(), absl::StatusCode::kAborted));
    EXPECT_EQ(Must(writer_->Exists(Views({"key"}), Soon())), 0);
  }
}

// Values on their way have so much memory together, and what was refused none of it.
TEST(RemoteValues, WhatIsRefusedBesideOthersTakesNoRoom) {
  constexpr int64_t kBytes = 200 << 20;
  const std::shared_ptr<KvPool> pool = Must(KvPool::Create(Flat(1 << 20), 1));
  const auto server = Serve(Must(HostStore::Create({Flat(1 << 20), 300 << 20, 0})));
  GatedLeases leases{SmallChunks()};
  const auto late = StartNode(pool, &leases), node = StartNode(pool);
  const auto put = [&](Node& from) {
    Fields args = KeyArgs("key");
    args.Set("lease", 1).Set("bytes", static_cast<uint64_t>(kBytes));
    return BeginCall(from, server->address(), store_call::kPut, args);
  };
  auto first = put(*late);
  ASSERT_TRUE(leases.asked.Wait(Soon()));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Fails(put(*node).get(), Code::kResourceExhausted, "beside others on their way"));
  }
  leases.go_on.Open();
  EXPECT_FALSE(first.get().ok());  // It has no such lease, and neither has the other.
  EXPECT_TRUE(
      WaitFor([&] { return !absl::IsResourceExhausted(put(*node).get().status()); }, Soon()));
}

// Or who sends much, and slowly, would have it all.
TEST(RemoteValues, OfOneClientLeaveRoomForThoseOfOthers) {
  constexpr int64_t kBytes = 60 << 20;
  const std::shared_ptr<KvPool> pool = Must(KvPool::Create(Flat(1 << 20), 1));
  const auto server = Serve(Must(HostStore::Create({Flat(1 << 20), 300 << 20, 0})));
  Config config = SmallChunks();
  config.publish_grace_ms = 60000;  // The server waits for so long for leases that never come.
  LeaseTable leases{config};
  const auto slow = StartNode(pool, &leases, config), node = StartNode(pool);
  const auto put = [&](Node& from) {
    Fields args = KeyArgs("key");
    args.Set("lease", 1).Set("bytes", static_cast<uint64_t>(kBytes));
    return BeginCall(from, server->address(), store_call::kPut, args);
  };
  std::vector<std::future<absl::StatusOr<Fields>>> under_way;
  for (int i = 0; i < 3; ++i) under_way.push_back(put(*slow));
  // There is room for a fourth one.
  EXPECT_TRUE(Fails(put(*slow).get(), Code::kResourceExhausted,
                    absl::StrCat("this client has ", 3 * kBytes, " bytes of values")));
  EXPECT_TRUE(Fails(put(*node).get(), Code::kUnavailable, "publishes nothing"));
}

// Whose caller has not come for it by the call's deadline has given up: others need the memory.
TEST_F(RemotePages, WhatNobodyComesForIsNotHeldBeyondTheCallsDeadline) {
  const auto host = MakeHost(1);
  const auto server = Serve(host);
  const auto node = StartNode(target_);
  ASSERT_TRUE(AllOk(host->PutPages(Views({"key"}), *source_, std::vector<int64_t>{1}, Soon())));
  const absl::StatusOr<Fields> got =
      BeginCall(*node, server->address(), store_call::kGetPages, KeyArgs("key"), DeadlineInMs(1000))
          .get();
  ASSERT_TRUE(IsOk(got));
  EXPECT_TRUE(WaitFor([&] { return host->Reserve(1).ok(); }, DeadlineInMs(6000)));
}

// Of a client that does not say which it is, nothing is known.
TEST_F(RemotePages, AnEraWithoutAClientSaysNothing) {
  const auto node = StartNode(target_);
  const auto erase = [&](const Fields& args) {
    return BeginCall(*node, server_->address(), store_call::kErase, args).get();
  };
  EXPECT_TRUE(IsOk(erase(KeyArgs("a").Set("era", 7))));
  EXPECT_TRUE(IsOk(erase(KeyArgs("b"))));
}

// It could overtake the one before, which would come after it though it had been answered.
TEST_F(RemoteSessions, AChangeWaitsForThatOfTheSameKeyBefore) {
  std::atomic<bool> drops = true;
  std::atomic<uint64_t> era = 0;
  Latch asked;
  const auto connected = ConnectWhile([&](Heard& heard) {
    if (heard.function() != store_call::kErase) return Verdict::kPass;
    era = Must(std::get<CallMsg>(heard.message.body).args.Uint("era"));
    const Verdict verdict = drops ? Verdict::kDrop : Verdict::kPass;  // Before it is another one's.
    asked.Open();
    return verdict;
  });
  auto before =
      std::async(std::launch::async, [&] { return far_->Erase("a", DeadlineInMs(2000)); });
  ASSERT_TRUE(asked.Wait(Soon()));
  drops = false;
  EXPECT_TRUE(IsOk(far_->Erase("b", Soon())));  // Another key's does not.
  EXPECT_TRUE(Fails(far_->Erase("a", DeadlineInMs(50)), Code::kDeadlineExceeded, "same key"));
  EXPECT_EQ(era, 0);
  EXPECT_TRUE(IsOk(far_->Erase("a", Soon())));
  EXPECT_EQ(era, 1);  // Which the one before cannot come after.
  EXPECT_TRUE(Fails(before.get(), Code::kDeadlineExceeded));
}

// Changes of other keys end nothing, however many of them time out meanwhile.
TEST_F(RemoteSessions, WhatTimesOutEndsNoChangeOfAnotherKey) {
  std::atomic<bool> drops = true;
  std::atomic<uint64_t> era = 0;
  const auto connected = ConnectWhile([&](Heard& heard) {
    if (heard.function() != store_call::kErase) return Verdict::kPass;
    era = Must(std::get<CallMsg>(heard.message.body).args.Uint("era"));
    return drops ? Verdict::kDrop : Verdict::kPass;
  });
  for (const std::string key : {"a", "b"}) {
    EXPECT_TRUE(Fails(far_->Erase(key, DeadlineInMs(100)), Code::kDeadlineExceeded));
  }
  EXPECT_EQ(era, 0);
  drops = false;
  EXPECT_TRUE(IsOk(far_->Erase("c", Soon())));
  EXPECT_EQ(era, 0);
  EXPECT_TRUE(IsOk(far_->Erase("b", Soon())));
  EXPECT_EQ(era, 1);  // That of "a" has ended, too.
  EXPECT_TRUE(IsOk(far_->Erase("a", Soon())));
  EXPECT_EQ(era, 1);
}

// The client's other calls were under way when it changed again what one of them may still change.
TEST_F(RemoteSessions, WhatIsRefusedForAnotherCallsSakeIsMadeAnew) {
  std::atomic<int> num_refused = 1;
  const auto connected = ConnectWhile([&](Heard& heard) {
    const auto* call = std::get_if<CallMsg>(&heard.message.body);
    if (call == nullptr || num_refused-- <= 0) return Verdict::kPass;
    heard.answer = ReplyMsg{call->call_id, absl::AbortedError("in a later era"), {}};
    return Verdict::kAnswer;
  });
  EXPECT_TRUE(IsOk(far_->Erase("key", Soon())));
  num_refused = 20;  // More often than sessions may end.
  EXPECT_TRUE(IsOk(far_->Erase("key", Soon())));
  num_refused = 1 << 30;
  EXPECT_FALSE(far_->Erase("key", DeadlineInMs(200)).ok());
}

}  // namespace
}  // namespace kvferry
