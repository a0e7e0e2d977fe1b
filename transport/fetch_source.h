#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "pool/page_runs.h"

namespace kvferry {

// What a lease offers: pages, and perhaps bytes behind them.
struct LeasedMemory {
  PageRuns pages;
  std::shared_ptr<const std::vector<std::byte>> tail{};
};

// One of several that each fetch a part of a lease, as tensor-parallel ranks do that have fewer
// heads each than the side that publishes.
struct LeaseReader {
  static constexpr int64_t kMax = 64;

  int64_t index = 0;  // In [0, of).
  int64_t of = 1;  // In [1, kMax]. A lease is fetched when all of them have what they want of it.

  bool operator==(const LeaseReader&) const = default;
};

// Whoever publishes pages (connector/lease_table.h). Called on the node's progress thread; must not
// block.
class FetchSource {
 public:
  virtual ~FetchSource() = default;

  // Asks for a lease's memory and holds the lease until EndTransfer: it neither expires nor gives
  // its pages back meanwhile. NOT_FOUND: not published (perhaps not yet); any other error is final.
  virtual absl::StatusOr<LeasedMemory> BeginTransfer(uint64_t lease_id, LeaseReader reader) = 0;
  // Layers [0, n) hold their final bytes.
  virtual int64_t ReadyLayers(uint64_t lease_id) = 0;
  // OK: the reader has what it wanted, and with the last reader the lease ends. Else it goes on,
  // until it expires or is fetched after all.
  virtual void EndTransfer(uint64_t lease_id, LeaseReader reader, const absl::Status& outcome) = 0;
  // Instead of EndTransfer(): the reader's session has ended, and it may go on over another one. A
  // source may keep the lease for that.
  virtual void OnReaderGone(uint64_t lease_id, LeaseReader reader, const absl::Status& why) {
    EndTransfer(lease_id, reader, why);
  }
  // The reader needs nothing of this lease. If no other does, it ends as fetched, now or, if it is
  // still to be published, then.
  virtual void NothingNeeded(uint64_t lease_id, LeaseReader reader) = 0;
  // Expires what is due; returns when to be called again at the latest.
  virtual Deadline Tick(Deadline now) = 0;
};

}  // namespace kvferry
