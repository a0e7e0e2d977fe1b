#pragma once

// TokenKvPool: every kind of memory enrols here with
//   INSTANTIATE_TEST_SUITE_P(Where, TokenPools, TokenPoolsIn(backend, ...), TokenPoolName());
// in one file of its binary, and must agree with rows kept one by one.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "pool/token_kv_pool.h"
#include "tests/pool/memory_backend.h"
#include "tests/pool/naive_numbers.h"
#include "tests/support/sanitized.h"
#include "tests/support/status.h"

namespace kvferry {

inline KvLayout DoubleSparse(int64_t layers, int64_t page_size) {
  KvLayout layout = KvLayout::Mha(layers, page_size, 2, 6, DType::kBFloat16);
  layout.tensors.push_back({"label", 2, 3});
  return layout;
}

inline KvLayout SparseMla(int64_t layers, int64_t page_size) {
  KvLayout layout = KvLayout::Mla(layers, page_size, 12, DType::kFloat16);
  layout.tensors.push_back({"index_k", 1, 8, DType::kFloat8E4M3});
  layout.tensors.push_back({"index_scale", 1, 1, DType::kFloat32});
  return layout;
}

inline KvLayout Hnd(KvLayout layout) {
  layout.page_format = "HND";
  return layout;
}

struct PoolShape {
  std::string name;
  KvLayout layout;
  int64_t latent_value_dim = 0;
  int64_t alike = 1;  // How many of the shapes are of that kind of pool.
};

inline const std::vector<PoolShape>& PoolShapes() {
  static const std::vector<PoolShape> shapes = {
      {"Mha", KvLayout::Mha(3, 1, 2, 4, DType::kFloat32), 0, 4},
      {"MhaPagesHnd", Hnd(KvLayout::Mha(2, 4, 3, 8, DType::kBFloat16)), 0, 4},
      {"UnequalFp8", {2, 2, DType::kFloat8E4M3, "NHD", {{"k", 2, 6}, {"v", 1, 4}}}, 0, 4},
      {"Fused", KvLayout::Fused(2, 4, 2, 3, DType::kFloat16), 0, 4},
      {"Mla", KvLayout::Mla(3, 4, 12, DType::kFloat8E5M2), 8},
      {"DoubleSparse", DoubleSparse(2, 4)},
      {"SparseMla", SparseMla(2, 4), 8},
  };
  return shapes;
}

// The model: for each layer, part and slot the stored bytes of a row, head by head. Knows nothing
// of pages, orders of dimensions or where parts lie.
struct TokenPoolModel {
  using Row = std::vector<std::byte>;
  std::map<std::tuple<int64_t, size_t, int32_t>, Row> rows;
};

struct TokenPoolBackend : MemoryBackend {
  bool keeps_last = true;  // Of the rows that go to one slot.
};

class TokenPools : public testing::TestWithParam<std::tuple<TokenPoolBackend, size_t>> {
 protected:
  static constexpr int64_t kTokens = 48;

  static const TokenPoolBackend& backend() { return std::get<0>(GetParam()); }

