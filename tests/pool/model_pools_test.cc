#include "pool/model_pools.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "pool/block_quant.h"
#include "tests/pool/guarded_memory.h"
#include "tests/pool/naive_numbers.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Shapes of public models with fewer, smaller layers.
constexpr char kLlama[] = R"({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8,
  "num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 128,
  "torch_dtype": "bfloat16"})";
constexpr char kDeepseek[] = R"({"model_type": "deepseek_v3",
  "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
  "num_key_value_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 128,
  "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
  "torch_dtype": "bfloat16"})";
constexpr char kDeepseek32[] = R"({"model_type": "deepseek_v32",
  "architectures": ["DeepseekV32ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
  "num_key_value_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 128,
  "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
  "index_head_dim": 128, "index_n_heads": 4, "index_topk": 16, "torch_dtype": "bfloat16"})";
constexpr char kGemma3[] = R"({"model_type": "gemma3_text",
  "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "hidden_size": 64,
  "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 6,
  "num_key_value_heads": 1, "sliding_window": 16, "sliding_window_pattern": 3,
  "torch_dtype": "float32"})";
constexpr char kQwen3Next[] = R"({"model_type": "qwen3_next",
  "architectures": ["Qwen3NextForCausalLM"], "head_dim": 32, "hidden_size": 64,
  "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8,
  "max_position_embeddings": 128, "full_attention_interval": 4, "linear_num_value_heads": 4,
  "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
  "linear_conv_kernel_dim": 4, "torch_dtype": "bfloat16"})";

ModelPoolsOptions Small() {
  return {.page_size = 4, .num_tokens = 64, .max_requests = 3, .max_context_tokens = 32};
}

std::unique_ptr<ModelPools> Make(const char* json, const ModelPoolsOptions& options = Small()) {
  return Must(ModelPools::Create(Must(ModelConfig::FromJson(json)), options));
}

TEST(ModelPoolsOf, Llama) {
  const auto pools = Make(kLlama);
  EXPECT_EQ(pools->kv()->layout(), KvLayout::Mha(3, 4, 2, 8, DType::kBFloat16));
  EXPECT_EQ(pools->kv()->num_tokens(), 64);
  EXPECT_EQ(pools->slots()->num_free(), 64);
  EXPECT_EQ(pools->requests().num_requests(), 3);
  EXPECT_EQ(pools->requests().max_context_tokens(), 32);
  EXPECT_EQ(pools->window_kv(), nullptr);
  EXPECT_EQ(pools->window_slots(), nullptr);
  EXPECT_EQ(pools->states(), nullptr);
  EXPECT_EQ(Must(pools->PlaceOf(2)).layer, 2);
  EXPECT_EQ(pools->bytes(), 3 * 32 * 4 + (64 + 4) * 3 * 2 * 2 * 8 * 2);
}

TEST(ModelPoolsOf, DeepseekCountsEveryLayerOfTheLatent) {
  const auto pools = Make(kDeepseek);
  EXPECT_EQ(pools->kv()->layout(), KvLayout::Mla(2, 4, 40, DType::kBFloat16));
  EXPECT_EQ(Must(pools->kv()->Value(0, Clock::now())).head_dim, 32);
  EXPECT_EQ(pools->kv()->flat_bytes(1), 2 * 40 * 2);
}

TEST(ModelPoolsOf, SparseAttentionHasIndexKeys) {
  const auto pools = Make(kDeepseek32);
  const KvLayout& layout = pools->kv()->layout();
  ASSERT_EQ(layout.num_tensors(), 3);
  EXPECT_EQ(layout.tensors[1], (KvTensor{"index_k", 1, 128, DType::kFloat8E4M3}));
  EXPECT_EQ(layout.tensors[2], (KvTensor{"index_k_scale", 1, 1, DType::kFloat32}));
  EXPECT_EQ(pools->kv()->flat_bytes(1), 2 * (40 * 2 + 128 + 4));
}

