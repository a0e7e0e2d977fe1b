// A tier that does not answer costs little: what is asked of it is bounded, and so is for how long
// it is left alone.

#include <gtest/gtest.h>

#include <algorithm>
#include <future>

#include "tests/connector/tiered_stores.h"

namespace kvferry {
namespace {

constexpr auto kDeadline = absl::StatusCode::kDeadlineExceeded;
constexpr auto kUnavailable = absl::StatusCode::kUnavailable;

// It would be waited for again, key by key.
TEST_F(TieredStores, ATierThatDidNotAnswerToABatchIsNotAskedAboutItsKeys) {
  const std::span<const std::byte> in[] = {old_, new_};
  const std::vector<std::string> names = {"a", "b", "c", "d"};
  std::vector<KvStore::PutItem> first, second;
  for (const std::string& name : names) {
    first.push_back({name, {&in[0], 1}});
    second.push_back({name, {&in[1], 1}});
  }
  for (const auto& status : store_->PutBatch(first, Soon())) ASSERT_TRUE(IsOk(status));
  lower_->down = true;
  lower_->num_calls = 0;
  for (const auto& status : store_->PutBatch(second, Soon())) EXPECT_TRUE(IsOk(status));
  EXPECT_EQ(lower_->num_calls, 4);  // The puts.
  lower_->down = false;
  for (const std::string& name : names) {
    EXPECT_TRUE(Is(*lower_, name, old_));
    ASSERT_TRUE(IsOk(upper_->Erase(name, Soon())));  // As when it is evicted.
    EXPECT_TRUE(Misses(*store_, name));
  }
}

TEST_F(TieredStores, ATierThatHangsCostsOneDeadlineInAWhile) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  ASSERT_TRUE(IsOk(Put(*lower_, "b", old_)));
  lower_->hangs = true;
  lower_->num_calls = 0;
  const std::vector<std::string_view> keys = {"a", "b"};
  const Deadline begin = Clock::now();
  EXPECT_EQ(Must(store_->Exists(keys, DeadlineIn(2 * TieredStore::kPatience))), 1);
  EXPECT_EQ(lower_->num_calls, 1);
  // From here on its answers would come at once, but it is not asked for any.
  lower_->hangs = false;
  EXPECT_EQ(Exists(*store_, {"a", "b"}), 1);
  EXPECT_TRUE(Fails(store_->GetBytes("b", Soon()), kUnavailable, "lower tier (fake)", "not asked"));
  EXPECT_TRUE(IsOk(Put(*store_, "a", new_)));
  EXPECT_TRUE(Is(*store_, "a", new_));
  EXPECT_TRUE(Fails(store_->Erase("b", Soon()), kUnavailable));
  EXPECT_TRUE(Fails(store_->Pin("b", Soon()), kUnavailable));
  EXPECT_EQ(lower_->num_calls, 1);
  EXPECT_EQ(store_->stats().errors, 5);

  EXPECT_TRUE(WaitFor([&] { return Is(*store_, "b", old_); }, Soon()));
  EXPECT_GE(Clock::now(), begin + TieredStore::kSilence);
  ASSERT_TRUE(Is(*lower_, "a", old_));
  ASSERT_TRUE(IsOk(upper_->Erase("a", Soon())));  // As when it is evicted.
  EXPECT_TRUE(Misses(*store_, "a"));
  EXPECT_TRUE(IsOk(store_->Erase("b", Soon())));
}

// Or those who have much time would wait all of it, again and again.
TEST_F(TieredStores, ATierThatWasSilentIsTriedForAShortTime) {
  ASSERT_TRUE(IsOk(Put(*lower_, "b", old_)));
  lower_->hangs = true;
  EXPECT_TRUE(Fails(store_->GetBytes("b", DeadlineIn(TieredStore::kPatience)), kDeadline));
  lower_->num_calls = 0;
  const auto tried = [&] {
    const Deadline deadline = DeadlineIn(10 * TieredStore::kSilence);
    const absl::Status put = Put(*store_, "a", new_, deadline);
    EXPECT_TRUE(IsOk(put));
    EXPECT_LT(Clock::now(), deadline - 8 * TieredStore::kSilence);
    return lower_->num_calls > 0;
  };
  EXPECT_TRUE(WaitFor(tried, Soon()));
  EXPECT_TRUE(Fails(store_->GetBytes("b", Soon()), kUnavailable, "not asked"));
  lower_->hangs = false;
  EXPECT_TRUE(WaitFor([&] { return Is(*store_, "b", old_); }, Soon()));
  // It answers: from here on it has the time that its callers have.
  lower_->hangs = true;
  const Deadline deadline = DeadlineIn(2 * TieredStore::kPatience);
  EXPECT_TRUE(IsOk(Put(*store_, "c", new_, deadline)));
  EXPECT_GE(Clock::now(), deadline);
}

TEST_F(TieredStores, ADeadlineThatIsNearlyOverSilencesNoTier) {
  ASSERT_TRUE(IsOk(Put(*lower_, "b", old_)));
  for (int i = 0; i < 40; ++i) {
    lower_->hangs = true;
    EXPECT_TRUE(Fails(store_->GetBytes("b", DeadlineInMs(-1000)), kDeadline));
    EXPECT_TRUE(Fails(store_->GetBytes("b", DeadlineInMs(20)), kDeadline));
    lower_->hangs = false;
    EXPECT_TRUE(Is(*store_, "b", old_));
    ASSERT_TRUE(IsOk(upper_->Erase("b", Soon())));
  }
}

// What is above has to be found by those who have not much time either.
TEST_F(TieredStores, ATierThatAnswersToNoneOfMoreShortDeadlinesIsSilent) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  lower_->hangs = true;
  lower_->num_calls = 0;
  const std::vector<std::string_view> keys = {"a", "b"};
  const auto in_time = [&] {
    const Deadline deadline = DeadlineInMs(50);
    return Must(store_->Exists(keys, deadline)) == 1 && Clock::now() < deadline;
  };
  EXPECT_TRUE(WaitFor(in_time, Soon()));
  EXPECT_LE(lower_->num_calls, 15);
}

