#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/mutex.h"
#include "connector/recent_map.h"
#include "pool/page_runs.h"
#include "transport/fetch_source.h"

namespace kvferry {

// How a lease ended. Every published lease that is not unpublished ends in exactly one of these,
// and is reported once.
enum class LeaseOutcome { kFetched, kReleased, kExpired };
absl::string_view LeaseOutcomeName(LeaseOutcome outcome);

struct EndedLease {
  uint64_t lease_id = 0;
  LeaseOutcome outcome = LeaseOutcome::kReleased;
};

// The requests that a prefill side has published.
//
//   state          on                  becomes        because
//   idle           BeginTransfer       transferring   a fetch reads the pages: no expiry meanwhile
//   idle           expiry              ended expired  nobody came, nor said that they would (Keep)
//   unknown        NothingNeeded       unneeded       its reader was told the id early, or had all
//                                                     of it before it was unpublished
//   unneeded       Publish             ended fetched  -
//   unknown        GiveUp              ended released the same reader need not wait for it any more
//   idle           Withdraw,           ended          -
//                  NothingNeeded, Take
//   transferring   EndTransfer(OK)     ended fetched  -
//   transferring   EndTransfer(error)  idle           the decode side may come again, until expiry
//   transferring   OnReaderGone        idle           the same, until connect_timeout_ms from then
//                                                     at least
//   transferring   GoOn                idle           the same, whether all arrived or not
//   transferring   Withdraw            withdrawing    the pages are still being read
//   transferring   Take                taken          the same, perhaps: its reader has all of it
//                                                     and has said so over another session
//   withdrawing    EndTransfer(any)    ended          fetched if all arrived, else released
//   withdrawing    GoOn, OnReaderGone  ended released -
//   idle           Unpublish, Retract  unknown        it will be published again, or never was
//   transferring   Unpublish           unpublishing   the pages are still being read
//   unpublishing   EndTransfer(OK)     ended fetched  -
//   unpublishing   EndTransfer(error), unknown        -
//                  GoOn, OnReaderGone
//   unpublishing   Withdraw            withdrawing    -
//   taken          EndTransfer, GoOn,  ended fetched  -
//                  OnReaderGone
//
// BeginTransfer is refused when max_fetch_timeout_ms have passed since the expiry, whoever else
// reads then.
//
// A lease may have several readers (LeaseReader). It is transferring while any of them reads, a
// transfer's end moves it on when no other is under way, and EndTransfer(OK) and NothingNeeded
// count when the last reader has said so; what readers have said outlives Unpublish, and may come
// before Publish.
//
// Pages belong to the owner again when the lease has ended, not before. Thread-safe; never blocks.
class LeaseTable : public FetchSource {
 public:
  explicit LeaseTable(const Config& config) : config_(config) {}

  // ALREADY_EXISTS for a lease id that was used before or given up, RESOURCE_EXHAUSTED at
  // max_leases (live ones and ended ones not yet taken). However often the lease is kept, or loses
  // a reader, that makes it last until `last_expiry` at most; none: max_fetch_timeout_ms behind
  // `expiry`.
  absl::Status Publish(uint64_t lease_id, PageRuns pages, int64_t ready_layers, Deadline expiry,
                       std::shared_ptr<const std::vector<std::byte>> tail = nullptr,
                       std::optional<Deadline> last_expiry = std::nullopt);
  // Layers [0, layers) are final; never shrinks. NOT_FOUND for an unknown lease,
  // FAILED_PRECONDITION, saying why, for one that has ended or will not be published.
  absl::Status SetReadyLayers(uint64_t lease_id, int64_t layers);
  // The lease that somebody may be waiting for will not be published. ALREADY_EXISTS if it was.
  absl::Status GiveUp(uint64_t lease_id);
  // True: ended at once. False: a transfer has to end first. Errors as of SetReadyLayers().
  absl::StatusOr<bool> Withdraw(uint64_t lease_id);
  // The same for a lease that will be published again: it is forgotten then, unless it ends first.
  absl::StatusOr<bool> Unpublish(uint64_t lease_id);
  // As if it had not been published, for a lease whose owner found no memory to tell anybody of it.
  // Needs none. False, and nothing has happened, for one that somebody reads or that has ended.
  bool Retract(uint64_t lease_id);
  // Those of these leases, published or not, that somebody has come for, or has said to need
  // nothing of. As far back as that is remembered (RecentMap).
  std::vector<uint64_t> AskedFor(absl::Span<const uint64_t> lease_ids) const;
  // FAILED_PRECONDITION, saying how, for a lease that has ended, as far back as that is remembered.
  // Not for one that is not published, whatever its readers have said: TakeEnded() says nothing of
  // it.
  absl::Status CheckNotEnded(uint64_t lease_id) const;
  // The reader has all that it wanted. OK: the lease ends as fetched, now or with the transfer
  // under way, or did so before, however often this is asked. FAILED_PRECONDITION for one that
  // ended otherwise or is being withdrawn, NOT_FOUND for one that is unknown.
  absl::Status Take(uint64_t lease_id);
  // Instead of EndTransfer(), for an owner whose readers have to Take(): however the transfer
  // ended, the lease goes on, until `expiry` at least.
  void GoOn(uint64_t lease_id, LeaseReader reader, Deadline expiry);
  // Somebody will come for these, but not yet: those of them that are live last until `expiry` at
  // least, if that is not more than max_fetch_timeout_ms behind their first one. Returns how many
  // are live.
  int64_t Keep(absl::Span<const uint64_t> lease_ids, Deadline expiry);
  // Leases that ended since the last call, oldest first.
  std::vector<EndedLease> TakeEnded();
  int64_t num_live() const;

