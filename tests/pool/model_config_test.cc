#include "pool/model_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

using Json = nlohmann::json;
using Layers = std::vector<int64_t>;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

// The fields that count of config.json files on Hugging Face, with their values there.

constexpr char kLlama3[] = R"({  "architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "hidden_size": 4096, "max_position_embeddings": 8192, "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"})";

constexpr char kMistral7B[] = R"({"architectures": ["MistralForCausalLM"], "model_type": "mistral",
  "hidden_size": 4096, "max_position_embeddings": 32768, "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096,
  "torch_dtype": "bfloat16"})";

constexpr char kMistralNemo[] = R"({"architectures": ["MistralForCausalLM"],
  "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 128000,
  "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
  "sliding_window": null, "torch_dtype": "bfloat16"})";

constexpr char kQwen25[] = R"({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
  "hidden_size": 3584, "max_position_embeddings": 32768, "max_window_layers": 28,
  "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
  "sliding_window": 131072, "torch_dtype": "bfloat16", "use_sliding_window": false})";

constexpr char kQwen3[] = R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
  "head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 40960, "max_window_layers": 40,
  "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 8,
  "sliding_window": null, "torch_dtype": "bfloat16", "use_sliding_window": false,
  "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}})";

constexpr char kGemma2[] = R"({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2",
  "head_dim": 256, "hidden_size": 3584, "max_position_embeddings": 8192,
  "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
  "sliding_window": 4096, "sliding_window_size": 4096, "torch_dtype": "bfloat16"})";

constexpr char kGemma3Of1B[] = R"({"architectures": ["Gemma3ForCausalLM"],
  "model_type": "gemma3_text", "head_dim": 256, "hidden_size": 1152,
  "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
  "num_key_value_heads": 1, "sliding_window": 512, "sliding_window_pattern": 6,
  "torch_dtype": "bfloat16"})";

constexpr char kGemma3Of4B[] = R"({"architectures": ["Gemma3ForConditionalGeneration"],
  "model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
    "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
  "torch_dtype": "bfloat16",
  "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27}})";

constexpr char kGptOss[] = R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
  "head_dim": 64, "hidden_size": 2880, "layer_types": [
    "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
  "max_position_embeddings": 131072, "num_attention_heads": 64, "num_hidden_layers": 24,
  "num_key_value_heads": 8, "sliding_window": 128, "torch_dtype": "bfloat16"})";

constexpr char kDeepSeekV2Lite[] = R"({"architectures": ["DeepseekV2ForCausalLM"],
  "model_type": "deepseek_v2", "hidden_size": 2048, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "num_attention_heads": 16, "num_hidden_layers": 27,
  "num_key_value_heads": 16, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "torch_dtype": "bfloat16", "v_head_dim": 128})";

constexpr char kDeepSeekV3[] = R"({"architectures": ["DeepseekV3ForCausalLM"],
  "model_type": "deepseek_v3", "hidden_size": 7168, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "num_attention_heads": 128, "num_hidden_layers": 61,
  "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
  "v_head_dim": 128})";

constexpr char kDeepSeekV32[] = R"({"architectures": ["DeepseekV32ForCausalLM"],
  "model_type": "deepseek_v32", "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64,
  "index_topk": 2048, "kv_lora_rank": 512, "max_position_embeddings": 163840,
  "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128,
  "num_nextn_predict_layers": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "torch_dtype": "bfloat16", "v_head_dim": 128})";

constexpr char kQwen3Next[] = R"({"architectures": ["Qwen3NextForCausalLM"],
  "model_type": "qwen3_next", "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048,
  "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
  "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
  "mlp_only_layers": [], "num_attention_heads": 16, "num_hidden_layers": 48,
  "num_key_value_heads": 2, "torch_dtype": "bfloat16"})";

// Qwen3.6-35B-A3B, whose file also lists layer_types.
constexpr char kQwen36[] = R"({"architectures": ["Qwen3_5MoeForConditionalGeneration"],
  "model_type": "qwen3_5_moe", "text_config": {"dtype": "bfloat16", "full_attention_interval": 4,
    "head_dim": 256, "hidden_size": 2048, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1, "num_attention_heads": 16,
    "num_hidden_layers": 40, "num_key_value_heads": 2}})";

// LongCat-Flash-Chat's has no model_type.
constexpr char kLongcatFlash[] = R"({"architectures": ["LongcatFlashForCausalLM"],
  "attention_method": "MLA", "hidden_size": 6144, "kv_lora_rank": 512,
  "max_position_embeddings": 131072, "num_attention_heads": 64, "num_layers": 28,
  "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
  "v_head_dim": 128})";

constexpr char kDeepSeekOcr[] = R"({"architectures": ["DeepseekOCRForCausalLM"],
  "language_config": {"architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 1280,
    "kv_lora_rank": null, "max_position_embeddings": 8192, "num_attention_heads": 10,
    "num_hidden_layers": 12, "num_key_value_heads": 10, "q_lora_rank": null, "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0, "torch_dtype": "bfloat16", "use_mla": false, "v_head_dim": 0},
  "model_type": "deepseek_vl_v2", "torch_dtype": "bfloat16"})";

// Its attn_type_list has an entry, 1, for each layer.
constexpr char kMiniMaxM2[] = R"({"architectures": ["MiniMaxM2ForCausalLM"],
  "head_dim": 128, "hidden_size": 3072, "max_position_embeddings": 196608,
  "model_type": "minimax", "num_attention_heads": 48, "num_hidden_layers": 62,
  "num_key_value_heads": 8, "num_mtp_modules": 3, "torch_dtype": "bfloat16"})";

ModelConfig Read(absl::string_view json, const ModelConfigOptions& options = {}) {
  return Must(ModelConfig::FromJson(json, options));
}
// The file with some fields changed; null removes one.
std::string With(absl::string_view json, absl::string_view changes) {
  Json object = Json::parse(json.begin(), json.end());
  object.merge_patch(Json::parse(changes.begin(), changes.end()));
  return object.dump();
}
ModelConfigOptions Ranks(int64_t ranks) {
  ModelConfigOptions options;
  options.tensor_parallel_size = ranks;
  return options;
}
ModelConfigOptions KvDType(absl::string_view name) {
  ModelConfigOptions options;
  options.kv_cache_dtype = std::string(name);
  return options;
}

