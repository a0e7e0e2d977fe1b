#include "pool/kv_pool.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/ceil_div.h"
#include "base/host_memory.h"
#include "base/status.h"
#include "pool/rows_aside.h"

namespace kvferry {
namespace {

constexpr int64_t kBufferAlignment = 4096;  // A memory page, so that no two buffers share one.

absl::Status CheckBuffer(const KvLayout& layout, std::span<const BufferInfo> buffers,
                         int64_t index) {
  const BufferInfo& buffer = buffers[index];
  const int64_t want_item_bytes = layout.item_bytes(index / layout.num_layers);
  const auto bad = [&](auto&&... what) {
    return absl::InvalidArgumentError(absl::StrCat("pool: buffer ", index, " ", what...));
  };
  if (buffer.address == nullptr) return bad("has a null address");
  if (buffer.item_bytes != want_item_bytes) {
    return bad("has item_bytes ", buffer.item_bytes, " but the layout's pages have ",
               want_item_bytes);
  }
  if (buffer.bytes <= 0 || buffer.bytes % want_item_bytes != 0) {
    return bad("has ", buffer.bytes, " bytes, which is no multiple of item_bytes ",
               want_item_bytes);
  }
  const int64_t pages = buffer.bytes / want_item_bytes;
  const int64_t first_pages = buffers[0].bytes / layout.item_bytes(0);
  if (pages != first_pages) return bad("has ", pages, " pages but buffer 0 has ", first_pages);
  return absl::OkStatus();
}

// Where two share some of their bytes, pages of one lie in others of the other, and who writes a
// page changes those. Two that are one have the same pages: layers may share all of a cache.
absl::Status CheckApart(std::span<const BufferInfo> buffers) {
  std::vector<std::span<std::byte>> stretches;
  for (const BufferInfo& buffer : buffers) {
    stretches.emplace_back(buffer.address, static_cast<size_t>(buffer.bytes));
  }
  const auto met = FindMeetInPart(stretches);
  if (!met) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "pool: buffers ", met->first, " and ", met->second,
      " overlap, so that a page of one is part of others; where K and V of a page lie one behind "
      "the other, give them as one tensor"));
}

// Of all buffers, each rounded up.
absl::StatusOr<int64_t> SlabBytes(const KvLayout& layout, int64_t num_pages) {
  KVFERRY_RETURN_IF_ERROR(layout.Validate());
  const int64_t max_pages = KvPool::MaxPages(layout);
  if (num_pages < 1 || num_pages > max_pages) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pool: num_pages is ", num_pages, " but must lie in [1, ", max_pages, "] for this layout"));
  }
  int64_t slab_bytes = 0;
  for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
    slab_bytes +=
        layout.num_layers * RoundUp(num_pages * layout.item_bytes(tensor), kBufferAlignment);
  }
  return slab_bytes;
}

std::vector<BufferInfo> BuffersIn(std::byte* slab, const KvLayout& layout, int64_t num_pages) {
  std::vector<BufferInfo> buffers;
  std::byte* next = slab;
  for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
    const int64_t item_bytes = layout.item_bytes(tensor);
    for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
      buffers.push_back({next, num_pages * item_bytes, item_bytes});
      next += RoundUp(num_pages * item_bytes, kBufferAlignment);
    }
  }
  return buffers;
}

}  // namespace

KvPool::KvPool(const KvLayout& layout, std::vector<BufferInfo> buffers,
               std::shared_ptr<const void> owner, std::shared_ptr<const PoolMemory> memory)
    : layout_(layout),
      buffers_(std::move(buffers)),
      num_pages_(buffers_[0].bytes / layout_.item_bytes(0)),
      memory_(std::move(memory)),
      owner_(std::move(owner)) {}

int64_t KvPool::MaxPages(const KvLayout& layout) {
  // With at most 2^44 bytes (16 TiB) in all, no sum of their bytes can overflow.
  return std::max<int64_t>(1, (int64_t{1} << 44) / layout.page_bytes());
}

absl::StatusOr<std::shared_ptr<KvPool>> KvPool::Create(const KvLayout& layout, int64_t num_pages) {
  return CreateShared(layout, num_pages, TakesRoom::kAtOnce, "");
}

absl::StatusOr<std::shared_ptr<KvPool>> KvPool::Create(const KvLayout& layout, int64_t num_pages,
                                                       TakesRoom takes_room) {
  return CreateShared(layout, num_pages, takes_room,
                      ", or have it take room as it is touched (TakesRoom::kAsTouched; "
                      "at_once=False in Python)");
}

