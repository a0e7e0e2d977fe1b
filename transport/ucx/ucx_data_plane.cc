#include "transport/ucx/ucx_data_plane.h"

#include <cstring>
#include <list>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "transport/messages.h"
#include "transport/ucx/ucx_handles.h"

namespace kvferry {
namespace {

constexpr unsigned kChunkAmId = 17;
constexpr unsigned kCreditAmId = 18;
// UCX's own headers around ours must fit into a segment together with a whole chunk: a chunk that
// needs two segments is copied once more to put it together.
constexpr int64_t kSegmentSlackBytes = 4096;
constexpr int64_t kCloseTimeoutMs = 2000;

std::vector<UcxContext::Option> UcxOptions(const Config& config) {
  // Releases before 1.17 know a transport's own options without its name (uct_config_modify).
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  const std::string tcp = major == 1 && minor < 17 ? "" : "TCP_";
  const std::string segment_bytes = absl::StrCat(config.chunk_bytes + kSegmentSlackBytes);
  std::vector<UcxContext::Option> options = {
      {"TLS", config.ucx_tls},
      {tcp + "TX_SEG_SIZE", segment_bytes},
      {tcp + "RX_SEG_SIZE", segment_bytes},
  };
  std::string device = config.net_device;
  if (device.empty() && IsLoopbackHost(config.listen_host)) device = "lo";
  if (!device.empty()) options.emplace_back("NET_DEVICES", device);
  return options;
}

class UcxDataPlane : public DataPlane {
 public:
  static absl::StatusOr<std::unique_ptr<DataPlane>> Create(const Config& config);
  ~UcxDataPlane() override;

  const std::string& address() const override { return address_; }
  absl::StatusOr<LinkId> Connect(const std::string& worker_address) override;
  void Close(LinkId link) override;
  void SendChunk(LinkId link, const ChunkHeader& header, std::span<const std::byte> payload,
                 SendDone done) override;
  void SendCredit(LinkId link, const CreditHeader& header) override;
  bool ReadsPool(LinkId /*link*/) const override { return false; }
  bool Progress(DataEvents* events) override;
  int event_fd() const override { return event_fd_; }
  bool Arm() override { return ucp_worker_arm(worker_->get()) == UCS_OK; }

 private:
  // An endpoint. UCX may call its error handler until its close request has completed, so the
  // handler's argument, this struct, lives until then.
  struct Link {
    UcxDataPlane* plane;
    LinkId id;
    ucp_ep_h endpoint = nullptr;
    void* close_request = nullptr;  // Set from Close() on.
  };
  // One active message under way: UCX reads the header until the send has completed.
  struct Send {
    union Header {
      ChunkHeader chunk;
      CreditHeader credit;
    } header{};
    SendDone done;
  };

  explicit UcxDataPlane(std::unique_ptr<UcxWorker> worker) : worker_(std::move(worker)) {}
  absl::Status SetHandler(unsigned am_id, ucp_am_recv_callback_t handler);
  void Start(ucp_ep_h endpoint, unsigned am_id, size_t header_bytes,
             std::span<const std::byte> payload, std::unique_ptr<Send> send);
  void ReapClosed();

  static void OnError(void* arg, ucp_ep_h endpoint, ucs_status_t status);
  static void OnSent(void* request, ucs_status_t status, void* user_data);
  static ucs_status_t OnChunkAm(void* arg, const void* header, size_t header_bytes, void* data,
                                size_t bytes, const ucp_am_recv_param_t* param);
  static ucs_status_t OnCreditAm(void* arg, const void* header, size_t header_bytes, void* data,
                                 size_t bytes, const ucp_am_recv_param_t* param);

  const std::unique_ptr<UcxWorker> worker_;
  std::string address_;
  int event_fd_ = -1;
  LinkId next_link_ = 1;
  absl::flat_hash_map<LinkId, std::unique_ptr<Link>> links_;
  std::list<std::unique_ptr<Link>> closing_;
  std::vector<std::pair<LinkId, absl::Status>> down_;  // Reported at the end of Progress().
  DataEvents* events_ = nullptr;                       // During Progress() only.
};

absl::StatusOr<std::unique_ptr<DataPlane>> UcxDataPlane::Create(const Config& config) {
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<UcxContext> context,
                           UcxContext::Create(UcxOptions(config)));
  KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<UcxWorker> worker,
                           UcxWorker::Create(std::move(context)));

