#include "pool/cuda/token_copy_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
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

constexpr DType kFloats[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                             DType::kFloat8E5M2};

// Beyond what the suite asks: the same NaNs too. Scales that most numbers are divided by the short
// way, and some that are too large or too small for it.
TEST_F(TokenCopyCuda, WritesTheBytesThatTheCpuWrites) {
  constexpr int64_t kRows = 32, kDim = 4096;
  constexpr std::pair<float, float> kScales[] = {
      {0.37F, 1.9F}, {1, 2.5F}, {7, 0x1p-65F}, {1, 1e38F}, {1e9F, 1e-37F}};
  std::vector<int32_t> slots(kRows);
  std::iota(slots.begin(), slots.end(), 0);
  for (const DType from_dtype : kFloats) {
    std::vector<std::byte> from = RandomBytes(kRows * kDim * DTypeBytes(from_dtype));
    const DeviceBytes source(from);
    for (const DType to_dtype : kFloats) {
      for (const auto& [multiply, divide] : kScales) {
        std::vector<std::byte> want(kRows * kDim * DTypeBytes(to_dtype));
        const DeviceBytes destination(want);
        TokenView from_view = TokenView::Packed(from.data(), from_dtype, kRows, 1, kDim);
        TokenView to_view = TokenView::Packed(want.data(), to_dtype, kRows, 1, kDim);
        from_view.scale = multiply;
        to_view.scale = divide;
        const auto copy = TokenCopy::PlanGather(from_view, slots, to_view);
        ASSERT_TRUE(IsOk(copy));
        copy->Run();
        ASSERT_TRUE(IsOk(CopyTokensCuda(OnDevice(from_view, source.data()), nullptr,
                                        OnDevice(to_view, destination.data()), nullptr, kRows,
                                        nullptr, kStream)));
        EXPECT_EQ(destination.ToHost(), want) << DTypeName(from_dtype) << " x " << multiply
                                              << " to " << DTypeName(to_dtype) << " / " << divide;
      }
    }
  }
}

// One side, the other or both, of copies between all dtypes: at an odd address, with gaps between
// values, and with heads that are no multiple of a word.
TEST_F(TokenCopyCuda, RowsAndValuesAtAnyAddress) {
  constexpr int64_t kRows = 40, kHeads = 3;
  std::vector<int32_t> slots(kRows);
  std::iota(slots.begin(), slots.end(), 0);
  const auto check = [&](DType from_dtype, DType to_dtype, int64_t dim, int64_t from_offset,
                         int64_t to_offset, int64_t from_gap, int64_t to_gap) {
    const auto view = [&](std::byte* data, DType dtype, int64_t gap) {
      TokenView wide = TokenView::Packed(data, dtype, kRows, kHeads, dim * gap);
      wide.head_dim = dim;
      wide.value_stride *= gap;
      return wide;
    };
    std::vector<std::byte> from =
        RandomBytes(kRows * kHeads * dim * from_gap * DTypeBytes(from_dtype) + 16);
    std::vector<std::byte> to =
        RandomBytes(kRows * kHeads * dim * to_gap * DTypeBytes(to_dtype) + 16);
    const DeviceBytes source(from), destination(to);
    const TokenView from_view = view(from.data() + from_offset, from_dtype, from_gap);
    TokenView to_view = view(to.data() + to_offset, to_dtype, to_gap);
    if (from_dtype != DType::kUint8) to_view.scale = dim % 2 == 0 ? 1 : 2.5F;
    const auto copy = TokenCopy::PlanGather(from_view, slots, to_view);
    ASSERT_TRUE(IsOk(copy));
    copy->Run();
    ASSERT_TRUE(IsOk(CopyTokensCuda(OnDevice(from_view, source.data() + from_offset), nullptr,
                                    OnDevice(to_view, destination.data() + to_offset), nullptr,
                                    kRows, nullptr, kStream)));
    ASSERT_EQ(destination.ToHost(), to)
        << DTypeName(from_dtype) << " to " << DTypeName(to_dtype) << ", heads of " << dim << ", at "
        << from_offset << " and " << to_offset << ", gaps " << from_gap << " and " << to_gap;
  };
  for (const int64_t dim : {1, 16, 20, 33}) {
    for (const auto& [from_offset, to_offset] : {std::pair(0, 0), {1, 0}, {0, 3}, {5, 7}, {2, 4}}) {
      for (const auto& [from_gap, to_gap] : {std::pair(1, 1), {3, 1}, {1, 2}}) {
        check(DType::kUint8, DType::kUint8, dim, from_offset, to_offset, from_gap, to_gap);
        for (const DType from_dtype : kFloats) {
          for (const DType to_dtype : kFloats) {
            check(from_dtype, to_dtype, dim, from_offset, to_offset, from_gap, to_gap);
          }
        }
      }
    }
  }
}

