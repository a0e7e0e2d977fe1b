#pragma once

// What the pages of a test request hold, so that a byte that lands in a wrong place is noticed.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "pool/kv_pool.h"
#include "pool/page_runs.h"

namespace kvferry::examples {

// Every 8 bytes are a hash of (salt, layer, tensor, page id on the sending side, offset). A value
// type.
class Pattern {
 public:
  explicit Pattern(uint64_t salt) : salt_(salt) {}

  void Fill(std::span<std::byte> bytes, int64_t layer, int64_t tensor, int64_t page) const;
  bool Matches(std::span<const std::byte> bytes, int64_t layer, int64_t tensor, int64_t page) const;

  // All tensors of one layer, or of all layers, of these pages.
  void FillLayer(const KvPool& pool, const PageRuns& pages, int64_t layer) const;
  void FillPages(const KvPool& pool, const PageRuns& pages) const;

  // The pool's `local` pages hold what the sender's `remote` pages hold, position by position, and
  // every other page is zero. DATA_LOSS says how many pages are wrong and describes the first.
  absl::Status Verify(const KvPool& pool, const PageRuns& local, const PageRuns& remote) const;

 private:
  uint64_t salt_;
};

void ZeroPages(const KvPool& pool, const PageRuns& pages);

}  // namespace kvferry::examples
