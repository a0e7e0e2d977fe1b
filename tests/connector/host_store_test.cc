#include "connector/store/host_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/connector/store_values.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"
#include "transport/stream_plan.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

std::unique_ptr<HostStore> MakeHost(const KvLayout& layout, int64_t capacity_bytes,
                                    int64_t max_value_bytes = 0) {
  return Must(HostStore::Create({layout, capacity_bytes, max_value_bytes}));
}

// Pages of 10 bytes.
std::unique_ptr<HostStore> Small(int64_t num_pages) {
  return MakeHost(Must(HostStore::FlatLayout(10)), 10 * num_pages);
}

Bytes Read(const HostStore::ReadLease& lease) {
  Bytes value(static_cast<size_t>(lease.bytes()));
  const std::span<std::byte> out = value;
  EXPECT_TRUE(IsOk(lease.CopyTo({&out, 1})));
  return value;
}

int64_t Exists(HostStore& store, std::string_view key) {
  return Must(store.Exists({&key, 1}, Soon()));
}

// All that it has. Last to first, which leaves what was used in this order as it was.
std::string Keys(HostStore& store, const std::vector<std::string_view>& of) {
  const std::vector<bool> there = Must(store.ExistsEach(of, Soon()));
  std::string keys;
  for (size_t i = 0; i < of.size(); ++i) keys += there[i] ? std::string(of[i]) : "";
  return keys;
}

std::vector<absl::Status> PutAll(HostStore& store, const std::vector<std::string_view>& keys,
                                 int64_t bytes = 10) {
  const Bytes value = ValueOf(1, 1, bytes);
  const std::span<const std::byte> part = value;
  std::vector<KvStore::PutItem> items;
  for (const std::string_view key : keys) items.push_back({key, {&part, 1}});
  return store.PutBatch(items, Soon());
}

TEST(HostStores, WhatIsUsedLeastRecentlyGoes) {
  const auto store = Small(3);
  for (const std::string_view key : {"a", "b", "c"}) {
    ASSERT_TRUE(IsOk(Put(*store, key, ValueOf(1, 1, 10))));
  }
  EXPECT_TRUE(IsOk(store->GetBytes("a", Soon())));
  ASSERT_TRUE(IsOk(Put(*store, "d", ValueOf(1, 1, 5))));
  EXPECT_EQ(Exists(*store, "b"), 0);
  ASSERT_TRUE(IsOk(Put(*store, "e", ValueOf(1, 1, 11))));  // Two pages: c and a go.
  EXPECT_EQ(Exists(*store, "a") + Exists(*store, "c"), 0);
  EXPECT_EQ(Exists(*store, "d") + Exists(*store, "e"), 2);
  EXPECT_EQ(store->stats().evictions, 3);
}

// Who asks for a prompt's blocks goes on with those behind what is there.
TEST(HostStores, WhatIsAskedForStaysTheFirstLongest) {
  for (const bool each : {false, true}) {
    SCOPED_TRACE(each);
    const auto store = Small(5);
    for (const std::string_view key : {"a", "b", "c", "d", "e"}) {
      ASSERT_TRUE(IsOk(Put(*store, key, ValueOf(1, 1, 10))));
    }
    const std::vector<std::string_view> asked = {"a", "b", "missing", "c"};
    if (each) {
      EXPECT_EQ(Must(store->ExistsEach(asked, Soon())),
                std::vector<bool>({true, true, false, true}));
    } else {
      EXPECT_EQ(Must(store->Exists(asked, Soon())), 2);  // And c is not looked for.
    }
    const auto push_out = [&](int64_t pages) {
      const HostStore::Reservation room = Must(store->Reserve(10 * pages));
    };
    push_out(2);
    EXPECT_EQ(store->stats().entries, 3);
    push_out(3);
    EXPECT_EQ(store->stats().entries, 2);
    push_out(4);
    EXPECT_EQ(Keys(*store, {"a", "b", "c", "d", "e"}), "a");
  }
}

TEST(HostStores, AskingForWhatIsPinnedOrLeasedLeavesItSo) {
  const auto store = Small(3);
  ASSERT_TRUE(IsOk(PutAll(*store, {"pinned", "leased", "c"})[0]));
  ASSERT_TRUE(IsOk(store->Pin("pinned", Soon())));
  const HostStore::ReadLease lease = Must(store->Acquire("leased"));
  EXPECT_EQ(Keys(*store, {"pinned", "leased", "c"}), "pinnedleasedc");
  EXPECT_TRUE(Fails(store->Reserve(11), kExhausted, "of 30 are 10 pinned and 10 leased"));
  EXPECT_EQ(store->stats().pinned, 1);
}

