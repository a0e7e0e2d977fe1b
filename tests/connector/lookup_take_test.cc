// Between the last byte of an entry and its delivery: sessions that break at each word that is said
// then, cancels, closings, and answers that make no sense. Whatever happens, no entry is delivered
// to two consumers.

#include <gtest/gtest.h>

#include <atomic>
#include <optional>

#include "tests/support/control_relay.h"
#include "tests/support/lookup_buffers.h"
#include "transport/command_queue.h"

namespace kvferry {
namespace {

using Tokens = std::vector<int32_t>;
using Pages = std::vector<int64_t>;
using Code = absl::StatusCode;
using Heard = ControlRelay::Heard;
using Verdict = ControlRelay::Verdict;
constexpr uint64_t kTheirs = 11, kOurs = 22;
const Tokens kTokens = {1, 2, 3};

bool IsTake(const Heard& heard) { return heard.function() == kLookupTakeFunction; }
bool IsDone(const Heard& heard) { return std::holds_alternative<DoneMsg>(heard.message.body); }
// What a producer answers that has an entry for a lookup.
bool IsFound(const Heard& heard) {
  const auto* reply = std::get_if<ReplyMsg>(&heard.message.body);
  return reply != nullptr && reply->result.Has("epoch");
}
// The same, in its place.
Fields FoundReply(uint64_t epoch) {
  return Fields()
      .Set("epoch", epoch)
      .Set("tokens", PackTokens(kTokens))
      .Set("pages", 1)
      .Set("matched", kTokens.size())
      .Set("hidden", 0);
}
Verdict AnswerWith(Heard& heard, Fields fields) {
  heard.answer =
      ReplyMsg{std::get<CallMsg>(heard.message.body).call_id, absl::OkStatus(), std::move(fields)};
  return Verdict::kAnswer;
}
// The answer to a take.
bool IsTaken(const Heard& heard) {
  const auto* reply = std::get_if<ReplyMsg>(&heard.message.body);
  return reply != nullptr && reply->result.Has("taken");
}

// `far_` hears the producer through a relay, `near_` does not.
class LookupTakes : public testing::Test {
 protected:
  static std::unique_ptr<LookupProducer> Producer(const std::shared_ptr<KvPool>& pool,
                                                  int64_t reply_lease_ms,
                                                  const std::string& address = ":0") {
    LookupProducer::Options options = ProducerOptions(pool);
    options.reply_lease_ms = reply_lease_ms;
    options.config.listen_port = PortOf(address);
    return Must(LookupProducer::Create(options));
  }
  std::unique_ptr<LookupConsumer> Consumer(const std::string& producer) const {
    return Must(LookupConsumer::Create(ConsumerOptions(pool_, {producer})));
  }
  void Connect(ControlRelay::Judge judge) {
    relay_.emplace(producer_->address(), std::move(judge));
    far_ = Consumer(relay_->address());
    near_ = Consumer(producer_->address());
  }
  // Of the entry that is inserted in page 3.
  void AskFar(ControlRelay::Judge judge, int64_t timeout_ms = 20000) {
    entry_ = Insert({3});
    Connect(std::move(judge));
    far_lookup_ = Must(far_->DropSelect(Lookup(kTokens, {7}, timeout_ms)));
    asked_.Open();
  }
  std::shared_ptr<LookupHandle> AskNear(int64_t timeout_ms = 20000) {
    return Must(near_->DropSelect(Lookup(kTokens, {8}, timeout_ms)));
  }
  // For a judge: the first time that it is called.
  bool AskNearOnce(int64_t timeout_ms) {
    if (near_lookup_ != nullptr) return false;
    near_lookup_ = AskNear(timeout_ms);
    near_asked_.Open();
    return true;
  }
  LookupHandle& near_lookup() {
    EXPECT_TRUE(near_asked_.Wait(Soon()));
    return *near_lookup_;
  }
  // For a judge, on whose thread it is that AskFar() may not be through yet.
  void CancelFar() {
    EXPECT_TRUE(asked_.Wait(Soon()));
    far_lookup_->Cancel();
  }
  absl::Status WaitFar() const { return far_lookup_->Wait(Soon()); }

