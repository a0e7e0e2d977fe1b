#pragma once

// Numbers of token rows on the device: scaled and converted to the bits that the processor makes.
//
// A number is decoded, multiplied, divided and encoded. Division by IEEE's rules and encoding by
// number_formats_impl.h take more instructions than a GPU has time for while memory brings the next
// number. So there is a short way for all numbers but very large and very small ones and NaNs, and
// those take the long way. A word of numbers takes the long one as a whole.

#include <cmath>
#include <cstdint>
#include <type_traits>

#define KVFERRY_CASTS_NAMESPACE casts_cuda
#define KVFERRY_CASTS_TARGET __device__
#include "pool/number_formats_impl.h"

namespace kvferry {
namespace {

// The long way: value * multiply / divide. The device's arithmetic makes all NaNs one; the
// processor's keeps them apart, made quiet.
__device__ inline float Scaled(float value, float multiply, float divide) {
  constexpr uint32_t kQuietBit = 0x00400000;
  const uint32_t bits = casts_cuda::AsBits(value);
  if ((bits & casts_cuda::kMagnitude) > casts_cuda::kInfinity) {
    return casts_cuda::AsFloat(bits | kQuietBit);
  }
  return __fdiv_rn(__fmul_rn(value, multiply), divide);
}

// The short way to divide by one number many times.
struct Division {
  float divide, reciprocal;
  float most;  // Larger magnitudes go the long way; below 0 when all of them must.

  // With divisors and numbers in these ranges no step of operator() overflows, nor is one subnormal
  // unless the quotient is far below what the formats of 16 bits and less but bfloat16 tell from 0.
  static constexpr float kMost = 0x1p50F, kLeast = 0x1p-50F;
  static constexpr float kMostDivisor = 0x1p70F, kLeastDivisor = 0x1p-70F;

  __host__ __device__ static Division By(float divide) {
    const bool takes = divide >= kLeastDivisor && divide <= kMostDivisor;
    return {divide, 1 / divide, takes ? kMost : -1.0F};
  }

  // Whether the quotient, encoded as To, has the right bits. Not for NaN.
  template <typename To>
  __device__ bool Takes(float value) const {
    constexpr bool kHasTinyNumbers =
        std::is_same_v<To, casts_cuda::Float32> || std::is_same_v<To, casts_cuda::BFloat16>;
    const bool tiny = kHasTinyNumbers && fabsf(value) < kLeast && value != 0;
    return fabsf(value) <= most && !tiny;
  }

  // Rounded as by IEEE: the first correction leaves one of the two floats beside the quotient, from
  // which the second finds the nearest (Markstein's theorem). Errors are subtracted the way round
  // that leaves -0 its sign.
  __device__ float operator()(float value) const {
    float quotient = __fmul_rn(value, reciprocal);
    for (int i = 0; i < 2; ++i) {
      const float too_much = __fmaf_rn(divide, quotient, -value);
      quotient = __fmaf_rn(too_much, -reciprocal, quotient);
    }
    return quotient;
  }
};

// Decodes two values that stand for finite numbers; others become some number that no Division
// takes.
template <typename From>
__device__ inline void DecodeTwo(const typename From::Stored* stored, float* values) {
#ifdef __CUDA_ARCH__
  const auto from_half = [](uint32_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(half)));
    return value;
  };
  if constexpr (std::is_same_v<From, casts_cuda::Float16>) {
    values[0] = from_half(stored[0]);
    values[1] = from_half(stored[1]);
    return;
  }
  // A half without the last 8 bits of its mantissa.
  if constexpr (std::is_same_v<From, casts_cuda::Float8E5M2>) {
    values[0] = from_half(uint32_t{stored[0]} << 8);
    values[1] = from_half(uint32_t{stored[1]} << 8);
    return;
  }
#if __CUDA_ARCH__ >= 890
  if constexpr (std::is_same_v<From, casts_cuda::Float8E4M3>) {
    const auto both = static_cast<uint16_t>(stored[0] | stored[1] << 8);
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(both));
    values[0] = from_half(halves & 0xffff);
    values[1] = from_half(halves >> 16);
    return;
  }
#endif
#endif
  values[0] = From::Decode(stored[0]);
  values[1] = From::Decode(stored[1]);
}

// Encodes two finite numbers. The device's conversions round to the nearest, ties to even, and keep
// signs, as ours do; those to 8 bits saturate.
template <typename To>
__device__ inline void EncodeTwo(const float* values, typename To::Stored* stored) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<To, casts_cuda::BFloat16>) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(values[1]), "f"(values[0]));
    stored[0] = static_cast<uint16_t>(both);
    stored[1] = static_cast<uint16_t>(both >> 16);
    return;
  }
  if constexpr (std::is_same_v<To, casts_cuda::Float16>) {
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(values[1]), "f"(values[0]));
    stored[0] = static_cast<uint16_t>(both);
    stored[1] = static_cast<uint16_t>(both >> 16);
    return;
  }
#if __CUDA_ARCH__ >= 890
  if constexpr (sizeof(typename To::Stored) == 1) {
    uint16_t both;
    if constexpr (std::is_same_v<To, casts_cuda::Float8E4M3>) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(values[1]), "f"(values[0]));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(values[1]), "f"(values[0]));
    }
    stored[0] = static_cast<uint8_t>(both);
    stored[1] = static_cast<uint8_t>(both >> 8);
    return;
  }
#endif
#endif
  stored[0] = static_cast<typename To::Stored>(To::Encode(values[0]));
  stored[1] = static_cast<typename To::Stored>(To::Encode(values[1]));
}

// The short way for kValues numbers at once, an even number or one.
template <typename From, int kValues>
__device__ inline void DecodeFinite(const typename From::Stored* stored, float* values) {
  if constexpr (kValues == 1) {
    values[0] = From::Decode(stored[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kValues; i += 2) DecodeTwo<From>(stored + i, values + i);
  }
}

template <typename To, int kValues>
__device__ inline void EncodeFinite(const float* values, typename To::Stored* stored) {
  if constexpr (kValues == 1) {
    stored[0] = static_cast<typename To::Stored>(To::Encode(values[0]));
  } else {
#pragma unroll
    for (int i = 0; i < kValues; i += 2) EncodeTwo<To>(values + i, stored + i);
  }
}

}  // namespace
}  // namespace kvferry
