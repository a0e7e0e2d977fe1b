#include "pool/token_kv_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "tests/pool/naive_numbers.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kRange = absl::StatusCode::kOutOfRange;

KvLayout DoubleSparse(int64_t layers, int64_t page_size) {
  KvLayout layout = KvLayout::Mha(layers, page_size, 2, 6, DType::kBFloat16);
  layout.tensors.push_back({"label", 2, 3});
  return layout;
}

KvLayout SparseMla(int64_t layers, int64_t page_size) {
  KvLayout layout = KvLayout::Mla(layers, page_size, 12, DType::kFloat16);
  layout.tensors.push_back({"index_k", 1, 8, DType::kFloat8E4M3});
  layout.tensors.push_back({"index_scale", 1, 1, DType::kFloat32});
  return layout;
}

KvLayout Hnd(KvLayout layout) {
  layout.page_format = "HND";
  return layout;
}

struct Shape {
  std::string name;
  KvLayout layout;
  int64_t latent_value_dim = 0;
};

const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {
      {"Mha", KvLayout::Mha(3, 1, 2, 4, DType::kFloat32)},
      {"MhaPagesHnd", Hnd(KvLayout::Mha(2, 4, 3, 8, DType::kBFloat16))},
      {"UnequalFp8", {2, 2, DType::kFloat8E4M3, "NHD", {{"k", 2, 6}, {"v", 1, 4}}}},
      {"Fused", KvLayout::Fused(2, 4, 2, 3, DType::kFloat16)},
      {"Mla", KvLayout::Mla(3, 4, 12, DType::kFloat8E5M2), 8},
      {"DoubleSparse", DoubleSparse(2, 4)},
      {"SparseMla", SparseMla(2, 4), 8},
  };
  return shapes;
}

// The model: for each layer, part and slot the stored bytes of a row, head by head. Knows nothing
// of pages, orders of dimensions or where parts lie.
struct Model {
  using Row = std::vector<std::byte>;
  std::map<std::tuple<int64_t, size_t, int32_t>, Row> rows;
};

class TokenPools : public testing::TestWithParam<size_t> {
 protected:
  static constexpr int64_t kTokens = 48;

  void SetUp() override {
    shape_ = Shapes()[GetParam()];
    pool_ = Must(TokenKvPool::Create(shape_.layout, kTokens, shape_.latent_value_dim));
    const bool fused = shape_.layout.tensors[0].name == "kv";
    for (const KvTensor& tensor : shape_.layout.tensors) {
      KvTensor part = tensor;
      part.dtype = shape_.layout.dtype_of(tensor);
      if (fused) part.head_dim /= 2;
      for (int i = 0; i < (fused ? 2 : 1); ++i) parts_.push_back(part);
    }
  }

