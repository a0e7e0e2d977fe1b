#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/mutex.h"
#include "connector/attached_node.h"
#include "connector/lease_source.h"
#include "connector/lookup_table.h"
#include "pool/page_runs.h"
#include "transport/calls.h"
#include "transport/node.h"

namespace kvferry {

// What a producer keeps of an entry, as the payload in its LookupTable. Gone when the entry has
// left the buffer for good; `on_gone` is called then, by whoever let go of it last.
struct LookupEntry {
  LookupEntry() = default;
  LookupEntry(const LookupEntry&) = delete;
  LookupEntry& operator=(const LookupEntry&) = delete;
  ~LookupEntry() {
    if (on_gone) on_gone(*this);
  }

  uint64_t id = 0;
  PageRuns pages;
  std::shared_ptr<const std::vector<std::byte>> hidden;  // Null: none.
  bool fetched = false;                                  // Else it was dropped.
  std::function<void(const LookupEntry&)> on_gone;
};

// Answers lookups of consumers from a LookupTable: the other half of a LookupProducer.
//
//   an entry is   in the table --lookup--> leased --lookup_take--> gone
//                      ^                      |
//                      '---- expired, lookup_back
//
// A lease expires reply_lease_ms after the lookup, or after the last transfer of it has ended, in
// whatever way: so long has a consumer whose session broke to come back and take what it has. Who
// asks again to take a lease gets the same answer as before. Once Close() was called nothing is
// given away: a yes could come behind our goodbye.
//
// The calls of FetchSource and CallHandler are the node's; entries that are inserted answer lookups
// on the inserting thread. No lock is held while a table is called that calls back.
class LookupService : public LeaseSource, public CallHandler {
 public:
  struct Options {
    Config config;
    int64_t partition = 0;
    int64_t num_layers = 0;  // Of the pool.
    int64_t reply_lease_ms = 0;
  };
  LookupService(const Options& options, std::shared_ptr<LookupTable> table)
      : LeaseSource(options.config), options_(options), table_(std::move(table)) {}

  // The node that calls this. Once, right after its start: it may be calling already.
  void Attach(Node* node) { node_.Attach(node); }
  // Before the node says goodbye.
  void Close();
  // Drops entries that are leased. The node is gone by now.
  void DropLeased();

  int64_t num_leased() const { return leases_.num_live(); }

  // CallHandler.
  void OnCall(const CallKey& call, const std::string& function, const Fields& args,
              Deadline deadline) override;
  void OnCallDropped(const CallKey& call) override;
  // Lookups do, but this counts them itself: one that has an entry need not wait.
  bool MayWait(const std::string& /*function*/) const override { return false; }
  // And LeaseSource.
  Deadline Tick(Deadline now) override;
  void EndTransfer(uint64_t lease_id, LeaseReader reader, const absl::Status& outcome) override;
  void OnReaderGone(uint64_t lease_id, LeaseReader reader, const absl::Status& why) override {
    EndTransfer(lease_id, reader, why);
  }

 private:
  using Taken = LookupTable::Taken;
  struct Waiting {
    uint64_t query = 0;  // The table's id of it.
    int64_t bytes = 0;   // Of its tokens.
  };
  struct OfPeer {
    std::map<uint64_t, Waiting> calls;  // By id.
    int64_t bytes = 0;
  };

  Node& node() { return node_.get(); }
  absl::Status Lookup(const CallKey& call, const Fields& args, Deadline deadline);
  // Answers it, or lets it wait for its entry if it `may_wait`. The table's id of the query, or 0.
  absl::StatusOr<uint64_t> Ask(const CallKey& call, uint64_t lease_id,
                               std::optional<LookupTable::Tokens> tokens, Deadline deadline,
                               const absl::Status& may_wait);
  // Why it may not wait beside the others of its peer, if it may not: then until StopWaiting() all
  // the same, which is as long as it takes to look for its entry.
  absl::Status StartWaiting(const CallKey& call, int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckMayWait(const OfPeer& of_peer, int64_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where it is in waiting_, or null.
  Waiting* FindWaiting(const CallKey& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The table's id of its query; none: it does not wait.
  std::optional<uint64_t> StopWaiting(const CallKey& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LookupTake(const CallKey& call, const Fields& args);
  absl::Status LookupBack(const CallKey& call, const Fields& args);
  // Ends the process where there is no memory, also on a thread that inserts: it would be told that
  // its entry is not in, and could not be told whether a consumer reads it.
  void Answer(const CallKey& call, uint64_t lease_id, absl::StatusOr<Taken> taken) noexcept;
  // Takes the entry only when it returns OK.
  absl::Status TryLease(const CallKey& call, uint64_t lease_id, Taken& taken);
  absl::StatusOr<Fields> Lease(const CallKey& call, uint64_t lease_id, Taken taken);
  Fields ReplyOf(const Taken& taken);
  void Settle() override;
  void PutBack(Taken taken);

  const Options options_;
  const std::shared_ptr<LookupTable> table_;
  AttachedNode node_;

  Mutex mutex_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<PeerKey, OfPeer> waiting_ ABSL_GUARDED_BY(mutex_);  // Calls that wait for an entry.
  int64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<uint64_t, Taken> leased_ ABSL_GUARDED_BY(mutex_);  // By lease id.
  std::deque<Taken> returning_ ABSL_GUARDED_BY(mutex_);
  bool putting_back_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvferry
