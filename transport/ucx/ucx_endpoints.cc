#include "transport/ucx/ucx_endpoints.h"

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "transport/messages.h"

namespace kvferry {
namespace {

constexpr int64_t kCloseTimeoutMs = 2000;

}  // namespace

UcxEndpoints::~UcxEndpoints() {
  while (!endpoints_.empty()) Close(endpoints_.begin()->first);
  const Deadline deadline = DeadlineInMs(kCloseTimeoutMs);
  while (!closing_.empty() && Clock::now() < deadline) {
    ucp_worker_progress(worker_);
    Reap();
  }
  if (!closing_.empty()) Log().error("ucx: {} links did not close in time", closing_.size());
}

absl::Status UcxEndpoints::Connect(LinkId link, const std::string& worker_address) {
  if (worker_address.empty() || worker_address.size() > kMaxWorkerAddressBytes) {
    return absl::InvalidArgumentError(absl::StrCat("ucx: a worker address of ",
                                                   worker_address.size(), " bytes, limit ",
                                                   kMaxWorkerAddressBytes));
  }
  const std::vector<char> padded = PaddedForUcx(worker_address);
  auto endpoint = std::make_unique<Endpoint>(Endpoint{this, link});
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(padded.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&OnError, endpoint.get()};
  const ucs_status_t status = ucp_ep_create(worker_, &params, &endpoint->handle);
  if (status != UCS_OK) {
    return UcxStatus(status,
                     "cannot reach the peer's worker; do both sides name networks that see each "
                     "other in net_device?");
  }
  endpoints_.emplace(link, std::move(endpoint));
  return absl::OkStatus();
}

ucp_ep_h UcxEndpoints::Find(LinkId link) const {
  const auto found = endpoints_.find(link);
  return found == endpoints_.end() ? nullptr : found->second->handle;
}

void UcxEndpoints::Close(LinkId link) {
  auto node = endpoints_.extract(link);
  if (node.empty()) return;
  std::unique_ptr<Endpoint> endpoint = std::move(node.mapped());
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  endpoint->close_request = ucp_ep_close_nbx(endpoint->handle, &param);
  if (UCS_PTR_IS_ERR(endpoint->close_request)) {
    Log().warn("ucx: closing a link: {}",
               ucs_status_string(UCS_PTR_STATUS(endpoint->close_request)));
  }
  if (UCS_PTR_IS_PTR(endpoint->close_request)) closing_.push_back(std::move(endpoint));
}

void UcxEndpoints::Reap() {
  for (auto it = closing_.begin(); it != closing_.end();) {
    if (ucp_request_check_status((*it)->close_request) == UCS_INPROGRESS) {
      ++it;
    } else {
      ucp_request_free((*it)->close_request);
      it = closing_.erase(it);
    }
  }
}

void UcxEndpoints::OnError(void* arg, ucp_ep_h /*handle*/, ucs_status_t status) {
  const Endpoint* endpoint = static_cast<const Endpoint*>(arg);
  if (endpoint->close_request != nullptr) return;  // We are leaving anyway.
  // Reported later: closing an endpoint from inside its own error handler is not safe.
  endpoint->all->down_.emplace_back(endpoint->link, UcxStatus(status, "the peer is gone"));
}

}  // namespace kvferry
