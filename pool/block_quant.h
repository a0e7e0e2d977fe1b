#pragma once

// Rows stored as small codes with a scale for each block of neighbouring values: the 4-bit KV cache
// and the index keys of sparse attention in SGLang. A row is the values of all its heads, one after
// the other; its last block may not be short.

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/thread_pool.h"
#include "pool/kv_layout.h"
#include "pool/pool_memory.h"
#include "pool/token_view.h"

namespace kvferry {

enum class BlockFormat : uint8_t {
  // OCP Microscaling with blocks of 16, as in SGLang's MHATokenToKVPoolFP4: e2m1 codes (0, .5, 1,
  // 1.5, 2, 3, 4, 6 and their negatives), two a byte with the even value in the low half; scales
  // are powers of two, stored as exponent + 127 (e8m0), the smallest that lets no value overflow.
  kMxfp4,
  // float8_e4m3fn codes in blocks of 128 with a float32 scale each, as for DeepSeek V3.2's index
  // keys: the block's largest magnitude / 448.
  kFp8Block128,
};

struct BlockFormatInfo {
  int64_t block_values;  // Values that share a scale.
  int64_t codes_bits;    // Of one value.
  DType codes_dtype;     // uint8 for two codes a byte.
  DType scales_dtype;

  // What stands for so many values in their tensor: two codes of 4 bits are a byte.
  int64_t CodesIn(int64_t values) const {
    return values * codes_bits / 8 / DTypeBytes(codes_dtype);
  }
};
BlockFormatInfo InfoOf(BlockFormat format);

// What a layout with quantised tensors looks like: `name` with its codes, [num_heads, head_dim] (or
// head_dim / 2 bytes), and `name`_scale with [1, num_heads * head_dim / block_values].
// INVALID_ARGUMENT unless a row is a positive multiple of a block and head_dim of a byte.
absl::StatusOr<std::vector<KvTensor>> QuantizedTensors(BlockFormat format, absl::string_view name,
                                                       int64_t num_heads, int64_t head_dim);

// Rows on their way into codes and scales, or back, that have been checked: TokenCopy for blocks.
// The list and the memory of the views must outlive it. Thread-compatible.
class QuantizedCopy {
 public:
  // Row slots[i] of codes and scales becomes row i of `rows` ([slots.size(), heads, dim] floats of
  // any dtype), quantised. Values round to the nearest code, ties to even; a block of zeros has
  // scale 0 (e8m0: the smallest); NaN becomes the largest magnitude in mxfp4, which has no NaN, and
  // infinity the largest magnitude everywhere. A slot that stands twice keeps the later row; on a
  // device or with threads, parts of both, whose scales need not belong to their codes.
  //
  // INVALID_ARGUMENT when shapes or dtypes do not fit each other, OUT_OF_RANGE naming a slot.
  static absl::StatusOr<QuantizedCopy> PlanStore(BlockFormat format, const TokenView& rows,
                                                 const TokenView& codes, const TokenView& scales,
                                                 std::span<const int32_t> slots);
  // The other way: row i of `rows` becomes the values of row slots[i], rounded to rows' dtype.
  static absl::StatusOr<QuantizedCopy> PlanLoad(BlockFormat format, const TokenView& codes,
                                                const TokenView& scales,
                                                std::span<const int32_t> slots,
                                                const TokenView& rows);

  // What it does, for who does it otherwise (PoolMemory).
  BlockFormat format() const { return format_; }
  bool stores() const { return stores_; }
  const TokenView& rows() const { return rows_; }
  const TokenView& codes() const { return codes_; }
  const TokenView& scales() const { return scales_; }
  std::span<const int32_t> slots() const { return slots_; }

  // With `threads`, which may be null, large copies are spread over them; returns when all is done.
  // Allocates nothing.
  void Run(ThreadPool* threads = nullptr) const;

 private:
  QuantizedCopy(BlockFormat format, bool stores, const TokenView& rows, const TokenView& codes,
                const TokenView& scales, std::span<const int32_t> slots)
      : format_(format),
        stores_(stores),
        rows_(rows),
        codes_(codes),
        scales_(scales),
        slots_(slots) {}
  absl::Status Check() const;
  // Rows [begin, end) of the list.
  void RunPart(int64_t begin, int64_t end) const;

  BlockFormat format_;
  bool stores_;
  TokenView rows_, codes_, scales_;
  std::span<const int32_t> slots_;
};

// Plan and run in one, by the memory that codes and scales lie in. `threads`, which may be null,
// help. Errors as for planning, nothing is written then, and as for PoolMemory::RunQuantized().
absl::Status StoreQuantized(BlockFormat format, const TokenView& rows, const TokenView& codes,
                            const TokenView& scales, std::span<const int32_t> slots,
                            const PoolMemory& memory = *HostMemory(),
                            ThreadPool* threads = nullptr);
absl::Status LoadQuantized(BlockFormat format, const TokenView& codes, const TokenView& scales,
                           std::span<const int32_t> slots, const TokenView& rows,
                           const PoolMemory& memory = *HostMemory(), ThreadPool* threads = nullptr);

}  // namespace kvferry
