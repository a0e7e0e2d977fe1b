#include "connector/endpoint_options.h"

#include <utility>

#include "absl/status/status.h"
#include "base/check_range.h"
#include "base/status.h"

namespace kvferry {

Node::Options NodeOptionsOf(const EndpointOptions& options, std::shared_ptr<const KvPool> pool) {
  Node::Options node;
  node.config = options.config;
  node.model = options.model;
  node.name = options.name;
  node.heads = options.heads;
  node.pool = std::move(pool);
  node.converts_pages = options.converts_pages;
  node.casts_values = true;
  node.scales = options.scales;
  return node;
}

absl::StatusOr<int64_t> TimeoutMs(absl::string_view what, int64_t timeout_ms,
                                  const Config& config) {
  KVFERRY_RETURN_IF_ERROR(
      CheckRange(what, "timeout_ms", timeout_ms, 0, config.max_fetch_timeout_ms));
  return timeout_ms != 0 ? timeout_ms : config.fetch_timeout_ms;
}

}  // namespace kvferry
