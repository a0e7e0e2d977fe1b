// No guard, and no include of another header: compiled once for each instruction set, into a
// namespace that its includer names KVFERRY_CASTS_NAMESPACE. A function that the linker could share
// with other files must not come from here, or it might bring their callers instructions that the
// machine lacks; so even bit casts and copies are the compiler's builtins.
//
// Everything is branch-free on 32-bit integers and float32, which compilers vectorise. Subnormals
// are rounded by adding a power of two whose last place is one step of them, as Fabian Giesen's
// float_to_half does; neither way computes with a subnormal float32, so the processor's
// flush-to-zero mode changes nothing.

namespace kvferry::KVFERRY_CASTS_NAMESPACE {
namespace {

inline float AsFloat(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t AsBits(float value) { return __builtin_bit_cast(uint32_t, value); }

constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kQuietNan = 0x7fc00000;

struct Float32 {
  using Stored = uint32_t;
  static float Decode(Stored stored) { return AsFloat(stored); }
  static Stored Encode(float value) { return AsBits(value); }
};

struct BFloat16 {
  using Stored = uint16_t;
  static float Decode(Stored stored) { return AsFloat(uint32_t{stored} << 16); }
  static Stored Encode(float value) {
    const uint32_t bits = AsBits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40;
    return static_cast<Stored>((bits & kMagnitude) > kInfinity ? nan : rounded);
  }
};

// Sign, kExponent bits, kMantissa bits. IEEE formats keep the largest exponent for infinity and
// NaN; the others ("fn") only its largest mantissa, for NaN.
template <typename StoredType, int kExponent, int kMantissa, bool kIeee, bool kSaturates>
struct SmallFloat {
  using Stored = StoredType;
  static constexpr int kShift = 23 - kMantissa;
  static constexpr uint32_t kBias = (1u << (kExponent - 1)) - 1;
  static constexpr uint32_t kRebias = (127 - kBias) << 23;
  static constexpr uint32_t kMask = (1u << (kExponent + kMantissa)) - 1;
  static constexpr uint32_t kTopExponent = kMask >> kMantissa << kMantissa;
  static constexpr uint32_t kMaxFinite = kIeee ? kTopExponent - 1 : kMask - 1;
  static constexpr uint32_t kNan = kIeee ? kTopExponent | (1u << (kMantissa - 1)) : kMask;
  // As float32: the smallest normal number, the magnitude at which encoding stops growing, and the
  // power of two whose last place is the smallest subnormal.
  static constexpr uint32_t kMinNormal = (128 - kBias) << 23;
  static constexpr uint32_t kLimit = ((kMaxFinite + (kSaturates ? 0 : 1)) << kShift) + kRebias;
  static constexpr uint32_t kOneStep = (151 - kBias - kMantissa) << 23;

  static float Decode(Stored stored) {
    const uint32_t magnitude = stored & kMask;
    const uint32_t wide = magnitude << kShift;
    const uint32_t subnormal = AsBits(AsFloat(wide | kMinNormal) - AsFloat(kMinNormal));
    uint32_t bits = magnitude < (1u << kMantissa) ? subnormal : wide + kRebias;
    if constexpr (kIeee) {
      bits = magnitude >= kTopExponent ? wide | kInfinity : bits;
    } else {
      bits = magnitude == kMask ? kQuietNan : bits;
    }
    return AsFloat(bits | (uint32_t{stored} & ~kMask) << (31 - kExponent - kMantissa));
  }

  static Stored Encode(float value) {
    const uint32_t bits = AsBits(value);
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t limited = magnitude < kLimit ? magnitude : kLimit;
    const uint32_t half = (1u << (kShift - 1)) - 1 + ((limited >> kShift) & 1);
    const uint32_t normal = (limited - kRebias + half) >> kShift;
    const uint32_t subnormal = AsBits(AsFloat(limited) + AsFloat(kOneStep)) - kOneStep;
    const uint32_t number = limited < kMinNormal ? subnormal : normal;
    const uint32_t encoded = magnitude > kInfinity ? kNan : number;
    return static_cast<Stored>(encoded | (bits & ~kMagnitude) >> (31 - kExponent - kMantissa));
  }
};

using Float16 = SmallFloat<uint16_t, 5, 10, true, false>;
using Float8E4M3 = SmallFloat<uint8_t, 4, 3, false, true>;
using Float8E5M2 = SmallFloat<uint8_t, 5, 2, true, true>;

template <typename From, typename To>
void Cast(const std::byte* __restrict in, std::byte* __restrict out, int64_t n, float multiply,
          float divide) {
  for (int64_t i = 0; i < n; ++i) {
    typename From::Stored from;
    __builtin_memcpy(&from, in + i * static_cast<int64_t>(sizeof from), sizeof from);
    const typename To::Stored to = To::Encode(From::Decode(from) * multiply / divide);
    __builtin_memcpy(out + i * static_cast<int64_t>(sizeof to), &to, sizeof to);
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
