#include "pool/model_config.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/check_range.h"
#include "base/status.h"

namespace kvferry {
namespace {

using Json = nlohmann::json;
using Names = std::vector<std::string>;  // Of one field, in the order of preference.

template <typename... Words>
absl::Status Bad(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat("model config: ", words...));
}

// What transformers' classes fill in where public checkpoints are silent.
struct ClassDefault {
  absl::string_view model_type;
  absl::string_view field;
  int64_t value;
};
constexpr std::array kClassDefaults = {
    ClassDefault{"cohere2", "sliding_window", 4096},
    ClassDefault{"cohere2", "sliding_window_pattern", 4},
    ClassDefault{"deepseek_v2", "kv_lora_rank", 512},
    ClassDefault{"deepseek_v2", "qk_rope_head_dim", 64},
    ClassDefault{"deepseek_v3", "kv_lora_rank", 512},
    ClassDefault{"deepseek_v3", "qk_rope_head_dim", 64},
    ClassDefault{"deepseek_v32", "kv_lora_rank", 512},
    ClassDefault{"deepseek_v32", "qk_rope_head_dim", 64},
    ClassDefault{"gemma", "head_dim", 256},
    ClassDefault{"gemma", "max_position_embeddings", 8192},
    ClassDefault{"gemma", "num_attention_heads", 16},
    ClassDefault{"gemma", "num_hidden_layers", 28},
    ClassDefault{"gemma", "num_key_value_heads", 16},
    ClassDefault{"gemma2", "head_dim", 256},
    ClassDefault{"gemma2", "max_position_embeddings", 8192},
    ClassDefault{"gemma2", "num_attention_heads", 8},
    ClassDefault{"gemma2", "num_hidden_layers", 26},
    ClassDefault{"gemma2", "num_key_value_heads", 4},
    ClassDefault{"gemma2", "sliding_window", 4096},
    ClassDefault{"gemma2", "sliding_window_pattern", 2},
    ClassDefault{"gemma3_text", "head_dim", 256},
    ClassDefault{"gemma3_text", "max_position_embeddings", 131072},
    ClassDefault{"gemma3_text", "num_attention_heads", 8},
    ClassDefault{"gemma3_text", "num_key_value_heads", 4},
    ClassDefault{"gemma3_text", "sliding_window", 4096},
    ClassDefault{"gemma3_text", "sliding_window_pattern", 6},
    ClassDefault{"qwen3_next", "full_attention_interval", 4},
    ClassDefault{"qwen3_5_text", "full_attention_interval", 4},
    ClassDefault{"qwen3_5_moe_text", "full_attention_interval", 4},
};

// Fields that make layers differ in ways that one number for all of them would get wrong.
constexpr std::array<absl::string_view, 19> kUneven = {
    "global_head_dim",   // Gemma 4
    "per_layer_config",  // The same of later files
    "num_global_key_value_heads",
    "num_kv_shared_layers",  // Gemma 3n and 4
    "swa_head_dim",          // MiMo-V2
    "swa_num_key_value_heads",
    "hybrid_layer_pattern",
    "num_key_value_heads_per_layer",  // DeciLM
    "use_cla",                        // Hunyuan-Large: layers share KV
    "attention_other_setting",        // Step 3.5
    "block_configs",                  // Nemotron-NAS
    "hybrid_override_pattern",        // Nemotron-H
    "layers_block_type",              // Jamba, Zamba
    "attn_layer_period",
    "attn_layer_indices",  // Bamba
    "ssm_state_size",
    "linear_attn_config",      // Kimi Linear
    "compress_ratios",         // DeepSeek V4
    "cross_attention_layers",  // Mllama
};
// The same of which layers attend. Where there are layer_types, these say it.
constexpr std::array<absl::string_view, 5> kUnevenKinds = {
    "mamba_d_state",   // Falcon-H1; a dense Granite 4.0 has it for no layer
    "full_attn_idxs",  // LFM2
    "block_types",     // RecurrentGemma
    "_block_types",
    "layer_group_size",  // Ling and Ring with linear attention
};

// Fields of models that keep states instead of keys and values, and may count heads all the same.
constexpr std::array<absl::string_view, 3> kStates = {
    "state_size",     // Mamba
    "attn_mode",      // flash-linear-attention's: RWKV-7, Gated DeltaNet
    "qk_dim_factor",  // xLSTM
};

// Whose num_heads attend. Of others they may be a state's.
constexpr std::array<absl::string_view, 4> kTypesOfNumHeads = {"gpt_neo", "pix2struct_text_model",
                                                               "transformer", "udop"};

struct NamedDType {
  absl::string_view name;
  DType dtype;
  std::optional<BlockFormat> blocks = std::nullopt;
};
constexpr std::array kModelDTypes = {
    NamedDType{"bfloat16", DType::kBFloat16}, NamedDType{"float16", DType::kFloat16},
    NamedDType{"float32", DType::kFloat32},   NamedDType{"half", DType::kFloat16},
    NamedDType{"float", DType::kFloat32},
};
constexpr BlockFormat kMxfp4 = BlockFormat::kMxfp4;
constexpr std::array kKvDTypes = {
    NamedDType{"fp8", DType::kFloat8E4M3},         NamedDType{"fp8_e4m3", DType::kFloat8E4M3},
    NamedDType{"fp8_e5m2", DType::kFloat8E5M2},    NamedDType{"bfloat16", DType::kBFloat16},
    NamedDType{"bf16", DType::kBFloat16},          NamedDType{"float16", DType::kFloat16},
    NamedDType{"float32", DType::kFloat32},        NamedDType{"fp4", DType::kUint8, kMxfp4},
    NamedDType{"fp4_e2m1", DType::kUint8, kMxfp4},
};

template <size_t N>
absl::StatusOr<NamedDType> FindDType(const std::array<NamedDType, N>& table,
                                     absl::string_view field, absl::string_view name) {
  for (const NamedDType& row : table) {
    if (row.name == absl::StripPrefix(name, "torch.")) return row;
  }
  return Bad(field, " is '", name, "' but must be one of ",
             absl::StrJoin(table, ", ", [](std::string* out, const NamedDType& row) {
               absl::StrAppend(out, row.name);
             }));
}

// A number or word as it stands in the file, anything larger by its type only: dump() of a deep
// value recurses.
std::string Shown(const Json& value) {
  if (value.is_structured()) return absl::StrCat("an ", value.type_name());
  return value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 64);
}

