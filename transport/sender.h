#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/config.h"
#include "pool/kv_pool.h"
#include "transport/arena.h"
#include "transport/fetch_source.h"
#include "transport/gate.h"
#include "transport/metrics.h"
#include "transport/outbox.h"
#include "transport/stream_plan.h"

namespace kvferry {

// The sending half of the packed path: answers fetches with chunks gathered from the pool.
//
// A transfer is    parked --publish--> active --done--> (gone: fetched)
//                     |                  |
//                     '-- grace over     '-- cancel, abort, peer gone, deadline --> (gone: lease
//                     goes on)
//                         --> refused
//
// Progress thread only.
class Sender {
 public:
  // All pointers outlive the sender; `source` may be null: then every fetch is refused.
  Sender(const Config& config, std::shared_ptr<const KvPool> pool, FetchSource* source,
         Arena* arena, Outbox* outbox, Metrics* metrics);

  void OnFetch(const PeerKey& peer, LinkId link, FetchMsg fetch);
  void OnDone(const PeerKey& peer, const DoneMsg& done);
  void OnCancel(const PeerKey& peer, const CancelMsg& cancel);
  void OnCredit(const CreditHeader& credit);
  void OnPeerGone(const PeerKey& peer, const absl::Status& status);
  // The lease has new layers, or has just been published.
  void OnLeaseChanged(uint64_t lease_id);
  // The owner takes the lease back: its transfers end, and no page of it is read after this
  // returns, but by a peer on this host that then finds out that what it read does not count.
  void AbortLease(uint64_t lease_id, const absl::Status& status);
  void AbortAll(const absl::Status& status);

  // Sends at most one chunk of each transfer that may; true when it sent any.
  bool Pump();
  // Ends what is overdue; returns when to be called again at the latest.
  Deadline Tick(Deadline now);

 private:
  struct Transfer {
    FetchMsg fetch;
    PeerKey peer;
    LinkId link;
    StreamPlan plan;
    Deadline deadline;
    int64_t chunk_bytes;
    int64_t ready_bytes;  // The stream up to here may be read.
    int64_t sent_bytes = 0;
    int64_t credited_bytes = 0;
    // Chunks of the arena that name pages, as long as their reader has not said it is through.
    absl::flat_hash_set<int64_t> read_in_place;
    absl::Status failed;  // A send went wrong; ended by the next Pump.
    // Lanes are inside while they gather; closed when the transfer has ended.
    std::shared_ptr<Gate> reading;
  };
  struct Parked {
    FetchMsg fetch;
    PeerKey peer;
    LinkId link;
    Deadline until;
  };
  using TransferPtr = std::shared_ptr<Transfer>;

  absl::Status CheckLimits(const PeerKey& peer, const FetchMsg& fetch) const;
  void Refuse(const PeerKey& peer, uint64_t transfer_id, const absl::Status& status);
  absl::StatusOr<StreamPlan> PlanFor(const FetchMsg& fetch, const LeasedMemory& leased) const;
  void Start(const PeerKey& peer, LinkId link, FetchMsg fetch, const LeasedMemory& leased);
  void RetryParked(Parked parked);
  bool PumpOne(const TransferPtr& transfer, int64_t peer_share);
  // Whether the peer reads the next chunk in the pool's pages, and how long it may be then.
  bool ReadInPlace(const Transfer& transfer) const;
  bool Admits(const Transfer& transfer, int64_t bytes, bool in_place) const;
  int64_t MaxBytesInPlace(const Transfer& transfer) const;
  void SendChunk(const TransferPtr& transfer, int64_t bytes, bool in_place);
  // What fills a chunk of the arena: with the window at sent_bytes, on any thread.
  ChunkLinks::Fill Gather(const TransferPtr& transfer, int64_t chunk) const;
  // With where that window lies, on this one.
  ChunkLinks::Fill ListPieces(const TransferPtr& transfer, int64_t chunk);
  int64_t ReadyBytes(const StreamPlan& plan, uint64_t lease_id) const;
  // Ends one transfer; `tell` also sends the peer an abort.
  void End(uint64_t transfer_id, const absl::Status& outcome, bool tell);
  template <typename Matches>
  std::vector<uint64_t> IdsWhere(const Matches& matches) const;
  void ForgetFetch(const PeerKey& peer);
  void EndReplaced(const FetchMsg& fetch);
  template <typename Matches>
  void ForgetParked(const Matches& matches);
  void UpdateGauges();

  const Config& config_;
  const std::shared_ptr<const KvPool> pool_;
  FetchSource* const source_;
  Arena* const arena_;
  Outbox* const outbox_;
  Metrics* const metrics_;

  absl::flat_hash_map<uint64_t, TransferPtr> transfers_;  // By transfer id.
  std::vector<TransferPtr> turn_;  // Active transfers, in the order of their turns.
  size_t next_turn_ = 0;
  std::vector<std::span<std::byte>> pieces_;  // Of the chunk that is being sent.
  std::list<Parked> parked_;
  absl::flat_hash_map<PeerKey, int64_t> fetches_of_peer_;  // Active and parked; none is 0.
  // Shared with sends under way, which may complete after their transfer and its peer are gone.
  const std::shared_ptr<absl::flat_hash_map<PeerKey, int64_t>> chunks_of_peer_;
};

}  // namespace kvferry
