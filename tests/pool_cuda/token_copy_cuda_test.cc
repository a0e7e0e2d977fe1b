#include "pool/cuda/token_copy_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "pool/page_copy.h"
#include "pool/token_copy.h"
#include "tests/pool/token_copy_suite.h"
#include "tests/pool_cuda/device.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr cudaStream_t kStream = nullptr;

TokenView OnDevice(TokenView view, std::byte* data) {
  view.data = data;
  return view;
}

absl::Status CopyOnDevice(const AnyTensor& from, const std::vector<int32_t>& from_slots,
                          AnyTensor& to, const std::vector<int32_t>& to_slots) {
  const DeviceBytes source(from.memory), destination(to.memory);
  const DeviceBytes reads(from_slots), writes(to_slots), skipped(std::vector<int64_t>{0});
  absl::Status status =
      CopyTokensCuda(OnDevice(from.view, source.data() + from.begin), reads.slots(),
                     OnDevice(to.view, destination.data() + to.begin), writes.slots(),
                     static_cast<int64_t>(to_slots.size()), skipped.counter(), kStream);
  destination.CopyTo(to.memory.data());
  EXPECT_EQ(skipped.ToHost<int64_t>()[0], 0);
  return status;
}

INSTANTIATE_TEST_SUITE_P(Kernels, RandomCopies,
                         testing::Values(TokenCopyBackend{
                             {"Cuda", MissingDevice()}, CopyOnDevice, /*keeps_last=*/false}),
                         BackendName());

class TokenCopyCuda : public DeviceTest {
 protected:
  TokenCopyCuda() : DeviceTest(3) {}
};

// Beyond what the suite asks: the same NaNs too.
TEST_F(TokenCopyCuda, WritesTheBytesThatTheCpuWrites) {
  constexpr int64_t kRows = 64, kDim = 4096;
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                               DType::kFloat8E4M3, DType::kFloat8E5M2};
  std::vector<int32_t> slots(kRows);
  std::iota(slots.begin(), slots.end(), 0);
  for (const DType from_dtype : kDTypes) {
    std::vector<std::byte> from = RandomBytes(kRows * kDim * DTypeBytes(from_dtype));
    const DeviceBytes source(from);
    for (const DType to_dtype : kDTypes) {
      std::vector<std::byte> want(kRows * kDim * DTypeBytes(to_dtype));
      const DeviceBytes destination(want);
      TokenView from_view = TokenView::Packed(from.data(), from_dtype, kRows, 1, kDim);
      TokenView to_view = TokenView::Packed(want.data(), to_dtype, kRows, 1, kDim);
      from_view.scale = 0.37F;
      to_view.scale = 1.9F;
      const auto copy = TokenCopy::PlanGather(from_view, slots, to_view);
      ASSERT_TRUE(IsOk(copy));
      copy->Run();
      ASSERT_TRUE(IsOk(CopyTokensCuda(OnDevice(from_view, source.data()), nullptr,
                                      OnDevice(to_view, destination.data()), nullptr, kRows,
                                      nullptr, kStream)));
      EXPECT_EQ(destination.ToHost(), want)
          << DTypeName(from_dtype) << " to " << DTypeName(to_dtype);
    }
  }
}

TEST_F(TokenCopyCuda, SlotsOutsideTheViewsAreSkippedAndCounted) {
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  // Long rows, of which several warps take a piece each.
  constexpr int64_t kSlots = 8, kBytes = 9000;
  const std::vector<std::byte> from = RandomBytes(kSlots * kBytes);
  const std::vector<std::byte> before = RandomBytes(kSlots * kBytes);
  const std::vector<int32_t> from_slots = {0, 8, 2, -1, 4, kMax, 6, kMin, 7};
  const std::vector<int32_t> to_slots = {7, 6, -1, 5, 8, 4, kMin, kMax, 0};
  const DeviceBytes source(from), destination(before);
  const DeviceBytes reads(from_slots), writes(to_slots), skipped(std::vector<int64_t>{100});
  ASSERT_TRUE(IsOk(CopyTokensCuda(
      TokenView::Packed(source.data(), DType::kUint8, kSlots, 1, kBytes), reads.slots(),
      TokenView::Packed(destination.data(), DType::kUint8, kSlots, 1, kBytes), writes.slots(),
      static_cast<int64_t>(to_slots.size()), skipped.counter(), kStream)));
  std::vector<std::byte> want = before;
  std::copy_n(from.data(), kBytes, &want[7 * kBytes]);
  std::copy_n(&from[7 * kBytes], kBytes, want.data());
  EXPECT_EQ(destination.ToHost(), want);
  EXPECT_EQ(skipped.ToHost<int64_t>()[0], 100 + 7);
}

TEST_F(TokenCopyCuda, ACounterIsNotNeeded) {
  const std::vector<std::byte> bytes = RandomBytes(64);
  const DeviceBytes memory(bytes), slots(std::vector<int32_t>{-1, 4});
  const TokenView view = TokenView::Packed(memory.data(), DType::kUint8, 4, 1, 16);
  ASSERT_TRUE(IsOk(CopyTokensCuda(view, slots.slots(), view, nullptr, 2, nullptr, kStream)));
  EXPECT_EQ(memory.ToHost(), bytes);
}

