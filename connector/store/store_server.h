#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "connector/endpoint_options.h"
#include "connector/store/host_store.h"
#include "connector/store/tiered_store.h"

namespace kvferry {

// Serves a HostStore, and what lies under it, to other processes (RemoteStore). Pages travel
// straight from and into the host store's pool. All work on stores is done by threads of the
// server's own, so that a slow disk holds up neither transfers nor heartbeats, nor what is in
// memory. A call waits 2 s at most for a tier that does not answer, however long its caller would,
// because others wait behind it; so may the destructor. Thread-safe.
class StoreServer {
 public:
  struct Options {
    EndpointOptions endpoint;  // config.listen_host and listen_port: where it listens.
    std::shared_ptr<HostStore> host;
    // Has `host` as its upper tier, and is served then. Null: `host` alone is.
    std::shared_ptr<TieredStore> tiered;
  };

  // INVALID_ARGUMENT without a host, or for a `tiered` over another one; errors of Node::Start().
  static absl::StatusOr<std::unique_ptr<StoreServer>> Create(Options options);

  const std::string& address() const;
  std::vector<std::pair<std::string, int64_t>> Metrics() const;

 private:
  class Service;
  explicit StoreServer(std::shared_ptr<Service> service) : service_(std::move(service)) {}

  const std::shared_ptr<Service> service_;
};

}  // namespace kvferry
