#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "pool/kv_pool.h"
#include "pool/page_runs.h"

namespace kvferry {

// Where each byte of a transfer's stream (docs/wire_protocol.md) lies in one side's pool.
// Arithmetic over the layout and the runs of pages: making one costs O(runs), and nothing grows
// with pages x layers. Immutable; the pool is kept alive.
class StreamPlan {
 public:
  // OUT_OF_RANGE when a page is not in the pool.
  static absl::StatusOr<StreamPlan> Create(std::shared_ptr<const KvPool> pool, PageRuns pages);

  int64_t total_bytes() const { return layer_bytes_ * pool_->layout().num_layers; }
  // The stream holds layer l in [l * layer_bytes(), (l + 1) * layer_bytes()).
  int64_t layer_bytes() const { return layer_bytes_; }
  int64_t num_layers() const { return pool_->layout().num_layers; }
  const PageRuns& pages() const { return pages_; }

  // Copies the window [offset, offset + packed.size()) of the stream, which must lie inside it.
  void Gather(int64_t offset, std::span<std::byte> packed) const;
  void Scatter(int64_t offset, std::span<const std::byte> packed) const;

  // The page ids that any of the byte ranges `gaps` touches, in list order.
  std::vector<int64_t> PagesTouchedBy(std::span<const std::pair<int64_t, int64_t>> gaps) const;

 private:
  StreamPlan(std::shared_ptr<const KvPool> pool, PageRuns pages);

  std::shared_ptr<const KvPool> pool_;
  PageRuns pages_;
  int64_t layer_bytes_;
};

}  // namespace kvferry