absl::StatusOr<std::shared_ptr<KvPool>> KvPool::CreateShared(const KvLayout& layout,
                                                             int64_t num_pages,
                                                             TakesRoom takes_room,
                                                             absl::string_view or_else) {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t bytes, SlabBytes(layout, num_pages));
  if (takes_room == TakesRoom::kAtOnce) KVFERRY_RETURN_IF_ERROR(CheckHostRoom(bytes, or_else));
  auto shared = std::make_shared<SharedMemory>();
  KVFERRY_ASSIGN_OR_RETURN(*shared, SharedMemory::CreateOrPrivate("kvferry-pool", bytes));
  if (takes_room == TakesRoom::kAtOnce) UseHugePages(shared->data.get(), bytes);
  std::shared_ptr<KvPool> pool(new KvPool(layout, BuffersIn(shared->data.get(), layout, num_pages),
                                          shared->data, HostMemory()));
  if (shared->fd.valid()) pool->shared_ = std::move(shared);
  return pool;
}

absl::StatusOr<std::shared_ptr<KvPool>> KvPool::CreateIn(const KvLayout& layout, int64_t num_pages,
                                                         std::shared_ptr<const PoolMemory> memory) {
  if (memory == nullptr) memory = HostMemory();
  KVFERRY_ASSIGN_OR_RETURN(const int64_t bytes, SlabBytes(layout, num_pages));
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> slab, memory->Allocate(bytes));
  std::vector<BufferInfo> buffers = BuffersIn(slab.get(), layout, num_pages);
  return std::shared_ptr<KvPool>(
      new KvPool(layout, std::move(buffers), std::move(slab), std::move(memory)));
}

absl::StatusOr<std::shared_ptr<KvPool>> KvPool::Adopt(const KvLayout& layout,
                                                      std::span<const BufferInfo> buffers,
                                                      std::shared_ptr<const void> owner,
                                                      std::shared_ptr<const PoolMemory> memory) {
  if (memory == nullptr) memory = HostMemory();
  KVFERRY_RETURN_IF_ERROR(layout.Validate());
  if (static_cast<int64_t>(buffers.size()) != layout.num_buffers()) {
    return absl::InvalidArgumentError(
        absl::StrCat("pool: ", buffers.size(), " buffers given but the layout (", layout.ToString(),
                     ") has ", layout.num_buffers()));
  }
  for (int64_t index = 0; index < layout.num_buffers(); ++index) {
    KVFERRY_RETURN_IF_ERROR(CheckBuffer(layout, buffers, index));
    const BufferInfo& buffer = buffers[index];
    const absl::Status here =
        memory->CheckHolds({buffer.address, static_cast<size_t>(buffer.bytes)});
    if (!here.ok()) {
      return absl::Status(here.code(), absl::StrCat("pool: buffer ", index, " of ", buffer.bytes,
                                                    " bytes: ", here.message()));
    }
  }
  KVFERRY_RETURN_IF_ERROR(CheckApart(buffers));
  return std::shared_ptr<KvPool>(
      new KvPool(layout, {buffers.begin(), buffers.end()}, std::move(owner), std::move(memory)));
}

absl::StatusOr<std::shared_ptr<KvPool>> KvPool::AdoptShared(
    const KvLayout& layout, std::span<const BufferInfo> buffers, std::shared_ptr<const void> owner,
    std::shared_ptr<const SharedMemory> shared) {
  if (shared == nullptr) return absl::InvalidArgumentError("pool: no shared memory to adopt in");
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<KvPool> pool, Adopt(layout, buffers, std::move(owner)));
  for (size_t i = 0; i < buffers.size(); ++i) {
    // As numbers: pointers of different objects have no order.
    const auto begin = reinterpret_cast<uintptr_t>(buffers[i].address);
    const auto memory = reinterpret_cast<uintptr_t>(shared->data.get());
    if (begin < memory || begin - memory > static_cast<uint64_t>(shared->bytes) ||
        static_cast<uint64_t>(buffers[i].bytes) > shared->bytes - (begin - memory)) {
      return absl::InvalidArgumentError(absl::StrCat("pool: buffer ", i, " of ", buffers[i].bytes,
                                                     " bytes does not lie in the shared memory of ",
                                                     shared->bytes));
    }
  }
  if (shared->fd.valid()) pool->shared_ = std::move(shared);
  return pool;
}

std::shared_ptr<const KvPool> KvPool::InSmallerPages(const std::shared_ptr<const KvPool>& pool,
                                                     int64_t page_size, int64_t num_heads) {
  KvLayout layout = pool->layout_;
  layout.page_size = page_size;
  for (KvTensor& tensor : layout.tensors) {
    if (num_heads != 0) tensor.num_heads = num_heads;
  }
  std::vector<BufferInfo> buffers = pool->buffers_;
  for (size_t i = 0; i < buffers.size(); ++i) {
    buffers[i].item_bytes = layout.item_bytes(static_cast<int64_t>(i) / layout.num_layers);
  }
  std::shared_ptr<KvPool> view(new KvPool(layout, std::move(buffers), pool, pool->memory_));
  view->shared_ = pool->shared_;
  return view;
}

std::span<std::byte> KvPool::page(int64_t layer, int64_t tensor, int64_t page_id) const {
  const BufferInfo& info = buffer(layer, tensor);
  return {info.address + page_id * info.item_bytes, static_cast<size_t>(info.item_bytes)};
}

}  // namespace kvferry