TEST(HostStores, ABatchDropsNothingOfItself) {
  const auto store = Small(3);
  ASSERT_TRUE(IsOk(Put(*store, "old", ValueOf(1, 1, 10))));
  const std::vector<absl::Status> put = PutAll(*store, {"a", "b", "c", "d", "e"});
  for (size_t i = 0; i < put.size(); ++i) {
    EXPECT_TRUE(i < 3 ? IsOk(put[i]) : Fails(put[i], kExhausted, "no room for 10 bytes")) << i;
  }
  EXPECT_EQ(Keys(*store, {"old", "a", "b", "c", "d", "e"}), "abc");
  EXPECT_EQ(store->stats().evictions, 1);
}

TEST(HostStores, EachReservationIsAnsweredByItself) {
  const auto store = Small(4);
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 10))));
  const std::vector<int64_t> bytes = {15, 0, INT64_MIN, 21, 41, INT64_MAX, 20};
  const auto rooms = store->ReserveEach(bytes);
  ASSERT_EQ(rooms.size(), bytes.size());
  ASSERT_TRUE(IsOk(rooms[0].status()));
  EXPECT_EQ(rooms[0]->bytes(), 15);
  EXPECT_TRUE(Fails(rooms[1].status(), kInvalid, "0 bytes"));
  EXPECT_TRUE(Fails(rooms[2].status(), kInvalid));
  EXPECT_TRUE(Fails(rooms[3].status(), kExhausted, "no room for 21 bytes"));
  EXPECT_TRUE(Fails(rooms[4].status(), kInvalid, "41 bytes"));
  EXPECT_TRUE(Fails(rooms[5].status(), kInvalid));
  EXPECT_TRUE(IsOk(rooms[6].status()));  // The others take nothing away from it.
  EXPECT_EQ(store->stats().evictions, 1);
}

// What is put together goes last to first, and its pages one by one.
TEST(HostStores, ABatchLiesSideBySideInAFullStoreToo) {
  const auto store = Small(8);
  const auto first_page = [&](std::string_view key) {
    return Must(store->Acquire(key)).pages().PageAt(0);
  };
  for (const char* const batch : {"a", "b", "c", "d"}) {
    std::vector<std::string> names;
    for (int i = 0; i < 4; ++i) names.push_back(absl::StrCat(batch, i));
    const std::vector<std::string_view> keys(names.begin(), names.end());
    for (const absl::Status& status : PutAll(*store, keys)) ASSERT_TRUE(IsOk(status));
    for (int i = 3; i > 0; --i) {
      EXPECT_EQ(first_page(keys[i]), first_page(keys[0]) + i) << batch;
    }
  }
  EXPECT_EQ(store->stats().evictions, 8);
}

TEST(HostStores, ALeaseKeepsItsBytes) {
  const auto store = Small(4);
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 15))));
  std::optional<HostStore::ReadLease> lease = Must(store->Acquire("a"));
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 2, 20))));  // Beside the old one.
  EXPECT_TRUE(Read(*lease) == ValueOf(1, 1, 15));
  EXPECT_TRUE(*store->GetBytes("a", Soon()) == ValueOf(1, 2, 20));
  EXPECT_TRUE(IsOk(store->Erase("a", Soon())));
  EXPECT_EQ(store->stats().bytes, 20);  // The old one's pages.
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(IsOk(Put(*store, absl::StrCat(i), ValueOf(2, 1, 20))));
    EXPECT_TRUE(Read(*lease) == ValueOf(1, 1, 15));
  }
  EXPECT_TRUE(Fails(Put(*store, "b", ValueOf(2, 1, 21)), kExhausted, "21 bytes", "of 40",
                    "0 pinned", "20 leased"));
  lease.reset();
  EXPECT_TRUE(IsOk(Put(*store, "b", ValueOf(2, 1, 21))));
}

// It is nobody's any more but the lease's.
TEST(HostStores, WhatIsErasedUnderALeaseIsNotPinned) {
  const auto store = Must(HostStore::Create({Must(HostStore::FlatLayout(10)), 100, 0}));
  ASSERT_TRUE(IsOk(Put(*store, "a", Bytes(10))));
  ASSERT_TRUE(IsOk(store->Pin("a", Soon())));
  const HostStore::ReadLease lease = Must(store->Acquire("a"));
  ASSERT_TRUE(IsOk(store->Erase("a", Soon())));
  EXPECT_EQ(store->stats().pinned, 0);
}

