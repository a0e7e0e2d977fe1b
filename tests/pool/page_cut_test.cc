#include "pool/page_cut.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// What the header says, a value at a time: where the bytes of `heads` of the pages at `positions`
// lie in one buffer.
std::vector<const std::byte*> Naive(const KvPool& pool, int64_t layer, int64_t tensor,
                                    const std::vector<int64_t>& pages,
                                    const std::vector<int64_t>& positions, int64_t page_size,
                                    bool nhd, HeadRange heads, int64_t again) {
  const KvLayout& layout = pool.layout();
  const int64_t num_heads = layout.tensors[tensor].num_heads;
  if (heads.count == 0) heads.count = num_heads;
  const int64_t value_bytes = layout.item_bytes(tensor) / layout.page_size / num_heads;
  const int64_t held = static_cast<int64_t>(pages.size()) * layout.page_size;
  std::vector<const std::byte*> bytes;
  const auto add = [&](int64_t token, int64_t head) {
    // Behind the end the last tokens, as many as an item has, again.
    while (token >= held) token -= again;
    const std::span<std::byte> all = pool.page(layer, tensor, pages[token / layout.page_size]);
    const int64_t at = token % layout.page_size;
    const int64_t value = absl::EndsWith(layout.page_format, "HND") ? head * layout.page_size + at
                                                                    : at * num_heads + head;
    for (int64_t i = 0; i < value_bytes; ++i) bytes.push_back(&all[value * value_bytes + i]);
  };
  for (const int64_t position : positions) {
    for (int64_t outer = 0; outer < (nhd ? page_size : heads.count); ++outer) {
      for (int64_t inner = 0; inner < (nhd ? heads.count : page_size); ++inner) {
        add(position * page_size + (nhd ? outer : inner), heads.first + (nhd ? inner : outer));
      }
    }
  }
  return bytes;
}

// Whether the items of a cut are those bytes, in that order, in every buffer.
void ExpectIs(const PageCut& cut, const std::shared_ptr<const KvPool>& pool,
              const std::vector<int64_t>& pages, const std::vector<int64_t>& positions,
              int64_t page_size, bool nhd, HeadRange heads) {
  const KvLayout& layout = pool->layout();
  ASSERT_EQ(cut.items.num_pages(), static_cast<int64_t>(positions.size()) * cut.items_a_page);
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
      const auto want = Naive(*pool, layer, tensor, pages, positions, page_size, nhd, heads,
                              cut.pool->layout().page_size);
      size_t at = 0;
      for (const int64_t item : cut.items.ToPages()) {
        ASSERT_LT(item, cut.pool->num_pages());
        for (const std::byte& byte : cut.pool->page(layer, tensor, item)) {
          ASSERT_EQ(&byte, want.at(at++))
              << layout.ToString() << " as " << page_size << " " << (nhd ? "NHD" : "HND")
              << " heads " << heads.first << "+" << heads.count;
        }
      }
      ASSERT_EQ(at, want.size());
    }
  }
}

TEST(PageCut, RandomHeadsValueByValue) {
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
    const PageCut cut = Must(CutPages(pool, Must(PageRuns::FromPages(pages)), some));
    std::vector<int64_t> all(pages.size());
    std::iota(all.begin(), all.end(), 0);
    ExpectIs(cut, pool, pages, all, layout.page_size, format == "NHD", some);
    ASSERT_FALSE(testing::Test::HasFatalFailure());
  }
}

