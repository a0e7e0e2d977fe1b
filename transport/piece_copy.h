#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "pool/pool_memory.h"
#include "transport/data_plane.h"
#include "transport/stream_plan.h"

namespace kvferry {

// Copies what arrives into a stream's pages, straight from where it lies. Keeps its lists from call
// to call; not thread-safe.
class PieceCopy {
 public:
  // `threads` helps with long copies, and outlives this.
  explicit PieceCopy(ThreadPool* threads) : threads_(threads) {}

  // Into the window of the stream that begins at `offset` and has the pieces' bytes, and must lie
  // inside of it. Errors are those of StreamPlan::ScatterPieces().
  absl::Status Run(const StreamPlan& plan, int64_t offset, Pieces from);
  // The same, that may return before all is done, as StreamPlan::BeginScatterPieces().
  absl::StatusOr<std::shared_ptr<const MovesUnderWay>> Begin(const StreamPlan& plan, int64_t offset,
                                                             Pieces from);

 private:
  void ToHost(const StreamPlan& plan, int64_t offset, Pieces from);

  ThreadPool* const threads_;
  std::vector<int64_t> begins_;  // Of each piece, in the window.
};

}  // namespace kvferry
