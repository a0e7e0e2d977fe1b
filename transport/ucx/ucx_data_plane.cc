#include "transport/ucx/ucx_data_plane.h"

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "transport/messages.h"
#include "transport/ucx/ucx_endpoints.h"
#include "transport/ucx/ucx_handles.h"

namespace kvferry {
namespace {

constexpr unsigned kChunkAmId = 17;
constexpr unsigned kCreditAmId = 18;
// UCX's own headers around ours must fit into a segment together with a whole chunk: a chunk that
// needs two segments is copied once more to put it together.
constexpr int64_t kSegmentSlackBytes = 4096;

std::vector<UcxContext::Option> UcxOptions(const Config& config) {
  // Releases before 1.17 know a transport's own options without its name (uct_config_modify).
  const std::string tcp = UcxIsBefore(17) ? "" : "TCP_";
  const std::string segment_bytes = absl::StrCat(config.chunk_bytes + kSegmentSlackBytes);
  std::vector<UcxContext::Option> options = {
      {"TLS", config.ucx_tls},
      {tcp + "TX_SEG_SIZE", segment_bytes},
      {tcp + "RX_SEG_SIZE", segment_bytes},
      // By default connect(2) blocks: for two minutes where a firewall drops what goes to the peer.
      // And a peer that dies meanwhile leaves an endpoint that UCX frees twice (1.13 to 1.22).
      {tcp + "CONN_NB", "y"},
  };
  std::string device = config.net_device;
  if (device.empty() && IsLoopbackHost(config.listen_host)) device = "lo";
  if (!device.empty()) options.emplace_back("NET_DEVICES", device);
  return options;
}

// Of the releases that we tried with peers that die while they connect (docs/architecture.md,
// "Failures"), the first one that outlives all of them.
constexpr unsigned kOutlivesConnectingPeers = 22;

void WarnOfOldUcx() {
  static const bool warned = [] {
    if (!UcxIsBefore(kOutlivesConnectingPeers)) return false;
    Log().warn(
        "ucx: this is UCX {}, which can abort the process when a peer dies while it connects; "
        "use 1.22 or later (pip install libucx-cu13)",
        ucp_get_version_string());
    return true;
  }();
  static_cast<void>(warned);
}

class UcxDataPlane : public AddressedPlane {
 public:
  static absl::StatusOr<std::unique_ptr<AddressedPlane>> Create(const Config& config);

  const std::string& address() const override { return address_; }
  absl::StatusOr<LinkId> Connect(const std::string& worker_address) override;
  void Close(LinkId link) override { endpoints_.Close(link); }
  void SendPayload(LinkId link, const ChunkHeader& header, std::span<const std::byte> payload,
                   SendDone done) override;
  void SendCredit(LinkId link, const CreditHeader& header) override;
  bool Progress(DataEvents* events) override;
  int event_fd() const override { return event_fd_; }
  bool Arm() override { return ucp_worker_arm(worker_->get()) == UCS_OK; }

 private:
  // One active message under way: UCX reads the header until the send has completed.
  struct Send {
    union Header {
      ChunkHeader chunk;
      CreditHeader credit;
    } header{};
    SendDone done;
  };

  explicit UcxDataPlane(std::unique_ptr<UcxWorker> worker)
      : worker_(std::move(worker)), endpoints_(worker_->get()) {}
  absl::Status SetHandler(unsigned am_id, ucp_am_recv_callback_t handler);
  void Start(ucp_ep_h endpoint, unsigned am_id, size_t header_bytes,
             std::span<const std::byte> payload, std::unique_ptr<Send> send);

  static void OnSent(void* request, ucs_status_t status, void* user_data);
  static ucs_status_t OnChunkAm(void* arg, const void* header, size_t header_bytes, void* data,
                                size_t bytes, const ucp_am_recv_param_t* param);
  static ucs_status_t OnCreditAm(void* arg, const void* header, size_t header_bytes, void* data,
                                 size_t bytes, const ucp_am_recv_param_t* param);

  const std::unique_ptr<UcxWorker> worker_;
  std::string address_;
  int event_fd_ = -1;
  LinkId next_link_ = 1;
  DataEvents* events_ = nullptr;  // During Progress() only.
  UcxEndpoints endpoints_;
};

absl::StatusOr<std::unique_ptr<AddressedPlane>> UcxDataPlane::Create(const Config& config) {
  WarnOfOldUcx();
  KVFERRY_ASSIGN_OR_RETURN(
      std::shared_ptr<UcxContext> context,
      UcxContext::Create(UcxOptions(config), UCP_FEATURE_AM | UCP_FEATURE_WAKEUP));
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

absl::StatusOr<LinkId> UcxDataPlane::Connect(const std::string& worker_address) {
  KVFERRY_RETURN_IF_ERROR(endpoints_.Connect(next_link_, worker_address));
  return next_link_++;
}

void UcxDataPlane::SendPayload(LinkId link, const ChunkHeader& header,
                               std::span<const std::byte> payload, SendDone done) {
  const ucp_ep_h endpoint = endpoints_.Find(link);
  if (endpoint == nullptr) {
    done(absl::UnavailableError("ucx: the link is closed"));
    return;
  }
  auto send = std::make_unique<Send>();
  send->header.chunk = header;
  send->done = std::move(done);
  Start(endpoint, kChunkAmId, sizeof(ChunkHeader), payload, std::move(send));
}

void UcxDataPlane::SendCredit(LinkId link, const CreditHeader& header) {
  const ucp_ep_h endpoint = endpoints_.Find(link);
  if (endpoint == nullptr) return;  // Nobody is left to use it.
  auto send = std::make_unique<Send>();
  send->header.credit = header;
  Start(endpoint, kCreditAmId, sizeof(CreditHeader), {}, std::move(send));
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

ucs_status_t UcxDataPlane::OnChunkAm(void* arg, const void* header, size_t header_bytes, void* data,
                                     size_t bytes, const ucp_am_recv_param_t* param) {
  auto* plane = static_cast<UcxDataPlane*>(arg);
  ChunkHeader chunk;
  // A rendezvous would have us read from an address of the peer's: it is dropped, like any message
  // that is not of the documented form.
  const bool eager = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  if (!eager || header_bytes != sizeof(chunk) || plane->events_ == nullptr) return UCS_OK;
  std::memcpy(&chunk, header, sizeof(chunk));
  // UCX's own buffer: nobody else writes there during this call.
  const std::span<const std::byte> payload(static_cast<const std::byte*>(data), bytes);
  if ((chunk.flags & kChunkInPool) != 0) {
    plane->events_->OnChunkElsewhere(chunk, payload);
  } else if (chunk.bytes == bytes) {
    plane->events_->OnChunk(chunk, Pieces(&payload, 1), [] { return true; });
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
  endpoints_.Reap();
  for (const auto& [link, status] : endpoints_.TakeDown()) {
    busy = true;
    events->OnLinkDown(link, status);
  }
  events_ = nullptr;
  return busy;
}

}  // namespace

absl::StatusOr<std::unique_ptr<AddressedPlane>> MakeUcxDataPlane(const Config& config) {
  return UcxDataPlane::Create(config);
}

}  // namespace kvferry
