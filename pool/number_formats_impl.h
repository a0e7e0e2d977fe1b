// The number formats of KV caches: how each is decoded to float32, and encoded from it.
//
// No guard, and no include of another header: compiled once for each instruction set, into a
// namespace that its includer names KVFERRY_CASTS_NAMESPACE. A function that the linker could share
// with other files must not come from here, or it might bring their callers instructions that the
// machine lacks; so even bit casts and copies are the compiler's builtins. KVFERRY_CASTS_TARGET is
// empty, or for CUDA what makes a function one of the device.
//
// Everything is branch-free on 32-bit integers and float32, which compilers vectorise. Numbers are
// rounded by adding a power of two whose last place is one step of theirs, as Fabian Giesen's
// float_to_half rounds subnormals; no result of the arithmetic is a subnormal float32, so the
// processor's flush-to-zero mode changes nothing. Comparisons are signed, for which SSE2 has an
// instruction. Encode() returns the stored bits in a uint32_t: casts_impl.h says why.

namespace kvferry::KVFERRY_CASTS_NAMESPACE {
namespace {

KVFERRY_CASTS_TARGET inline float AsFloat(uint32_t bits) { return __builtin_bit_cast(float, bits); }
KVFERRY_CASTS_TARGET inline uint32_t AsBits(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

KVFERRY_CASTS_TARGET constexpr int32_t Signed(uint32_t bits) { return static_cast<int32_t>(bits); }

constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kQuietNan = 0x7fc00000;

struct Float32 {
  using Stored = uint32_t;
  KVFERRY_CASTS_TARGET static float Decode(Stored stored) { return AsFloat(stored); }
  KVFERRY_CASTS_TARGET static uint32_t Encode(float value) { return AsBits(value); }
};

struct BFloat16 {
  using Stored = uint16_t;
  KVFERRY_CASTS_TARGET static float Decode(Stored stored) {
    return AsFloat(uint32_t{stored} << 16);
  }
  KVFERRY_CASTS_TARGET static uint32_t Encode(float value) {
    const uint32_t bits = AsBits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40;
    return Signed(bits & kMagnitude) > Signed(kInfinity) ? nan : rounded;
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
  // As float32: the smallest normal number, and the magnitude at which encoding stops growing.
  static constexpr int32_t kMinNormal = (128 - kBias) << 23;
  static constexpr int32_t kLimit = ((kMaxFinite + (kSaturates ? 0 : 1)) << kShift) + kRebias;

  KVFERRY_CASTS_TARGET static float Decode(Stored stored) {
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

  KVFERRY_CASTS_TARGET static uint32_t Encode(float value) {
    const uint32_t bits = AsBits(value);
    const int32_t magnitude = Signed(bits & kMagnitude);
    const int32_t limited = magnitude < kLimit ? magnitude : kLimit;
    // The power of two at or below it, but subnormals have the steps of the smallest normal number.
    const int32_t exponent = limited & Signed(kInfinity);
    const int32_t power = exponent > kMinNormal ? exponent : kMinNormal;
    const auto one_step = static_cast<uint32_t>(power + (kShift << 23));
    const uint32_t steps =
        AsBits(AsFloat(static_cast<uint32_t>(limited)) + AsFloat(one_step)) - one_step;
    // A normal number has 2^kMantissa steps at least, which stand for the 1 in its exponent.
    const uint32_t number = steps + (static_cast<uint32_t>(power - kMinNormal) >> kShift);
    const uint32_t encoded = magnitude > Signed(kInfinity) ? kNan : number;
    return encoded | (bits & ~kMagnitude) >> (31 - kExponent - kMantissa);
  }
};

using Float16 = SmallFloat<uint16_t, 5, 10, true, false>;
using Float8E4M3 = SmallFloat<uint8_t, 4, 3, false, true>;
using Float8E5M2 = SmallFloat<uint8_t, 5, 2, true, true>;

}  // namespace
}  // namespace kvferry::KVFERRY_CASTS_NAMESPACE
