#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
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
#include "transport/device_arena.h"
#include "transport/fetch_source.h"
#include "transport/gate.h"
#include "transport/guards.h"
#include "transport/head_share.h"
#include "transport/limited_line.h"
#include "transport/metrics.h"
#include "transport/outbox.h"
#include "transport/parked_fetches.h"
#include "transport/path_model.h"
#include "transport/pool_regions.h"
#include "transport/stream_plan.h"

namespace kvferry {

// What serves peers on this host.
struct MachineTraits {
  CopyCosts copies{};
  int64_t processors = 2;
};

// How many chunks of an arena each peer holds. Not thread-safe.
class ChunksOfPeers {
 public:
  int64_t Of(const PeerKey& peer) const {
    const auto found = held_.find(peer);
    return found == held_.end() ? 0 : found->second;
  }
  int64_t num_peers() const { return static_cast<int64_t>(held_.size()); }
  void Add(const PeerKey& peer) { ++held_[peer]; }
  void Remove(const PeerKey& peer) {
    const auto found = held_.find(peer);
    if (--found->second == 0) held_.erase(found);
  }

 private:
  absl::flat_hash_map<PeerKey, int64_t> held_;  // None is 0.
};

// Chunks that are on their way to peers, each one of the arena and perhaps one of the device's
// besides, and what is kept of them until they come back. Not thread-safe.
struct ChunksUnderWay {
  struct Chunk {
    int64_t chunk;
    int64_t device_chunk;  // -1: none.
  };
  // There is one of each that is wanted.
  Chunk Take(const PeerKey& peer, bool on_device, bool is_read_in_place);
  void GiveBack(const Chunk& taken, const PeerKey& peer);

  Arena* arena;
  DeviceArena* device_arena = nullptr;
  ChunksOfPeers of_peers{};
  ChunksOfPeers of_peers_on_device{};
  absl::flat_hash_map<int64_t, Deadline> read_since{};  // By chunk: what is read in place.
};

// The sending half of the packed path: answers fetches with chunks gathered from the pool.
//
// A transfer is    parked --publish--> active --done--> (gone: fetched)
//                     |                  |
//                     |                  '-- cancel, abort, peer gone, deadline
//                     '-- grace over             --> (gone: lease goes on)
//                         --> refused
//
// Progress thread only.
class Sender {
 public:
  // All pointers outlive the sender; `source` may be null: then every fetch is refused.
  Sender(const Config& config, std::shared_ptr<const KvPool> pool, FetchSource* source,
         Arena* arena, Outbox* outbox, Metrics* metrics, const MachineTraits& machine = {},
         HeadShare heads = {}, ValueFormat values = {});
  // Lets peers read from afar what the guards guard. They outlive the sender.
  void UseGuards(Guards* guards) { guards_ = guards; }

  void OnFetch(const PeerKey& peer, LinkId link, FetchMsg fetch);
  void OnDone(const PeerKey& peer, const DoneMsg& done);
  void OnCancel(const PeerKey& peer, const CancelMsg& cancel);
  void OnCredit(const CreditHeader& credit);
  void OnPeerGone(const PeerKey& peer, const absl::Status& status);
  // The lease has new layers, or has just been published.
  void OnLeaseChanged(uint64_t lease_id);
  // The owner takes the lease back: its transfers end, and no page of it is read after this
  // returns, but by a peer on this host that then finds out that what it read does not count.
  // `again`: it will be published again, under the same id.
  void AbortLease(uint64_t lease_id, const absl::Status& status, bool again = false);
  void AbortAll(const absl::Status& status);