TEST(ModelPoolsOf, SlidingLayersHaveTheirOwnSmallerPool) {
  ModelPoolsOptions options = Small();
  options.window_ratio = 0.5;
  const auto pools = Make(kGemma3, options);
  EXPECT_EQ(pools->kv()->layout().num_layers, 2);
  EXPECT_EQ(pools->window_kv()->layout().num_layers, 4);
  EXPECT_EQ(pools->window_kv()->num_tokens(), 32);
  EXPECT_EQ(pools->slots(), nullptr);
  EXPECT_EQ(Must(pools->PlaceOf(2)).kind, LayerKind::kFull);
  EXPECT_EQ(Must(pools->PlaceOf(4)).kind, LayerKind::kSliding);
  EXPECT_EQ(Must(pools->PlaceOf(4)).layer, 3);

  // Rows of a sliding layer go where its own pool has them.
  const std::vector<int32_t> gone = Must(pools->window_slots()->Allocate(8));
  const std::vector<int32_t> mine = Must(pools->window_slots()->Allocate(4));
  ASSERT_TRUE(IsOk(pools->window_slots()->FreeWindow(gone)));
  const std::vector<int32_t> more = Must(pools->window_slots()->Allocate(4));
  const std::vector<int32_t> window = Must(pools->window_slots()->ToWindow(more));
  EXPECT_NE(window, more);
  std::vector<float> values(4 * 16, 5);
  const TokenView rows =
      TokenView::Packed(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32, 4, 1, 16);
  for (const int64_t layer : {4, 5}) {
    ASSERT_TRUE(IsOk(pools->Set(layer, more, std::vector<TokenView>{rows, rows})));
  }
  const auto first_value = [](const TokenKvPool& pool, int64_t layer, int32_t slot) {
    return *reinterpret_cast<const float*>(pool.view(layer, 1).row(slot));
  };
  EXPECT_EQ(first_value(*pools->window_kv(), 3, window[3]), 5);
  EXPECT_EQ(first_value(*pools->window_kv(), 3, Must(pools->window_slots()->ToWindow(mine))[0]), 0);
  EXPECT_EQ(first_value(*pools->kv(), 1, more[3]), 5);
}

// The engine frees what has left the window.
TEST(ModelPoolsOf, WhereAllLayersSlideOnePoolIsEnough) {
  ModelConfig model = Must(ModelConfig::FromJson(kGemma3));
  model.layers.assign(6, LayerKind::kSliding);
  const auto pools = Must(ModelPools::Create(model, Small()));
  EXPECT_EQ(pools->kv()->layout().num_layers, 6);
  EXPECT_EQ(pools->window_kv(), nullptr);
  EXPECT_EQ(Must(pools->PlaceOf(4)).layer, 4);
  std::vector<float> values(16, 5);
  const TokenView row =
      TokenView::Packed(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32, 1, 1, 16);
  const std::vector<int32_t> slots = {7};
  ASSERT_TRUE(IsOk(pools->Set(4, slots, std::vector<TokenView>{row, row})));
  const auto* const set = reinterpret_cast<const float*>(pools->kv()->view(4, 1).row(7));
  EXPECT_TRUE(std::equal(values.begin(), values.end(), set));
}

TEST(ModelPoolsOf, LinearLayersHaveStates) {
  const auto pools = Make(kQwen3Next);
  EXPECT_EQ(pools->kv()->layout().num_layers, 2);
  ASSERT_NE(pools->states(), nullptr);
  EXPECT_EQ(pools->states()->shape().num_layers, 6);
  EXPECT_EQ(pools->states()->num_slots(), 1 + 3);
  EXPECT_EQ(Must(pools->PlaceOf(3)).kind, LayerKind::kFull);
  EXPECT_EQ(Must(pools->PlaceOf(4)).layer, 3);
  const int64_t table = 3 * 32 * 4, kv = (64 + 4) * 2 * 2 * 2 * 32 * 2;
  EXPECT_EQ(pools->bytes(), table + kv + pools->states()->bytes());
  EXPECT_TRUE(Fails(pools->Set(4, {}, {}), kInvalid, "layer 4 is linear"));
  EXPECT_TRUE(Fails(pools->Set(8, {}, {}), absl::StatusCode::kOutOfRange, "layer 8", "[0, 8)"));
}

