#pragma once

// What becomes of stores when the system has no memory for something.

#include <cstddef>

namespace kvferry {

// As long as it lives, allocations of exactly that many bytes throw std::bad_alloc, those of this thread or
// those of all others. There is one at a time.
class ScarceNew {
 public:
  enum class Of { kThisThread, kOtherThreads };
  ScarceNew(Of threads, size_t bytes);
  ~ScarceNew();
  ScarceNew(const ScarceNew&) = delete;
  ScarceNew& operator=(const ScarceNew&) = delete;
};

}  // namespace kvferry
