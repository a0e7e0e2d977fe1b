#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/config.h"
#include "transport/fields.h"
#include "transport/metrics.h"
#include "transport/outbox.h"
#include "transport/waiting_line.h"

namespace kvferry {

// Names a call that is being served: who asks, and the id it gave the call.
struct CallKey {
  PeerKey peer;
  uint64_t id = 0;

  bool operator==(const CallKey&) const = default;
  bool operator<(const CallKey& other) const {
    return std::tie(peer, id) < std::tie(other.peer, other.id);
  }
};

// Whether a call ended with its session, or before it had one, and how far it had come by then.
enum class CutOff {
  kNo,  // It did not: this is a reply, or a deadline or a cancel of what the peer has heard of.
  kNotAsked,  // The peer has not heard of the call.
  kAsked,     // The peer may have carried it out.
};
// Of a call's error. Its code says why the session ended, and may be one that replies have, too.
CutOff CutOffOf(const absl::Status& error);
absl::Status WithCutOff(absl::Status error, CutOff cut_off);

// Serves calls of peers. Called on the node's progress thread; must not block.
class CallHandler {
 public:
  virtual ~CallHandler() = default;
  // To be answered by Node::Reply, now or later, once.
  virtual void OnCall(const CallKey& call, const std::string& function, const Fields& args,
                      Deadline deadline) = 0;
  // Nobody waits for the reply any more: the caller has cancelled or is gone, or the deadline has
  // passed. Not called for a call that was replied to.
  virtual void OnCallDropped(const CallKey& call) = 0;
  // Whether calls of the function may wait before they are answered. Others do not count against
  // max_calls_per_peer: they end what waits, and must get through when the limit is reached, or the
  // handler keeps those of them that wait to the limit itself.
  virtual bool MayWait(const std::string&) const { return true; }
  // Does what is due; returns when to be called again at the latest.
  virtual Deadline Tick(Deadline /*now*/) { return Deadline::max(); }
};

// Questions to peers and their answers, for what is not a transfer: both halves of it.
//
//   a call is   waiting --session ready--> asked --reply--> (gone: the reply)
//                  |                         |
//                  '-------------------------'-- cancel, deadline, peer gone --> (gone: error)
//
// Progress thread only.
class Calls {
 public:
  using OnReply = std::function<void(absl::StatusOr<Fields>)>;
  struct Call {
    PeerKey peer{};
    std::string function;
    Fields args;
    Deadline deadline;
    OnReply on_reply;
    uint64_t epoch = 0;  // Of the process that it is for; 0: whichever is there.
    Deadline created = Clock::now();
    bool asked = false;
    int64_t turn = 0;  // Before later ones; kept when it is added again.
  };

  // All pointers outlive this; `handler` may be null: then nothing is served.
  Calls(const Config& config, CallHandler* handler, Outbox* outbox, Metrics* metrics)
      : config_(config), handler_(handler), outbox_(outbox), metrics_(metrics) {}

  // --- Asking ---
  // Takes a call for a session with its peer; it leaves with an OnPeerReady that finds room for it.
  void Add(uint64_t id, Call&& call);
  void OnPeerReady(const PeerKey& peer);
  // Takes the calls that the session's peer has not heard of and that were created after `since`,
  // in turn, ready to be added for another session.
  std::vector<std::pair<uint64_t, Call>> TakeUnasked(const PeerKey& peer, Deadline since);
  void OnReplyMsg(const PeerKey& peer, ReplyMsg reply);
  // No-op for a call that has ended.
  void Cancel(uint64_t id, const absl::Status& status);
  void CancelAll(const absl::Status& status);

  // --- Serving ---
  void OnCallMsg(const PeerKey& peer, const CallMsg& call);
  // The peer has cancelled, perhaps: the id may be a transfer's.
  void OnCancelMsg(const PeerKey& peer, uint64_t id);
  // No-op for a call that nobody waits for any more.
  void Reply(const CallKey& call, const absl::StatusOr<Fields>& reply);

  void OnPeerGone(const PeerKey& peer, const absl::Status& status);
  Deadline Tick(Deadline now);

 private:
  struct Served {
    Deadline deadline;
    bool may_wait;
    bool is_cut;  // By max_fetch_timeout_ms: its caller would wait longer.
  };

  void Ask(uint64_t id, Call& call);
  void End(uint64_t id, absl::StatusOr<Fields> reply);
  absl::Status CheckCall(const CallKey& key, bool may_wait) const;
  absl::Status OverLimit() const;
  absl::Status Overdue(const Call& call) const;
  // False when it is not served.
  bool StopServing(const CallKey& key);
  // Ends serving it, if it is served, and says so.
  void Drop(const CallKey& key);
  template <typename Matches>
  std::vector<uint64_t> IdsWhere(const Matches& matches) const;

  const Config& config_;
  CallHandler* const handler_;
  Outbox* const outbox_;
  Metrics* const metrics_;
  absl::flat_hash_map<uint64_t, Call> calls_;  // By id.
  WaitingLine unasked_;
  std::map<CallKey, Served> served_;  // Those of one peer lie side by side.
  // Each once, the nearest first, so that a tick costs the same however many wait.
  absl::btree_set<std::pair<Deadline, uint64_t>> call_deadlines_;
  absl::btree_set<std::pair<Deadline, CallKey>> served_deadlines_;
  absl::flat_hash_map<PeerKey, int64_t> waiting_of_peer_;  // Of the served ones that may wait.
};

}  // namespace kvferry
