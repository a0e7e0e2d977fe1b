#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/config.h"
#include "transport/byte_ranges.h"
#include "transport/fetch_handle.h"
#include "transport/metrics.h"
#include "transport/outbox.h"
#include "transport/piece_copy.h"
#include "transport/stream_plan.h"
#include "transport/ticket.h"

namespace kvferry {

// The receiving half of the packed path: asks for streams and scatters their chunks into the pool.
//
// A fetch is    waiting --session ready--> requested --all bytes--> (gone: OK)
//                  |                          |
//                  '--------------------------'-- refuse, abort, peer gone, deadline, cancel,
//                                                 bad chunk --> (gone: that error)
//
// and a requested one whose peer falls silent before a whole layer has come is taken out, to wait
// for another session under a new transfer id (TakeUnread).
//
// A chunk is scattered only while its fetch is here, so a fetch that has ended is never written
// for. Progress thread only.
class Receiver {
 public:
  struct Fetch {
    uint64_t id = 0;  // For the caller, who cancels by it.
    std::shared_ptr<FetchHandle> handle;
    Ticket ticket;
    PageRuns positions;
    StreamPlan plan;
    Deadline deadline;
    Deadline created;
    PeerKey peer{};
    bool redial = true;         // Whether the ticket's address leads to the peer again.
    uint64_t transfer_id = id;  // On the wire; another one each time it is begun.
    uint64_t replaces = 0;      // The transfer id it had before.
    bool requested = false;
    Deadline requested_at{};
    int64_t credited_bytes = 0;
    ByteRanges arrived{};
  };

  // All pointers outlive the receiver.
  Receiver(const Config& config, ThreadPool* copy_threads, Outbox* outbox, Metrics* metrics);

  // Takes a fetch for a session with its peer; the request leaves with the next OnPeerReady.
  void Add(Fetch&& fetch);
  // The session is up: requests all that waits for it.
  void OnPeerReady(const PeerKey& peer, uint64_t epoch, LinkId link);
  void OnPeerGone(const PeerKey& peer, const absl::Status& status);
  // Takes the peer's fetches of which no layer is done, so that their caller may have read nothing
  // yet: ready to be added again for another session. Chunks of the old one are dropped from now
  // on.
  std::vector<Fetch> TakeUnread(const PeerKey& peer);
  void OnRefuse(const PeerKey& peer, const RefuseMsg& refuse);
  void OnAbort(const PeerKey& peer, const AbortMsg& abort);
  void OnChunk(const ChunkHeader& header, Pieces payload, DataEvents::Intact intact);
  // The caller gives up. No-op for a fetch that has ended.
  void Cancel(uint64_t id, const absl::Status& status);
  void CancelAll(const absl::Status& status);

  // Ends what is overdue; returns when to be called again at the latest.
  Deadline Tick(Deadline now);

 private:
  void Request(Fetch& fetch, uint64_t epoch);
  // OK: scattered. Else what is wrong with the chunk.
  absl::Status Accept(Fetch& fetch, const ChunkHeader& header, Pieces payload,
                      DataEvents::Intact intact);
  absl::Status CheckChunk(const Fetch& fetch, const ChunkHeader& header, Pieces payload);
  void Credit(Fetch& fetch);
  void End(uint64_t transfer_id, const absl::Status& status);
  template <typename Matches>
  void CancelWhere(const Matches& matches, const absl::Status& status);
  // Transfer ids.
  template <typename Matches>
  std::vector<uint64_t> IdsWhere(const Matches& matches) const;

  const Config& config_;
  Outbox* const outbox_;
  Metrics* const metrics_;
  PieceCopy copy_;
  absl::flat_hash_map<uint64_t, Fetch> fetches_;  // By transfer id.
  absl::flat_hash_map<PeerKey, LinkId> links_;    // Of the sessions that are up.
};

}  // namespace kvferry
