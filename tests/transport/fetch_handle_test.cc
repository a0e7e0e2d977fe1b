#include "transport/fetch_handle.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/support/failing_new.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

std::shared_ptr<const PageRuns> Pages(const std::vector<int64_t>& pages) {
  return std::make_shared<const PageRuns>(Must(PageRuns::FromPages(pages)));
}

TEST(Handle, LifeOfASuccess) {
  int cancels = 0;
  FetchHandle handle(Pages({3, 4}), 3, 600, [&] { ++cancels; });
  EXPECT_FALSE(handle.done());
  EXPECT_TRUE(absl::IsUnavailable(handle.status()));
  EXPECT_EQ(handle.missing_pages(), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(handle.report().total_bytes, 600);
  EXPECT_TRUE(Fails(handle.Wait(Clock::now()), absl::StatusCode::kDeadlineExceeded));
  handle.SetLayersDone(2);
  EXPECT_TRUE(IsOk(handle.WaitLayer(1, Clock::now())));
  EXPECT_TRUE(Fails(handle.WaitLayer(2, Clock::now()), absl::StatusCode::kDeadlineExceeded));
  handle.Cancel();
  EXPECT_EQ(cancels, 1);
  handle.Finish(absl::OkStatus(), {}, {600, 600, 0.5, 1.5});
  EXPECT_TRUE(handle.missing_pages().empty());
  EXPECT_TRUE(handle.done());
  EXPECT_TRUE(IsOk(handle.Wait(Clock::now())));
  EXPECT_TRUE(IsOk(handle.WaitLayer(2, Clock::now())));
  EXPECT_EQ(handle.layers_done(), 3);
  EXPECT_EQ(handle.report().move_seconds, 1.5);
  handle.Cancel();  // Nobody is bothered any more.
  EXPECT_EQ(cancels, 1);
}

TEST(Handle, FailureIsWhatEveryWaiterGets) {
  FetchHandle handle(Pages({3, 4}), 3, 600, [] {});
  handle.SetLayersDone(1);
  handle.Finish(absl::DataLossError("bad"), {4}, {600, 300, 0, 0});
  EXPECT_TRUE(Fails(handle.Wait(Soon()), absl::StatusCode::kDataLoss, "bad"));
  EXPECT_TRUE(IsOk(handle.WaitLayer(0, Soon())));
  EXPECT_TRUE(Fails(handle.WaitLayer(1, Soon()), absl::StatusCode::kDataLoss));
  EXPECT_EQ(handle.missing_pages(), std::vector<int64_t>{4});
  EXPECT_EQ(handle.layers_done(), 1);
}

// Or who waits would leave memory that is written still.
TEST(Handle, WaitsNeedNoMemory) {
  const FetchHandle handle(Pages({3}), 2, 200, [] {});
  absl::Status ended, layer;
  {
    const FailingNew failing(0);
    ended = handle.Wait(Clock::now());
    layer = handle.WaitLayer(1, Clock::now());
  }
  EXPECT_TRUE(Fails(ended, absl::StatusCode::kDeadlineExceeded, "the fetch is still under way"));
  EXPECT_TRUE(Fails(layer, absl::StatusCode::kDeadlineExceeded, "the fetch is still under way"));
}

TEST(Handle, WhoWaitsForTheEndHasIt) {
  FetchHandle handle(Pages({3}), 2, 200, [] {});
  std::thread ends([&] { handle.Finish(absl::DataLossError("bad"), {3}, {}); });
  handle.WaitUntilDone();
  EXPECT_TRUE(handle.done());
  ends.join();
  handle.WaitUntilDone();
}

TEST(Handle, WaitersOnOtherThreadsWakeUp) {
  FetchHandle handle(Pages({3}), 4, 400, [] {});
  std::vector<std::thread> threads;
  std::atomic<int> begun{0}, in_order{0};
  const Deadline late = DeadlineInMs(60000);
  for (int64_t layer = 0; layer < 4; ++layer) {
    threads.emplace_back([&, layer] {
      ++begun;
      if (handle.WaitLayer(layer, late).ok() && handle.layers_done() > layer) ++in_order;
    });
  }
  threads.emplace_back([&] {
    ++begun;
    if (handle.Wait(late).ok() && handle.done()) ++in_order;
  });
  EXPECT_TRUE(WaitFor([&] { return begun == 5; }, Soon()));
  for (int64_t layers = 1; layers <= 4; ++layers) {
    handle.SetLayersDone(layers);
    EXPECT_TRUE(WaitFor([&] { return in_order >= layers; }, Soon())) << "woken too late";
  }
  handle.Finish(absl::OkStatus(), {}, {});
  EXPECT_TRUE(WaitFor([&] { return in_order == 5; }, Soon())) << "woken too late";
  for (std::thread& thread : threads) thread.join();
}

TEST(Handle, AFailureWakesThoseWhoWaitForLayers) {
  for (int round = 0; round < 20 && !testing::Test::HasFailure(); ++round) {
    FetchHandle handle(Pages({3}), 4, 400, [] {});
    std::atomic<bool> begun{false}, ended{false};
    std::thread waiter([&] {
      begun = true;
      EXPECT_TRUE(Fails(handle.WaitLayer(2, DeadlineInMs(60000)), absl::StatusCode::kAborted));
      ended = true;
    });
    EXPECT_TRUE(WaitFor([&] { return begun.load(); }, Soon()));
    handle.SetLayersDone(1);
    handle.Finish(absl::AbortedError("x"), {3}, {});
    EXPECT_TRUE(WaitFor([&] { return ended.load(); }, Soon())) << "woken too late";
    waiter.join();
  }
}

TEST(Handle, OnDoneIsCalledOnceItIsDone) {
  int calls = 0;
  FetchHandle* seen = nullptr;
  FetchHandle handle(
      Pages({1}), 1, 10, [] {},
      [&] {
        ++calls;
        EXPECT_TRUE(seen->done());
        EXPECT_TRUE(Fails(seen->status(), absl::StatusCode::kAborted));
      });
  seen = &handle;
  EXPECT_EQ(calls, 0);
  handle.Finish(absl::AbortedError("x"), {1}, {});
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace kvferry
