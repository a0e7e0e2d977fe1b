#include "pool/token_kv_pool.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "tests/pool/guarded_memory.h"
#include "tests/pool/naive_numbers.h"
#include "tests/pool/token_kv_pool_suite.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kRange = absl::StatusCode::kOutOfRange;

// As the caller gets it who names no memory.
TokenPoolBackend OnHost() {
  TokenPoolBackend host = {HostBackend()};
  host.memory = nullptr;
  return host;
}

INSTANTIATE_TEST_SUITE_P(Memories, TokenPools,
                         TokenPoolsIn(OnHost(), TokenPoolBackend{GuardedBackend()}),
                         TokenPoolName());

TEST(TokenKvPools, SizesThatCannotBe) {
  const KvLayout layout = KvLayout::Mha(2, 16, 2, 8, DType::kFloat32);
  for (const int64_t tokens : {int64_t{0}, int64_t{-16}, int64_t{17}, int64_t{INT32_MAX} - 15,
                               int64_t{INT32_MAX} + 1, INT64_MAX, INT64_MIN}) {
    EXPECT_TRUE(Fails(TokenKvPool::Create(layout, tokens), kInvalid, "num_tokens"));
  }
  // All that is wrong is found before any memory is asked for.
  const auto full = std::make_shared<GuardedMemory>();
  full->failure = absl::ResourceExhaustedError("full");
  KvLayout own = layout;
  own.page_format = "cpu-attn";
  EXPECT_TRUE(Fails(TokenKvPool::Create(own, 32, 0, full), kInvalid, "page_format 'cpu-attn'"));
  EXPECT_TRUE(Fails(TokenKvPool::Create(layout, 32, 4, full), kInvalid, "latent_value_dim is 4"));
  KvLayout odd = layout;
  odd.tensors = {{"kv", 2, 15}};
  EXPECT_TRUE(Fails(TokenKvPool::Create(odd, 32, 0, full), kInvalid, "must be even"));
  const KvLayout mla = KvLayout::Mla(2, 16, 24, DType::kFloat32);
  EXPECT_TRUE(Fails(TokenKvPool::Create(mla, 32, 25, full), kInvalid, "[0, 24]"));
  EXPECT_TRUE(Fails(TokenKvPool::Create(mla, 32, -1, full), kInvalid, "latent_value_dim is -1"));
  EXPECT_TRUE(IsOk(TokenKvPool::Create(mla, 32, 24)));
  KvLayout none = layout;
  none.num_layers = 0;
  EXPECT_TRUE(Fails(TokenKvPool::Create(none, 32), kInvalid, "num_layers is 0"));
}

class BadCalls : public testing::Test {
 protected:
  void SetUp() override {
    const std::vector<std::byte> flat(static_cast<size_t>(pool_->flat_bytes(3)), std::byte{7});
    ASSERT_TRUE(IsOk(pool_->WriteFlat(std::vector<int32_t>{1, 2, 3}, flat)));
    before_ = All();
  }
  void TearDown() override { EXPECT_EQ(All(), before_) << "a refused call wrote something"; }

  std::vector<std::byte> All() const {
    std::vector<std::byte> all;
    for (const BufferInfo& info : pool_->pages()->buffer_infos()) {
      all.insert(all.end(), info.address, info.address + info.bytes);
    }
    return all;
  }
  TokenView Rows(int64_t count, int64_t heads = 2, int64_t dim = 8, DType dtype = DType::kFloat32) {
    return TokenView::Packed(values_.data(), dtype, count, heads, dim);
  }

  const KvLayout layout_ = KvLayout::Mha(2, 4, 2, 8, DType::kFloat32);
  std::shared_ptr<TokenKvPool> pool_ = Must(TokenKvPool::Create(layout_, 16));
  std::vector<std::byte> before_, values_ = std::vector<std::byte>(4096, std::byte{1});
  const std::vector<int32_t> slots_ = {4, 5};
};

