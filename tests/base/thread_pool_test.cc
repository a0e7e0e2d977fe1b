#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <ctime>
#include <latch>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "tests/support/failing_new.h"
#include "tests/support/failing_threads.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

// Plain ints, so that TSan sees a part that runs twice or a caller that returns too early. The
// yield lets the workers have their share on a machine with few cores.
void ExpectEachPartOnce(ThreadPool* pool, int64_t parts) {
  std::vector<int> runs(parts);
  pool->ParallelFor(parts, [&](int64_t part) {
    std::this_thread::yield();
    ++runs.at(part);
  });
  for (int64_t part = 0; part < parts; ++part) ASSERT_EQ(runs[part], 1) << part << " of " << parts;
}

TEST(ThreadPool, BadSizes) {
  for (const int64_t workers :
       {int64_t{-1}, ThreadPool::kMaxWorkers + 1, std::numeric_limits<int64_t>::min(),
        std::numeric_limits<int64_t>::max()}) {
    EXPECT_TRUE(Fails(ThreadPool::Create(workers), absl::StatusCode::kInvalidArgument,
                      absl::StrCat("num_workers is ", workers), "[0, 1024]"));
  }
}

TEST(ThreadPool, EachPartRunsOnce) {
  for (const int64_t workers : {0, 1, 3, 8}) {
    SCOPED_TRACE(workers);
    const auto pool = Must(ThreadPool::Create(workers));
    EXPECT_EQ(pool->num_workers(), workers);
    for (const int64_t parts : {0, 1, 2, 3, 7, 1000}) ExpectEachPartOnce(pool.get(), parts);
    pool->ParallelFor(-5, [](int64_t part) { FAIL() << part; });
  }
}

TEST(ThreadPool, WithoutWorkersTheCallerRunsThePartsInOrder) {
  const auto pool = Must(ThreadPool::Create(0));
  std::vector<int64_t> order;
  pool->ParallelFor(4, [&](int64_t part) { order.push_back(part); });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3}));
}

TEST(ThreadPool, CallerAndWorkersRunAtTheSameTime) {
  constexpr int64_t kWorkers = 3;
  const auto pool = Must(ThreadPool::Create(kWorkers));
  for (int repeat = 0; repeat < 100; ++repeat) {
    std::latch all(kWorkers + 1);  // Nobody passes until every thread has a part.
    pool->ParallelFor(kWorkers + 1, [&](int64_t) { all.arrive_and_wait(); });
  }
}

TEST(ThreadPool, ShortCallsOneAfterTheOther) {
  const auto pool = Must(ThreadPool::Create(3));
  for (int repeat = 0; repeat < 20000; ++repeat) ExpectEachPartOnce(pool.get(), repeat % 6);
}

TEST(ThreadPool, PartsShorterThanTheirClaim) {
  const auto pool = Must(ThreadPool::Create(3));
  std::vector<std::atomic<int>> runs(100000);
  for (int repeat = 1; repeat <= 20; ++repeat) {
    pool->ParallelFor(static_cast<int64_t>(runs.size()), [&](int64_t part) { ++runs[part]; });
    for (const std::atomic<int>& count : runs) ASSERT_EQ(count, repeat);
  }
}

TEST(ThreadPool, SeveralCallers) {
  const auto pool = Must(ThreadPool::Create(2));
  std::vector<std::thread> callers;
  for (int64_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&pool, caller] {
      for (int repeat = 0; repeat < 3000; ++repeat) ExpectEachPartOnce(pool.get(), 2 + caller);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(Thread, HasANameThatTheSystemShows) {
  for (const auto& [what, name] : {std::pair("node", "kvf-node"),
                                   std::pair("thread pool, thread 1 of 3", "kvf-thread-pool")}) {
    std::array<char, 16> shown{};
    std::thread thread = Must(StartThread(what, [&] {
      const auto named = [&] {  // Its starter does it.
        pthread_getname_np(pthread_self(), shown.data(), shown.size());
        return std::string(shown.data()) == name;
      };
      WaitFor(named, Soon());
    }));
    thread.join();
    EXPECT_STREQ(shown.data(), name);
  }
}

// Its caller would hear no Ctrl-C any more.
TEST(Thread, ThatFindsNoMemoryLeavesItsCallersSignals) {
  const auto is_blocked = [] {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    return sigismember(&mask, SIGINT) == 1;
  };
  ASSERT_FALSE(is_blocked());
  std::thread thread;
  CallWithoutMemory([&] { thread = Must(StartThread("node, of which there is one", [] {})); },
                    [&] { EXPECT_FALSE(is_blocked()); });
  thread.join();
  EXPECT_FALSE(is_blocked());
}

TEST(Thread, AsManyAsAreAskedForStartAtOnce) {
  EXPECT_TRUE(IsOk(CheckThreadsStart(0)));
  for (int at_once = 0; at_once < 5; ++at_once) {
    const ScarceThreads scarce(at_once);
    EXPECT_TRUE(IsOk(CheckThreadsStart(at_once)));
    EXPECT_TRUE(Fails(CheckThreadsStart(at_once + 1), absl::StatusCode::kResourceExhausted,
                      absl::StrCat("thread ", at_once + 1, " of ", at_once + 1)));
    EXPECT_TRUE(IsOk(CheckThreadsStart(at_once)));  // Those that started have ended.
  }
}

TEST(Thread, StartsThatFindNoMemoryLeaveNoneBehind) {
  absl::Status status;
  CallWithoutMemory([&] { status = CheckThreadsStart(3); }, [] {});
  EXPECT_TRUE(IsOk(status));
}

TEST(ThreadPool, PartsMayCallAgain) {
  const auto pool = Must(ThreadPool::Create(2));
  for (int repeat = 0; repeat < 300; ++repeat) {
    std::atomic<int64_t> sum = 0;
    pool->ParallelFor(5, [&](int64_t outer) {
      pool->ParallelFor(7, [&](int64_t inner) { sum += outer * 7 + inner; });
    });
    ASSERT_EQ(sum, 34 * 35 / 2);
  }
}

// A sleep here, because time must pass.
TEST(ThreadPool, WorkersWithNothingToDoSleep) {
  const auto pool = Must(ThreadPool::Create(2));
  ExpectEachPartOnce(pool.get(), 100);
  const std::clock_t before = std::clock();  // Of all threads of this process.
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  EXPECT_LT(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC, 0.1);
}

TEST(ThreadPool, EndsAtOnce) {
  for (int repeat = 0; repeat < 200; ++repeat) {
    const auto pool = Must(ThreadPool::Create(repeat % 4));
    if (repeat % 2 == 0) ExpectEachPartOnce(pool.get(), 4);
  }
}

}  // namespace
}  // namespace kvferry
