// Conversion of rows on the CPU. No guard: compiled once for each instruction set, by the rules of
// number_formats_impl.h.

#define KVFERRY_CASTS_TARGET
#include "pool/number_formats_impl.h"

namespace kvferry::KVFERRY_CASTS_NAMESPACE {
namespace {

constexpr int64_t kBlock = 64;

// In two loops: told that only a byte of each result is kept, GCC computes the last steps on bytes,
// and packs what comes before them several times over.
template <typename From, typename To, bool kDivides>
inline void CastBlock(const std::byte* __restrict in, std::byte* __restrict out, int64_t n,
                      float multiply, float divide) {
  uint32_t encoded[kBlock];  // NOLINT(*-avoid-c-arrays): no header may be included.
  for (int64_t i = 0; i < n; ++i) {
    typename From::Stored from;
    __builtin_memcpy(&from, in + i * static_cast<int64_t>(sizeof from), sizeof from);
    const float scaled = From::Decode(from) * multiply;
    encoded[i] = To::Encode(kDivides ? scaled / divide : scaled * divide);
  }
  for (int64_t i = 0; i < n; ++i) {
    const auto to = static_cast<typename To::Stored>(encoded[i]);
    __builtin_memcpy(out + i * static_cast<int64_t>(sizeof to), &to, sizeof to);
  }
}

template <typename From, typename To, bool kDivides>
inline void CastAll(const std::byte* __restrict in, std::byte* __restrict out, int64_t n,
                    float multiply, float divide) {
  constexpr int64_t kFromBytes = sizeof(typename From::Stored);
  constexpr int64_t kToBytes = sizeof(typename To::Stored);
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    CastBlock<From, To, kDivides>(in + i * kFromBytes, out + i * kToBytes, kBlock, multiply,
                                  divide);
  }
  CastBlock<From, To, kDivides>(in + i * kFromBytes, out + i * kToBytes, n - i, multiply, divide);
}

// Whether 1 / divide is a float32 too: a normal power of two of which the inverse is normal. Then a
// product with it is the quotient, to the last bit, and takes a fraction of the time.
inline bool HasInverse(float divide) {
  constexpr uint32_t kMantissaBits = 0x7fffff;
  const uint32_t bits = AsBits(divide);
  const uint32_t exponent = bits >> 23;
  return (bits & kMantissaBits) == 0 && exponent >= 1 && exponent <= 253;
}

template <typename From, typename To>
void Cast(const std::byte* __restrict in, std::byte* __restrict out, int64_t n, float multiply,
          float divide) {
  if (HasInverse(divide)) {
    CastAll<From, To, false>(in, out, n, multiply, 1 / divide);
  } else {
    CastAll<From, To, true>(in, out, n, multiply, divide);
  }
}

template <typename From>
CastFn CastTo(DType to) {
  switch (to) {
    case DType::kFloat32:
      return &Cast<From, Float32>;
    case DType::kFloat16:
      return &Cast<From, Float16>;
    case DType::kBFloat16:
      return &Cast<From, BFloat16>;
    case DType::kFloat8E4M3:
      return &Cast<From, Float8E4M3>;
    case DType::kFloat8E5M2:
      return &Cast<From, Float8E5M2>;
    case DType::kUint8:
      break;
  }
  return nullptr;
}

}  // namespace

CastFn Find(DType from, DType to) {
  switch (from) {
    case DType::kFloat32:
      return CastTo<Float32>(to);
    case DType::kFloat16:
      return CastTo<Float16>(to);
    case DType::kBFloat16:
      return CastTo<BFloat16>(to);
    case DType::kFloat8E4M3:
      return CastTo<Float8E4M3>(to);
    case DType::kFloat8E5M2:
      return CastTo<Float8E5M2>(to);
    case DType::kUint8:
      break;
  }
  return nullptr;
}

}  // namespace kvferry::KVFERRY_CASTS_NAMESPACE
