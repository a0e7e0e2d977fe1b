#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pool/kv_pool.h"

namespace kvferry {

// The memory that a pool's pages lie in, as peers are told of it: one row of bytes. All of it, where
// the pool lies in shared memory; else its buffers in the order of their addresses, those that touch
// as one. Immutable; does not keep the pool alive.
class PoolRegions {
 public:
  using Region = std::span<const std::byte>;

  explicit PoolRegions(const KvPool& pool);

  const std::vector<Region>& regions() const { return regions_; }
  // Where in the row a byte of a page lies. What lies together in a page lies together there.
  uint64_t OffsetOf(const std::byte* byte) const;

 private:
  std::vector<Region> regions_;
  std::vector<uint64_t> offsets_;  // Of each region in the row.
};

}  // namespace kvferry
