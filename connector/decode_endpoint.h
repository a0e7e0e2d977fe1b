#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/config.h"
#include "connector/prefill_endpoint.h"
#include "pool/kv_pool.h"
#include "transport/fetch_handle.h"
#include "transport/node.h"
#include "transport/ticket.h"

namespace kvferry {

// The side that fetches KV into its own pages, from any number of prefill processes. Thread-safe;
// no method blocks except the destructor, for a bounded time.
class DecodeEndpoint {
 public:
  static absl::StatusOr<std::unique_ptr<DecodeEndpoint>> Create(std::shared_ptr<const KvPool> pool,
                                                                const EndpointOptions& options);

  // Fetches pages [first_page, first_page + pages.size()) of the ticket into the local `pages`, in
  // order. The pages before first_page the caller has already (a cached prefix). timeout_ms 0: the
  // configured fetch_timeout_ms. The session with the ticket's host is opened on first use and
  // kept.
  //
  // Errors here mean that nothing was started: INVALID_ARGUMENT, OUT_OF_RANGE (pages of the ticket
  // or of the pool), PERMISSION_DENIED (host not in allowed_hosts). With no pages, the fetch only
  // tells the prefill side that its lease may end.
  absl::StatusOr<std::shared_ptr<FetchHandle>> Fetch(const Ticket& ticket, int64_t first_page,
                                                     std::span<const int64_t> pages,
                                                     int64_t timeout_ms);

  std::vector<std::pair<std::string, int64_t>> Metrics() const { return node_->Metrics(); }

 private:
  explicit DecodeEndpoint(const Config& config) : config_(config) {}

  const Config config_;
  std::unique_ptr<Node> node_;
};

}  // namespace kvferry