// ---------------------------------------------------------------- fields

// Null when the field is missing or null.
const Json* FindField(const Json& object, const std::string& name) {
  const auto field = object.find(name);
  return field == object.end() || field->is_null() ? nullptr : &*field;
}

// Typed fields of one JSON object. A null is as good as no field, except that no default counts.
class Fields {
 public:
  Fields(const Json& object, std::string where, std::string model_type)
      : object_(object), where_(std::move(where)), model_type_(std::move(model_type)) {}

  const std::string& model_type() const { return model_type_; }
  bool Has(const std::string& name) const { return Get(name) != nullptr; }
  const Json* Get(const std::string& name) const { return FindField(object_, name); }

  // The first field of these names.
  absl::StatusOr<std::optional<int64_t>> Find(const Names& names, int64_t min, int64_t max) const {
    for (const std::string& name : names) {
      if (const Json* value = Get(name)) return Checked(name, *value, min, max);
    }
    if (object_.contains(names[0])) return std::nullopt;
    for (const ClassDefault& row : kClassDefaults) {
      if (row.model_type == model_type_ && row.field == names[0]) return row.value;
    }
    return std::nullopt;
  }
  absl::StatusOr<int64_t> Need(const Names& names, int64_t min, int64_t max) const {
    KVFERRY_ASSIGN_OR_RETURN(const std::optional<int64_t> value, Find(names, min, max));
    if (value.has_value()) return *value;
    return Bad(names[0], " is missing; looked for ", absl::StrJoin(names, ", "), where_);
  }
  absl::StatusOr<bool> FindBool(const std::string& name, bool otherwise) const {
    const Json* value = Get(name);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) return Bad(name, " is ", Shown(*value), " but must be true or false");
    return value->get<bool>();
  }

 private:
  static absl::StatusOr<std::optional<int64_t>> Checked(const std::string& name, const Json& value,
                                                        int64_t min, int64_t max) {
    // Whole numbers beyond INT64_MAX are unsigned ones, and would wrap round.
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX);
    if (fits && value.get<int64_t>() >= min && value.get<int64_t>() <= max) {
      return value.get<int64_t>();
    }
    return Bad(name, " is ", Shown(value), " but must be an integer in [", min, ", ", max, "]");
  }

  const Json& object_;
  std::string where_;  // " in text_config", for messages.
  std::string model_type_;
};

absl::StatusOr<std::string> FindString(const Json& object, const std::string& name) {
  const auto value = object.find(name);
  if (value == object.end() || value->is_null()) return "";
  if (!value->is_string()) return Bad(name, " is ", Shown(*value), " but must be a string");
  return value->get<std::string>();
}

