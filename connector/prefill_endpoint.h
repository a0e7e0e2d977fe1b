#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/config.h"
#include "connector/lease_table.h"
#include "pool/kv_pool.h"
#include "pool/page_runs.h"
#include "transport/node.h"
#include "transport/ticket.h"

namespace kvferry {

struct EndpointOptions {
  Config config;
  std::string model;  // What the KV belongs to; both sides must name the same.
  std::string name;   // For the peer's logs.
};

// The side that computes KV and lets others fetch it. Serves any number of decode processes. All
// methods are thread-safe and none blocks, except Release and the destructor, for a bounded time.
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
    int64_t num_tokens = 0;
    uint64_t lease_id = 0;     // 0: a random one.
    int64_t ready_layers = 0;  // Layers [0, n) are final already.
    int64_t lease_ms = 0;      // 0: config.lease_ms.
  };
  // Offers a request. From here on until the lease has ended (TakeEnded), the pages must keep their
  // bytes. OUT_OF_RANGE for a page that is not in the pool, ALREADY_EXISTS, RESOURCE_EXHAUSTED.
  absl::StatusOr<Ticket> Publish(const Publication& publication);

  // Layer `layer` and all before it are final; a fetch may be waiting for them. NOT_FOUND for an
  // unknown lease, FAILED_PRECONDITION for one that has ended.
  absl::Status LayerReady(uint64_t lease_id, int64_t layer);
  absl::Status AllLayersReady(uint64_t lease_id);

  // Takes a request back. OK: the lease has ended and none of its pages is read any more.
  // DEADLINE_EXCEEDED: not yet. FAILED_PRECONDITION: it had ended before.
  absl::Status Release(uint64_t lease_id, Deadline deadline);

  // Leases that ended since the last call: their pages are the caller's again. Each is reported
  // once.
  std::vector<EndedLease> TakeEnded() { return leases_.TakeEnded(); }
  int64_t num_live_leases() const { return leases_.num_live(); }

  std::vector<std::pair<std::string, int64_t>> Metrics() const;

 private:
  PrefillEndpoint(std::shared_ptr<const KvPool> pool, const Config& config)
      : config_(config), pool_(std::move(pool)), leases_(config) {}

  const Config config_;
  const std::shared_ptr<const KvPool> pool_;
  LeaseTable leases_;
  std::unique_ptr<Node> node_;  // Last: its thread uses leases_.
};

}  // namespace kvferry
