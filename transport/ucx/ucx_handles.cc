#include "transport/ucx/ucx_handles.h"

#include <ucs/debug/log_def.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"

namespace kvferry {
namespace {

LogLevel LevelOf(ucs_log_level_t level) {
  if (level <= UCS_LOG_LEVEL_ERROR) return LogLevel::kError;
  if (level == UCS_LOG_LEVEL_WARN) return LogLevel::kWarn;
  if (level <= UCS_LOG_LEVEL_INFO) return LogLevel::kInfo;
  return level == UCS_LOG_LEVEL_DEBUG ? LogLevel::kDebug : LogLevel::kTrace;
}

ucs_log_func_rc_t ToOurLog(const char* file, unsigned line, const char* /*function*/,
                           ucs_log_level_t level, const ucs_log_component_config_t* /*component*/,
                           const char* format, va_list arguments) {
  char message[1024];
  std::vsnprintf(message, sizeof(message), format, arguments);
  const std::string_view path = file;
  Log().log(LevelOf(level), "ucx: {} ({}:{})", message, path.substr(path.rfind('/') + 1), line);
  return UCS_LOG_FUNC_RC_STOP;
}

// By itself UCX logs to standard output, which belongs to the application. Whoever names a file for
// it in UCX_LOG_FILE gets it there.
void TakeOverTheLog() {
  static const bool taken = [] {
    if (std::getenv("UCX_LOG_FILE") != nullptr) return false;
    ucs_log_push_handler(&ToOurLog);
    return true;
  }();
  static_cast<void>(taken);
}

}  // namespace

absl::Status UcxStatus(ucs_status_t status, const std::string& what) {
  const std::string text = absl::StrCat("ucx: ", what, ": ", ucs_status_string(status));
  switch (status) {
    case UCS_OK:
      return absl::OkStatus();
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_INVALID_ADDR:
    case UCS_ERR_NO_ELEM:
      return absl::InvalidArgumentError(text);
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_EXCEEDS_LIMIT:
      return absl::ResourceExhaustedError(text);
    case UCS_ERR_CANCELED:
      return absl::CancelledError(text);
    default:
      return absl::UnavailableError(text);
  }
}

bool UcxIsBefore(unsigned minor) {
  unsigned major = 0;
  unsigned own_minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &own_minor, &release);
  return major == 1 && own_minor < minor;
}

absl::StatusOr<std::shared_ptr<UcxContext>> UcxContext::Create(const std::vector<Option>& options,
                                                               uint64_t features) {
  TakeOverTheLog();
  ucp_config_t* read = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &read);
  if (status != UCS_OK) return UcxStatus(status, "cannot read UCX's configuration");
  const std::unique_ptr<ucp_config_t, void (*)(ucp_config_t*)> config(read, ucp_config_release);
  for (const auto& [name, value] : options) {
    status = ucp_config_modify(config.get(), name.c_str(), value.c_str());
    if (status != UCS_OK) {
      return absl::InvalidArgumentError(
          absl::StrCat("ucx: UCX_", name, "=", value, " is rejected: ", ucs_status_string(status)));
    }
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = features;
  params.name = "kvferry";
  ucp_context_h context = nullptr;
  status = ucp_init(&params, config.get(), &context);
  if (status != UCS_OK) {
    return UcxStatus(status,
                     "cannot start; is net_device (UCX_NET_DEVICES) an interface of this host "
                     "and ucx_tls or direct_tls (UCX_TLS) a transport of this UCX?");
  }
  return std::shared_ptr<UcxContext>(new UcxContext(context));
}

UcxContext::~UcxContext() { ucp_cleanup(context_); }

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Create(std::shared_ptr<UcxContext> context) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  // Made on the caller's thread, used on the progress thread, never on two at once.
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucp_worker_h worker = nullptr;
  const ucs_status_t status = ucp_worker_create(context->get(), &params, &worker);
  if (status != UCS_OK) {
    return UcxStatus(status, "cannot make a worker; is net_device an interface that is up?");
  }
  return std::unique_ptr<UcxWorker>(new UcxWorker(std::move(context), worker));
}

UcxWorker::~UcxWorker() { ucp_worker_destroy(worker_); }

absl::StatusOr<std::string> UcxWorker::Address() const {
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  const ucs_status_t status = ucp_worker_get_address(worker_, &address, &bytes);
  if (status != UCS_OK) return UcxStatus(status, "cannot get the worker's address");
  std::string copy(reinterpret_cast<const char*>(address), bytes);
  ucp_worker_release_address(worker_, address);
  return copy;
}

absl::StatusOr<int> UcxWorker::EventFd() const {
  int fd = -1;
  const ucs_status_t status = ucp_worker_get_efd(worker_, &fd);
  if (status != UCS_OK) return UcxStatus(status, "the transport has no event fd to sleep on");
  return fd;
}

absl::StatusOr<UcxMemory> UcxMemory::Map(std::shared_ptr<UcxContext> context,
                                         std::span<const std::byte> memory) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = const_cast<std::byte*>(memory.data());
  params.length = memory.size();
  ucp_mem_h handle = nullptr;
  const ucs_status_t status = ucp_mem_map(context->get(), &params, &handle);
  if (status != UCS_OK) {
    return UcxStatus(status, absl::StrCat("cannot register ", memory.size(),
                                          " bytes; does the limit on locked memory allow it?"));
  }
  return UcxMemory(std::move(context), handle);
}

UcxMemory::~UcxMemory() {
  if (handle_ != nullptr) ucp_mem_unmap(context_->get(), handle_);
}

absl::StatusOr<std::string> UcxMemory::PackKey() const {
  void* buffer = nullptr;
  size_t bytes = 0;
  const ucs_status_t status = ucp_rkey_pack(context_->get(), handle_, &buffer, &bytes);
  if (status != UCS_OK) return UcxStatus(status, "cannot pack a key");
  std::string key(static_cast<const char*>(buffer), bytes);
  ucp_rkey_buffer_release(buffer);
  return key;
}

absl::StatusOr<UcxKey> UnpackKey(ucp_ep_h endpoint, const std::string& packed) {
  ucp_rkey_h key = nullptr;
  const ucs_status_t status = ucp_ep_rkey_unpack(endpoint, PaddedForUcx(packed).data(), &key);
  if (status != UCS_OK) return UcxStatus(status, "cannot use the peer's key");
  return UcxKey(key);
}

std::vector<char> PaddedForUcx(const std::string& bytes) {
  constexpr size_t kPadding = 4096;
  std::vector<char> padded(bytes.begin(), bytes.end());
  padded.resize(bytes.size() + kPadding, 0);
  return padded;
}

}  // namespace kvferry