TEST(HostStores, ALeasedEntryIsNotEvicted) {
  const auto store = Small(2);
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 10))));
  ASSERT_TRUE(IsOk(Put(*store, "b", ValueOf(2, 1, 10))));
  std::optional<HostStore::ReadLease> first = Must(store->Acquire("a"));
  std::optional<HostStore::ReadLease> second = Must(store->Acquire("a"));
  ASSERT_TRUE(IsOk(Put(*store, "c", ValueOf(3, 1, 10))));
  EXPECT_EQ(Exists(*store, "a"), 1);
  EXPECT_EQ(Exists(*store, "b"), 0);
  first.reset();
  ASSERT_TRUE(IsOk(Put(*store, "d", ValueOf(3, 1, 10))));
  EXPECT_EQ(Exists(*store, "a"), 1);
  second.reset();
  ASSERT_TRUE(IsOk(Put(*store, "e", ValueOf(3, 1, 20))));
  EXPECT_EQ(Exists(*store, "a"), 0);
}

TEST(HostStores, NothingIsEvictedForNothing) {
  const auto store = Small(4);
  for (const std::string_view key : {"pinned", "leased", "b", "c"}) {
    ASSERT_TRUE(IsOk(Put(*store, key, ValueOf(1, 1, 10))));
  }
  ASSERT_TRUE(IsOk(store->Pin("pinned", Soon())));
  const HostStore::ReadLease lease = Must(store->Acquire("leased"));
  EXPECT_TRUE(Fails(Put(*store, "c", ValueOf(1, 2, 21)), kExhausted, "no room for 21 bytes",
                    "of 40 are 10 pinned and 10 leased"));
  EXPECT_TRUE(*store->GetBytes("b", Soon()) == ValueOf(1, 1, 10));
  EXPECT_TRUE(*store->GetBytes("c", Soon()) == ValueOf(1, 1, 10));
  EXPECT_EQ(store->stats().evictions, 0);
  EXPECT_EQ(store->stats().puts, 4);
}

TEST(HostStores, AReservationIsSeenWhenCommitted) {
  const auto store = Small(4);
  HostStore::Reservation reservation = Must(store->Reserve(25));
  EXPECT_EQ(reservation.bytes(), 25);
  EXPECT_EQ(reservation.pages().num_pages(), 3);
  const Bytes value = ValueOf(1, 1, 25);
  const std::span<const std::byte> whole = value, cut = whole.first(24);
  EXPECT_TRUE(Fails(reservation.CopyFrom({&cut, 1}), kPrecondition, "25", "24"));
  ASSERT_TRUE(IsOk(reservation.CopyFrom({&whole, 1})));
  EXPECT_EQ(store->stats().entries, 0);
  ASSERT_TRUE(IsOk(store->Commit(std::move(reservation), "a")));
  EXPECT_TRUE(*store->GetBytes("a", Soon()) == value);
}

TEST(HostStores, AReservationThatIsDroppedGivesItsPagesBack) {
  const auto store = Small(2);
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 10))));
  {
    const HostStore::Reservation reservation = Must(store->Reserve(10));
    EXPECT_EQ(store->stats().bytes, 20);
    EXPECT_TRUE(Fails(store->Reserve(20), kExhausted, "10 leased or reserved"));
    EXPECT_EQ(Exists(*store, "a"), 1);
  }
  EXPECT_EQ(store->stats().bytes, 10);
  EXPECT_TRUE(Fails(store->Commit(Must(store->Reserve(10)), ""), kInvalid, "key"));
  EXPECT_EQ(store->stats().bytes, 10);
  const auto other = Small(2);
  EXPECT_TRUE(Fails(other->Commit(Must(store->Reserve(10)), "b"), kInvalid, "another store"));
  EXPECT_EQ(store->stats().bytes, 10);
  HostStore::Reservation moved = Must(store->Reserve(10));
  ASSERT_TRUE(IsOk(store->Commit(std::move(moved), "b")));
  // NOLINTNEXTLINE(bugprone-use-after-move): what is tested.
  EXPECT_TRUE(Fails(store->Commit(std::move(moved), "c"), kInvalid, "moved from"));
  EXPECT_TRUE(Fails(store->Reserve(0), kInvalid, "0 bytes"));
  EXPECT_TRUE(Fails(store->Reserve(21), kInvalid, "21 bytes", "20"));
  EXPECT_TRUE(Fails(store->Reserve(INT64_MIN), kInvalid));
  EXPECT_TRUE(Fails(store->Acquire("x"), kNotFound));
}