  uint64_t Insert(const Pages& pages) const {
    return Must(producer_->Insert(kTokens, std::nullopt, pages, Soon()));
  }
  // That entry has left as this says, and none but it.
  void ExpectGone(bool fetched) {
    std::vector<GoneEntry> gone;
    EXPECT_TRUE(WaitFor([&] { return !(gone = producer_->TakeGone()).empty(); }, Soon()));
    EXPECT_EQ(gone, (std::vector<GoneEntry>{{entry_, fetched}}));
  }
  // It has been delivered to nobody, and somebody can have it.
  void ExpectInTheBuffer() {
    EXPECT_TRUE(producer_->TakeGone().empty());
    EXPECT_TRUE(IsOk(AskNear()->Wait(Soon())));
    ExpectGone(true);
  }

  const std::shared_ptr<KvPool> their_pool_ = MakePatternPool(SmallLayout(), 16, kTheirs);
  const std::shared_ptr<KvPool> pool_ = MakePatternPool(SmallLayout(), 16, kOurs);
  // Leases outlast a session and all waits of a test; tests of their expiry choose another.
  std::unique_ptr<LookupProducer> producer_ = Producer(their_pool_, 100000);
  uint64_t entry_ = 0;
  // Seen by the relay, where a test counts them.
  std::atomic<int> num_lookups_ = 0, num_backs_ = 0, num_fetches_ = 0, num_takes_ = 0,
                   num_answers_ = 0;
  Latch asked_, near_asked_, take_seen_, go_on_;
  std::shared_ptr<LookupHandle> far_lookup_, near_lookup_;
  // A judge uses what stands above. It may judge after a test's end: one that uses what is the
  // test's own is ended by it.
  std::optional<ControlRelay> relay_;
  std::unique_ptr<LookupConsumer> far_, near_;
};

// One of the two stood still between the answer and the fetch.
TEST_F(LookupTakes, AnEntryWhoseLeaseHasEndedIsLookedForAgain) {
  producer_ = Producer(their_pool_, 50);
  AskFar([this](Heard& heard) {
    if (std::holds_alternative<FetchMsg>(heard.message.body) && num_fetches_++ == 0) {
      EXPECT_TRUE(WaitFor([&] { return Metric(*producer_, "lookup_leased") == 0; }, Soon()));
    }
    return Verdict::kPass;
  });
  ASSERT_TRUE(IsOk(WaitFar()));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{7}, kTheirs, Pages{3}));
  ExpectGone(true);
  EXPECT_EQ(num_fetches_, 2);
}

// The word that breaks the session: `done`, and with it the question; the question; the answer.
enum class Word { kDone, kQuestion, kAnswer };

class LookupTakesBroken : public LookupTakes, public testing::WithParamInterface<Word> {
 protected:
  static bool IsTheWord(const Heard& heard) {
    switch (GetParam()) {
      case Word::kDone:
        return IsDone(heard);
      case Word::kQuestion:
        return IsTake(heard);
      case Word::kAnswer:
        return IsTaken(heard);
    }
    return false;
  }
};

// And nobody else gets it, who waits for it from then on.
TEST_P(LookupTakesBroken, WhoHasTheBytesComesBackForTheEntry) {
  AskFar([this](Heard& heard) {
    if (IsTaken(heard)) ++num_answers_;
    return IsTheWord(heard) && AskNearOnce(500) ? Verdict::kBreak : Verdict::kPass;
  });
  ASSERT_TRUE(IsOk(WaitFar()));
  EXPECT_EQ(far_lookup_->result().tokens, kTokens);
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{7}, kTheirs, Pages{3}));
  ExpectGone(true);
  EXPECT_EQ(num_answers_, GetParam() == Word::kAnswer ? 2 : 1);
  EXPECT_EQ(Metric(*far_, "peers_lost"), 1);
  EXPECT_TRUE(Fails(near_lookup().Wait(Soon()), Code::kDeadlineExceeded));
  EXPECT_EQ(producer_->num_entries() + producer_->bytes(), 0);
}

INSTANTIATE_TEST_SUITE_P(At, LookupTakesBroken,
                         testing::Values(Word::kDone, Word::kQuestion, Word::kAnswer));

// The producer has not noticed that the first session is gone, and takes the transfer for going on.
TEST_F(LookupTakes, WhoHasTheBytesComesBackBeforeTheProducerKnows) {
  LookupProducer::Options options = ProducerOptions(their_pool_);
  options.config.heartbeat_interval_ms = 100;
  options.config.heartbeat_timeout_ms = 3000;
  producer_ = Must(LookupProducer::Create(options));
  AskFar([this](Heard& heard) {
    return IsDone(heard) && AskNearOnce(5000) ? Verdict::kBreakUnnoticed : Verdict::kPass;
  });
  ASSERT_TRUE(IsOk(WaitFar()));
  EXPECT_TRUE(producer_->TakeGone().empty());  // Its pages may still be read.
  ExpectGone(true);
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{7}, kTheirs, Pages{3}));
  EXPECT_TRUE(Fails(near_lookup().Wait(Soon()), Code::kDeadlineExceeded));
}

