// Leases that several readers each fetch a part of.

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "connector/lease_table.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr uint64_t kLease = 0xabc;
constexpr LeaseReader kFirst{0, 2}, kSecond{1, 2};
const absl::Status kGone = absl::UnavailableError("gone");

class LeaseReaders : public testing::Test {
 protected:
  Deadline At(int64_t ms) const { return start_ + std::chrono::milliseconds(ms); }
  absl::Status Publish() { return table_.Publish(kLease, PageRuns(PageRun{3, 2}), 0, At(100)); }
  std::string Ended() {
    const std::vector<EndedLease> ended = table_.TakeEnded();
    if (ended.empty()) return "none";
    EXPECT_EQ(ended.size(), 1u);
    return std::string(LeaseOutcomeName(ended[0].outcome));
  }

  const Deadline start_ = Clock::now();
  LeaseTable table_{Config()};
};

TEST_F(LeaseReaders, TheLastOneEndsIt) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kSecond)));
  table_.EndTransfer(kLease, kSecond, absl::OkStatus());
  EXPECT_EQ(Ended(), "none");
  table_.Tick(At(1000));  // The other is still under way.
  EXPECT_EQ(Ended(), "none");
  table_.EndTransfer(kLease, kFirst, absl::OkStatus());
  EXPECT_EQ(Ended(), "fetched");
}

TEST_F(LeaseReaders, OneAfterTheOther) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  table_.EndTransfer(kLease, kFirst, absl::OkStatus());
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, kFirst), absl::StatusCode::kFailedPrecondition,
                    "already been fetched by reader 0 of 2"));
  table_.NothingNeeded(kLease, kSecond);
  EXPECT_EQ(Ended(), "fetched");
}

// A lease does not expire while it is read.
TEST_F(LeaseReaders, ThatTakeTurnsDoNotKeepItForEver) {
  const int64_t most_ms = Config().max_fetch_timeout_ms;
  ASSERT_TRUE(IsOk(table_.Publish(kLease, PageRuns(PageRun{3, 2}), 0, At(60000 - most_ms))));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kSecond)));  // Late, but it was asked for in time.
  table_.EndTransfer(kLease, kFirst, kGone);
  table_.EndTransfer(kLease, kSecond, kGone);
  constexpr uint64_t kOld = 0xabd;
  ASSERT_TRUE(IsOk(table_.Publish(kOld, PageRuns(PageRun{3, 2}), 0, At(-1 - most_ms))));
  EXPECT_TRUE(Fails(table_.BeginTransfer(kOld, kFirst), absl::StatusCode::kFailedPrecondition,
                    "has already expired"));
}

TEST_F(LeaseReaders, OneThatNeverComesLetsItExpire) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  table_.EndTransfer(kLease, kFirst, absl::OkStatus());
  table_.Tick(At(99));
  EXPECT_EQ(Ended(), "none");
  table_.Tick(At(100));
  EXPECT_EQ(Ended(), "expired");
}

TEST_F(LeaseReaders, OneThatFailsMayComeAgain) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, kFirst), absl::StatusCode::kFailedPrecondition,
                    "being fetched already"));
  table_.NothingNeeded(kLease, kFirst);  // It reads.
  table_.EndTransfer(kLease, kFirst, kGone);
  table_.NothingNeeded(kLease, kSecond);
  EXPECT_EQ(Ended(), "none");
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  table_.EndTransfer(kLease, kFirst, absl::OkStatus());
  EXPECT_EQ(Ended(), "fetched");
}

// Whoever says another number than the others cannot end their lease, nor keep them from it for
// good.
TEST_F(LeaseReaders, AnotherNumberOfReaders) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {})));
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, kSecond), absl::StatusCode::kFailedPrecondition,
                    "is for 1 readers, not for 2"));
  table_.EndTransfer(kLease, {}, kGone);
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kSecond)));
  table_.NothingNeeded(kLease, {});
  table_.NothingNeeded(kLease, {0, 3});
  table_.EndTransfer(kLease, kSecond, absl::OkStatus());
  EXPECT_EQ(Ended(), "none");
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, {}), absl::StatusCode::kFailedPrecondition,
                    "is for 2 readers, not for 1"));
  table_.NothingNeeded(kLease, kFirst);
  EXPECT_EQ(Ended(), "fetched");
}

TEST_F(LeaseReaders, WithdrawnWhenNoneReads) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kSecond)));
  EXPECT_FALSE(Must(table_.Withdraw(kLease)));
  table_.EndTransfer(kLease, kFirst, absl::OkStatus());
  EXPECT_EQ(Ended(), "none");
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, kFirst), absl::StatusCode::kFailedPrecondition,
                    "withdrawn"));
  table_.EndTransfer(kLease, kSecond, kGone);
  EXPECT_EQ(Ended(), "released");
}

// Its pages would be somebody else's while that one reads them.
TEST_F(LeaseReaders, OneThatIsGoneLeavesTheOtherReading) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kSecond)));
  table_.OnReaderGone(kLease, kFirst, kGone);
  table_.Tick(At(1000000));
  EXPECT_EQ(Ended(), "none");
  EXPECT_FALSE(Must(table_.Withdraw(kLease)));
  table_.GoOn(kLease, kSecond, At(100));
  EXPECT_EQ(Ended(), "released");
}

