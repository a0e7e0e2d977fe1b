#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "pool/pool_memory.h"
#include "transport/slots.h"

namespace kvferry {

// Memory of the device that a pool lies on, in equal chunks, where its pages are gathered for peers
// of this machine that have mapped it: those that cannot have the pages as they lie in the pool.
// Never more than it was made of. Not thread-safe.
class DeviceArena {
 public:
  // Of these bytes, or somewhat less. Long chunks, as each of them has to be asked for and waited
  // for on both sides; a few of them, for one to be gathered while another one is read.
  static constexpr int64_t kNumChunks = 8;
  // Errors of PoolMemory::Allocate() and Share().
  static absl::StatusOr<std::unique_ptr<DeviceArena>> Create(const PoolMemory& memory,
                                                             int64_t bytes);

  // An index in [0, kNumChunks), or -1 when all are taken.
  int64_t Take() { return slots_.Take(); }
  void GiveBack(int64_t chunk) { slots_.GiveBack(chunk); }
  int64_t num_free() const { return slots_.num_free(); }
  std::span<std::byte> Bytes(int64_t chunk) const {
    return {memory_.get() + OffsetOf(chunk), static_cast<size_t>(chunk_bytes_)};
  }
  int64_t OffsetOf(int64_t chunk) const { return chunk * chunk_bytes_; }
  int64_t chunk_bytes() const { return chunk_bytes_; }

  // What peers map, part after part.
  const std::vector<PoolMemory::SharedPart>& parts() const { return parts_; }

 private:
  DeviceArena(std::shared_ptr<std::byte> memory, int64_t chunk_bytes,
              std::vector<PoolMemory::SharedPart> parts);

  const std::shared_ptr<std::byte> memory_;
  const int64_t chunk_bytes_;
  const std::vector<PoolMemory::SharedPart> parts_;
  Slots slots_{kNumChunks};
};

}  // namespace kvferry
