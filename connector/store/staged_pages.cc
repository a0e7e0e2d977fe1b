#include "connector/store/staged_pages.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/slab.h"
#include "base/status.h"
#include "pool/token_copy.h"
#include "pool/token_view.h"

namespace kvferry {
namespace {

constexpr int64_t kStagedBytes = 16 << 20;

struct PinnedSlab {
  std::shared_ptr<std::byte> slab;
  std::shared_ptr<const void> pin;  // Ends first.
};

// As long as nobody has taken it.
StagingMemory& KeptByThisThread() {
  thread_local StagingMemory kept;
  return kept;
}

}  // namespace

absl::StatusOr<StagingMemory> StagingMemory::Take(const PoolMemory& device, int64_t bytes) {
  StagingMemory memory = std::exchange(KeptByThisThread(), {});
  if (memory.device == device.cuda_device() && memory.bytes >= bytes) return memory;
  memory = {};  // Before there is another one.
  memory.bytes = std::max(bytes, kStagedBytes);
  memory.device = device.cuda_device();
  auto pinned = std::make_shared<PinnedSlab>();
  KVFERRY_ASSIGN_OR_RETURN(pinned->slab, MapSlab(memory.bytes));
  auto pin = device.Pin({pinned->slab.get(), static_cast<size_t>(memory.bytes)});
  if (pin.ok()) {
    pinned->pin = *std::move(pin);
  } else {
    Log().debug("pages go to and from stores out of memory that is not pinned: {}",
                pin.status().ToString());
  }
  memory.data = {pinned, pinned->slab.get()};
  return memory;
}

// Of a page of gigabytes nothing is kept.
void StagingMemory::GiveBack(StagingMemory memory) {
  if (memory.bytes == kStagedBytes) KeptByThisThread() = std::move(memory);
}

size_t StagedPages::AtATime(const KvPool& pool) {
  return static_cast<size_t>(std::max<int64_t>(1, kStagedBytes / pool.layout().page_bytes()));
}

absl::StatusOr<StagedPages> StagedPages::Create(const KvPool& pool,
                                                std::span<const int64_t> pages) {
  const int64_t bytes = static_cast<int64_t>(pages.size()) * pool.layout().page_bytes();
  KVFERRY_ASSIGN_OR_RETURN(StagingMemory memory, StagingMemory::Take(pool.memory(), bytes));
  return StagedPages(pool, pages, std::move(memory));
}

StagedPages::~StagedPages() {
  if (memory_.data != nullptr) StagingMemory::GiveBack(std::move(memory_));
}

std::byte* StagedPages::ItemsOf(int64_t layer, int64_t tensor) {
  const KvLayout& layout = pool_.layout();
  int64_t of_page = layer * layout.layer_page_bytes();
  for (int64_t before = 0; before < tensor; ++before) of_page += layout.item_bytes(before);
  return memory_.data.get() + static_cast<int64_t>(pages_.size()) * of_page;
}

std::vector<std::span<std::byte>> StagedPages::Items() {
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

template <typename Plan>
absl::Status StagedPages::Copy(const Plan& plan) {
  const KvLayout& layout = pool_.layout();
  std::vector<TokenCopy> copies;
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
      const BufferInfo& buffer = pool_.buffer(layer, tensor);
      const auto rows = [&buffer](std::byte* data, int64_t count) {
        return TokenView::Packed(data, DType::kUint8, count, 1, buffer.item_bytes);
      };
      KVFERRY_ASSIGN_OR_RETURN(
          const TokenCopy copy,
          plan(rows(buffer.address, pool_.num_pages()),
               rows(ItemsOf(layer, tensor), static_cast<int64_t>(pages_.size()))));
      copies.push_back(copy);
    }
  }
  return pool_.memory().RunApart(copies);
}

absl::Status StagedPages::FromPool() {
  const std::vector<int32_t> ids(pages_.begin(), pages_.end());
  return Copy([&ids](const TokenView& pages, const TokenView& here) {
    return TokenCopy::PlanGather(pages, ids, here);
  });
}

absl::Status StagedPages::ToPool(std::span<const absl::Status> statuses) {
  std::vector<int32_t> rows, ids;
  for (size_t i = 0; i < statuses.size(); ++i) {
    if (!statuses[i].ok()) continue;
    rows.push_back(static_cast<int32_t>(i));
    ids.push_back(static_cast<int32_t>(pages_[i]));
  }
  return Copy([&](const TokenView& pages, const TokenView& here) {
    // Rows in order need no list, and no copy on the host before they go.
    return rows.size() == pages_.size() ? TokenCopy::PlanScatter(here, pages, ids)
                                        : TokenCopy::Plan(here, rows, pages, ids);
  });
}

}  // namespace kvferry