  std::unique_ptr<UcxDataPlane> plane(new UcxDataPlane(std::move(worker)));
  KVFERRY_ASSIGN_OR_RETURN(plane->address_, plane->worker_->Address());
  KVFERRY_ASSIGN_OR_RETURN(plane->event_fd_, plane->worker_->EventFd());
  if (plane->address_.size() > kMaxWorkerAddressBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "ucx: the worker's address has ", plane->address_.size(), " bytes, limit ",
        kMaxWorkerAddressBytes, "; name fewer interfaces in net_device or transports in ucx_tls"));
  }
  KVFERRY_RETURN_IF_ERROR(plane->SetHandler(kChunkAmId, &OnChunkAm));
  KVFERRY_RETURN_IF_ERROR(plane->SetHandler(kCreditAmId, &OnCreditAm));
  return plane;
}

absl::Status UcxDataPlane::SetHandler(unsigned am_id, ucp_am_recv_callback_t handler) {
  ucp_am_handler_param_t param{};
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                     UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = am_id;
  param.flags = UCP_AM_FLAG_WHOLE_MSG;
  param.cb = handler;
  param.arg = this;
  return UcxStatus(ucp_worker_set_am_recv_handler(worker_->get(), &param), "cannot set a handler");
}

UcxDataPlane::~UcxDataPlane() {
  while (!links_.empty()) Close(links_.begin()->first);
  // Destroying a worker with a close under way is undefined; a dead peer must not hold us up
  // either.
  const Deadline deadline = DeadlineInMs(kCloseTimeoutMs);
  while (!closing_.empty() && Clock::now() < deadline) {
    ucp_worker_progress(worker_->get());
    ReapClosed();
  }
  if (!closing_.empty()) Log().error("ucx: {} links did not close in time", closing_.size());
}

absl::StatusOr<LinkId> UcxDataPlane::Connect(const std::string& worker_address) {
  // UCX parses the address without knowing its length, so it gets one that zeros follow.
  if (worker_address.empty() || worker_address.size() > kMaxWorkerAddressBytes) {
    return absl::InvalidArgumentError(absl::StrCat("ucx: a worker address of ",
                                                   worker_address.size(), " bytes, limit ",
                                                   kMaxWorkerAddressBytes));
  }
  std::vector<char> padded(2 * kMaxWorkerAddressBytes, 0);
  std::memcpy(padded.data(), worker_address.data(), worker_address.size());

  auto link = std::make_unique<Link>();
  link->plane = this;
  link->id = next_link_++;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(padded.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&OnError, link.get()};
  const ucs_status_t status = ucp_ep_create(worker_->get(), &params, &link->endpoint);
  if (status != UCS_OK) {
    return UcxStatus(status,
                     "cannot reach the peer's worker; do both sides name networks that see each "
                     "other in net_device?");
  }
  const LinkId id = link->id;
  links_.emplace(id, std::move(link));
  return id;
}

void UcxDataPlane::Close(LinkId id) {
  const auto found = links_.find(id);
  if (found == links_.end()) return;
  std::unique_ptr<Link> link = std::move(found->second);
  links_.erase(found);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  link->close_request = ucp_ep_close_nbx(link->endpoint, &param);
  if (UCS_PTR_IS_ERR(link->close_request)) {
    Log().warn("ucx: closing a link: {}", ucs_status_string(UCS_PTR_STATUS(link->close_request)));
  }
  if (UCS_PTR_IS_PTR(link->close_request)) closing_.push_back(std::move(link));
}

void UcxDataPlane::ReapClosed() {
  for (auto it = closing_.begin(); it != closing_.end();) {
    if (ucp_request_check_status((*it)->close_request) == UCS_INPROGRESS) {
      ++it;
    } else {
      ucp_request_free((*it)->close_request);
      it = closing_.erase(it);
    }
  }
}