TEST(ModelConfigs, Llama) {
  const ModelConfig config = Read(kLlama3);
  EXPECT_EQ(config.architecture, "LlamaForCausalLM");
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_EQ(config.attention, AttentionKind::kMha);
  EXPECT_EQ(config.num_attention_layers(), 32);
  EXPECT_EQ(config.num_linear_layers(), 0);
  EXPECT_EQ(config.num_kv_heads, 8);
  EXPECT_EQ(config.head_dim, 128);  // Not in the file: 4096 / 32.
  EXPECT_EQ(config.v_head_dim, 128);
  EXPECT_EQ(config.dtype, DType::kBFloat16);
  EXPECT_EQ(config.kv_dtype, DType::kBFloat16);
  EXPECT_EQ(config.sliding_window_tokens, 0);
  EXPECT_EQ(config.max_position_embeddings, 8192);
  EXPECT_FALSE(config.indexer.has_value());
  EXPECT_FALSE(config.linear.has_value());
  EXPECT_EQ(config.layer_kv_bytes_per_token(), 4096);
  EXPECT_EQ(config.kv_bytes_per_token(), 128 << 10);
}

TEST(ModelConfigs, MistralHasWindowsInAllLayersOrNone) {
  const ModelConfig config = Read(kMistral7B);
  EXPECT_EQ(config.sliding_window_tokens, 4096);
  EXPECT_EQ(config.LayersOf(LayerKind::kSliding).size(), 32);
  EXPECT_EQ(config.num_attention_layers(), 32);
  const ModelConfig nemo = Read(kMistralNemo);
  EXPECT_EQ(nemo.sliding_window_tokens, 0);
  EXPECT_EQ(nemo.LayersOf(LayerKind::kFull).size(), 40);
  EXPECT_EQ(nemo.head_dim, 128);  // 5120 / 32 would be 160.
  EXPECT_EQ(nemo.kv_bytes_per_token(), 40 * 8 * (128 + 128) * 2);
}

TEST(ModelConfigs, QwenUsesWindowsOnlyWhenItSaysSo) {
  const ModelConfig config = Read(kQwen25);
  EXPECT_EQ(config.sliding_window_tokens, 0);
  EXPECT_EQ(config.LayersOf(LayerKind::kFull).size(), 28);
  EXPECT_EQ(config.kv_bytes_per_token(), 56 << 10);
  EXPECT_EQ(Read(With(kQwen25, R"({"use_sliding_window": null, "max_window_layers": 3})")), config);
  const ModelConfig windows =
      Read(With(kQwen25, R"({"use_sliding_window": true, "max_window_layers": 25})"));
  EXPECT_EQ(windows.sliding_window_tokens, 131072);
  EXPECT_EQ(windows.LayersOf(LayerKind::kSliding), (Layers{25, 26, 27}));
  EXPECT_TRUE(Read(With(kQwen25, R"({"use_sliding_window": true})"))  // From layer 28 of 28 on.
                  .LayersOf(LayerKind::kSliding)
                  .empty());
  const ModelConfig qwen3 = Read(kQwen3);
  EXPECT_EQ(qwen3.LayersOf(LayerKind::kFull).size(), 40);
  EXPECT_EQ(qwen3.kv_bytes_per_token(), 160 << 10);
}

TEST(ModelConfigs, GemmaAlternates) {
  const ModelConfig gemma2 = Read(kGemma2);  // The file does not say how; the class does.
  EXPECT_EQ(gemma2.sliding_window_tokens, 4096);
  const Layers sliding = gemma2.LayersOf(LayerKind::kSliding);
  EXPECT_EQ(sliding.size(), 21);
  EXPECT_TRUE(std::all_of(sliding.begin(), sliding.end(), [](int64_t l) { return l % 2 == 0; }));

  // A null is no field to be filled in: these have no windows.
  const std::string null = absl::StrReplaceAll(kGemma2, {{"_window\": 4096", "_window\": null"}});
  EXPECT_EQ(Read(null).sliding_window_tokens, 0);
  EXPECT_EQ(Read(With(kGemma2, R"({"sliding_window": null})")), gemma2);

  const ModelConfig of_1b = Read(kGemma3Of1B);
  EXPECT_EQ(of_1b.sliding_window_tokens, 512);
  EXPECT_EQ(of_1b.LayersOf(LayerKind::kFull), (Layers{5, 11, 17, 23}));
  EXPECT_EQ(of_1b.kv_bytes_per_token(), 26 * 1 * (256 + 256) * 2);

  const ModelConfig of_4b = Read(kGemma3Of4B);
  EXPECT_EQ(of_4b.architecture, "Gemma3ForConditionalGeneration");
  EXPECT_EQ(of_4b.model_type, "gemma3_text");
  EXPECT_EQ(of_4b.LayersOf(LayerKind::kFull), (Layers{5, 11, 17, 23, 29}));
  EXPECT_EQ(of_4b.sliding_window_tokens, 1024);
  EXPECT_EQ(of_4b.num_kv_heads, 4);
  EXPECT_EQ(of_4b.head_dim, 256);  // 2560 / 8 would be 320.
  EXPECT_EQ(of_4b.max_position_embeddings, 131072);
}

// Command R7B's, as far as it has them; it also says layer_switch: 4.
TEST(ModelConfigs, CohereAlternatesUnlessItSaysOtherwise) {
  const char* cohere = R"({"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2",
      "head_dim": 128, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
      "num_key_value_heads": 8, "sliding_window": 4096, "torch_dtype": "bfloat16"})";
  const ModelConfig config = Read(cohere);
  EXPECT_EQ(config.sliding_window_tokens, 4096);
  EXPECT_EQ(config.LayersOf(LayerKind::kFull), (Layers{3, 7, 11, 15, 19, 23, 27, 31}));
  EXPECT_EQ(Read(With(cohere, R"({"sliding_window": null})")), config);
  EXPECT_EQ(
      Read(With(cohere, R"({"sliding_window_pattern": 2})")).LayersOf(LayerKind::kFull).size(), 16);
}

