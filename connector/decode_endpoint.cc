#include "connector/decode_endpoint.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {

absl::StatusOr<std::unique_ptr<DecodeEndpoint>> DecodeEndpoint::Create(
    std::shared_ptr<const KvPool> pool, const EndpointOptions& options) {
  std::unique_ptr<DecodeEndpoint> endpoint(new DecodeEndpoint(options.config));
  Node::Options node;
  node.config = options.config;
  node.model = options.model;
  node.name = options.name;
  node.pool = std::move(pool);
  KVFERRY_ASSIGN_OR_RETURN(endpoint->node_, Node::Start(std::move(node)));
  return endpoint;
}

absl::StatusOr<std::shared_ptr<FetchHandle>> DecodeEndpoint::Fetch(const Ticket& ticket,
                                                                   int64_t first_page,
                                                                   std::span<const int64_t> pages,
                                                                   int64_t timeout_ms) {
  const int64_t timeout = timeout_ms != 0 ? timeout_ms : config_.fetch_timeout_ms;
  if (timeout < 0 || timeout > config_.max_fetch_timeout_ms) {
    return absl::InvalidArgumentError(absl::StrCat("fetch: timeout_ms is ", timeout_ms,
                                                   " but must lie in [0, ",
                                                   config_.max_fetch_timeout_ms, "]"));
  }
  Node::FetchRequest request;
  request.ticket = ticket;
  if (!pages.empty()) {
    const PageRun all{first_page, static_cast<int64_t>(pages.size())};
    KVFERRY_ASSIGN_OR_RETURN(request.positions, PageRuns::FromRuns({&all, 1}));
  }
  KVFERRY_ASSIGN_OR_RETURN(request.pages, PageRuns::FromPages(pages));
  request.deadline = DeadlineInMs(timeout);
  return node_->Fetch(std::move(request));
}

}  // namespace kvferry