// What a lease has left when its transfer ends may be nothing: the time to come back begins then.
TEST_F(LookupTakes, ALeaseLastsFromTheEndOfItsTransfer) {
  constexpr int64_t kLeaseMs = 2000;  // To connect in once more.
  producer_ = Producer(their_pool_, kLeaseMs);
  AskFar([this](Heard& heard) {
    if (!IsDone(heard) || !AskNearOnce(kLeaseMs + 500)) return Verdict::kPass;
    const Deadline over = DeadlineInMs(kLeaseMs);
    WaitFor([&] { return Clock::now() >= over; }, over);
    return Verdict::kBreak;
  });
  EXPECT_TRUE(IsOk(WaitFar()));
  EXPECT_TRUE(Fails(near_lookup().Wait(Soon()), Code::kDeadlineExceeded));
  ExpectGone(true);
}

// Its entry has gone to another by then: what came does not count, and it waits for the next.
TEST_F(LookupTakes, WhoComesBackTooLateLooksOn) {
  producer_ = Producer(their_pool_, 200);
  AskFar([this](Heard& heard) {
    if (IsDone(heard) && AskNearOnce(20000)) return Verdict::kBreak;
    if (IsTake(heard)) {
      EXPECT_TRUE(IsOk(near_lookup().Wait(Soon())));
    }
    return Verdict::kPass;
  });
  EXPECT_TRUE(IsOk(near_lookup().Wait(Soon())));
  ExpectGone(true);
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 1; }, Soon()));
  EXPECT_FALSE(far_lookup_->done());
  EXPECT_TRUE(HoldsPages(*pool_, Pages{8}, kTheirs, Pages{3}, 0, 4));
  entry_ = Insert({5});
  ASSERT_TRUE(IsOk(WaitFar()));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{7, 8}, kTheirs, Pages{5, 3}));
  ExpectGone(true);
}

TEST_F(LookupTakes, AndItsDeadlineIsTheSame) {
  producer_ = Producer(their_pool_, 200);
  AskFar(
      [this](Heard& heard) {
        if (IsTake(heard) && AskNearOnce(20000)) {
          EXPECT_TRUE(IsOk(near_lookup().Wait(Soon())));
        }
        return Verdict::kPass;
      },
      /*timeout_ms=*/2000);
  EXPECT_TRUE(Fails(WaitFar(), Code::kDeadlineExceeded, "no matching entry came in time"));
  ASSERT_TRUE(near_asked_.Wait(Soon()));
  EXPECT_TRUE(IsOk(near_lookup_->status()));
}

TEST_F(LookupTakes, PagesAreChosenForEachEntryThatIsFound) {
  producer_ = Producer(their_pool_, 200);
  Must(producer_->Insert(kTokens, std::nullopt, Pages{3}, Soon(), std::vector<std::byte>(9)));
  Connect([this](Heard& heard) {
    if (IsTake(heard) && AskNearOnce(20000)) {
      EXPECT_TRUE(IsOk(near_lookup().Wait(Soon())));
      EXPECT_TRUE(IsOk(producer_->Insert(Tokens(20, 4), std::nullopt, Pages{5, 6}, Soon())));
    }
    return Verdict::kPass;
  });
  Pages allocated;
  LookupConsumer::Request request = Lookup(std::nullopt, {});
  request.allocate = [&](int64_t count) {
    allocated.push_back(count);
    return count == 1 ? Pages{0} : Pages{1, 2};
  };
  const auto far = Must(far_->DropSelect(request));
  ASSERT_TRUE(IsOk(far->Wait(Soon())));
  EXPECT_EQ(allocated, (Pages{1, 2}));
  EXPECT_EQ(far->result().pages, (Pages{1, 2}));
  EXPECT_EQ(far->result().tokens, Tokens(20, 4));
  EXPECT_EQ(far->result().hidden, nullptr);  // The first one's.
  EXPECT_TRUE(HoldsPages(*pool_, Pages{1, 2}, kTheirs, Pages{5, 6}, 0, 4));
}

