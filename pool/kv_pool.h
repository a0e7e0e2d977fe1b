#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/shared_memory.h"
#include "pool/kv_layout.h"
#include "pool/pool_memory.h"

namespace kvferry {

// One contiguous buffer of a pool: bytes / item_bytes pages. What an engine's
// get_contiguous_buf_infos() reports, and what transports read and write.
struct BufferInfo {
  std::byte* address = nullptr;
  int64_t bytes = 0;
  int64_t item_bytes = 0;  // Bytes of one page in this buffer.
};

// The memory of a paged KV cache in one process: layout().num_buffers() buffers of num_pages()
// pages.
//
// Either owns its memory (Create) or looks at an engine's (Adopt); nothing is ever copied.
// Immutable after construction, so any thread may use it; the bytes of a page belong to whoever
// holds the page.
class KvPool {
 public:
  // When the memory of a pool takes room. Random pages move up to 1.25 times as fast in huge pages,
  // which are taken at once, where the system has them (UseHugePages() says when, and how long it
  // takes).
  enum class TakesRoom { kAtOnce, kAsTouched };

  // Zeroed memory of the pool's own, which endpoints let processes of the same user on this host
  // read in place. RESOURCE_EXHAUSTED when the machine will not give it, INVALID_ARGUMENT for a bad
  // layout or page count. A child that this process forks shares it, and must not write to it.
  static absl::StatusOr<std::shared_ptr<KvPool>> Create(const KvLayout& layout, int64_t num_pages,
                                                        TakesRoom takes_room);
  // kAtOnce, for who offers its own callers nothing else: the error does not speak of it.
  static absl::StatusOr<std::shared_ptr<KvPool>> Create(const KvLayout& layout, int64_t num_pages);
  // So many pages of the layout, which is valid, it makes at most.
  static int64_t MaxPages(const KvLayout& layout);

  // The same in memory of another kind, a device's for example, or the host's own that no other
  // process reads (null: the latter). Errors of memory->Allocate() are passed on.
  static absl::StatusOr<std::shared_ptr<KvPool>> CreateIn(const KvLayout& layout, int64_t num_pages,
                                                          std::shared_ptr<const PoolMemory> memory);

  // Looks at `buffers`, K layers then V layers (KvLayout::buffer_index), all of the same page
  // count. `owner` is kept alive as long as the pool; the memory must stay valid while it lives.
  // INVALID_ARGUMENT names the buffer whose address, size or item size does not fit the layout, or
  // two that overlap in part; layers may share all of one.
  // `memory` says what kind it is of (null: the host's); what a device does not have is refused
  // too.
  static absl::StatusOr<std::shared_ptr<KvPool>> Adopt(
      const KvLayout& layout, std::span<const BufferInfo> buffers,
      std::shared_ptr<const void> owner, std::shared_ptr<const PoolMemory> memory = HostMemory());
  // The same of an engine that was given `shared` to put its buffers in, so that endpoints let
  // processes of the same user on this host read them in place, as those of Create().
  // INVALID_ARGUMENT if it is null, or naming a buffer that does not lie in it.
  static absl::StatusOr<std::shared_ptr<KvPool>> AdoptShared(
      const KvLayout& layout, std::span<const BufferInfo> buffers,
      std::shared_ptr<const void> owner, std::shared_ptr<const SharedMemory> shared);

  // The same memory as more pages, of fewer tokens and heads, which must divide what `pool` has:
  // page p has become the pages from p * (what it is more) on. Where the page_format lets heads of
  // a page, or rows of it, lie together, its values are in them in order (pool/page_cut.h). A
  // num_heads of 0: as many as each tensor has.
  static std::shared_ptr<const KvPool> InSmallerPages(const std::shared_ptr<const KvPool>& pool,
                                                      int64_t page_size, int64_t num_heads);

  const KvLayout& layout() const { return layout_; }
  int64_t num_pages() const { return num_pages_; }
  std::span<const BufferInfo> buffer_infos() const { return buffers_; }
  const BufferInfo& buffer(int64_t layer, int64_t tensor) const {
    return buffers_[layout_.buffer_index(layer, tensor)];
  }
  // What kind of memory the pages lie in; addresses below are good where that says.
  const PoolMemory& memory() const { return *memory_; }
  // What all buffers lie in, when other processes can map it; else null.
  const SharedMemory* shared_memory() const { return shared_.get(); }
  // One page of one tensor of one layer; the indices must be in range.
  std::span<std::byte> page(int64_t layer, int64_t tensor, int64_t page_id) const;

 private:
  KvPool(const KvLayout& layout, std::vector<BufferInfo> buffers, std::shared_ptr<const void> owner,
         std::shared_ptr<const PoolMemory> memory);

  // `or_else`: what the caller may do besides where there is no room, for the error.
  static absl::StatusOr<std::shared_ptr<KvPool>> CreateShared(const KvLayout& layout,
                                                              int64_t num_pages,
                                                              TakesRoom takes_room,
                                                              absl::string_view or_else);

  const KvLayout layout_;
  const std::vector<BufferInfo> buffers_;
  const int64_t num_pages_;
  const std::shared_ptr<const PoolMemory> memory_;
  const std::shared_ptr<const void> owner_;
  std::shared_ptr<const SharedMemory> shared_;
};

}  // namespace kvferry
