#include "base/stderr_sink.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/logger.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "tests/support/files.h"
#include "tests/support/sanitized.h"
#include "tests/support/wait_for.h"

namespace kvferry {
namespace {

using testing::StartsWith;

const std::string kLine = std::string(63, 'x') + "\n";

// Where `in` goes to `out`.
struct Way {
  UniqueFd out, in;
};

Way Pipe() {
  std::array<int, 2> ends{};
  EXPECT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

Way Sockets() {
  std::array<int, 2> ends{};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

Way Terminal() {
  UniqueFd out(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  EXPECT_EQ(grantpt(out.get()), 0);
  EXPECT_EQ(unlockpt(out.get()), 0);
  UniqueFd in(open(ptsname(out.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  termios raw = {};
  EXPECT_EQ(tcgetattr(in.get(), &raw), 0);
  cfmakeraw(&raw);
  EXPECT_EQ(tcsetattr(in.get(), TCSANOW, &raw), 0);
  return {std::move(out), std::move(in)};
}

std::string Read(const UniqueFd& out) {
  std::string got(1 << 20, '\0');
  const ssize_t bytes = read(out.get(), got.data(), got.size());
  got.resize(bytes > 0 ? static_cast<size_t>(bytes) : 0);
  return got;
}

bool TakesNowait(const UniqueFd& in) {
  char byte = 'x';
  const iovec one = {&byte, 1};
  return pwritev2(in.get(), &one, 1, -1, RWF_NOWAIT) == 1;
}

// With that as this process's, while it lives.
class StderrIs {
 public:
  explicit StderrIs(const UniqueFd& fd) : before_(dup(STDERR_FILENO)) {
    dup2(fd.get(), STDERR_FILENO);
  }
  ~StderrIs() { dup2(before_.get(), STDERR_FILENO); }
  StderrIs(const StderrIs&) = delete;
  StderrIs& operator=(const StderrIs&) = delete;

 private:
  UniqueFd before_;
};

struct Kind {
  const char* name;
  Way (*make)();
};

class WhatIsFull : public testing::TestWithParam<Kind> {};

TEST_P(WhatIsFull, IsNotWaitedFor) {
  const Way way = GetParam().make();
  int lines = 0;  // A terminal makes room by and by.
  while (WriteWithoutWaiting(way.in.get(), kLine)) ASSERT_LT(++lines, 1 << 20);
  EXPECT_GT(lines, 10);
  // Nobody else who writes there is to be told so.
  EXPECT_EQ(fcntl(way.in.get(), F_GETFL) & O_NONBLOCK, 0);
  // A terminal hands on what it has been given by and by, too.
  std::string got;
  while (got.size() < 2 * kLine.size()) got += Read(way.out);
  EXPECT_THAT(got, StartsWith(kLine + kLine));
  EXPECT_TRUE(WaitFor([&] { return WriteWithoutWaiting(way.in.get(), kLine); }, Soon()));
}

INSTANTIATE_TEST_SUITE_P(StderrSink, WhatIsFull,
                         testing::Values(Kind{"Pipe", Pipe}, Kind{"Sockets", Sockets},
                                         Kind{"Terminal", Terminal}),
                         [](const auto& of) { return of.param.name; });

TEST(StderrSink, PipesAreNotWaitedForWithoutFilesEither) {
  const Way way = Pipe();
  const FileLimit none(0);
  int lines = 0;
  // A page that has a line in it may have no room for one of PIPE_BUF.
  while (WriteWithoutWaiting(way.in.get(), kLine)) ASSERT_LT(++lines, 1 << 20);
  EXPECT_GT(lines, 10);
}

// All of them find room, and one of them is there first. Hangs where the kernel is older than 6.4.
TEST(StderrSink, PipesThatManyWriteToAreNotWaitedForWithoutFilesEither) {
  const std::string long_line = std::string(2999, 'x') + "\n";
#ifdef KVFERRY_SANITIZED
  GTEST_SKIP() << "sanitizers open files where threads end";
#endif
  for (int repeat = 0; repeat < 100; ++repeat) {
    const Way way = Pipe();
    if (!TakesNowait(way.in)) GTEST_SKIP() << "pipes take no RWF_NOWAIT here";
    std::latch started(8), go(1);
    std::vector<std::thread> writers;
    for (int i = 0; i < 8; ++i) {
      writers.emplace_back([&] {
        started.count_down();
        go.wait();
        while (WriteWithoutWaiting(way.in.get(), long_line)) {
        }
      });
    }
    started.wait();
    const FileLimit none(0);
    go.count_down();
    for (std::thread& writer : writers) writer.join();
  }
}

TEST(StderrSink, WhatNobodyReadsAnyMoreEndsNothing) {
  for (Way (*const make)() : {Pipe, Sockets}) {
    Way way = make();
    { const UniqueFd gone = std::move(way.out); }
    EXPECT_FALSE(WriteWithoutWaiting(way.in.get(), kLine));
  }
}

TEST(StderrSink, FilesAreWrittenWhereTheyAreAt) {
  const UniqueFd file(open("/tmp", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  ASSERT_EQ(write(file.get(), "first\n", 6), 6);
  EXPECT_TRUE(WriteWithoutWaiting(file.get(), kLine));
  ASSERT_EQ(write(file.get(), "last\n", 5), 5);
  ASSERT_EQ(lseek(file.get(), 0, SEEK_SET), 0);
  EXPECT_EQ(Read(file), "first\n" + kLine + "last\n");
}

TEST(StderrSink, WhatIsClosedTakesNothing) { EXPECT_FALSE(WriteWithoutWaiting(-1, kLine)); }

TEST(StderrSink, SaysHowManyLinesWereLeftOut) {
  const Way way = Pipe();
  spdlog::logger logger("of a test", std::make_shared<StderrSink>());
  logger.set_pattern("%l %v");
  const StderrIs stderr_is(way.in);
  while (WriteWithoutWaiting(STDERR_FILENO, kLine)) {
  }
  for (int i = 0; i < 7; ++i) logger.error("a line {}", i);
  Read(way.out);
  logger.error("the next");
  EXPECT_EQ(Read(way.out),
            "warning 7 lines before this one had no room in standard error\nerror the next\n");
  logger.error("and another");
  EXPECT_EQ(Read(way.out), "error and another\n");
}

TEST(StderrSink, LinesEndWhereAPipeTakesNoMoreAtOnce) {
  const Way way = Pipe();
  spdlog::logger logger("of a test", std::make_shared<StderrSink>());
  logger.set_pattern("%v");
  const StderrIs stderr_is(way.in);
  logger.error(std::string(4'095, 'a'));
  EXPECT_EQ(Read(way.out), std::string(4'095, 'a') + "\n");
  logger.error(std::string(4'096, 'a'));
  EXPECT_EQ(Read(way.out), std::string(4'092, 'a') + "...\n");
  std::string umlauts;
  while (umlauts.size() < 5'000) umlauts += "ü";
  logger.error("a" + umlauts);
  EXPECT_EQ(Read(way.out), "a" + umlauts.substr(0, 4'090) + "...\n");
}

}  // namespace
}  // namespace kvferry
