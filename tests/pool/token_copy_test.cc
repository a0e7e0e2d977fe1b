#include "pool/token_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "tests/pool/token_copy_suite.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

TokenCopyBackend BackendWith(CpuKernels kernels) {
  return {BackendOf(kernels),
          [kernels](const AnyTensor& from, const std::vector<int32_t>& from_slots, AnyTensor& to,
                    const std::vector<int32_t>& to_slots) -> absl::Status {
            KVFERRY_ASSIGN_OR_RETURN(
                const TokenCopy copy,
                TokenCopy::Plan(from.view, from_slots, to.view, to_slots, kernels));
            copy.Run();
            return absl::OkStatus();
          }};
}

INSTANTIATE_TEST_SUITE_P(Kernels, RandomCopies,
                         testing::Values(BackendWith(CpuKernels::kPortable),
                                         BackendWith(CpuKernels::kAvx2),
                                         BackendWith(CpuKernels::kAvx512)),
                         BackendName());

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
