#pragma once

// Conversion between the number formats of KV caches: every backend enrols here with
//   INSTANTIATE_TEST_SUITE_P(Where, Casts, testing::Values(backend, ...), BackendName());
// in one file of its binary, and must agree with tables made from the formats' definitions.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "tests/pool/backend.h"
#include "tests/pool/naive_numbers.h"

namespace kvferry {

struct CastBackend : Backend {
  // As CastFn of pool/casts.h, between the two dtypes, of host memory.
  std::function<void(DType from, DType to, const std::byte* in, std::byte* out, int64_t n,
                     float multiply, float divide)>
      cast;
};

constexpr DType kNumberFormats[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                    DType::kFloat8E4M3, DType::kFloat8E5M2};

class Casts : public testing::TestWithParam<CastBackend> {
 protected:
  void SetUp() override {
    if (!GetParam().missing.empty()) GTEST_SKIP() << GetParam().missing;
  }

  // Casts all values at once and compares one by one.
  static void Check(DType from, DType to, const std::vector<std::byte>& in, float multiply,
                    float divide) {
    const NaiveFormat &source = NaiveFormat::Of(from), &target = NaiveFormat::Of(to);
    const int64_t count = static_cast<int64_t>(in.size()) / source.bytes();
    std::vector<std::byte> out(static_cast<size_t>(count * target.bytes()));
    GetParam().cast(from, to, in.data(), out.data(), count, multiply, divide);
    int shown = 0;
    for (int64_t i = 0; i < count && shown < 5; ++i) {
      const float value = source.Decode(&in[i * source.bytes()]) * multiply / divide;
      const std::byte* stored = &out[i * target.bytes()];
      if (target.IsEncodingOf(value, stored)) continue;
      ++shown;
      ADD_FAILURE() << DTypeName(from) << " to " << DTypeName(to) << ": " << value << " became "
                    << target.Decode(stored);
    }
  }
};

inline std::vector<std::byte> AllCodes(DType dtype) {
  const NaiveFormat& format = NaiveFormat::Of(dtype);
  std::vector<std::byte> bytes(format.num_codes() * static_cast<size_t>(format.bytes()));
  for (uint32_t code = 0; code < format.num_codes(); ++code) {
    std::memcpy(&bytes[code * format.bytes()], &code, static_cast<size_t>(format.bytes()));
  }
  return bytes;
}

// Floats around every number of `dtype` and around every middle between two of them; and any.
inline std::vector<std::byte> HardFloats(DType dtype) {
  std::vector<float> floats;
  const auto around = [&floats](float value) {
    floats.insert(floats.end(),
                  {value, std::nextafter(value, 0.0F), std::nextafter(value, HUGE_VALF)});
  };
  if (dtype != DType::kFloat32) {
    const NaiveFormat& format = NaiveFormat::Of(dtype);
    float last = 0;
    for (uint32_t code = 0; code < format.num_codes() / 2; ++code) {
      const float value = format.Decode(code);
      if (!std::isfinite(value)) continue;
      around(value);
      around((value + last) / 2);
      last = value;
    }
    around(last * 1.04F);
    around(last * 1.0625F);
  }
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i)
    floats.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  for (size_t i = 0, n = floats.size(); i < n; ++i) floats.push_back(-floats[i]);
  floats.insert(floats.end(), {HUGE_VALF, -HUGE_VALF, std::nanf(""), -std::nanf("")});
  const auto* bytes = reinterpret_cast<const std::byte*>(floats.data());
  return {bytes, bytes + floats.size() * sizeof(float)};
}

TEST_P(Casts, EveryStoredValueToEveryFormat) {
  for (const DType from : kNumberFormats) {
    if (from == DType::kFloat32) continue;
    for (const DType to : kNumberFormats) {
      // Scaled where the formats are the same: backends that copy have nothing to cast otherwise.
      Check(from, to, AllCodes(from), from == to ? 2 : 1, 1);
      Check(from, to, AllCodes(from), 0.37F, 1.9F);
    }
  }
}

TEST_P(Casts, FloatsRoundToTheNearestAndTiesToEven) {
  for (const DType to : kNumberFormats) {
    // Powers of two, with an inverse that is a normal number and without, and what is none.
    for (const float divide :
         {1.0F, 0.5F, 0x1p-126F, 0x1p-127F, 0x1p-149F, 0x1p126F, 0x1p127F, 3.3F}) {
      Check(DType::kFloat32, to, HardFloats(to), 1, divide);
    }
  }
}

TEST_P(Casts, AnyLengthAtAnyAddress) {
  std::vector<std::byte> in = HardFloats(DType::kFloat8E4M3);
  in.resize(4 * 300);
  const NaiveFormat& target = NaiveFormat::Of(DType::kFloat8E4M3);
  for (int64_t n = 0; n < 140; ++n) {
    for (const int64_t offset : {0, 1, 3}) {
      std::vector<std::byte> out(200, std::byte{0x5a});
      GetParam().cast(DType::kFloat32, DType::kFloat8E4M3, &in[offset], &out[offset], n, 1, 1);
      for (int64_t i = 0; i < 200; ++i) {
        if (i < offset || i >= offset + n) {
          ASSERT_EQ(out[i], std::byte{0x5a}) << n << " " << i;
        } else {
          float value;
          std::memcpy(&value, &in[offset + 4 * (i - offset)], sizeof value);
          ASSERT_TRUE(target.IsEncodingOf(value, &out[i])) << n << " " << i;
        }
      }
    }
  }
}

}  // namespace kvferry