TEST(HostStores, LeasesAndReservationsOutliveTheStore) {
  auto store = Small(4);
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, 15))));
  std::optional<HostStore::ReadLease> lease = Must(store->Acquire("a"));
  HostStore::Reservation reservation = Must(store->Reserve(5));
  store.reset();
  EXPECT_TRUE(Read(*lease) == ValueOf(1, 1, 15));
  const Bytes value = ValueOf(1, 1, 5);
  const std::span<const std::byte> part = value;
  EXPECT_TRUE(IsOk(reservation.CopyFrom({&part, 1})));
  EXPECT_TRUE(Fails(Small(1)->Commit(std::move(reservation), "a"), kInvalid, "another store"));
}

// What a transport relies on: the value is the beginning of the stream over the pages.
TEST(HostStores, PagesHoldTheStream) {
  const KvLayout layout = KvLayout::Mha(3, 4, 2, 8, DType::kBFloat16);
  const auto store = MakeHost(layout, 10 * layout.page_bytes());
  const int64_t bytes = 2 * layout.page_bytes() + layout.layer_page_bytes() + 5;
  ASSERT_TRUE(IsOk(Put(*store, "a", ValueOf(1, 1, bytes))));
  const HostStore::ReadLease lease = Must(store->Acquire("a"));
  ASSERT_EQ(lease.pages().num_pages(), 3);
  const StreamPlan plan = Must(StreamPlan::Create(store->pool(), lease.pages()));
  Bytes stream(static_cast<size_t>(bytes));
  ASSERT_TRUE(IsOk(plan.Gather(0, stream)));
  EXPECT_TRUE(stream == ValueOf(1, 1, bytes));

  const HostStore::Reservation reservation = Must(store->Reserve(layout.page_bytes()));
  EXPECT_EQ(store->pool()->layout(), layout);
  EXPECT_TRUE(IsOk(reservation.pages().CheckWithin(store->pool()->num_pages())));
}

TEST(HostStores, BadOptionsAreNamed) {
  const KvLayout layout = Must(HostStore::FlatLayout(10));
  EXPECT_TRUE(Fails(HostStore::Create({layout, 0, 0}), kInvalid, "capacity_bytes is 0"));
  EXPECT_TRUE(Fails(HostStore::Create({layout, INT64_MIN, 0}), kInvalid, "capacity_bytes is -9"));
  // Of pages, of which the caller has said nothing, there may be so many.
  EXPECT_TRUE(Fails(HostStore::Create({layout, (int64_t{10} << 30) + 10, 0}), kInvalid,
                    "capacity_bytes is 10737418250", "at most 10737418240", "pages of 10 bytes"));
  EXPECT_TRUE(Fails(HostStore::Create({layout, 25, 21}), kInvalid, "max_value_bytes is 21", "20"));
  EXPECT_TRUE(Fails(HostStore::Create({layout, 25, -1}), kInvalid, "max_value_bytes is -1"));
  EXPECT_TRUE(Fails(HostStore::Create({KvLayout(), 25, 0}), kInvalid, "num_layers"));
  EXPECT_TRUE(Fails(HostStore::FlatLayout(0), kInvalid, "page_bytes is 0"));
  EXPECT_TRUE(Fails(HostStore::FlatLayout((1 << 20) + 1), kInvalid, "1048577"));
  EXPECT_EQ(MakeHost(layout, 3)->stats().capacity_bytes, 10);  // One page at least.
  EXPECT_EQ(MakeHost(layout, 29)->max_value_bytes(), 20);
}

// Leases, held for a while, of values that others replace, erase and drop: none changes.
TEST(HostStores, EightThreadsWithLeases) {
  const auto store = MakeHost(Must(HostStore::FlatLayout(1024)), 256 << 10);
  std::atomic<int64_t> wrong = 0, held = 0;
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread);
      std::vector<std::pair<uint64_t, HostStore::ReadLease>> leases;
      for (int i = 0; i < 10000; ++i) {
        const uint64_t key = random() % 40;
        const std::string name = absl::StrCat(key);
        if (const uint64_t what = random() % 8; what < 4) {
          if (!Put(*store, name, WholeValue(key, random())).ok()) ++wrong;
        } else if (what == 4) {
          if (!store->Erase(name, Soon()).ok()) ++wrong;
        } else if (absl::StatusOr<HostStore::ReadLease> lease = store->Acquire(name); lease.ok()) {
          ++held;
          leases.emplace_back(key, std::move(*lease));
        }
        if (leases.size() < 2) continue;
        const size_t ends = random() % leases.size();
        if (!IsWholeValue(leases[ends].first, Read(leases[ends].second))) ++wrong;
        leases.erase(leases.begin() + static_cast<ptrdiff_t>(ends));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(held, 1000);
  EXPECT_GT(store->stats().evictions, 0);
  for (uint64_t key = 0; key < 40; ++key) {
    EXPECT_TRUE(IsOk(store->Erase(absl::StrCat(key), Soon())));
  }
  EXPECT_EQ(store->stats().bytes, 0);  // Every page came home.
}

