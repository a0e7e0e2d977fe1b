#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/mutex.h"
#include "transport/fetch_handle.h"
#include "transport/landing.h"
#include "transport/landing_chunk.h"
#include "transport/metrics.h"
#include "transport/outbox.h"
#include "transport/piece_copy.h"
#include "transport/stream_plan.h"
#include "transport/ticket.h"
#include "transport/waiting_line.h"

namespace kvferry {

// The receiving half of the packed path: asks for streams and scatters their chunks into the pool.
//
// A fetch is    waiting --session ready--> requested --all bytes--> (gone: OK)
//                  |                          |
//                  '--------------------------'-- refuse, abort, peer gone, deadline, cancel,
//                                                 bad chunk --> (gone: that error)
//
// and a requested one whose peer falls silent is taken out, to wait for another session under a new
// transfer id (TakeUnfinished). One whose reads fail is requested again, under a new transfer id
// too (RequestAgain), and so is one that waits for leases to be published, when the sender takes
// its lease back to publish it again. All go on behind what has arrived in one piece, which is not
// written again: layers of it may have been read. One that somebody else is to name the peer of
// waits without one (Assign).
//
// A chunk is scattered only while its fetch is here, so a fetch that has ended is never written
// for. Progress thread only, but for Land() and Begin().
class Receiver {
 public:
  struct Fetch {
    uint64_t id = 0;  // For the caller, who cancels by it.
    std::shared_ptr<FetchHandle> handle;
    Ticket ticket;
    PageRuns positions;
    std::shared_ptr<const StreamPlan> plan;
    Deadline deadline;
    Deadline created;
    PeerKey peer{};
    bool redial = true;  // Whether the ticket's address leads to the peer again.
    bool early = false;  // The lease may be published as late as the deadline.
    HeadRange heads{};   // Of the model's, that the plan is of.
    LeaseReader reader{};
    PageForm form{};  // Of the plan's pages; {}: nobody but who has the same can serve it.
    uint64_t transfer_id = id;  // On the wire; another one each time it is begun.
    int64_t turn = 0;           // To be requested; kept each time it is begun.
    uint64_t known_as = 0;      // To its session's peer: the last one that was requested there.
    uint64_t replaces = 0;    // The last of the transfer ids before under which anything has come.
    int64_t attempt = 0;      // To request it.
    int64_t from_bytes = 0;   // The stream up to here has arrived.
    int futile_requests = 0;  // One after another that brought nothing.
    bool packed = false;      // Nothing is to be read from afar for it any more.
    bool may_be_listed = false;  // Its sender was told that this side can read from afar.
    Deadline requested_at{};
    int64_t credited_bytes = 0;
    std::shared_ptr<Landing> landing{};  // From the request on.

    bool requested() const { return landing != nullptr; }
    int64_t bytes_arrived() const { return requested() ? landing->num_bytes() : from_bytes; }
  };

  // All pointers outlive the receiver.
  // `values`: what it asks for; {}: whatever the sender has.
  Receiver(const Config& config, ThreadPool* copy_threads, Outbox* outbox, Metrics* metrics,
           ValueFormat values = {});

