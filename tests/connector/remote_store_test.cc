// A store served to another node over the real planes.

#include "connector/store/remote_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <new>
#include <numeric>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "connector/store/call_rooms.h"
#include "connector/store/store_server.h"
#include "connector/store/store_wire.h"
#include "connector/store/tiered_store.h"
#include "tests/connector/fake_store.h"
#include "tests/connector/store_conformance.h"
#include "tests/support/control_relay.h"
#include "tests/support/endpoints.h"
#include "tests/support/failing_new.h"
#include "tests/support/raw_peer.h"

namespace kvferry {
namespace {

using Heard = ControlRelay::Heard;

KvLayout Flat(int64_t page_bytes) { return Must(HostStore::FlatLayout(page_bytes)); }

std::unique_ptr<StoreServer> Serve(std::shared_ptr<HostStore> host, Config config = SmallChunks()) {
  return Must(StoreServer::Create({{config, kTestModel, "store"}, std::move(host), nullptr}));
}

// A host store over another one.
std::unique_ptr<StoreServer> Serve(std::shared_ptr<HostStore> host,
                                   const std::shared_ptr<KvStore>& lower) {
  std::shared_ptr<TieredStore> tiered = Must(TieredStore::Create(host, lower));
  return Must(
      StoreServer::Create({{SmallChunks(), kTestModel, ""}, std::move(host), std::move(tiered)}));
}

std::unique_ptr<RemoteStore> Dial(const std::string& address, std::shared_ptr<const KvPool> pool,
                                  int64_t max_value_bytes = 64 << 20,
                                  int64_t connect_timeout_ms = 3000) {
  Config config = SmallChunks();
  config.connect_timeout_ms = connect_timeout_ms;
  return Must(RemoteStore::Create(
      {{config, kTestModel, "client"}, address, std::move(pool), max_value_bytes}));
}

// A server and a client of it, as one store.
class Pair : public KvStore {
 public:
  explicit Pair(const StoreBackend::Size& size)
      : host_(Must(HostStore::Create({Flat(4096), size.capacity_bytes, size.max_value_bytes}))),
        server_(Serve(host_)),
        client_(
            Dial(server_->address(), Must(KvPool::Create(Flat(4096), 1)), size.max_value_bytes)) {}

  std::string_view name() const override { return client_->name(); }
  int64_t max_value_bytes() const override { return client_->max_value_bytes(); }
  absl::Status Put(std::string_view key, ConstParts value, Deadline deadline) override {
    return client_->Put(key, value, deadline);
  }
  absl::Status Get(std::string_view key, Parts out, Deadline deadline) override {
    return client_->Get(key, out, deadline);
  }
  absl::StatusOr<std::vector<std::byte>> GetBytes(std::string_view key,
                                                  Deadline deadline) override {
    return client_->GetBytes(key, deadline);
  }
  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override {
    return client_->Exists(keys, deadline);
  }
  absl::StatusOr<std::vector<bool>> ExistsEach(std::span<const std::string_view> keys,
                                               Deadline deadline) override {
    return client_->ExistsEach(keys, deadline);
  }
  absl::Status Erase(std::string_view key, Deadline deadline) override {
    return client_->Erase(key, deadline);
  }
  absl::Status Pin(std::string_view key, Deadline deadline) override {
    return client_->Pin(key, deadline);
  }
  absl::Status Unpin(std::string_view key, Deadline deadline) override {
    return client_->Unpin(key, deadline);
  }
  Stats stats() const override { return client_->stats(); }

