#include "base/slab.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace kvferry {

absl::StatusOr<std::shared_ptr<std::byte>> MapSlab(int64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system refused ", bytes, " bytes of memory: ", std::strerror(errno)));
  }
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(memory),
                                    [bytes](std::byte* slab) { munmap(slab, bytes); });
}

}  // namespace kvferry
