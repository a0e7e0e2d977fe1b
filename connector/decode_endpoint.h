#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/config.h"
#include "connector/endpoint_options.h"
#include "connector/receive_table.h"
#include "pool/kv_pool.h"
#include "transport/fetch_handle.h"
#include "transport/node.h"
#include "transport/ticket.h"

namespace kvferry {

// The side that fetches KV into its own pages, from any number of prefill processes, or has them
// push it there. Theirs may be of another size, order (NHD, HND) and dtype; all numbers of pages
// here are of this side's, but for what a ticket says. Thread-safe; no method blocks except the
// destructor, for a bounded time.
class DecodeEndpoint {
 public:
  // Listens on config.listen_host:listen_port if options.accept_pushes says so.
  static absl::StatusOr<std::unique_ptr<DecodeEndpoint>> Create(std::shared_ptr<const KvPool> pool,
                                                                const EndpointOptions& options);

  // What one fetch is of, where the other side has another number of tensor-parallel ranks:
  // SharesFor() (connector/tensor_parallel.h) says which.
  struct Part {
    HeadRange heads{};     // Of the model's. 0 from 0 on: all that the local pages hold.
    LeaseReader reader{};  // Which of those that fetch from this lease.
  };

  // Fetches pages [first_page, first_page + pages.size()) of the ticket into the local `pages`, in
  // order, counted in pages as this side has them: as many as the ticket's tokens make, or as it
  // has pages. What the last one holds behind the tokens of the request is undefined. The pages
  // before first_page the caller has already (a cached prefix). A local page that stands twice, as
  // padding may, holds any of what went there. The prefill side may not have published the request
  // yet: by a moment (its publish_grace_ms) or, if the ticket is one without an epoch, until the
  // fetch's deadline. timeout_ms 0: the configured fetch_timeout_ms. The session with the ticket's
  // host is opened on first use and kept. Pages on a device must not be in use from here on, in any
  // stream; they hold their bytes, for all streams, when the handle is done.
  //
  // Errors here mean that nothing was started: INVALID_ARGUMENT, OUT_OF_RANGE (pages of the ticket
  // or of the pool, heads of the pool), PERMISSION_DENIED (host not in allowed_hosts). With no
  // pages, the fetch only tells the prefill side that its lease may end, as far as this reader
  // goes.
  absl::StatusOr<std::shared_ptr<FetchHandle>> Fetch(const Ticket& ticket, int64_t first_page,
                                                     std::span<const int64_t> pages,
                                                     int64_t timeout_ms, const Part& part);
  absl::StatusOr<std::shared_ptr<FetchHandle>> Fetch(const Ticket& ticket, int64_t first_page,
                                                     std::span<const int64_t> pages,
                                                     int64_t timeout_ms) {
    return Fetch(ticket, first_page, pages, timeout_ms, Part());
  }

  // Asks the prefill sides to keep what these tickets stand for, for lease_ms of theirs from now
  // on, as long as the caller cannot fetch it yet. As far as they are reached: a fetch says what
  // has become of a lease. Tickets that cannot be, and of hosts that are not allowed, are passed
  // over.
  void Keep(absl::Span<const Ticket> tickets);

  struct Reception {
    int64_t first_page = 0;      // Pages of the request that the caller has already.
    std::vector<int64_t> pages;  // Where those from first_page on go, in order.
    // Of the request; a push of another number is refused. 0: any that makes as many pages.
    int64_t num_tokens = 0;
    int64_t timeout_ms = 0;  // Until all has arrived; 0: config.fetch_timeout_ms.
  };
  struct Receiving {
    ReceiveTicket ticket;  // For PrefillEndpoint::Push().
    std::shared_ptr<FetchHandle> handle;
  };
  // Registers pages for one push, by whoever is given the ticket, of a request of first_page +
  // pages.size() pages. The handle ends as one of Fetch() does: with the push's outcome; with
  // DEADLINE_EXCEEDED, also if nobody pushes; with ABORTED when the prefill side gives up, or
  // UNAVAILABLE if it does while a chunk is read in place.
  //
  // Errors here mean that nothing was registered: FAILED_PRECONDITION without accept_pushes,
  // INVALID_ARGUMENT, OUT_OF_RANGE.
  absl::StatusOr<Receiving> Receive(const Reception& reception);

  // "tcp://host:port" and epoch: what tickets of Receive() name. The address is empty without
  // accept_pushes.
  const std::string& address() const { return node_->listen_address(); }
  uint64_t epoch() const { return node_->epoch(); }

  std::vector<std::pair<std::string, int64_t>> Metrics() const;

 private:
  DecodeEndpoint(const Config& config, bool accept_pushes, int64_t page_size)
      : config_(config), accept_pushes_(accept_pushes), receives_(page_size) {}

  const Config config_;
  const bool accept_pushes_;
  ReceiveTable receives_;
  std::unique_ptr<Node> node_;  // Last: its thread uses receives_.
};

}  // namespace kvferry