TEST_F(BadCalls, Set) {
  const std::vector<TokenView> rows = {Rows(2), Rows(2)};
  EXPECT_TRUE(Fails(pool_->Set(2, slots_, rows), kRange, "layer 2", "[0, 2)"));
  EXPECT_TRUE(Fails(pool_->Set(-1, slots_, rows), kRange, "layer -1"));
  EXPECT_TRUE(
      Fails(pool_->Set(0, std::vector<int32_t>{4, 20}, rows), kRange, "slot 20", "[0, 20)"));
  EXPECT_TRUE(Fails(pool_->Set(0, slots_, {rows.data(), 1}), kInvalid, "1 tensors", "2 parts"));
  EXPECT_TRUE(Fails(pool_->Set(0, slots_, rows, std::vector<float>{1}), kInvalid, "1 scales"));
  EXPECT_TRUE(Fails(pool_->Set(0, slots_, rows, std::vector<float>{1, 0}), kInvalid, "scale"));
  // The key would do; nothing of it may be written when the value does not.
  const std::vector<TokenView> short_value = {Rows(2), Rows(1)};
  EXPECT_TRUE(Fails(pool_->Set(0, slots_, short_value), kInvalid, "1 rows to read but 2"));
  const std::vector<TokenView> narrow = {Rows(2), Rows(2, 2, 4)};
  EXPECT_TRUE(Fails(pool_->Set(0, slots_, narrow), kInvalid, "2 heads x 4", "2 heads x 8"));
  const std::vector<TokenView> bytes = {Rows(2), Rows(2, 2, 8, DType::kUint8)};
  EXPECT_TRUE(Fails(pool_->Set(0, slots_, bytes), kInvalid, "uint8"));
}

TEST_F(BadCalls, HalvesThatAreNone) {
  KvLayout layout = KvLayout::Fused(1, 4, 1, 8, DType::kUint8);
  layout.tensors[0].head_dim = 7;
  EXPECT_TRUE(Fails(TokenKvPool::Create(layout, 4).status(), kInvalid, "head_dim of \"kv\" is 7"));
}

TEST_F(BadCalls, FlatData) {
  std::vector<std::byte> flat(static_cast<size_t>(pool_->flat_bytes(2)));
  EXPECT_TRUE(Fails(pool_->WriteFlat(slots_, {flat.data(), flat.size() - 1}), kInvalid, "bytes"));
  EXPECT_TRUE(Fails(pool_->ReadFlat(slots_, {flat.data(), 0}), kInvalid, "0 bytes", "2 slots"));
  EXPECT_TRUE(Fails(pool_->WriteFlatLayer(0, slots_, flat), kInvalid, "2 slots of 1 layers"));
  EXPECT_TRUE(Fails(pool_->WriteFlatLayer(2, slots_, flat), kRange, "layer 2"));
  for (const int64_t layer : {int64_t{-1}, int64_t{2}}) {
    EXPECT_TRUE(Fails(pool_->ReadFlatLayer(layer, slots_, {flat.data(), flat.size() / 2}), kRange,
                      "layer "));
  }
  EXPECT_TRUE(Fails(pool_->WriteFlat(std::vector<int32_t>{4, -1}, flat), kRange, "slot -1"));
}

TEST_F(BadCalls, CopiesBetweenPools) {
  const auto other = Must(TokenKvPool::Create(KvLayout::Mha(3, 4, 2, 8, DType::kFloat32), 16));
  EXPECT_TRUE(Fails(pool_->CopyFrom(*other, slots_, slots_), kInvalid, "3 layers", "2 layers"));
  const auto mla = Must(TokenKvPool::Create(KvLayout::Mla(2, 4, 16, DType::kFloat32), 16));
  EXPECT_TRUE(Fails(pool_->CopyFrom(*mla, slots_, slots_), kInvalid, "latent"));
  KvLayout renamed = layout_;
  renamed.tensors[1].name = "w";
  EXPECT_TRUE(Fails(pool_->CopyFrom(*Must(TokenKvPool::Create(renamed, 16)), slots_, slots_),
                    kInvalid, "w[2 heads"));
  const auto good = Must(TokenKvPool::Create(layout_, 8));
  EXPECT_TRUE(
      Fails(pool_->CopyFrom(*good, std::vector<int32_t>{4, 12}, slots_), kRange, "slot 12"));
  EXPECT_TRUE(Fails(pool_->CopyLayerFrom(*good, 5, slots_, slots_), kRange, "layer 5"));
  EXPECT_TRUE(Fails(pool_->CheckCopyFrom(*mla, slots_, slots_), kInvalid, "latent"));
  EXPECT_TRUE(
      Fails(pool_->CheckCopyFrom(*good, slots_, std::vector<int32_t>{4, 20}), kRange, "slot 20"));
  EXPECT_TRUE(Fails(pool_->CheckCopyFrom(*good, slots_, {}), kInvalid, "2 rows to read but 0"));
  EXPECT_TRUE(IsOk(pool_->CheckCopyFrom(*good, slots_, slots_)));
}

