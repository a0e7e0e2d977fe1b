#include "connector/prefill_endpoint.h"

#include "absl/strings/str_cat.h"
#include "base/random.h"
#include "base/status.h"

namespace kvferry {

absl::StatusOr<std::unique_ptr<PrefillEndpoint>> PrefillEndpoint::Create(
    std::shared_ptr<const KvPool> pool, const EndpointOptions& options) {
  if (pool == nullptr) return absl::InvalidArgumentError("prefill endpoint: no pool");
  std::unique_ptr<PrefillEndpoint> endpoint(new PrefillEndpoint(pool, options.config));
  Node::Options node;
  node.config = options.config;
  node.model = options.model;
  node.name = options.name;
  node.pool = std::move(pool);
  node.source = &endpoint->leases_;
  node.listen = true;
  KVFERRY_ASSIGN_OR_RETURN(endpoint->node_, Node::Start(std::move(node)));
  return endpoint;
}

absl::StatusOr<Ticket> PrefillEndpoint::Publish(const Publication& publication) {
  KVFERRY_ASSIGN_OR_RETURN(PageRuns pages, PageRuns::FromPages(publication.pages));
  KVFERRY_RETURN_IF_ERROR(pages.CheckWithin(pool_->num_pages()));
  if (pages.num_pages() == 0) return absl::InvalidArgumentError("publish: no pages");
  if (publication.num_tokens < 0 || publication.lease_ms < 0) {
    return absl::InvalidArgumentError("publish: num_tokens and lease_ms must not be negative");
  }
  const uint64_t lease_id = publication.lease_id != 0 ? publication.lease_id : RandomId();
  const int64_t lease_ms = publication.lease_ms != 0 ? publication.lease_ms : config_.lease_ms;
  const int64_t num_pages = pages.num_pages();
  KVFERRY_RETURN_IF_ERROR(leases_.Publish(lease_id, std::move(pages), publication.ready_layers,
                                          DeadlineInMs(lease_ms)));
  node_->LeaseChanged(lease_id);
  return Ticket{address(), epoch(), lease_id, num_pages, publication.num_tokens};
}

absl::Status PrefillEndpoint::LayerReady(uint64_t lease_id, int64_t layer) {
  if (layer < 0 || layer >= pool_->layout().num_layers) {
    return absl::OutOfRangeError(absl::StrCat("layer ", layer, " of ", pool_->layout().num_layers));
  }
  KVFERRY_RETURN_IF_ERROR(leases_.SetReadyLayers(lease_id, layer + 1));
  node_->LeaseChanged(lease_id);
  return absl::OkStatus();
}

absl::Status PrefillEndpoint::AllLayersReady(uint64_t lease_id) {
  return LayerReady(lease_id, pool_->layout().num_layers - 1);
}

absl::Status PrefillEndpoint::Release(uint64_t lease_id, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const bool ended, leases_.Withdraw(lease_id));
  if (ended) return absl::OkStatus();
  return node_->AbortLease(lease_id, absl::AbortedError("the prefill side took the request back"),
                           deadline);
}

std::vector<std::pair<std::string, int64_t>> PrefillEndpoint::Metrics() const {
  auto metrics = node_->Metrics();
  metrics.emplace_back("leases_live", leases_.num_live());
  return metrics;
}

}  // namespace kvferry