// As inside of PaliGemma's files, which leave out what Gemma's classes say.
TEST(ModelConfigs, WhatGemmasClassesSay) {
  const ModelConfig gemma = Read(R"({"text_config": {"hidden_size": 3072, "model_type": "gemma"},
      "torch_dtype": "bfloat16"})");
  EXPECT_EQ(gemma.LayersOf(LayerKind::kFull).size(), 28);
  EXPECT_EQ(gemma.num_kv_heads, 16);
  EXPECT_EQ(gemma.head_dim, 256);  // 3072 / 16 would be 192.
  EXPECT_EQ(gemma.max_position_embeddings, 8192);
  const ModelConfig gemma2 = Read(R"({"text_config": {"hidden_size": 2304, "model_type": "gemma2"},
      "torch_dtype": "bfloat16"})");
  EXPECT_EQ(gemma2.layers.size(), 26);
  EXPECT_EQ(gemma2.LayersOf(LayerKind::kSliding).size(), 13);
  EXPECT_EQ(gemma2.num_kv_heads, 4);
  EXPECT_EQ(gemma2.head_dim, 256);  // 2304 / 8 would be 288.
  EXPECT_EQ(gemma2.max_position_embeddings, 8192);
}

TEST(ModelConfigs, ListedLayerTypes) {
  const ModelConfig config = Read(kGptOss);
  EXPECT_EQ(config.sliding_window_tokens, 128);
  EXPECT_EQ(config.LayersOf(LayerKind::kSliding).size(), 12);
  EXPECT_EQ(config.layers[0], LayerKind::kSliding);
  EXPECT_EQ(config.layers[1], LayerKind::kFull);
  EXPECT_EQ(config.kv_bytes_per_token(), 24 * 8 * (64 + 64) * 2);
  // Entries behind the last layer belong to prediction layers.
  const ModelConfig shorter = Read(With(kGptOss, R"({"num_hidden_layers": 3})"));
  EXPECT_EQ(shorter.layers,
            (std::vector{LayerKind::kSliding, LayerKind::kFull, LayerKind::kSliding}));
  const ModelConfig full = Read(
      With(kGptOss, R"({"num_hidden_layers": 2, "layer_types": ["full_attention", "attention"]})"));
  EXPECT_EQ(full.sliding_window_tokens, 0);
}

TEST(ModelConfigs, MlaCountsItsLayers) {
  const ModelConfig lite = Read(kDeepSeekV2Lite);
  EXPECT_EQ(lite.attention, AttentionKind::kMla);
  EXPECT_EQ(lite.num_attention_layers(), 27);
  EXPECT_EQ(lite.kv_lora_rank, 512);
  EXPECT_EQ(lite.qk_rope_head_dim, 64);
  EXPECT_EQ(lite.num_kv_heads, 1);
  EXPECT_EQ(lite.head_dim, 576);
  EXPECT_EQ(lite.v_head_dim, 0);
  EXPECT_EQ(lite.layer_kv_bytes_per_token(), 1152);
  EXPECT_EQ(lite.kv_bytes_per_token(), 27 * 1152);
  const ModelConfig v3 = Read(kDeepSeekV3);
  EXPECT_EQ(v3.num_attention_layers(), 61);
  EXPECT_EQ(v3.kv_bytes_per_token(), 70272);
  EXPECT_EQ(Read(kDeepSeekV3, KvDType("fp8")).kv_bytes_per_token(), 35136);
  EXPECT_EQ(Read(kDeepSeekV3, Ranks(16)), v3);  // Every rank holds all of the latent.
}

TEST(ModelConfigs, LongcatFlashAttendsTwiceInALayer) {
  const ModelConfig config = Read(kLongcatFlash);
  EXPECT_EQ(config.LayersOf(LayerKind::kFull).size(), 56);
  EXPECT_EQ(config.kv_bytes_per_token(), 56 * 576 * 2);
  // transformers writes the one count or both.
  for (const char* type : {"longcat_flash", "longcat_flash_ngram"}) {
    EXPECT_EQ(Read(With(kLongcatFlash, absl::StrCat(R"({"architectures": null, "model_type": ")",
                                                    type, R"(", "num_hidden_layers": 56})")))
                  .num_attention_layers(),
              56);
  }
  EXPECT_TRUE(Fails(ModelConfig::FromJson(
                        With(kLongcatFlash, R"({"num_layers": null, "num_hidden_layers": 28})")),
                    kInvalid, "num_layers is missing; looked for num_layers"));
}

TEST(ModelConfigs, DeepSeeksWithoutMlaAreMultiHead) {
  const ModelConfig config = Read(kDeepSeekOcr);
  EXPECT_EQ(config.attention, AttentionKind::kMha);
  EXPECT_EQ(config.num_kv_heads, 10);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.v_head_dim, 128);
  EXPECT_EQ(config.kv_bytes_per_token(), 12 * 10 * (128 + 128) * 2);
}

// DeepSeek-VL2's file says neither.
TEST(ModelConfigs, ADeepSeekThatNamesNoRankHasThatOfItsClass) {
  for (const char* file : {kDeepSeekV2Lite, kDeepSeekV3, kDeepSeekV32}) {
    EXPECT_EQ(Read(With(file, R"({"kv_lora_rank": null, "qk_rope_head_dim": null})")), Read(file));
  }
  // Those that say that they have none have none.
  const std::string silent = With(kDeepSeekV2Lite, R"({"kv_lora_rank": null})");
  const std::string null = absl::StrReplaceAll(silent, {{"{", "{\"kv_lora_rank\": null, "}});
  for (const std::string& none : {null, With(silent, R"({"use_mla": false})")}) {
    EXPECT_EQ(Read(none).attention, AttentionKind::kMha);
  }
}

TEST(ModelConfigs, SparseIndexer) {
  const ModelConfig config = Read(kDeepSeekV32);
  EXPECT_EQ(config.indexer, (SparseIndexer{64, 128, 2048}));
  EXPECT_EQ(config.kv_bytes_per_token(), 70272);
  EXPECT_FALSE(Read(kDeepSeekV3).indexer.has_value());
}

