#pragma once

// What kernels on token rows have in common.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "pool/kv_layout.h"
#include "pool/token_view.h"

#define KVFERRY_CASTS_NAMESPACE casts_cuda
#define KVFERRY_CASTS_TARGET __device__
#include "pool/number_formats_impl.h"

namespace kvferry {
namespace {

// A view and its slots in words, the unit that one thread moves: a value, or some that lie side
// by side.
struct Side {
  std::byte* data;
  const int32_t* slots;
  int64_t num_slots, page_size;
  int64_t page_stride, token_stride, head_stride, word_stride;  // Bytes.

  __device__ int64_t slot(int64_t i) const { return slots == nullptr ? i : slots[i]; }
  __device__ bool Has(int64_t slot) const { return slot >= 0 && slot < num_slots; }
  __device__ std::byte* row(int64_t slot) const {
    return data + slot / page_size * page_stride + slot % page_size * token_stride;
  }
};

inline Side SideOf(const TokenView& view, const int32_t* slots, int64_t values_per_word) {
  return {view.data,        slots,
          view.num_slots,   view.page_size,
          view.page_stride, view.token_stride,
          view.head_stride, view.value_stride * values_per_word};
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

// What is not known to be aligned may lie at any address, which the device reads byte by byte only.
template <bool kAligned, typename Value>
__device__ Value Load(const std::byte* at) {
  typename WordOf<sizeof(Value)>::Type word;
  if (kAligned || reinterpret_cast<uintptr_t>(at) % sizeof word == 0) {
    word = *reinterpret_cast<const decltype(word)*>(at);
  } else {
    memcpy(&word, at, sizeof word);
  }
  return __builtin_bit_cast(Value, word);
}

template <bool kAligned, typename Value>
__device__ void Store(std::byte* at, const Value& value) {
  using Word = typename WordOf<sizeof(Value)>::Type;
  const Word word = __builtin_bit_cast(Word, value);
  if (kAligned || reinterpret_cast<uintptr_t>(at) % sizeof word == 0) {
    *reinterpret_cast<Word*>(at) = word;
  } else {
    memcpy(at, &word, sizeof word);
  }
}

// value * multiply / divide. The device's arithmetic makes all NaNs one; the processor's keeps them
// apart, made quiet.
__device__ inline float Scaled(float value, float multiply, float divide) {
  constexpr uint32_t kQuietBit = 0x00400000;
  const uint32_t bits = casts_cuda::AsBits(value);
  if ((bits & casts_cuda::kMagnitude) > casts_cuda::kInfinity) {
    return casts_cuda::AsFloat(bits | kQuietBit);
  }
  return __fdiv_rn(__fmul_rn(value, multiply), divide);
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

// Threads for `num_threads`, in blocks of `block_threads`; a kernel takes more than one turn where
// there are not as many blocks.
inline cudaLaunchConfig_t GridOf(int64_t num_threads, int64_t block_threads, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 65536;
  const int64_t blocks = (num_threads + block_threads - 1) / block_threads;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<uint32_t>(std::min(blocks, kMaxBlocks)));
  config.blockDim = dim3(static_cast<uint32_t>(block_threads));
  config.stream = stream;
  return config;
}

}  // namespace
}  // namespace kvferry