// As many lookups wait as may; the one that has its entry gets through nevertheless.
TEST_F(LookupTakes, LookupsThatWaitDoNotKeepOthersFromTaking) {
  LookupProducer::Options options = ProducerOptions(their_pool_);
  options.config.max_calls_per_peer = 1;
  options.reply_lease_ms = 20000;
  producer_ = Must(LookupProducer::Create(options));
  near_ = Consumer(producer_->address());
  entry_ = Insert({3});
  LookupConsumer::Request request = Lookup(kTokens, {}, 5000);
  request.allocate = [this](int64_t) -> absl::StatusOr<Pages> {
    near_lookup_ = Must(near_->DropSelect(Lookup(Tokens{9}, {9})));
    return Pages{8};
  };
  EXPECT_TRUE(IsOk(Must(near_->DropSelect(request))->Wait(Soon())));
  EXPECT_FALSE(near_lookup_->done());
  EXPECT_EQ(producer_->num_waiting(), 1);
  ExpectGone(true);
}

// As many lookups wait at a producer as may, each for an entry that does not come.
class CrowdedLookups : public LookupTakes {
 protected:
  static constexpr int64_t kPlaces = 3;

  void SetUp() override {
    LookupProducer::Options options = ProducerOptions(their_pool_);
    options.config.max_calls_per_peer = kPlaces;
    producer_ = Must(LookupProducer::Create(options));
    Connect([this](Heard& heard) {
      if (heard.function() == kLookupFunction) ++num_lookups_;
      if (heard.function() == kLookupBackFunction) ++num_backs_;
      return Verdict::kPass;
    });
    for (int32_t i = 0; i < kPlaces; ++i) waiting_.push_back(Ask(Tokens{900 + i}));
    EXPECT_TRUE(WaitFor([&] { return producer_->num_waiting() == kPlaces; }, Soon()));
  }
  std::shared_ptr<LookupHandle> Ask(Tokens tokens, int64_t timeout_ms = 20000) const {
    return Must(far_->DropSelect(Lookup(std::move(tokens), {7}, timeout_ms)));
  }

  std::vector<std::shared_ptr<LookupHandle>> waiting_;
};

TEST_F(CrowdedLookups, FindWhatIsThere) {
  entry_ = Insert({3});
  EXPECT_TRUE(IsOk(Ask(kTokens)->Wait(Soon())));
  ExpectGone(true);
  EXPECT_EQ(producer_->num_waiting(), kPlaces);
  EXPECT_EQ(num_lookups_, kPlaces + 1);
}

// Whoever inserts waits for them, and they for whoever waits already: nobody would get on.
TEST_F(CrowdedLookups, EmptyAFullBuffer) {
  for (int32_t i = 0; i < 16; ++i) {
    Must(producer_->Insert(Tokens{i}, std::nullopt, Pages{i}, Soon()));
  }
  EXPECT_FALSE(producer_->Insert(Tokens{16}, std::nullopt, Pages{0}, Clock::now()).ok());
  std::vector<std::shared_ptr<LookupHandle>> lookups;
  for (int32_t i = 0; i < 16; ++i) {
    lookups.push_back(Must(far_->DropSelect(Lookup(Tokens{i}, {i}))));
  }
  for (const auto& lookup : lookups) EXPECT_TRUE(IsOk(lookup->Wait(Soon())));
}

TEST_F(CrowdedLookups, HearOfWhatComesLater) {
  const auto lookup = Ask(kTokens);
  ASSERT_TRUE(WaitFor([&] { return num_lookups_ >= kPlaces + 3; }, Soon()));
  entry_ = Insert({3});
  EXPECT_TRUE(IsOk(lookup->Wait(DeadlineInMs(10000))));
  ExpectGone(true);
  EXPECT_EQ(num_backs_, 0);  // Of what it was refused nothing was leased.
}

TEST_F(CrowdedLookups, SayWhyNothingCame) {
  EXPECT_TRUE(Fails(Ask(kTokens, 2000)->Wait(Soon()), Code::kDeadlineExceeded, "no matching entry",
                    relay_->address(), "max_calls_per_peer (3)"));
}

// Long ones seldom, as there are many: else they would be most of what the producer hears. But the
// first of them is there as soon as it can wait.
TEST_F(CrowdedLookups, AskAgainInTurn) {
  constexpr int32_t kMore = 200;
  std::vector<std::shared_ptr<LookupHandle>> more;
  for (int32_t i = 0; i < kMore; ++i) more.push_back(Ask(Tokens(100000, i)));  // 10 s of questions.
  ASSERT_TRUE(WaitFor([&] { return num_lookups_ >= kPlaces + kMore; }, Soon()));
  int before = num_lookups_;
  // The first ones do not know of the others yet.
  EXPECT_FALSE(WaitFor([&] { return num_lookups_ >= before + 2 * kMore; }, DeadlineInMs(1000)));
  before = num_lookups_;
  for (const auto& lookup : waiting_) lookup->Cancel();
  EXPECT_TRUE(WaitFor([&] { return producer_->num_waiting() == kPlaces; }, DeadlineInMs(5000)));
  EXPECT_LE(num_lookups_, before + kMore);
}