TEST(TokenKvPools, CopiesBetweenPoolsConvert) {
  const auto from = Must(TokenKvPool::Create(KvLayout::Mha(2, 1, 2, 4, DType::kFloat32), 8));
  const auto to = Must(TokenKvPool::Create(Hnd(KvLayout::Mha(2, 4, 2, 4, DType::kBFloat16)), 8));
  std::vector<float> values(static_cast<size_t>(from->flat_bytes(2)) / sizeof(float));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const std::vector<int32_t> from_slots = {3, 8}, to_slots = {11, 2};
  ASSERT_TRUE(IsOk(from->WriteFlat(from_slots, std::as_bytes(std::span(values)))));
  ASSERT_TRUE(IsOk(to->CopyLayerFrom(*from, 1, from_slots, to_slots)));
  std::vector<std::byte> flat(static_cast<size_t>(to->flat_bytes(2)));
  const auto check = [&](bool first_layer) {
    ASSERT_TRUE(IsOk(to->ReadFlat(to_slots, flat)));
    const NaiveFormat& bf16 = NaiveFormat::Of(DType::kBFloat16);
    for (size_t i = 0; i < values.size(); ++i) {
      const bool layer0 = i / 16 % 2 == 0;
      EXPECT_EQ(bf16.Decode(&flat[2 * i]), layer0 && !first_layer ? 0 : values[i]) << i;
    }
  };
  check(false);
  ASSERT_TRUE(IsOk(to->CopyFrom(*from, from_slots, to_slots)));
  check(true);
}

// Every row of a pool, other bytes in each.
std::vector<int32_t> FillAll(TokenKvPool& pool) {
  std::vector<int32_t> slots(static_cast<size_t>(pool.num_slots()));
  std::iota(slots.begin(), slots.end(), 0);
  std::vector<std::byte> flat(static_cast<size_t>(pool.flat_bytes(pool.num_slots())));
  for (size_t i = 0; i < flat.size(); ++i) flat[i] = static_cast<std::byte>(i * 31 + i / 251);
  EXPECT_TRUE(IsOk(pool.WriteFlat(slots, flat)));
  return slots;
}

std::vector<std::byte> FlatOf(const TokenKvPool& pool, const std::vector<int32_t>& slots) {
  std::vector<std::byte> flat(
      static_cast<size_t>(pool.flat_bytes(static_cast<int64_t>(slots.size()))));
  EXPECT_TRUE(IsOk(pool.ReadFlat(slots, flat)));
  return flat;
}

TEST(TokenKvPools, WithinOneMemoryReadsComeBeforeWrites) {
  const KvLayout layout = KvLayout::Mha(2, 4, 2, 4, DType::kBFloat16);
  const auto pages = Must(KvPool::Create(layout, 5));
  const auto pool = Must(TokenKvPool::Over(pages)), twin = Must(TokenKvPool::Over(pages));
  // A run onto its own end, a circle, one that stays where it is, one that is read twice.
  const std::vector<int32_t> from = {1, 2, 3, 4, 5, 9, 10, 11, 7, 1};
  const std::vector<int32_t> to = {2, 3, 4, 5, 6, 10, 11, 9, 7, 12};
  const std::vector<int32_t> others = {0, 1, 8, 13, 14, 15, 16, 17, 18, 19};
  for (const auto& source : {pool, twin}) {
    FillAll(*pool);
    const std::vector<std::byte> want = FlatOf(*pool, from), kept = FlatOf(*pool, others);
    ASSERT_TRUE(IsOk(pool->CopyFrom(*source, from, to)));
    EXPECT_EQ(FlatOf(*pool, to), want);
    EXPECT_EQ(FlatOf(*pool, others), kept);
  }
}