// Bytes of a page: a multiple of 16 that many warps share, MLA's 1,152, one of 4, and an odd one.
TEST_F(TokenCopyCuda, WholePagesAreRowsOfBytes) {
  constexpr int64_t kPages = 300;
  for (const int64_t item_bytes : {32768, 1152, 132, 37}) {
    std::vector<std::byte> pool = RandomBytes(kPages * item_bytes);
    std::vector<int64_t> pages(kPages);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random_);
    pages.resize(kPages / 2);
    const int64_t count = static_cast<int64_t>(pages.size());
    const DeviceBytes slots(std::vector<int32_t>(pages.begin(), pages.end()));
    const BufferInfo buffer = {pool.data(), kPages * item_bytes, item_bytes};

    std::vector<std::byte> packed(static_cast<size_t>(count * item_bytes));
    const DeviceBytes device_pool(pool), device_packed(packed);
    const auto rows = TokenView::Packed(device_pool.data(), DType::kUint8, kPages, 1, item_bytes);
    const auto packed_rows =
        TokenView::Packed(device_packed.data(), DType::kUint8, count, 1, item_bytes);
    GatherPages(buffer, *PageRuns::FromPages(pages), 0, packed);
    ASSERT_TRUE(
        IsOk(CopyTokensCuda(rows, slots.slots(), packed_rows, nullptr, count, nullptr, kStream)));
    EXPECT_EQ(device_packed.ToHost(), packed) << item_bytes;

    std::reverse(packed.begin(), packed.end());
    const DeviceBytes reversed(packed);
    ScatterPages(buffer, *PageRuns::FromPages(pages), 0, packed);
    ASSERT_TRUE(IsOk(CopyTokensCuda(OnDevice(packed_rows, reversed.data()), nullptr, rows,
                                    slots.slots(), count, nullptr, kStream)));
    EXPECT_EQ(device_pool.ToHost(), pool) << item_bytes;
  }
}

// Checks that need no device: nothing may be launched.
class TokenCopyCudaArguments : public testing::Test {
 protected:
  absl::Status Copy(const TokenView& from, const TokenView& to, int64_t num_rows,
                    const int32_t* slots = nullptr) {
    return CopyTokensCuda(from, slots, to, slots, num_rows, nullptr, kStream);
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(4096);
  TokenView view_ = TokenView::Packed(memory_.data(), DType::kFloat32, 4, 2, 8);
  static constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
};

TEST_F(TokenCopyCudaArguments, NothingToDoIsDone) {
  EXPECT_TRUE(IsOk(Copy(view_, view_, 0)));
  const TokenView empty = TokenView::Packed(nullptr, DType::kFloat32, 0, 2, 8);
  EXPECT_TRUE(IsOk(Copy(empty, empty, 0)));
  const TokenView no_values = TokenView::Packed(memory_.data(), DType::kFloat32, 4, 2, 0);
  EXPECT_TRUE(IsOk(Copy(no_values, no_values, 4)));
}

TEST_F(TokenCopyCudaArguments, RowsThatDoNotFitAreNamedAsOnTheCpu) {
  TokenView other = TokenView::Packed(memory_.data(), DType::kFloat32, 4, 1, 8);
  EXPECT_TRUE(Fails(Copy(view_, other, 1), kInvalid, "2 heads x 8", "1 heads x 8"));
  other = TokenView::Packed(memory_.data(), DType::kUint8, 4, 2, 8);
  EXPECT_TRUE(Fails(Copy(view_, other, 1), kInvalid, "float32", "uint8"));
  for (const float scale : {0.0F, -1.0F, HUGE_VALF, std::nanf("")}) {
    other = view_;
    other.scale = scale;
    EXPECT_TRUE(Fails(Copy(view_, other, 1), kInvalid, "scale of the destination"));
    EXPECT_TRUE(Fails(Copy(other, view_, 1), kInvalid, "scale of the source"));
  }
}

TEST_F(TokenCopyCudaArguments, CountsAndAddressesAreChecked) {
  EXPECT_TRUE(Fails(Copy(view_, view_, -1), kInvalid, "num_rows is -1"));
  EXPECT_TRUE(Fails(Copy(view_, view_, int64_t{1} << 31), kInvalid, "num_rows is 2147483648"));
  EXPECT_TRUE(
      Fails(Copy(view_, view_, 5), absl::StatusCode::kOutOfRange, "5 rows", "source has 4 slots"));
  EXPECT_TRUE(Fails(Copy(view_, OnDevice(view_, nullptr), 1), kInvalid, "destination has no data"));
  TokenView odd = view_;
  odd.page_size = 0;
  EXPECT_TRUE(Fails(Copy(odd, view_, 1), kInvalid, "the source", "pages of 0"));
  TokenView wide = view_;
  wide.num_heads = int64_t{1} << 40;
  wide.head_dim = int64_t{1} << 40;
  EXPECT_TRUE(Fails(Copy(wide, wide, 1), kInvalid, "1099511627776 heads", "INT32_MAX"));
  wide.num_heads = -2;
  EXPECT_TRUE(Fails(Copy(wide, wide, 1), kInvalid, "-2 heads"));
}

}  // namespace
}  // namespace kvferry
