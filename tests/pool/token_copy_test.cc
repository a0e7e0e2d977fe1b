#include "pool/token_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <vector>

#include "tests/pool/naive_numbers.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// A tensor [pages, page_size, heads, dim] with its dimensions in any order, in memory of its own.
struct AnyTensor {
  std::vector<std::byte> memory;
  TokenView view;

  AnyTensor(DType dtype, int64_t pages, int64_t page_size, int64_t heads, int64_t dim,
            const std::array<int, 4>& order, float scale, std::mt19937_64& random) {
    const std::array<int64_t, 4> sizes = {pages, page_size, heads, dim};
    std::array<int64_t, 4> strides;
    int64_t stride = DTypeBytes(dtype);
    for (int i = 3; i >= 0; --i) {
      strides[order[i]] = stride;
      stride *= sizes[order[i]];
    }
    memory.resize(static_cast<size_t>(stride));
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
    view = {memory.data(), dtype,      pages * page_size, page_size,  heads, dim,
            strides[0],    strides[1], strides[2],        strides[3], scale};
  }

  int64_t Offset(int64_t slot, int64_t head, int64_t value) const {
    return slot / view.page_size * view.page_stride + slot % view.page_size * view.token_stride +
           head * view.head_stride + value * view.value_stride;
  }
};

