#pragma once

// What the bytes of a pool's values stand for, and how they become another side's, where the two
// have other dtypes or other scales of them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/kv_layout.h"
#include "pool/kv_pool.h"
#include "pool/page_runs.h"

namespace kvferry {

// A value type.
struct ValueFormat {
  std::vector<DType> dtypes;  // Of each tensor. Empty: as the pool's own.
  // By KvLayout::buffer_index: what is stored stands for itself times this (TokenView). Empty: 1
  // everywhere.
  std::vector<float> scales;

  bool operator==(const ValueFormat&) const = default;
};

// INVALID_ARGUMENT unless there are none, or as many as buffers, each finite and above 0: names the
// first that is not.
absl::Status CheckScales(const KvLayout& layout, std::span<const float> scales);
// Of pages of that layout, with those scales.
ValueFormat ValueFormatOf(const KvLayout& layout, std::span<const float> scales);
// Whether two sides with as many tensors have them of the same dtypes.
bool SameDTypes(const KvLayout& one, const KvLayout& other);
// OK when ValueCasts can make values of the one out of those of the other, if they are alike in all
// else. INVALID_ARGUMENT says why not.
absl::Status CheckCastable(const KvLayout& one, const KvLayout& other);

// Of what pages hold, the values as another side has them. Immutable and thread-safe.
class ValueCasts {
 public:
  // From pages of that layout, whose values are `own` (CheckScales() has passed its scales; its
  // dtypes are the layout's or none). Null: bytes can move as they are. INVALID_ARGUMENT, naming
  // what is wrong, when `wanted` does not have the layout's number of tensors or buffers, has a
  // scale that is none, or a dtype that there is no cast to.
  static absl::StatusOr<std::shared_ptr<const ValueCasts>> Make(const KvLayout& layout,
                                                                const ValueFormat& own,
                                                                const ValueFormat& wanted);

  // What `own_bytes` of that buffer become.
  int64_t Bytes(int64_t buffer, int64_t own_bytes) const;

  // A window of the items of one buffer, as the other side has them, laid end to end: Bytes() each.
  struct Window {
    int64_t buffer;  // KvLayout::buffer_index.
    BufferInfo from;
    int64_t offset;  // Of the window; may lie inside of a value, and so may its end.
    std::span<std::byte> packed;
  };
  // Casts the windows into where they are packed, in memory `to`: the host's, or that of the
  // buffers, which lie in `memory`. `items`, and what is asked of them, lie inside of the buffers.
  // Errors are those of PoolMemory::RunApart() and MoveApart().
  absl::Status Gather(const PoolMemory& memory, const PageRuns& items,
                      std::span<const Window> windows, const PoolMemory& to) const;

 private:
  struct Cast {
    DType from, to;
    float from_scale, to_scale;
  };
  class Copies;

  explicit ValueCasts(std::vector<Cast> casts) : casts_(std::move(casts)) {}

  std::vector<Cast> casts_;  // By KvLayout::buffer_index.
};

}  // namespace kvferry