// Every other size and order, of all heads or some, with positions anywhere and repeated.
TEST(PageCut, RandomFormsValueByValue) {
  std::mt19937_64 random(2);
  const auto upto = [&](int64_t max) { return 1 + static_cast<int64_t>(random() % max); };
  const std::vector<int64_t> sizes = {1, 2, 3, 4, 6, 8, 12, 16};
  for (int round = 0; round < 2000; ++round) {
    const bool latent = round % 7 == 0;
    const int64_t num_heads = latent ? 1 : upto(6);
    const std::string format = latent ? "ND" : std::vector<std::string>{"NHD", "HND"}[random() % 2];
    KvLayout layout{upto(2), sizes[random() % sizes.size()], DType::kFloat16, format, {}};
    for (int64_t i = upto(2); i > 0; --i) layout.tensors.push_back({"t", num_heads, upto(3)});
    const int64_t page_size = sizes[random() % sizes.size()];
    const int64_t pool_pages = 16 / layout.page_size + 12;
    const std::shared_ptr<const KvPool> pool = MakePatternPool(layout, pool_pages, 7);
    const auto pages = MakePages(random() % 2 == 0 ? "rand" : "seq", upto(12), pool_pages, &random);
    const PageForm form{page_size, random() % 2 == 0 ? ValueOrder::kNhd : ValueOrder::kHnd};
    const int64_t there = PagesIn(static_cast<int64_t>(pages.size()), layout, form);
    ASSERT_EQ(there,
              (static_cast<int64_t>(pages.size()) * layout.page_size + page_size - 1) / page_size);
    std::vector<int64_t> positions(upto(there));
    if (random() % 2 == 0) {
      for (int64_t& position : positions) position = static_cast<int64_t>(random() % there);
    } else {
      std::iota(positions.begin(), positions.end(), there - positions.size());
    }
    HeadRange heads;
    if (random() % 2 == 0) {
      heads.first = static_cast<int64_t>(random() % num_heads);
      heads.count = upto(num_heads - heads.first);
    }
    const PageCut cut = Must(CutPages(pool, Must(PageRuns::FromPages(pages)),
                                      Must(PageRuns::FromPages(positions)), form, heads));
    ExpectIs(cut, pool, pages, positions, page_size, form.order == ValueOrder::kNhd, heads);
    ASSERT_FALSE(testing::Test::HasFatalFailure());
    // What a page of that form would hold, whoever has it.
    KvLayout like = layout;
    like.page_size = page_size;
    for (KvTensor& tensor : like.tensors)
      tensor.num_heads = heads.count == 0 ? num_heads : heads.count;
    ASSERT_EQ(cut.items_a_page * cut.pool->layout().page_bytes(), like.page_bytes());
  }
}

// Long items: what is cut is no more than either side's borders ask for.
TEST(PageCut, ItemsAreAsLongAsWhatLiesTogetherOnBothSides) {
  struct Case {
    std::string format;
    int64_t heads, page_size;
    PageForm form;
    HeadRange some;
    int64_t tokens, item_heads;
  };
  constexpr ValueOrder kNhd = ValueOrder::kNhd, kHnd = ValueOrder::kHnd;
  for (const Case& it : std::vector<Case>{{"NHD", 4, 16, {16, kNhd}, {}, 16, 4},
                                          {"NHD", 4, 16, {64, kNhd}, {}, 16, 4},
                                          {"NHD", 4, 48, {32, kNhd}, {}, 16, 4},
                                          {"NHD", 4, 64, {16, kNhd}, {}, 16, 4},
                                          {"NHD", 4, 64, {16, kNhd}, {2, 2}, 1, 2},
                                          {"HND", 4, 16, {16, kHnd}, {}, 16, 4},
                                          {"HND", 4, 16, {16, kHnd}, {2, 2}, 16, 2},
                                          {"HND", 4, 48, {32, kHnd}, {2, 2}, 16, 1},
                                          {"NHD", 4, 16, {16, kHnd}, {}, 1, 1},
                                          {"HND", 4, 16, {64, kNhd}, {}, 1, 1},
                                          // One token or one head a page lies in either order.
                                          {"HND", 4, 1, {16, kNhd}, {}, 1, 4},
                                          {"NHD", 4, 1, {16, kHnd}, {}, 1, 1},
                                          {"HND", 1, 64, {16, kNhd}, {}, 16, 1},
                                          {"NHD", 1, 16, {64, kHnd}, {}, 16, 1},
                                          {"ND", 1, 64, {16, kNhd}, {}, 16, 1},
                                          {"HND", 4, 16, {64, kNhd}, {3, 1}, 16, 1},
                                          {"NHD", 4, 16, {1, kHnd}, {}, 1, 4},
                                          {"HND", 4, 1, {1, kNhd}, {2, 2}, 1, 2}}) {
    KvLayout layout{1, it.page_size, DType::kFloat16, it.format, {{"k", it.heads, 8}}};
    const std::shared_ptr<const KvPool> pool = MakePatternPool(layout, 64, 7);
    const PageRuns pages(PageRun{0, 64});
    const PageCut cut = Must(CutPages(pool, pages, PageRuns(PageRun{0, 1}), it.form, it.some));
    const KvLayout& items = cut.pool->layout();
    EXPECT_EQ(items.page_size, it.tokens) << layout.ToString() << " as " << it.form.page_size;
    EXPECT_EQ(items.num_heads(), it.item_heads) << layout.ToString() << " as " << it.form.page_size;
  }
}