TEST(ModelConfigs, HybridOfLinearAndFullLayers) {
  const ModelConfig config = Read(kQwen3Next);
  EXPECT_EQ(config.num_attention_layers(), 12);
  EXPECT_EQ(config.num_linear_layers(), 36);
  EXPECT_EQ(config.LayersOf(LayerKind::kFull),
            (Layers{3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47}));
  EXPECT_EQ(config.kv_bytes_per_token(), 12 * 2 * (256 + 256) * 2);
  EXPECT_EQ(config.linear, (GdnShape{36, 32, 128, 128, 8192, 4, DType::kBFloat16}));
  EXPECT_EQ(Read(With(kQwen3Next, R"({"full_attention_interval": null})")), config);
  const ModelConfig quarter = Read(kQwen3Next, Ranks(4));
  EXPECT_EQ(quarter.num_kv_heads, 1);
  EXPECT_EQ(quarter.linear, (GdnShape{36, 8, 128, 128, 2048, 4, DType::kBFloat16}));
  // The convolution's states have the model's dtype, whatever the KV's.
  EXPECT_EQ(Read(kQwen3Next, KvDType("fp8_e5m2")).linear, config.linear);
  EXPECT_TRUE(IsOk(GdnPool::Create(*quarter.linear, 8)));
}

TEST(ModelConfigs, LanguageModelsOfMultimodalOnes) {
  const ModelConfig config = Read(kQwen36);
  EXPECT_EQ(config.architecture, "Qwen3_5MoeForConditionalGeneration");
  EXPECT_EQ(config.model_type, "qwen3_5_moe_text");
  EXPECT_EQ(config.num_attention_layers(), 10);
  EXPECT_EQ(config.num_linear_layers(), 30);
  EXPECT_EQ(config.dtype, DType::kBFloat16);
  EXPECT_EQ(config.max_position_embeddings, 262144);
  for (const char* key : {"language_config", "llm_config"}) {
    const std::string other = absl::StrReplaceAll(kQwen36, {{"text_config", key}});
    EXPECT_EQ(Read(other), config);
  }
  EXPECT_TRUE(Fails(ModelConfig::FromJson(R"({"torch_dtype": "float16", "num_hidden_layers": 3,
                                              "text_config": {"model_type": "llama"}})"),
                    kInvalid, "num_hidden_layers is missing", "in text_config"));
  EXPECT_TRUE(Fails(ModelConfig::FromJson(With(kLlama3, R"({"text_config": 3})")), kInvalid,
                    "text_config is 3 but must be an object"));
}

TEST(ModelConfigs, KvHeadsOfARank) {
  for (const auto& [ranks, heads] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 8}, {2, 4}, {8, 1}, {16, 1}, {64, 1}}) {
    const ModelConfig config = Read(kLlama3, Ranks(ranks));
    EXPECT_EQ(config.num_kv_heads, heads);
    EXPECT_EQ(config.kv_bytes_per_token(), 32 * heads * 256 * 2);
  }
  for (const int64_t ranks : {3, 6, 12, 20}) {
    EXPECT_TRUE(Fails(ModelConfig::FromJson(kLlama3, Ranks(ranks)), kInvalid,
                      "num_key_value_heads is 8", absl::StrCat("tensor_parallel_size ", ranks)));
  }
  for (const int64_t ranks : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_TRUE(Fails(ModelConfig::FromJson(kLlama3, Ranks(ranks)), kInvalid,
                      absl::StrCat("option tensor_parallel_size is ", ranks)));
  }
  EXPECT_TRUE(
      Fails(ModelConfig::FromJson(With(kQwen3Next, R"({"num_key_value_heads": 16})"), Ranks(32)),
            kInvalid, "linear_num_key_heads is 16", "tensor_parallel_size 32"));
}

TEST(ModelConfigs, FewerFieldsMeanMultiHead) {
  EXPECT_EQ(Read(With(kLlama3, R"({"num_key_value_heads": null})")).num_kv_heads, 32);
  EXPECT_EQ(Read(With(kLlama3, R"({"max_position_embeddings": null})")).max_position_embeddings, 0);
  // GPT-2's and Falcon-7B's names.
  const ModelConfig gpt2 = Read(R"({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
      "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "dtype": "float32"})");
  EXPECT_EQ(gpt2.kv_bytes_per_token(), 12 * 12 * (64 + 64) * 4);
  EXPECT_EQ(gpt2.max_position_embeddings, 1024);
  const char* falcon = R"({"model_type": "falcon", "hidden_size": 4544, "multi_query": true,
      "new_decoder_architecture": false, "num_attention_heads": 71, "num_hidden_layers": 32,
      "num_kv_heads": 71, "torch_dtype": "bfloat16"})";
  EXPECT_EQ(Read(falcon).num_kv_heads, 1);
  EXPECT_EQ(Read(With(falcon, R"({"new_decoder_architecture": true})")).num_kv_heads, 71);
}

TEST(ModelConfigs, UnknownArchitecturesWithTheUsualFields) {
  const ModelConfig config = Read(R"({"hidden_size": 64, "num_attention_heads": 4,
      "num_hidden_layers": 2, "dtype": "float16", "v_head_dim": 8, "head_dim": 0})");
  EXPECT_EQ(config.architecture, "");
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.v_head_dim, 8);
  EXPECT_EQ(config.kv_bytes_per_token(), 2 * 4 * (16 + 8) * 2);
}

