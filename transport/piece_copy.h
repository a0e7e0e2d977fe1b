#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "transport/data_plane.h"
#include "transport/stream_plan.h"

namespace kvferry {

// Copies what arrives into a stream's pages, straight from where it lies. Keeps its lists from
// call to call; not thread-safe.
class PieceCopy {
 public:
  // `threads` helps with long copies, and outlives this.
  explicit PieceCopy(ThreadPool* threads) : threads_(threads) {}

  // Into the window of the stream that begins at `offset` and has the pieces' bytes, and must lie
  // inside of it.
  void Run(const StreamPlan& plan, int64_t offset, Pieces from);

 private:
  struct Part {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };
  void Add(std::byte* to, const std::byte* from, size_t bytes);
  void CopyShare(int64_t share) const;

  ThreadPool* const threads_;
  std::vector<std::span<std::byte>> to_;
  std::vector<Part> parts_;
  std::vector<size_t> shares_;  // Where each share of the parts begins: about as many bytes each.
  size_t bytes_of_share_ = 0;   // So far, of the last one.
};

}  // namespace kvferry