  void SetUp() override {
    if (!backend().missing.empty()) GTEST_SKIP() << backend().missing;
    shape_ = PoolShapes()[std::get<1>(GetParam())];
    pool_ = Must(
        TokenKvPool::Create(shape_.layout, kTokens, shape_.latent_value_dim, backend().memory));
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
  std::vector<int32_t> SlotsToWrite() {
    std::vector<int32_t> slots = Slots();
    if (backend().keeps_last) return slots;
    std::sort(slots.begin(), slots.end());
    slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
    std::shuffle(slots.begin(), slots.end(), random_);
    return slots;
  }
  TokenPoolModel::Row& At(int64_t layer, size_t part, int32_t slot) {
    TokenPoolModel::Row& row = model_.rows[{layer, part, slot}];
    const KvTensor& spec = parts_[part];
    row.resize(static_cast<size_t>(spec.num_heads * spec.head_dim * DTypeBytes(*spec.dtype)));
    return row;
  }

  void RandomSet() {
    const int64_t layer = Layer();
    const std::vector<int32_t> slots = SlotsToWrite();
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
    ++calls_;
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
    TokenPoolModel::Row& row = At(layer, part, slots[i]);
    const TokenPoolModel::Row got = RowInPool(layer, part, slots[i]);
    const size_t width = static_cast<size_t>(spec.num_heads * spec.head_dim);
    for (size_t v = 0; v < width; ++v) {
      const std::byte* stored = &got[v * format.bytes()];
      ASSERT_TRUE(format.IsEncodingOf(values[i * width + v] / scale, stored));
      std::copy_n(stored, format.bytes(), &row[v * format.bytes()]);
    }
  }

  // Straight from the pages.
  TokenPoolModel::Row RowInPool(int64_t layer, size_t part, int32_t slot) {
    const KvLayout& layout = shape_.layout;
    const bool fused = layout.tensors[0].name == "kv";
    const int64_t tensor = fused ? 0 : static_cast<int64_t>(part);
    const KvTensor& spec = parts_[part];
    const int64_t value_bytes = DTypeBytes(*spec.dtype);
    const int64_t head_bytes = layout.tensors[tensor].head_dim * value_bytes;
    const int64_t page_size = layout.page_size, place = slot % page_size;
    const std::span<std::byte> there = pool_->pages()->page(layer, tensor, slot / page_size);
    const std::vector<std::byte> page =
        backend().read(there.data(), static_cast<int64_t>(there.size()));
    TokenPoolModel::Row row;
    for (int64_t head = 0; head < spec.num_heads; ++head) {
      const int64_t index =
          layout.page_format == "HND" ? head * page_size + place : place * spec.num_heads + head;
      const std::byte* at =
          page.data() + index * head_bytes + (fused && part == 1 ? head_bytes / 2 : 0);
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
          const TokenPoolModel::Row& row = At(layer, part, slot);
          if (!fused) {
            flat.insert(flat.end(), row.begin(), row.end());
            continue;
          }
          const TokenPoolModel::Row& other = At(layer, 1, slot);
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
    calls_ += 2;
    ASSERT_TRUE(IsOk(pool_->ReadFlat(slots, flat)));
    ASSERT_EQ(flat, FlatOfModel(0, shape_.layout.num_layers, slots));
    flat.resize(static_cast<size_t>(pool_->layer_flat_bytes(count)));
    ASSERT_TRUE(IsOk(pool_->ReadFlatLayer(layer, slots, flat)));
    ASSERT_EQ(flat, FlatOfModel(layer, 1, slots));
  }

  // Out and in as flat data.
  void MoveAsFlatData(bool whole, int64_t layer, const std::vector<int32_t>& from,
                      const std::vector<int32_t>& to) {
    const auto count = static_cast<int64_t>(from.size());
    std::vector<std::byte> flat(
        static_cast<size_t>(whole ? pool_->flat_bytes(count) : pool_->layer_flat_bytes(count)));
    calls_ += 2;
    if (whole) {
      ASSERT_TRUE(IsOk(pool_->ReadFlat(from, flat)));
      ASSERT_TRUE(IsOk(pool_->WriteFlat(to, flat)));
    } else {
      ASSERT_TRUE(IsOk(pool_->ReadFlatLayer(layer, from, flat)));
      ASSERT_TRUE(IsOk(pool_->WriteFlatLayer(layer, to, flat)));
    }
  }

  // Rows of some slots to others, some of which may be both.
  void RandomMove() {
    std::vector<int32_t> from = Slots();
    std::vector<int32_t> to = SlotsToWrite();
    from.resize(std::min(from.size(), to.size()));
    to.resize(from.size());
    const bool whole = Upto(2) == 0;
    const int64_t layer = Layer();
    if (Upto(2) == 0) {
      MoveAsFlatData(whole, layer, from, to);
    } else {
      ++calls_;
      ASSERT_TRUE(IsOk(whole ? pool_->CopyFrom(*pool_, from, to)
                             : pool_->CopyLayerFrom(*pool_, layer, from, to)));
    }
    for (size_t part = 0; part < parts_.size(); ++part) {
      for (int64_t l = whole ? 0 : layer; l < (whole ? shape_.layout.num_layers : layer + 1); ++l) {
        std::vector<TokenPoolModel::Row> rows;
        rows.reserve(from.size());
        for (const int32_t slot : from) rows.push_back(At(l, part, slot));
        for (size_t i = 0; i < to.size(); ++i) At(l, part, to[i]) = rows[i];
      }
    }
  }

  // Of zeros, for Set().
  std::vector<TokenView> Rows(size_t count) {
    std::vector<TokenView> rows;
    for (const KvTensor& spec : parts_) {
      zeros_.resize(
          std::max(zeros_.size(), count * spec.num_heads * spec.head_dim * sizeof(float)));
    }
    for (const KvTensor& spec : parts_) {
      rows.push_back(TokenView::Packed(zeros_.data(), DType::kFloat32, static_cast<int64_t>(count),
                                       spec.num_heads, spec.head_dim));
    }
    return rows;
  }

  absl::Status CallWithABadLayer() {
    const int64_t layer = Upto(2) == 0 ? -1 : shape_.layout.num_layers;
    const std::vector<int32_t> slots = Slots();
    std::vector<std::byte> flat(
        static_cast<size_t>(pool_->layer_flat_bytes(static_cast<int64_t>(slots.size()))));
    switch (Upto(4)) {
      case 0:
        return pool_->Set(layer, slots, Rows(slots.size()));
      case 1:
        return pool_->ReadFlatLayer(layer, slots, flat);
      case 2:
        return pool_->WriteFlatLayer(layer, slots, flat);
      default:
        return pool_->CopyLayerFrom(*pool_, layer, slots, slots);
    }
  }

  absl::Status CallWithABadSlot() {
    std::vector<int32_t> slots = Slots();
    slots.push_back(static_cast<int32_t>(Upto(2) == 0 ? -1 : pool_->num_slots()));
    std::swap(slots.back(), slots[static_cast<size_t>(Upto(static_cast<int64_t>(slots.size())))]);
    const std::vector<int32_t> good(slots.size(), 3);
    std::vector<std::byte> flat(
        static_cast<size_t>(pool_->layer_flat_bytes(static_cast<int64_t>(slots.size()))));
    switch (Upto(5)) {
      case 0:
        return pool_->Set(Layer(), slots, Rows(slots.size()));
      case 1:
        return pool_->ReadFlatLayer(Layer(), slots, flat);
      case 2:
        return pool_->WriteFlatLayer(Layer(), slots, flat);
      case 3:
        return pool_->CopyLayerFrom(*pool_, Layer(), slots, good);
      default:
        return pool_->CopyFrom(*pool_, good, slots);
    }
  }

  absl::Status CallWithBadNumbers() {
    const std::vector<int32_t> slots = Slots();
    std::vector<int32_t> more = slots;
    more.push_back(2);
    std::vector<std::byte> flat(
        static_cast<size_t>(pool_->flat_bytes(static_cast<int64_t>(slots.size())) + 1));
    std::vector<TokenView> rows = Rows(slots.size());
    switch (Upto(6)) {
      case 0:
        return pool_->ReadFlat(slots, flat);
      case 1:
        return pool_->WriteFlat(slots, flat);
      case 2:
        return pool_->CopyFrom(*pool_, slots, more);
      case 3:
        rows.pop_back();
        return pool_->Set(Layer(), slots, rows);
      case 4:
        rows.back().num_slots += 1;
        return pool_->Set(Layer(), slots, rows);
      default:
        std::vector<float> scales(rows.size(), 1);
        scales.back() = 0;
        return pool_->Set(Layer(), slots, rows, scales);
    }
  }

  // Something about it is wrong. The model stays as it is, and the pool has to.
  void RandomBadCall() {
    ++calls_;
    constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
    constexpr auto kRange = absl::StatusCode::kOutOfRange;
    const int64_t what = Upto(3);
    const absl::Status status = what == 0   ? CallWithABadLayer()
                                : what == 1 ? CallWithABadSlot()
                                            : CallWithBadNumbers();
    ASSERT_EQ(status.code(), what == 2 ? kInvalid : kRange) << status.ToString();
  }

  PoolShape shape_;
  std::shared_ptr<TokenKvPool> pool_;
  std::vector<KvTensor> parts_;
  TokenPoolModel model_;
  std::vector<std::byte> zeros_;
  int64_t calls_ = 0;
  std::mt19937_64 random_{11};
};

TEST_P(TokenPools, AgreeWithRowsKeptOneByOne) {
  // On the host a million calls for each kind of pool, each on some 6 rows.
#ifdef KVFERRY_SANITIZED
  constexpr int64_t kCalls = 100'000;  // Each takes ten times as long.
#else
  constexpr int64_t kCalls = 1'000'000;
#endif
  const int64_t calls = backend().slow ? 1'000 : kCalls / shape_.alike;
  while (calls_ < calls) {
    const int64_t what = Upto(7);
    if (what < 2) RandomSet();
    if (what == 2 || what == 3) RandomRead();
    if (what == 4 || what == 5) RandomMove();
    if (what == 6) RandomBadCall();
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

template <typename... Backends>
auto TokenPoolsIn(const Backends&... backends) {
  return testing::Combine(testing::Values(backends...),
                          testing::Range<size_t>(0, PoolShapes().size()));
}

struct TokenPoolName {
  template <typename ParamType>
  std::string operator()(const testing::TestParamInfo<ParamType>& info) const {
    return std::get<0>(info.param).name + PoolShapes()[std::get<1>(info.param)].name;
  }
};

}  // namespace kvferry
