// Pages that go from one pool to another through a served store, and which of them stay there.

#include <gtest/gtest.h>

#include <numeric>

#include "tests/connector/fake_store.h"
#include "tests/connector/remote_stores.h"
#include "tests/connector/store_values.h"

namespace kvferry {
namespace {

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

TEST_F(RemotePages, ABadKeyIsAnErrorOfItsOwn) {
  const std::vector<int64_t> pages = {3, 4, 5};
  for (const std::string& bad : {std::string(), std::string(257, 'x')}) {
    const std::vector<std::string_view> keys = {"a", bad, "b"};
    const auto put = writer_->PutPages(keys, *source_, pages, Soon());
    const auto got = reader_->GetPages(keys, *target_, pages, Soon());
    for (const auto& statuses : {put, got}) {
      EXPECT_TRUE(Fails(statuses[1], absl::StatusCode::kInvalidArgument, "1 to 256"));
      EXPECT_TRUE(AllOk({statuses[0], statuses[2]}));
    }
  }
  EXPECT_TRUE(HoldsExactly(*target_, 2, std::vector<int64_t>{3, 5}, 1, std::vector<int64_t>{3, 5}));
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

}  // namespace
}  // namespace kvferry