// Rows that are longer and shorter than what a block of threads takes at a time, 1,024 words of 16
// bytes, and as many as just fill it; every third is skipped, each wherever it lies in a tile.
TEST_F(TokenCopyCuda, RowsMayBeginAndEndAnywhereInATile) {
  for (const int64_t words : {1, 3, 72, 512, 1023, 1024, 1025, 2500}) {
    const int64_t full = std::max<int64_t>(1, 1024 / words), bytes = words * 16;
    for (const int64_t count : {full - 1, full, full + 1, 3 * full + 2}) {
      if (count == 0) continue;
      for (const bool skips : {false, true}) {
        const std::vector<std::byte> from = RandomBytes(count * bytes);
        const std::vector<std::byte> before = RandomBytes(count * bytes);
        std::vector<int32_t> slots(static_cast<size_t>(count));
        std::iota(slots.begin(), slots.end(), 0);
        std::shuffle(slots.begin(), slots.end(), random_);
        std::vector<std::byte> want = before;
        int64_t skipped_rows = 0;
        for (int64_t i = 0; i < count; ++i) {
          int32_t& slot = slots[static_cast<size_t>(i)];
          if (skips && i % 3 == 1) {
            slot = i % 2 == 0 ? -1 : static_cast<int32_t>(count);
            ++skipped_rows;
          } else {
            std::copy_n(&from[i * bytes], bytes, &want[slot * bytes]);
          }
        }
        const DeviceBytes source(from), destination(before), writes(slots);
        const DeviceBytes skipped(std::vector<int64_t>{0});
        ASSERT_TRUE(IsOk(CopyTokensCuda(
            TokenView::Packed(source.data(), DType::kUint8, count, 1, bytes), nullptr,
            TokenView::Packed(destination.data(), DType::kUint8, count, 1, bytes), writes.slots(),
            count, skipped.counter(), kStream)));
        ASSERT_EQ(destination.ToHost(), want) << count << " rows of " << words << " words";
        ASSERT_EQ(skipped.ToHost<int64_t>()[0], skipped_rows);
      }
    }
  }
}

// Of any number of slots, also of more than there may be slots.
TEST_F(TokenCopyCuda, PagesOfAnySize) {
  constexpr int64_t kSlots = 5000, kBytes = 16, kGap = 48;
  const std::vector<std::byte> from = RandomBytes(kSlots * kBytes);
  std::vector<int32_t> slots(kSlots);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), random_);
  const DeviceBytes source(from), reads(slots);
  for (const int64_t page :
       {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{7}, int64_t{64}, int64_t{1000}, int64_t{4999},
        int64_t{1} << 31, (int64_t{1} << 40) + 5}) {
    const int64_t pages = (kSlots + page - 1) / page;
    std::vector<std::byte> want = RandomBytes(kSlots * kBytes + pages * kGap);
    const DeviceBytes destination(want);
    TokenView view = TokenView::Packed(destination.data(), DType::kUint8, kSlots, 1, kBytes);
    view.page_size = page;
    view.page_stride = std::min(page, kSlots) * kBytes + kGap;
    for (int64_t i = 0; i < kSlots; ++i) {
      const int64_t slot = slots[static_cast<size_t>(i)];
      std::copy_n(&from[i * kBytes], kBytes,
                  &want[slot / page * view.page_stride + slot % page * kBytes]);
    }
    ASSERT_TRUE(
        IsOk(CopyTokensCuda(TokenView::Packed(source.data(), DType::kUint8, kSlots, 1, kBytes),
                            nullptr, view, reads.slots(), kSlots, nullptr, kStream)));
    ASSERT_EQ(destination.ToHost(), want) << page;
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
