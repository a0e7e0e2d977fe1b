#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "pool/pool_memory.h"
#include "transport/byte_ranges.h"
#include "transport/data_plane.h"
#include "transport/fetch_handle.h"
#include "transport/gate.h"
#include "transport/metrics.h"
#include "transport/piece_copy.h"
#include "transport/stream_plan.h"

namespace kvferry {

// Where the chunks of one live fetch go: into its pages, whichever lane brings them. Thread-safe;
// chunks of several lanes are copied at the same time.
class Landing {
 public:
  // Of a stream of which the first `prefix` bytes have arrived. Chunks of more than
  // `max_chunk_bytes` are refused, and those without a checksum if `checksum`. `metrics` outlives
  // this.
  Landing(std::shared_ptr<const StreamPlan> plan, std::shared_ptr<FetchHandle> handle,
          int64_t prefix, int64_t max_chunk_bytes, bool checksum, Metrics* metrics);

  // OK: scattered, and counted. Else what is wrong with the chunk; some of it may be in the pages,
  // but it does not count as arrived.
  absl::Status Accept(const ChunkHeader& header, const Payload& payload, ChunkTaker::Intact intact,
                      PieceCopy* copy);
  // The same in steps, for a chunk that comes part by part: Begin, then Write for each part, then
  // End with the checksum of all parts, which is looked at if the header has one.
  absl::Status Begin(const ChunkHeader& header);
  // Calls `write` while the pages may be written. False, without a call: not any more. What `write`
  // leaves under way it gives to AwaitAtClose().
  bool Write(absl::FunctionRef<void()> write);
  void AwaitAtClose(std::shared_ptr<const MovesUnderWay> moves);
  absl::Status End(const ChunkHeader& header, uint64_t checksum);
  const StreamPlan& plan() const { return *plan_; }
  // After it nothing is written any more.
  void Close();

  int64_t num_bytes() const;
  // All of the stream up to here has arrived.
  int64_t prefix() const;
  // The ranges of the stream that have not arrived.
  std::vector<std::pair<int64_t, int64_t>> Gaps() const;

 private:
  absl::Status CheckBounds(const ChunkHeader& header) const;
  absl::Status CheckSum(const ChunkHeader& header, uint64_t checksum) const;
  // Nobody else is given a chunk of these bytes.
  absl::Status Claim(int64_t begin, int64_t end);
  absl::Status Arrived(int64_t begin, int64_t end);

  const std::shared_ptr<const StreamPlan> plan_;
  const std::shared_ptr<FetchHandle> handle_;
  const int64_t max_chunk_bytes_;
  const bool checksum_;
  Metrics* const metrics_;
  Gate gate_;

  mutable Mutex mutex_;
  ByteRanges claimed_ ABSL_GUARDED_BY(mutex_);
  ByteRanges arrived_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const MovesUnderWay>> under_way_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