// Between tokens there is nothing to know of heads.
TEST(PageCut, TensorsThatDifferInHeads) {
  KvLayout layout{2, 6, DType::kUint8, "NHD", {{"k", 1, 7}, {"v", 3, 5}, {"scale", 2, 1}}};
  const std::vector<int64_t> pages = {7, 1, 2, 5};
  const auto cut = [&](const PageForm& form) -> absl::StatusOr<PageCut> {
    const std::shared_ptr<const KvPool> pool = MakePatternPool(layout, 8, 7);
    return CutPages(pool, Must(PageRuns::FromPages(pages)), PageRuns(PageRun{0, 2}), form, {});
  };
  const std::shared_ptr<const KvPool> pool = MakePatternPool(layout, 8, 7);
  const PageCut nine = Must(CutPages(pool, Must(PageRuns::FromPages(pages)),
                                     PageRuns(PageRun{0, 3}), {9, ValueOrder::kNhd}, {}));
  EXPECT_EQ(nine.pool->layout().page_size, 3);
  ExpectIs(nine, pool, pages, {0, 1, 2}, 9, true, {});
  EXPECT_TRUE(Fails(cut({9, ValueOrder::kHnd}), absl::StatusCode::kInvalidArgument,
                    "tensors differ in heads"));
  EXPECT_TRUE(Fails(cut({6, ValueOrder::kHnd}), absl::StatusCode::kInvalidArgument,
                    "tensors differ in heads"));
  layout.page_format = "HND";
  EXPECT_TRUE(IsOk(cut({6, ValueOrder::kHnd})));
  EXPECT_TRUE(Fails(cut({9, ValueOrder::kHnd}), absl::StatusCode::kInvalidArgument,
                    "tensors differ in heads"));
  layout.page_format = "ND";  // Of one head it would say enough.
  EXPECT_TRUE(IsOk(cut({})));
  EXPECT_TRUE(Fails(cut({9, ValueOrder::kNhd}), absl::StatusCode::kInvalidArgument, "ND"));
}

