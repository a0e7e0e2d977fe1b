#pragma once

// One small owner for each UCX handle. Parents outlive children: a worker holds its context.

#include <ucp/api/ucp.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvferry {

// "ucx: <what>: <UCX's words>" with the canonical code that fits.
absl::Status UcxStatus(ucs_status_t status, const std::string& what);

class UcxContext {
 public:
  using Option = std::pair<std::string, std::string>;
  // Options such as {"TLS", "tcp"}; environment variables UCX_* lose to them. INVALID_ARGUMENT
  // names the option that UCX rejects.
  static absl::StatusOr<std::shared_ptr<UcxContext>> Create(const std::vector<Option>& options);
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

}  // namespace kvferry