TEST_F(TieredStores, ATierThatHasTiersDoesWithoutTheSilentOneByItself) {
  const auto bottom = std::make_shared<FakeStore>(1000);
  const std::shared_ptr<TieredStore> below = Must(TieredStore::Create(lower_, bottom));
  const auto store = Must(TieredStore::Create(upper_, below));
  ASSERT_TRUE(IsOk(Put(*lower_, "a", old_)));
  bottom->hangs = true;
  EXPECT_TRUE(Fails(store->GetBytes("b", DeadlineIn(2 * TieredStore::kPatience)), kDeadline));
  EXPECT_TRUE(Fails(store->GetBytes("b", Soon()), kUnavailable, "not asked"));
  EXPECT_TRUE(Is(*store, "a", old_));
}

TEST_F(TieredStores, ACallThatHangsBesideAnswersSilencesNoTier) {
  ASSERT_TRUE(IsOk(Put(*lower_, "a", old_)));
  lower_->hangs = true;
  lower_->num_calls = 0;
  auto hanging = std::async(std::launch::async, [&] {
    return store_->GetBytes("b", DeadlineIn(2 * TieredStore::kPatience));
  });
  ASSERT_TRUE(WaitFor([&] { return lower_->num_calls == 1; }, Soon()));
  lower_->hangs = false;
  while (hanging.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    ASSERT_EQ(Exists(*store_, {"a"}), 1);
  }
  EXPECT_TRUE(Fails(hanging.get(), kDeadline));
  EXPECT_EQ(Exists(*store_, {"a"}), 1);
}

// Those who wait for somebody else at the same key do not wait for the tier.
TEST_F(TieredStores, WaitingForATurnSilencesNoTier) {
  const auto lower = std::make_shared<GatedStore>(1000);
  const auto store = Must(TieredStore::Create(upper_, lower));
  for (const std::string_view key : {"a", "b"}) ASSERT_TRUE(IsOk(Put(*lower, key, old_)));
  auto slow = std::async(std::launch::async, [&] { return store->GetBytes("a", Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  EXPECT_TRUE(Fails(store->GetBytes("a", DeadlineIn(2 * TieredStore::kPatience)), kDeadline));
  lower->go_on.Open();
  EXPECT_TRUE(Is(*store, "b", old_));
  EXPECT_TRUE(IsOk(slow.get()));
}

// By a clock of the test's own.
TEST(TierPatience, ASilenceIsFourTimesWhatWasWaitedAndHasAnEnd) {
  using std::chrono::milliseconds;
  using std::chrono::seconds;
  TierPatience patience;
  Deadline now = Clock::now();
  // A call that may take so long, of a tier that hangs: how long it is not asked then.
  const auto silence_after = [&](milliseconds most) {
    const Deadline begin = std::max(now, patience.silent_until());
    now = patience.WaitUntil(begin, begin + most);
    patience.Heard(begin, now, /*answered=*/false);
    return std::chrono::duration_cast<milliseconds>(patience.silent_until() - now);
  };
  EXPECT_EQ(silence_after(seconds(60)), seconds(5));  // Its callers' own time, once.
  for (int i = 0; i < 3; ++i) silence_after(seconds(60));
  // Whoever has not much time waits in vain for no more than that.
  EXPECT_EQ(silence_after(seconds(2)), seconds(8));
  EXPECT_EQ(silence_after(milliseconds(600)), seconds(5));
  EXPECT_EQ(silence_after(seconds(2)), seconds(8));
  Clock::duration waited{};
  for (int i = 0; i < 20; ++i) {
    const Deadline before = std::max(now, patience.silent_until());
    EXPECT_LE(silence_after(seconds(600)), seconds(30)) << i;
    waited = now - before;
    EXPECT_LE(4 * waited, patience.silent_until() - now) << i;  // A fifth of the time at most.
  }
  EXPECT_GE(waited, seconds(7));
  patience.Heard(now, now, /*answered=*/true);
  EXPECT_LE(patience.silent_until(), now);
  EXPECT_EQ(patience.WaitUntil(now, now + seconds(60)), now + seconds(60));
}

}  // namespace
}  // namespace kvferry
