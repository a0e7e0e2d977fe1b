#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/kv_pool.h"
#include "pool/pool_memory.h"

namespace kvferry {

// Host memory that a device reaches where it lies, if it lets itself be pinned.
struct StagingMemory {
  // Of the calling thread's, which keeps the last one that was given back: pinning takes longer
  // than what goes through it. At least so many bytes, pinned for `device`. RESOURCE_EXHAUSTED.
  static absl::StatusOr<StagingMemory> Take(const PoolMemory& device, int64_t bytes);
  static void GiveBack(StagingMemory memory);

  std::shared_ptr<std::byte> data;  // And its pin.
  int64_t bytes = 0;
  std::optional<int> device;  // By CUDA's number.
};

// Some pages of a pool that the processor cannot touch, in host memory on the way from or to a
// store. Not thread-safe; used by the thread that made it. The pool and the list of pages outlive
// it.
class StagedPages {
 public:
  // How many pages of such a pool are staged at a time: 16 MiB of them, one at least.
  static size_t AtATime(const KvPool& pool);

  // Their bytes are undefined at first. RESOURCE_EXHAUSTED when there is no memory for them.
  static absl::StatusOr<StagedPages> Create(const KvPool& pool, std::span<const int64_t> pages);
  ~StagedPages();
  StagedPages(StagedPages&&) = default;
  StagedPages& operator=(StagedPages&&) = delete;

  // The items of the pages here, those of one page side by side.
  std::vector<std::span<std::byte>> Items();
  absl::Status FromPool();
  // Of the pages whose statuses are OK alone.
  absl::Status ToPool(std::span<const absl::Status> statuses);

 private:
  StagedPages(const KvPool& pool, std::span<const int64_t> pages, StagingMemory memory)
      : pool_(pool), pages_(pages), memory_(std::move(memory)) {}
  // Runs what plan(pages, here) says of each tensor of each layer: all pages of the pool, and those
  // here.
  template <typename Plan>
  absl::Status Copy(const Plan& plan);
  // Where the items of one tensor of one layer lie here, in the order of the pages.
  std::byte* ItemsOf(int64_t layer, int64_t tensor);

  const KvPool& pool_;
  const std::span<const int64_t> pages_;
  StagingMemory memory_;  // Buffer by buffer.
};

}  // namespace kvferry
