#pragma once

// Rows of numbers, as callers have them: arrays in any arrangement of their dimensions.

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pool/kv_layout.h"
#include "pool/pool_memory.h"
#include "pool/token_view.h"
#include "python/convert.h"
#include "python/given_array.h"

namespace kvferry {

// Of any strides and any device.
using RowInput = GivenArray<nanobind::ro>;

DType FromDlpack(const nanobind::dlpack::dtype& dtype);

// What arrays hold, for as long as both live. What no view can have as it lies is copied, on the
// host.
class GivenRows {
 public:
  // Any array whose values are those of num_rows rows, for a pool in `memory`. Throws
  // INVALID_ARGUMENT for one of another size or dtype, on a device that is not the pool's, or on a
  // device where it would have to be copied.
  void Add(const RowInput& array, int64_t num_rows, int64_t num_heads, int64_t head_dim,
           const PoolMemory& memory);
  // What was added.
  std::span<const TokenView> views() const { return views_; }

 private:
  // A copy of an array of the host's, without gaps.
  const std::byte* Packed(const RowInput& array);

  std::vector<TokenView> views_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;
};

// rows[i] as rows of parts[i], which have num_heads and head_dim.
template <typename Part>
GivenRows RowsFor(const std::vector<Part>& parts, const SlotsInput& slots,
                  const std::vector<RowInput>& rows, const PoolMemory& memory) {
  GivenRows given;
  for (size_t i = 0; i < rows.size(); ++i) {
    // Too many are refused by those who take them; until then any shape will do.
    const Part& part = parts[std::min(i, parts.size() - 1)];
    given.Add(rows[i], static_cast<int64_t>(slots.size()), part.num_heads, part.head_dim, memory);
  }
  return given;
}

}  // namespace kvferry
