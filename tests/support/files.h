#pragma once

// What tests do to file descriptors.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <iterator>

#include "base/unique_fd.h"
#include "tests/support/sanitized.h"

namespace kvferry {

// How many descriptors this process has.
inline int64_t OpenFiles() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

inline bool IsReadable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return poll(&entry, 1, 0) == 1;
}

// In a test, or its SetUp(), that leaves no descriptor to code with virtual calls.
#ifdef KVFERRY_SANITIZED
#define KVFERRY_SKIP_WHERE_DESCRIPTORS_ARE_NEEDED() \
  GTEST_SKIP() << "UBSan looks at objects through a pipe, for which there is no descriptor"
#else
#define KVFERRY_SKIP_WHERE_DESCRIPTORS_ARE_NEEDED() static_cast<void>(0)
#endif

// This process can open at most `free` more files while it lives.
class FileLimit {
 public:
  explicit FileLimit(rlim_t free) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit limit = before_;
    {
      const UniqueFd lowest(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));  // All below are taken.
      EXPECT_TRUE(lowest.valid());
      limit.rlim_cur = static_cast<rlim_t>(lowest.get()) + free;
    }
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  ~FileLimit() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  rlimit before_{};
};

// A child of this process without an exec: it has a copy of every file descriptor, and does
// nothing.
class ForkedChild {
 public:
  ForkedChild() : pid_(fork()) {
    if (pid_ == 0) {
      for (;;) pause();
    }
    EXPECT_GT(pid_, 0);
  }
  ~ForkedChild() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  ForkedChild(const ForkedChild&) = delete;
  ForkedChild& operator=(const ForkedChild&) = delete;

 private:
  const pid_t pid_;
};

}  // namespace kvferry