// ---- Memory that is not there -------------------------------------------------------------------

constexpr char kLongKey[] = "a key that is kept in memory of its own";

TEST(HostStore, APutThatFindsNoMemoryChangesNothing) {
  for (const bool replaces : {false, true}) {
    SCOPED_TRACE(replaces);
    const auto store = Small(40);
    const Bytes old = ValueOf(1, 1, 100), value = ValueOf(1, 2, 100);
    if (replaces) {
      ASSERT_TRUE(IsOk(Put(*store, kLongKey, old)));
    }
    const int64_t bytes = store->stats().bytes;
    CallWithoutMemory([&] { Put(*store, kLongKey, value).IgnoreError(); },
                      [&] {
                        EXPECT_EQ(store->stats().bytes, bytes);
                        EXPECT_EQ(Exists(*store, kLongKey), replaces ? 1 : 0);
                        if (replaces) {
                          EXPECT_EQ(Read(Must(store->Acquire(kLongKey))), old);
                        }
                      });
    EXPECT_EQ(Read(Must(store->Acquire(kLongKey))), value);
    EXPECT_EQ(store->stats().bytes, 100);
  }
}

// Of several values at once, whose keys are compared.
TEST(HostStore, ABatchThatFindsNoMemoryLeavesEachKeyWithOneOfItsValues) {
  const std::string other = absl::StrCat(kLongKey, ", the other one");
  const Bytes old = ValueOf(1, 1, 100), value = ValueOf(1, 2, 100);
  const std::span<const std::byte> part = value;
  const std::vector<KvStore::PutItem> items = {{kLongKey, {&part, 1}}, {other, {&part, 1}}};
  const auto store = Small(40);
  for (const auto& item : items) ASSERT_TRUE(IsOk(Put(*store, item.key, old)));
  CallWithoutMemory([&] { (void)store->PutBatch(items, Soon()); },
                    [&] {
                      for (const auto& item : items) {
                        const Bytes got = Read(Must(store->Acquire(item.key)));
                        EXPECT_TRUE(got == old || got == value);
                      }
                      EXPECT_EQ(store->stats().bytes, 200);
                    });
  for (const auto& item : items) EXPECT_EQ(Read(Must(store->Acquire(item.key))), value);
}

TEST(Keys, ThatAreComparedWithoutMemory) {
  const std::vector<std::string_view> keys = {"a", "b", "c", "a"};
  size_t distinct = 0;
  CallWithoutMemory([&] { distinct = CountDistinct(keys); }, [&] { EXPECT_EQ(distinct, 0u); });
  EXPECT_EQ(distinct, 3u);
}

// Of a value in many pieces, too.
TEST(HostStore, LettingGoNeedsNoMemory) {
  constexpr int64_t kPages = 64;
  const auto store = Small(kPages);
  std::vector<std::string> keys;
  for (int64_t i = 0; i < kPages; ++i) {
    keys.push_back(absl::StrCat("key", i));
    ASSERT_TRUE(IsOk(Put(*store, keys.back(), ValueOf(i, 1, 10))));
  }
  // Pages that lie alone, free first to last and then last to first, so that they are in no order.
  for (int64_t i = 0; i < kPages; i += 4) ASSERT_TRUE(IsOk(store->Erase(keys[i], Soon())));
  for (int64_t i = kPages - 2; i > 0; i -= 4) ASSERT_TRUE(IsOk(store->Erase(keys[i], Soon())));
  ASSERT_TRUE(IsOk(Put(*store, "pieces", ValueOf(1, 2, kPages / 2 * 10))));
  {
    std::optional<HostStore::ReadLease> pieces = Must(store->Acquire("pieces"));
    const std::vector<int64_t> pages = pieces->pages().ToPages();
    EXPECT_EQ(pieces->pages().num_runs(), static_cast<size_t>(kPages / 2));
    EXPECT_FALSE(std::ranges::is_sorted(pages));
    ASSERT_TRUE(IsOk(store->Erase("pieces", Soon())));
    const FailingNew failing(0);
    pieces.reset();
  }
  EXPECT_EQ(store->stats().bytes, kPages / 2 * 10);
}

}  // namespace
}  // namespace kvferry
