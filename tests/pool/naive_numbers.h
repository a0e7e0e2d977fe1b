#pragma once

// The number formats of KV caches the slow way, from their definitions: every stored value in a
// table, and encoding is a search for the nearest. What kernels are compared with.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "pool/kv_layout.h"

namespace kvferry {

class NaiveFormat {
 public:
  explicit NaiveFormat(DType dtype) : dtype_(dtype) {
    switch (dtype) {
      case DType::kFloat16:
        Fill(5, 10, true, false);
        break;
      case DType::kBFloat16:
        Fill(8, 7, true, false);
        break;
      case DType::kFloat8E4M3:
        Fill(4, 3, false, true);
        break;
      case DType::kFloat8E5M2:
        Fill(5, 2, true, true);
        break;
      case DType::kFloat32:
      case DType::kUint8:
        break;
    }
  }

  // One table a format: they take a while to fill.
  static const NaiveFormat& Of(DType dtype) {
    static const std::map<DType, NaiveFormat> formats = [] {
      std::map<DType, NaiveFormat> all;
      for (const DType each : {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                               DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kUint8}) {
        all.emplace(each, NaiveFormat(each));
      }
      return all;
    }();
    return formats.at(dtype);
  }

  int64_t bytes() const { return DTypeBytes(dtype_); }

  float Decode(const std::byte* stored) const {
    if (dtype_ == DType::kFloat32) {
      float value;
      std::memcpy(&value, stored, sizeof value);
      return value;
    }
    uint32_t code = 0;
    std::memcpy(&code, stored, static_cast<size_t>(bytes()));
    return Decode(code);
  }
  float Decode(uint32_t code) const {
    const float magnitude = magnitudes_[code & (magnitudes_.size() - 1)];
    return code >= magnitudes_.size() ? -magnitude : magnitude;
  }
  uint32_t num_codes() const { return static_cast<uint32_t>(2 * magnitudes_.size()); }

  // True when `stored` is what `value` must become; any NaN will do for a NaN.
  bool IsEncodingOf(float value, const std::byte* stored) const {
    const float got = Decode(stored);
    if (std::isnan(value)) return std::isnan(got);
    if (dtype_ == DType::kFloat32) {
      return std::bit_cast<uint32_t>(value) == std::bit_cast<uint32_t>(got);
    }
    uint32_t code = 0;
    std::memcpy(&code, stored, static_cast<size_t>(bytes()));
    const uint32_t sign = std::signbit(value) ? static_cast<uint32_t>(magnitudes_.size()) : 0;
    return code == (sign | EncodeMagnitude(std::fabs(value)));
  }

 private:
  void Fill(int exponent_bits, int mantissa_bits, bool ieee, bool saturates) {
    saturates_ = saturates;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int top = (1 << exponent_bits) - 1;
    for (int exponent = 0; exponent <= top; ++exponent) {
      for (int mantissa = 0; mantissa < 1 << mantissa_bits; ++mantissa) {
        const bool last = exponent == top && mantissa == (1 << mantissa_bits) - 1;
        const int step = (exponent == 0 ? 1 : exponent) - bias - mantissa_bits;
        const int whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
        if (ieee && exponent == top) {
          magnitudes_.push_back(mantissa == 0 ? kInfinity : kNan);
        } else {
          magnitudes_.push_back(!ieee && last ? kNan : std::ldexp(static_cast<float>(whole), step));
        }
      }
    }
    while (std::isfinite(magnitudes_[num_finite_])) ++num_finite_;
    // What the next number would be, had the format one: rounding up to it is an overflow.
    const float last_step = magnitudes_[num_finite_ - 1] - magnitudes_[num_finite_ - 2];
    overflow_ = double{magnitudes_[num_finite_ - 1]} + double{last_step};
  }

  uint32_t EncodeMagnitude(float value) const {
    const uint32_t last = num_finite_ - 1;
    const auto at = [this](uint32_t code) {
      return code < num_finite_ ? double{magnitudes_[code]} : overflow_;
    };
    uint32_t low = last;  // The largest code whose value is not above `value`.
    if (value < magnitudes_[last]) {
      const auto begin = magnitudes_.begin();
      low = static_cast<uint32_t>(std::upper_bound(begin, begin + num_finite_, value) - begin - 1);
    }
    const double below = value - at(low), above = at(low + 1) - value;
    uint32_t code = low + (below > above || (below == above && low % 2 == 1) ? 1 : 0);
    if (std::isinf(value)) code = num_finite_;
    return saturates_ ? std::min(code, last) : code;
  }

  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  DType dtype_;
  bool saturates_ = false;
  std::vector<float> magnitudes_;  // By code without the sign; ascending up to num_finite_.
  uint32_t num_finite_ = 0;
  double overflow_ = 0;
};

}  // namespace kvferry