  // FetchSource.
  absl::StatusOr<LeasedMemory> BeginTransfer(uint64_t lease_id, LeaseReader reader) override;
  int64_t ReadyLayers(uint64_t lease_id) override;
  void EndTransfer(uint64_t lease_id, LeaseReader reader, const absl::Status& outcome) override;
  // The lease does not expire before its reader has had connect_timeout_ms to begin another session
  // in, but for a limit: max_fetch_timeout_ms behind its first expiry, when whoever began in time
  // has ended.
  void OnReaderGone(uint64_t lease_id, LeaseReader reader, const absl::Status& why) override;
  void NothingNeeded(uint64_t lease_id, LeaseReader reader) override;
  Deadline Tick(Deadline now) override;

 private:
  enum class State { kIdle, kTransferring, kWithdrawing, kUnpublishing, kTaken };
  // A bit each, by index.
  struct Readers {
    int64_t of = 0;  // 0: nobody has said.
    uint64_t reading = 0;
    uint64_t done = 0;

    bool all_done() const { return of > 0 && done == ~uint64_t{0} >> (LeaseReader::kMax - of); }
    // Whether those that have come before have said the same number.
    bool Agrees(LeaseReader reader) const { return (reading | done) == 0 || of == reader.of; }
    // It has all that it wants. No-op for one that reads, or does not agree.
    void NeedsNothing(LeaseReader reader);
  };
  struct Lease {
    LeasedMemory memory;
    int64_t ready_layers = 0;
    Deadline expiry;
    Deadline last_expiry;
    Readers readers{};
    State state = State::kIdle;
  };
  // What became of a lease, and whether it ever was one. An unneeded one counts as fetched.
  struct Fate {
    LeaseOutcome outcome = LeaseOutcome::kReleased;
    bool published = true;

    bool operator==(const Fate&) const = default;
  };
  static constexpr Fate kUnneeded{LeaseOutcome::kFetched, false};
  std::optional<Fate> FateOf(uint64_t lease_id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether it was ever published or given up here, as far back as that is remembered.
  bool IsOurs(uint64_t lease_id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteAskedFor(uint64_t lease_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NothingNeededOfUnpublished(uint64_t lease_id, LeaseReader reader)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Admit(uint64_t lease_id, Lease& lease, LeaseReader reader)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GoOn(uint64_t lease_id, Lease& lease, LeaseReader reader, Deadline expiry)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After the last transfer under way, unless the lease ends with its success.
  void EndOrIdle(uint64_t lease_id, Lease& lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // It will be published again.
  void Forget(uint64_t lease_id, const Lease& lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where it finds no memory nothing has changed.
  void End(uint64_t lease_id, LeaseOutcome outcome) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NotLive(uint64_t lease_id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Config config_;
  mutable Mutex mutex_;
  // Not Abseil's, which are broken by a growth for which there is no memory.
  std::unordered_map<uint64_t, Lease> leases_ ABSL_GUARDED_BY(mutex_);
  // No idle one expires before. There may be thousands, and Tick() is called often.
  Deadline none_expires_before_ ABSL_GUARDED_BY(mutex_) = Deadline::max();
  std::vector<EndedLease> ended_ ABSL_GUARDED_BY(mutex_);
  struct Nothing {};
  // Of leases that were published or given up here: to say what became of a ticket, or to answer
  // Take() again; who has come for them; and of those that are to be published again, the readers
  // that are done.
  RecentMap<Fate> fates_ ABSL_GUARDED_BY(mutex_);
  RecentMap<Nothing> asked_for_ ABSL_GUARDED_BY(mutex_);
  RecentMap<Readers> unpublished_ ABSL_GUARDED_BY(mutex_);
  // What peers say of all others. Apart from those: peers can invent as many ids as they like, and
  // what is ours would be forgotten for them.
  RecentMap<Nothing> unneeded_ ABSL_GUARDED_BY(mutex_);
  RecentMap<Nothing> asked_before_ ABSL_GUARDED_BY(mutex_);
  RecentMap<Readers> done_before_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
