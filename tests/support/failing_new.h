#pragma once

// What becomes of things when the system has no memory: for a list, allocation by allocation, or
// for what has a certain size.

#include <gtest/gtest.h>

#include <cstddef>
#include <new>

namespace kvferry {

// As long as it lives, this thread's allocations from that number on, counted from 0, throw
// std::bad_alloc: those of whoever puts things right too.
class FailingNew {
 public:
  explicit FailingNew(int number);
  ~FailingNew();
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;
};

// As long as it lives, allocations of exactly that many bytes throw std::bad_alloc, those of this
// thread or those of all others. There is one at a time.
class ScarceNew {
 public:
  enum class Of { kThisThread, kOtherThreads };
  ScarceNew(Of threads, size_t bytes);
  ~ScarceNew();
  ScarceNew(const ScarceNew&) = delete;
  ScarceNew& operator=(const ScarceNew&) = delete;
};

// Makes the call again and again, of which each time a later allocation fails, until it makes no
// more; and `expect_unchanged` after each that failed. The call is to do nothing that allocates
// once it has succeeded.
template <typename Call, typename ExpectUnchanged>
void CallWithoutMemory(const Call& call, const ExpectUnchanged& expect_unchanged) {
  int failed = 0;
  for (bool is_through = false; !is_through; ++failed) {
    try {
      const FailingNew failing(failed);
      call();
      is_through = true;
    } catch (const std::bad_alloc&) {
      expect_unchanged();
    }
  }
  EXPECT_GT(failed, 1) << "it allocates nothing";
}

}  // namespace kvferry