absl::StatusOr<std::string> FindArchitecture(const Json& root) {
  const auto names = root.find("architectures");
  if (names == root.end() || names->is_null()) return "";
  if (!names->is_array() || (!names->empty() && !names->front().is_string())) {
    return Bad("architectures is ", Shown(*names), " but must be a list of strings");
  }
  return names->empty() ? "" : names->front().get<std::string>();
}

// Where the language model of a multimodal one is described; nullptr in a language model's file.
absl::StatusOr<const Json*> FindTextConfig(const Json& root, std::string* name) {
  for (const char* key : {"text_config", "language_config", "llm_config"}) {
    const auto inner = root.find(key);
    if (inner == root.end() || inner->is_null()) continue;
    if (!inner->is_object()) return Bad(key, " is ", Shown(*inner), " but must be an object");
    *name = key;
    return &*inner;
  }
  return nullptr;
}

absl::Status Uneven(absl::string_view name, const Json& value) {
  return absl::UnimplementedError(
      absl::StrCat("model config: ", name, " is ", Shown(value),
                   ", which makes layers differ in a way that is not supported"));
}

bool IsSet(const Json* value) {
  return value != nullptr && *value != Json(0) && *value != Json(false) &&
         !(value->is_structured() && value->empty());
}

absl::Status CheckUnset(const Fields& fields, absl::string_view name) {
  const Json* value = fields.Get(std::string(name));
  return IsSet(value) ? Uneven(name, *value) : absl::OkStatus();
}

absl::Status CheckHasKv(const Fields& fields) {
  for (const absl::string_view name : kStates) {
    const Json* value = fields.Get(std::string(name));
    if (!IsSet(value)) continue;
    return absl::UnimplementedError(absl::StrCat(
        "model config: ", name, " is ", Shown(*value),
        ", as in a model of states instead of keys and values, which is not supported"));
  }
  return absl::OkStatus();
}

absl::Status CheckEven(const Fields& fields) {
  for (const absl::string_view name : kUneven) {
    KVFERRY_RETURN_IF_ERROR(CheckUnset(fields, name));
  }
  if (fields.Has("layer_types")) return absl::OkStatus();
  for (const absl::string_view name : kUnevenKinds) {
    const Json* value = fields.Get(std::string(name));
    if (value != nullptr && *value == Json(1)) continue;  // A group of one is a full layer.
    KVFERRY_RETURN_IF_ERROR(CheckUnset(fields, name));
  }
  return absl::OkStatus();
}

// MiniMax: 1 for each layer with full attention. M2 lists nothing else.
absl::Status CheckAttentionTypes(const Fields& fields, int64_t num_layers) {
  constexpr char kName[] = "attn_type_list";
  const Json* types = fields.Get(kName);
  if (types == nullptr || (types->is_array() && types->empty())) return absl::OkStatus();
  const bool all_full =
      types->is_array() && static_cast<int64_t>(types->size()) >= num_layers &&
      std::all_of(types->begin(), types->end(), [](const Json& type) { return type == Json(1); });
  return all_full ? absl::OkStatus() : Uneven(kName, *types);
}

// ---------------------------------------------------------------- KV caches of checkpoints

absl::StatusOr<const Json*> FindObject(const Json& object, const std::string& name) {
  const Json* value = FindField(object, name);
  if (value == nullptr || value->is_object()) return value;
  return Bad(name, " is ", Shown(*value), " but must be an object");
}

// Python writes numbers that JSON has none for as NaN, Infinity and -Infinity, in fields that do
// not count here (time_step_limit of models with Mamba layers): each becomes a null.
std::string WithoutPythonsNumbers(absl::string_view json) {
  std::string plain;
  plain.reserve(json.size());
  for (bool in_string = false; !json.empty();) {
    const bool number = !in_string && (absl::ConsumePrefix(&json, "NaN") ||
                                       absl::ConsumePrefix(&json, "Infinity") ||
                                       absl::ConsumePrefix(&json, "-Infinity"));
    if (number) {
      plain += "null";
      continue;
    }
    const bool escape = in_string && json.front() == '\\' && json.size() > 1;
    if (json.front() == '"') in_string = !in_string;
    const size_t count = escape ? 2 : 1;
    plain.append(json.data(), count);
    json.remove_prefix(count);
  }
  return plain;
}

