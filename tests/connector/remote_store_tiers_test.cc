// A served store with a tier below: what comes up from there, and what is put there.

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <numeric>

#include "tests/connector/fake_store.h"
#include "tests/connector/remote_stores.h"
#include "tests/connector/store_values.h"

namespace kvferry {
namespace {

// More than fits above goes in rounds, and all of them are more than there is room for below.
TEST_F(RemotePages, OfMoreThanTheTierBelowHasRoomForTheFirstStay) {
  const auto lower = MakeHost(16);
  const auto server = Serve(MakeHost(4), lower);
  const auto client = Dial(server->address(), source_);
  std::vector<int64_t> pages(32);
  std::iota(pages.begin(), pages.end(), 0);
  const std::vector<std::string> keys = Keys(32);
  ASSERT_TRUE(AllOk(client->PutPages(Views(keys), *source_, pages, Soon())));
  EXPECT_EQ(Must(lower->Exists(Views(keys), Soon())), 16);
  EXPECT_EQ(Must(client->Exists(Views(keys), Soon())), 16);
}

TEST_F(RemotePages, InRoundsTooTheLaterOfTwoUnderOneKeyStays) {
  const auto server = Serve(MakeHost(4), std::make_shared<FakeStore>(SmallLayout().page_bytes()));
  const auto client = Dial(server->address(), source_);
  std::vector<std::string> keys = Keys(12);
  keys[10] = keys[1];
  const std::vector<int64_t> pages = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, to = {20};
  ASSERT_TRUE(AllOk(client->PutPages(Views(keys), *source_, pages, Soon())));
  const auto reader = Dial(server->address(), target_);
  ASSERT_TRUE(AllOk(reader->GetPages(Views({keys[1]}), *target_, to, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, to, 1, std::vector<int64_t>{10}));
}

// A small host store over a large one: what was evicted above comes from below, and a call may name
// more than fits above.
TEST_F(RemotePages, ATierBelowIsServedToo) {
  const auto lower = std::make_shared<FakeStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(2), lower);
  const auto client = Dial(server->address(), source_);
  const std::vector<std::string> keys = Keys(6);
  const std::vector<int64_t> pages = {1, 2, 3, 4, 5, 6};
  ASSERT_TRUE(AllOk(client->PutPages(Views(keys), *source_, pages, Soon())));
  EXPECT_EQ(Must(client->Exists(Views(keys), Soon())), 6);
  const auto reader = Dial(server->address(), target_);
  ASSERT_TRUE(AllOk(reader->GetPages(Views(keys), *target_, pages, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, pages, 1, pages));
}

TEST_F(RemotePages, NoRoomToBringAPageUpIsNoMiss) {
  const auto host = MakeHost(2);
  const auto lower = std::make_shared<FakeStore>(SmallLayout().page_bytes());
  const auto server = Serve(host, lower);
  const std::vector<std::string> keys = Keys(3);
  const std::vector<int64_t> pages = {1, 2, 3};
  ASSERT_TRUE(AllOk(lower->PutPages(Views(keys), *source_, pages, Soon())));
  const auto reader = Dial(server->address(), target_);
  ASSERT_TRUE(
      AllOk(host->PutPages(Views({"a", "b"}), *source_, std::span(pages).first(2), Soon())));
  {
    const HostStore::ReadLease a = Must(host->Acquire("a")), b = Must(host->Acquire("b"));
    for (const absl::Status& status : reader->GetPages(Views(keys), *target_, pages, Soon())) {
      EXPECT_TRUE(Fails(status, absl::StatusCode::kResourceExhausted));
    }
  }
  ASSERT_TRUE(AllOk(reader->GetPages(Views(keys), *target_, pages, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, pages, 1, pages));
}

// What the tier below does not take, the one above has not got either.
TEST_F(RemotePages, ATierBelowThatFailsKeepsTheOldValue) {
  const auto lower = std::make_shared<FakeStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(8), lower);
  const auto client = Dial(server->address(), source_);
  const std::vector<std::string> keys = Keys(1);
  ASSERT_TRUE(AllOk(client->PutPages(Views(keys), *source_, std::vector<int64_t>{1}, Soon())));
  lower->full = true;
  EXPECT_TRUE(Fails(client->PutPages(Views(keys), *source_, std::vector<int64_t>{2}, Soon())[0],
                    absl::StatusCode::kResourceExhausted));
  lower->full = false;
  const auto reader = Dial(server->address(), target_);
  ASSERT_TRUE(AllOk(reader->GetPages(Views(keys), *target_, std::vector<int64_t>{9}, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, std::vector<int64_t>{9}, 1, std::vector<int64_t>{1}));
}

TEST_F(RemotePages, WhatIsReadInMemoryIsAHitOfTheTiersToo) {
  const auto lower = std::make_shared<FakeStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(2), lower);
  const auto client = Dial(server->address(), source_);
  const std::vector<std::string> keys = Keys(3);
  ASSERT_TRUE(
      AllOk(client->PutPages(Views(keys), *source_, std::vector<int64_t>{1, 2, 3}, Soon())));
  const auto get = [&](const std::string& key) {
    return client->GetPages(Views({key}), *source_, std::vector<int64_t>{9}, Soon())[0];
  };
  EXPECT_TRUE(IsOk(get(keys[2])));
  EXPECT_EQ(client->stats().hits, 1);
  EXPECT_TRUE(IsOk(get(keys[0])));  // Brought up.
  EXPECT_EQ(client->stats().hits, 2);
  EXPECT_EQ(client->stats().misses, 0);
}

// What a process that serves a tiered store brings up for itself does not cover what a client puts
// meanwhile.
TEST_F(RemotePages, ATierBelowHasNoOldValueToBringUp) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto host = MakeHost(4);
  const std::shared_ptr<TieredStore> tiered = Must(TieredStore::Create(host, lower));
  const auto server = Must(StoreServer::Create({{SmallChunks(), kTestModel, ""}, host, tiered}));
  const auto client = Dial(server->address(), source_);
  const std::vector<int64_t> first = {1}, second = {2}, into = {9};
  ASSERT_TRUE(AllOk(lower->PutPages(Views({"key"}), *source_, first, Soon())));
  auto get = std::async(std::launch::async, [&] { return tiered->GetBytes("key", Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  auto put = std::async(std::launch::async,
                        [&] { return client->PutPages(Views({"key"}), *source_, second, Soon()); });
  put.wait_for(std::chrono::milliseconds(300));  // It is through by then, unless it waits its turn.
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(get.get()));
  ASSERT_TRUE(AllOk(put.get()));
  const auto reader = Dial(server->address(), target_);
  ASSERT_TRUE(AllOk(reader->GetPages(Views({"key"}), *target_, into, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, into, 1, second));
}

// Somebody puts another value above while it is read.
class ReplacingStore : public FakeStore {
 public:
  using FakeStore::FakeStore;
  std::function<void()> meanwhile;
  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key,
                                                  Deadline deadline) override {
    absl::StatusOr<std::vector<std::byte>> value = FakeStore::GetBytes(key, deadline);
    meanwhile();
    return value;
  }
};

// What comes after it would be given the bytes of its second page.
TEST_F(RemotePages, AValueOfAnotherLengthThatCameInBetweenIsNoPage) {
  const int64_t page_bytes = SmallLayout().page_bytes();
  for (const int64_t bytes : {2 * page_bytes, int64_t{3}}) {
    SCOPED_TRACE(bytes);
    const auto host = MakeHost(bytes > page_bytes ? 3 : 2);
    const auto lower = std::make_shared<ReplacingStore>(page_bytes);
    const auto server = Serve(host, lower);
    const std::vector<std::string> keys = {"replaced", "here"};
    ASSERT_TRUE(
        AllOk(lower->PutPages(Views({keys[0]}), *source_, std::vector<int64_t>{1}, Soon())));
    ASSERT_TRUE(AllOk(host->PutPages(Views({keys[1]}), *source_, std::vector<int64_t>{2}, Soon())));
    std::vector<HostStore::ReadLease> kept;  // They leave no room to bring the old one up.
    lower->meanwhile = [&] {
      EXPECT_TRUE(IsOk(Put(*host, keys[0], Bytes(bytes))));
      for (const std::string& key : keys) kept.push_back(Must(host->Acquire(key)));
    };
    const auto target = MakePatternPool(SmallLayout(), 32, 2);
    const auto reader = Dial(server->address(), target);
    const auto got = reader->GetPages(Views(keys), *target, std::vector<int64_t>{8, 9}, Soon());
    EXPECT_TRUE(Fails(got[0], absl::StatusCode::kFailedPrecondition));
    EXPECT_TRUE(IsOk(got[1]));
    EXPECT_TRUE(HoldsExactly(*target, 2, std::vector<int64_t>{9}, 1, std::vector<int64_t>{2}));
  }
}

TEST_F(RemotePages, ATieredStoreOverAnotherHostIsRefused) {
  const std::shared_ptr<TieredStore> tiered = Must(TieredStore::Create(MakeHost(4), MakeHost(4)));
  EXPECT_TRUE(Fails(StoreServer::Create({{SmallChunks(), kTestModel, ""}, host_, tiered}),
                    absl::StatusCode::kInvalidArgument, "upper"));
}

// Which have a while each, so that much is put into a tier that is slow all the same.
class BatchesStore : public FakeStore {
 public:
  using FakeStore::FakeStore;
  struct Batch {
    std::string first;
    size_t size = 0;
    double seconds = 0;  // That it is given.
  };
  std::vector<Batch> batches;  // Of a server's thread, until it has replied.

  std::vector<absl::Status> PutBatch(std::span<const PutItem> items, Deadline deadline) override {
    batches.push_back(
        {std::string(items[0].key), items.size(), SecondsBetween(Clock::now(), deadline)});
    return FakeStore::PutBatch(items, deadline);
  }
};

TEST_F(RemotePages, MuchIsPutBelowInPieces) {
  const KvLayout layout = Flat(1 << 20);
  const auto pool = MakePatternPool(layout, 40, 1);
  const std::shared_ptr<HostStore> host = Must(HostStore::Create({layout, 40 << 20, 0}));
  const auto lower = std::make_shared<BatchesStore>(1 << 20);
  const auto server = Serve(host, lower);
  const auto client = Dial(server->address(), pool);
  std::vector<int64_t> pages(40);
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<std::string> keys = Keys(40);
  ASSERT_TRUE(AllOk(client->PutPages(Views(keys), *pool, pages, Soon())));
  EXPECT_EQ(Must(lower->Exists(Views(keys), Soon())), 40);
  ASSERT_EQ(lower->batches.size(), 3u);
  EXPECT_EQ(lower->batches[0].first, "key32");  // Of those that stay the first are the youngest.
  EXPECT_EQ(lower->batches[1].first, "key16");
  EXPECT_EQ(lower->batches[2].first, "key0");
  for (const BatchesStore::Batch& batch : lower->batches) EXPECT_LE(batch.seconds, 2);
  // Of two values of one key the later one stays.
  keys[39] = keys[0];
  ASSERT_TRUE(AllOk(client->PutPages(Views(keys), *pool, pages, Soon())));
  EXPECT_EQ(lower->batches[3].first, "key0");
  EXPECT_EQ(lower->batches[5].size, 8u);
}

}  // namespace
}  // namespace kvferry