TEST(ModelPoolsOf, ABudgetOfBytesIsKept) {
  for (const char* json : {kLlama, kDeepseek32, kGemma3}) {
    for (const int64_t kv_bytes : {100000, 1234567}) {
      ModelPoolsOptions options = Small();
      options.num_tokens = 0;
      options.kv_bytes = kv_bytes;
      const auto pools = Make(json, options);
      const auto table = static_cast<int64_t>(pools->requests().table().size_bytes());
      EXPECT_LE(pools->bytes() - table, kv_bytes);
      int64_t page_bytes = pools->kv()->layout().page_bytes();
      if (pools->window_kv() != nullptr) page_bytes += pools->window_kv()->layout().page_bytes();
      EXPECT_GT(pools->bytes() - table, kv_bytes - 2 * page_bytes);
    }
  }
}

TEST(ModelPoolsOf, TheCallerChoosesTheDTypeOfKv) {
  const auto layout = [](absl::string_view name, const char* json = kLlama) {
    ModelPoolsOptions options = Small();
    options.kv_cache_dtype = std::string(name);
    const auto pools = Make(json, options);
    EXPECT_EQ(pools->kv()->layout().dtype, pools->model().kv_dtype);
    return pools->kv()->layout();
  };
  EXPECT_EQ(layout("auto").dtype, DType::kBFloat16);
  EXPECT_EQ(layout("fp8"), KvLayout::Mha(3, 4, 2, 8, DType::kFloat8E4M3));
  EXPECT_EQ(layout("fp8_e5m2").dtype, DType::kFloat8E5M2);
  EXPECT_EQ(layout("bf16", kGemma3).dtype, DType::kBFloat16);
  const std::vector<KvTensor> four_bits = {{"k", 2, 4, DType::kUint8},
                                           {"k_scale", 1, 1, DType::kUint8},
                                           {"v", 2, 4, DType::kUint8},
                                           {"v_scale", 1, 1, DType::kUint8}};
  EXPECT_EQ(layout("fp4").tensors, four_bits);
}

// A model's pools beside a table of what each of its layers keeps of each slot: a number, from
// which all values of the rows follow.
class PoolsAgainstTable : public testing::TestWithParam<const char*> {
 protected:
  using Slots = std::vector<int32_t>;

