#include "base/host_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "base/shared_memory.h"
#include "base/slab.h"
#include "tests/support/status.h"
#include "tests/support/temp_folder.h"

namespace kvferry {
namespace {

constexpr int64_t kPages = 4;
constexpr int64_t kBytes = kPages * kHugePageBytes;

// Of the mapping that begins there, what /proc/self/smaps says under these keys, added up.
int64_t HugeBytesAt(const std::byte* begin) {
  std::ifstream smaps("/proc/self/smaps");
  std::ostringstream head;
  head << std::hex << reinterpret_cast<uintptr_t>(begin) << '-';
  bool here = false;
  int64_t kib = 0;
  for (std::string line; std::getline(smaps, line);) {
    std::istringstream words(line);
    std::string key;
    int64_t number = 0;
    words >> key;
    if (key.find('-') != std::string::npos) {
      here = line.rfind(head.str(), 0) == 0;
    } else if (here && (key == "AnonHugePages:" || key == "ShmemPmdMapped:")) {
      words >> number;
      kib += number;
    }
  }
  return kib * 1024;
}

// Older systems, or those that have been told not to, give none.
bool SystemHasHugePages() {
  static const bool has = [] {
    const SharedMemory memory = Must(SharedMemory::Create("test", kHugePageBytes));
    return UseHugePages(memory.data.get(), kHugePageBytes) == kHugePageBytes;
  }();
  return has;
}

#define KVFERRY_NEEDS_HUGE_PAGES() \
  if (!SystemHasHugePages()) GTEST_SKIP() << "the system gives this process no huge pages"

TEST(HugePages, OfSharedMemoryForItsOwnerAndItsReaders) {
  KVFERRY_NEEDS_HUGE_PAGES();
  const SharedMemory memory = Must(SharedMemory::Create("test", kBytes + 5000));
  std::byte* const begin = memory.data.get();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(begin) % kHugePageBytes, 0u);
  begin[kBytes - 1] = std::byte{7};
  EXPECT_EQ(HugeBytesAt(begin), 0);
  EXPECT_EQ(UseHugePages(begin, memory.bytes), kBytes);
  EXPECT_EQ(HugeBytesAt(begin), kBytes);
  EXPECT_EQ(begin[kBytes - 1], std::byte{7});
  EXPECT_EQ(std::count(begin, begin + memory.bytes, std::byte{0}), memory.bytes - 1);

  const auto seen = Must(MapPeersMemory(memory.fd, memory.bytes));
  EXPECT_EQ(std::memcmp(seen.get(), begin, memory.bytes), 0);
  EXPECT_EQ(HugeBytesAt(seen.get()), kBytes);
}

TEST(HugePages, OfMemoryOfThisProcessAlone) {
  KVFERRY_NEEDS_HUGE_PAGES();
  const auto slab = Must(MapSlab(kBytes));
  std::byte* const odd = slab.get() + 4096;  // Beside what can be whole pages.
  std::memset(odd, 9, kBytes - 4096);
  const int64_t taken = UseHugePages(odd, kBytes - 4096);
  EXPECT_GE(taken, kBytes - 2 * kHugePageBytes);
  EXPECT_LT(taken, kBytes);
  EXPECT_EQ(std::count(odd, slab.get() + kBytes, std::byte{9}), kBytes - 4096);
}

TEST(HugePages, NoneOfWhatIsTooSmallOrTooMuch) {
  const SharedMemory memory = Must(SharedMemory::Create("test", kBytes));
  std::byte* const begin = memory.data.get();
  EXPECT_EQ(UseHugePages(begin, 0), 0);
  EXPECT_EQ(UseHugePages(begin, kHugePageBytes - 1), 0);
  EXPECT_EQ(UseHugePages(begin + 1, kHugePageBytes), 0);
  // More than the machine has: nothing is touched, or this process would not survive it.
  EXPECT_EQ(UseHugePages(begin, Must(AvailableHostBytes()) + (int64_t{8} << 30)), 0);
  EXPECT_EQ(HugeBytesAt(begin), 0);
}

// What the system refuses is left as it was.
TEST(HugePages, NoneOfMemoryThatCannotBeWritten) {
  const SharedMemory memory = Must(SharedMemory::Create("test", kBytes));
  const auto seen = Must(MapPeersMemory(memory.fd, memory.bytes));
  EXPECT_EQ(UseHugePages(const_cast<std::byte*>(seen.get()), kBytes), 0);
  EXPECT_EQ(seen.get()[kBytes - 1], std::byte{0});
}

TEST(SharedMemories, NoneOfNoBytes) {
  for (const int64_t bytes : {0, -1}) {
    EXPECT_TRUE(Fails(SharedMemory::Create("test", bytes), absl::StatusCode::kInvalidArgument,
                      "bytes is ", "must be at least 1"));
  }
}

// Which else is a signal.
TEST(SharedMemories, NoneBeyondTheLimitOfAFilesSize) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = kBytes - 1;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = SharedMemory::Create("test", kBytes).status();
  const absl::StatusOr<SharedMemory> own = SharedMemory::CreateOrPrivate("test", kBytes);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(Fails(status, absl::StatusCode::kResourceExhausted, "ulimit -f"));
  ASSERT_TRUE(IsOk(own.status()));
  EXPECT_FALSE(own->fd.valid());
}