void UcxDataPlane::SendChunk(LinkId link, const ChunkHeader& header,
                             std::span<const std::byte> payload, SendDone done) {
  const auto found = links_.find(link);
  if (found == links_.end()) {
    done(absl::UnavailableError("ucx: the link is closed"));
    return;
  }
  auto send = std::make_unique<Send>();
  send->header.chunk = header;
  send->done = std::move(done);
  Start(found->second->endpoint, kChunkAmId, sizeof(ChunkHeader), payload, std::move(send));
}

void UcxDataPlane::SendCredit(LinkId link, const CreditHeader& header) {
  const auto found = links_.find(link);
  if (found == links_.end()) return;  // Nobody is left to use it.
  auto send = std::make_unique<Send>();
  send->header.credit = header;
  Start(found->second->endpoint, kCreditAmId, sizeof(CreditHeader), {}, std::move(send));
}

void UcxDataPlane::Start(ucp_ep_h endpoint, unsigned am_id, size_t header_bytes,
                         std::span<const std::byte> payload, std::unique_ptr<Send> send) {
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &OnSent;
  param.user_data = send.get();
  Send* raw = send.release();  // OnSent takes it back.
  void* request = ucp_am_send_nbx(endpoint, am_id, &raw->header, header_bytes, payload.data(),
                                  payload.size(), &param);
  if (!UCS_PTR_IS_PTR(request)) OnSent(nullptr, UCS_PTR_RAW_STATUS(request), raw);
}

void UcxDataPlane::OnSent(void* request, ucs_status_t status, void* user_data) {
  const std::unique_ptr<Send> send(static_cast<Send*>(user_data));
  if (request != nullptr) ucp_request_free(request);
  if (send->done) send->done(UcxStatus(status, "sending a chunk"));
}

void UcxDataPlane::OnError(void* arg, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  const Link* link = static_cast<const Link*>(arg);
  if (link->close_request != nullptr) return;  // We are leaving anyway.
  // Reported later: closing an endpoint from inside its own error handler is not safe.
  link->plane->down_.emplace_back(link->id, UcxStatus(status, "the peer is gone"));
}

ucs_status_t UcxDataPlane::OnChunkAm(void* arg, const void* header, size_t header_bytes, void* data,
                                     size_t bytes, const ucp_am_recv_param_t* param) {
  auto* plane = static_cast<UcxDataPlane*>(arg);
  ChunkHeader chunk;
  // A rendezvous would have us read from an address of the peer's: it is dropped, like any message
  // that is not of the documented form.
  const bool eager = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  if (!eager || header_bytes != sizeof(chunk) || plane->events_ == nullptr) return UCS_OK;
  std::memcpy(&chunk, header, sizeof(chunk));
  if (chunk.bytes == bytes) {
    // UCX's own buffer: nobody else writes there during this call.
    const std::span<const std::byte> payload(static_cast<const std::byte*>(data), bytes);
    plane->events_->OnChunk(chunk, {&payload, 1}, [] { return true; });
  }
  return UCS_OK;
}

ucs_status_t UcxDataPlane::OnCreditAm(void* arg, const void* header, size_t header_bytes,
                                      void* /*data*/, size_t bytes,
                                      const ucp_am_recv_param_t* /*param*/) {
  auto* plane = static_cast<UcxDataPlane*>(arg);
  CreditHeader credit;
  if (header_bytes != sizeof(credit) || bytes != 0 || plane->events_ == nullptr) return UCS_OK;
  std::memcpy(&credit, header, sizeof(credit));
  plane->events_->OnCredit(credit);
  return UCS_OK;
}

bool UcxDataPlane::Progress(DataEvents* events) {
  events_ = events;
  bool busy = ucp_worker_progress(worker_->get()) != 0;
  if (!closing_.empty()) ReapClosed();
  if (!down_.empty()) {
    busy = true;
    for (const auto& [link, status] : std::exchange(down_, {})) events->OnLinkDown(link, status);
  }
  events_ = nullptr;
  return busy;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DataPlane>> MakeUcxDataPlane(const Config& config) {
  return UcxDataPlane::Create(config);
}

}  // namespace kvferry