absl::StatusOr<Json> Parse(absl::string_view what, absl::string_view json) {
  if (static_cast<int64_t>(json.size()) > ModelConfig::kMaxJsonBytes) {
    return Bad(what, " has ", json.size(), " bytes, more than ", ModelConfig::kMaxJsonBytes);
  }
  const std::string plain = WithoutPythonsNumbers(json);
  Json root = Json::parse(plain.begin(), plain.end(), nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return Bad(what, " is not a JSON object");
  return root;
}

// How config.json says that the checkpoint is quantised; nullptr when it does not.
absl::StatusOr<const Json*> FindQuantization(const Json& root, const Json& text) {
  for (const Json* object : {&root, &text}) {
    for (const char* name : {"quantization_config", "compression_config"}) {
      KVFERRY_ASSIGN_OR_RETURN(const Json* found, FindObject(*object, name));
      if (found != nullptr) return found;
    }
  }
  return nullptr;
}

constexpr char kOnlyFp8[] = "; only FP8 is known, and the option kv_cache_dtype overrides it";

// compressed-tensors: the quantisation of what attention stores, told as for activations.
absl::Status CheckScheme(const Json& scheme) {
  const auto is = [&scheme](const char* field, std::initializer_list<Json> allowed) {
    const Json* value = FindField(scheme, field);
    return std::any_of(allowed.begin(), allowed.end(), [value](const Json& one) {
      return value == nullptr ? one.is_null() : one == *value;
    });
  };
  // Other strategies keep scales beside the rows, and a scheme without symmetry zero points.
  if (is("type", {"float"}) && is("num_bits", {8}) && is("symmetric", {nullptr, true}) &&
      is("strategy", {nullptr, "tensor", "attn_head"})) {
    return absl::OkStatus();
  }
  std::vector<std::string> fields;
  for (const char* field : {"type", "num_bits", "strategy", "symmetric"}) {
    const Json* value = FindField(scheme, field);
    if (value != nullptr) fields.push_back(absl::StrCat(field, " ", Shown(*value)));
  }
  return Bad("kv_cache_scheme is {", absl::StrJoin(fields, ", "), "}", kOnlyFp8);
}

// Whether a word says FP8: its own name, or in AutoFP8's files that scales were measured.
bool IsFp8(const Json& config, const Json& word) {
  if (!word.is_string()) return false;
  if (absl::AsciiStrToLower(word.get_ref<const std::string&>()) == "fp8") return true;
  const Json* method = FindField(config, "quant_method");
  return word == Json("static") && method != nullptr && *method == Json("fp8");
}

// Whether the checkpoint was quantised for FP8 keys and values.
absl::StatusOr<bool> WantsFp8Kv(const Json& config) {
  // ModelOpt's own file has it one level deeper than config.json.
  KVFERRY_ASSIGN_OR_RETURN(const Json* inner, FindObject(config, "quantization"));
  const Json& quantization = inner == nullptr ? config : *inner;
  for (const char* name : {"kv_cache_scheme", "kv_cache_quant_algo"}) {
    const Json* value = FindField(quantization, name);
    if (value == nullptr) continue;
    if (value->is_object()) {
      KVFERRY_RETURN_IF_ERROR(CheckScheme(*value));
    } else if (!IsFp8(quantization, *value)) {
      return Bad(name, " is ", Shown(*value), kOnlyFp8);
    }
    return true;
  }
  return false;
}

absl::StatusOr<bool> CheckpointWantsFp8Kv(const Json& root, const Json& text,
                                          absl::string_view hf_quant_config) {
  KVFERRY_ASSIGN_OR_RETURN(const Json* found, FindQuantization(root, text));
  if (found != nullptr) return WantsFp8Kv(*found);
  if (hf_quant_config.empty()) return false;
  KVFERRY_ASSIGN_OR_RETURN(const Json file, Parse("option hf_quant_config", hf_quant_config));
  return WantsFp8Kv(file);
}

// ---------------------------------------------------------------- dtypes

absl::StatusOr<NamedDType> ModelDType(const Json& root, const Json& text,
                                      const ModelConfigOptions& options) {
  if (options.dtype != "auto") return FindDType(kModelDTypes, "option dtype", options.dtype);
  for (const Json* object : {&root, &text}) {
    for (const char* name : {"dtype", "torch_dtype"}) {
      KVFERRY_ASSIGN_OR_RETURN(const std::string dtype, FindString(*object, name));
      if (!dtype.empty()) return FindDType(kModelDTypes, name, dtype);
    }
  }
  return Bad("dtype is missing; looked for dtype, torch_dtype; the option dtype can say it");
}

absl::Status ReadDTypes(const Json& root, const Json& text, const ModelConfigOptions& options,
                        ModelConfig* config) {
  KVFERRY_ASSIGN_OR_RETURN(const NamedDType dtype, ModelDType(root, text, options));
  config->dtype = config->kv_dtype = dtype.dtype;
  if (options.kv_cache_dtype != "auto") return config->SetKvCacheDType(options.kv_cache_dtype);
  KVFERRY_ASSIGN_OR_RETURN(const bool fp8,
                           CheckpointWantsFp8Kv(root, text, options.hf_quant_config));
  if (fp8) config->kv_dtype = DType::kFloat8E4M3;
  return absl::OkStatus();
}

// ---------------------------------------------------------------- heads

absl::StatusOr<int64_t> NumHeads(const Fields& fields) {
  Names names = {"num_attention_heads", "n_head"};
  if (std::find(kTypesOfNumHeads.begin(), kTypesOfNumHeads.end(), fields.model_type()) !=
      kTypesOfNumHeads.end()) {
    names.push_back("num_heads");
  }
  return fields.Need(names, 1, KvLayout::kMaxHeads);
}

absl::StatusOr<int64_t> NumKvHeads(const Fields& fields) {
  // Falcon and GPTBigCode; a new Falcon says true and means num_kv_heads.
  KVFERRY_ASSIGN_OR_RETURN(const bool multi_query, fields.FindBool("multi_query", false));
  KVFERRY_ASSIGN_OR_RETURN(const bool grouped, fields.FindBool("new_decoder_architecture", false));
  if (multi_query && !grouped) return 1;
  KVFERRY_ASSIGN_OR_RETURN(const std::optional<int64_t> heads,
                           fields.Find({"num_key_value_heads", "num_kv_heads", "n_head_kv",
                                        "multi_query_group_num", "num_attention_groups"},
                                       1, KvLayout::kMaxHeads));
  if (heads.has_value()) return *heads;
  return NumHeads(fields);
}

absl::StatusOr<int64_t> KvHeadsOfRank(int64_t heads, int64_t ranks) {
  if (heads % ranks == 0) return heads / ranks;
  if (heads < ranks && ranks % heads == 0) return 1;
  return Bad("num_key_value_heads is ", heads, ", which tensor_parallel_size ", ranks,
             " neither divides nor is a multiple of");
}

absl::StatusOr<int64_t> HeadDim(const Fields& fields) {
  KVFERRY_ASSIGN_OR_RETURN(const std::optional<int64_t> head_dim,
                           fields.Find({"head_dim", "kv_channels"}, 0, KvLayout::kMaxHeadDim));
  if (head_dim.value_or(0) > 0) return *head_dim;  // Some files write 0 for none.
  KVFERRY_ASSIGN_OR_RETURN(const int64_t hidden, fields.Need({"hidden_size", "n_embd", "d_model"},
                                                             1, ModelConfig::kMaxHiddenSize));
  KVFERRY_ASSIGN_OR_RETURN(const int64_t heads, NumHeads(fields));
  if (hidden % heads == 0) return hidden / heads;
  return Bad("head_dim is missing, and hidden_size ", hidden, " is no multiple of ", heads,
             " num_attention_heads");
}

absl::Status ReadMha(const Fields& fields, int64_t ranks, ModelConfig* config) {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t heads, NumKvHeads(fields));
  KVFERRY_ASSIGN_OR_RETURN(config->num_kv_heads, KvHeadsOfRank(heads, ranks));
  KVFERRY_ASSIGN_OR_RETURN(config->head_dim, HeadDim(fields));
  KVFERRY_ASSIGN_OR_RETURN(const std::optional<int64_t> v_head_dim,
                           fields.Find({"v_head_dim"}, 0, KvLayout::kMaxHeadDim));
  // DeepSeek-OCR and VL2-Tiny, which have no MLA, write 0 in its fields.
  config->v_head_dim = v_head_dim.value_or(0) > 0 ? *v_head_dim : config->head_dim;
  return absl::OkStatus();
}