  int64_t Upto(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  // Every format has these values.
  static float ValueOf(uint32_t number, size_t part, int64_t i) {
    return static_cast<float>((number * 5 + part * 3 + static_cast<uint64_t>(i)) % 16);
  }
  bool slides(int64_t layer) const { return layers_[layer] == LayerKind::kSliding; }
  SlidingWindowAllocator* windows() { return pools_->window_slots(); }

  void Allocate() {
    const int64_t tokens = 4 * (1 + Upto(5));
    const auto got = windows() ? windows()->Allocate(tokens) : pools_->slots()->Allocate(tokens);
    if (!got.ok()) {
      ASSERT_TRUE(absl::IsResourceExhausted(got.status())) << got.status();
      return;
    }
    ASSERT_EQ(static_cast<int64_t>(got->size()), tokens);
    for (const int32_t slot : *got) ASSERT_TRUE(in_use_.insert(slot).second) << slot;
    live_.push_back(*got);
  }
  void Free() {
    std::swap(live_[Upto(static_cast<int64_t>(live_.size()))], live_.back());
    const Slots slots = std::move(live_.back());
    live_.pop_back();
    ASSERT_TRUE(IsOk(windows() ? windows()->Free(slots) : pools_->slots()->Free(slots)));
    for (const int32_t slot : slots) {
      in_use_.erase(slot);
      left_window_.erase(slot);
      for (std::vector<uint32_t>& layer : table_) layer[slot] = 0;
    }
  }
  void LeaveWindow() {
    const Slots& any = live_[Upto(static_cast<int64_t>(live_.size()))];
    const Slots page(any.begin(), any.begin() + 4);
    ASSERT_TRUE(IsOk(windows()->FreeWindow(page)));
    for (const int32_t slot : page) {
      left_window_.insert(slot);
      for (size_t layer = 0; layer < layers_.size(); ++layer) {
        if (slides(static_cast<int64_t>(layer))) table_[layer][slot] = 0;
      }
    }
  }

  // Rows of some slots in a layer, which may be none; or of a slot too much.
  void Set() {
    const int64_t layer = Upto(static_cast<int64_t>(layers_.size()) + 2) - 1;
    Slots slots = live_[Upto(static_cast<int64_t>(live_.size()))];
    std::shuffle(slots.begin(), slots.end(), random_);
    slots.resize(Upto(static_cast<int64_t>(slots.size()) + 1));
    const bool outside = Upto(8) == 0;
    if (outside) slots.push_back(Upto(2) == 0 ? -1 : kSlots);
    const bool exists = layer >= 0 && layer < static_cast<int64_t>(layers_.size());
    const bool linear = exists && layers_[layer] == LayerKind::kLinear;
    const absl::StatusCode want = linear               ? kInvalid
                                  : !exists || outside ? absl::StatusCode::kOutOfRange
                                                       : absl::StatusCode::kOk;
    std::vector<uint32_t> numbers(slots.size());
    for (uint32_t& number : numbers) number = ++last_number_;
    std::vector<std::vector<float>> memory(parts_.size());
    std::vector<TokenView> rows;
    for (size_t part = 0; part < parts_.size(); ++part) {
      const int64_t width = parts_[part].num_heads * parts_[part].head_dim;
      for (const uint32_t number : numbers) {
        for (int64_t i = 0; i < width; ++i) memory[part].push_back(ValueOf(number, part, i));
      }
      rows.push_back(TokenView::Packed(reinterpret_cast<std::byte*>(memory[part].data()),
                                       DType::kFloat32, static_cast<int64_t>(slots.size()),
                                       parts_[part].num_heads, parts_[part].head_dim));
    }
    ASSERT_EQ(pools_->Set(layer, slots, rows).code(), want);
    for (size_t i = 0; want == absl::StatusCode::kOk && i < slots.size(); ++i) {
      if (slides(layer) && left_window_.contains(slots[i])) continue;  // As padding.
      table_[layer][slots[i]] = numbers[i];
    }
  }

  void Expect(int64_t layer, int32_t slot) {
    const uint32_t number = table_[layer][slot];
    if (number == 0) return;
    const int64_t place = std::count(layers_.begin(), layers_.begin() + layer, layers_[layer]);
    const TokenKvPool& pool = slides(layer) ? *pools_->window_kv() : *pools_->kv();
    const int32_t at = slides(layer) ? Must(windows()->ToWindow(Slots{slot}))[0] : slot;
    for (size_t part = 0; part < parts_.size(); ++part) {
      const TokenView view = pool.view(place, static_cast<int64_t>(part));
      const NaiveFormat& format = NaiveFormat::Of(view.dtype);
      for (int64_t i = 0; i < view.num_heads * view.head_dim; ++i) {
        ASSERT_EQ(format.Decode(view.row(at) + i * format.bytes()), ValueOf(number, part, i))
            << "layer " << layer << ", slot " << slot << ", part " << part;
      }
    }
  }
  void ExpectAll() {
    for (int64_t layer = 0; layer < static_cast<int64_t>(layers_.size()); ++layer) {
      for (const int32_t slot : in_use_) Expect(layer, slot);
    }
  }

  static constexpr int32_t kSlots = 64 + 4;
  std::unique_ptr<ModelPools> pools_ = Make(GetParam());
  const std::vector<LayerKind> layers_ = pools_->model().layers;
  const std::vector<KvTensor> parts_ = Must(KvPartsOf(pools_->model()));
  std::vector<std::vector<uint32_t>> table_{layers_.size(), std::vector<uint32_t>(kSlots)};
  std::vector<Slots> live_;
  std::set<int32_t> in_use_, left_window_;
  uint32_t last_number_ = 0;
  std::mt19937_64 random_{6};
};

TEST_P(PoolsAgainstTable, RandomOperations) {
  for (int i = 0; i < 200'000; ++i) {
    const int64_t what = Upto(100);
    if (live_.empty() || what < 10) {
      Allocate();
    } else if (what < 18) {
      Free();
    } else if (what < 24 && windows() != nullptr) {
      LeaveWindow();
    } else if (what < 60) {
      Set();
    } else {
      const Slots& any = live_[Upto(static_cast<int64_t>(live_.size()))];
      Expect(Upto(static_cast<int64_t>(layers_.size())),
             any[Upto(static_cast<int64_t>(any.size()))]);
    }
    if (i % 1024 == 0) ExpectAll();
    if (HasFatalFailure()) FAIL() << "operation " << i;
  }
  EXPECT_GT(last_number_, 100'000);
}

// A million operations in all.
constexpr std::array<const char*, 5> kModels = {kLlama, kDeepseek, kDeepseek32, kGemma3,
                                                kQwen3Next};
INSTANTIATE_TEST_SUITE_P(Models, PoolsAgainstTable, testing::ValuesIn(kModels),
                         [](const auto& info) {
                           return Must(ModelConfig::FromJson(info.param)).model_type;
                         });

// DeepSeek V3.2 with a latent of whole blocks.
constexpr char kDeepseekBlocks[] = R"({"model_type": "deepseek_v32", "hidden_size": 64,
  "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 128,
  "kv_lora_rank": 32, "qk_rope_head_dim": 16, "index_head_dim": 128, "index_n_heads": 4,
  "index_topk": 16, "torch_dtype": "bfloat16"})";

