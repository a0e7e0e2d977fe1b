// The arithmetic of blocks of quantised values (block_quant.h). No guard: it goes behind
// number_formats_impl.h, by whose rules it is compiled, on the processor and for CUDA. Blocks of
// subnormal values need a processor that does not flush them to zero.

namespace kvferry::KVFERRY_CASTS_NAMESPACE {
namespace {

// The bits of a value's magnitude, which are in the order of the magnitudes, for the largest of a
// block: that of infinity is the largest finite one, and NaN has no say.
KVFERRY_CASTS_TARGET inline uint32_t MagnitudeForScale(float value) {
  const uint32_t magnitude = AsBits(value) & kMagnitude;
  const uint32_t finite = magnitude < kInfinity ? magnitude : kInfinity - 1;
  return magnitude > kInfinity ? 0 : finite;
}

// The exponent must lie in [-126, 127].
KVFERRY_CASTS_TARGET inline float PowerOfTwo(int exponent) {
  return AsFloat(static_cast<uint32_t>(exponent + 127) << 23);
}

// Codes of 16 values, two a byte, and a power of two.
struct Mxfp4Block {
  using Scale = uint8_t;  // Its exponent + 127.
  static constexpr uint32_t kValues = 16;

  // The smallest one with largest <= 6 * 2^exponent, 6 being 1.5 * 2^2. At most 253.
  KVFERRY_CASTS_TARGET static Scale ScaleOf(uint32_t largest) {
    constexpr uint32_t kFraction = 0x007fffff, kHalf = 0x00400000;
    const int scale = static_cast<int>(largest >> 23) - 2 + ((largest & kFraction) > kHalf ? 1 : 0);
    return static_cast<Scale>(scale < 0 ? 0 : scale);
  }

  // Between two codes, the middle goes to the even one.
  KVFERRY_CASTS_TARGET static uint32_t EncodeOne(float value, Scale scale) {
    const uint32_t bits = AsBits(value), magnitude = bits & kMagnitude;
    const float scaled = AsFloat(magnitude) * PowerOfTwo(127 - scale);
    const uint32_t code = (scaled > 0.25F ? 1 : 0) + (scaled >= 0.75F ? 1 : 0) +
                          (scaled > 1.25F ? 1 : 0) + (scaled >= 1.75F ? 1 : 0) +
                          (scaled > 2.5F ? 1 : 0) + (scaled >= 3.5F ? 1 : 0) +
                          (scaled > 5.0F ? 1 : 0);
    return (magnitude > kInfinity ? 7 : code) | bits >> 31 << 3;
  }
  KVFERRY_CASTS_TARGET static uint8_t Encode(const float* values, Scale scale) {
    return static_cast<uint8_t>(EncodeOne(values[0], scale) | EncodeOne(values[1], scale) << 4);
  }

  KVFERRY_CASTS_TARGET static float DecodeOne(uint32_t code, Scale scale) {
    const uint32_t magnitude = code & 7;
    const uint32_t normal = (magnitude << 22) + (126u << 23);
    const uint32_t subnormal = magnitude == 0 ? 0 : AsBits(0.5F);
    const float unscaled = AsFloat((magnitude < 2 ? subnormal : normal) | (code & 8) << 28);
    // In two steps, as 2^128 is no float; both are exact unless the value is too large for one.
    const int exponent = int{scale} - 127;
    return unscaled * PowerOfTwo(exponent / 2) * PowerOfTwo(exponent - exponent / 2);
  }
  KVFERRY_CASTS_TARGET static void Decode(uint8_t code, Scale scale, float* values) {
    values[0] = DecodeOne(code & 15, scale);
    values[1] = DecodeOne(code >> 4, scale);
  }
};

// Of float8_e4m3fn.
KVFERRY_CASTS_TARGET inline float Fp8ScaleOf(uint32_t largest) { return AsFloat(largest) / 448; }

}  // namespace
}  // namespace kvferry::KVFERRY_CASTS_NAMESPACE
