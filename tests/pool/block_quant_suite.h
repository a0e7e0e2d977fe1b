#pragma once

// StoreQuantized() and LoadQuantized(): every kind of memory enrols here with
//   INSTANTIATE_TEST_SUITE_P(Where, BlockQuants, testing::Values(backend, ...), BackendName());
// in one file of its binary.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "pool/block_quant.h"
#include "pool/token_copy.h"
#include "pool/token_kv_pool.h"
#include "tests/pool/memory_backend.h"
#include "tests/pool/naive_numbers.h"
#include "tests/support/status.h"

namespace kvferry {

using Floats = std::vector<float>;

inline TokenView ViewOf(Floats& values, int64_t rows, int64_t heads, int64_t dim) {
  return TokenView::Packed(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32, rows,
                           heads, dim);
}

// A pool with one quantised tensor, and what it stores for rows of floats.
class Quantised {
 public:
  Quantised(const std::shared_ptr<const PoolMemory>& memory, BlockFormat format, int64_t heads,
            int64_t dim, std::string page_format = "NHD")
      : format_(format), heads_(heads), dim_(dim) {
    const KvLayout layout{1, 4, DType::kUint8, std::move(page_format),
                          Must(QuantizedTensors(format, "k", heads, dim))};
    pool_ = Must(TokenKvPool::Create(layout, 64, 0, memory));
  }
  absl::Status Store(Floats& values, const std::vector<int32_t>& slots) {
    return Store(ViewOf(values, Count(slots), heads_, dim_), slots);
  }
  absl::Status Store(const TokenView& rows, const std::vector<int32_t>& slots) {
    return StoreQuantized(format_, rows, pool_->view(0, 0), pool_->view(0, 1), slots,
                          pool_->memory());
  }
  Floats Load(const std::vector<int32_t>& slots) {
    Floats values(static_cast<size_t>(Count(slots) * heads_ * dim_));
    EXPECT_TRUE(IsOk(Load(slots, ViewOf(values, Count(slots), heads_, dim_))));
    return values;
  }
  absl::Status Load(const std::vector<int32_t>& slots, const TokenView& rows) {
    return LoadQuantized(format_, pool_->view(0, 0), pool_->view(0, 1), slots, rows,
                         pool_->memory());
  }
  std::vector<std::byte> Flat(const std::vector<int32_t>& slots) {
    std::vector<std::byte> flat(static_cast<size_t>(pool_->flat_bytes(Count(slots))));
    EXPECT_TRUE(IsOk(pool_->ReadFlat(slots, flat)));
    return flat;
  }
  TokenKvPool& pool() { return *pool_; }

 private:
  static int64_t Count(const std::vector<int32_t>& slots) {
    return static_cast<int64_t>(slots.size());
  }
  const BlockFormat format_;
  const int64_t heads_, dim_;
  std::shared_ptr<TokenKvPool> pool_;
};

inline Floats RandomRows(int64_t values, int64_t block, std::mt19937_64& random) {
  Floats all(static_cast<size_t>(values));
  std::normal_distribution<float> normal;
  float size = 1;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i % static_cast<size_t>(block) == 0) {
      size = std::ldexp(1.0F, static_cast<int>(random() % 60) - 30) *
             (random() % 9 == 0 ? 0.0F : 1.0F);
    }
    all[i] = normal(random) * size;
  }
  return all;
}

class BlockQuants : public testing::TestWithParam<MemoryBackend> {
 protected:
  using Bytes = std::vector<std::byte>;
  static constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

  void SetUp() override {
    if (!GetParam().missing.empty()) GTEST_SKIP() << GetParam().missing;
  }
  const std::shared_ptr<const PoolMemory> memory_ = GetParam().memory;
};