TEST(ModelConfigs, DTypes) {
  EXPECT_EQ(Read(kLlama3, KvDType("fp8")).kv_dtype, DType::kFloat8E4M3);
  EXPECT_EQ(Read(kLlama3, KvDType("fp8_e4m3")).kv_dtype, DType::kFloat8E4M3);
  EXPECT_EQ(Read(kLlama3, KvDType("fp8_e5m2")).kv_dtype, DType::kFloat8E5M2);
  EXPECT_EQ(Read(kLlama3, KvDType("fp8")).dtype, DType::kBFloat16);
  EXPECT_EQ(Read(kLlama3, KvDType("float16")).kv_dtype, DType::kFloat16);
  EXPECT_EQ(Read(kLlama3, KvDType("bf16")).kv_dtype, DType::kBFloat16);
  EXPECT_EQ(Read(With(kLlama3, R"({"torch_dtype": "torch.float16"})")).dtype, DType::kFloat16);
  ModelConfigOptions half;
  half.dtype = "half";
  EXPECT_EQ(Read(kLlama3, half).kv_dtype, DType::kFloat16);
  EXPECT_EQ(Read(With(kLlama3, R"({"torch_dtype": null})"), half).dtype, DType::kFloat16);
  EXPECT_TRUE(Fails(ModelConfig::FromJson(With(kLlama3, R"({"torch_dtype": null})")), kInvalid,
                    "dtype is missing; looked for dtype, torch_dtype"));
  for (const char* bad : {"nvfp4", "int8", "", "fp8_ds_mla", "AUTO"}) {
    EXPECT_TRUE(Fails(ModelConfig::FromJson(kLlama3, KvDType(bad)), kInvalid,
                      absl::StrCat("option kv_cache_dtype is '", bad, "'"), "fp8_e4m3"));
  }
  EXPECT_TRUE(Fails(ModelConfig::FromJson(With(kLlama3, R"({"torch_dtype": "int8"})")), kInvalid,
                    "torch_dtype is 'int8' but must be one of bfloat16"));
  EXPECT_TRUE(Fails(ModelConfig::FromJson(With(kLlama3, R"({"torch_dtype": 16})")), kInvalid,
                    "torch_dtype is 16 but must be a string"));
}

TEST(ModelConfigs, FourBitsHaveScalesBesides) {
  for (const char* name : {"fp4", "fp4_e2m1"}) {
    const ModelConfig config = Read(kLlama3, KvDType(name));
    EXPECT_EQ(config.kv_dtype, DType::kUint8);
    EXPECT_EQ(config.kv_blocks, BlockFormat::kMxfp4);
    EXPECT_EQ(config.layer_kv_bytes_per_token(), 8 * 2 * (128 / 2 + 128 / 16));
  }
  ModelConfig config = Read(kLlama3, KvDType("fp4"));
  EXPECT_TRUE(Fails(config.SetKvCacheDType("fp3"), kInvalid, "kv_cache_dtype is 'fp3'"));
  EXPECT_EQ(config, Read(kLlama3, KvDType("fp4")));
  EXPECT_TRUE(IsOk(config.SetKvCacheDType("bf16")));
  EXPECT_EQ(config, Read(kLlama3));
}

// What llm-compressor and ModelOpt write of a checkpoint's KV cache, the other fields left out.
constexpr char kFp8Scheme[] = R"({"dynamic": false, "group_size": null, "num_bits": 8,
  "observer": "minmax", "strategy": "tensor", "symmetric": true, "type": "float"})";

std::string Quantized(absl::string_view json, absl::string_view field, absl::string_view value) {
  return With(json, absl::StrCat(R"({"quantization_config": {"quant_method": "any", ")", field,
                                 "\": ", value, "}}"));
}

TEST(ModelConfigs, CheckpointsSayHowTheirKvIsStored) {
  const auto is_fp8 = [](const std::string& text, const ModelConfigOptions& options = {}) {
    const ModelConfig config = Read(text, options);
    EXPECT_EQ(config.dtype, DType::kBFloat16);
    EXPECT_EQ(config.kv_blocks, std::nullopt);
    return config.kv_dtype == DType::kFloat8E4M3;
  };
  EXPECT_TRUE(is_fp8(Quantized(kLlama3, "kv_cache_scheme", kFp8Scheme)));
  EXPECT_TRUE(is_fp8(Quantized(kLlama3, "kv_cache_scheme", R"({"num_bits": 8, "type": "float"})")));
  EXPECT_TRUE(is_fp8(
      Quantized(kDeepSeekV3, "kv_cache_scheme",
                R"({"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": true})")));
  for (const char* algo : {R"("FP8")", R"("fp8")"}) {
    EXPECT_TRUE(is_fp8(Quantized(kLlama3, "kv_cache_quant_algo", algo)));
    EXPECT_TRUE(is_fp8(Quantized(kLlama3, "kv_cache_scheme", algo)));
  }
  // AutoFP8's files, and those of Hy3-FP8.
  EXPECT_TRUE(is_fp8(With(kLlama3, R"({"quantization_config": {"quant_method": "fp8",
      "activation_scheme": "static", "kv_cache_scheme": "static"}})")));
  EXPECT_TRUE(is_fp8(With(kLlama3, R"({"compression_config": {"kv_cache_quant_algo": "FP8"}})")));
  EXPECT_TRUE(is_fp8(
      With(kQwen36, R"({"text_config": {"quantization_config": {"kv_cache_scheme": "FP8"}}})")));
  // Weights may be quantised, and KV not.
  EXPECT_FALSE(is_fp8(Quantized(kLlama3, "kv_cache_scheme", "null")));
  EXPECT_FALSE(is_fp8(Quantized(kLlama3, "quant_algo", R"("FP8")")));
  EXPECT_FALSE(is_fp8(With(kLlama3, R"({"quantization_config": null})")));

  ModelConfigOptions options;
  options.hf_quant_config = R"({"producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})";
  EXPECT_TRUE(is_fp8(kLlama3, options));
  EXPECT_TRUE(is_fp8(
      With(kLlama3, absl::StrCat(R"({"quantization_config": )", options.hf_quant_config, "}"))));
  EXPECT_FALSE(is_fp8(Quantized(kLlama3, "quant_algo", R"("FP8")"), options));
  options.hf_quant_config = R"({"quantization": {"kv_cache_quant_algo": null}})";
  EXPECT_FALSE(is_fp8(kLlama3, options));
}

