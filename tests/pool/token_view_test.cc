#include "pool/token_view.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Where the array has its values, the last index running fastest.
std::vector<int64_t> PlacesIn(const std::vector<ArrayDim>& dims) {
  std::vector<int64_t> places = {0};
  for (const ArrayDim& dim : dims) {
    std::vector<int64_t> next;
    for (const int64_t place : places) {
      for (int64_t i = 0; i < dim.size; ++i) next.push_back(place + i * dim.stride);
    }
    places = std::move(next);
  }
  return places;
}

std::vector<int64_t> PlacesIn(const TokenView& view) {
  std::vector<int64_t> places;
  for (int64_t slot = 0; slot < view.num_slots; ++slot) {
    for (int64_t head = 0; head < view.num_heads; ++head) {
      for (int64_t value = 0; value < view.head_dim; ++value) {
        places.push_back(view.row(slot) - view.data + head * view.head_stride +
                         value * view.value_stride);
      }
    }
  }
  return places;
}

class TokenViewsOfArrays : public testing::Test {
 protected:
  absl::StatusOr<TokenView> View(const std::vector<ArrayDim>& dims, int64_t slots, int64_t heads,
                                 int64_t dim) {
    return TokenView::OfArray(memory_.data(), DType::kFloat16, dims, slots, heads, dim);
  }
  std::vector<std::byte> memory_ = std::vector<std::byte>(16);
};

TEST_F(TokenViewsOfArrays, WithoutGapsTheyArePacked) {
  const TokenView packed = TokenView::Packed(memory_.data(), DType::kFloat16, 6, 2, 4);
  EXPECT_EQ(Must(View({{6, 16}, {2, 8}, {4, 2}}, 6, 2, 4)), packed);
  EXPECT_EQ(Must(View({{2, 48}, {3, 16}, {8, 2}}, 6, 2, 4)), packed);
  EXPECT_EQ(Must(View({{48, 2}}, 6, 2, 4)), packed);
  EXPECT_EQ(Must(View({{0, 16}, {2, 8}, {4, 2}}, 0, 2, 4)),
            TokenView::Packed(memory_.data(), DType::kFloat16, 0, 2, 4));
  // However far apart one slot, head or value would be from the next.
  EXPECT_EQ(Must(View({{1, 999}, {1, 7}, {1, 5}, {4, 2}}, 1, 1, 4)),
            TokenView::Packed(memory_.data(), DType::kFloat16, 1, 1, 4));
}

TEST_F(TokenViewsOfArrays, AKeyInAFusedQkvIsWhereItLies) {
  // [batch, seq, (8 query + 2 key + 2 value heads) x 4], of which the key heads.
  for (const std::vector<ArrayDim>& dims :
       {std::vector<ArrayDim>{{3, 480}, {5, 96}, {2, 8}, {4, 2}},
        std::vector<ArrayDim>{{15, 96}, {8, 2}}}) {
    const TokenView view = Must(View(dims, 15, 2, 4));
    EXPECT_EQ(view.token_stride, 96);
    EXPECT_EQ(view.page_size, 1);
    EXPECT_TRUE(view.RowsAreDense());
    EXPECT_EQ(PlacesIn(view), PlacesIn(dims));
  }
}

// Dimensions of a whole array in any order, some of them cut in two.
TEST_F(TokenViewsOfArrays, AreThoseOfTheArrayOrRefused) {
  std::mt19937 random(7);
  int refused = 0, paged = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto upto = [&](int64_t most) { return 1 + static_cast<int64_t>(random() % most); };
    std::vector<int64_t> sizes = {upto(3), upto(3), upto(3), upto(4)};
    const int64_t slots = sizes[0] * sizes[1];
    std::vector<size_t> order = {0, 1, 2, 3};
    if (round % 2 == 0) std::shuffle(order.begin(), order.end(), random);
    std::vector<ArrayDim> dims(4);
    int64_t stride = 2;
    for (const size_t i : {3, 2, 1, 0}) {
      if (random() % 3 == 0) stride *= 3;
      dims[order[i]] = {sizes[order[i]], random() % 8 == 0 ? 0 : stride};
      stride *= sizes[order[i]];
    }
    // Other heads of the same rows now and then, which cut through dimensions.
    const int64_t heads = round % 5 == 0 ? sizes[3] : sizes[2];
    const int64_t dim = round % 5 == 0 ? sizes[2] : sizes[3];
    const absl::StatusOr<TokenView> view = View(dims, slots, heads, dim);
    if (!view.ok()) {
      EXPECT_TRUE(Fails(view, kInvalid, "no evenly spaced"));
      EXPECT_EQ(round % 5, 0);  // Four dimensions are not too many where none is cut.
      ++refused;
      continue;
    }
    paged += view->page_size > 1 ? 1 : 0;
    EXPECT_EQ(PlacesIn(*view), PlacesIn(dims)) << round;
  }
  EXPECT_GT(refused, 10);
  EXPECT_GT(paged, 100);
}

TEST_F(TokenViewsOfArrays, WhatDoesNotFitIsNamed) {
  EXPECT_TRUE(Fails(View({{6, 16}, {7, 2}}, 6, 2, 4), kInvalid, "rows have 42 values",
                    "6 slots of 2 heads x 4 have 48"));
  EXPECT_TRUE(Fails(View({{2, 100}, {2, 40}, {2, 16}, {8, 2}}, 8, 2, 4), kInvalid,
                    "2 x 100, 2 x 40, 2 x 16, 8 x 2", "no evenly spaced 2 heads x 4"));
}

TEST(TokenViewsOfPools, WhatThereIsNotIsNamed) {
  const auto pool = Must(KvPool::Create(KvLayout::Mha(3, 4, 2, 8, DType::kUint8), 2));
  EXPECT_TRUE(IsOk(TokenView::Of(*pool, 2, 1)));
  for (const auto& [layer, tensor] :
       {std::pair{int64_t{3}, int64_t{1}}, {int64_t{-1}, 1}, {int64_t{2}, 2}, {int64_t{2}, -1}}) {
    EXPECT_TRUE(Fails(TokenView::Of(*pool, layer, tensor), absl::StatusCode::kOutOfRange,
                      "3 layers of 2 tensors"));
  }
}

// Whether two views meet is told by it.
TEST(TokenViewsOfPools, TheHullIsFromTheFirstByteToTheLast) {
  std::vector<std::byte> bytes(48);
  const auto is = [](std::span<const std::byte> hull, const std::byte* begin, size_t size) {
    return hull.data() == begin && hull.size() == size;
  };
  TokenView view = TokenView::Packed(bytes.data(), DType::kUint8, 6, 2, 4);
  EXPECT_TRUE(is(view.Hull(), bytes.data(), 48));
  view.data = view.row(5);  // The last row first.
  view.page_stride = view.token_stride = -8;
  EXPECT_TRUE(is(view.Hull(), bytes.data(), 48));
  // Less than a page.
  view = TokenView::Packed(bytes.data(), DType::kUint8, 2, 2, 4);
  view.page_size = 4;
  view.page_stride = 32;
  EXPECT_TRUE(is(view.Hull(), bytes.data(), 16));
}

}  // namespace
}  // namespace kvferry
