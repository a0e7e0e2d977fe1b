#pragma once

// Host memory that a GPU can reach.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/kv_pool.h"

namespace kvferry {

// Host memory that is pinned while this lives: the GPU reads and writes it at the same addresses,
// and copies of it are asynchronous; they must have run before it is destroyed.
class HostPin {
 public:
  ~HostPin();
  HostPin(const HostPin&) = delete;
  HostPin& operator=(const HostPin&) = delete;

 private:
  friend absl::StatusOr<std::unique_ptr<HostPin>> PinHostMemory(std::span<const BufferInfo>,
                                                                std::shared_ptr<const void>);
  explicit HostPin(std::shared_ptr<const void> owner) : owner_(std::move(owner)) {}

  absl::Status Pin(std::span<std::byte> range);

  const std::shared_ptr<const void> owner_;
  std::vector<std::byte*> pinned_;
  int device_ = 0;  // Where that was done.
};

// Pins the buffers of a pool or block cache in host memory (buffer_infos()), for all devices;
// `owner` is kept alive until they are unpinned. Whole memory pages are pinned, and take their room
// at once even where nothing was ever written.
//
// INVALID_ARGUMENT for a buffer without an address or bytes, ALREADY_EXISTS when some of it is
// pinned already, UNAVAILABLE naming the reason when there is no device or it would see the memory
// at another address, RESOURCE_EXHAUSTED when the system refuses. Nothing stays pinned then.
absl::StatusOr<std::unique_ptr<HostPin>> PinHostMemory(std::span<const BufferInfo> buffers,
                                                       std::shared_ptr<const void> owner);

// All of these bytes are pinned by one HostPin.
bool IsPinned(std::span<const std::byte> bytes);
// Any of them is pinned by a HostPin.
bool IsAnyPinned(std::span<const std::byte> bytes);

}  // namespace kvferry
