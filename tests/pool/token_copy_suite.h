#pragma once

// Copies of token rows: every backend enrols here with
//   INSTANTIATE_TEST_SUITE_P(Where, RandomCopies, testing::Values(backend, ...), BackendName());
// in one file of its binary, and must agree with copying value by value.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "pool/token_view.h"
#include "tests/pool/backend.h"
#include "tests/pool/naive_numbers.h"
#include "tests/support/status.h"

namespace kvferry {

// A tensor [pages, page_size, heads, dim] with its dimensions in any order, in memory of its own.
struct AnyTensor {
  std::vector<std::byte> memory;
  int64_t begin;   // Of the values in it, so that they need not be aligned.
  TokenView view;  // Its data is that of the tensor it was made in, not of copies.

  AnyTensor(DType dtype, int64_t pages, int64_t page_size, int64_t heads, int64_t dim,
            const std::array<int, 4>& order, int64_t begin, float scale, std::mt19937_64& random)
      : begin(begin) {
    const std::array<int64_t, 4> sizes = {pages, page_size, heads, dim};
    std::array<int64_t, 4> strides;
    int64_t stride = DTypeBytes(dtype);
    for (int i = 3; i >= 0; --i) {
      strides[order[i]] = stride;
      stride *= sizes[order[i]];
    }
    memory.resize(static_cast<size_t>(begin + stride + 16));
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
    view = TokenView::Packed(memory.data() + begin, dtype, pages * page_size, heads, dim);
    view.page_size = page_size;
    view.page_stride = strides[0];
    view.token_stride = strides[1];
    view.head_stride = strides[2];
    view.value_stride = strides[3];
    view.scale = scale;
  }

  void Slice(int64_t first, int64_t count) {
    view = view.Slice(first, count);
    begin += first * view.value_stride;
  }

  int64_t Offset(int64_t slot, int64_t head, int64_t value) const {
    return begin + slot / view.page_size * view.page_stride +
           slot % view.page_size * view.token_stride + head * view.head_stride +
           value * view.value_stride;
  }
};

struct TokenCopyBackend : Backend {
  // Copies rows between the tensors, whose memory is the host's.
  std::function<absl::Status(const AnyTensor& from, const std::vector<int32_t>& from_slots,
                             AnyTensor& to, const std::vector<int32_t>& to_slots)>
      copy;
  bool keeps_last = true;  // Of the rows that go to one slot.
};

class RandomCopies : public testing::TestWithParam<TokenCopyBackend> {
 protected:
  void SetUp() override {
    if (!GetParam().missing.empty()) GTEST_SKIP() << GetParam().missing;
  }

  int64_t Upto(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  AnyTensor Tensor(DType dtype, int64_t heads, int64_t dim) {
    std::array<int, 4> order = {0, 1, 2, 3};  // NHD half of the time.
    if (Upto(2) == 0) std::shuffle(order.begin(), order.end(), random_);
    const float scale = dtype == DType::kUint8 ? 1 : static_cast<float>(1 + Upto(3)) / 2;
    const int64_t begin = Upto(3) == 0 ? Upto(16) : 0;
    // A third are part of wider heads, whose other values must stay as they are; half of those
    // are padded to whole words.
    const int64_t more = Upto(3) > 0 ? 0 : Upto(2) == 0 ? 16 - dim % 16 : Upto(9);
    AnyTensor tensor(dtype, 1 + Upto(6), 1 + Upto(5), heads, dim + more, order, begin, scale,
                     random_);
    tensor.Slice(Upto(2) == 0 ? 0 : Upto(more + 1), dim);
    return tensor;
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
inline std::vector<std::byte> Expected(const AnyTensor& from,
                                       const std::vector<int32_t>& from_slots, const AnyTensor& to,
                                       const std::vector<int32_t>& to_slots,
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
  constexpr DType kDTypes[] = {DType::kFloat32,    DType::kFloat16,    DType::kBFloat16,
                               DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kUint8};
  for (int64_t rows = 0; rows < 50000;) {
    // Rows that fit no word of the machine, and rows of many words.
    const int64_t heads = 1 + Upto(3), dim = Upto(4) > 0 ? 1 + Upto(20) : 16 * (1 + Upto(15));
    const DType from_dtype = kDTypes[Upto(6)];
    const bool same = from_dtype == DType::kUint8 || Upto(2) == 0;
    const DType to_dtype = same ? from_dtype : kDTypes[Upto(5)];
    const AnyTensor from = Tensor(from_dtype, heads, dim);
    AnyTensor to = Tensor(to_dtype, heads, dim);
    const int64_t count = Upto(std::min(from.view.num_slots, to.view.num_slots) + 1);
    const std::vector<int32_t> from_slots = SlotsOf(from.view, count, false);
    const std::vector<int32_t> to_slots =
        SlotsOf(to.view, count, !GetParam().keeps_last || Upto(3) > 0);
    const AnyTensor before = to;
    ASSERT_TRUE(IsOk(GetParam().copy(from, from_slots, to, to_slots)));
    ASSERT_EQ(to.memory, Expected(from, from_slots, before, to_slots, to.memory))
        << DTypeName(from_dtype) << " to " << DTypeName(to_dtype);
    rows += count + 1;
  }
}

}  // namespace kvferry
