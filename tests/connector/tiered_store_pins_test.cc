// Pins of two tiers, of which one may have none.

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/connector/tiered_stores.h"

namespace kvferry {
namespace {

constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kUnavailable = absl::StatusCode::kUnavailable;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

TEST_F(TieredStores, PinsWhereTheyCan) {
  ASSERT_TRUE(IsOk(Put(*store_, "a", old_)));
  EXPECT_TRUE(Fails(store_->Pin("a", Soon()), kUnimplemented));
  const auto host = MakeHost(200);
  const auto store = Must(TieredStore::Create(host, lower_));
  EXPECT_TRUE(IsOk(store->Pin("a", Soon())));  // Brought up.
  EXPECT_EQ(host->stats().pinned, 1);
  EXPECT_TRUE(IsOk(store->Pin("a", Soon())));
  EXPECT_TRUE(Fails(store->Pin("b", Soon()), kNotFound));
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(host->stats().pinned, 1);
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(host->stats().pinned, 0);
  EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kPrecondition));
}

class PinnedStore : public FakeStore {
 public:
  using FakeStore::FakeStore;

  int64_t pins = 0;
  absl::Status unpins;  // What it says to those.

  absl::Status Pin(std::string_view, Deadline) override {
    ++pins;
    return absl::OkStatus();
  }
  absl::Status Unpin(std::string_view, Deadline) override {
    if (unpins.ok()) --pins;
    return unpins;
  }
};

TEST_F(TieredStores, AnUnpinThatATierHasNotDoneIsAskedAgain) {
  for (const bool upper_fails : {false, true}) {
    SCOPED_TRACE(upper_fails);
    const auto upper = std::make_shared<PinnedStore>(1000);
    const auto lower = std::make_shared<PinnedStore>(1000);
    const auto store = Must(TieredStore::Create(upper, lower));
    PinnedStore& fails = upper_fails ? *upper : *lower;
    ASSERT_TRUE(IsOk(Put(*store, "a", old_)));
    ASSERT_TRUE(IsOk(store->Pin("a", Soon())));
    fails.unpins = absl::UnavailableError("down");
    EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kUnavailable, "down"));
    EXPECT_EQ(store->stats().pinned, 1);
    EXPECT_EQ(store->stats().errors, 1);
    fails.unpins = absl::OkStatus();
    EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
    EXPECT_EQ(store->stats().pinned, 0);
    EXPECT_EQ(upper->pins, 0);
    EXPECT_EQ(lower->pins, 0);
    EXPECT_TRUE(Fails(store->Unpin("a", Soon()), kPrecondition));
    // A tier that has no pin any more has nothing to let go of.
    ASSERT_TRUE(IsOk(store->Pin("a", Soon())));
    fails.unpins = absl::FailedPreconditionError("not pinned");
    EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  }
}

// Its pins may have been carried out when they fail.
class UnsurePinnedStore : public PinnedStore {
 public:
  using PinnedStore::PinnedStore;
  bool pins_for_sure() const override { return false; }
};

TEST_F(TieredStores, PinsThatAreNotForSureAreNotUsed) {
  const auto lower = std::make_shared<UnsurePinnedStore>(1000);
  const auto host = MakeHost(200);
  const auto store = Must(TieredStore::Create(host, lower));
  EXPECT_FALSE(store->pins_for_sure());
  ASSERT_TRUE(IsOk(Put(*lower, "a", old_)));
  EXPECT_TRUE(IsOk(store->Pin("a", Soon())));  // Brought up.
  EXPECT_EQ(host->stats().pinned, 1);
  EXPECT_EQ(lower->pins, 0);
  lower->unpins = absl::UnavailableError("it may have been carried out");
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(host->stats().pinned, 0);
  EXPECT_TRUE(Must(TieredStore::Create(upper_, host))->pins_for_sure());
}

// There is no room beside the old value, and the lower tier has no pins.
TEST_F(TieredStores, APinnedEntryIsReplacedWhereItIsPinned) {
  const auto host = MakeHost(100);
  const auto store = Must(TieredStore::Create(host, lower_));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 60))));
  ASSERT_TRUE(IsOk(store->Pin("a", Soon())));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 2, 60))));
  EXPECT_EQ(host->stats().pinned, 1);
  EXPECT_TRUE(Is(*host, "a", ValueOf(1, 2, 60)));
  {
    const HostStore::ReadLease read = Must(host->Acquire("a"));
    EXPECT_TRUE(
        Fails(Put(*store, "a", ValueOf(1, 3, 60)), kExhausted, "keeps it pinned", "leased"));
  }
  EXPECT_TRUE(Is(*store, "a", ValueOf(1, 3, 60)));
  // What neither tier has taken leaves the old one where it was.
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 4, 60))));
  EXPECT_EQ(host->stats().pinned, 1);
  lower_->down = true;
  EXPECT_TRUE(Fails(Put(*store, "a", ValueOf(1, 5, 60)), kUnavailable, "neither tier"));
  EXPECT_TRUE(Is(*host, "a", ValueOf(1, 4, 60)));
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(host->stats().pinned, 0);
}

// The upper tier had no room for the new value of a pinned entry: the lower one keeps it.
TEST_F(TieredStores, APinMovesWithItsEntry) {
  const auto upper = MakeHost(100), lower = MakeHost(400);
  const auto store = Must(TieredStore::Create(upper, lower));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 60))));
  ASSERT_TRUE(IsOk(lower->Erase("a", Soon())));  // As when it is evicted: pinned in one only.
  ASSERT_TRUE(IsOk(store->Pin("a", Soon())));
  {
    const HostStore::ReadLease read = Must(upper->Acquire("a"));  // It leaves no room either.
    ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 2, 60))));
  }
  EXPECT_EQ(upper->stats().entries, 0);
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(IsOk(Put(*store, absl::StrCat(i), ValueOf(2, 1, 60))));
  EXPECT_TRUE(Is(*store, "a", ValueOf(1, 2, 60)));
  EXPECT_TRUE(IsOk(store->Unpin("a", Soon())));
  EXPECT_EQ(upper->stats().pinned + lower->stats().pinned, 0);
}

}  // namespace
}  // namespace kvferry