TEST(ModelConfigs, UnknownWaysToStoreKvAreNamed) {
  const auto unknown = [](absl::string_view field, absl::string_view value,
                          absl::string_view message) {
    const std::string text = Quantized(kLlama3, field, value);
    // Who says what is wanted is not asked to.
    EXPECT_EQ(Read(text, KvDType("fp8_e5m2")).kv_dtype, DType::kFloat8E5M2);
    EXPECT_EQ(Read(text, KvDType("bfloat16")), Read(kLlama3));
    return Fails(ModelConfig::FromJson(text), kInvalid, message, "option kv_cache_dtype overrides");
  };
  EXPECT_TRUE(unknown("kv_cache_scheme", R"({"num_bits": 8, "type": "int", "strategy": "tensor"})",
                      R"(kv_cache_scheme is {type "int", num_bits 8, strategy "tensor"})"));
  EXPECT_TRUE(unknown("kv_cache_scheme",
                      R"({"num_bits": 4, "type": "float", "strategy": "tensor_group"})",
                      R"({type "float", num_bits 4, strategy "tensor_group"})"));
  EXPECT_TRUE(unknown("kv_cache_scheme", R"({"num_bits": 8, "type": "float", "strategy": "token"})",
                      "\"token\""));
  EXPECT_TRUE(unknown("kv_cache_scheme", R"({"num_bits": 8, "type": "float", "symmetric": false})",
                      "symmetric fals"));
  EXPECT_TRUE(unknown("kv_cache_scheme", "{}", "kv_cache_scheme is {}"));
  EXPECT_TRUE(unknown("kv_cache_scheme", R"({"num_bits": {"a": [8]}})", "num_bits an object"));
  EXPECT_TRUE(unknown("kv_cache_scheme", "8", "kv_cache_scheme is 8"));
  // Of what quant_method says, which is not FP8 here.
  EXPECT_TRUE(unknown("kv_cache_scheme", R"("static")", R"(kv_cache_scheme is "static")"));
  EXPECT_TRUE(unknown("kv_cache_quant_algo", R"("NVFP4")", R"(kv_cache_quant_algo is "NVFP4")"));
  EXPECT_TRUE(unknown("kv_cache_quant_algo", R"("INT8")", R"(kv_cache_quant_algo is "INT8")"));
  EXPECT_TRUE(unknown("kv_cache_quant_algo", "[8]", "kv_cache_quant_algo is an array"));
  EXPECT_TRUE(Fails(ModelConfig::FromJson(With(kLlama3, R"({"quantization_config": "fp8"})")),
                    kInvalid, "quantization_config is \"fp8\" but must be an object"));
  ModelConfigOptions options;
  options.hf_quant_config = "[1]";
  EXPECT_TRUE(Fails(ModelConfig::FromJson(kLlama3, options), kInvalid,
                    "option hf_quant_config is not a JSON object"));
  // As deep as it can get.
  const std::string deep(1 << 20, '['), close(1 << 20, ']');
  const std::string text =
      absl::StrReplaceAll(Quantized(kLlama3, "kv_cache_scheme", "4711"), {{"4711", deep + close}});
  EXPECT_TRUE(Fails(ModelConfig::FromJson(text), kInvalid, "kv_cache_scheme is an array"));
}

TEST(ModelConfigs, MissingFieldsAreNamed) {
  const auto without = [](absl::string_view json, const std::string& field) {
    return ModelConfig::FromJson(With(json, absl::StrCat("{\"", field, "\": null}")));
  };
  EXPECT_TRUE(Fails(without(kLlama3, "num_hidden_layers"), kInvalid,
                    "num_hidden_layers is missing; looked for num_hidden_layers, n_layer"));
  EXPECT_TRUE(Fails(without(kLlama3, "hidden_size"), kInvalid, "hidden_size is missing"));
  EXPECT_TRUE(Fails(without(kLlama3, "num_attention_heads"), kInvalid,
                    "num_attention_heads is missing; looked for num_attention_heads, n_head"));
  EXPECT_TRUE(Fails(without(With(kDeepSeekV3, R"({"model_type": "kimi_k2"})"), "qk_rope_head_dim"),
                    kInvalid, "qk_rope_head_dim is mis"));
  EXPECT_TRUE(Fails(without(kGptOss, "sliding_window"), kInvalid, "sliding_window is missing"));
  for (const char* field : {"index_head_dim", "index_n_heads"}) {
    EXPECT_TRUE(Fails(without(kDeepSeekV32, field), kInvalid, absl::StrCat(field, " is missing")));
  }
  for (const char* field : {"linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim",
                            "linear_value_head_dim", "linear_conv_kernel_dim"}) {
    EXPECT_TRUE(Fails(without(kQwen3Next, field), kInvalid, absl::StrCat(field, " is missing")));
  }
  EXPECT_TRUE(Fails(ModelConfig::FromJson(With(
                        kQwen3Next, R"({"full_attention_interval": null, "model_type": "x"})")),
                    kInvalid, "looked for layer_types, full_attention_interval"));
  EXPECT_TRUE(Fails(ModelConfig::FromJson(With(
                        kQwen25, R"({"use_sliding_window": true, "max_window_layers": null})")),
                    kInvalid, "max_window_layers is missing"));
  EXPECT_TRUE(Fails(ModelConfig::FromJson(With(kLlama3, R"({"num_attention_heads": 30})")),
                    kInvalid, "hidden_size 4096 is no multiple of 30"));
}

TEST(ModelConfigs, BadValuesAreShown) {
  const auto bad = [](absl::string_view json, absl::string_view field, absl::string_view value) {
    return ModelConfig::FromJson(With(json, absl::StrCat("{\"", field, "\": ", value, "}")));
  };
  for (const char* value : {"0", "-1", "4097", "1.5", "\"32\"", "true", "9223372036854775807",
                            "18446744073709551615", "1e300"}) {
    EXPECT_TRUE(Fails(bad(kLlama3, "num_hidden_layers", value), kInvalid, "num_hidden_layers is",
                      "but must be an integer in [1, 4096]"));
  }
  EXPECT_TRUE(Fails(bad(kLlama3, "num_key_value_heads", "[8, 4]"), kInvalid,
                    "num_key_value_heads is an array"));
  EXPECT_TRUE(Fails(bad(kLlama3, "head_dim", "-128"), kInvalid, "head_dim is -128"));
  EXPECT_TRUE(Fails(bad(kLlama3, "v_head_dim", "-1"), kInvalid, "v_head_dim is -1"));
  EXPECT_TRUE(Fails(bad(kLlama3, "max_position_embeddings", "0"), kInvalid, "max_position_emb"));
  EXPECT_TRUE(Fails(bad(kMistral7B, "sliding_window", "-5"), kInvalid, "sliding_window is -5"));
  EXPECT_TRUE(Fails(bad(kMistral7B, "use_sliding_window", "1"), kInvalid,
                    "use_sliding_window is 1 but must be true or false"));
  EXPECT_TRUE(Fails(bad(kGemma3Of1B, "sliding_window_pattern", "0"), kInvalid, "pattern is 0"));
  EXPECT_TRUE(Fails(bad(kGptOss, "layer_types", "[\"full_attention\"]"), kInvalid,
                    "layer_types is an array with 1 entries but there are 24 layers"));
  EXPECT_TRUE(Fails(bad(kGptOss, "layer_types", "7"), kInvalid, "layer_types is 7"));
  EXPECT_TRUE(Fails(bad(kDeepSeekV3, "kv_lora_rank", "0"), kInvalid, "kv_lora_rank is 0"));
  EXPECT_TRUE(Fails(bad(kQwen3Next, "full_attention_interval", "0"), kInvalid, "interval is 0"));
  EXPECT_TRUE(Fails(bad(kQwen3Next, "linear_key_head_dim", "1048576"), kInvalid, "gdn pool: "));
  EXPECT_TRUE(Fails(bad(kLlama3, "architectures", "\"Llama\""), kInvalid, "architectures is"));
  EXPECT_TRUE(Fails(bad(kLlama3, "architectures", "[1]"), kInvalid, "architectures is an array"));
  EXPECT_TRUE(Fails(bad(kLlama3, "model_type", "{\"a\": 1}"), kInvalid, "model_type is an object"));
  EXPECT_EQ(Read(With(kLlama3, R"({"architectures": []})")).architecture, "");
  EXPECT_EQ(Read(With(kMistral7B, R"({"sliding_window": 0})")).sliding_window_tokens, 0);
}