  int64_t Upto(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  int64_t Layer() { return Upto(shape_.layout.num_layers); }
  std::vector<int32_t> Slots() {
    std::vector<int32_t> slots(static_cast<size_t>(Upto(12)));
    const int64_t first = Upto(pool_->num_slots());
    for (size_t i = 0; i < slots.size(); ++i) {
      slots[i] = static_cast<int32_t>(Upto(3) > 0 ? (first + i) % pool_->num_slots()
                                                  : Upto(pool_->num_slots()));
    }
    return slots;
  }
  Model::Row& At(int64_t layer, size_t part, int32_t slot) {
    Model::Row& row = model_.rows[{layer, part, slot}];
    const KvTensor& spec = parts_[part];
    row.resize(static_cast<size_t>(spec.num_heads * spec.head_dim * DTypeBytes(*spec.dtype)));
    return row;
  }

  void RandomSet() {
    const int64_t layer = Layer();
    const std::vector<int32_t> slots = Slots();
    std::vector<std::vector<float>> values(parts_.size());
    std::vector<TokenView> rows;
    std::vector<float> scales;
    for (size_t part = 0; part < parts_.size(); ++part) {
      const KvTensor& spec = parts_[part];
      values[part].resize(slots.size() * spec.num_heads * spec.head_dim);
      for (float& value : values[part]) value = static_cast<float>(Upto(4000) - 2000) / 7;
      rows.push_back(TokenView::Packed(reinterpret_cast<std::byte*>(values[part].data()),
                                       DType::kFloat32, static_cast<int64_t>(slots.size()),
                                       spec.num_heads, spec.head_dim));
      scales.push_back(Upto(2) == 0 ? 1.0F : 1.7F);
    }
    ASSERT_TRUE(IsOk(pool_->Set(layer, slots, rows, scales)));
    for (size_t part = 0; part < parts_.size(); ++part) {
      for (size_t i = 0; i < slots.size(); ++i)
        StoreInModel(layer, part, slots, i, values[part], scales[part]);
    }
  }

  // Encodes the slow way: of the formats' definitions, only what rounds right is taken over.
  void StoreInModel(int64_t layer, size_t part, const std::vector<int32_t>& slots, size_t i,
                    const std::vector<float>& values, float scale) {
    if (std::find(slots.begin() + i + 1, slots.end(), slots[i]) != slots.end()) return;
    const KvTensor& spec = parts_[part];
    const NaiveFormat& format = NaiveFormat::Of(*spec.dtype);
    Model::Row& row = At(layer, part, slots[i]);
    const Model::Row got = RowInPool(layer, part, slots[i]);
    const size_t width = static_cast<size_t>(spec.num_heads * spec.head_dim);
    for (size_t v = 0; v < width; ++v) {
      const std::byte* stored = &got[v * format.bytes()];
      ASSERT_TRUE(format.IsEncodingOf(values[i * width + v] / scale, stored));
      std::copy_n(stored, format.bytes(), &row[v * format.bytes()]);
    }
  }

  // Straight from the pages.
  Model::Row RowInPool(int64_t layer, size_t part, int32_t slot) {
    const KvLayout& layout = shape_.layout;
    const bool fused = layout.tensors[0].name == "kv";
    const int64_t tensor = fused ? 0 : static_cast<int64_t>(part);
    const KvTensor& spec = parts_[part];
    const int64_t value_bytes = DTypeBytes(*spec.dtype);
    const int64_t head_bytes = layout.tensors[tensor].head_dim * value_bytes;
    const int64_t page_size = layout.page_size, place = slot % page_size;
    const std::byte* page = pool_->pages()->page(layer, tensor, slot / page_size).data();
    Model::Row row;
    for (int64_t head = 0; head < spec.num_heads; ++head) {
      const int64_t index =
          layout.page_format == "HND" ? head * page_size + place : place * spec.num_heads + head;
      const std::byte* at = page + index * head_bytes + (fused && part == 1 ? head_bytes / 2 : 0);
      row.insert(row.end(), at, at + spec.head_dim * value_bytes);
    }
    return row;
  }

  // [tensors, layers, slots, heads, dim] of the model; fused tensors have both parts in each head.
  std::vector<std::byte> FlatOfModel(int64_t first_layer, int64_t layers,
                                     const std::vector<int32_t>& slots) {
    std::vector<std::byte> flat;
    const bool fused = shape_.layout.tensors[0].name == "kv";
    for (size_t part = 0; part < (fused ? 1 : parts_.size()); ++part) {
      for (int64_t layer = first_layer; layer < first_layer + layers; ++layer) {
        for (const int32_t slot : slots) {
          const Model::Row row = At(layer, part, slot);
          if (!fused) {
            flat.insert(flat.end(), row.begin(), row.end());
            continue;
          }
          const Model::Row other = At(layer, 1, slot);
          const size_t head = row.size() / parts_[0].num_heads;
          for (size_t at = 0; at < row.size(); at += head) {
            flat.insert(flat.end(), &row[at], &row[at] + head);
            flat.insert(flat.end(), &other[at], &other[at] + head);
          }
        }
      }
    }
    return flat;
  }

  void RandomRead() {
    const std::vector<int32_t> slots = Slots();
    const int64_t layer = Layer(), count = static_cast<int64_t>(slots.size());
    std::vector<std::byte> flat(static_cast<size_t>(pool_->flat_bytes(count)));
    ASSERT_TRUE(IsOk(pool_->ReadFlat(slots, flat)));
    ASSERT_EQ(flat, FlatOfModel(0, shape_.layout.num_layers, slots));
    flat.resize(static_cast<size_t>(pool_->layer_flat_bytes(count)));
    ASSERT_TRUE(IsOk(pool_->ReadFlatLayer(layer, slots, flat)));
    ASSERT_EQ(flat, FlatOfModel(layer, 1, slots));
  }

  // Rows of some slots to others, out and in as flat data.
  void RandomMove() {
    const std::vector<int32_t> from = Slots();
    std::vector<int32_t> to = Slots();
    to.resize(from.size());
    const bool whole = Upto(2) == 0;
    const int64_t layer = Layer(), count = static_cast<int64_t>(from.size());
    std::vector<std::byte> flat(
        static_cast<size_t>(whole ? pool_->flat_bytes(count) : pool_->layer_flat_bytes(count)));
    if (whole) {
      ASSERT_TRUE(IsOk(pool_->ReadFlat(from, flat)));
      ASSERT_TRUE(IsOk(pool_->WriteFlat(to, flat)));
    } else {
      ASSERT_TRUE(IsOk(pool_->ReadFlatLayer(layer, from, flat)));
      ASSERT_TRUE(IsOk(pool_->WriteFlatLayer(layer, to, flat)));
    }
    for (size_t part = 0; part < parts_.size(); ++part) {
      for (int64_t l = whole ? 0 : layer; l < (whole ? shape_.layout.num_layers : layer + 1); ++l) {
        std::vector<Model::Row> rows;
        rows.reserve(from.size());
        for (const int32_t slot : from) rows.push_back(At(l, part, slot));
        for (size_t i = 0; i < to.size(); ++i) At(l, part, to[i]) = rows[i];
      }
    }
  }

  Shape shape_;
  std::shared_ptr<TokenKvPool> pool_;
  std::vector<KvTensor> parts_;
  Model model_;
  std::mt19937_64 random_{11};
};

TEST_P(TokenPools, AgreeWithRowsKeptOneByOne) {
  // Each operation is on some 6 rows of some 5 tensors: over a million row operations in all.
  for (int i = 0; i < 9000; ++i) {
    const int64_t what = Upto(3);
    if (what == 0) RandomSet();
    if (what == 1) RandomRead();
    if (what == 2) RandomMove();
    if (HasFatalFailure()) return;
  }
}

TEST_P(TokenPools, KeysAndValuesAreSeenWhereTheyLie) {
  const std::string& first = shape_.layout.tensors[0].name;
  const TokenView key = Must(pool_->Key(1, Clock::now()));
  const TokenView value = Must(pool_->Value(1, Clock::now()));
  EXPECT_EQ(key.data, pool_->pages()->buffer(1, 0).address);
  EXPECT_EQ(key.num_slots, kTokens + shape_.layout.page_size);
  if (first == "latent") {
    EXPECT_EQ(key.head_dim, 12);
    EXPECT_EQ(value.head_dim, 8);
    EXPECT_EQ(value.data, key.data);
  } else if (first == "kv") {
    EXPECT_EQ(value.data, key.data + key.head_bytes());
    EXPECT_EQ(value.head_dim, 3);
  } else {
    EXPECT_EQ(value.data, pool_->pages()->buffer(1, 1).address);
    EXPECT_EQ(value.head_dim, shape_.layout.tensors[1].head_dim);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, TokenPools, testing::Range<size_t>(0, Shapes().size()),
                         [](const auto& param) { return Shapes()[param.param].name; });

TEST(TokenKvPools, SizesThatCannotBe) {
  const KvLayout layout = KvLayout::Mha(2, 16, 2, 8, DType::kFloat32);
  for (const int64_t tokens :
       {int64_t{0}, int64_t{-16}, int64_t{17}, int64_t{INT32_MAX} + 1, INT64_MAX, INT64_MIN}) {
    EXPECT_TRUE(Fails(TokenKvPool::Create(layout, tokens), kInvalid, "num_tokens"));
  }
  KvLayout own = layout;
  own.page_format = "cpu-attn";
  EXPECT_TRUE(Fails(TokenKvPool::Create(own, 32), kInvalid, "page_format 'cpu-attn'"));
  EXPECT_TRUE(Fails(TokenKvPool::Create(layout, 32, 4), kInvalid, "latent_value_dim is 4"));
  const KvLayout mla = KvLayout::Mla(2, 16, 24, DType::kFloat32);
  EXPECT_TRUE(Fails(TokenKvPool::Create(mla, 32, 25), kInvalid, "[0, 24]"));
  EXPECT_TRUE(Fails(TokenKvPool::Create(mla, 32, -1), kInvalid, "latent_value_dim is -1"));
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

TEST_F(BadCalls, FlatData) {
  std::vector<std::byte> flat(static_cast<size_t>(pool_->flat_bytes(2)));
  EXPECT_TRUE(Fails(pool_->WriteFlat(slots_, {flat.data(), flat.size() - 1}), kInvalid, "bytes"));
  EXPECT_TRUE(Fails(pool_->ReadFlat(slots_, {flat.data(), 0}), kInvalid, "0 bytes", "2 slots"));
  EXPECT_TRUE(Fails(pool_->WriteFlatLayer(0, slots_, flat), kInvalid, "2 slots of 1 layers"));
  EXPECT_TRUE(Fails(pool_->WriteFlatLayer(2, slots_, flat), kRange, "layer 2"));
  EXPECT_TRUE(Fails(pool_->WriteFlat(std::vector<int32_t>{4, -1}, flat), kRange, "slot -1"));
}

TEST_F(BadCalls, CopiesBetweenPools) {
  const auto other = Must(TokenKvPool::Create(KvLayout::Mha(3, 4, 2, 8, DType::kFloat32), 16));
  EXPECT_TRUE(Fails(pool_->CopyFrom(*other, slots_, slots_), kInvalid, "3 layers", "2 layers"));
  const auto mla = Must(TokenKvPool::Create(KvLayout::Mla(2, 4, 16, DType::kFloat32), 16));
  EXPECT_TRUE(Fails(pool_->CopyFrom(*mla, slots_, slots_), kInvalid, "latent"));
  const auto good = Must(TokenKvPool::Create(layout_, 8));
  EXPECT_TRUE(
      Fails(pool_->CopyFrom(*good, std::vector<int32_t>{4, 12}, slots_), kRange, "slot 12"));
  EXPECT_TRUE(Fails(pool_->CopyLayerFrom(*good, 5, slots_, slots_), kRange, "layer 5"));
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

TEST(TokenKvPools, ReadersWaitForTheirLayer) {
  const auto pool = Must(TokenKvPool::Create(KvLayout::Mla(2, 1, 4, DType::kFloat32), 4));
  EXPECT_TRUE(IsOk(pool->Key(1, Clock::now())));
  ASSERT_TRUE(IsOk(pool->layers().Begin()));
  ASSERT_TRUE(IsOk(pool->layers().Ready(1)));
  EXPECT_TRUE(IsOk(pool->Value(0, Clock::now())));
  EXPECT_TRUE(Fails(pool->Key(1, Clock::now()), absl::StatusCode::kDeadlineExceeded, "layer 1"));
  EXPECT_TRUE(Fails(pool->Value(2, Clock::now()), kRange, "layer 2"));
}

}  // namespace
}  // namespace kvferry
