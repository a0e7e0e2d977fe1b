#pragma once

// Where the rows of token slots lie in one tensor, whatever the order of its dimensions.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/kv_layout.h"
#include "pool/kv_pool.h"

namespace kvferry {

// INVALID_ARGUMENT when the page format is neither NHD nor HND: only the engine knows where a token
// lies then.
absl::Status CheckTokensCanBeFound(const KvLayout& layout);

// One dimension of an array; its stride is in bytes.
struct ArrayDim {
  int64_t size = 0;
  int64_t stride = 0;

  bool operator==(const ArrayDim&) const = default;
};
// The same array with as few dimensions as there are: without those of size 1, and neighbours that
// lie evenly as one.
std::vector<ArrayDim> Merged(std::span<const ArrayDim> dims);
// "3 x 480, 5 x 96", for errors.
std::string SizesByStrides(std::span<const ArrayDim> dims);

// A tensor [num_slots, num_heads, head_dim] of token rows. Value (s, h, d) lies at
//   data + (s / page_size) * page_stride + (s % page_size) * token_stride + h * head_stride
//        + d * value_stride                                                  (strides in bytes)
// and stands for itself times `scale`: quantised caches store x / scale. A value type that owns
// nothing: the memory must outlive it.
struct TokenView {
  std::byte* data = nullptr;
  DType dtype = DType::kUint8;
  int64_t num_slots = 0;
  int64_t page_size = 1;
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t value_stride = 0;
  float scale = 1;

  // [num_slots, num_heads, head_dim] without gaps.
  static TokenView Packed(std::byte* data, DType dtype, int64_t num_slots, int64_t num_heads,
                          int64_t head_dim);
  // The values of an array, the last index running fastest, as rows of [num_slots, num_heads,
  // head_dim]: of as many, in any arrangement of dimensions. Strides are in bytes. INVALID_ARGUMENT
  // when the array has another number of values, or rows in more than two nested steps.
  static absl::StatusOr<TokenView> OfArray(std::byte* data, DType dtype,
                                           std::span<const ArrayDim> dims, int64_t num_slots,
                                           int64_t num_heads, int64_t head_dim);
  // The slots of one buffer of a pool: slot = page * page_size + place in the page.
  // CheckTokensCanBeFound(), and OUT_OF_RANGE when there is no such layer or tensor.
  static absl::StatusOr<TokenView> Of(const KvPool& pool, int64_t layer, int64_t tensor);

  // Values [first, first + count) of each head, e.g. the value part of an MLA latent or the V half
  // of a fused K and V. They must lie inside head_dim.
  TokenView Slice(int64_t first, int64_t count) const;

  // From its first byte to its last, whatever the signs of the strides; num_slots must be positive.
  std::span<std::byte> Hull() const;

  std::byte* row(int64_t slot) const {
    return data + slot / page_size * page_stride + slot % page_size * token_stride;
  }
  int64_t head_bytes() const { return head_dim * DTypeBytes(dtype); }
  int64_t row_bytes() const { return num_heads * head_bytes(); }
  // The values of a head, and those of a row, lie without gaps.
  bool HeadsAreDense() const { return value_stride == DTypeBytes(dtype); }
  bool RowsAreDense() const { return HeadsAreDense() && head_stride == head_bytes(); }
  // Neighbouring slots lie side by side, across pages too.
  bool SlotsAreDense() const {
    return RowsAreDense() && token_stride == row_bytes() && page_stride == page_size * token_stride;
  }

  bool operator==(const TokenView&) const = default;
};

}  // namespace kvferry
