#include "pool/kv_layout.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/check_range.h"
#include "base/status.h"

namespace kvferry {
namespace {

struct DTypeRow {
  DType dtype;
  absl::string_view name;
  int64_t bytes;
};

constexpr std::array<DTypeRow, 6> kDTypes = {{
    {DType::kFloat32, "float32", 4},
    {DType::kFloat16, "float16", 2},
    {DType::kBFloat16, "bfloat16", 2},
    {DType::kFloat8E4M3, "float8_e4m3fn", 1},
    {DType::kFloat8E5M2, "float8_e5m2", 1},
    {DType::kUint8, "uint8", 1},
}};

absl::Status CheckCount(absl::string_view field, int64_t value, int64_t max) {
  return CheckRange("layout", field, value, 1, max);
}

absl::Status CheckName(absl::string_view field, absl::string_view name) {
  if (!name.empty() && name.size() <= static_cast<size_t>(KvLayout::kMaxNameBytes)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("layout: ", field, " has ", name.size(),
                                                 " bytes but must have 1 to ",
                                                 KvLayout::kMaxNameBytes));
}

std::string TensorsToString(const std::vector<KvTensor>& tensors) {
  std::string text;
  for (const KvTensor& tensor : tensors) {
    absl::StrAppend(&text, text.empty() ? "" : "+", tensor.name, "[", tensor.num_heads, " heads x ",
                    tensor.head_dim, "]");
    if (tensor.dtype) absl::StrAppend(&text, " ", DTypeName(*tensor.dtype));
  }
  return text;
}

}  // namespace

int64_t DTypeBytes(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.bytes;
  }
  return 0;
}

absl::string_view DTypeName(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.name;
  }
  return "unknown";
}

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  const absl::string_view plain = absl::StripPrefix(name, "torch.");
  std::string known;
  for (const DTypeRow& row : kDTypes) {
    if (row.name == plain) return row.dtype;
    absl::StrAppend(&known, known.empty() ? "" : ", ", row.name);
  }
  return absl::InvalidArgumentError(absl::StrCat("dtype '", name, "' is not one of ", known));
}

KvLayout KvLayout::Mha(int64_t num_layers, int64_t page_size, int64_t num_kv_heads,
                       int64_t head_dim, DType dtype) {
  return {num_layers,
          page_size,
          dtype,
          "NHD",
          {{"k", num_kv_heads, head_dim}, {"v", num_kv_heads, head_dim}}};
}

KvLayout KvLayout::Fused(int64_t num_layers, int64_t page_size, int64_t num_kv_heads,
                         int64_t head_dim, DType dtype) {
  // One that Validate() refuses stays one, and does not wrap round.
  const int64_t values = 2 * std::clamp<int64_t>(head_dim, -1, kMaxHeadDim);
  return {num_layers, page_size, dtype, "HND", {{"kv", num_kv_heads, values}}};
}

KvLayout KvLayout::Mla(int64_t num_layers, int64_t page_size, int64_t latent_dim, DType dtype) {
  return {num_layers, page_size, dtype, "NHD", {{"latent", 1, latent_dim}}};
}

absl::Status KvLayout::Validate() const {
  KVFERRY_RETURN_IF_ERROR(CheckCount("num_layers", num_layers, kMaxLayers));
  KVFERRY_RETURN_IF_ERROR(CheckCount("page_size", page_size, kMaxPageSize));
  KVFERRY_RETURN_IF_ERROR(CheckCount("number of tensors", num_tensors(), kMaxTensors));
  KVFERRY_RETURN_IF_ERROR(CheckName("page_format", page_format));
  if (DTypeBytes(dtype) == 0) return absl::InvalidArgumentError("layout: dtype is not a known one");
  for (const KvTensor& tensor : tensors) {
    KVFERRY_RETURN_IF_ERROR(CheckName("tensor name", tensor.name));
    KVFERRY_RETURN_IF_ERROR(CheckCount("num_heads", tensor.num_heads, kMaxHeads));
    KVFERRY_RETURN_IF_ERROR(CheckCount("head_dim", tensor.head_dim, kMaxHeadDim));
    const int64_t value_bytes = DTypeBytes(dtype_of(tensor));
    if (value_bytes == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("layout: dtype of tensor ", tensor.name, " is not a known one"));
    }
    // The product of the maxima fits in 63 bits (20 + 16 + 20 + 2), so this cannot overflow.
    const int64_t bytes = page_size * tensor.num_heads * tensor.head_dim * value_bytes;
    KVFERRY_RETURN_IF_ERROR(
        CheckCount(absl::StrCat("bytes of a page of tensor ", tensor.name), bytes, kMaxItemBytes));
  }
  return absl::OkStatus();
}

int64_t KvLayout::item_bytes(int64_t tensor) const {
  const KvTensor& spec = tensors[tensor];
  return page_size * spec.num_heads * spec.head_dim * DTypeBytes(dtype_of(spec));
}

int64_t KvLayout::layer_page_bytes() const {
  int64_t bytes = 0;
  for (int64_t tensor = 0; tensor < num_tensors(); ++tensor) bytes += item_bytes(tensor);
  return bytes;
}

int64_t KvLayout::num_heads() const {
  const int64_t first = tensors.front().num_heads;
  const bool all = std::all_of(tensors.begin(), tensors.end(),
                               [&](const KvTensor& tensor) { return tensor.num_heads == first; });
  return all ? first : 0;
}

std::string KvLayout::FirstDifference(const KvLayout& other) const {
  const auto differ = [](absl::string_view field, const auto& here, const auto& there) {
    return absl::StrCat(field, ": ", here, " here, ", there, " there");
  };
  if (num_layers != other.num_layers) return differ("num_layers", num_layers, other.num_layers);
  if (page_size != other.page_size) return differ("page_size", page_size, other.page_size);
  if (dtype != other.dtype) return differ("dtype", DTypeName(dtype), DTypeName(other.dtype));
  if (page_format != other.page_format) {
    return differ("page_format", page_format, other.page_format);
  }
  if (tensors != other.tensors) {
    return differ("tensors", TensorsToString(tensors), TensorsToString(other.tensors));
  }
  return "";
}

std::string KvLayout::ToString() const {
  return absl::StrCat(num_layers, " layers x ", TensorsToString(tensors), " x ", page_size,
                      "-token pages, ", DTypeName(dtype), " ", page_format);
}

}  // namespace kvferry
