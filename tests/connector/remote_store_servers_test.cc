// Servers of a store that close, begin anew, are not there or do not fit.

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "tests/connector/fake_store.h"
#include "tests/connector/remote_stores.h"
#include "tests/support/raw_peer.h"

namespace kvferry {
namespace {

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
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 15);  // The call's deadline is at 20.
  EXPECT_FALSE(get.get().ok());
}

// What is asked for in the same call is left alone.
TEST_F(RemotePages, AServerThatClosesReadsNoMore) {
  const auto lower = std::make_shared<GatedStore>(SmallLayout().page_bytes());
  auto server = Serve(MakeHost(8), lower);
  const auto client = Dial(server->address(), source_), other = Dial(server->address(), target_);
  const std::vector<std::string> keys = Keys(4);
  const std::vector<int64_t> pages = {1, 2, 3, 4};
  ASSERT_TRUE(AllOk(lower->PutPages(Views(keys), *source_, pages, Soon())));
  auto get = std::async(std::launch::async, [&] {
    return client->GetPages(Views(keys), *source_, pages, DeadlineInMs(10000))[0];
  });
  ASSERT_TRUE(lower->asked.Wait(Soon()));
  auto closed = std::async(std::launch::async, [&] { server.reset(); });
  const auto has_begun = [&] {  // From then on it refuses what others ask.
    return absl::IsUnavailable(other->Exists(Views({"key"}), DeadlineInMs(500)).status());
  };
  EXPECT_TRUE(WaitFor(has_begun, DeadlineInMs(8000)));
  lower->go_on.Open();
  closed.get();
  EXPECT_EQ(lower->num_gets, 1);
  EXPECT_FALSE(get.get().ok());
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
  const auto lonely = Dial(silent.address(), target_, 64 << 20, /*connect_timeout_ms=*/60000);
  const Deadline begin = Clock::now();
  EXPECT_TRUE(Fails(lonely->Exists(Views(Keys(1)), DeadlineInMs(300)),
                    absl::StatusCode::kDeadlineExceeded, silent.address()));
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 15);
}

TEST_F(RemotePages, AnotherLayoutIsRefused) {
  const auto pool = MakePatternPool(KvLayout::Mla(2, 4, 8, DType::kUint8), 4, 1);
  const auto other = Dial(server_->address(), pool);
  EXPECT_TRUE(Fails(other->Exists(Views(Keys(1)), Soon()), absl::StatusCode::kFailedPrecondition,
                    "KV layout"));
}

}  // namespace
}  // namespace kvferry
