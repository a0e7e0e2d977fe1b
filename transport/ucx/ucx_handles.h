#pragma once

// One small owner for each UCX handle. Parents outlive children: a worker holds its context.

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvferry {

// "ucx: <what>: <UCX's words>" with the canonical code that fits.
absl::Status UcxStatus(ucs_status_t status, const std::string& what);

// Whether the UCX that is loaded is of a release before 1.`minor`.
bool UcxIsBefore(unsigned minor);

class UcxContext {
 public:
  using Option = std::pair<std::string, std::string>;
  // Options such as {"TLS", "tcp"}; environment variables UCX_* lose to them. INVALID_ARGUMENT
  // names the option that UCX rejects. `features` are UCP_FEATURE_*.
  static absl::StatusOr<std::shared_ptr<UcxContext>> Create(const std::vector<Option>& options,
                                                            uint64_t features);
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;

  ucp_context_h get() const { return context_; }

 private:
  explicit UcxContext(ucp_context_h context) : context_(context) {}
  const ucp_context_h context_;
};

class UcxWorker {
 public:
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(std::shared_ptr<UcxContext> context);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  ucp_worker_h get() const { return worker_; }
  absl::StatusOr<std::string> Address() const;
  absl::StatusOr<int> EventFd() const;

 private:
  UcxWorker(std::shared_ptr<UcxContext> context, ucp_worker_h worker)
      : context_(std::move(context)), worker_(worker) {}
  const std::shared_ptr<UcxContext> context_;
  const ucp_worker_h worker_;
};

// Memory that UCX may read and write. Its owner keeps it alive.
class UcxMemory {
 public:
  static absl::StatusOr<UcxMemory> Map(std::shared_ptr<UcxContext> context,
                                       std::span<const std::byte> memory);
  ~UcxMemory();
  UcxMemory(UcxMemory&& other) noexcept
      : context_(std::move(other.context_)), handle_(std::exchange(other.handle_, nullptr)) {}
  UcxMemory& operator=(UcxMemory&&) = delete;

  ucp_mem_h get() const { return handle_; }
  // What a peer needs to read it.
  absl::StatusOr<std::string> PackKey() const;

 private:
  UcxMemory(std::shared_ptr<UcxContext> context, ucp_mem_h handle)
      : context_(std::move(context)), handle_(handle) {}
  std::shared_ptr<UcxContext> context_;
  ucp_mem_h handle_;
};

struct UcxKeyDestroy {
  void operator()(ucp_rkey_h key) const { ucp_rkey_destroy(key); }
};
// The key to a peer's memory; goes before the worker does, and after all reads with it.
using UcxKey = std::unique_ptr<std::remove_pointer_t<ucp_rkey_h>, UcxKeyDestroy>;
// `packed` is parsed by code that trusts it.
absl::StatusOr<UcxKey> UnpackKey(ucp_ep_h endpoint, const std::string& packed);

// UCX parses addresses and keys without knowing their length, so it gets them with zeros behind.
std::vector<char> PaddedForUcx(const std::string& bytes);

}  // namespace kvferry