// Among all that a block could have become with its scale, each value is the nearest.
TEST_P(BlockQuants, Mxfp4IsTheNearestCodeUnderTheSmallestScale) {
  std::mt19937_64 random(4);
  constexpr float kCodes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  Quantised pool(memory_, BlockFormat::kMxfp4, 2, 24);
  for (int round = 0; round < (GetParam().slow ? 35 : 350); ++round) {
    std::vector<int32_t> slots(64);
    for (int32_t i = 0; i < 64; ++i) slots[i] = 4 + (i * 5 + round) % 64;
    Floats values = RandomRows(64 * 48, 16, random);
    ASSERT_TRUE(IsOk(pool.Store(values, slots)));
    const Floats loaded = pool.Load(slots);
    Bytes flat(static_cast<size_t>(pool.pool().flat_bytes(64)));
    ASSERT_TRUE(IsOk(pool.pool().ReadFlat(slots, flat)));
    for (size_t block = 0; block < 64 * 3; ++block) {
      const int scale = std::to_integer<int>(flat[64 * 24 + block]) - 127;
      double largest = 0;
      for (size_t i = block * 16; i < block * 16 + 16; ++i) {
        largest = std::max<double>(largest, std::fabs(values[i]));
        double nearest = INFINITY;
        for (const float code : kCodes) {
          nearest = std::min(
              nearest, std::fabs(std::fabs(double{values[i]}) - std::ldexp(double{code}, scale)));
        }
        ASSERT_EQ(std::fabs(double{values[i]} - double{loaded[i]}), nearest)
            << values[i] << " became " << loaded[i];
      }
      ASSERT_LE(largest, std::ldexp(6.0, scale));
      ASSERT_TRUE(scale == -127 || largest > std::ldexp(6.0, scale - 1))
          << "the scale could be smaller";
    }
  }
}

TEST_P(BlockQuants, Mxfp4LaysNibblesAndTiesAsTheFormatSays) {
  Quantised pool(memory_, BlockFormat::kMxfp4, 1, 16);
  // Scale 1 because of the 6; every middle between two codes goes to the even one.
  Floats values = {6, -0.5, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, -0.25, -6, 0, 1, 3, 4};
  ASSERT_TRUE(IsOk(pool.Store(values, {5})));
  EXPECT_EQ(pool.Load({5}), (Floats{6, -0.5, 0, 1, 1, 2, 2, 4, 4, -4, 0, -6, 0, 1, 3, 4}));
  Bytes flat(9);
  ASSERT_TRUE(IsOk(pool.pool().ReadFlat(std::vector<int32_t>{5}, flat)));
  EXPECT_EQ(flat[0], std::byte{0x97});  // The even value in the low half: 6 is 7, -0.5 is 9.
  EXPECT_EQ(flat[8], std::byte{127});
}

TEST_P(BlockQuants, Fp8BlocksUseTheWholeRange) {
  std::mt19937_64 random(6);
  Quantised pool(memory_, BlockFormat::kFp8Block128, 1, 256);
  const NaiveFormat& fp8 = NaiveFormat::Of(DType::kFloat8E4M3);
  for (int round = 0; round < (GetParam().slow ? 7 : 70); ++round) {
    std::vector<int32_t> slots(60);
    for (int32_t i = 0; i < 60; ++i) slots[i] = 4 + (i * 7 + round) % 64;
    Floats values = RandomRows(60 * 256, 128, random);
    ASSERT_TRUE(IsOk(pool.Store(values, slots)));
    Bytes flat(static_cast<size_t>(pool.pool().flat_bytes(60)));
    ASSERT_TRUE(IsOk(pool.pool().ReadFlat(slots, flat)));
    const Floats loaded = pool.Load(slots);
    for (size_t block = 0; block < 120; ++block) {
      float scale;
      std::memcpy(&scale, &flat[60 * 256 + 4 * block], sizeof scale);
      float largest = 0;
      for (size_t i = block * 128; i < block * 128 + 128; ++i)
        largest = std::max(largest, std::fabs(values[i]));
      ASSERT_EQ(scale, largest / 448);
      for (size_t i = block * 128; scale > 0 && i < block * 128 + 128; ++i) {
        ASSERT_TRUE(fp8.IsEncodingOf(values[i] / scale, &flat[i]));
        ASSERT_EQ(loaded[i], fp8.Decode(&flat[i]) * scale);
      }
    }
  }
}

TEST_P(BlockQuants, ZerosNansAndInfinities) {
  for (const BlockFormat format : {BlockFormat::kMxfp4, BlockFormat::kFp8Block128}) {
    Quantised pool(memory_, format, 1, 128, "HND");
    Floats zeros(128, 0);
    ASSERT_TRUE(IsOk(pool.Store(zeros, {9})));
    EXPECT_EQ(pool.Load({9}), zeros);
    Floats values(128, 1);
    values[1] = INFINITY;
    values[2] = -INFINITY;
    ASSERT_TRUE(IsOk(pool.Store(values, {9})));
    EXPECT_GT(pool.Load({9})[1], 1e38F);
    EXPECT_LT(pool.Load({9})[2], -1e38F);
    values[1] = values[2] = NAN;
    ASSERT_TRUE(IsOk(pool.Store(values, {9})));
    EXPECT_EQ(pool.Load({9})[0], 1);  // It has no say in the scale.
    const float nan = pool.Load({9})[1];
    EXPECT_TRUE(format == BlockFormat::kMxfp4 ? nan >= 1 : std::isnan(nan)) << nan;
    if (format == BlockFormat::kMxfp4) continue;  // It has none.
    std::fill(values.begin(), values.end(), -0.0F);
    values[5] = NAN;
    ASSERT_TRUE(IsOk(pool.Store(values, {9})));
    EXPECT_TRUE(std::isnan(pool.Load({9})[5]));
    EXPECT_EQ(std::count(values.begin(), values.end(), 0.0F), 127);
    EXPECT_EQ(pool.Load({9})[6], 0);
  }
}