TEST(ModelConfigs, UnevenLayersAreRefused) {
  const auto uneven = [](absl::string_view change, absl::string_view message) {
    return Fails(ModelConfig::FromJson(With(kLlama3, change)), kUnimplemented, message);
  };
  EXPECT_TRUE(uneven(R"({"global_head_dim": 512})", "global_head_dim is 512"));
  EXPECT_TRUE(uneven(R"({"num_kv_shared_layers": 15})", "num_kv_shared_layers is 15"));
  EXPECT_TRUE(uneven(R"({"hybrid_override_pattern": "M-M*"})", "hybrid_override_pattern is"));
  EXPECT_TRUE(uneven(R"({"block_configs": [{"attention": {"n_heads_in_group": 8}}]})",
                     "block_configs is an array"));
  EXPECT_TRUE(uneven(R"({"num_key_value_heads_per_layer": [4, 4, 2]})", "heads_per_layer is an"));
  EXPECT_TRUE(uneven(R"({"use_cla": true, "cla_share_factor": 2})", "use_cla is true"));
  EXPECT_TRUE(uneven(R"({"per_layer_config": {"05": {"head_dim": 512}}})",
                     "per_layer_config is an object"));  // Gemma 4.
  EXPECT_EQ(Read(With(kLlama3, R"({"per_layer_config": {}})")), Read(kLlama3));
  EXPECT_EQ(Read(With(kLlama3, R"({"num_kv_shared_layers": 0, "cross_attention_layers": [],
                                   "use_cla": false})")),
            Read(kLlama3));
  EXPECT_TRUE(
      Fails(ModelConfig::FromJson(With(
                kGptOss, R"({"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]})")),
            kUnimplemented, "layer_types[1] is \"conv\""));
}

TEST(ModelConfigs, HybridsOfOtherFieldsAreRefused) {
  // LFM2, RecurrentGemma under both names, Ring with linear attention, Falcon-H1.
  for (const char* change :
       {R"("full_attn_idxs": [2, 5, 8])", R"("block_types": ["recurrent", "attention"])",
        R"("_block_types": ["recurrent", "attention"])", R"("layer_group_size": 5)",
        R"("mamba_d_state": 256)"}) {
    const std::string text = With(kLlama3, absl::StrCat("{", change, "}"));
    EXPECT_TRUE(Fails(ModelConfig::FromJson(text), kUnimplemented, "makes layers differ"));
    // Unless layer_types says it.
    const std::string types =
        absl::StrCat("{", change, R"(, "num_hidden_layers": 1, "layer_types": ["attention"]})");
    EXPECT_EQ(Read(With(kLlama3, types)).num_attention_layers(), 1);
  }
  EXPECT_EQ(Read(With(kLlama3, R"({"layer_group_size": 1})")), Read(kLlama3));
  // Granite 4.0 says both, whether or not a layer is one of Mamba's.
  EXPECT_TRUE(
      Fails(ModelConfig::FromJson(With(kLlama3, R"({"mamba_d_state": 128, "num_hidden_layers": 2,
                                     "layer_types": ["mamba", "attention"]})")),
            kUnimplemented, "layer_types[0] is \"mamba\""));
}

TEST(ModelConfigs, ModelsOfStatesAreRefused) {
  const auto refused = [](const char* json, absl::string_view message) {
    return Fails(ModelConfig::FromJson(json), kUnimplemented, message,
                 "states instead of keys and values");
  };
  EXPECT_TRUE(refused(R"({"model_type": "mamba2", "head_dim": 64, "hidden_size": 4096,
      "num_heads": 128, "num_hidden_layers": 64, "state_size": 128, "torch_dtype": "bfloat16"})",
                      "state_size is 128"));
  EXPECT_TRUE(refused(R"({"model_type": "rwkv7", "attn": null, "attn_mode": "chunk",
      "head_dim": 64, "hidden_size": 2560, "num_heads": 40, "num_hidden_layers": 32,
      "torch_dtype": "bfloat16"})",
                      "attn_mode is \"chunk\""));
  EXPECT_TRUE(refused(R"({"model_type": "xlstm", "head_dim": 512, "hidden_size": 4096,
      "num_heads": 8, "num_hidden_layers": 32, "qk_dim_factor": 0.5, "torch_dtype": "float32"})",
                      "qk_dim_factor is 0.5"));
  // Nor is any other num_heads taken for attention's, but where it is known to be.
  const char* neo = R"({"model_type": "gpt_neo", "hidden_size": 2048, "num_heads": 16,
      "num_layers": 24, "max_position_embeddings": 2048, "torch_dtype": "float32"})";
  EXPECT_EQ(Read(neo).num_kv_heads, 16);
  EXPECT_TRUE(Fails(ModelConfig::FromJson(With(neo, R"({"model_type": "gsa"})")), kInvalid,
                    "num_attention_heads is missing"));
}

