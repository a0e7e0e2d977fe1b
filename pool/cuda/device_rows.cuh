#pragma once

// What kernels on token rows have in common.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "pool/cuda/device_numbers.cuh"
#include "pool/kv_layout.h"
#include "pool/token_view.h"

namespace kvferry {
namespace {

// Divides by the same number many times, for which a GPU has no instruction: by the reciprocal as a
// fraction of 32 bits and a 1 before them, as Granlund and Montgomery do it. The halves of each
// 8 bytes are in the order in which no counts look like a pointer (tests/pool_cuda/emulated).
struct Divisor {
  uint32_t fraction, shift;
  uint32_t number, first_shift;

  // `number` must lie in [1, 2^31].
  static Divisor Of(int64_t number) {
    uint32_t bits = 0;
    while (int64_t{1} << bits < number) ++bits;
    const int64_t above = (int64_t{1} << bits) - number;
    return {static_cast<uint32_t>((above << 32) / number + 1), bits == 0 ? 0 : bits - 1,
            static_cast<uint32_t>(number), bits == 0 ? 0U : 1U};
  }
  __device__ uint32_t Into(uint32_t value) const {
    const uint32_t part = __umulhi(fraction, value);
    return (part + ((value - part) >> first_shift)) >> shift;
  }
};

// A view and its slots in words, the unit that one thread moves: a value, or some that lie side
// by side.
struct Side {
  std::byte* data;
  const int32_t* slots;
  int64_t page_stride, token_stride, head_stride, word_stride;  // Bytes.
  Divisor page_size;
  uint32_t num_slots;

  // Negative ones become large ones, which no view has.
  __device__ uint32_t slot(uint32_t i) const {
    return slots == nullptr ? i : static_cast<uint32_t>(slots[i]);
  }
  __device__ bool Has(uint32_t slot) const { return slot < num_slots; }
  __device__ std::byte* row(uint32_t slot) const {
    const uint32_t page = page_size.Into(slot);
    return data + page * page_stride + (slot - page * page_size.number) * token_stride;
  }
};

inline Side SideOf(const TokenView& view, const int32_t* slots, int64_t values_per_word) {
  // Slots and rows are counted in int32_t, so there may as well be no more, in all and in a page.
  constexpr int64_t kMostSlots = int64_t{1} << 31;
  return {view.data,
          slots,
          view.page_stride,
          view.token_stride,
          view.head_stride,
          view.value_stride * values_per_word,
          Divisor::Of(std::min(view.page_size, kMostSlots)),
          static_cast<uint32_t>(std::min(view.num_slots, kMostSlots))};
}

// What the device reads and writes in one go.
template <size_t kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = uint8_t;
};
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

// Values that are one word.
template <typename Value, int kCount>
struct Group {
  Value values[kCount];
};

// Whether words are aligned is for who launches the kernel to find out: a GPU stops a kernel at a
// word across its own alignment. Others go byte by byte, without a look at each address: beside a
// word that is written at once where it happens to be aligned, compilers may take the two for the
// same and drop the bytes.
template <bool kAligned, typename Value>
__device__ Value Load(const std::byte* at) {
  if constexpr (kAligned) {
    using Word = typename WordOf<sizeof(Value)>::Type;
    return __builtin_bit_cast(Value, *reinterpret_cast<const Word*>(at));
  } else {
    Value value;
    memcpy(&value, at, sizeof value);
    return value;
  }
}

template <bool kAligned, typename Value>
__device__ void Store(std::byte* at, const Value& value) {
  if constexpr (kAligned) {
    using Word = typename WordOf<sizeof(Value)>::Type;
    *reinterpret_cast<Word*>(at) = __builtin_bit_cast(Word, value);
  } else {
    memcpy(at, &value, sizeof value);
  }
}

// Every head of every slot begins at a multiple of `bytes`, a power of two.
inline bool HeadsAreAligned(const TokenView& view, int64_t bytes) {
  const auto misaligned = [bytes](int64_t offset) { return offset % bytes != 0; };
  return !misaligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data))) &&
         !misaligned(view.page_stride) && (view.page_size == 1 || !misaligned(view.token_stride)) &&
         (view.num_heads == 1 || !misaligned(view.head_stride));
}

// So does every value.
inline bool ValuesAreAligned(const TokenView& view) {
  const int64_t bytes = DTypeBytes(view.dtype);
  return HeadsAreAligned(view, bytes) && (view.head_dim == 1 || view.value_stride % bytes == 0);
}

// Every head is a number of aligned words of `values` values without gaps.
inline bool HeadsAreWords(const TokenView& view, int64_t values) {
  return view.HeadsAreDense() && view.head_dim % values == 0 &&
         HeadsAreAligned(view, values * DTypeBytes(view.dtype));
}

// Calls fn with the format of `dtype`.
template <typename Fn>
absl::Status WithFormat(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(casts_cuda::Float32());
    case DType::kFloat16:
      return fn(casts_cuda::Float16());
    case DType::kBFloat16:
      return fn(casts_cuda::BFloat16());
    case DType::kFloat8E4M3:
      return fn(casts_cuda::Float8E4M3());
    case DType::kFloat8E5M2:
      return fn(casts_cuda::Float8E5M2());
    case DType::kUint8:
      break;
  }
  return absl::InternalError("token copy: uint8 holds no numbers");  // CheckRowsFit() saw to it.
}

// Blocks for `count` things, so many for each; a kernel takes more than one turn where there are
// not as many blocks.
inline cudaLaunchConfig_t GridOf(int64_t count, int64_t for_each_block, int64_t block_threads,
                                 cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 65536;
  const int64_t blocks = (count + for_each_block - 1) / for_each_block;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<uint32_t>(std::min(blocks, kMaxBlocks)));
  config.blockDim = dim3(static_cast<uint32_t>(block_threads));
  config.stream = stream;
  return config;
}

}  // namespace
}  // namespace kvferry