TEST_P(BlockQuants, RowsOfOtherDtypes) {
  Quantised pool(memory_, BlockFormat::kMxfp4, 1, 16);
  std::vector<uint16_t> bf16(16, 0x4040);  // 3.0
  const TokenView rows =
      TokenView::Packed(reinterpret_cast<std::byte*>(bf16.data()), DType::kBFloat16, 1, 1, 16);
  const std::vector<int32_t> slots = {4};
  ASSERT_TRUE(IsOk(pool.Store(rows, slots)));
  EXPECT_EQ(pool.Load(slots), Floats(16, 3));
  std::vector<uint16_t> back(16);
  const TokenView out =
      TokenView::Packed(reinterpret_cast<std::byte*>(back.data()), DType::kBFloat16, 1, 1, 16);
  ASSERT_TRUE(IsOk(pool.Load(slots, out)));
  EXPECT_EQ(back, bf16);
  // Floats may have a scale as all others.
  Floats halves(16, 3);
  TokenView scaled = ViewOf(halves, 1, 1, 16);
  scaled.scale = 0.5F;
  ASSERT_TRUE(IsOk(pool.Store(scaled, slots)));
  EXPECT_EQ(pool.Load(slots), Floats(16, 1.5F));
  ASSERT_TRUE(IsOk(pool.Load(slots, scaled)));
  EXPECT_EQ(halves, Floats(16, 3));
}

// Of any numbers, in rows of any dtype and scale, wherever they lie: the same bytes as on the host.
TEST_P(BlockQuants, EveryMemoryStoresAndLoadsTheSameBytes) {
  constexpr int64_t kRows = 40, kHeads = 3, kDim = 256;
  std::mt19937_64 random(9);
  std::vector<int32_t> slots(kRows);
  for (int32_t i = 0; i < kRows; ++i) slots[i] = (i * 29 + 3) % 68;
  for (const BlockFormat format : {BlockFormat::kMxfp4, BlockFormat::kFp8Block128}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                              DType::kFloat8E4M3, DType::kFloat8E5M2}) {
      for (const float scale : {1.0F, 0.37F}) {
        SCOPED_TRACE(DTypeName(dtype));
        Bytes bytes(static_cast<size_t>(kRows * kHeads * kDim * DTypeBytes(dtype)));
        std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::byte>(random()); });
        TokenView rows = TokenView::Packed(bytes.data(), dtype, kRows, kHeads, kDim);
        rows.scale = scale;
        const auto there = Must(memory_->Allocate(static_cast<int64_t>(bytes.size())));
        GetParam().write(there.get(), bytes);
        TokenView rows_there = rows;
        rows_there.data = there.get();

        Quantised host(HostMemory(), format, kHeads, kDim);
        ASSERT_TRUE(IsOk(host.Store(rows, slots)));
        const Bytes want = host.Flat(slots);
        Bytes want_loaded = bytes, loaded = bytes;
        rows.data = want_loaded.data();
        ASSERT_TRUE(IsOk(host.Load(slots, rows)));
        for (const bool on_host : {true, false}) {
          Quantised pool(memory_, format, kHeads, kDim, on_host ? "NHD" : "HND");
          rows.data = bytes.data();
          ASSERT_TRUE(IsOk(pool.Store(on_host ? rows : rows_there, slots)));
          ASSERT_EQ(pool.Flat(slots), want);
          rows.data = loaded.data();
          ASSERT_TRUE(IsOk(pool.Load(slots, on_host ? rows : rows_there)));
          if (!on_host) loaded = GetParam().read(there.get(), static_cast<int64_t>(loaded.size()));
          ASSERT_EQ(loaded, want_loaded);
        }
      }
    }
  }
}