class FourBits : public testing::TestWithParam<const char*> {
 protected:
  static ModelPoolsOptions Options() {
    ModelPoolsOptions options = Small();
    options.kv_cache_dtype = "fp4";
    return options;
  }
  // Of each part, out of the same values.
  std::vector<TokenView> TwoRows(std::vector<float>& values) const {
    std::vector<TokenView> rows;
    for (const KvTensor& part : parts_) {
      rows.push_back(TokenView::Packed(reinterpret_cast<std::byte*>(values.data()),
                                       part.dtype.value_or(DType::kFloat32), 2, part.num_heads,
                                       part.head_dim));
    }
    return rows;
  }
  void ExpectNothingWritten() const {
    for (const BufferInfo& buffer : pools_->kv()->pages()->buffer_infos()) {
      EXPECT_EQ(std::count(buffer.address, buffer.address + buffer.bytes, std::byte{0}),
                buffer.bytes);
    }
  }

  std::unique_ptr<ModelPools> pools_ = Make(GetParam(), Options());
  std::vector<KvTensor> parts_ = Must(KvPartsOf(pools_->model()));
  std::mt19937_64 random_{4};
};

// A million rows, beside a pool like the model's, of which each is stored by StoreQuantized() or as
// it comes.
TEST_P(FourBits, RowsAreStoredAsStoreQuantizedWould) {
  const KvLayout& layout = pools_->kv()->layout();
  const auto naive = Must(TokenKvPool::Create(layout, 64));
  const size_t num_in_blocks = parts_[0].name == "latent" ? 1 : 2;
  for (int64_t stored_rows = 0; stored_rows < 1000000;) {
    const int64_t layer = static_cast<int64_t>(random_()) & 1;
    std::vector<int32_t> slots(68);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_);
    slots.resize(random_() % 69);
    const auto count = static_cast<int64_t>(slots.size());
    stored_rows += count;
    std::vector<std::vector<std::byte>> memory;
    std::vector<TokenView> rows;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const DType dtype = parts_[i].dtype.value_or(DType::kFloat32);
      memory.emplace_back(
          static_cast<size_t>(count * parts_[i].num_heads * parts_[i].head_dim * 4));
      for (size_t at = 0; at < memory[i].size(); at += sizeof(float)) {
        const float value = static_cast<float>(random_() % 4001) / 7 - 280;
        std::memcpy(&memory[i][at], &value, sizeof value);
      }
      rows.push_back(TokenView::Packed(memory[i].data(), dtype, count, parts_[i].num_heads,
                                       parts_[i].head_dim));
    }
    ASSERT_TRUE(IsOk(pools_->Set(layer, slots, rows)));
    int64_t tensor = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const TokenView stored = naive->view(layer, tensor++);
      if (i < num_in_blocks) {
        ASSERT_TRUE(IsOk(StoreQuantized(BlockFormat::kMxfp4, rows[i], stored,
                                        naive->view(layer, tensor++), slots)));
        continue;
      }
      for (size_t row = 0; row < slots.size(); ++row) {
        std::memcpy(stored.row(slots[row]), rows[i].row(static_cast<int64_t>(row)),
                    static_cast<size_t>(stored.row_bytes()));
      }
    }
    for (int64_t buffer = 0; buffer < layout.num_buffers(); ++buffer) {
      const BufferInfo& got = pools_->kv()->pages()->buffer_infos()[buffer];
      const BufferInfo& want = naive->pages()->buffer_infos()[buffer];
      ASSERT_EQ(std::memcmp(got.address, want.address, static_cast<size_t>(got.bytes)), 0);
    }
  }
}

