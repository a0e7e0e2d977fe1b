#include "pool/token_view.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace kvferry {
namespace {

// Takes the `count` innermost of what merged dimensions count off them: how far one lies from the
// next, and `if_one` for a single one. Nothing when they do not lie evenly.
std::optional<int64_t> TakeInnermost(std::vector<ArrayDim>* dims, int64_t count, int64_t if_one) {
  if (count == 1) return if_one;
  if (dims->empty() || dims->back().size % count != 0) return std::nullopt;
  const int64_t stride = dims->back().stride;
  dims->back() = {dims->back().size / count, stride * count};
  if (dims->back().size == 1) dims->pop_back();
  return stride;
}

}  // namespace

std::vector<ArrayDim> Merged(std::span<const ArrayDim> dims) {
  std::vector<ArrayDim> merged;
  for (const ArrayDim& dim : dims) {
    if (dim.size == 1) continue;
    if (!merged.empty() && merged.back().stride == dim.size * dim.stride) {
      merged.back() = {merged.back().size * dim.size, dim.stride};
    } else {
      merged.push_back(dim);
    }
  }
  return merged;
}

std::string SizesByStrides(std::span<const ArrayDim> dims) {
  return absl::StrJoin(dims, ", ", [](std::string* out, const ArrayDim& dim) {
    absl::StrAppend(out, dim.size, " x ", dim.stride);
  });
}

absl::Status CheckTokensCanBeFound(const KvLayout& layout) {
  if (layout.page_format == "NHD" || layout.page_format == "HND") return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("token view: page_format '", layout.page_format,
                   "' is an engine's own; tokens can be found in NHD and HND only"));
}

TokenView TokenView::Packed(std::byte* data, DType dtype, int64_t num_slots, int64_t num_heads,
                            int64_t head_dim) {
  const int64_t value_bytes = DTypeBytes(dtype);
  const int64_t row_bytes = num_heads * head_dim * value_bytes;
  return {.data = data,
          .dtype = dtype,
          .num_slots = num_slots,
          .page_size = 1,
          .num_heads = num_heads,
          .head_dim = head_dim,
          .page_stride = row_bytes,
          .token_stride = row_bytes,
          .head_stride = head_dim * value_bytes,
          .value_stride = value_bytes};
}

absl::StatusOr<TokenView> TokenView::OfArray(std::byte* data, DType dtype,
                                             std::span<const ArrayDim> dims, int64_t num_slots,
                                             int64_t num_heads, int64_t head_dim) {
  int64_t num_values = 1;
  for (const ArrayDim& dim : dims) num_values *= dim.size;
  if (num_values != num_slots * num_heads * head_dim) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows have ", num_values, " values, but ", num_slots, " slots of ", num_heads,
                     " heads x ", head_dim, " have ", num_slots * num_heads * head_dim));
  }
  TokenView view = Packed(data, dtype, num_slots, num_heads, head_dim);
  if (num_values == 0) return view;
  std::vector<ArrayDim> rest = Merged(dims);
  const auto value = TakeInnermost(&rest, head_dim, view.value_stride);
  const auto head = TakeInnermost(&rest, num_heads, view.head_stride);
  if (!value || !head || rest.size() > 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows have dimensions (size x bytes apart: ", SizesByStrides(dims),
                     ") that are no evenly spaced ", num_heads, " heads x ", head_dim));
  }
  view.value_stride = *value;
  view.head_stride = *head;
  if (!rest.empty()) view.token_stride = rest.back().stride;
  view.page_stride = view.token_stride;
  if (rest.size() == 2) {
    view.page_size = rest.back().size;
    view.page_stride = rest.front().stride;
  }
  return view;
}

absl::StatusOr<TokenView> TokenView::Of(const KvPool& pool, int64_t layer, int64_t tensor) {
  const KvLayout& layout = pool.layout();
  if (layer < 0 || layer >= layout.num_layers || tensor < 0 || tensor >= layout.num_tensors()) {
    return absl::OutOfRangeError(absl::StrCat("token view: layer ", layer, ", tensor ", tensor,
                                              " but the pool has ", layout.num_layers,
                                              " layers of ", layout.num_tensors(), " tensors"));
  }
  KVFERRY_RETURN_IF_ERROR(CheckTokensCanBeFound(layout));
  const BufferInfo& buffer = pool.buffer(layer, tensor);
  const KvTensor& spec = layout.tensors[tensor];
  TokenView view = Packed(buffer.address, layout.dtype_of(spec),
                          pool.num_pages() * layout.page_size, spec.num_heads, spec.head_dim);
  view.page_size = layout.page_size;
  view.page_stride = buffer.item_bytes;
  if (layout.page_format == "HND" && layout.page_size > 1) {
    view.token_stride = view.head_bytes();
    view.head_stride = layout.page_size * view.head_bytes();
  }
  return view;
}

std::span<std::byte> TokenView::Hull() const {
  const std::pair<int64_t, int64_t> dims[] = {{(num_slots - 1) / page_size, page_stride},
                                              {std::min(num_slots, page_size) - 1, token_stride},
                                              {num_heads - 1, head_stride},
                                              {head_dim - 1, value_stride}};
  int64_t below = 0, above = DTypeBytes(dtype);
  for (const auto& [steps, stride] : dims) (stride < 0 ? below : above) += steps * stride;
  return {data + below, static_cast<size_t>(above - below)};
}

TokenView TokenView::Slice(int64_t first, int64_t count) const {
  TokenView part = *this;
  part.data += first * value_stride;
  part.head_dim = count;
  return part;
}

}  // namespace kvferry