class RandomCopies : public testing::TestWithParam<CpuKernels> {
 protected:
  int64_t Upto(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  AnyTensor Tensor(DType dtype, int64_t heads, int64_t dim) {
    std::array<int, 4> order = {0, 1, 2, 3};  // NHD half of the time.
    if (Upto(2) == 0) std::shuffle(order.begin(), order.end(), random_);
    const float scale = dtype == DType::kUint8 ? 1 : static_cast<float>(1 + Upto(3)) / 2;
    return {dtype, 1 + Upto(6), 1 + Upto(5), heads, dim, order, scale, random_};
  }

  // Runs of neighbours and single slots.
  std::vector<int32_t> SlotsOf(const TokenView& view, int64_t count, bool distinct) {
    std::vector<int32_t> slots(static_cast<size_t>(view.num_slots));
    std::iota(slots.begin(), slots.end(), 0);
    if (Upto(2) == 0) std::shuffle(slots.begin(), slots.end(), random_);
    if (!distinct) {
      for (int32_t& slot : slots) {
        if (Upto(4) == 0) slot = static_cast<int32_t>(Upto(view.num_slots));
      }
    }
    slots.resize(static_cast<size_t>(count));
    return slots;
  }

  std::mt19937_64 random_{5};
};

// The model: value by value, in order of the list.
std::vector<std::byte> Expected(const AnyTensor& from, const std::vector<int32_t>& from_slots,
                                const AnyTensor& to, const std::vector<int32_t>& to_slots,
                                const std::vector<std::byte>& got) {
  std::vector<std::byte> memory = to.memory;
  const NaiveFormat& source = NaiveFormat::Of(from.view.dtype);
  const NaiveFormat& target = NaiveFormat::Of(to.view.dtype);
  const bool plain = from.view.dtype == to.view.dtype && from.view.scale == to.view.scale;
  for (size_t i = 0; i < to_slots.size(); ++i) {
    for (int64_t head = 0; head < to.view.num_heads; ++head) {
      for (int64_t value = 0; value < to.view.head_dim; ++value) {
        const std::byte* in = &from.memory[from.Offset(from_slots[i], head, value)];
        const int64_t at = to.Offset(to_slots[i], head, value);
        if (plain) {
          std::copy_n(in, target.bytes(), &memory[at]);
          continue;
        }
        // The naive format judges what was stored; it is kept when it is right.
        const float want = source.Decode(in) * from.view.scale / to.view.scale;
        const bool last =
            std::find(to_slots.begin() + i + 1, to_slots.end(), to_slots[i]) == to_slots.end();
        if (last && target.IsEncodingOf(want, &got[at])) {
          std::copy_n(&got[at], target.bytes(), &memory[at]);
        } else if (last) {
          memory[at] = ~got[at];
        }
      }
    }
  }
  return memory;
}

TEST_P(RandomCopies, AgreeWithCopyingValueByValue) {
  if (!CanRun(GetParam())) GTEST_SKIP() << "this processor has no AVX-512 (F, BW, DQ, VL)";
  constexpr DType kDTypes[] = {DType::kFloat32,    DType::kFloat16,    DType::kBFloat16,
                               DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kUint8};
  for (int64_t rows = 0; rows < 100000;) {
    const int64_t heads = 1 + Upto(3), dim = 1 + Upto(20);
    const DType from_dtype = kDTypes[Upto(6)];
    const bool same = from_dtype == DType::kUint8 || Upto(2) == 0;
    const DType to_dtype = same ? from_dtype : kDTypes[Upto(5)];
    const AnyTensor from = Tensor(from_dtype, heads, dim);
    AnyTensor to = Tensor(to_dtype, heads, dim);
    const int64_t count = Upto(std::min(from.view.num_slots, to.view.num_slots) + 1);
    const std::vector<int32_t> from_slots = SlotsOf(from.view, count, false);
    const std::vector<int32_t> to_slots = SlotsOf(to.view, count, Upto(3) > 0);
    const AnyTensor before = to;
    const absl::StatusOr<TokenCopy> copy =
        TokenCopy::Plan(from.view, from_slots, to.view, to_slots, GetParam());
    ASSERT_TRUE(IsOk(copy));
    copy->Run();
    ASSERT_EQ(to.memory, Expected(from, from_slots, before, to_slots, to.memory))
        << DTypeName(from_dtype) << " to " << DTypeName(to_dtype);
    rows += count + 1;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, RandomCopies,
                         testing::Values(CpuKernels::kPortable, CpuKernels::kAvx512),
                         [](const auto& param) {
                           return param.param == CpuKernels::kPortable ? "Portable" : "Avx512";
                         });

class TokenCopies : public testing::Test {
 protected:
  TokenView View(int64_t slots, int64_t heads, int64_t dim, DType dtype = DType::kFloat32) {
    return TokenView::Packed(memory_.data(), dtype, slots, heads, dim);
  }
  absl::Status Plan(const TokenView& from, const std::vector<int32_t>& from_slots,
                    const TokenView& to, const std::vector<int32_t>& to_slots) {
    return TokenCopy::Plan(from, from_slots, to, to_slots).status();
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(4096);
  static constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  static constexpr auto kRange = absl::StatusCode::kOutOfRange;
};

TEST_F(TokenCopies, WhatDoesNotFitIsNamed) {
  const TokenView view = View(4, 2, 8);
  EXPECT_TRUE(IsOk(Plan(view, {0, 3}, view, {1, 2})));
  EXPECT_TRUE(Fails(Plan(view, {0}, view, {1, 2}), kInvalid, "1 rows to read but 2 to write"));
  EXPECT_TRUE(
      Fails(Plan(view, {0, 4}, view, {1, 2}), kRange, "source slot 4 at position 1", "[0, 4)"));
  EXPECT_TRUE(
      Fails(Plan(view, {0, 1}, view, {-1, 2}), kRange, "destination slot -1 at position 0"));
  EXPECT_TRUE(Fails(Plan(view, {0}, View(4, 1, 8), {0}), kInvalid, "2 heads x 8", "1 heads x 8"));
  EXPECT_TRUE(
      Fails(Plan(view, {0}, View(4, 2, 8, DType::kUint8), {0}), kInvalid, "float32", "uint8"));
  for (const float scale : {0.0F, -1.0F, HUGE_VALF, std::nanf("")}) {
    TokenView scaled = view;
    scaled.scale = scale;
    EXPECT_TRUE(Fails(Plan(view, {0}, scaled, {0}), kInvalid, "scale of the destination"));
    EXPECT_TRUE(Fails(Plan(scaled, {0}, view, {0}), kInvalid, "scale of the source"));
  }
}

TEST(TokenCopyThreads, PartsMakeTheWhole) {
  const auto threads = Must(ThreadPool::Create(3));
  constexpr int64_t kRows = 5000, kDim = 300;
  std::vector<uint32_t> from(kRows * kDim), to(kRows * kDim), want(kRows * kDim);
  std::vector<int32_t> from_slots(kRows), to_slots(kRows);
  std::iota(from_slots.begin(), from_slots.end(), 0);
  std::iota(to_slots.begin(), to_slots.end(), 0);
  std::mt19937_64 random(2);
  for (uint32_t& value : from) value = static_cast<uint32_t>(random() >> 34);
  // Runs of neighbours, some of them across the borders of parts.
  for (size_t i = 0; i + 100 < kRows; i += 100) {
    std::swap_ranges(&to_slots[i], &to_slots[i] + 50, &to_slots[i + 50]);
  }
  const auto view = [](std::vector<uint32_t>& values) {
    return TokenView::Packed(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32, kRows, 1,
                             kDim);
  };
  const auto copy = TokenCopy::Plan(view(from), from_slots, view(to), to_slots);
  ASSERT_TRUE(IsOk(copy));
  copy->Run(threads.get());
  for (int64_t i = 0; i < kRows; ++i) {
    std::copy_n(&from[from_slots[i] * kDim], kDim, &want[to_slots[i] * kDim]);
  }
  EXPECT_EQ(to, want);
}

TEST_F(TokenCopies, SidesWithoutAListCountFromZero) {
  for (size_t i = 0; i < memory_.size(); ++i) memory_[i] = static_cast<std::byte>(i / 16);
  const TokenView pool = View(100, 1, 16, DType::kUint8);
  std::vector<std::byte> packed(3 * 16);
  const TokenView rows = TokenView::Packed(packed.data(), DType::kUint8, 3, 1, 16);
  const std::vector<int32_t> slots = {7, 8, 90};
  const auto gather = TokenCopy::PlanGather(pool, slots, rows);
  ASSERT_TRUE(IsOk(gather));
  gather->Run();
  EXPECT_EQ(packed[0], std::byte{7});
  EXPECT_EQ(packed[16], std::byte{8});
  EXPECT_EQ(packed[47], std::byte{90});
  const std::vector<int32_t> others = {1, 3, 2};
  const auto scatter = TokenCopy::PlanScatter(rows, pool, others);
  ASSERT_TRUE(IsOk(scatter));
  scatter->Run();
  EXPECT_EQ(memory_[1 * 16], std::byte{7});
  EXPECT_EQ(memory_[2 * 16 + 15], std::byte{90});
  EXPECT_EQ(memory_[3 * 16], std::byte{8});
  EXPECT_TRUE(Fails(TokenCopy::PlanGather(pool, others, View(4, 1, 16, DType::kUint8)), kInvalid,
                    "3 rows to read but 4"));
}

}  // namespace
}  // namespace kvferry
