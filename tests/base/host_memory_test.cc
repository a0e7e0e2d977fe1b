#include "base/host_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "base/shared_memory.h"
#include "base/slab.h"
#include "tests/support/status.h"

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

}  // namespace
}  // namespace kvferry