TEST_F(LookupTakes, WithoutAnAnswerNothingIsDelivered) {
  AskFar([](Heard& heard) { return IsTake(heard) ? Verdict::kDrop : Verdict::kPass; },
         /*timeout_ms=*/2000);
  EXPECT_TRUE(Fails(WaitFar(), Code::kDeadlineExceeded, "every byte came", relay_->address(),
                    "has not said"));
  ExpectInTheBuffer();
}

// The entry is lost then: the producer has given it away.
TEST_F(LookupTakes, AnAnswerThatIsNeverHeardDeliversNothing) {
  AskFar([](Heard& heard) { return IsTaken(heard) ? Verdict::kBreak : Verdict::kPass; },
         /*timeout_ms=*/2000);
  EXPECT_TRUE(Fails(WaitFar(), Code::kDeadlineExceeded, "every byte came"));
  ExpectGone(true);
  EXPECT_TRUE(Fails(AskNear(50)->Wait(Soon()), Code::kDeadlineExceeded));
}

// Its entry is with another process than there is a session with, as after a restart, and there is
// no room for one more: it waits for its turn, but not for ever.
TEST_F(LookupTakes, AFetchThatHasNoTurnEndsWithItsLookup) {
  relay_.emplace(producer_->address(), [](Heard& heard) {
    if (heard.function() != kLookupFunction) return Verdict::kPass;
    return AnswerWith(heard, FoundReply(heard.message.to_epoch + 1));
  });
  LookupConsumer::Options options = ConsumerOptions(pool_, {relay_->address()});
  options.config.max_peers = 1;
  far_ = Must(LookupConsumer::Create(options));
  const auto late = Must(far_->DropSelect(Lookup(kTokens, {7}, 2000)));
  EXPECT_TRUE(Fails(late->Wait(Soon()), Code::kDeadlineExceeded, "max_peers (1)"));
  const int64_t failed = Metric(*far_, "fetches_failed");
  const auto cancelled = Must(far_->DropSelect(Lookup(kTokens, {7})));
  ASSERT_TRUE(WaitFor([&] { return Metric(*far_, "fetches_failed") > failed; }, Soon()));
  cancelled->Cancel();
  EXPECT_TRUE(Fails(cancelled->Wait(DeadlineInMs(10000)), Code::kCancelled));
}

// It was there before its producer began anew, which has others.
TEST_F(LookupTakes, AnEntryOfAProducerThatIsNoMoreIsLookedForAgain) {
  AskFar([this](Heard& heard) {
    if (heard.function() != kLookupFunction || num_lookups_++ > 0) return Verdict::kPass;
    return AnswerWith(heard, FoundReply(heard.message.to_epoch + 1));
  });
  ASSERT_TRUE(IsOk(WaitFar()));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{7}, kTheirs, Pages{3}));
  ExpectGone(true);
  EXPECT_EQ(num_lookups_, 2);
}

// Of another request it would be decoded as if it were this one's.
TEST_F(LookupTakes, WhatAProducerSaysThatItHasFoundIsChecked) {
  struct Row {
    Fields reply;
    Code code;
    std::string words;
  };
  const auto found = [] { return FoundReply(1); };
  const std::vector<Row> rows = {
      {found().Set("tokens", PackTokens(Tokens{1, 2, 4})), Code::kDataLoss, "but they do not"},
      {found().Set("matched", 2), Code::kDataLoss, "2 are said to match"},
      {found().Set("pages", 2), Code::kDataLoss, "3 tokens in 2 pages"},
      {found().Set("pages", 0), Code::kDataLoss, "3 tokens in 0 pages"},
      {found().Set("hidden", kMaxLookupHiddenBytes + 1), Code::kDataLoss, "hidden"},
      {found().Set("tokens", ""), Code::kDataLoss, "0 tokens"},
      {found().Set("tokens", 7), Code::kDataLoss, "'tokens' is no byte string"},
      {Fields(), Code::kDataLoss, "'epoch' is missing"}};
  std::atomic<size_t> row = 0;
  Connect([&](Heard& heard) {
    if (heard.function() == kLookupBackFunction) ++num_backs_;
    if (heard.function() != kLookupFunction) return Verdict::kPass;
    return AnswerWith(heard, rows[row].reply);
  });
  for (; row < rows.size(); ++row) {
    const auto lookup = Must(far_->DropSelect(Lookup(kTokens, {7})));
    EXPECT_TRUE(Fails(lookup->Wait(Soon()), rows[row].code, rows[row].words));
  }
  // What was leased to them all the same is given back.
  EXPECT_TRUE(WaitFor([&] { return num_backs_ == std::ssize(rows); }, Soon()));
  EXPECT_TRUE(IsUntouched(*pool_, kOurs));
  relay_.reset();
}