// More values than are looked at together.
TEST_P(BlockQuants, ALongRowIsItsHeadsOneByOne) {
  constexpr int64_t kHeads = 41, kDim = 128;
  std::mt19937_64 random(11);
  Floats values = RandomRows(2 * kHeads * kDim, 16, random);
  for (const BlockFormat format : {BlockFormat::kMxfp4, BlockFormat::kFp8Block128}) {
    for (const char* page_format : {"NHD", "HND"}) {
      Quantised rows(memory_, format, kHeads, kDim, page_format);
      ASSERT_TRUE(IsOk(rows.Store(values, {7, 5})));
      Quantised heads(memory_, format, 1, kDim);
      Bytes want;
      Floats want_loaded;
      for (int64_t row = 0; row < 2; ++row) {
        std::vector<int32_t> slots(kHeads);
        std::iota(slots.begin(), slots.end(), 3);
        const TokenView view = ViewOf(values, 2 * kHeads, 1, kDim);
        TokenView part = view;
        part.data = view.row(row * kHeads);
        part.num_slots = kHeads;
        ASSERT_TRUE(IsOk(heads.Store(part, slots)));
        const Bytes flat = heads.Flat(slots);
        want.insert(want.end(), flat.begin(), flat.end());
        const Floats loaded = heads.Load(slots);
        want_loaded.insert(want_loaded.end(), loaded.begin(), loaded.end());
      }
      // Codes and scales of a row, one behind the other.
      const Bytes first = rows.Flat({7}), second = rows.Flat({5});
      Bytes got = first;
      got.insert(got.end(), second.begin(), second.end());
      EXPECT_EQ(got, want);
      EXPECT_EQ(rows.Load({7, 5}), want_loaded);
    }
  }
}

// At any address, with gaps between values or heads, and with heads that share a block.
TEST_P(BlockQuants, EveryMemoryTakesRowsCodesAndScalesAnywhere) {
  constexpr int64_t kRows = 21;
  struct Lie {
    int64_t offset, value_gap, head_gap;  // Gaps in values, 1 and 0 when dense.
  };
  constexpr Lie kDense = {0, 1, 0};
  // Of rows, codes and scales.
  constexpr std::array<Lie, 3> kLies[] = {
      {kDense, kDense, kDense},
      {Lie{0, 1, 16}, {0, 1, 32}, kDense},
      {Lie{1, 1, 0}, kDense, kDense},
      {kDense, Lie{1, 1, 0}, kDense},
      {kDense, kDense, Lie{2, 1, 0}},
      {Lie{0, 2, 0}, kDense, kDense},
      {kDense, Lie{0, 3, 0}, Lie{0, 3, 0}},
      {Lie{0, 1, 1}, Lie{0, 1, 5}, kDense},
  };
  std::mt19937_64 random(11);
  std::vector<int32_t> slots(kRows);
  for (int32_t i = 0; i < kRows; ++i) slots[i] = (i * 8 + 3) % kRows;
  for (const BlockFormat format : {BlockFormat::kMxfp4, BlockFormat::kFp8Block128}) {
    for (const auto& [heads, dim] : {std::pair<int64_t, int64_t>(2, 128), {16, 24}}) {
      const std::vector<KvTensor> tensors = Must(QuantizedTensors(format, "k", heads, dim));
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3}) {
        for (size_t which = 0; which < std::size(kLies); ++which) {
          SCOPED_TRACE(absl::StrCat(DTypeName(dtype), " ", heads, " x ", dim, ", case ", which));
          // The same bytes on the host and in memory_, seen the same way.
          const auto view = [&](size_t side, DType of, int64_t row_heads, int64_t row_dim) {
            const Lie& lie = kLies[which][side];
            TokenView wide = TokenView::Packed(nullptr, of, kRows, row_heads,
                                               row_dim * lie.value_gap + lie.head_gap);
            wide.head_dim = row_dim;
            wide.value_stride *= lie.value_gap;
            return wide;
          };
          std::array<TokenView, 3> host = {
              view(0, dtype, heads, dim),
              view(1, *tensors[0].dtype, tensors[0].num_heads, tensors[0].head_dim),
              view(2, *tensors[1].dtype, 1, tensors[1].head_dim)};
          std::array<TokenView, 3> there = host;
          std::array<Bytes, 3> bytes;
          std::array<std::shared_ptr<std::byte>, 3> memory;
          for (size_t side = 0; side < 3; ++side) {
            const int64_t size = kRows * host[side].page_stride + 16;
            bytes[side].resize(static_cast<size_t>(size));
            std::generate(bytes[side].begin(), bytes[side].end(),
                          [&] { return static_cast<std::byte>(random()); });
            memory[side] = Must(memory_->Allocate(size));
            host[side].data = bytes[side].data() + kLies[which][side].offset;
            there[side].data = memory[side].get() + kLies[which][side].offset;
          }
          // Half of the rows hold numbers as caches do.
          Floats numbers = RandomRows(kRows / 2 * heads * dim, 16, random);
          std::vector<int32_t> first(kRows / 2);
          std::iota(first.begin(), first.end(), 0);
          Must(TokenCopy::PlanScatter(ViewOf(numbers, kRows / 2, heads, dim), host[0], first))
              .Run();
          for (size_t side = 0; side < 3; ++side) {
            GetParam().write(memory[side].get(), bytes[side]);
          }
          const auto same = [&](size_t side) {
            return GetParam().read(memory[side].get(), static_cast<int64_t>(bytes[side].size())) ==
                   bytes[side];
          };
          ASSERT_TRUE(IsOk(StoreQuantized(format, host[0], host[1], host[2], slots)));
          ASSERT_TRUE(IsOk(StoreQuantized(format, there[0], there[1], there[2], slots, *memory_)));
          ASSERT_TRUE(same(1) && same(2));
          host[0].scale = there[0].scale = 2.5F;
          ASSERT_TRUE(IsOk(LoadQuantized(format, host[1], host[2], slots, host[0])));
          ASSERT_TRUE(IsOk(LoadQuantized(format, there[1], there[2], slots, there[0], *memory_)));
          ASSERT_TRUE(same(0));
        }
      }
    }
  }
}