absl::StatusOr<bool> IsMla(const Fields& fields) {
  if (fields.Has("kv_lora_rank")) return true;
  // DeepSeek's class has a rank of its own where nothing is said, but for files that want none.
  KVFERRY_ASSIGN_OR_RETURN(const bool used, fields.FindBool("use_mla", true));
  KVFERRY_ASSIGN_OR_RETURN(const std::optional<int64_t> rank,
                           fields.Find({"kv_lora_rank"}, 1, KvLayout::kMaxHeadDim / 2));
  return used && rank.has_value();
}

absl::Status ReadMla(const Fields& fields, ModelConfig* config) {
  config->attention = AttentionKind::kMla;
  KVFERRY_ASSIGN_OR_RETURN(config->kv_lora_rank,
                           fields.Need({"kv_lora_rank"}, 1, KvLayout::kMaxHeadDim / 2));
  KVFERRY_ASSIGN_OR_RETURN(config->qk_rope_head_dim,
                           fields.Need({"qk_rope_head_dim"}, 0, KvLayout::kMaxHeadDim / 2));
  config->num_kv_heads = 1;
  config->head_dim = config->kv_lora_rank + config->qk_rope_head_dim;
  return absl::OkStatus();
}

absl::Status ReadIndexer(const Fields& fields, ModelConfig* config) {
  if (!fields.Has("index_topk")) return absl::OkStatus();
  SparseIndexer indexer;
  KVFERRY_ASSIGN_OR_RETURN(indexer.topk,
                           fields.Need({"index_topk"}, 1, ModelConfig::kMaxPositions));
  KVFERRY_ASSIGN_OR_RETURN(indexer.num_heads,
                           fields.Need({"index_n_heads"}, 1, KvLayout::kMaxHeads));
  KVFERRY_ASSIGN_OR_RETURN(indexer.head_dim,
                           fields.Need({"index_head_dim"}, 1, KvLayout::kMaxHeadDim));
  config->indexer = indexer;
  return absl::OkStatus();
}