TEST_F(LookupTakes, WhatIsFoundTooLateGoesBackAtOnce) {
  AskFar([](Heard& heard) { return IsFound(heard) ? Verdict::kDrop : Verdict::kPass; },
         /*timeout_ms=*/300);
  EXPECT_TRUE(Fails(WaitFar(), Code::kDeadlineExceeded, "no matching entry came in time"));
  ExpectInTheBuffer();
}

TEST_F(LookupTakes, WhatThereAreNoPagesForGoesBackAtOnce) {
  near_ = Consumer(producer_->address());
  entry_ = Insert({3});
  LookupConsumer::Request request = Lookup(kTokens, {});
  request.allocate = [](int64_t) { return absl::ResourceExhaustedError("no pages"); };
  EXPECT_TRUE(
      Fails(Must(near_->DropSelect(request))->Wait(Soon()), Code::kResourceExhausted, "no pages"));
  ExpectInTheBuffer();
}

// Another producer was faster, and this one's answer was on its way.
TEST_F(LookupTakes, WhatASecondProducerFoundGoesBackAtOnce) {
  const auto first = Producer(their_pool_, 100000);
  relay_.emplace(producer_->address(), [&](Heard& heard) {
    if (IsFound(heard)) {
      EXPECT_TRUE(asked_.Wait(Soon()));
      EXPECT_TRUE(IsOk(first->Insert(kTokens, std::nullopt, Pages{5}, Soon())));
      EXPECT_TRUE(IsOk(WaitFar()));
    }
    return Verdict::kPass;
  });
  far_ =
      Must(LookupConsumer::Create(ConsumerOptions(pool_, {first->address(), relay_->address()})));
  near_ = Consumer(producer_->address());
  entry_ = Insert({3});
  far_lookup_ = Must(far_->DropSelect(Lookup(kTokens, {7})));
  asked_.Open();
  EXPECT_TRUE(IsOk(WaitFar()));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{7}, kTheirs, Pages{5}));
  ExpectInTheBuffer();
  relay_.reset();
}

// ---------------------------------------------------------------- cancels and closings

// Its entry is found, and nothing of it has come.
TEST_F(LookupTakes, ACancelBeforeTheFetchBegins) {
  near_ = Consumer(producer_->address());
  LookupConsumer::Request request = Lookup(kTokens, {});
  request.allocate = [this](int64_t) {
    near_lookup_->Cancel();
    return Pages{7};
  };
  near_lookup_ = Must(near_->DropSelect(request));
  entry_ = Insert({3});
  EXPECT_TRUE(Fails(near_lookup_->Wait(Soon()), Code::kCancelled));
  ExpectInTheBuffer();
}

TEST_F(LookupTakes, ACancelEndsTheFetch) {
  AskFar([this](Heard& heard) {
    if (!std::holds_alternative<FetchMsg>(heard.message.body)) return Verdict::kPass;
    take_seen_.Open();
    return Verdict::kDrop;
  });
  ASSERT_TRUE(take_seen_.Wait(Soon()));
  far_lookup_->Cancel();
  EXPECT_TRUE(Fails(far_lookup_->Wait(DeadlineInMs(10000)), Code::kCancelled));
  ExpectInTheBuffer();
}

TEST_F(LookupTakes, WhoIsCancelledLeavesItsPlaceAtOnce) {
  near_ = Consumer(producer_->address());
  near_lookup_ = AskNear(100000);
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 1; }, Soon()));
  near_lookup_->Cancel();
  EXPECT_TRUE(WaitFor([&] { return producer_->num_waiting() == 0; }, Soon()));
}

// It had gone back, and to somebody else: whoever cancelled does not wait for the next one.
TEST_F(LookupTakes, ACancelAndAnotherHasIt) {
  producer_ = Producer(their_pool_, 200);
  AskFar([this](Heard& heard) {
    if (!IsTake(heard)) return Verdict::kPass;
    CancelFar();
    if (AskNearOnce(20000)) {
      EXPECT_TRUE(IsOk(near_lookup().Wait(Soon())));
    }
    return Verdict::kPass;
  });
  EXPECT_TRUE(Fails(far_lookup_->Wait(DeadlineInMs(10000)), Code::kCancelled));
  ExpectGone(true);
}