  // Sends what is one turn of each transfer that may; true when it sent any.
  bool Pump();
  // Whether Pump() left out a chunk until others are read: some of their readers may be stuck, so
  // Tick() says when to look again. Or has ended a transfer, whose lease may have expired.
  bool wants_tick() const { return waits_for_readers_ || has_ended_some_; }
  const PathModel& paths() const { return paths_; }
  // What offsets of pieces count in.
  const PoolRegions& regions() const { return regions_; }
  // What peers on this host map of a pool on a device, and of the device's memory besides.
  struct OnDevice {
    bool pages = false;            // All of the pool.
    DeviceArena* arena = nullptr;  // Outlives the sends; null: there is none.
    uint64_t arena_at = 0;         // Where it begins in what offsets count in.
  };
  void UseOnDevice(const OnDevice& on_device) {
    on_device_ = on_device;
    under_way_->device_arena = on_device.arena;
  }
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
    absl::flat_hash_set<int64_t> read_in_place{};
    int64_t lent_chunks = 0;  // Sends of these have not completed yet.
    absl::Status failed{};    // A send went wrong; ended by the next Pump.
    // Lanes are inside while they gather; closed when the transfer has ended.
    std::shared_ptr<Gate> reading = std::make_shared<Gate>();
    PageWay way = PageWay::kArena;
    int64_t guard = -1;  // Of guards_, while the peer reads the pages from afar.
    // The way was chosen by what it takes, and nothing but copies has taken time so far.
    bool tells_costs = false;
    Deadline started_at = Clock::now();
  };
  using TransferPtr = std::shared_ptr<Transfer>;
  // A transfer that was ended with `again` when all of it had been sent.
  struct TakenBack {
    uint64_t transfer_id;
    PeerKey peer;
    uint64_t lease_id;
    LeaseReader reader;
    int64_t bytes;
  };

  // A reader that takes longer for a chunk is stuck, and does not hold up the others.
  static constexpr auto kReaderTurn = std::chrono::milliseconds(10);

