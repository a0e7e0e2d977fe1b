#pragma once

// What becomes of pools when the system has no memory for a list.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace kvferry {

// As long as it lives, this process gets no more memory than so many bytes beyond what it has.
class ScarceMemory {
 public:
  explicit ScarceMemory(uint64_t bytes) {
    uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    EXPECT_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    const rlimit scarce = {pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) + bytes,
                           before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_AS, &scarce), 0);
  }
  ~ScarceMemory() { EXPECT_EQ(setrlimit(RLIMIT_AS, &before_), 0); }
  ScarceMemory(const ScarceMemory&) = delete;
  ScarceMemory& operator=(const ScarceMemory&) = delete;

 private:
  rlimit before_{};
};

}  // namespace kvferry
