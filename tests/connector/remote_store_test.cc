// A store served to another node over the real planes is a store as any other, and is asked for
// what is within the limits of both sides.

#include "connector/store/remote_store.h"

#include <gtest/gtest.h>

#include "tests/connector/remote_stores.h"
#include "tests/connector/store_conformance.h"

namespace kvferry {
namespace {

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

}  // namespace
}  // namespace kvferry