  absl::Status CheckLimits(const PeerKey& peer, const FetchMsg& fetch) const;
  void Refuse(const PeerKey& peer, uint64_t transfer_id, const absl::Status& status);
  absl::StatusOr<StreamPlan> PlanFor(const FetchMsg& fetch, const LeasedMemory& leased) const;
  void Start(const PeerKey& peer, LinkId link, FetchMsg fetch, const LeasedMemory& leased);
  void RetryParked(ParkedFetch parked, Deadline now);
  // Of one that has waited for as long as it may.
  absl::Status NeverPublished(const FetchMsg& fetch, const absl::Status& unknown) const;
  absl::Status Overdue(const Transfer& transfer) const;
  // Both return true when they sent something: of a turn as much as may go,
  bool PumpOne(const TransferPtr& transfer);
  // or one chunk.
  bool SendNext(const TransferPtr& transfer);
  void ChooseWay(Transfer& transfer);
  void ChooseWayOfDevice(Transfer& transfer);
  void LearnCosts(const Transfer& transfer);
  // Of the next chunk: what is behind the pages goes through the arena in any case, and so does
  // what there is no room for on the device.
  PageWay NextWay(const Transfer& transfer) const;
  // Of the device's arena, for now.
  int64_t DeviceShare(const PeerKey& peer) const;
  // Whether the peer reads a chunk that goes this way on this host, in the pool's pages or in the
  // device's arena.
  static bool ReadInPlace(const Transfer& transfer, PageWay way);
  // What chooses its way and learns from it; null when there is no choice.
  PathModel* ModelOf(const Transfer& transfer);
  void TakeWay(Transfer& transfer, PageWay way, bool from_afar);
  // Whether as many chunks are being read in place, by all peers, as this machine has room for.
  bool ReadersAreBusy(Deadline now) const;
  bool Admits(const Transfer& transfer, PageWay way, int64_t bytes);
  // How much of the `left` bytes may be in the next chunk.
  int64_t NextBytes(const Transfer& transfer, PageWay way, int64_t left) const;
  // The same of one that is read where it lies.
  int64_t MaxBytesInPlace(const Transfer& transfer, int64_t left) const;
  // What a list of where bytes lie has room for, behind its head.
  int64_t MaxEntries() const;
  // The tensors that a chunk of the next `bytes`, or fewer, is named as; none: its pieces are
  // named.
  StreamTensors NextTensors(const Transfer& transfer, int64_t bytes) const;
  // Whether there is a chunk of the arena for the transfer, and where it needs one of the device's.
  bool HasRoom(const Transfer& transfer, PageWay way) const;
  void SendChunk(const TransferPtr& transfer, PageWay way, int64_t bytes);
  void SendLent(const TransferPtr& transfer, int64_t bytes);
  ChunkHeader HeaderOfNext(const Transfer& transfer, int64_t bytes, uint32_t flags) const;
  // Whether its pages are sent from where they lie.
  bool Lends(const Transfer& transfer) const;
  // What the next chunk of the stream is sent from, on any thread: straight from the pages,
  static LendChunk Lend(const TransferPtr& transfer, int64_t bytes);
  // or gathered in a chunk of the arena,
  FillChunk Gather(const TransferPtr& transfer, int64_t chunk) const;
  // or gathered in one of the device's, on this thread.
  FillChunk GatherOnDevice(const TransferPtr& transfer, int64_t chunk, int64_t device_chunk);
  // Where `bytes` of it lie, on this thread: as tensors, or piece by piece.
  FillChunk List(const TransferPtr& transfer, int64_t chunk, int64_t bytes);
  FillChunk ListPieces(const TransferPtr& transfer, int64_t chunk);
  FillChunk ListTensors(const TransferPtr& transfer, int64_t chunk, const StreamTensors& tensors);
  // One of these.
  FillChunk Fill(const TransferPtr& transfer, PageWay way, const ChunksUnderWay::Chunk& taken,
                 int64_t bytes);
  int64_t ReadyBytes(const StreamPlan& plan, uint64_t lease_id) const;
  // Ends one transfer, but for what its source is to hear of it.
  TransferPtr Stop(uint64_t transfer_id, const absl::Status& outcome);
  // Ends one transfer; `tell` also sends the peer an abort, and whether the lease comes again.
  void End(uint64_t transfer_id, const absl::Status& outcome, bool tell, bool again = false);
  template <typename Matches>
  std::vector<uint64_t> IdsWhere(const Matches& matches) const;
  void ForgetFetch(const PeerKey& peer);
  // Whether a later attempt has come before it, over another session.
  bool IsOutrun(const FetchMsg& fetch) const;
  void EndReplaced(const FetchMsg& fetch);
  void OnDoneAfterEnd(const PeerKey& peer, const DoneMsg& done);
  void ForgetParked(uint64_t transfer_id);
  void UpdateGauges();

  const Config& config_;
  const std::shared_ptr<const KvPool> pool_;
  const HeadShare heads_;     // What the pool holds.
  const ValueFormat values_;  // And what its bytes stand for.
  FetchSource* const source_;
  Arena* const arena_;
  Outbox* const outbox_;
  Metrics* const metrics_;
  Guards* guards_ = nullptr;
  const PoolRegions regions_;
  OnDevice on_device_{};
  const CopyCosts copies_;
  PathModel paths_;                                   // To peers on this host.
  absl::flat_hash_map<PeerKey, PathModel> paths_to_;  // To peers that read from afar.
  const size_t max_read_in_place_;

  absl::flat_hash_map<uint64_t, TransferPtr> transfers_;  // By transfer id.
  std::deque<TakenBack> taken_back_;                      // The last few.
  std::list<TransferPtr> turn_;  // Active transfers; whoever got something last is at the end.
  std::vector<std::span<std::byte>> pieces_;  // Of the chunk that is being sent.
  bool waits_for_readers_ = false;
  bool has_ended_some_ = false;
  LimitedLine refused_{LimitedLine::kSome}, ended_{LimitedLine::kSome};
  ParkedFetches parked_;
  absl::flat_hash_map<PeerKey, int64_t> fetches_of_peer_;  // Active and parked; none is 0.
  // Shared with sends, which may complete after their transfer, its peer and this object are gone,
  // but not after the arenas.
  const std::shared_ptr<ChunksUnderWay> under_way_;
};

}  // namespace kvferry