 private:
  std::shared_ptr<HostStore> host_;
  std::unique_ptr<StoreServer> server_;
  std::unique_ptr<RemoteStore> client_;
};

StoreBackend Remote() {
  StoreBackend backend;
  backend.name = "Remote";
  backend.make = [](const StoreBackend::Size& size) { return std::make_shared<Pair>(size); };
  backend.evicts = true;
  backend.random_operations = 3000;
  return backend;
}

INSTANTIATE_TEST_SUITE_P(RemoteStores, StoreConformance, testing::Values(Remote()), BackendName());

class RemotePages : public testing::Test {
 protected:
  static std::vector<std::string> Keys(int64_t count) {
    std::vector<std::string> keys;
    for (int64_t i = 0; i < count; ++i) keys.push_back(absl::StrCat("key", i));
    return keys;
  }
  static std::vector<std::string_view> Views(const std::vector<std::string>& keys) {
    return {keys.begin(), keys.end()};
  }
  static std::shared_ptr<HostStore> MakeHost(int64_t pages) {
    return Must(HostStore::Create({SmallLayout(), pages * SmallLayout().page_bytes(), 0}));
  }
  static testing::AssertionResult AllOk(const std::vector<absl::Status>& statuses) {
    for (const absl::Status& status : statuses) {
      if (!status.ok()) return testing::AssertionFailure() << status;
    }
    return testing::AssertionSuccess();
  }

  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 32, 1);
  std::shared_ptr<KvPool> target_ = MakePatternPool(SmallLayout(), 32, 2);
  std::shared_ptr<HostStore> host_ = MakeHost(64);
  std::unique_ptr<StoreServer> server_ = Serve(host_);
  std::unique_ptr<RemoteStore> writer_ = Dial(server_->address(), source_);
  std::unique_ptr<RemoteStore> reader_ = Dial(server_->address(), target_);
};

TEST_F(RemotePages, GoStraightFromPoolToPool) {
  const std::vector<int64_t> from = {3, 4, 5, 30, 0, 7};
  const std::vector<int64_t> to = {9, 1, 2, 31, 30, 5};
  const std::vector<std::string> keys = Keys(6);
  ASSERT_TRUE(AllOk(writer_->PutPages(Views(keys), *source_, from, Soon())));
  EXPECT_EQ(Must(reader_->Exists(Views(keys), Soon())), 6);
  ASSERT_TRUE(AllOk(reader_->GetPages(Views(keys), *target_, to, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, to, 1, from));
  // As pages, with nothing copied on the way.
  const int64_t bytes = 6 * SmallLayout().page_bytes();
  EXPECT_EQ(Metric(*writer_, "bytes_sent"), bytes);
  EXPECT_EQ(Metric(*reader_, "bytes_received"), bytes);
  EXPECT_EQ(Must(reader_->GetBytes("key1", Soon())).size(),
            static_cast<size_t>(SmallLayout().page_bytes()));
}

TEST_F(RemotePages, ACallMayHaveNoLimit) {
  constexpr Deadline kNoLimit = Deadline::max();
  const std::vector<std::string> keys = Keys(2);
  const std::vector<std::byte> value(100, std::byte{7});
  ASSERT_TRUE(IsOk(writer_->Put("value", {{value}}, kNoLimit)));
  EXPECT_EQ(Must(reader_->GetBytes("value", kNoLimit)), value);
  ASSERT_TRUE(
      AllOk(writer_->PutPages(Views(keys), *source_, std::vector<int64_t>{3, 4}, kNoLimit)));
  const std::vector<int64_t> to = {9, 1};
  ASSERT_TRUE(AllOk(reader_->GetPages(Views(keys), *target_, to, kNoLimit)));
  EXPECT_TRUE(HoldsExactly(*target_, 2, to, 1, std::vector<int64_t>{3, 4}));
}

TEST_F(RemotePages, AgreesWithTheStoreItServes) {
  const std::vector<std::string> keys = Keys(4);
  const std::vector<int64_t> pages = {1, 2, 3, 4};
  ASSERT_TRUE(AllOk(host_->PutPages(Views(keys), *source_, pages, Soon())));
  ASSERT_TRUE(AllOk(reader_->GetPages(Views(keys), *target_, pages, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, pages, 1, pages));
}

// Also where the server has a tier below, and whether they were put or got last.
TEST_F(RemotePages, OfABatchTheFirstIsDroppedLast) {
  constexpr int64_t kPages = 8;
  const std::vector<std::string> keys = Keys(kPages);
  const std::vector<int64_t> pages = {1, 2, 3, 4, 5, 6, 7, 8};
  for (const bool tiered : {false, true}) {
    for (const bool gets : {false, true}) {
      SCOPED_TRACE(testing::Message() << tiered << gets);
      const auto host = MakeHost(kPages);
      const auto server = tiered
                              ? Serve(host, std::make_shared<FakeStore>(SmallLayout().page_bytes()))
                              : Serve(host);
      const auto client = Dial(server->address(), source_);
      ASSERT_TRUE(AllOk(client->PutPages(Views(keys), *source_, pages, Soon())));
      if (gets) {
        const auto reader = Dial(server->address(), target_);
        ASSERT_TRUE(AllOk(reader->GetPages(Views(keys), *target_, pages, Soon())));
      }
      // The server lets go of what was got soon after.
      const int64_t others = 5 * SmallLayout().page_bytes();
      EXPECT_TRUE(WaitFor([&] { return host->Reserve(others).ok(); }, Soon()));
      EXPECT_EQ(Must(host->Exists(Views(keys), Soon())), kPages - 5);
    }
  }
}

// What a RemoteStore would not ask.
std::unique_ptr<Node> StartNode(std::shared_ptr<const KvPool> pool, FetchSource* source = nullptr) {
  Node::Options options;
  options.config = SmallChunks();
  options.model = kTestModel;
  options.pool = std::move(pool);
  options.source = source;
  return Must(Node::Start(std::move(options)));
}

Fields KeyArgs(std::string_view key) { return Fields().Set("keys", Must(PackKeys({&key, 1}))); }

// One page of one byte each: of more keys than a call takes.
class ManyRemotePages : public RemotePages {
 protected:
  static constexpr int64_t kMany = 8192;

  void ServeManyOf(int64_t pages) {
    host_ = Must(HostStore::Create({Flat(1), pages, 0}));
    server_ = Serve(host_);
    client_ = Dial(server_->address(), pool_);
  }
  std::vector<absl::Status> PutAll(const std::vector<std::string>& keys) {
    return client_->PutPages(Views(keys), *pool_, pages_, Soon());
  }

  const std::shared_ptr<KvPool> pool_ = Must(KvPool::Create(Flat(1), kMany));
  const std::vector<std::string> keys_ = Keys(kMany);
  const std::vector<int64_t> pages_ = [] {
    std::vector<int64_t> pages(kMany);
    std::iota(pages.begin(), pages.end(), 0);
    return pages;
  }();
  std::unique_ptr<RemoteStore> client_;
};

TEST_F(ManyRemotePages, OfMoreThanTheServerHasRoomForTheFirstStay) {
  ServeManyOf(kMany / 2);
  ASSERT_TRUE(AllOk(PutAll(keys_)));
  EXPECT_EQ(Must(host_->Exists(Views(keys_), Soon())), kMany / 2);
}

TEST_F(ManyRemotePages, OfThoseThatWereGotOrAskedForTheFirstIsDroppedLast) {
  enum { kGet, kExists, kExistsEach };
  for (const int call : {kGet, kExists, kExistsEach}) {
    SCOPED_TRACE(call);
    ServeManyOf(kMany);
    ASSERT_TRUE(AllOk(PutAll(keys_)));
    if (call == kGet) {
      ASSERT_TRUE(AllOk(client_->GetPages(Views(keys_), *pool_, pages_, Soon())));
    } else if (call == kExists) {
      EXPECT_EQ(Must(client_->Exists(Views(keys_), Soon())), kMany);
    } else {
      EXPECT_TRUE(IsOk(client_->ExistsEach(Views(keys_), Soon())));
    }
    { const HostStore::Reservation others = Must(host_->Reserve(100)); }
    EXPECT_EQ(Must(host_->Exists(Views(keys_), Soon())), kMany - 100);
  }
}

TEST_F(ManyRemotePages, OfTwoUnderOneKeyTheLaterStays) {
  ServeManyOf(kMany);
  std::vector<std::string> keys = keys_;
  keys[5000] = keys[5];
  *pool_->page(0, 0, 5).data() = std::byte{1};
  *pool_->page(0, 0, 5000).data() = std::byte{2};
  ASSERT_TRUE(AllOk(PutAll(keys)));
  EXPECT_EQ(Must(client_->GetBytes(keys[5], Soon())), Bytes(1, std::byte{2}));
}

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

TEST_F(RemotePages, WhatIsMissingIsSaidKeyByKey) {
  const std::vector<std::string> keys = Keys(4);
  ASSERT_TRUE(AllOk(
      writer_->PutPages(Views({keys[0], keys[2]}), *source_, std::vector<int64_t>{5, 6}, Soon())));
  ASSERT_TRUE(IsOk(Put(*writer_, keys[3], Bytes(3))));
  const std::vector<absl::Status> statuses =
      reader_->GetPages(Views(keys), *target_, std::vector<int64_t>{8, 9, 10, 11}, Soon());
  EXPECT_TRUE(IsOk(statuses[0]));
  EXPECT_TRUE(Fails(statuses[1], absl::StatusCode::kNotFound));
  EXPECT_TRUE(IsOk(statuses[2]));
  EXPECT_TRUE(Fails(statuses[3], absl::StatusCode::kFailedPrecondition, "another length"));
  EXPECT_TRUE(
      HoldsExactly(*target_, 2, std::vector<int64_t>{8, 10}, 1, std::vector<int64_t>{5, 6}));
}

TEST_F(RemotePages, AFullStoreTakesWhatItCan) {
  const auto host = MakeHost(3);
  const auto server = Serve(host);
  const auto writer = Dial(server->address(), source_);
  const std::vector<std::string> keys = Keys(5);
  ASSERT_TRUE(
      IsOk(writer->PutPages(Views({keys[0]}), *source_, std::vector<int64_t>{1}, Soon())[0]));
  ASSERT_TRUE(IsOk(writer->Pin(keys[0], Soon())));
  const std::vector<absl::Status> statuses = writer->PutPages(
      Views({keys[1], keys[2], keys[3]}), *source_, std::vector<int64_t>{2, 3, 4}, Soon());
  EXPECT_TRUE(IsOk(statuses[0]));
  EXPECT_TRUE(IsOk(statuses[1]));
  EXPECT_TRUE(Fails(statuses[2], absl::StatusCode::kResourceExhausted, "no room there"));
  EXPECT_EQ(Must(writer->Exists(Views({keys[0], keys[1], keys[2], keys[3]}), Soon())), 3);
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

// ---------------------------------------------------------------- memory that is not there

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

TEST(RemoteValues, LongerThanAServerMovesAreRefusedAtOnce) {
  constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  const std::string limit = absl::StrCat(kMaxStagedBytes);
  const std::shared_ptr<HostStore> host =
      Must(HostStore::Create({Flat(1 << 20), 2 * kMaxStagedBytes, 0}));
  const auto server = Serve(host);
  const auto pool = Must(KvPool::Create(Flat(1 << 20), 1));
  const auto client = Dial(server->address(), pool, 1 << 30);
  EXPECT_EQ(client->max_value_bytes(), kMaxStagedBytes);
  const Bytes piece(1 << 20);
  const std::vector<std::span<const std::byte>> parts(257, piece);
  EXPECT_TRUE(Fails(client->Put("key", parts, Soon()), kInvalid, limit));
  // The process that serves it may have such values.
  ASSERT_TRUE(IsOk(host->Commit(Must(host->Reserve(kMaxStagedBytes + 1)), "long")));
  EXPECT_TRUE(
      Fails(client->GetBytes("long", Soon()), absl::StatusCode::kFailedPrecondition, limit));
  EXPECT_EQ(Must(client->Exists(std::vector<std::string_view>{"long"}, Soon())), 1);
}

// As a client of an older release asks.
TEST(RemoteValues, TooLongAPutIsRefusedBeforeItIsFetched) {
  const auto server = Serve(Must(HostStore::Create({Flat(1 << 20), 2 * kMaxStagedBytes, 0})));
  const auto node = StartNode(Must(KvPool::Create(Flat(1 << 20), 1)));
  const auto call = [&](const std::string& function, const Fields& args) {
    return BeginCall(*node, server->address(), function, args).get();
  };
  Fields args = KeyArgs("key");
  args.Set("lease", 1).Set("bytes", static_cast<uint64_t>(kMaxStagedBytes + 1));
  EXPECT_TRUE(Fails(call(store_call::kPut, args), absl::StatusCode::kInvalidArgument,
                    absl::StrCat(kMaxStagedBytes)));
  const Fields stats = Must(call(store_call::kStats, Fields()));
  EXPECT_EQ(Must(stats.Uint("max_value_bytes")), static_cast<uint64_t>(kMaxStagedBytes));
}

// ---------------------------------------------------------------- calls that are over

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

// A call's time at the server begins a little later than at its caller.
void LetTheServersDeadlinePass() {
  const Deadline over = DeadlineInMs(300);
  WaitFor([&] { return Clock::now() >= over; }, over);
}

TEST_F(RemotePages, WhatStoodInLineForTooLongIsNotCarriedOut) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto client = Dial(server->address(), source_), other = Dial(server->address(), target_);
  const std::vector<std::string> keys = Keys(2);
  ASSERT_TRUE(AllOk(client->PutPages(Views({keys[0]}), *source_, std::vector<int64_t>{1}, Soon())));
  ASSERT_TRUE(AllOk(lower->PutPages(Views({keys[1]}), *source_, std::vector<int64_t>{2}, Soon())));
  auto slow = std::async(std::launch::async, [&] { return other->GetBytes(keys[1], Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  EXPECT_TRUE(
      Fails(client->Erase(keys[0], DeadlineInMs(200)), absl::StatusCode::kDeadlineExceeded));
  LetTheServersDeadlinePass();
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(slow.get()));
  EXPECT_EQ(Must(client->Exists(Views({keys[0]}), Soon())), 1);
}

// Its caller is gone, and may have done something else in its place.
TEST_F(RemotePages, WhatNobodyWaitsForIsNotCarriedOut) {
  const auto host = MakeHost(4);
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(host, lower);
  const auto other = Dial(server->address(), source_);
  const std::vector<int64_t> page = {1};
  ASSERT_TRUE(AllOk(other->PutPages(Views({"here"}), *source_, page, Soon())));
  ASSERT_TRUE(AllOk(lower->PutPages(Views({"slow"}), *source_, page, Soon())));
  std::atomic<bool> broken = false;
  ControlRelay relay(server->address(), [&broken](Heard&) {
    return broken ? ControlRelay::Verdict::kBreak : ControlRelay::Verdict::kPass;
  });
  const auto client = Dial(relay.address(), target_);
  auto slow = std::async(std::launch::async, [&] { return other->GetBytes("slow", Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  const int64_t served = Metric(*server, "calls_served");
  auto pin = std::async(std::launch::async, [&] { return client->Pin("here", Soon()); });
  ASSERT_TRUE(WaitFor([&] { return Metric(*server, "calls_served") == served + 1; }, Soon()));
  broken = true;
  EXPECT_TRUE(Fails(pin.get(), absl::StatusCode::kUnavailable));
  ASSERT_TRUE(WaitFor([&] { return Metric(*server, "peers_lost") == 1; }, Soon()));
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(slow.get()));
  EXPECT_TRUE(IsOk(other->Erase("nowhere", Soon())));  // Served after the pin.
  EXPECT_EQ(host->stats().pinned, 0);
}

TEST_F(RemotePages, WhatIsInMemoryDoesNotWaitForTheTierBelow) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto client = Dial(server->address(), target_), other = Dial(server->address(), source_);
  const std::vector<std::string> keys = Keys(3);
  const std::vector<std::string> above = {keys[0], keys[1]};
  const std::vector<int64_t> pages = {1, 2};
  ASSERT_TRUE(AllOk(other->PutPages(Views(above), *source_, pages, Soon())));
  ASSERT_TRUE(AllOk(lower->PutPages(Views({keys[2]}), *source_, std::vector<int64_t>{3}, Soon())));
  auto slow = std::async(std::launch::async, [&] { return other->GetBytes(keys[2], Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  EXPECT_EQ(Must(client->Exists(Views(above), Soon())), 2);
  EXPECT_EQ(Must(client->ExistsEach(Views(above), Soon())), std::vector<bool>(2, true));
  EXPECT_TRUE(AllOk(client->GetPages(Views(above), *target_, std::vector<int64_t>{8, 9}, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, std::vector<int64_t>{8, 9}, 1, pages));
  EXPECT_TRUE(IsOk(client->GetBytes(keys[0], Soon())));
  EXPECT_EQ(slow.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(slow.get()));
}

TEST_F(RemotePages, WhatIsThereIsSaidWhileAValueIsWaitedFor) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto client = Dial(server->address(), target_), other = Dial(server->address(), source_);
  const std::vector<int64_t> page = {1};
  ASSERT_TRUE(AllOk(lower->PutPages(Views({"slow"}), *source_, page, Soon())));
  ASSERT_TRUE(AllOk(other->PutPages(Views({"here"}), *source_, page, Soon())));
  auto slow = std::async(std::launch::async, [&] { return other->GetBytes("slow", Soon()); });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  EXPECT_EQ(Must(client->Exists(Views({"slow", "nowhere"}), Soon())), 1);
  EXPECT_EQ(Must(client->ExistsEach(Views({"nowhere", "slow"}), Soon())),
            std::vector<bool>({false, true}));
  EXPECT_EQ(client->stats().puts, 1);
  EXPECT_EQ(slow.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(slow.get()));
}

// Says what it was asked for, in this order; the first question waits until it may go on.
class OrderedStore : public FakeStore {
 public:
  using FakeStore::FakeStore;
  Latch asked, go_on;

  absl::StatusOr<int64_t> Exists(std::span<const std::string_view> keys,
                                 Deadline deadline) override {
    {
      const MutexLock lock(&mutex_);
      order_ += keys[0];
    }
    asked.Open();
    go_on.Wait(Soon());
    return FakeStore::Exists(keys, deadline);
  }
  std::string order() const {
    const MutexLock lock(&mutex_);
    return order_;
  }

 private:
  mutable Mutex mutex_;
  std::string order_ ABSL_GUARDED_BY(mutex_);
};

// One client's many calls are before another's one call.
TEST_F(RemotePages, ClientsAreServedInTurn) {
  const auto lower = std::make_shared<OrderedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto eager = StartNode(source_), modest = StartNode(target_);
  ASSERT_TRUE(AllOk(Dial(server->address(), source_)
                        ->PutPages(Views({"here"}), *source_, std::vector<int64_t>{1}, Soon())));
  const auto ask = [&](Node& node, const std::string& key) {
    return BeginCall(node, server->address(), store_call::kExists, KeyArgs(key));
  };
  auto first = ask(*eager, "-");
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  std::vector<std::future<absl::StatusOr<Fields>>> many;
  for (int i = 0; i < 200; ++i) many.push_back(ask(*eager, "e"));
  auto one = ask(*modest, "m");
  // What is in memory is said by the thread that has posted those before it by then.
  for (Node* node : {eager.get(), modest.get()}) EXPECT_TRUE(IsOk(ask(*node, "here").get()));
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(first.get()));
  EXPECT_TRUE(IsOk(one.get()));
  for (auto& reply : many) EXPECT_TRUE(IsOk(reply.get()));
  EXPECT_EQ(lower->order(), "-em" + std::string(199, 'e'));
}

// What its calls carry is bounded, and others' calls are taken all the same.
TEST_F(RemotePages, WhoAsksForTooMuchAtOnceIsRefused) {
  const auto lower = std::make_shared<OrderedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto eager = StartNode(source_), modest = StartNode(target_);
  const Fields long_args = KeyArgs("e").Set("more", std::string(1500 << 10, 'x'));
  std::vector<std::future<absl::StatusOr<Fields>>> many;
  for (int i = 0; i < 100; ++i) {
    many.push_back(BeginCall(*eager, server->address(), store_call::kExists, long_args));
  }
  const auto is_refused = [](auto& reply) {
    return reply.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  ASSERT_TRUE(WaitFor([&] { return is_refused(many.back()); }, Soon()));
  EXPECT_TRUE(Fails(many.back().get(), absl::StatusCode::kResourceExhausted, "bytes of calls",
                    absl::StrCat(CallRooms::kMaxBytes)));
  auto one = BeginCall(*modest, server->address(), store_call::kExists, KeyArgs("m"));
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(one.get()));
  EXPECT_TRUE(IsOk(many.front().get()));
}

// Though they have not had their turn.
TEST_F(RemotePages, CallsOfClientsThatHaveGoneTakeNoRoom) {
  const auto lower = std::make_shared<OrderedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto first = StartNode(source_), last = StartNode(target_);
  auto blocks = BeginCall(*first, server->address(), store_call::kExists, KeyArgs("b"));
  const Fields long_args = KeyArgs("e").Set("more", std::string(1500 << 10, 'x'));
  const int64_t fill_the_room = CallRooms::kMaxBytes / (1500 << 10) + 1;
  for (int64_t i = 0; i < fill_the_room; ++i) {
    const auto gone = StartNode(source_);
    const int64_t served = Metric(*server, "calls_served");
    auto reply = BeginCall(*gone, server->address(), store_call::kExists, long_args);
    ASSERT_TRUE(WaitFor([&] { return Metric(*server, "calls_served") > served; }, Soon()));
    ASSERT_TRUE(reply.valid());
  }
  ASSERT_TRUE(WaitFor([&] { return Metric(*server, "peers") <= 1; }, Soon()));
  const int64_t served = Metric(*server, "calls_served");
  std::vector<std::future<absl::StatusOr<Fields>>> several;
  for (int i = 0; i < 3; ++i) {
    several.push_back(BeginCall(*last, server->address(), store_call::kExists, long_args));
  }
  ASSERT_TRUE(WaitFor([&] { return Metric(*server, "calls_served") == served + 3; }, Soon()));
  lower->go_on.Open();
  for (auto& reply : several) EXPECT_TRUE(IsOk(reply.get()));
  EXPECT_TRUE(IsOk(blocks.get()));
}

// It uses up what it is given: that is less than the client waits.
TEST_F(RemotePages, ATierThatHangsMakesNothingInMemoryTooLate) {
  const std::vector<std::string> keys = {"here", "nowhere"};
  const auto with_silent_tier = [&](const auto& call) {
    const auto lower = std::make_shared<FakeStore>(SmallLayout().page_bytes());
    const auto server = Serve(MakeHost(4), lower);
    const auto client = Dial(server->address(), target_);
    const std::vector<int64_t> page = {1};
    ASSERT_TRUE(AllOk(client->PutPages(Views({"here"}), *target_, page, Soon())));
    lower->hangs = true;
    call(*client, DeadlineInMs(4000));  // A quarter of it is for the way back.
  };
  with_silent_tier([&](RemoteStore& client, Deadline deadline) {
    EXPECT_EQ(Must(client.Exists(Views(keys), deadline)), 1);
  });
  with_silent_tier([&](RemoteStore& client, Deadline deadline) {
    EXPECT_EQ(Must(client.ExistsEach(Views(keys), deadline)), std::vector<bool>({true, false}));
  });
  with_silent_tier([&](RemoteStore& client, Deadline deadline) {
    const std::vector<int64_t> pages = {8, 9};
    const auto statuses = client.GetPages(Views(keys), *target_, pages, deadline);
    EXPECT_TRUE(IsOk(statuses[0]));
    EXPECT_TRUE(Fails(statuses[1], absl::StatusCode::kDeadlineExceeded));
  });
  with_silent_tier([&](RemoteStore& client, Deadline deadline) {
    const std::vector<int64_t> pages = {8};
    EXPECT_TRUE(Fails(client.PutPages(Views({"new"}), *target_, pages, deadline)[0],
                      absl::StatusCode::kDeadlineExceeded, "store"));
  });
}

// One with much time keeps those with little from the tier for a while, and no longer.
TEST_F(RemotePages, WhoWaitsLongForATierThatHangsDoesNotMakeOthersWaitAsLong) {
  constexpr int64_t kLongMs = 60000;
  const std::vector<int64_t> page = {1}, pages = {8, 9};
  const std::vector<std::string> keys = {"here", "nowhere"};
  const auto lower = std::make_shared<FakeStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(4), lower);
  const auto patient = Dial(server->address(), source_), other = Dial(server->address(), target_);
  ASSERT_TRUE(AllOk(patient->PutPages(Views({"here"}), *source_, page, Soon())));
  EXPECT_EQ(Must(other->Exists(Views({"here"}), Soon())), 1);  // It has a session.
  lower->hangs = true;
  lower->num_calls = 0;
  const Deadline begin = Clock::now();
  auto question = std::async(std::launch::async, [&] {
    return patient->Exists(Views({"nobody's"}), DeadlineInMs(kLongMs)).status();
  });
  auto get = std::async(std::launch::async, [&] {
    return patient->GetBytes("nobody's", DeadlineInMs(kLongMs)).status();
  });
  ASSERT_TRUE(WaitFor([&] { return lower->num_calls == 2; }, Soon()));
  const auto exists = [&] {
    const absl::StatusOr<int64_t> there = other->Exists(Views(keys), DeadlineInMs(200));
    return there.ok() && *there == 1;
  };
  EXPECT_TRUE(WaitFor(exists, Soon()));
  const auto gets = [&] {
    return other->GetPages(Views(keys), *target_, pages, DeadlineInMs(1000))[0].ok();
  };
  EXPECT_TRUE(WaitFor(gets, Soon()));
  EXPECT_TRUE(Fails(other->Erase("here", Soon()), absl::StatusCode::kUnavailable, "not asked"));
  EXPECT_TRUE(IsOk(question.get()));
  EXPECT_TRUE(Fails(get.get(), absl::StatusCode::kDeadlineExceeded));
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 15);
}

TEST_F(RemotePages, AServerClosesWhileATierHangs) {
  const auto lower = std::make_shared<FakeStore>(SmallLayout().page_bytes());
  auto server = Serve(MakeHost(4), lower);
  const auto client = Dial(server->address(), source_);
  lower->hangs = true;
  auto get = std::async(std::launch::async,
                        [&] { return client->GetBytes("key", DeadlineInMs(20000)).status(); });
  ASSERT_TRUE(WaitFor([&] { return lower->num_calls == 1; }, Soon()));
  const Deadline begin = Clock::now();
  server.reset();
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 10);
  EXPECT_FALSE(get.get().ok());
}

// What is asked for in the same call is left alone.
TEST_F(RemotePages, AServerThatClosesReadsNoMore) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  auto server = Serve(MakeHost(8), lower);
  const auto client = Dial(server->address(), source_);
  const std::vector<std::string> keys = Keys(4);
  const std::vector<int64_t> pages = {1, 2, 3, 4};
  ASSERT_TRUE(AllOk(lower->PutPages(Views(keys), *source_, pages, Soon())));
  auto get = std::async(std::launch::async, [&] {
    return client->GetPages(Views(keys), *source_, pages, DeadlineInMs(5000))[0];
  });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  auto closed = std::async(std::launch::async, [&] { server.reset(); });
  closed.wait_for(std::chrono::milliseconds(200));  // It has begun by then.
  lower->go_on.Open();
  closed.get();
  EXPECT_EQ(lower->num_gets, 1);
  EXPECT_FALSE(get.get().ok());
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

TEST_F(RemotePages, NoMoreIsReadForACallThatIsOver) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(8), lower);
  const auto client = Dial(server->address(), source_);
  const std::vector<std::string> keys = Keys(4);
  const std::vector<int64_t> pages = {1, 2, 3, 4};
  ASSERT_TRUE(AllOk(lower->PutPages(Views(keys), *source_, pages, Soon())));
  EXPECT_EQ(Must(client->Exists(Views(keys), Soon())), 4);
  const auto statuses = client->GetPages(Views(keys), *source_, pages, DeadlineInMs(200));
  EXPECT_TRUE(Fails(statuses[0], absl::StatusCode::kDeadlineExceeded));
  LetTheServersDeadlinePass();
  lower->go_on.Open();
  EXPECT_TRUE(IsOk(client->Erase("nowhere", Soon())));  // Served when that is done.
  EXPECT_LE(lower->num_gets, 1);
}

// Its caller has given up; others need the memory.
TEST_F(RemotePages, WhatIsFoundTooLateIsNotHeld) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(1), lower);
  const auto client = Dial(server->address(), source_), other = Dial(server->address(), target_);
  const std::vector<int64_t> page = {1};
  ASSERT_TRUE(AllOk(lower->PutPages(Views({"slow"}), *source_, page, Soon())));
  EXPECT_TRUE(Fails(client->GetPages(Views({"slow"}), *source_, page, DeadlineInMs(200))[0],
                    absl::StatusCode::kDeadlineExceeded));
  LetTheServersDeadlinePass();
  lower->go_on.Open();
  EXPECT_TRUE(
      WaitFor([&] { return AllOk(other->PutPages(Views({"new"}), *target_, page, Soon())); },
              DeadlineInMs(5000)));
}

// As what is found too late, long before its deadline.
TEST_F(RemotePages, WhatIsFoundForACallerWhoIsGoneIsNotHeld) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  const auto server = Serve(MakeHost(1), lower);
  const auto other = Dial(server->address(), source_);
  const std::vector<int64_t> page = {1};
  ASSERT_TRUE(AllOk(lower->PutPages(Views({"slow"}), *source_, page, Soon())));
  std::atomic<bool> broken = false;
  ControlRelay relay(server->address(), [&broken](Heard&) {
    return broken ? ControlRelay::Verdict::kBreak : ControlRelay::Verdict::kPass;
  });
  const auto client = Dial(relay.address(), target_);
  auto get = std::async(std::launch::async, [&] {
    return client->GetPages(Views({"slow"}), *target_, page, Soon())[0];
  });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  broken = true;
  EXPECT_TRUE(Fails(get.get(), absl::StatusCode::kUnavailable));
  ASSERT_TRUE(WaitFor([&] { return Metric(*server, "peers_lost") == 1; }, Soon()));
  lower->go_on.Open();
  EXPECT_TRUE(
      WaitFor([&] { return AllOk(other->PutPages(Views({"new"}), *source_, page, Soon())); },
              DeadlineInMs(5000)));
}

