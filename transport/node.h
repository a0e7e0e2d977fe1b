#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/config.h"
#include "pool/kv_pool.h"
#include "pool/page_runs.h"
#include "transport/calls.h"
#include "transport/fetch_handle.h"
#include "transport/fetch_source.h"
#include "transport/head_share.h"
#include "transport/stream_plan.h"
#include "transport/ticket.h"

namespace kvferry {

// One end of the transport: a progress thread with a control plane, a data plane, a sender and a
// receiver. The thread does all the work and sleeps when there is none; no call of the owner is
// needed for progress. All public methods are thread-safe.
class Node {
 public:
  struct Options {
    Config config;
    std::string model;  // Peers must name the same. At most 256 bytes.
    std::string name;   // For the peer's logs. At most 128 bytes.
    std::shared_ptr<const KvPool> pool;
    FetchSource* source =
        nullptr;  // What to answer fetches from; null: nothing. Outlives the node.
    CallHandler* handler = nullptr;  // What answers calls; null: nothing. Outlives the node.
    bool listen = false;
    HeadShare heads{};  // What the pool holds. Peers' shares may differ.
    // Peers' pages may be of another size and order. For owners who count in no pages but their
    // own: what one side's page is another's need not be.
    bool converts_pages = false;
    // Their values of other dtypes and scales. Not for owners who keep bytes for whoever asks.
    bool casts_values = false;
    // Of the pool's values, by KvLayout::buffer_index: what is stored stands for itself times this.
    // Empty: 1.
    std::vector<float> scales{};
  };

  // INVALID_ARGUMENT for bad options; UNAVAILABLE when the address is taken.
  static absl::StatusOr<std::unique_ptr<Node>> Start(Options options);
  // What Start() says of the config's key_file, for who has long to go until then.
  static absl::Status CheckKeyFile(const Config& config);
  // Tells the peers goodbye, ends all transfers and joins the thread, within bounded time.
  virtual ~Node() = default;

  virtual uint64_t epoch() const = 0;
  virtual const std::string& listen_address() const = 0;

  struct FetchRequest {
    Ticket ticket;
    PageRuns positions;  // Which pages of the ticket, counted in pages of the local pool's size.
    PageRuns pages;      // Where they go in the local pool; as many.
    Deadline deadline;
    // Empty: from the ticket's address. Else from the peer of a call that this node has served (its
    // lease; address and epoch of the ticket are ignored), over that peer's own session.
    PeerKey peer{};
    // Where the bytes behind the pages go; as many as the lease has, or none.
    StreamTail tail{};
    // Which of the model's heads to fetch, of those that both sides' pages hold; the others stay as
    // they are. 0 from 0 on: all that the local pages hold.
    HeadRange heads{};
    // Who else fetches from the lease, each of them once.
    LeaseReader reader{};
    // Called once, when the handle is done(), on the progress thread; must not block.
    std::function<void()> on_done{};
    // Not 0: names the fetch, which asks nobody until StartAwaited() says whose lease it is of (its
    // ticket's address, epoch and lease are ignored). Its deadline counts from now.
    uint64_t await_id = 0;
  };
  // Starts a fetch. INVALID_ARGUMENT, OUT_OF_RANGE or PERMISSION_DENIED for a request that cannot
  // work; everything later is the handle's status. With no pages at all the fetch just tells the
  // prefill side that its lease may end.
  virtual absl::StatusOr<std::shared_ptr<FetchHandle>> Fetch(FetchRequest request) = 0;

  // Lets the fetch of that await_id go on: from `lease_id` of the peer of a call that this node has
  // served, over that peer's own session. Once at most; no-op for a fetch that has ended.
  virtual void StartAwaited(uint64_t await_id, const PeerKey& peer, uint64_t lease_id) = 0;
  // Ends it with `why`, whether it was started or not; no-op for one that has ended.
  virtual void EndAwaited(uint64_t await_id, const absl::Status& why) = 0;

  struct CallRequest {
    std::string address;   // Of the peer, as in a ticket.
    std::string function;  // What to do; at most 32 bytes.
    Fields args;
    Deadline deadline;
    uint64_t epoch = 0;  // Of the process that is meant, where the address has several; 0: any.
  };
  // Asks a peer, opening a session where there is none. `on_reply` is called once, on the progress
  // thread, and must not block: with the reply, with the error that the peer gave, or with
  // DEADLINE_EXCEEDED, UNAVAILABLE (the peer is gone) or CANCELLED. Returns the call's id.
  // INVALID_ARGUMENT or PERMISSION_DENIED for a request that cannot work: nothing was started.
  virtual absl::StatusOr<uint64_t> Call(CallRequest request, Calls::OnReply on_reply) = 0;
  // Asks for the end: on_reply follows, with CANCELLED unless the call has ended before.
  virtual void CancelCall(uint64_t id) = 0;
  // Answers a call that the handler was given.
  virtual void Reply(const CallKey& call, absl::StatusOr<Fields> reply) = 0;

  // The source has published the lease, or made layers of it ready.
  virtual void LeaseChanged(uint64_t lease_id) = 0;
  // Whether a lease that is taken back will be published again, under the same id.
  enum class Again { kNo, kYes };
  // Ends the lease's transfers. OK: from now on none of its pages is read. DEADLINE_EXCEEDED: the
  // thread did not answer in time, and the pages are still in use.
  virtual absl::Status AbortLease(uint64_t lease_id, const absl::Status& why, Again again,
                                  Deadline deadline) = 0;
  // The same for who must not block: `then` is called on the progress thread, once none of the
  // lease's pages is read. Not called if the node is destroyed first.
  virtual void AbortLease(uint64_t lease_id, const absl::Status& why, Again again,
                          std::function<void()> then) = 0;

  // Names and values of all counters and gauges (transport/metrics.h).
  virtual std::vector<std::pair<std::string, int64_t>> Metrics() const = 0;
};

}  // namespace kvferry
