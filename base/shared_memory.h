#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace kvferry {

// Memory that other processes can read and only this one can write: a memfd, mapped writable here
// and sealed, so that whoever is handed its descriptor can neither resize it nor map it writable.
// Zeroed, aligned to kHugePageBytes, takes no room until it is touched (or UseHugePages() is
// asked).
struct SharedMemory {
  std::shared_ptr<std::byte> data;
  int64_t bytes = 0;
  UniqueFd fd;

  // RESOURCE_EXHAUSTED when the system refuses. `name` shows in /proc/PID/maps.
  static absl::StatusOr<SharedMemory> Create(const char* name, int64_t bytes);
  // The same, or memory of this process alone (no fd) where the system has none to share: a line
  // in the log says so.
  static absl::StatusOr<SharedMemory> CreateOrPrivate(const char* name, int64_t bytes);
};

// The first `bytes` of a peer's memfd, read-only. FAILED_PRECONDITION when it is shorter, or could
// still be made so: reading beyond its end would kill this process.
absl::StatusOr<std::shared_ptr<const std::byte>> MapPeersMemory(const UniqueFd& fd, int64_t bytes);

}  // namespace kvferry
