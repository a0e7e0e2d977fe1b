#include "connector/kv_tensors.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/token_copy.h"
#include "pool/token_view.h"

namespace kvferry {
namespace {

std::vector<int32_t> SlotsOf(const PageRuns& pages, int64_t page_size, int64_t num_tokens) {
  std::vector<int32_t> slots;
  slots.reserve(static_cast<size_t>(num_tokens));
  for (const int64_t page : pages.ToPages()) {
    for (int64_t i = 0; i < page_size; ++i) {
      if (static_cast<int64_t>(slots.size()) == num_tokens) return slots;
      slots.push_back(static_cast<int32_t>(page * page_size + i));
    }
  }
  return slots;
}

absl::Status CheckSizes(std::span<const std::byte> key, std::span<const std::byte> value,
                        int64_t num_tokens, const KvPool& pool, const PageRuns& pages) {
  KVFERRY_RETURN_IF_ERROR(CheckTensors(pool.layout(), num_tokens, key, value));
  const int64_t page_size = pool.layout().page_size;
  KVFERRY_RETURN_IF_ERROR(pages.CheckWithin(pool.num_pages()));
  if (pool.num_pages() > INT32_MAX / page_size) {
    return absl::InvalidArgumentError(absl::StrCat("a pool of ", pool.num_pages(), " pages of ",
                                                   page_size, " tokens: slots need 32 bits"));
  }
  if (pages.num_pages() * page_size >= num_tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(pages.num_pages(), " pages of ", page_size,
                                                 " tokens for ", num_tokens, " tokens"));
}

// The tensor's rows of one layer; read only where kv tensors are, though the view does not say so.
TokenView LayerOf(std::span<const std::byte> tensor, const TokenView& part, int64_t layer,
                  int64_t num_tokens) {
  auto* data = const_cast<std::byte*>(tensor.data());
  return TokenView::Packed(data + layer * num_tokens * part.row_bytes(), part.dtype, num_tokens,
                           part.num_heads, part.head_dim);
}

template <typename Copy>
absl::Status ForEachTensor(const KvPool& pool, std::span<const std::byte> key,
                           std::span<const std::byte> value, int64_t num_tokens, const Copy& copy) {
  std::vector<TokenCopy> copies;
  for (int64_t layer = 0; layer < pool.layout().num_layers; ++layer) {
    for (int64_t tensor = 0; tensor < 2; ++tensor) {
      KVFERRY_ASSIGN_OR_RETURN(const TokenView paged, TokenView::Of(pool, layer, tensor));
      KVFERRY_ASSIGN_OR_RETURN(
          const TokenCopy plan,
          copy(paged, LayerOf(tensor == 0 ? key : value, paged, layer, num_tokens)));
      copies.push_back(plan);
    }
  }
  return pool.memory().RunApart(copies);
}

}  // namespace

absl::StatusOr<int64_t> KvTensorBytes(const KvLayout& layout, int64_t num_tokens) {
  const bool two = layout.num_tensors() == 2 && layout.item_bytes(0) == layout.item_bytes(1) &&
                   layout.tensors[0].head_dim == layout.tensors[1].head_dim &&
                   layout.dtype_of(layout.tensors[0]) == layout.dtype_of(layout.tensors[1]);
  if (!two || (layout.page_format != "NHD" && layout.page_format != "HND")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "key and value as tensors need a layout of two equal tensors, NHD or HND, not ",
        layout.ToString()));
  }
  return layout.num_layers * (layout.item_bytes(0) / layout.page_size) * num_tokens;
}

absl::Status CheckTensors(const KvLayout& layout, int64_t num_tokens,
                          std::span<const std::byte> key, std::span<const std::byte> value) {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t bytes, KvTensorBytes(layout, num_tokens));
  for (const auto& [name, tensor] : {std::pair("key", key), std::pair("value", value)}) {
    if (static_cast<int64_t>(tensor.size()) == bytes) continue;
    return absl::InvalidArgumentError(absl::StrCat("lookup: ", name, " has ", tensor.size(),
                                                   " bytes, but ", num_tokens, " tokens have ",
                                                   bytes, " in ", layout.ToString()));
  }
  return absl::OkStatus();
}

absl::Status CopyTensorsToPages(std::span<const std::byte> key, std::span<const std::byte> value,
                                int64_t num_tokens, const KvPool& pool, const PageRuns& pages) {
  KVFERRY_RETURN_IF_ERROR(CheckSizes(key, value, num_tokens, pool, pages));
  const std::vector<int32_t> slots = SlotsOf(pages, pool.layout().page_size, num_tokens);
  return ForEachTensor(pool, key, value, num_tokens,
                       [&](const TokenView& paged, const TokenView& rows) {
                         return TokenCopy::PlanScatter(rows, paged, slots);
                       });
}

absl::Status CopyPagesToTensors(const KvPool& pool, const PageRuns& pages, int64_t num_tokens,
                                std::span<std::byte> key, std::span<std::byte> value) {
  KVFERRY_RETURN_IF_ERROR(CheckSizes(key, value, num_tokens, pool, pages));
  const std::vector<int32_t> slots = SlotsOf(pages, pool.layout().page_size, num_tokens);
  return ForEachTensor(pool, key, value, num_tokens,
                       [&](const TokenView& paged, const TokenView& rows) {
                         return TokenCopy::PlanGather(paged, slots, rows);
                       });
}

}  // namespace kvferry
