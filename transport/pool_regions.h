#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pool/kv_pool.h"

namespace kvferry {

// The memory that a pool's pages lie in, as peers are told of it: one row of bytes. All of it,
// where the pool lies in shared memory; else its buffers in the order of their addresses, those
// that touch as one. Immutable; does not keep the pool alive.
class PoolRegions {
 public:
  using Region = std::span<const std::byte>;

  explicit PoolRegions(const KvPool& pool);

  const std::vector<Region>& regions() const { return regions_; }
  // Whether each buffer of the pool lies in one of these parts, which one after another are the
  // row.
  bool EachInOne(const KvPool& pool, std::span<const PoolMemory::SharedPart> parts) const;
  // Where in the row a byte of a page lies. What lies together in a page lies together there.
  uint64_t OffsetOf(const std::byte* byte) const {
    size_t region = 0;
    return OffsetOf(byte, &region);
  }
  // The same for who asks for many, most of which lie in the `region` that the last one did; 0 at
  // first.
  uint64_t OffsetOf(const std::byte* byte, size_t* region) const {
    if (Into(*region, byte) >= regions_[*region].size()) *region = RegionOf(byte);
    return offsets_[*region] + Into(*region, byte);
  }

 private:
  // How far behind the region's first byte; far beyond all regions for one before it.
  uint64_t Into(size_t region, const std::byte* byte) const {
    return reinterpret_cast<uintptr_t>(byte) - reinterpret_cast<uintptr_t>(regions_[region].data());
  }
  size_t RegionOf(const std::byte* byte) const;

  std::vector<Region> regions_;
  std::vector<uint64_t> offsets_;  // Of each region in the row.
};

}  // namespace kvferry