  // Takes a fetch for a session with its peer; the request leaves with the next OnPeerReady.
  void Add(Fetch&& fetch);
  // Gives a fetch that was added without a peer one, and the lease to ask it for. Null for a fetch
  // that has ended or has a peer; else good until the next call of any method.
  Fetch* Assign(uint64_t id, const PeerKey& peer, uint64_t lease_id);
  // The session is up and has room: requests what waits for it, in turn.
  void OnPeerReady(const PeerKey& peer, uint64_t epoch, LinkId link);
  void OnPeerGone(const PeerKey& peer, const absl::Status& status);
  // Takes the fetches that can go on over another session with the peer and were created after
  // `since`, ready to be added for it. Whole ones are ended; the others are to be ended by
  // OnPeerGone.
  std::vector<Fetch> TakeUnfinished(const PeerKey& peer, Deadline since = Deadline::min());
  // Lets a requested fetch go on under another id, on its session, or end when it is whole. False,
  // and nothing has happened, when it cannot.
  bool RequestAgain(uint64_t transfer_id);
  void OnRefuse(const PeerKey& peer, const RefuseMsg& refuse);
  void OnAbort(const PeerKey& peer, const AbortMsg& abort);
  void OnChunk(const ChunkHeader& header, const Payload& payload, ChunkTaker::Intact intact);
  // A chunk that is still to be read, out of the memory of its fetch's sender.
  void OnChunkElsewhere(const ChunkHeader& header, std::span<const std::byte> list);
  void OnReadFailed(const ChunkHeader& header, const absl::Status& status);
  // OnChunk in two steps: on the thread of any lane, which has a `copy` of its own, and then on the
  // progress thread, with what the first one returned. NOT_FOUND: of no live fetch.
  absl::Status Land(const ChunkHeader& header, const Payload& payload, ChunkTaker::Intact intact,
                    PieceCopy* copy);
  void OnLanded(const ChunkHeader& header, const absl::Status& status);
  // A chunk that comes part by part: on this thread, or on that of a lane, which has a `copy` of
  // its own and whose `landed` leads to OnLanded() here.
  std::unique_ptr<ChunkSink> OnChunkBegins(const ChunkHeader& header);
  std::unique_ptr<ChunkSink> Begin(const ChunkHeader& header, PieceCopy* copy,
                                   LandingChunk::Landed landed);
  // The caller gives up. No-op for a fetch that has ended.
  void Cancel(uint64_t id, const absl::Status& status);
  void CancelAll(const absl::Status& status);

  // Ends what is overdue; returns when to be called again at the latest.
  Deadline Tick(Deadline now);

 private:
  struct Ready {
    LinkId link;
    uint64_t epoch;
  };

  // Of the peer, if its session is up, as far as there is room.
  void RequestWaiting(const PeerKey& peer);
  void Request(Fetch& fetch, const Ready& session);
  // Null: of no live fetch.
  std::shared_ptr<Landing> FindLanding(uint64_t transfer_id);
  void OpenLanding(Fetch& fetch);
  void CloseLanding(const Fetch& fetch);
  // Out of what is here.
  Fetch Remove(uint64_t transfer_id);
  // Removes it, and gives it another transfer id; chunks of the old one are dropped from now on.
  // None of a fetch that turns out to be whole: it has ended.
  std::optional<Fetch> TakeOut(uint64_t transfer_id);
  bool EndIfWhole(const Fetch& fetch);
  // Before it ends otherwise or goes on: lanes may have landed all of it, which OnLanded() is still
  // to hear.
  bool CloseAndEndIfWhole(const Fetch& fetch);
  void Credit(Fetch& fetch);
  // An error ends it, unless it is whole; GiveUp() tells the sender.
  void Fail(uint64_t transfer_id, const absl::Status& status);
  void GiveUp(uint64_t transfer_id, const absl::Status& status);
  void End(uint64_t transfer_id, const absl::Status& status);
  std::string Overdue(const Fetch& fetch) const;
  // Transfer ids.
  template <typename Matches>
  std::vector<uint64_t> IdsWhere(const Matches& matches) const;

  const Config& config_;
  const ValueFormat values_;
  Outbox* const outbox_;
  Metrics* const metrics_;
  PieceCopy copy_;
  absl::flat_hash_map<uint64_t, Fetch> fetches_;              // By transfer id.
  absl::flat_hash_map<uint64_t, uint64_t> transfer_ids_;      // Of all, by the caller's.
  absl::btree_set<std::pair<Deadline, uint64_t>> deadlines_;  // Of all; the caller's ids.
  WaitingLine waiting_;                                       // All that is not requested.
  absl::flat_hash_map<PeerKey, Ready> ready_;                 // Sessions that are up.

  Mutex landings_mutex_;
  // Of the fetches that are requested, by transfer id.
  absl::flat_hash_map<uint64_t, std::shared_ptr<Landing>> landings_
      ABSL_GUARDED_BY(landings_mutex_);
};

}  // namespace kvferry
