#include "connector/store/staged_pages.h"

#include <algorithm>
#include <numeric>

#include "base/status.h"
#include "pool/token_copy.h"
#include "pool/token_view.h"

namespace kvferry {
namespace {

constexpr int64_t kStagedBytes = 16 << 20;

}  // namespace

size_t StagedPages::AtATime(const KvPool& pool) {
  return static_cast<size_t>(std::max<int64_t>(1, kStagedBytes / pool.layout().page_bytes()));
}

StagedPages::StagedPages(const KvPool& pool, std::span<const int64_t> pages)
    : pool_(pool),
      pages_(pages),
      bytes_(pages.size() * static_cast<size_t>(pool.layout().page_bytes())) {}

std::byte* StagedPages::ItemsOf(int64_t layer, int64_t tensor) const {
  const KvLayout& layout = pool_.layout();
  int64_t of_page = layer * layout.layer_page_bytes();
  for (int64_t before = 0; before < tensor; ++before) of_page += layout.item_bytes(before);
  return bytes_.data() + static_cast<int64_t>(pages_.size()) * of_page;
}

std::vector<std::span<std::byte>> StagedPages::Items() const {
  const KvLayout& layout = pool_.layout();
  std::vector<std::span<std::byte>> items;
  items.reserve(pages_.size() * layout.num_buffers());
  for (size_t page = 0; page < pages_.size(); ++page) {
    for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
      for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
        const auto bytes = static_cast<size_t>(layout.item_bytes(tensor));
        items.emplace_back(ItemsOf(layer, tensor) + page * bytes, bytes);
      }
    }
  }
  return items;
}

absl::Status StagedPages::FromPool() {
  std::vector<int32_t> rows(pages_.size());
  std::iota(rows.begin(), rows.end(), 0);
  return Copy(rows, /*to_pool=*/false);
}

absl::Status StagedPages::ToPool(std::span<const absl::Status> statuses) {
  std::vector<int32_t> rows;
  for (size_t i = 0; i < statuses.size(); ++i) {
    if (statuses[i].ok()) rows.push_back(static_cast<int32_t>(i));
  }
  return Copy(rows, /*to_pool=*/true);
}

absl::Status StagedPages::Copy(std::span<const int32_t> rows, bool to_pool) {
  std::vector<int32_t> ids;
  ids.reserve(rows.size());
  for (const int32_t row : rows) ids.push_back(static_cast<int32_t>(pages_[row]));
  const KvLayout& layout = pool_.layout();
  std::vector<TokenCopy> copies;
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
      const BufferInfo& buffer = pool_.buffer(layer, tensor);
      const auto view = [&buffer](std::byte* data, int64_t count) {
        return TokenView::Packed(data, DType::kUint8, count, 1, buffer.item_bytes);
      };
      const TokenView there = view(buffer.address, pool_.num_pages());
      const TokenView here = view(ItemsOf(layer, tensor), static_cast<int64_t>(pages_.size()));
      KVFERRY_ASSIGN_OR_RETURN(const TokenCopy copy, to_pool
                                                         ? TokenCopy::Plan(here, rows, there, ids)
                                                         : TokenCopy::Plan(there, ids, here, rows));
      copies.push_back(copy);
    }
  }
  return pool_.memory().RunApart(copies);
}

}  // namespace kvferry