TEST_P(FourBits, WhatDoesNotFitWritesNothing) {
  std::vector<float> values(2 * 128, 3);
  const std::vector<TokenView> rows = TwoRows(values);
  const std::vector<int32_t> slots = {4, 5}, outside = {4, 68};
  const auto set = [&](std::span<const int32_t> to, std::span<const TokenView> from,
                       std::span<const float> scales = {}) {
    return pools_->Set(0, to, from, scales);
  };
  const std::vector<float> scales(rows.size(), 1);
  EXPECT_TRUE(Fails(set(slots, rows, scales), kInvalid, "blocks have scales of their own"));
  EXPECT_TRUE(Fails(set(outside, rows), absl::StatusCode::kOutOfRange, "slot 68"));
  EXPECT_TRUE(Fails(set(slots, std::span(rows).first(rows.size() - 1)), kInvalid,
                    "tensors given, but a layer has"));
  std::vector<TokenView> changed = rows;
  changed.push_back(rows[0]);
  EXPECT_TRUE(Fails(set(slots, changed), kInvalid, "tensors given, but a layer has"));
  // The first rows would do.
  changed = rows;
  changed.back().num_slots = 1;
  EXPECT_TRUE(Fails(set(slots, changed), kInvalid, "1 rows"));
  changed = rows;
  changed.back().head_dim /= 2;
  EXPECT_TRUE(Fails(set(slots, changed), kInvalid));
  changed = rows;
  changed[0].dtype = DType::kUint8;
  EXPECT_TRUE(Fails(set(slots, changed), kInvalid, "uint8 hold no numbers"));
  ExpectNothingWritten();
}

// Keys without their values would be another token's.
TEST_P(FourBits, WhatThereIsNoMemoryForWritesNothing) {
  std::vector<float> values(2 * 128, 3);
  const std::vector<TokenView> rows = TwoRows(values);
  const std::vector<int32_t> slots = {4, 5};
  absl::Status set;
  CallWithoutMemory([&] { set = pools_->Set(0, slots, rows); }, [&] { ExpectNothingWritten(); });
  EXPECT_TRUE(IsOk(set));
}