TEST_P(BlockQuants, WhatDoesNotFitIsNamed) {
  EXPECT_TRUE(Fails(QuantizedTensors(BlockFormat::kMxfp4, "k", 1, 24), kInvalid, "block of 16"));
  EXPECT_TRUE(Fails(QuantizedTensors(BlockFormat::kMxfp4, "k", 16, 3), kInvalid, "16 heads x 3"));
  EXPECT_TRUE(Fails(QuantizedTensors(BlockFormat::kFp8Block128, "k", 0, 128), kInvalid, "0 heads"));
  EXPECT_TRUE(
      Fails(QuantizedTensors(BlockFormat::kMxfp4, "k", INT64_MAX, 16), kInvalid, "too many"));
  Quantised pool(memory_, BlockFormat::kMxfp4, 2, 16);
  Floats values(64, 1);
  ASSERT_TRUE(IsOk(pool.Store(values, {4, 5})));
  const Floats before = pool.Load({4, 5});
  values.assign(64, 2);
  EXPECT_TRUE(Fails(pool.Store(values, {4, 68}), absl::StatusCode::kOutOfRange, "slot 68"));
  const std::vector<int32_t> slots = {4, 5};
  const TokenView codes = pool.pool().view(0, 0), scales = pool.pool().view(0, 1);
  const auto store = [&](TokenView rows, TokenView c, TokenView s) {
    return StoreQuantized(BlockFormat::kMxfp4, rows, c, s, slots, *memory_);
  };
  const TokenView rows = ViewOf(values, 2, 2, 16);
  EXPECT_TRUE(
      Fails(store(ViewOf(values, 1, 2, 16), codes, scales), kInvalid, "1 rows but 2 slots"));
  EXPECT_TRUE(Fails(store(ViewOf(values, 2, 1, 16), codes, scales), kInvalid, "codes are uint8"));
  EXPECT_TRUE(Fails(store(rows, codes, codes), kInvalid, "scales are uint8"));
  EXPECT_TRUE(Fails(StoreQuantized(BlockFormat::kFp8Block128, rows, codes, scales, slots), kInvalid,
                    "block of 128"));
  TokenView bytes = rows;
  bytes.dtype = DType::kUint8;
  EXPECT_TRUE(Fails(store(bytes, codes, scales), kInvalid, "hold no numbers"));
  TokenView unscaled = rows;
  unscaled.scale = 0;
  EXPECT_TRUE(Fails(store(unscaled, codes, scales), kInvalid, "scale of the source is 0"));
  TokenView scaled_codes = codes, scaled_scales = scales;
  scaled_codes.scale = scaled_scales.scale = 2;
  EXPECT_TRUE(Fails(store(rows, scaled_codes, scales), kInvalid, "codes are", "scaled by 2"));
  EXPECT_TRUE(Fails(store(rows, codes, scaled_scales), kInvalid, "scales are", "scaled by 2"));
  EXPECT_EQ(pool.Load({4, 5}), before);
}

}  // namespace kvferry
