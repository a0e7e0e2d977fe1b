#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "pool/kv_pool.h"

namespace kvferry {

// Some pages of a pool that the processor cannot touch, in host memory on the way from or to a store.
// Not thread-safe; the pool and the list of pages outlive it.
class StagedPages {
 public:
  // How many pages of such a pool are staged at a time: 16 MiB of them, one at least.
  static size_t AtATime(const KvPool& pool);

  StagedPages(const KvPool& pool, std::span<const int64_t> pages);

  // The items of the pages here, those of one page side by side.
  std::vector<std::span<std::byte>> Items();
  absl::Status FromPool();
  // Of the pages whose statuses are OK alone.
  absl::Status ToPool(std::span<const absl::Status> statuses);

 private:
  // Runs what plan(pages, here) says of each tensor of each layer: all pages of the pool, and those here.
  template <typename Plan>
  absl::Status Copy(const Plan& plan);
  // Where the items of one tensor of one layer lie here, in the order of the pages.
  std::byte* ItemsOf(int64_t layer, int64_t tensor);

  const KvPool& pool_;
  const std::span<const int64_t> pages_;
  std::vector<std::byte> bytes_;  // Buffer by buffer.
};

}  // namespace kvferry