// ---------------------------------------------------------------- sessions that end

using Code = absl::StatusCode;
using Verdict = ControlRelay::Verdict;

bool IsReply(const Heard& heard) { return std::holds_alternative<ReplyMsg>(heard.message.body); }
bool IsHello(const Heard& heard) { return std::holds_alternative<HelloMsg>(heard.message.body); }

// `far_` reaches the server through a relay.
class RemoteSessions : public RemotePages {
 protected:
  void Connect(ControlRelay::Judge judge, int64_t connect_timeout_ms = 3000) {
    far_.reset();
    relay_.emplace(server_->address(), std::move(judge));
    far_ = Dial(relay_->address(), target_, 64 << 20, connect_timeout_ms);
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
  Connect([&](Heard& heard) {
    const auto* fetch = std::get_if<FetchMsg>(&heard.message.body);
    if (fetch == nullptr || ++num_fetches > num_refused) return Verdict::kPass;
    heard.answer = RefuseMsg{fetch->transfer_id, num_fetches % 2 == 1
                                                     ? absl::NotFoundError("no such lease")
                                                     : absl::FailedPreconditionError("expired")};
    return Verdict::kAnswer;
  });
  EXPECT_TRUE(IsOk(far_->GetBytes(keys_[0], Soon())));
  EXPECT_EQ(num_fetches, 3);
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

// As often as it is made anew.
TEST_F(RemoteSessions, AnErasureThatIsCutOffEachTimeMayHaveBeenCarriedOut) {
  PutAll();
  std::atomic<int> num_replies = 0;
  Connect([&](Heard& heard) {
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
      const auto sent = std::make_shared<std::optional<Fields>>();
      Connect([sent, function, given_up](Heard& heard) {
        if (*sent || heard.function() != function) return Verdict::kPass;
        *sent = std::get<CallMsg>(heard.message.body).args;
        return given_up ? Verdict::kDrop : Verdict::kBreakUnnoticed;
      });
      const Deadline deadline = given_up ? DeadlineInMs(200) : Soon();
      absl::Status status;
      if (function == store_call::kErase) status = far_->Erase(keys_[0], deadline);
      if (function == store_call::kPut) status = Put(*far_, keys_[0], value, deadline);
      if (function == store_call::kPin) status = far_->Pin(keys_[0], deadline);
      if (function == store_call::kUnpin) status = far_->Unpin(keys_[0], deadline);
      if (function == store_call::kPutPages) {
        status = far_->PutPages(Views(keys_), *target_, pages_, deadline)[0];
      }
      EXPECT_EQ(absl::IsDeadlineExceeded(status), given_up) << status;
      ASSERT_TRUE(IsOk(Put(*far_, keys_[0], value)));
      EXPECT_TRUE(Fails(BeginCall(*node, server_->address(), function, **sent).get(),
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
  Connect([&](Heard& heard) {
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
  Connect([&](Heard& heard) {
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
  Connect([&](Heard& heard) {
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

// ---------------------------------------------------------------- the rest

TEST_F(RemotePages, BadArguments) {
  const std::vector<std::string> keys = Keys(2);
  const std::vector<int64_t> one = {1};
  EXPECT_TRUE(Fails(reader_->GetPages(Views(keys), *target_, one, Soon())[0],
                    absl::StatusCode::kInvalidArgument, "2 keys for 1 pages"));
  EXPECT_TRUE(
      Fails(reader_->GetPages(Views({keys[0]}), *target_, std::vector<int64_t>{32}, Soon())[0],
            absl::StatusCode::kOutOfRange, "page 32 of a pool of 32"));
  EXPECT_TRUE(
      Fails(RemoteStore::Create({{SmallChunks(), kTestModel, ""}, "tcp://10.1.2.3:4", target_, 1}),
            absl::StatusCode::kPermissionDenied));
}

TEST_F(RemotePages, MoreKeysThanACallTakesAreAskedForInSeveral) {
  const std::shared_ptr<HostStore> host = Must(HostStore::Create({Flat(1), 10000, 0}));
  const auto server = Serve(host);
  const auto client = Dial(server->address(), Must(KvPool::Create(Flat(1), 1)));
  std::vector<std::string> keys = Keys(10000);
  for (std::string& key : keys) key.resize(KvStore::kMaxKeyBytes, '.');
  for (const std::string& key : keys) ASSERT_TRUE(IsOk(Put(*host, key, Bytes(1))));
  EXPECT_EQ(Must(client->Exists(Views(keys), Soon())), 10000);
  EXPECT_EQ(Metric(*server, "calls_served"), 5);  // Two are asked for anew, to be used last.
  ASSERT_TRUE(IsOk(host->Erase(keys[9000], Soon())));
  EXPECT_EQ(Must(client->Exists(Views(keys), Soon())), 9000);
  ASSERT_TRUE(IsOk(host->Erase(keys[5], Soon())));
  EXPECT_EQ(Must(client->Exists(Views(keys), Soon())), 5);
  EXPECT_EQ(Metric(*server, "calls_served"), 11);
  std::vector<bool> there(10000, true);
  there[5] = there[9000] = false;
  EXPECT_EQ(Must(client->ExistsEach(Views(keys), Soon())), there);
  EXPECT_EQ(Metric(*server, "calls_served"), 14);
  keys.back() = "";
  EXPECT_TRUE(Fails(client->Exists(Views(keys), Soon()), absl::StatusCode::kInvalidArgument));
  EXPECT_FALSE(client->pins_for_sure());
}

TEST_F(RemotePages, AServerThatWasRestartedIsFoundAgain) {
  ASSERT_TRUE(AllOk(writer_->PutPages(Views(Keys(1)), *source_, std::vector<int64_t>{1}, Soon())));
  Config config = SmallChunks();
  const std::string address = server_->address();
  config.listen_port = PortOf(address);
  server_.reset();
  EXPECT_TRUE(Fails(reader_->Exists(Views(Keys(1)), DeadlineInMs(500)),
                    absl::StatusCode::kDeadlineExceeded));
  server_ = Serve(host_, config);
  const auto found = [&] {
    const absl::StatusOr<int64_t> count = reader_->Exists(Views(Keys(1)), DeadlineInMs(2000));
    return count.ok() && *count == 1;
  };
  EXPECT_TRUE(WaitFor(found, Soon()));
  ASSERT_TRUE(AllOk(reader_->GetPages(Views(Keys(1)), *target_, std::vector<int64_t>{3}, Soon())));
  EXPECT_TRUE(HoldsExactly(*target_, 2, std::vector<int64_t>{3}, 1, std::vector<int64_t>{1}));
}

// Each ends while it is asked.
TEST_F(RemotePages, AServerClosesWithCallsOnTheirWay) {
  const auto host = MakeHost(8);
  Config config = SmallChunks();
  std::string address = Serve(host)->address();  // Of a port that is free.
  config.listen_port = PortOf(address);
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      const auto client = Dial(address, host->pool());
      const std::vector<std::string_view> keys = {"key"};
      // Whatever it says.
      while (!stop) client->Exists(keys, DeadlineInMs(200)).status().IgnoreError();
    });
  }
  for (int round = 0; round < 20; ++round) {
    const auto server = Serve(host, config);
    EXPECT_TRUE(WaitFor([&] { return Metric(*server, "calls_served") > 100; }, Soon()));
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
}

TEST_F(RemotePages, NobodyThere) {
  RawPrefill silent;  // Listens and never answers.
  const auto lonely = Dial(silent.address(), target_);
  const Deadline begin = Clock::now();
  EXPECT_TRUE(Fails(lonely->Exists(Views(Keys(1)), DeadlineInMs(300)),
                    absl::StatusCode::kDeadlineExceeded, silent.address()));
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 1.3);
}

TEST_F(RemotePages, AnotherLayoutIsRefused) {
  const auto pool = MakePatternPool(KvLayout::Mla(2, 4, 8, DType::kUint8), 4, 1);
  const auto other = Dial(server_->address(), pool);
  EXPECT_TRUE(Fails(other->Exists(Views(Keys(1)), Soon()), absl::StatusCode::kFailedPrecondition,
                    "KV layout"));
}

TEST(StoreWire, KeysAndCodes) {
  const std::vector<std::string_view> keys = {"a", std::string_view("\0\xff", 2), "key"};
  const std::string packed = Must(PackKeys(keys));
  const std::vector<std::string> unpacked = Must(UnpackKeys(packed));
  EXPECT_EQ(std::vector<std::string_view>(unpacked.begin(), unpacked.end()), keys);
  for (size_t cut = 1; cut < packed.size(); ++cut) {
    const auto some = UnpackKeys(packed.substr(0, cut));
    EXPECT_TRUE(some.ok() ? some->size() < 3 : absl::IsInvalidArgument(some.status())) << cut;
  }
  EXPECT_TRUE(Fails(UnpackKeys(std::string_view("\0\0", 2)), absl::StatusCode::kInvalidArgument));
  std::vector<std::string_view> many(kMaxKeysPerCall, "k");
  EXPECT_TRUE(IsOk(UnpackKeys(Must(PackKeys(many)))));
  many.emplace_back("k");
  EXPECT_TRUE(
      Fails(UnpackKeys(Must(PackKeys(many))), absl::StatusCode::kInvalidArgument, "than 4096"));
  EXPECT_TRUE(Fails(PackKeys(std::vector<std::string_view>{std::string_view()}),
                    absl::StatusCode::kInvalidArgument));
  const std::vector<absl::Status> statuses = {absl::OkStatus(), absl::NotFoundError("x")};
  const auto codes = Must(UnpackCodes(PackCodes(statuses), 2));
  EXPECT_TRUE(codes[0].ok());
  EXPECT_TRUE(Fails(codes[1], Code::kNotFound, "NOT_FOUND", "no such entry"));
  EXPECT_TRUE(Fails(UnpackCodes("\x01", 2), absl::StatusCode::kInternal, "1 of 2"));
  EXPECT_TRUE(Fails(UnpackCodes("\x7f", 1), absl::StatusCode::kInternal, "no meaning, 127"));
}

}  // namespace
}  // namespace kvferry