TEST(TokenKvPools, APoolMaySeeTheSameMemoryOtherwise) {
  const KvLayout layout = KvLayout::Mha(2, 4, 2, 4, DType::kBFloat16);
  const auto pages = Must(KvPool::Create(layout, 5));
  const auto pool = Must(TokenKvPool::Over(pages));
  const auto hnd = Must(
      TokenKvPool::Over(Must(KvPool::Adopt(Hnd(layout), pages->buffer_infos(), /*owner=*/pages))));
  const std::vector<int32_t> all = FillAll(*pool);
  const std::vector<std::byte> want = FlatOf(*pool, all);
  ASSERT_TRUE(IsOk(hnd->CopyFrom(*pool, all, all)));  // The other page format, in place.
  EXPECT_EQ(FlatOf(*hnd, all), want);
  EXPECT_NE(FlatOf(*pool, all), want);
  EXPECT_TRUE(IsOk(hnd->CopyFrom(*pool, {}, {})));

  // Its slot 0 is the other's slot 8.
  std::vector<BufferInfo> tail(pages->buffer_infos().begin(), pages->buffer_infos().end());
  for (BufferInfo& buffer : tail) {
    buffer.address += 2 * buffer.item_bytes;
    buffer.bytes -= 2 * buffer.item_bytes;
  }
  const auto part = Must(TokenKvPool::Over(Must(KvPool::Adopt(layout, tail, pages))));
  const std::vector<int32_t> from = {6, 7, 8, 9, 10}, to = {0, 1, 2, 3, 4};
  const std::vector<std::byte> rows = FlatOf(*pool, from);
  ASSERT_TRUE(IsOk(part->CopyFrom(*pool, from, to)));
  EXPECT_EQ(FlatOf(*part, to), rows);
}

// A device with no room for more than its pools.
class FullMemory : public GuardedMemory {
 public:
  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes) const override {
    if (full) return absl::ResourceExhaustedError("it is full");
    return GuardedMemory::Allocate(bytes);
  }
  bool full = false;
};

TEST(TokenKvPools, OnlyRowsThatAreReadAndWrittenTakeMoreMemory) {
  const auto memory = std::make_shared<FullMemory>();
  const auto pool =
      Must(TokenKvPool::Create(KvLayout::Mha(2, 4, 2, 4, DType::kFloat32), 16, 0, memory));
  const std::vector<int32_t> all = FillAll(*pool);
  memory->full = true;
  const std::vector<int32_t> from = {4, 5, 6, 19}, apart = {7, 8, 9, 19}, meeting = {6, 7, 8, 9};
  const std::vector<std::byte> rows = FlatOf(*pool, from);
  ASSERT_TRUE(IsOk(pool->CopyFrom(*pool, from, apart)));
  EXPECT_EQ(FlatOf(*pool, apart), rows);
  const std::vector<std::byte> before = FlatOf(*pool, all);
  EXPECT_TRUE(Fails(pool->CopyFrom(*pool, from, meeting), absl::StatusCode::kResourceExhausted,
                    "1024 bytes", "copy fewer, or layer by layer", "it is full"));
  EXPECT_EQ(FlatOf(*pool, all), before);
  memory->full = false;
  ASSERT_TRUE(IsOk(pool->CopyFrom(*pool, from, meeting)));
  EXPECT_EQ(FlatOf(*pool, meeting), rows);
}