// Who took it was told that it is theirs: nothing puts it back.
TEST_F(LeaseReaders, NoneComesForWhatIsTaken) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  ASSERT_TRUE(IsOk(table_.Take(kLease)));
  EXPECT_TRUE(Fails(table_.BeginTransfer(kLease, kSecond), absl::StatusCode::kFailedPrecondition,
                    "being fetched already"));
  table_.GoOn(kLease, kFirst, At(100));
  EXPECT_EQ(Ended(), "fetched");
}

// One that has all of it does not come again when it is published again.
TEST_F(LeaseReaders, UnpublishedBetweenTwo) {
  ASSERT_TRUE(IsOk(Publish()));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kSecond)));
  EXPECT_FALSE(Must(table_.Unpublish(kLease)));
  table_.EndTransfer(kLease, kFirst, absl::OkStatus());
  table_.EndTransfer(kLease, kSecond, kGone);
  EXPECT_EQ(Ended(), "none");
  EXPECT_EQ(table_.num_live(), 0);
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_EQ(Ended(), "none");
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kSecond)));
  table_.EndTransfer(kLease, kSecond, absl::OkStatus());
  EXPECT_EQ(Ended(), "fetched");
}

TEST_F(LeaseReaders, UnneededByOneBeforeItIsPublished) {
  table_.NothingNeeded(kLease, kSecond);
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_EQ(Ended(), "none");
  ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, kFirst)));
  table_.EndTransfer(kLease, kFirst, absl::OkStatus());
  EXPECT_EQ(Ended(), "fetched");
}

TEST_F(LeaseReaders, UnneededByAllBeforeItIsPublished) {
  table_.NothingNeeded(kLease, kSecond);
  table_.NothingNeeded(kLease, kFirst);
  ASSERT_TRUE(IsOk(Publish()));
  EXPECT_EQ(Ended(), "fetched");
}

TEST_F(LeaseReaders, AsManyAsThereMayBe) {
  constexpr int64_t kMax = LeaseReader::kMax;
  ASSERT_TRUE(IsOk(Publish()));
  for (int64_t i = 0; i < kMax; ++i) ASSERT_TRUE(IsOk(table_.BeginTransfer(kLease, {i, kMax})));
  for (int64_t i = kMax - 1; i >= 0; --i) {
    EXPECT_EQ(Ended(), "none");
    table_.EndTransfer(kLease, {i, kMax}, absl::OkStatus());
  }
  EXPECT_EQ(Ended(), "fetched");
}

// Three readers of one lease in random order, against sets.
TEST_F(LeaseReaders, ThreeAtRandom) {
  std::mt19937_64 random(1);
  std::map<std::string, int> outcomes;
  for (uint64_t lease = 1; lease <= 20000; ++lease) {
    std::set<int64_t> reading, done;
    bool published = false, withdrawn = false, unpublishing = false;
    std::string ended = "none";
    while (ended == "none") {
      const LeaseReader reader{static_cast<int64_t>(random() % 3), 3};
      const bool reads = reading.contains(reader.index);
      const auto settle = [&] {
        if (done.size() == 3) {
          ended = "fetched";
        } else if (reading.empty() && withdrawn) {
          ended = "released";
        } else if (reading.empty() && unpublishing) {
          published = unpublishing = false;
        }
      };
      switch (random() % 16) {
        case 0:
        case 1:
          if (published) break;
          ASSERT_TRUE(IsOk(table_.Publish(lease, PageRuns(PageRun{0, 1}), 0, At(1000))));
          published = true;
          settle();
          break;
        case 2:
          if (!published) break;
          ASSERT_EQ(Must(table_.Withdraw(lease)), reading.empty());
          withdrawn = true;
          unpublishing = false;
          settle();
          break;
        case 3:
          if (!published || withdrawn || unpublishing) break;
          ASSERT_EQ(Must(table_.Unpublish(lease)), reading.empty());
          unpublishing = true;
          settle();
          break;
        case 4:
          table_.NothingNeeded(lease, reader);
          if (reads || withdrawn) break;
          done.insert(reader.index);
          if (published) settle();
          break;
        default:
          if (reads) {
            const bool ok = random() % 2 == 0;
            table_.EndTransfer(lease, reader, ok ? absl::OkStatus() : kGone);
            reading.erase(reader.index);
            if (ok) done.insert(reader.index);
            settle();
          } else if (published) {
            const bool may = !withdrawn && !unpublishing && !done.contains(reader.index);
            ASSERT_EQ(table_.BeginTransfer(lease, reader).ok(), may);
            if (may) reading.insert(reader.index);
          }
      }
      ASSERT_EQ(Ended(), ended);
      if (done.size() == 3 && !published) break;  // To be published: as fetched.
    }
    ++outcomes[ended];
  }
  EXPECT_GT(outcomes["fetched"], 2000);
  EXPECT_GT(outcomes["released"], 2000);
}

}  // namespace
}  // namespace kvferry
