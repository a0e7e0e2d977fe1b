#include "base/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
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

// The number in a file, or there behind a key.
absl::StatusOr<int64_t> ReadNumber(const std::string& path, absl::string_view key) {
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

// How a version of control groups calls what it says of memory
// (Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of Linux).
struct CgroupNames {
  absl::string_view controllers;  // In /proc/self/cgroup.
  absl::string_view folder;
  absl::string_view limit, used, file_keys[2];
};
constexpr CgroupNames kCgroups[] = {
    {"", "", "memory.max", "memory.current", {"active_file", "inactive_file"}},
    {"memory",
     "/memory",
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     {"total_active_file", "total_inactive_file"}}};

int64_t LeftIn(const std::string& folder, const CgroupNames& names) {
  const absl::StatusOr<int64_t> limit = ReadNumber(absl::StrCat(folder, "/", names.limit), "");
  const absl::StatusOr<int64_t> used = ReadNumber(absl::StrCat(folder, "/", names.used), "");
  if (!limit.ok() || !used.ok()) return INT64_MAX;
  int64_t files = 0;
  for (const absl::string_view key : names.file_keys) {
    files += ReadNumber(absl::StrCat(folder, "/memory.stat"), key).value_or(0);
  }
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *used - files));
}

// Of the group named there and of all above it. A container may see its own group as the root, and
// the name that it has outside.
int64_t LeftInGroups(std::string group, const std::string& root, const CgroupNames& names) {
  int64_t left = INT64_MAX;
  for (;;) {
    left = std::min(left, LeftIn(absl::StrCat(root, names.folder, group), names));
    if (group.empty()) return left;
    group.resize(group.rfind('/'));
  }
}

// Lines of /proc/self/cgroup: hierarchy:controllers:/group.
int64_t LeftOfCgroups(const MemoryFiles& files) {
  int64_t left = INT64_MAX;
  for (const CgroupNames& names : kCgroups) {
    std::string group;
    std::ifstream lines(files.proc + "/self/cgroup");
    for (std::string line; std::getline(lines, line);) {
      const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
      if (parts.size() == 3 && parts[1] == names.controllers && parts[2].size() > 1) {
        group = parts[2];
      }
    }
    left = std::min(left, LeftInGroups(group, files.cgroup, names));
  }
  return left;
}

// Of shared memory, the system puts together only what has been touched somewhere.
bool UseHugePage(std::byte* page) {
  return madvise(page, 1, MADV_POPULATE_WRITE) == 0 &&
         madvise(page, kHugePageBytes, MADV_COLLAPSE) == 0;
}

}  // namespace

absl::StatusOr<int64_t> AvailableHostBytes(const MemoryFiles& files) {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t free_kib,
                           ReadNumber(files.proc + "/meminfo", "MemAvailable:"));
  return std::min(free_kib * 1024, LeftOfCgroups(files));
}

absl::Status CheckHostRoom(int64_t bytes, absl::string_view or_else, const MemoryFiles& files) {
  if (bytes < kHugePageBytes) return absl::OkStatus();
  const absl::StatusOr<int64_t> available = AvailableHostBytes(files);
  if (!available.ok() || bytes <= *available) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(bytes, " bytes of memory wanted, but ",
                                                   *available, " are available; make it smaller",
                                                   or_else));
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