TEST(PageCut, FormsThatCannotBeAreRefused) {
  const auto cut = [](const KvLayout& layout, const PageForm& form, const PageRuns& positions) {
    const std::shared_ptr<const KvPool> pool = MakePatternPool(layout, 8, 1);
    return CutPages(pool, PageRuns(PageRun{0, 6}), positions, form, {}).status();
  };
  const KvLayout nhd = KvLayout::Mha(1, 16, 4, 8, DType::kBFloat16);
  const PageRuns first(PageRun{0, 1});
  // 6 pages of 16 tokens are 2 of 64, the second one in part.
  EXPECT_TRUE(IsOk(cut(nhd, {64, ValueOrder::kHnd}, PageRuns(PageRun{1, 1}))));
  EXPECT_TRUE(Fails(cut(nhd, {64, ValueOrder::kHnd}, PageRuns(PageRun{2, 1})),
                    absl::StatusCode::kOutOfRange,
                    "outside 6 pages of 16 tokens, which are 2 of 64"));
  EXPECT_TRUE(
      Fails(cut(nhd, {64, ValueOrder::kNhd}, Must(PageRuns::FromPages(std::vector<int64_t>(3, 0)))),
            absl::StatusCode::kOutOfRange, "3 positions asked, outside 6 pages"));
  EXPECT_TRUE(Fails(cut(nhd, {}, PageRuns(PageRun{5, 2})), absl::StatusCode::kOutOfRange,
                    "2 positions asked, outside 6 pages:"));
  // A page that would be of nothing but repeated tokens.
  EXPECT_TRUE(IsOk(cut(nhd, {128, ValueOrder::kNhd}, first)));
  for (const int64_t page_size : {129, 65536, -1}) {
    EXPECT_TRUE(Fails(cut(nhd, {page_size, ValueOrder::kNhd}, first),
                      absl::StatusCode::kInvalidArgument, "of a pool that has room for 128"));
  }
  // Longer than any page may be, though its tokens are not too many: in a pool that nobody touches.
  const KvLayout large = KvLayout::Mha(1, 1, 1 << 10, 1 << 10, DType::kUint8);
  const BufferInfo buffer = {reinterpret_cast<std::byte*>(4096), int64_t{1} << 36, 1 << 20};
  const std::vector<BufferInfo> buffers(2, buffer);
  EXPECT_TRUE(Fails(CutPages(Must(KvPool::Adopt(large, buffers, nullptr)), first, first,
                             {8192, ValueOrder::kNhd}, {}),
                    absl::StatusCode::kInvalidArgument, "bytes of a page of tensor k"));
  // However large the pool is: all behind the last token would be an item each.
  for (const int64_t page_size :
       {int64_t{65537}, KvLayout::kMaxPageSize, std::numeric_limits<int64_t>::max()}) {
    EXPECT_TRUE(Fails(cut(nhd, {page_size, ValueOrder::kNhd}, first),
                      absl::StatusCode::kInvalidArgument, "the most is 65536"));
  }
  EXPECT_TRUE(IsOk(cut(KvLayout::Mha(1, KvLayout::kMaxPageSize, 1, 1, DType::kUint8),
                       {KvLayout::kMaxPageSize, ValueOrder::kHnd}, first)));
  KvLayout own = nhd;
  own.page_format = "an engine's-HND";
  EXPECT_TRUE(IsOk(cut(own, {}, first)));
  EXPECT_TRUE(IsOk(cut(own, {16, ValueOrder::kOther}, first)));
  for (const PageForm form : {PageForm{8, ValueOrder::kOther}, PageForm{16, ValueOrder::kHnd}}) {
    EXPECT_TRUE(Fails(cut(own, form, first), absl::StatusCode::kInvalidArgument, "an engine's-HND",
                      "only pages of NHD and HND are converted"));
  }
}

TEST(PageCut, AFormIsWhatOthersCanCount) {
  KvLayout layout = KvLayout::Mha(1, 16, 4, 8, DType::kUint8);
  EXPECT_EQ(FormOf(layout), (PageForm{16, ValueOrder::kNhd}));
  layout.page_format = "engine's own";
  EXPECT_EQ(FormOf(layout), PageForm());
}