// ---------------------------------------------------------------- layers

struct NamedLayer {
  absl::string_view name;
  LayerKind kind;
};
constexpr std::array kLayerTypes = {
    NamedLayer{"full_attention", LayerKind::kFull},
    NamedLayer{"attention", LayerKind::kFull},
    NamedLayer{"chunked_attention", LayerKind::kFull},  // Llama 4 keeps all in engines, too.
    NamedLayer{"indexed_attention", LayerKind::kFull},
    NamedLayer{"deepseek_sparse_attention", LayerKind::kFull},
    NamedLayer{"qwen_sparse_attention", LayerKind::kFull},
    NamedLayer{"sliding_attention", LayerKind::kSliding},
    NamedLayer{"linear_attention", LayerKind::kLinear},
};

absl::StatusOr<LayerKind> ParseLayerType(size_t layer, const Json& type) {
  if (!type.is_string()) return Bad("layer_types[", layer, "] is ", Shown(type));
  for (const NamedLayer& row : kLayerTypes) {
    if (type.get_ref<const std::string&>() == row.name) return row.kind;
  }
  return absl::UnimplementedError(absl::StrCat("model config: layer_types[", layer, "] is ",
                                               Shown(type),
                                               ", a kind of layer that is not supported"));
}

absl::Status ReadLayerTypes(const Json& types, std::vector<LayerKind>* layers) {
  // Some files list their prediction layers behind the others.
  if (!types.is_array() || types.size() < layers->size()) {
    return Bad("layer_types is ", Shown(types), " with ", types.size(), " entries but there are ",
               layers->size(), " layers");
  }
  for (size_t layer = 0; layer < layers->size(); ++layer) {
    KVFERRY_ASSIGN_OR_RETURN((*layers)[layer], ParseLayerType(layer, types[layer]));
  }
  return absl::OkStatus();
}

// Every interval-th layer is full, the others are of this kind.
void SetPattern(int64_t interval, LayerKind kind, std::vector<LayerKind>* layers) {
  for (size_t layer = 0; layer < layers->size(); ++layer) {
    if ((layer + 1) % interval != 0) (*layers)[layer] = kind;
  }
}

// Qwen's classes use windows only when told to, and only from max_window_layers on.
bool IsQwen(const Fields& fields) { return absl::StartsWith(fields.model_type(), "qwen"); }

absl::StatusOr<int64_t> FirstWindowLayer(const Fields& fields) {
  const Names names = {"max_window_layers"};
  if (IsQwen(fields)) return fields.Need(names, 0, KvLayout::kMaxLayers);
  KVFERRY_ASSIGN_OR_RETURN(const std::optional<int64_t> first,
                           fields.Find(names, 0, KvLayout::kMaxLayers));
  return first.value_or(0);
}

