#pragma once

// What the system says of its memory, and is asked for it. Linux.

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvferry {

// Where the system says what memory there is: elsewhere in tests.
struct MemoryFiles {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// Memory that the system could hand out without swapping: MemAvailable of /proc/meminfo, and what
// this process's control group (v1 or v2), and those that it is in, have left of their limits,
// whichever is least. Pages of files count as free in both, for they can be dropped. UNAVAILABLE
// where the system does not say.
absl::StatusOr<int64_t> AvailableHostBytes(const MemoryFiles& files = {});

// The system gives more than there is, and kills who touches it: RESOURCE_EXHAUSTED naming both
// numbers when fewer bytes are available. Less than kHugePageBytes is not looked at, for looking
// takes longer than making it. `or_else`: what the caller may do besides making it smaller, for the
// error.
absl::Status CheckHostRoom(int64_t bytes, absl::string_view or_else = "",
                           const MemoryFiles& files = {});

// Of x86-64.
inline constexpr int64_t kHugePageBytes = 2 << 20;

// How far the next multiple of it is from there.
inline int64_t BytesToHugePage(const std::byte* from) {
  return static_cast<int64_t>(-reinterpret_cast<uintptr_t>(from) %
                              static_cast<uintptr_t>(kHugePageBytes));
}

// Has the system put this writable memory, as far as it is whole units of kHugePageBytes, into
// pages of that size, with what it holds; such memory takes room at once, touched or not. Returns
// how much of it lies in such pages from now on: less than all, perhaps none, where there is not as
// much memory to be had, or none in one piece without a long search, or before Linux 6.1. Shared
// memory can have them whatever transparent_hugepage/shmem_enabled says, unless that is "deny".
// About 0.1 s for a GiB; a virtual machine may take 2 s, once, until its host has given it the
// memory. Others may use the memory meanwhile.
int64_t UseHugePages(std::byte* begin, int64_t bytes);

}  // namespace kvferry
