#include "pool/token_view.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {

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