TEST_F(LookupTakes, ACancelWaitsForTheAnswer) {
  AskFar([this](Heard& heard) {
    if (IsTake(heard)) CancelFar();
    return Verdict::kPass;
  });
  EXPECT_TRUE(IsOk(WaitFar()));
  ExpectGone(true);
}

TEST_F(LookupTakes, ACancelAndNoAnswer) {
  AskFar([this](Heard& heard) {
    if (!IsTake(heard)) return Verdict::kPass;
    CancelFar();
    return Verdict::kBreak;
  });
  EXPECT_TRUE(Fails(WaitFar(), Code::kCancelled));
  ExpectInTheBuffer();  // It was given back: its lease is longer than this waits.
}

TEST_F(LookupTakes, ACancelAndItHadGoneBack) {
  producer_ = Producer(their_pool_, 200);
  AskFar([this](Heard& heard) {
    if (!IsTake(heard)) return Verdict::kPass;
    CancelFar();
    EXPECT_TRUE(WaitFor([this] { return producer_->num_entries() == 1; }, Soon()));
    return Verdict::kPass;
  });
  EXPECT_TRUE(Fails(WaitFar(), Code::kCancelled));
  ExpectInTheBuffer();
}

TEST_F(LookupTakes, ACancelBeforeItIsAskedAgain) {
  AskFar([this](Heard& heard) {
    if (!IsTake(heard)) return Verdict::kPass;
    ++num_takes_;
    heard.answer = ReplyMsg{
        std::get<CallMsg>(heard.message.body).call_id, absl::ResourceExhaustedError("not now"), {}};
    return Verdict::kAnswer;
  });
  // From now on 80 ms and more lie between two questions.
  ASSERT_TRUE(WaitFor([&] { return num_takes_ >= 4; }, Soon()));
  EXPECT_FALSE(far_lookup_->done());
  far_lookup_->Cancel();
  EXPECT_TRUE(Fails(WaitFar(), Code::kCancelled));
  ExpectInTheBuffer();
}

TEST_F(LookupTakes, AConsumerThatIsDestroyedWhileItAsks) {
  producer_ = Producer(their_pool_, 200);
  AskFar([this](Heard& heard) {
    if (!IsTake(heard)) return Verdict::kPass;
    take_seen_.Open();
    return Verdict::kDrop;
  });
  ASSERT_TRUE(take_seen_.Wait(Soon()));
  far_.reset();
  EXPECT_TRUE(Fails(far_lookup_->status(), Code::kCancelled, "closed"));
  ExpectInTheBuffer();
}

// The one before may have given the entry to somebody else: what came from it does not count.
TEST_F(LookupTakes, AProducerThatRestartsHasNeverHadTheEntry) {
  const std::string address = producer_->address();
  AskFar([this](Heard& heard) {
    if (!IsTake(heard)) return Verdict::kPass;
    take_seen_.Open();
    EXPECT_TRUE(go_on_.Wait(Soon()));
    return Verdict::kPass;
  });
  ASSERT_TRUE(take_seen_.Wait(Soon()));
  producer_->Close();
  ExpectGone(false);
  producer_.reset();
  producer_ = Producer(their_pool_, 20000, address);
  go_on_.Open();
  ASSERT_TRUE(WaitFor([&] { return producer_->num_waiting() == 1; }, Soon()));
  EXPECT_FALSE(far_lookup_->done());
  entry_ = Insert({5});
  ASSERT_TRUE(IsOk(WaitFar()));
  EXPECT_TRUE(HoldsExactly(*pool_, kOurs, Pages{7}, kTheirs, Pages{5}));
  ExpectGone(true);
}

// The question comes when the producer has said goodbye: an answer would not be heard any more.
TEST_F(LookupTakes, AProducerThatClosesGivesNothingAway) {
  AskFar(
      [this](Heard& heard) {
        if (!IsTake(heard)) return Verdict::kPass;
        take_seen_.Open();
        return Verdict::kHold;
      },
      /*timeout_ms=*/2000);
  ASSERT_TRUE(take_seen_.Wait(Soon()));
  producer_->Close();
  EXPECT_TRUE(Fails(WaitFar(), Code::kDeadlineExceeded, "every byte came"));
  ExpectGone(false);
}