TEST(TokenKvPools, RowsMayBeAViewOfThePoolItself) {
  const auto pool = Must(TokenKvPool::Create(KvLayout::Mha(1, 1, 2, 4, DType::kUint8), 64));
  std::vector<int32_t> all(64), to(20);
  std::iota(all.begin(), all.end(), 1);
  for (size_t i = 0; i < to.size(); ++i)
    to[i] = static_cast<int32_t>(11 + 2 * i);  // Over the rows.
  std::vector<std::byte> flat(static_cast<size_t>(pool->flat_bytes(64)));
  for (size_t i = 0; i < flat.size(); ++i) flat[i] = static_cast<std::byte>(i * 7);
  ASSERT_TRUE(IsOk(pool->WriteFlat(all, flat)));
  // Slots 10 to 29, the values for the keys and the other way round, and the last ones first.
  std::vector<TokenView> rows;
  for (const int64_t tensor : {1, 0}) {
    TokenView view = pool->view(0, tensor);
    view.data = view.row(29);
    view.token_stride = -view.token_stride;
    view.page_stride = -view.page_stride;
    view.num_slots = 20;
    rows.push_back(view);
  }
  std::vector<std::byte> want;
  for (const TokenView& view : rows) {
    for (int64_t i = 0; i < 20; ++i) want.insert(want.end(), view.row(i), view.row(i) + 8);
  }
  ASSERT_TRUE(IsOk(pool->Set(0, to, rows)));
  EXPECT_EQ(FlatOf(*pool, to), want);
}

TEST(TokenKvPools, FlatDataMayBeAViewOfThePoolItself) {
  constexpr int64_t kSlots = 2048;
  const auto pool = Must(TokenKvPool::Create(KvLayout::Mla(1, 1, 8, DType::kUint8), 2 * kSlots));
  std::vector<int32_t> all(2 * kSlots), to(kSlots);
  std::iota(all.begin(), all.end(), 1);
  std::iota(to.begin(), to.end(), 64);
  std::shuffle(to.begin(), to.end(), std::mt19937_64(3));
  std::vector<std::byte> flat(static_cast<size_t>(pool->flat_bytes(2 * kSlots)));
  for (size_t i = 0; i < flat.size(); ++i) flat[i] = static_cast<std::byte>(i * 7 + i / 256);
  ASSERT_TRUE(IsOk(pool->WriteFlat(all, flat)));
  const std::span<std::byte> own(pool->view(0, 0).row(64), kSlots * 8);  // What is written over.
  std::vector<std::byte> want(own.begin(), own.end());
  ASSERT_TRUE(IsOk(pool->WriteFlat(to, own)));
  EXPECT_EQ(FlatOf(*pool, to), want);
  // And read into it.
  want = FlatOf(*pool, to);
  ASSERT_TRUE(IsOk(pool->ReadFlat(to, own)));
  EXPECT_TRUE(std::equal(own.begin(), own.end(), want.begin()));
}

// Their own scale is no reason to round them on the way: they are what rows apart from the pool
// are.
TEST(TokenKvPools, RowsMayBeAScaledViewOfThePoolItself) {
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat16}) {
    const auto pool = Must(TokenKvPool::Create(KvLayout::Mha(1, 1, 1, 16, dtype), 64));
    std::vector<float> values(32);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.00013F * static_cast<float>(i + 1);
    const TokenView given =
        TokenView::Packed(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32, 2, 1, 16);
    const std::vector<int32_t> before = {1, 2}, near = {2, 3}, apart = {10, 11};
    const std::vector<float> old_scales(2, 1e-5F), new_scales(2, 2e-5F);
    ASSERT_TRUE(IsOk(pool->Set(0, before, std::vector<TokenView>{given, given}, old_scales)));
    std::vector<std::vector<std::byte>> copied;
    std::vector<TokenView> inside, outside;
    for (const int64_t tensor : {0, 1}) {
      TokenView view = pool->view(0, tensor);
      view.data = view.row(1);
      view.num_slots = 2;
      view.scale = old_scales[0];
      inside.push_back(view);
      copied.emplace_back(view.data, view.data + 2 * view.row_bytes());
      view.data = copied.back().data();
      outside.push_back(view);
    }
    ASSERT_TRUE(IsOk(pool->Set(0, apart, outside, new_scales)));
    ASSERT_TRUE(IsOk(pool->Set(0, near, inside, new_scales)));
    EXPECT_EQ(FlatOf(*pool, near), FlatOf(*pool, apart));
  }
}

