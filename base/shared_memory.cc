#include "base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/host_memory.h"
#include "base/log.h"
#include "base/slab.h"
#include "base/status.h"

// Linux 5.1; older headers lack it.
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kvferry {
namespace {

absl::Status Refused(const char* what, int64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("shared memory of ", bytes, " bytes: ", what, ": ", std::strerror(errno)));
}

// Where huge pages can lie: the file's begin at multiples of their size, and so does its mapping.
absl::StatusOr<std::shared_ptr<std::byte>> Map(int fd, int64_t bytes, int protection) {
  const int64_t room = bytes + kHugePageBytes;
  void* const reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return Refused("reserving addresses", bytes);
  auto unmap = [room](std::byte* begin) { munmap(begin, room); };
  const std::shared_ptr<std::byte> all(static_cast<std::byte*>(reserved), unmap);
  std::byte* const begin = all.get() + BytesToHugePage(all.get());
  if (mmap(begin, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    return Refused("mmap", bytes);
  }
  return std::shared_ptr<std::byte>(all, begin);
}

}  // namespace

absl::StatusOr<SharedMemory> SharedMemory::Create(const char* name, int64_t bytes) {
  if (bytes < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("shared memory: bytes is ", bytes, " but must be at least 1"));
  }
  // The kernel gives a memfd of any size and kills who touches more than there is. Private memory
  // it refuses at once; so ask for that first, and give it back.
  KVFERRY_RETURN_IF_ERROR(MapSlab(bytes).status());
  SharedMemory memory;
  memory.bytes = bytes;
  memory.fd = UniqueFd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd.valid()) return Refused("memfd_create", bytes);
  // Beyond it the system sends a signal, which ends a process that has not thought of it.
  rlimit most{};
  if (getrlimit(RLIMIT_FSIZE, &most) == 0 && static_cast<rlim_t>(bytes) > most.rlim_cur) {
    errno = EFBIG;
    return Refused("the limit of a file's size (ulimit -f)", bytes);
  }
  if (ftruncate(memory.fd.get(), bytes) != 0) return Refused("ftruncate", bytes);
  KVFERRY_ASSIGN_OR_RETURN(memory.data, Map(memory.fd.get(), bytes, PROT_READ | PROT_WRITE));
  // After the mapping above, which stays writable.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
  if (fcntl(memory.fd.get(), F_ADD_SEALS, kSeals) != 0) return Refused("sealing", bytes);
  return memory;
}

absl::StatusOr<SharedMemory> SharedMemory::CreateOrPrivate(const char* name, int64_t bytes) {
  absl::StatusOr<SharedMemory> memory = Create(name, bytes);
  if (memory.ok()) return memory;
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> slab, MapSlab(bytes));
  Log().warn("peers on this host cannot read memory of this process: {}",
             memory.status().ToString());
  return SharedMemory{std::move(slab), bytes, UniqueFd()};
}

absl::StatusOr<std::shared_ptr<const std::byte>> MapPeersMemory(const UniqueFd& fd, int64_t bytes) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::FailedPreconditionError("shared memory: the peer could still make it shorter");
  }
  struct stat info {};
  if (fstat(fd.get(), &info) != 0 || bytes <= 0 || info.st_size < bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("shared memory: the peer's has ", info.st_size, " bytes, not ", bytes));
  }
  return Map(fd.get(), bytes, PROT_READ);
}

}  // namespace kvferry