absl::Status SetWindows(const Fields& fields, std::vector<LayerKind>* layers) {
  KVFERRY_ASSIGN_OR_RETURN(const bool used, fields.FindBool("use_sliding_window", !IsQwen(fields)));
  KVFERRY_ASSIGN_OR_RETURN(const std::optional<int64_t> window,
                           fields.Find({"sliding_window"}, 0, ModelConfig::kMaxPositions));
  if (!used || window.value_or(0) == 0) return absl::OkStatus();
  KVFERRY_ASSIGN_OR_RETURN(const std::optional<int64_t> pattern,
                           fields.Find({"sliding_window_pattern"}, 1, KvLayout::kMaxLayers));
  if (pattern.has_value()) {
    SetPattern(*pattern, LayerKind::kSliding, layers);
    return absl::OkStatus();
  }
  KVFERRY_ASSIGN_OR_RETURN(const int64_t first, FirstWindowLayer(fields));
  for (auto layer = static_cast<size_t>(first); layer < layers->size(); ++layer) {
    (*layers)[layer] = LayerKind::kSliding;
  }
  return absl::OkStatus();
}

// Checkpoints of LongCat-Flash have no model_type.
bool IsLongcatFlash(const ModelConfig& config) {
  return config.model_type == "longcat_flash" || config.model_type == "longcat_flash_ngram" ||
         absl::StartsWith(config.architecture, "LongcatFlash");
}

// Layers that attend.
absl::StatusOr<int64_t> NumLayers(const Fields& fields, const ModelConfig& config) {
  if (IsLongcatFlash(config)) {  // Two times each; num_hidden_layers may stand for either count.
    KVFERRY_ASSIGN_OR_RETURN(const int64_t pairs,
                             fields.Need({"num_layers"}, 1, KvLayout::kMaxLayers / 2));
    return 2 * pairs;
  }
  return fields.Need({"num_hidden_layers", "n_layer", "num_layers", "n_layers"}, 1,
                     KvLayout::kMaxLayers);
}

absl::Status ReadLayers(const Fields& fields, ModelConfig* config) {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t count, NumLayers(fields, *config));
  config->layers.assign(count, LayerKind::kFull);
  KVFERRY_RETURN_IF_ERROR(CheckAttentionTypes(fields, count));
  if (const Json* types = fields.Get("layer_types")) return ReadLayerTypes(*types, &config->layers);
  KVFERRY_ASSIGN_OR_RETURN(const std::optional<int64_t> interval,
                           fields.Find({"full_attention_interval"}, 1, KvLayout::kMaxLayers));
  if (interval.has_value()) {
    SetPattern(*interval, LayerKind::kLinear, &config->layers);
    return absl::OkStatus();
  }
  if (fields.Has("linear_num_value_heads")) {
    return Bad(
        "which layers are linear is missing; looked for layer_types, "
        "full_attention_interval");
  }
  return SetWindows(fields, &config->layers);
}

absl::Status ReadWindow(const Fields& fields, ModelConfig* config) {
  if (config->LayersOf(LayerKind::kSliding).empty()) return absl::OkStatus();
  KVFERRY_ASSIGN_OR_RETURN(config->sliding_window_tokens,
                           fields.Need({"sliding_window"}, 1, ModelConfig::kMaxPositions));
  return absl::OkStatus();
}

absl::StatusOr<int64_t> LinearHeadsOfRank(const Fields& fields, const std::string& name,
                                          int64_t ranks) {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t heads, fields.Need({name}, 1, KvLayout::kMaxHeads));
  if (heads % ranks == 0) return heads / ranks;
  return Bad(name, " is ", heads, ", which tensor_parallel_size ", ranks, " does not divide");
}

absl::Status ReadLinear(const Fields& fields, int64_t ranks, ModelConfig* config) {
  GdnShape shape;
  shape.num_layers = config->num_linear_layers();
  if (shape.num_layers == 0) return absl::OkStatus();
  KVFERRY_ASSIGN_OR_RETURN(shape.num_v_heads,
                           LinearHeadsOfRank(fields, "linear_num_value_heads", ranks));
  KVFERRY_ASSIGN_OR_RETURN(const int64_t num_k_heads,
                           LinearHeadsOfRank(fields, "linear_num_key_heads", ranks));
  KVFERRY_ASSIGN_OR_RETURN(shape.head_k_dim,
                           fields.Need({"linear_key_head_dim"}, 1, KvLayout::kMaxHeadDim));
  KVFERRY_ASSIGN_OR_RETURN(shape.head_v_dim,
                           fields.Need({"linear_value_head_dim"}, 1, KvLayout::kMaxHeadDim));
  KVFERRY_ASSIGN_OR_RETURN(shape.conv_kernel_size, fields.Need({"linear_conv_kernel_dim"}, 2,
                                                               GdnShape::kMaxConvKernelSize));
  // Q and K have the same heads here.
  shape.conv_dim = 2 * num_k_heads * shape.head_k_dim + shape.num_v_heads * shape.head_v_dim;
  shape.conv_dtype = config->dtype;
  KVFERRY_RETURN_IF_ERROR(shape.Validate());
  config->linear = shape;
  return absl::OkStatus();
}