TEST(ModelConfigs, MiniMaxListsLayersWithFullAttention) {
  const auto of_types = [](int64_t ones, const std::vector<int>& then) {
    std::vector<int> types(static_cast<size_t>(ones), 1);
    types.insert(types.end(), then.begin(), then.end());
    return With(kMiniMaxM2, Json{{"attn_type_list", types}}.dump());
  };
  EXPECT_EQ(Read(of_types(62, {})).LayersOf(LayerKind::kFull).size(), 62);
  EXPECT_EQ(Read(of_types(65, {})), Read(of_types(62, {})));
  EXPECT_EQ(Read(of_types(0, {})), Read(of_types(62, {})));
  for (const std::string& text : {of_types(61, {}), of_types(61, {0}), of_types(62, {0}),
                                  With(kMiniMaxM2, R"({"attn_type_list": "1"})")}) {
    EXPECT_TRUE(Fails(ModelConfig::FromJson(text), kUnimplemented, "attn_type_list is "));
  }
}

TEST(ModelConfigs, TextThatIsNoConfig) {
  for (const char* text :
       {"", "{", "[]", "null", "3", "{\"a\": nan}", "\xff", "{\"a\": \"\xff\"}"}) {
    EXPECT_TRUE(Fails(ModelConfig::FromJson(text), kInvalid, "not a JSON object"));
  }
  EXPECT_TRUE(Fails(ModelConfig::FromJson("{}"), kInvalid, "dtype is missing"));
  const std::string large(ModelConfig::kMaxJsonBytes, ' ');
  EXPECT_EQ(Read(large.substr(sizeof(kLlama3) - 1) + kLlama3), Read(kLlama3));
  EXPECT_TRUE(Fails(ModelConfig::FromJson(large + kLlama3), kInvalid, "more than 16777216"));
  // As deep as it can get, where a number is due.
  const std::string deep(1 << 20, '[');
  const std::string close(1 << 20, ']');
  const std::string text = absl::StrReplaceAll(kLlama3, {{"4096", deep + close}});
  EXPECT_TRUE(Fails(ModelConfig::FromJson(text), kInvalid, "hidden_size is an array"));
}

// As Python's json writes them; mamba-like models have "time_step_limit": [0.0, Infinity].
TEST(ModelConfigs, NumbersThatOnlyPythonHasAreNulls) {
  const auto with = [](absl::string_view fields) {
    return absl::StrReplaceAll(kLlama3, {{"{", absl::StrCat("{", fields, ", ")}});
  };
  EXPECT_EQ(Read(with(R"("a": [0.0, Infinity], "b": -Infinity, "c": {"d":NaN})")), Read(kLlama3));
  EXPECT_EQ(Read(With(kMistral7B, R"({"sliding_window": null})")),
            Read(absl::StrReplaceAll(kMistral7B, {{"4096,\n  \"torch", "Infinity, \"torch"}})));
  // Not in strings, whatever is in them besides.
  EXPECT_EQ(Read(absl::StrReplaceAll(kLlama3, {{"LlamaForCausalLM", R"(\\\"NaN, Infinity\\)"}}))
                .architecture,
            R"(\"NaN, Infinity\)");
  EXPECT_TRUE(Fails(ModelConfig::FromJson(with(R"("time_step_limit": [0.0, Infinity],
                                                  "hybrid_override_pattern": "M-M*")")),
                    kUnimplemented, "hybrid_override_pattern is"));
  for (const char* bad : {"1NaN", "NaNNaN", "+Infinity", "- Infinity", "Infinity1", "inf", "nan"}) {
    EXPECT_TRUE(Fails(ModelConfig::FromJson(with(absl::StrCat("\"a\": ", bad))), kInvalid,
                      "not a JSON object"))
        << bad;
  }
  EXPECT_TRUE(Fails(ModelConfig::FromJson("{\"a\": \"\\"), kInvalid, "not a JSON object"));
}

TEST(ModelConfigs, RandomDamageIsNeverFatal) {
  const std::vector<std::string> files = {
      kLlama3,         kMistral7B,   kMistralNemo,
      kQwen25,         kQwen3,       kGemma2,
      kGemma3Of1B,     kGptOss,      kGemma3Of4B,
      kDeepSeekV2Lite, kDeepSeekV3,  kDeepSeekV32,
      kLongcatFlash,   kDeepSeekOcr, kMiniMaxM2,
      kQwen3Next,      kQwen36,      Quantized(kQwen3, "kv_cache_scheme", kFp8Scheme)};
  const std::vector<Json> junk = {nullptr,
                                  0,
                                  -1,
                                  1,
                                  3,
                                  1.5,
                                  true,
                                  "x",
                                  INT64_MAX,
                                  UINT64_MAX,
                                  1 << 16,
                                  1e99,
                                  "auto",
                                  Json::array({1}),
                                  Json::object({{"a", 1}})};
  std::mt19937_64 random(1);
  int good = 0;
  for (int round = 0; round < 20000; ++round) {
    Json file = Json::parse(files[random() % files.size()]);
    Json& object = file.contains("text_config") && random() % 2 == 0 ? file["text_config"] : file;
    for (uint64_t change = random() % 3; change > 0; --change) {
      auto field = object.begin();
      std::advance(field, random() % object.size());
      *field = junk[random() % junk.size()];
    }
    std::string text = file.dump();
    if (random() % 8 == 0) text[random() % text.size()] = static_cast<char>(random());
    const auto config = ModelConfig::FromJson(text, Ranks(1 << (random() % 4)));
    if (!config.ok()) {
      ASSERT_TRUE(absl::IsInvalidArgument(config.status()) ||
                  absl::IsUnimplemented(config.status()));
      continue;
    }
    ++good;
    ASSERT_GE(config->kv_bytes_per_token(), 0);
    ASSERT_EQ(config->linear.has_value(), config->num_linear_layers() > 0);
    ASSERT_EQ(config->sliding_window_tokens > 0, !config->LayersOf(LayerKind::kSliding).empty());
  }
  EXPECT_GT(good, 5000);
}

}  // namespace
}  // namespace kvferry
