#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "pool/pool_memory.h"

namespace kvferry {

// PoolMemory::Share() and MapShared() of GPUs, by CUDA's handles for other processes, which there
// are of memory from cudaMalloc(), as engines' caches mostly are, but not of what is mapped by hand
// (PyTorch's expandable segments) or comes from a stream's pool. The device must be the current
// one; memory of another one is mapped where the two reach each other.
absl::StatusOr<std::vector<PoolMemory::SharedPart>> ShareCuda(std::span<const std::byte> bytes);
absl::StatusOr<std::shared_ptr<const std::byte>> MapSharedCuda(absl::string_view name,
                                                               int64_t bytes, int device);

}  // namespace kvferry
