#pragma once

// Where Python's pools lie: names of memory, and what DLPack calls it.

#include <memory>
#include <string>

#include "pool/pool_memory.h"
#include "python/given_array.h"

namespace kvferry {

// Null, a pool's own choice of host memory, for "host"; a GPU's for "cuda:0" and so on. Throws
// INVALID_ARGUMENT for any other name, UNAVAILABLE where kvferry was built without CUDA. Whether
// there is such a device shows when it is used.
std::shared_ptr<const PoolMemory> MemoryNamed(const std::string& name);

// The name of a pool's memory.
std::string NameOf(const PoolMemory& memory);

struct DlpackDevice {
  int type = 0;
  int id = 0;

  bool operator==(const DlpackDevice&) const = default;
};
DlpackDevice DeviceOf(const PoolMemory& memory);
template <typename... Args>
DlpackDevice DeviceOf(const GivenArray<Args...>& array) {
  return {array.device_type(), array.device_id()};
}

// The memory that a caller's tensors on `device` lie in, for pools that adopt them. Throws
// INVALID_ARGUMENT for what is no memory of a pool, UNAVAILABLE as MemoryNamed().
std::shared_ptr<const PoolMemory> MemoryOn(const DlpackDevice& device);

// Throws INVALID_ARGUMENT unless `what`, a tensor on `device`, lies in `memory`.
void CheckLiesIn(const std::string& what, const DlpackDevice& device, const PoolMemory& memory);

// Throws INVALID_ARGUMENT unless rows on `device` can go to a pool in `memory`: they lie on the
// host or on its own device.
void CheckRowsReach(const DlpackDevice& device, const PoolMemory& memory);

}  // namespace kvferry