absl::Status ReadPositions(const Fields& fields, ModelConfig* config) {
  KVFERRY_ASSIGN_OR_RETURN(
      const std::optional<int64_t> positions,
      fields.Find({"max_position_embeddings", "n_positions", "max_seq_len", "seq_length"}, 1,
                  ModelConfig::kMaxPositions));
  config->max_position_embeddings = positions.value_or(0);
  return absl::OkStatus();
}

absl::Status CheckRanks(int64_t ranks) {
  return CheckRange("model config", "option tensor_parallel_size", ranks, 1, KvLayout::kMaxHeads);
}

}  // namespace

absl::string_view AttentionKindName(AttentionKind kind) {
  return kind == AttentionKind::kMla ? "mla" : "mha";
}

absl::string_view LayerKindName(LayerKind kind) {
  return kind == LayerKind::kFull ? "full" : kind == LayerKind::kSliding ? "sliding" : "linear";
}

absl::StatusOr<ModelConfig> ModelConfig::FromJson(absl::string_view json,
                                                  const ModelConfigOptions& options) {
  const int64_t ranks = options.tensor_parallel_size;
  KVFERRY_RETURN_IF_ERROR(CheckRanks(ranks));
  KVFERRY_ASSIGN_OR_RETURN(const Json root, Parse("the text", json));
  std::string inner;
  KVFERRY_ASSIGN_OR_RETURN(const Json* found, FindTextConfig(root, &inner));
  const Json& text = found == nullptr ? root : *found;
  ModelConfig config;
  KVFERRY_ASSIGN_OR_RETURN(config.architecture, FindArchitecture(root));
  KVFERRY_ASSIGN_OR_RETURN(config.model_type, FindString(text, "model_type"));
  const Fields fields(text, inner.empty() ? "" : absl::StrCat(" in ", inner), config.model_type);
  KVFERRY_RETURN_IF_ERROR(CheckHasKv(fields));
  KVFERRY_RETURN_IF_ERROR(CheckEven(fields));
  KVFERRY_RETURN_IF_ERROR(ReadDTypes(root, text, options, &config));
  KVFERRY_RETURN_IF_ERROR(ReadLayers(fields, &config));
  KVFERRY_RETURN_IF_ERROR(ReadWindow(fields, &config));
  KVFERRY_ASSIGN_OR_RETURN(const bool mla, IsMla(fields));
  KVFERRY_RETURN_IF_ERROR(mla ? ReadMla(fields, &config) : ReadMha(fields, ranks, &config));
  KVFERRY_RETURN_IF_ERROR(ReadIndexer(fields, &config));
  KVFERRY_RETURN_IF_ERROR(ReadLinear(fields, ranks, &config));
  KVFERRY_RETURN_IF_ERROR(ReadPositions(fields, &config));
  return config;
}

absl::Status ModelConfig::SetKvCacheDType(absl::string_view name) {
  KVFERRY_ASSIGN_OR_RETURN(const NamedDType named,
                           FindDType(kKvDTypes, "option kv_cache_dtype", name));
  kv_dtype = named.dtype;
  kv_blocks = named.blocks;
  return absl::OkStatus();
}

std::vector<int64_t> ModelConfig::LayersOf(LayerKind kind) const {
  std::vector<int64_t> of_kind;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    if (layers[layer] == kind) of_kind.push_back(static_cast<int64_t>(layer));
  }
  return of_kind;
}

int64_t ModelConfig::num_linear_layers() const {
  return std::count(layers.begin(), layers.end(), LayerKind::kLinear);
}

int64_t ModelConfig::num_attention_layers() const {
  return static_cast<int64_t>(layers.size()) - num_linear_layers();
}

int64_t ModelConfig::layer_kv_bytes_per_token() const {
  const int64_t values = num_kv_heads * (head_dim + v_head_dim);
  if (!kv_blocks) return values * DTypeBytes(kv_dtype);
  const BlockFormatInfo info = InfoOf(*kv_blocks);
  return values * info.codes_bits / 8 + values / info.block_values * DTypeBytes(info.scales_dtype);
}

}  // namespace kvferry