// Of all parts but those in blocks.
TEST_P(FourBits, RowsMayBeAViewOfThePoolItself) {
  TokenKvPool& pool = *pools_->kv();
  const int64_t in_blocks = parts_[0].name == "latent" ? 1 : 2;
  std::vector<std::byte> zeros(20 * 2 * 128 * sizeof(float));
  std::vector<TokenView> rows;
  std::vector<std::vector<std::byte>> want;
  std::vector<int32_t> to(20);
  for (size_t i = 0; i < to.size(); ++i)
    to[i] = static_cast<int32_t>(11 + 2 * i);  // Over the rows.
  for (int64_t i = 0; i < static_cast<int64_t>(parts_.size()); ++i) {
    const KvTensor& part = parts_[static_cast<size_t>(i)];
    if (i < in_blocks) {
      rows.push_back(
          TokenView::Packed(zeros.data(), DType::kFloat32, 20, part.num_heads, part.head_dim));
      continue;
    }
    const BufferInfo& buffer = pool.pages()->buffer(0, in_blocks + i);
    for (int64_t at = 0; at < buffer.bytes; ++at) {
      buffer.address[at] = static_cast<std::byte>(at * 7 + at / 128);
    }
    TokenView view = pool.view(0, in_blocks + i);
    view.data = view.row(10);
    view.num_slots = 20;
    want.emplace_back(view.data, view.data + 20 * view.row_bytes());
    rows.push_back(view);
  }
  ASSERT_TRUE(IsOk(pools_->Set(0, to, rows)));
  for (size_t i = 0; i < want.size(); ++i) {
    const TokenView view = pool.view(0, 2 * in_blocks + static_cast<int64_t>(i));
    std::vector<std::byte> got;
    for (const int32_t slot : to) {
      got.insert(got.end(), view.row(slot), view.row(slot) + view.row_bytes());
    }
    EXPECT_EQ(got, want[i]) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, FourBits, testing::Values(kLlama, kDeepseekBlocks),
                         [](const auto& param) { return param.index == 0 ? "Mha" : "SparseMla"; });

TEST(ModelPoolsOf, FourBitKeysAndValuesAreSeenAsCodes) {
  ModelPoolsOptions options = Small();
  options.kv_cache_dtype = "fp4";
  const auto mha = Make(kLlama, options);
  EXPECT_EQ(Must(mha->kv()->Key(1, Clock::now())).data, mha->kv()->view(1, 0).data);
  EXPECT_EQ(Must(mha->kv()->Value(1, Clock::now())).data, mha->kv()->view(1, 2).data);
  const auto mla = Make(kDeepseekBlocks, options);
  EXPECT_EQ(mla->kv()->layout().tensors[0], (KvTensor{"latent", 1, 24, DType::kUint8}));
  EXPECT_EQ(mla->kv()->layout().tensors[1], (KvTensor{"latent_scale", 1, 3, DType::kUint8}));
  EXPECT_EQ(mla->kv()->layout().tensors[2].name, "index_k");
  EXPECT_EQ(Must(mla->kv()->Value(0, Clock::now())).head_dim, 32 / 2);
  // Sliding layers have theirs in blocks, too.
  const auto mixed = Make(kGemma3, options);
  EXPECT_EQ(mixed->window_kv()->layout().tensors, mixed->kv()->layout().tensors);
  std::vector<float> values(4 * 16, 6);
  const TokenView rows =
      TokenView::Packed(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32, 4, 1, 16);
  const std::vector<int32_t> slots = Must(mixed->window_slots()->Allocate(4));
  ASSERT_TRUE(IsOk(mixed->Set(0, slots, std::vector<TokenView>{rows, rows})));
  const std::vector<int32_t> window = Must(mixed->window_slots()->ToWindow(slots));
  EXPECT_EQ(*mixed->window_kv()->view(0, 2).row(window[3]), std::byte{0x77});
}

TEST(ModelPoolsOf, KeysAndValuesMayLieOnADevice) {
  const auto memory = std::make_shared<GuardedMemory>();
  ModelPoolsOptions options = Small();
  options.memory = memory;
  const auto pools = Make(kGemma3, options);
  std::vector<float> values(4 * 16, 5);
  const TokenView row =
      TokenView::Packed(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32, 4, 1, 16);
  const std::vector<TokenView> rows = {row, row};
  const std::vector<int32_t> slots = Must(pools->window_slots()->Allocate(4));
  for (const int64_t layer : {4, 5}) ASSERT_TRUE(IsOk(pools->Set(layer, slots, rows)));
  const std::vector<int32_t> window = Must(pools->window_slots()->ToWindow(slots));
  const auto first = [&memory](const TokenView& view, int32_t slot) {
    float value = 0;
    std::memcpy(&value, memory->Read(view.row(slot), sizeof value).data(), sizeof value);
    return value;
  };
  EXPECT_EQ(first(pools->window_kv()->view(3, 1), window[2]), 5);
  EXPECT_EQ(first(pools->kv()->view(1, 0), slots[2]), 5);
  const auto hybrid = Make(kQwen3Next, options);
  EXPECT_EQ(&hybrid->states()->memory(), memory.get());
  EXPECT_EQ(&hybrid->kv()->memory(), memory.get());
  EXPECT_EQ(&hybrid->requests().memory(), memory.get());

  options.kv_cache_dtype = "fp4";
  const auto four_bits = Make(kLlama, options);
  const TokenView key = TokenView::Packed(row.data, DType::kFloat32, 4, 2, 8);
  ASSERT_TRUE(IsOk(four_bits->Set(0, slots, std::vector<TokenView>{key, key})));
  // 5 is as near to 4 as to 6, whose code is odd.
  EXPECT_EQ(memory->Read(four_bits->kv()->view(0, 0).row(slots[2]), 1)[0], std::byte{0x66});
  memory->failure = absl::UnavailableError("no such device");
  EXPECT_TRUE(Fails(ModelPools::Create(Must(ModelConfig::FromJson(kLlama)), options),
                    absl::StatusCode::kUnavailable, "no such device"));
}

TEST(ModelPoolsOf, ThreadsOfAPoolHelpToQuantise) {
  const auto memory = std::make_shared<GuardedMemory>();
  ModelPoolsOptions options = Small();
  options.kv_cache_dtype = "fp4";
  options.memory = memory;
  const auto pools = Make(kLlama, options);
  const std::shared_ptr<ThreadPool> threads = Must(ThreadPool::Create(1));
  pools->kv()->UseThreads(threads);
  std::vector<float> values(4 * 16, 5);
  const TokenView rows =
      TokenView::Packed(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32, 4, 2, 8);
  ASSERT_TRUE(
      IsOk(pools->Set(0, std::vector<int32_t>{4, 5, 6, 7}, std::vector<TokenView>{rows, rows})));
  EXPECT_EQ(memory->last_threads, threads.get());
}

TEST(ModelPoolsOf, OptionsThatCannotBe) {
  const ModelConfig llama = Must(ModelConfig::FromJson(kLlama));
  // All that is wrong is found before any memory is asked for.
  const auto full = std::make_shared<GuardedMemory>();
  full->failure = absl::ResourceExhaustedError("full");
  const auto create = [&full](const ModelConfig& model, void (*change)(ModelPoolsOptions&)) {
    ModelPoolsOptions options = Small();
    options.memory = full;
    change(options);
    return ModelPools::Create(model, options).status();
  };
  using Options = ModelPoolsOptions;
  EXPECT_TRUE(Fails(create(llama, [](Options& o) { o.num_tokens = 0; }), kInvalid, "give one"));
  EXPECT_TRUE(Fails(create(llama, [](Options& o) { o.kv_bytes = 9; }), kInvalid, "give one"));
  EXPECT_TRUE(Fails(create(llama, [](Options& o) { o.num_tokens = 3; }), kInvalid, "a page of 4"));
  EXPECT_TRUE(Fails(create(llama, [](Options& o) { o.num_tokens = -8; }), kInvalid, "-8"));
  EXPECT_TRUE(
      Fails(create(llama, [](Options& o) { o.num_tokens = INT64_MAX; }), kInvalid, "32 bits"));
  EXPECT_TRUE(Fails(create(llama,
                           [](Options& o) {
                             o.num_tokens = 0;
                             o.kv_bytes = INT64_MAX;
                           }),
                    kInvalid, "32 bits"));
  EXPECT_TRUE(Fails(create(llama,
                           [](Options& o) {
                             o.num_tokens = 0;
                             o.kv_bytes = INT64_MIN;
                           }),
                    kInvalid));
  EXPECT_TRUE(Fails(create(llama, [](Options& o) { o.page_size = 0; }), kInvalid, "page_size"));
  EXPECT_TRUE(Fails(create(llama, [](Options& o) { o.window_ratio = 0; }), kInvalid, "(0, 1]"));
  EXPECT_TRUE(Fails(create(llama, [](Options& o) { o.window_ratio = 1.1; }), kInvalid, "1.1"));
  EXPECT_TRUE(Fails(create(llama, [](Options& o) { o.max_requests = 0; }), kInvalid));
  EXPECT_TRUE(Fails(create(llama, [](Options& o) { o.max_context_tokens = -1; }), kInvalid));
  ModelConfig unnamed = llama;
  unnamed.max_position_embeddings = 0;
  EXPECT_TRUE(Fails(create(unnamed, [](Options& o) { o.max_context_tokens = 0; }), kInvalid,
                    "max_context_tokens is needed"));
  EXPECT_TRUE(Fails(create(llama, [](Options& o) { o.kv_cache_dtype = "nvfp4"; }), kInvalid,
                    "kv_cache_dtype is 'nvfp4'", "fp4_e2m1"));
  const auto four_bits = [](Options& o) { o.kv_cache_dtype = "fp4"; };
  EXPECT_TRUE(Fails(create(Must(ModelConfig::FromJson(kDeepseek)), four_bits), kInvalid,
                    "1 heads x 40", "a block of 16"));
  ModelConfig odd = Must(ModelConfig::FromJson(kDeepseekBlocks));
  odd.kv_lora_rank = 33;
  EXPECT_TRUE(Fails(create(odd, four_bits), kInvalid, "kv_lora_rank 33"));
  for (const ModelConfig& model : {Must(ModelConfig::FromJson(kQwen3Next)), llama}) {
    EXPECT_TRUE(Fails(create(model, [](Options& o) { o.max_track_slots = -1; }), kInvalid,
                      "max_track_slots is -1", "[0, 16777216]"));
  }
}

}  // namespace
}  // namespace kvferry
