#include "transport/gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

TEST(Gate, NobodyGoesInOnceItIsClosed) {
  Gate gate;
  EXPECT_TRUE(Gate::Pass(&gate).open());
  EXPECT_TRUE(Gate::Pass(&gate).open());
  gate.Close();
  EXPECT_FALSE(Gate::Pass(&gate).open());
  gate.Close();  // Again is no harm.
}

TEST(Gate, ClosingWaitsForThoseInside) {
  Gate gate;
  auto inside = std::make_unique<Gate::Pass>(&gate);
  std::atomic<bool> closed{false};
  std::thread closing([&] {
    gate.Close();
    closed = true;
  });
  ASSERT_TRUE(WaitFor([&] { return !Gate::Pass(&gate).open(); }, Soon()));
  EXPECT_FALSE(closed);
  inside.reset();
  closing.join();
  EXPECT_TRUE(closed);
}

// What is written inside is seen by whoever has closed it, and nothing is written afterwards.
TEST(Gate, ManyThreads) {
  const Deadline enough = DeadlineInMs(10000);  // However long a loaded machine takes for a round.
  for (int round = 0; round < 200 && Clock::now() < enough; ++round) {
    Gate gate;
    int64_t written = 0;  // Guarded by the gate alone.
    std::atomic<int64_t> turns{0};
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
      while (true) {
        const Gate::Pass pass(&gate);
        if (!pass.open()) return;
        ++written;
        ++turns;
      }
    });
    threads.emplace_back([&] {
      while (true) {
        const Gate::Pass pass(&gate);
        if (!pass.open()) return;
      }
    });
    while (turns < 10) std::this_thread::yield();
    gate.Close();
    const int64_t seen = written;
    EXPECT_EQ(seen, turns);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(written, seen);
  }
}

}  // namespace
}  // namespace kvferry
