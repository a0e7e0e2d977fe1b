#include "pool/head_slice.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// What the header says, a value at a time: where the bytes of `heads` of `pages` lie in one buffer.
std::vector<const std::byte*> Naive(const KvPool& pool, int64_t layer, int64_t tensor,
                                    const std::vector<int64_t>& pages, HeadRange heads) {
  const KvLayout& layout = pool.layout();
  const int64_t num_heads = layout.tensors[tensor].num_heads;
  const int64_t value_bytes = layout.item_bytes(tensor) / layout.page_size / num_heads;
  const bool nhd = layout.page_format == "NHD";
  std::vector<const std::byte*> bytes;
  const auto add = [&](int64_t page, int64_t value) {
    const std::span<std::byte> all = pool.page(layer, tensor, page);
    for (int64_t i = 0; i < value_bytes; ++i) bytes.push_back(&all[value * value_bytes + i]);
  };
  for (const int64_t page : pages) {
    for (int64_t outer = 0; outer < (nhd ? layout.page_size : heads.count); ++outer) {
      for (int64_t inner = 0; inner < (nhd ? heads.count : layout.page_size); ++inner) {
        const int64_t head = heads.first + (nhd ? inner : outer);
        const int64_t token = nhd ? outer : inner;
        add(page, nhd ? token * num_heads + head : head * layout.page_size + token);
      }
    }
  }
  return bytes;
}

TEST(HeadSlice, RandomSlicesValueByValue) {
  std::mt19937_64 random(1);
  const auto upto = [&](int64_t max) { return 1 + static_cast<int64_t>(random() % max); };
  for (int round = 0; round < 400; ++round) {
    const std::string format = std::vector<std::string>{"NHD", "HND", "an engine's-HND"}[round % 3];
    const int64_t num_heads = upto(8);
    KvLayout layout{upto(2), upto(4), DType::kFloat16, format, {}};
    for (int64_t i = upto(2); i > 0; --i) layout.tensors.push_back({"t", num_heads, upto(3)});
    const std::shared_ptr<const KvPool> pool = MakePatternPool(layout, 12, 7);
    const auto pages = MakePages(round % 2 == 0 ? "rand" : "seq", upto(12), 12, &random);
    const HeadRange heads{static_cast<int64_t>(random() % num_heads), 0};
    const HeadRange some{heads.first, upto(num_heads - heads.first)};
    const HeadSlice slice = Must(SliceHeads(pool, Must(PageRuns::FromPages(pages)), some));
    const KvLayout& items = slice.pool->layout();
    ASSERT_EQ(slice.items.num_pages(), static_cast<int64_t>(pages.size()) * slice.items_a_page);
    ASSERT_EQ(slice.items_a_page * items.page_bytes() * num_heads,
              some.count * layout.page_bytes());
    for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
      for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
        const auto want = Naive(*pool, layer, tensor, pages, some);
        size_t at = 0;
        for (const int64_t item : slice.items.ToPages()) {
          for (const std::byte& byte : slice.pool->page(layer, tensor, item)) {
            ASSERT_EQ(&byte, want.at(at++)) << layout.ToString() << " heads " << some.first;
          }
        }
        ASSERT_EQ(at, want.size());
      }
    }
  }
}

TEST(HeadSlice, AllHeadsAreThePoolAsItIs) {
  const std::shared_ptr<const KvPool> pool =
      MakePatternPool(KvLayout{1, 2, DType::kUint8, "engine's own", {{"k", 3, 4}}}, 4, 1);
  const PageRuns pages(PageRun{1, 3});
  for (const HeadRange heads : {HeadRange{}, HeadRange{0, 3}}) {
    const HeadSlice slice = Must(SliceHeads(pool, pages, heads));
    EXPECT_EQ(slice.pool, pool);
    EXPECT_EQ(slice.items.ToPages(), pages.ToPages());
  }
}

TEST(HeadSlice, WhatThePagesDoNotHoldIsRefused) {
  const auto with = [](const KvLayout& layout, HeadRange heads) {
    const std::shared_ptr<const KvPool> pool = MakePatternPool(layout, 4, 1);
    return SliceHeads(pool, PageRuns(PageRun{0, 4}), heads).status();
  };
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const KvLayout four = KvLayout::Mha(1, 2, 4, 8, DType::kBFloat16);
  for (const HeadRange heads :
       {HeadRange{-1, 2}, HeadRange{0, -1}, HeadRange{0, 5}, HeadRange{4, 1}, HeadRange{3, 2},
        HeadRange{1, kMax}, HeadRange{kMax, 1}}) {
    EXPECT_TRUE(Fails(with(four, heads), absl::StatusCode::kInvalidArgument, "of pages of 4"));
  }
  KvLayout other = four;
  other.page_format = "engine's own";
  EXPECT_TRUE(Fails(with(other, {0, 1}), absl::StatusCode::kInvalidArgument, "engine's own",
                    "does not say where heads lie"));
  other.page_size = 1;  // Nowhere else.
  EXPECT_TRUE(IsOk(with(other, {0, 1})));
  other.tensors[1].num_heads = 1;
  EXPECT_TRUE(
      Fails(with(other, {0, 1}), absl::StatusCode::kInvalidArgument, "tensors differ in heads"));
}

// Of a pool that could be: an error, and no memory taken for it.
TEST(HeadSlice, MoreItemsThanAListHolds) {
  const KvLayout layout{1, 1 << 20, DType::kUint8, "NHD", {{"k", 2, 1}}};
  std::vector<std::byte> memory(1);
  const BufferInfo buffer{memory.data(), int64_t{1} << 40, int64_t{2} << 20};
  const std::shared_ptr<const KvPool> pool = Must(KvPool::Adopt(layout, {&buffer, 1}, nullptr));
  // Rows that have no number, and more rows than there are numbers.
  EXPECT_TRUE(Fails(SliceHeads(pool, PageRuns(PageRun{1 << 18, 1}), {1, 1}),
                    absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(SliceHeads(pool, PageRuns(PageRun{0, 1 << 19}), {1, 1}),
                    absl::StatusCode::kInvalidArgument, "more rows than a list holds"));
}

}  // namespace
}  // namespace kvferry