// Whoever waits for an entry to be gone and then ends has not cut its consumer off.
TEST_F(LookupTakes, AProducerThatClosesWhenItsEntryIsGoneHasDeliveredIt) {
  near_ = Consumer(producer_->address());
  for (int i = 0; i < 20; ++i) {
    SCOPED_TRACE(i);
    const auto near = AskNear();
    entry_ = Insert({3});
    ExpectGone(true);
    const std::string address = producer_->address();
    producer_.reset();
    EXPECT_TRUE(IsOk(near->Wait(DeadlineInMs(10000))));
    producer_ = Producer(their_pool_, 20000, address);
  }
}

// An older one, and one that talks nonsense.
TEST_F(LookupTakes, AProducerThatCannotSayEndsTheLookup) {
  AskFar([this](Heard& heard) {
    if (!IsTake(heard)) return Verdict::kPass;
    const uint64_t id = std::get<CallMsg>(heard.message.body).call_id;
    const ReplyMsg answers[] = {{id, absl::UnimplementedError("no such function"), {}},
                                {id, absl::OkStatus(), {}},
                                {id, absl::OkStatus(), Fields().Set("taken", 2)}};
    heard.answer = answers[num_takes_++];
    return Verdict::kAnswer;
  });
  EXPECT_TRUE(Fails(WaitFar(), Code::kUnimplemented, "every byte came", "no such function"));
  for (int i = 0; i < 2; ++i) {
    const auto again = Must(far_->DropSelect(Lookup(kTokens, {7})));
    EXPECT_TRUE(Fails(again->Wait(Soon()), Code::kDataLoss, "every byte came", "taken"));
  }
  ExpectInTheBuffer();
}

// ---------------------------------------------------------------- what the producer answers

class LookupTakeCalls : public LookupTakes {
 protected:
  absl::StatusOr<Fields> Ask(const std::string& function, Fields args) const {
    return BeginCall(*node_, producer_->address(), function, std::move(args)).get();
  }
  void Find(uint64_t lease) const {
    EXPECT_TRUE(IsOk(Ask("lookup", Fields().Set("lease", lease).Set("partition", 0))));
  }
  uint64_t Take(uint64_t lease) const {
    return Must(Must(Ask("lookup_take", Fields().Set("lease", lease))).Uint("taken"));
  }
  void Back(uint64_t lease) const {
    EXPECT_TRUE(IsOk(Ask("lookup_back", Fields().Set("lease", lease))));
  }

  const std::unique_ptr<Node> node_ = [this] {
    Node::Options options;
    options.config = SmallChunks();
    options.model = kTestModel;
    options.pool = pool_;
    return Must(Node::Start(std::move(options)));
  }();
};

TEST_F(LookupTakeCalls, TheSameLeaseGetsTheSameAnswer) {
  entry_ = Insert({3});
  Find(5);
  EXPECT_EQ(Take(5), 1);
  ExpectGone(true);
  EXPECT_EQ(Take(5), 1);
  Back(5);
  EXPECT_EQ(Take(5), 1);
  EXPECT_EQ(producer_->num_entries(), 0);
  EXPECT_TRUE(producer_->TakeGone().empty());
}

TEST_F(LookupTakeCalls, WhatWentBackIsNotTaken) {
  entry_ = Insert({3});
  Find(5);
  Back(5);
  EXPECT_EQ(Take(5), 0);
  EXPECT_EQ(producer_->num_entries(), 1);
  Find(6);
  EXPECT_EQ(Take(5), 0);
  EXPECT_EQ(Take(6), 1);
  EXPECT_EQ(Take(5), 0);
  ExpectGone(true);
}

TEST_F(LookupTakeCalls, WhatExpiredIsNotTaken) {
  producer_ = Producer(their_pool_, 200);
  entry_ = Insert({3});
  Find(5);
  ASSERT_TRUE(WaitFor([&] { return producer_->num_entries() == 1; }, Soon()));
  EXPECT_EQ(Take(5), 0);
  Find(6);
  EXPECT_EQ(Take(6), 1);
}

TEST_F(LookupTakeCalls, BadTakesAreRefused) {
  EXPECT_TRUE(Fails(Ask("lookup_take", {}), Code::kInvalidArgument, "lease"));
  EXPECT_TRUE(Fails(Ask("lookup_take", Fields().Set("lease", "x")), Code::kInvalidArgument));
  EXPECT_EQ(Take(0), 0);
  EXPECT_EQ(Take(77), 0);
}

}  // namespace
}  // namespace kvferry