// A system as its files say it is.
class Available : public testing::Test {
 protected:
  Available() { Write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:  4000 kB\n"); }
  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = std::filesystem::path(folder_.path()) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  // A group's, in bytes.
  void Group(const std::string& group, const std::string& limit, int64_t used, int64_t files) {
    Write("cgroup" + group + "/memory.max", limit + "\n");
    Write("cgroup" + group + "/memory.current", std::to_string(used) + "\n");
    Write("cgroup" + group + "/memory.stat",
          "anon 5\ninactive_file " + std::to_string(files - 10) + "\nactive_file 10\n");
  }
  MemoryFiles Files() { return {folder_.path() + "/proc", folder_.path() + "/cgroup"}; }
  int64_t Bytes() { return Must(AvailableHostBytes(Files())); }
  TempFolder folder_;
};

TEST_F(Available, WithoutGroupsAllOfTheMachine) { EXPECT_EQ(Bytes(), 4000 * 1024); }

TEST_F(Available, NoMoreThanTheLeastOfAGroupAndThoseAboveIt) {
  Write("proc/self/cgroup", "0::/job/step:1\n");
  Group("", "max", 0, 10);
  EXPECT_EQ(Bytes(), 4000 * 1024);
  Group("/job/step:1", "900000", 100000, 10);
  EXPECT_EQ(Bytes(), 800010);
  Group("/job", "700000", 100000, 10);
  EXPECT_EQ(Bytes(), 600010);
  Group("", "500000", 600000, 10);  // As in a container, whose own group is the root.
  EXPECT_EQ(Bytes(), 0);
}

// Or a model's weights that have been read would count as taken.
TEST_F(Available, PagesOfFilesCanBeDropped) {
  Write("proc/self/cgroup", "0::/\n");
  Group("", "900000", 850000, 750000);
  EXPECT_EQ(Bytes(), 800000);
  Group("", "900000", 850000, 870000);  // They are not counted at the same moment.
  EXPECT_EQ(Bytes(), 900000);
}

TEST_F(Available, NorThanGroupsOfTheFirstVersionLeave) {
  Write("proc/self/cgroup", "3:cpuset:/\n4:memory:/docker/9f\n0::/\n");
  Write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("cgroup/memory/memory.usage_in_bytes", "5000\n");
  EXPECT_EQ(Bytes(), 4000 * 1024);
  Write("cgroup/memory/docker/9f/memory.limit_in_bytes", "900000\n");
  Write("cgroup/memory/docker/9f/memory.usage_in_bytes", "800000\n");
  Write("cgroup/memory/docker/9f/memory.stat", "active_file 1\ntotal_active_file 300000\n");
  EXPECT_EQ(Bytes(), 400000);
}

TEST_F(Available, WhatThereIsNoRoomForIsRefused) {
  EXPECT_TRUE(IsOk(CheckHostRoom(4096000, "", Files())));
  EXPECT_TRUE(Fails(CheckHostRoom(4096001, ", or go", Files()),
                    absl::StatusCode::kResourceExhausted, "4096001 bytes of memory wanted",
                    "4096000 are available; make it smaller, or go"));
  Write("proc/meminfo", "MemAvailable:  1 kB\n");
  EXPECT_TRUE(IsOk(CheckHostRoom(kHugePageBytes - 1, "", Files())));
  EXPECT_TRUE(Fails(CheckHostRoom(kHugePageBytes, "", Files()),
                    absl::StatusCode::kResourceExhausted, "1024 are available"));
  Write("proc/meminfo", "");
  EXPECT_TRUE(IsOk(CheckHostRoom(kHugePageBytes, "", Files())));
}

TEST_F(Available, ASystemThatDoesNotSay) {
  Write("proc/meminfo", "MemTotal: 100 kB\n");
  EXPECT_TRUE(
      Fails(AvailableHostBytes(Files()).status(), absl::StatusCode::kUnavailable, "MemAvailable"));
}

}  // namespace
}  // namespace kvferry
