#include "connector/prefill_endpoint.h"

#include <new>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/check_range.h"
#include "base/random.h"
#include "base/status.h"
#include "connector/receive_table.h"

namespace kvferry {
namespace {

// The lease of a push outlives its call by so much; the end of the call ends it.
constexpr int64_t kLeaseSlackMs = 10000;

// More tokens than a ticket can name would make one that nobody can read, and more layers than
// there are would be taken for all of them, computed or not.
absl::Status CheckNumbers(const PrefillEndpoint::Publication& publication, int64_t num_layers) {
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("publish", "num_tokens", publication.num_tokens, 0, PageRuns::kMaxPages));
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("publish", "ready_layers", publication.ready_layers, 0, num_layers));
  return CheckRange("publish", "lease_ms", publication.lease_ms, 0, INT64_MAX);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PrefillEndpoint>> PrefillEndpoint::Create(
    std::shared_ptr<const KvPool> pool, const EndpointOptions& options) {
  if (pool == nullptr) return absl::InvalidArgumentError("prefill endpoint: no pool");
  std::unique_ptr<PrefillEndpoint> endpoint(new PrefillEndpoint(pool, options));
  Node::Options node = NodeOptionsOf(options, std::move(pool));
  node.source = &endpoint->leases_;
  node.handler = &endpoint->keeper_;
  node.listen = true;
  KVFERRY_ASSIGN_OR_RETURN(endpoint->node_, Node::Start(std::move(node)));
  endpoint->keeper_.Attach(endpoint->node_.get());
  return endpoint;
}

absl::StatusOr<Ticket> PrefillEndpoint::Publish(const Publication& publication) {
  KVFERRY_ASSIGN_OR_RETURN(PageRuns pages, PageRuns::FromPages(publication.pages));
  KVFERRY_RETURN_IF_ERROR(pages.CheckWithin(pool_->num_pages()));
  if (pages.num_pages() == 0) return absl::InvalidArgumentError("publish: no pages");
  KVFERRY_RETURN_IF_ERROR(CheckNumbers(publication, pool_->layout().num_layers));
  const uint64_t lease_id = publication.lease_id != 0 ? publication.lease_id : RandomId();
  const int64_t lease_ms = publication.lease_ms != 0 ? publication.lease_ms : config_.lease_ms;
  Ticket ticket{address(), epoch(), lease_id, pages.num_pages(), publication.num_tokens};
  KVFERRY_RETURN_IF_ERROR(leases_.Publish(lease_id, std::move(pages), publication.ready_layers,
                                          DeadlineInMs(lease_ms)));
  try {
    node_->LeaseChanged(lease_id);
  } catch (const std::bad_alloc&) {
    // Its pages may be being read: then it is published, as its end will say too.
    if (leases_.Retract(lease_id)) throw;
  }
  return ticket;
}

absl::Status PrefillEndpoint::CheckPush(const ReceiveTicket& ticket,
                                        const Publication& publication) const {
  KVFERRY_RETURN_IF_ERROR(CheckHostAllowed(ticket.address, config_));
  if (publication.lease_ms != 0) {
    return absl::InvalidArgumentError("push: lease_ms is the push's own; leave it 0");
  }
  // Where the decode side's pages may be of another size it says whether the numbers agree.
  if (static_cast<int64_t>(publication.pages.size()) == ticket.num_pages || converts_pages_) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat("push: the ticket is of ", ticket.num_pages,
                                                    " pages, the push of ",
                                                    publication.pages.size()));
}

absl::StatusOr<std::shared_ptr<PushHandle>> PrefillEndpoint::Push(const ReceiveTicket& ticket,
                                                                  const Publication& publication,
                                                                  int64_t timeout_ms) {
  KVFERRY_RETURN_IF_ERROR(CheckPush(ticket, publication));
  KVFERRY_ASSIGN_OR_RETURN(const int64_t timeout, TimeoutMs("push", timeout_ms, config_));
  Publication leased = publication;
  leased.lease_ms = timeout + kLeaseSlackMs;
  KVFERRY_ASSIGN_OR_RETURN(const Ticket lease, Publish(leased));
  // Nobody has heard of it; unless its id is the caller's, who may have told others: then
  // TakeEnded() will say how it ended.
  absl::Cleanup not_pushed = [&] { leases_.Retract(lease.lease_id); };
  auto push = std::make_shared<PushHandle>(lease.lease_id);
  Node::CallRequest call;
  call.address = ticket.address;
  call.epoch = ticket.epoch;
  call.function = push_call::kPush;
  call.args.Set(push_call::kReceive, ticket.receive_id)
      .Set(push_call::kLease, lease.lease_id)
      .Set(push_call::kPages, static_cast<uint64_t>(lease.num_pages))
      .Set(push_call::kTokens, static_cast<uint64_t>(lease.num_tokens))
      .Set(push_call::kPage, static_cast<uint64_t>(pool_->layout().page_size));
  call.deadline = DeadlineInMs(timeout);
  const auto on_reply = [this, push,
                         address = ticket.address](const absl::StatusOr<Fields>& reply) {
    const absl::Status& status = reply.status();
    EndPush(push,
            absl::Status(status.code(), absl::StrCat("push to ", address, ": ", status.message())));
  };
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t id, node_->Call(std::move(call), on_reply));
  std::move(not_pushed).Cancel();
  push->SetCancel([node = node_.get(), id] { node->CancelCall(id); });
  return push;
}

void PrefillEndpoint::EndPush(const std::shared_ptr<PushHandle>& push, const absl::Status& answer) {
  const absl::StatusOr<bool> ended = leases_.Withdraw(push->lease_id());
  // A peer that says it has everything has said so by `done` before.
  const absl::Status status =
      ended.ok() && answer.ok()
          ? absl::InternalError("the decode side reports success, but has not fetched the pages")
          : answer;
  if (!ended.ok() || *ended) return push->Finish(status);
  // It is being read still: we gave up, not the peer.
  const absl::Status why =
      absl::AbortedError(absl::StrCat("the prefill side gave the push up: ", status.message()));
  node_->AbortLease(push->lease_id(), why, Node::Again::kNo,
                    [push, status] { push->Finish(status); });
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

absl::Status PrefillEndpoint::GiveUp(uint64_t lease_id) {
  KVFERRY_RETURN_IF_ERROR(leases_.GiveUp(lease_id));
  node_->LeaseChanged(lease_id);
  return absl::OkStatus();
}

absl::Status PrefillEndpoint::Release(uint64_t lease_id, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const bool ended, leases_.Withdraw(lease_id));
  if (ended) return absl::OkStatus();
  return node_->AbortLease(lease_id, absl::AbortedError("the prefill side took the request back"),
                           Node::Again::kNo, deadline);
}

absl::Status PrefillEndpoint::Unpublish(uint64_t lease_id, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const bool gone, leases_.Unpublish(lease_id));
  if (gone) return absl::OkStatus();
  const absl::Status why = absl::AbortedError("the prefill side took the request back for now");
  KVFERRY_RETURN_IF_ERROR(node_->AbortLease(lease_id, why, Node::Again::kYes, deadline));
  return leases_.CheckNotEnded(lease_id);  // Its transfer may have been through by then.
}

std::vector<std::pair<std::string, int64_t>> PrefillEndpoint::Metrics() const {
  auto metrics = node_->Metrics();
  metrics.emplace_back("leases_live", leases_.num_live());
  return metrics;
}

}  // namespace kvferry
