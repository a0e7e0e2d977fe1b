#include "connector/decode_endpoint.h"

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "connector/lease_keeper.h"

namespace kvferry {
namespace {

// The request's pages from first_page on, into `pages`.
absl::StatusOr<Node::FetchRequest> RequestFor(int64_t first_page, std::span<const int64_t> pages) {
  Node::FetchRequest request;
  if (!pages.empty()) {
    const PageRun all{first_page, static_cast<int64_t>(pages.size())};
    KVFERRY_ASSIGN_OR_RETURN(request.positions, PageRuns::FromRuns({&all, 1}));
  }
  KVFERRY_ASSIGN_OR_RETURN(request.pages, PageRuns::FromPages(pages));
  return request;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DecodeEndpoint>> DecodeEndpoint::Create(
    std::shared_ptr<const KvPool> pool, const EndpointOptions& options) {
  if (pool == nullptr) return absl::InvalidArgumentError("decode endpoint: no pool");
  std::unique_ptr<DecodeEndpoint> endpoint(
      new DecodeEndpoint(options.config, options.accept_pushes, pool->layout().page_size));
  Node::Options node = NodeOptionsOf(options, std::move(pool));
  if (options.accept_pushes) node.handler = &endpoint->receives_;
  node.listen = options.accept_pushes;
  KVFERRY_ASSIGN_OR_RETURN(endpoint->node_, Node::Start(std::move(node)));
  endpoint->receives_.Attach(endpoint->node_.get());
  return endpoint;
}

absl::StatusOr<std::shared_ptr<FetchHandle>> DecodeEndpoint::Fetch(const Ticket& ticket,
                                                                   int64_t first_page,
                                                                   std::span<const int64_t> pages,
                                                                   int64_t timeout_ms,
                                                                   const Part& part) {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t timeout, TimeoutMs("fetch", timeout_ms, config_));
  KVFERRY_ASSIGN_OR_RETURN(Node::FetchRequest request, RequestFor(first_page, pages));
  request.ticket = ticket;
  request.deadline = DeadlineInMs(timeout);
  request.heads = part.heads;
  request.reader = part.reader;
  return node_->Fetch(std::move(request));
}

void DecodeEndpoint::Keep(absl::Span<const Ticket> tickets) {
  // By address and epoch.
  std::map<std::pair<std::string, uint64_t>, std::vector<uint64_t>> leases;
  for (const Ticket& ticket : tickets) {
    leases[{ticket.address, ticket.epoch}].push_back(ticket.lease_id);
  }
  for (const auto& [peer, ids] : leases) {
    for (absl::Span<const uint64_t> left = ids; !left.empty();) {
      const auto some = left.subspan(0, keep_call::kMaxLeases);
      left.remove_prefix(some.size());
      Node::CallRequest call;
      std::tie(call.address, call.epoch) = peer;
      call.function = keep_call::kKeep;
      call.args = keep_call::ArgsFor(some);
      // Later it would be of no use.
      call.deadline = DeadlineInMs(config_.lease_ms);
      node_->Call(std::move(call), [](const absl::StatusOr<Fields>&) {}).IgnoreError();
    }
  }
}

absl::StatusOr<DecodeEndpoint::Receiving> DecodeEndpoint::Receive(const Reception& reception) {
  if (!accept_pushes_) {
    return absl::FailedPreconditionError(
        "receive: this endpoint was created without accept_pushes, and so does not listen");
  }
  const auto num_local = static_cast<int64_t>(reception.pages.size());
  if (reception.first_page < 0 || reception.first_page > PageRuns::kMaxPages - num_local ||
      reception.first_page + num_local == 0) {
    return absl::InvalidArgumentError(absl::StrCat("receive: first_page is ", reception.first_page,
                                                   " with ", num_local, " pages"));
  }
  if (reception.num_tokens < 0 || reception.num_tokens > PageRuns::kMaxPages) {
    return absl::InvalidArgumentError(
        absl::StrCat("receive: num_tokens is ", reception.num_tokens));
  }
  const int64_t num_pages = reception.first_page + num_local;
  KVFERRY_ASSIGN_OR_RETURN(const int64_t timeout,
                           TimeoutMs("receive", reception.timeout_ms, config_));
  KVFERRY_ASSIGN_OR_RETURN(Node::FetchRequest request,
                           RequestFor(reception.first_page, reception.pages));
  request.ticket.num_pages = num_pages;
  request.deadline = DeadlineInMs(timeout);
  // Before there is one: without memory for its ticket nobody could end it.
  Receiving receiving{{address(), epoch(), 0, num_pages, reception.num_tokens}, nullptr};
  KVFERRY_ASSIGN_OR_RETURN(ReceiveTable::Added added,
                           receives_.Add(std::move(request), num_pages, reception.num_tokens));
  receiving.ticket.receive_id = added.receive_id;
  receiving.handle = std::move(added.handle);
  return receiving;
}

std::vector<std::pair<std::string, int64_t>> DecodeEndpoint::Metrics() const {
  auto metrics = node_->Metrics();
  metrics.emplace_back("receives_waiting", receives_.num_waiting());
  return metrics;
}

}  // namespace kvferry
