// Where either side of a served store finds no memory the call ends, and the store goes on.

#include <gtest/gtest.h>

#include <new>
#include <numeric>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "tests/connector/fake_store.h"
#include "tests/connector/remote_stores.h"
#include "tests/connector/store_values.h"
#include "tests/support/failing_new.h"

namespace kvferry {
namespace {

// Leaves the thread that has put something without memory of some size: that of a list of one
// status.
class StarvingStore : public FakeStore {
 public:
  using FakeStore::FakeStore;
  absl::Status Put(std::string_view key, ConstParts value, Deadline deadline) override {
    absl::Status put = FakeStore::Put(key, value, deadline);
    const MutexLock lock(&mutex_);
    if (bytes_ != 0) scarce_.emplace(ScarceNew::Of::kThisThread, bytes_);
    return put;
  }
  // Of what size there is none from the next put on; 0: there is again.
  void Starve(size_t bytes) {
    const MutexLock lock(&mutex_);
    bytes_ = bytes;
    scarce_.reset();
  }

 private:
  Mutex mutex_;
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Of the server's thread, until it has replied.
  std::optional<ScarceNew> scarce_ ABSL_GUARDED_BY(mutex_);
};

// Also when what is put has been fetched.
TEST_F(RemotePages, WhereTheServerFindsNoMemoryTheCallEnds) {
  constexpr absl::StatusCode kNoMemory = absl::StatusCode::kResourceExhausted;
  const auto lower = std::make_shared<StarvingStore>(SmallLayout().page_bytes());
  lower->Starve(sizeof(absl::Status));
  const auto server = Serve(MakeHost(4), lower);
  const auto client = Dial(server->address(), source_);
  const std::string key = "key";
  EXPECT_TRUE(Fails(Put(*client, key, Bytes(3)), kNoMemory, "no memory"));
  lower->Starve(sizeof(absl::Status));
  EXPECT_TRUE(Fails(client->PutPages(Views({key}), *source_, std::vector<int64_t>{1}, Soon())[0],
                    kNoMemory, "no memory"));
  lower->Starve(0);
  EXPECT_TRUE(IsOk(client->GetBytes(key, Soon())));
}

// A list of keys, for the table in which they are compared.
TEST_F(RemotePages, WhereTheServerFindsNoMemoryItGoesOn) {
  const std::vector<std::string> keys = Keys(9);
  std::vector<int64_t> pages(keys.size());
  std::iota(pages.begin(), pages.end(), 0);
  for (const size_t bytes : {32, 40}) {
    const auto lower = std::make_shared<StarvingStore>(SmallLayout().page_bytes());
    lower->Starve(bytes);
    const auto server = Serve(MakeHost(20), lower);
    const auto client = Dial(server->address(), source_);
    const auto put = [&](Deadline deadline) {
      return client->PutPages(Views(keys), *source_, pages, deadline);
    };
    // From here on the thread has none of that size: not to answer, either.
    for (int i = 0; i < 2; ++i) (void)put(DeadlineInMs(200));
    lower->Starve(0);
    EXPECT_TRUE(AllOk(put(Soon())));
  }
}

// More of them than may be on their way together.
TEST(RemoteValues, WhatFoundNoMemoryIsNotOnItsWay) {
  constexpr int64_t kBytes = (8 << 20) + 3;
  const std::shared_ptr<HostStore> host = Must(HostStore::Create({Flat(1 << 20), 64 << 20, 0}));
  const auto server = Serve(host);
  const auto client = Dial(server->address(), Must(KvPool::Create(Flat(1 << 20), 1)));
  const Bytes value(kBytes, std::byte{7});
  ASSERT_TRUE(IsOk(Put(*client, "key", value)));
  for (int64_t i = 0; i <= kMaxStagedBytes / kBytes; ++i) {
    const ScarceNew scarce(ScarceNew::Of::kOtherThreads, kBytes);
    ASSERT_TRUE(
        Fails(Put(*client, "new", value), absl::StatusCode::kResourceExhausted, "no memory"));
    ASSERT_TRUE(
        Fails(client->GetBytes("key", Soon()), absl::StatusCode::kResourceExhausted, "no memory"));
  }
  EXPECT_TRUE(IsOk(Put(*client, "new", value)));
  EXPECT_EQ(Must(client->GetBytes("key", Soon())), value);
}

// The memory is its caller's again, who throws it away.
TEST(RemoteValues, WhatTheClientFindsNoMemoryForIsTakenBack) {
  const std::shared_ptr<HostStore> host = Must(HostStore::Create({Flat(10), 1000, 0}));
  const auto server = Serve(host);
  const auto pool = MakePatternPool(Flat(10), 4, 1);
  Config config = SmallChunks();
  config.max_leases = 2;
  const auto client =
      Must(RemoteStore::Create({{config, kTestModel, "client"}, server->address(), pool, 1000}));
  const Bytes small(3);
  const std::string key(20, 'k');
  const std::vector<std::string> names = {std::string(200, 'a'), std::string(200, 'b'),
                                          std::string(200, 'c')};
  const std::vector<std::string_view> keys(names.begin(), names.end());
  const std::vector<int64_t> pages = {0, 1, 2};
  for (int64_t i = 0; i <= config.max_leases; ++i) {
    {  // For lists of keys, where they are copied.
      const ScarceNew scarce(ScarceNew::Of::kThisThread, 2 + 20 + 1);
      EXPECT_THROW((void)Put(*client, key, small), std::bad_alloc);
    }
    const ScarceNew scarce(ScarceNew::Of::kThisThread, 3 * (2 + 200) + 1);
    EXPECT_THROW((void)client->PutPages(keys, *pool, pages, Soon()), std::bad_alloc);
  }
  EXPECT_TRUE(IsOk(Put(*client, key, small)));
  for (const absl::Status& status : client->PutPages(keys, *pool, pages, Soon())) {
    EXPECT_TRUE(IsOk(status));
  }
}

}  // namespace
}  // namespace kvferry
