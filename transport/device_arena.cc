#include "transport/device_arena.h"

#include <utility>

#include "base/status.h"

namespace kvferry {

absl::StatusOr<std::unique_ptr<DeviceArena>> DeviceArena::Create(const PoolMemory& memory,
                                                                 int64_t bytes) {
  // As kernels like their memory to begin.
  constexpr int64_t kAlignment = 256;
  const int64_t chunk_bytes = bytes / kNumChunks / kAlignment * kAlignment;
  const int64_t all_bytes = kNumChunks * chunk_bytes;
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> data, memory.Allocate(all_bytes));
  KVFERRY_ASSIGN_OR_RETURN(std::vector<PoolMemory::SharedPart> parts,
                           memory.Share({data.get(), static_cast<size_t>(all_bytes)}));
  return std::unique_ptr<DeviceArena>(
      new DeviceArena(std::move(data), chunk_bytes, std::move(parts)));
}

DeviceArena::DeviceArena(std::shared_ptr<std::byte> memory, int64_t chunk_bytes,
                         std::vector<PoolMemory::SharedPart> parts)
    : memory_(std::move(memory)), chunk_bytes_(chunk_bytes), parts_(std::move(parts)) {}

}  // namespace kvferry