TEST(TokenKvPools, ReadersWaitForTheirLayer) {
  const auto pool = Must(TokenKvPool::Create(KvLayout::Mla(2, 1, 4, DType::kFloat32), 4));
  EXPECT_TRUE(IsOk(pool->Key(1, Clock::now())));
  ASSERT_TRUE(IsOk(pool->layers().Ready(Must(pool->layers().Begin()), 1)));
  EXPECT_TRUE(IsOk(pool->Value(0, Clock::now())));
  EXPECT_TRUE(Fails(pool->Key(1, Clock::now()), absl::StatusCode::kDeadlineExceeded, "layer 1"));
  EXPECT_TRUE(Fails(pool->Value(2, Clock::now()), kRange, "layer 2"));
}

TEST(TokenKvPools, EitherSideOfACopyMayLieOnADevice) {
  const auto memory = std::make_shared<GuardedMemory>();
  const KvLayout layout = KvLayout::Mha(2, 4, 2, 4, DType::kFloat32);
  const auto host = Must(TokenKvPool::Create(layout, 16));
  const auto device = Must(TokenKvPool::Create(Hnd(layout), 16, 0, memory));
  const auto device2 = Must(TokenKvPool::Create(layout, 16, 0, memory));
  std::vector<std::byte> flat(static_cast<size_t>(host->flat_bytes(3)));
  for (size_t i = 0; i < flat.size(); ++i) flat[i] = static_cast<std::byte>(i);
  const std::vector<int32_t> a = {4, 6, 17}, b = {9, 8, 5}, c = {1, 19, 2}, d = {10, 11, 12};
  ASSERT_TRUE(IsOk(host->WriteFlat(a, flat)));
  ASSERT_TRUE(IsOk(device->CopyFrom(*host, a, b)));
  ASSERT_TRUE(IsOk(device2->CopyLayerFrom(*device, 0, b, c)));
  ASSERT_TRUE(IsOk(device2->CopyLayerFrom(*device, 1, b, c)));
  ASSERT_TRUE(IsOk(host->CopyFrom(*device2, c, d)));
  std::vector<std::byte> got(flat.size());
  ASSERT_TRUE(IsOk(host->ReadFlat(d, got)));
  EXPECT_EQ(got, flat);
  EXPECT_EQ(memory->num_runs, 4);
}

TEST(TokenKvPools, WhatADeviceAnswersIsPassedOn) {
  const auto memory = std::make_shared<GuardedMemory>();
  const KvLayout layout = KvLayout::Mla(2, 4, 4, DType::kUint8);
  const auto pool = Must(TokenKvPool::Create(layout, 16, 0, memory));
  const auto host = Must(TokenKvPool::Create(layout, 16));
  memory->failure = absl::InternalError("it fell off the bus");
  const std::vector<int32_t> slots = {5};
  std::vector<std::byte> flat(static_cast<size_t>(pool->flat_bytes(1)));
  const TokenView row = TokenView::Packed(flat.data(), DType::kUint8, 1, 1, 4);
  constexpr auto kInternal = absl::StatusCode::kInternal;
  EXPECT_TRUE(Fails(TokenKvPool::Create(layout, 16, 0, memory), kInternal, "fell off"));
  EXPECT_TRUE(Fails(pool->Set(0, slots, std::vector<TokenView>{row}), kInternal, "fell off"));
  EXPECT_TRUE(Fails(pool->ReadFlat(slots, flat), kInternal, "fell off"));
  EXPECT_TRUE(Fails(pool->CopyFrom(*host, slots, slots), kInternal, "fell off"));
  EXPECT_TRUE(Fails(host->CopyFrom(*pool, slots, slots), kInternal, "fell off"));
  // Bad arguments never get so far.
  EXPECT_TRUE(Fails(pool->ReadFlat(std::vector<int32_t>{20}, flat), kRange, "slot 20"));
}

}  // namespace
}  // namespace kvferry
