#include "base/interrupt.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"

namespace kvferry {
namespace {

// That asks the test what each look comes to.
class Asks final : public Interrupter {
 public:
  explicit Asks(std::function<bool()> look)
      : look_(std::move(look)), before_(SetInterrupter(this)) {}
  ~Asks() { SetInterrupter(before_); }

  int looks = 0;

 private:
  bool Look() noexcept override {
    ++looks;
    return look_();
  }

  const std::function<bool()> look_;
  Interrupter* const before_;
};

class Interrupts : public testing::Test {
 protected:
  // Whether it came.
  bool WaitForIt(int64_t timeout_ms) {
    const Deadline deadline = DeadlineInMs(timeout_ms);
    const MutexLock lock(&mutex_);
    while (!is_there_ && WaitOrLook(changed_, &mutex_, deadline)) {
    }
    return is_there_;
  }
  void Bring() {
    const MutexLock lock(&mutex_);
    is_there_ = true;
    changed_.NotifyAll();
  }

  Mutex mutex_;
  CondVar changed_;
  bool is_there_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST_F(Interrupts, WithoutAnybodyToAskTheDeadlineCounts) {
  const Deadline begin = Clock::now();
  EXPECT_FALSE(WaitForIt(20));
  EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(20));
}

// Once is enough for all waits that follow.
TEST_F(Interrupts, EndWaitsLongBeforeTheirDeadline) {
  Asks asks([] { return true; });
  for (int wait = 0; wait < 20; ++wait) EXPECT_FALSE(WaitForIt(600'000));
  EXPECT_EQ(asks.looks, 1);
}

TEST_F(Interrupts, WhoIsNotInterruptedWaitsOn) {
  Asks asks([this, left = 2]() mutable {
    if (--left == 0) Bring();
    return false;
  });
  EXPECT_TRUE(WaitForIt(600'000));
  EXPECT_EQ(asks.looks, 2);
}

// A look takes as long as it likes, and nobody is told of what came meanwhile.
TEST_F(Interrupts, WhatComesDuringALookIsSeenBehindIt) {
  Clock::duration quickest = Clock::duration::max();  // However busy the machine is.
  for (int wait = 0; wait < 3; ++wait) {
    Deadline looked{};
    const Asks asks([&] {
      Bring();
      looked = Clock::now();
      return false;
    });
    EXPECT_TRUE(WaitForIt(600'000));
    quickest = std::min(quickest, Clock::now() - looked);
    const MutexLock lock(&mutex_);
    is_there_ = false;
  }
  EXPECT_LT(quickest, Interrupter::kLook / 2);
}

}  // namespace
}  // namespace kvferry
