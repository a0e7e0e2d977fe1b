#include "base/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"

// Linux 5.14 and 6.1; older headers lack them.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace kvferry {
namespace {

// Longer than a virtual machine takes that has to ask its host for the memory first (4.4 ms,
// measured). What takes longer looks for memory in one piece, and would do so for every page.
constexpr auto kMostForAPage = std::chrono::milliseconds(10);
// Until then one that takes long may be an exception.
constexpr auto kLeast = std::chrono::milliseconds(500);

absl::StatusOr<int64_t> ReadNumber(const char* path, absl::string_view key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (!key.empty() && word != key) continue;
    if (!key.empty() && !(file >> word)) break;
    int64_t number = 0;
    if (absl::SimpleAtoi(word, &number)) return number;
    break;  // "max": no limit.
  }
  return absl::UnavailableError(absl::StrCat("no number ", key, " in ", path));
}

// Of shared memory, the system puts together only what has been touched somewhere.
bool UseHugePage(std::byte* page) {
  return madvise(page, 1, MADV_POPULATE_WRITE) == 0 &&
         madvise(page, kHugePageBytes, MADV_COLLAPSE) == 0;
}

}  // namespace

absl::StatusOr<int64_t> AvailableHostBytes() {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t free_kib, ReadNumber("/proc/meminfo", "MemAvailable:"));
  const absl::StatusOr<int64_t> limit = ReadNumber("/sys/fs/cgroup/memory.max", "");
  const absl::StatusOr<int64_t> used = ReadNumber("/sys/fs/cgroup/memory.current", "");
  if (!limit.ok() || !used.ok()) return free_kib * 1024;
  return std::min(free_kib * 1024, std::max<int64_t>(0, *limit - *used));
}

int64_t UseHugePages(std::byte* begin, int64_t bytes) {
  const int64_t before = BytesToHugePage(begin);
  const int64_t pages = std::max<int64_t>(0, bytes - before) / kHugePageBytes;
  if (pages == 0) return 0;
  const absl::StatusOr<int64_t> available = AvailableHostBytes();
  if (available.ok() && *available < bytes) {
    Log().info("{} bytes of memory are not put into huge pages: {} are available", bytes,
               *available);
    return 0;
  }
  const Deadline start = Clock::now();
  int64_t done = 0;
  while (done < pages && UseHugePage(begin + before + done * kHugePageBytes)) {
    ++done;
    if (Clock::now() - start > kLeast + done * kMostForAPage) break;
  }
  Log().info("{} of {} MiB of memory are in huge pages, after {:.3f} s",
             done * kHugePageBytes >> 20, bytes >> 20, SecondsBetween(start, Clock::now()));
  return done * kHugePageBytes;
}

}  // namespace kvferry