// Each way: who can make one out of the other can be given one for the other.
TEST(PageCut, WhichLayoutsAreConvertible) {
  const auto with = [](const std::string& format, int64_t page_size, int64_t v_heads = 4) {
    return KvLayout{1, page_size, DType::kUint8, format, {{"k", 4, 8}, {"v", v_heads, 8}}};
  };
  const auto latent = [](const std::string& format, int64_t page_size) {
    KvLayout layout = KvLayout::Mla(1, page_size, 8, DType::kUint8);
    layout.page_format = format;
    return layout;
  };
  struct Case {
    KvLayout one, other;
    std::string why;
  };
  for (const Case& it : std::vector<Case>{
           {with("NHD", 16), with("HND", 64), ""},
           {with("own", 16), with("own", 16), ""},
           {with("own-HND", 16), with("HND", 16), "page_format own-HND is an arrangement"},
           {with("own", 16), with("own", 32), "page_format own is an arrangement"},
           {with("NHD", 16, 2), with("NHD", 64, 2), ""},
           {with("HND", 16, 2), with("HND", 64, 2), "tensors differ in heads"},
           {with("NHD", 16, 2), with("HND", 16, 2), "tensors differ in heads"},
           {with("NHD", 16, 2), with("HND", 1, 2), ""},
           {with("ND", 16), with("ND", 32), "page_format ND"},
           {latent("ND", 16), latent("ND", 64), ""},
           {latent("ND", 16), latent("HND", 64), ""}}) {
    for (const absl::Status& status :
         {CheckConvertible(it.one, it.other), CheckConvertible(it.other, it.one)}) {
      EXPECT_TRUE(it.why.empty() ? IsOk(status)
                                 : Fails(status, absl::StatusCode::kInvalidArgument, it.why))
          << it.one.ToString() << " and " << it.other.ToString();
    }
  }
}

TEST(PageCut, AllHeadsAreThePoolAsItIs) {
  const std::shared_ptr<const KvPool> pool =
      MakePatternPool(KvLayout{1, 2, DType::kUint8, "engine's own", {{"k", 3, 4}}}, 4, 1);
  const PageRuns pages(PageRun{1, 3});
  for (const HeadRange heads : {HeadRange{}, HeadRange{0, 3}}) {
    const PageCut slice = Must(CutPages(pool, pages, heads));
    EXPECT_EQ(slice.pool, pool);
    EXPECT_EQ(slice.items.ToPages(), pages.ToPages());
  }
}

TEST(PageCut, SmallerPagesLieInTheMemoryOfThePoolWhichTheyKeep) {
  std::shared_ptr<const KvPool> pool =
      MakePatternPool(KvLayout::Mha(1, 2, 4, 8, DType::kBFloat16), 4, 1);
  ASSERT_NE(pool->shared_memory(), nullptr);
  const PageCut cut = Must(CutPages(pool, PageRuns(PageRun{0, 4}), {0, 2}));
  EXPECT_NE(cut.pool, pool);
  EXPECT_EQ(cut.pool->shared_memory(), pool->shared_memory());
  const std::weak_ptr<const KvPool> held = pool;
  pool.reset();
  EXPECT_FALSE(held.expired());
}

TEST(PageCut, WhatThePagesDoNotHoldIsRefused) {
  const auto with = [](const KvLayout& layout, HeadRange heads) {
    const std::shared_ptr<const KvPool> pool = MakePatternPool(layout, 4, 1);
    return CutPages(pool, PageRuns(PageRun{0, 4}), heads).status();
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
TEST(PageCut, MoreItemsThanAListHolds) {
  const KvLayout layout{1, 1 << 20, DType::kUint8, "NHD", {{"k", 2, 1}}};
  std::vector<std::byte> memory(1);
  const BufferInfo buffer{memory.data(), int64_t{1} << 40, int64_t{2} << 20};
  const std::shared_ptr<const KvPool> pool = Must(KvPool::Adopt(layout, {&buffer, 1}, nullptr));
  // Rows that have no number, and more rows than there are numbers.
  EXPECT_TRUE(Fails(CutPages(pool, PageRuns(PageRun{1 << 18, 1}), {1, 1}),
                    absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(CutPages(pool, PageRuns(PageRun{0, 1 << 19}), {1, 1}),
                    absl::StatusCode::kInvalidArgument, "more than a list holds"));
}

}  // namespace
}  // namespace kvferry
