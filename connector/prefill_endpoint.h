#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/config.h"
#include "connector/endpoint_options.h"
#include "connector/lease_keeper.h"
#include "connector/lease_table.h"
#include "connector/push_handle.h"
#include "pool/kv_pool.h"
#include "transport/node.h"
#include "transport/ticket.h"

namespace kvferry {

// The side that computes KV and lets others fetch it, or pushes it to them. Serves any number of
// decode processes, whose pages may be of another size, order (NHD, HND) and dtype than these: each
// gets what its own hold (pool/page_cut.h, pool/value_format.h). All methods are thread-safe and
// none blocks, except Release, Unpublish and the destructor, for a bounded time.
class PrefillEndpoint {
 public:
  // Listens on config.listen_host:listen_port.
  static absl::StatusOr<std::unique_ptr<PrefillEndpoint>> Create(std::shared_ptr<const KvPool> pool,
                                                                 const EndpointOptions& options);

  // "tcp://host:port" and epoch: what tickets of this endpoint name.
  const std::string& address() const { return node_->listen_address(); }
  uint64_t epoch() const { return node_->epoch(); }

  struct Publication {
    std::vector<int64_t> pages;  // The request's pages, in order.
    // Of the request: more than the pages hold where they are those of a window, or of a part. It
    // goes into the ticket, and bounds nothing here. 0: not said.
    int64_t num_tokens = 0;
    uint64_t lease_id = 0;     // 0: a random one.
    int64_t ready_layers = 0;  // Layers [0, n) are final already.
    // 0: config.lease_ms. A decode side that has to wait before it fetches may ask for more time
    // (DecodeEndpoint::Keep), config.lease_ms each time and config.max_fetch_timeout_ms in all.
    int64_t lease_ms = 0;
  };
  // Offers a request. From here on until the lease has ended (TakeEnded), the pages must keep their
  // bytes. INVALID_ARGUMENT without pages, for negative numbers, more ready_layers than there are
  // layers or more tokens than a ticket can name (2^30), OUT_OF_RANGE for a page that is not in the
  // pool, ALREADY_EXISTS for a lease id that was used before or given up, RESOURCE_EXHAUSTED at
  // max_leases.
  absl::StatusOr<Ticket> Publish(const Publication& publication);

  // Publishes a request, for the pages that a decode process has registered (its ticket, of
  // DecodeEndpoint::Receive), and tells that process to come and get it. It does so at once: each
  // layer moves as it becomes ready (LayerReady with the handle's lease_id()). timeout_ms 0: the
  // configured fetch_timeout_ms. The session with the ticket's host is opened on first use and
  // kept.
  //
  // The handle ends within the timeout: OK, all bytes are there; NOT_FOUND, the process at that
  // address does not know the receive, or has given the session up; FAILED_PRECONDITION, the
  // receive has ended, is being pushed to already, or is of another number of pages or tokens;
  // ABORTED, released; CANCELLED, here or there; RESOURCE_EXHAUSTED, a limit is reached: max_peers
  // here or there, max_fetches_per_peer here or max_calls_per_peer there; UNAVAILABLE, the peer is
  // gone; DEADLINE_EXCEEDED. Where the peer has not said so itself, all may have arrived
  // nevertheless.
  //
  // Errors here mean that nothing was started: those of Publish, PERMISSION_DENIED (host not in
  // allowed_hosts), FAILED_PRECONDITION (the ticket is of another number of pages, and they are of
  // no order that another size could be made of), INVALID_ARGUMENT (also for a lease_ms: the lease
  // lives as long as the push).
  absl::StatusOr<std::shared_ptr<PushHandle>> Push(const ReceiveTicket& ticket,
                                                   const Publication& publication,
                                                   int64_t timeout_ms);

  // Layer `layer` and all before it are final; a fetch may be waiting for them. On a device the
  // work that computes them has ended: nothing else orders a transfer behind it. NOT_FOUND for an
  // unknown lease, FAILED_PRECONDITION for one that has ended or will not be published.
  absl::Status LayerReady(uint64_t lease_id, int64_t layer);
  absl::Status AllLayersReady(uint64_t lease_id);

  // A request that was announced, to a decode side that fetches it by a ticket without an epoch,
  // will not be published: such a fetch fails now and not at its deadline. ALREADY_EXISTS: it was
  // published; Release() it.
  absl::Status GiveUp(uint64_t lease_id);

  // Those of these leases, published or not, that a decode process has asked for, or has said to
  // need nothing of: it has room for them. Remembered of the last 65,536 that were asked for.
  std::vector<uint64_t> AskedFor(absl::Span<const uint64_t> lease_ids) const {
    return leases_.AskedFor(lease_ids);
  }

  // Takes a request back. OK: the lease has ended and none of its pages is read any more.
  // DEADLINE_EXCEEDED: not yet. Else as of LayerReady(): it had ended before, or never was one.
  absl::Status Release(uint64_t lease_id, Deadline deadline);

  // Takes a request back that will be published again under the same lease id, as an engine has to
  // that preempts it. OK: none of its pages is read any more, and it is as if it had not been
  // published: TakeEnded() does not report it. Fetches by tickets without an epoch wait for it, and
  // then go on behind what they have, so that its pages have to be as many and to hold the same;
  // GiveUp() ends them. Other fetches fail. Errors as of Release(), FAILED_PRECONDITION also if it
  // ended meanwhile.
  absl::Status Unpublish(uint64_t lease_id, Deadline deadline);

  // Leases that ended since the last call: their pages are the caller's again. Each is reported
  // once.
  std::vector<EndedLease> TakeEnded() { return leases_.TakeEnded(); }
  int64_t num_live_leases() const { return leases_.num_live(); }

  std::vector<std::pair<std::string, int64_t>> Metrics() const;

 private:
  PrefillEndpoint(std::shared_ptr<const KvPool> pool, const EndpointOptions& options)
      : config_(options.config),
        pool_(std::move(pool)),
        converts_pages_(options.converts_pages && OrderOf(pool_->layout()) != ValueOrder::kOther),
        leases_(options.config),
        keeper_(&leases_, options.config.lease_ms) {}
  absl::Status CheckPush(const ReceiveTicket& ticket, const Publication& publication) const;
  // The decode side has answered, or will not.
  void EndPush(const std::shared_ptr<PushHandle>& push, const absl::Status& answer);

  const Config config_;
  const std::shared_ptr<const KvPool> pool_;
  const bool converts_pages_;  // To some other size, at least.
  LeaseTable leases_;
  LeaseKeeper keeper_;
  std::unique_ptr<Node> node_;  // Last: its thread uses leases_ and keeper_.
};

}  // namespace kvferry
