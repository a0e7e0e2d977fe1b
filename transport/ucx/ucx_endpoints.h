#pragma once

#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "transport/data_plane.h"
#include "transport/ucx/ucx_handles.h"

namespace kvferry {

// The endpoints of one worker, which outlives them. Not thread-safe.
class UcxEndpoints {
 public:
  explicit UcxEndpoints(ucp_worker_h worker) : worker_(worker) {}
  // Closes all and waits for them, for a bounded time: destroying a worker with a close under way
  // is undefined, and a dead peer must not hold us up either.
  ~UcxEndpoints();
  UcxEndpoints(const UcxEndpoints&) = delete;
  UcxEndpoints& operator=(const UcxEndpoints&) = delete;

  // `link` must be new.
  absl::Status Connect(LinkId link, const std::string& worker_address);
  // What is under way completes with an error, perhaps later.
  void Close(LinkId link);
  // Null when there is none.
  ucp_ep_h Find(LinkId link) const;
  // Frees what has closed meanwhile; to be called after each progress of the worker.
  void Reap();
  // Whose peers have gone since the last call; they are still to be closed.
  std::vector<std::pair<LinkId, absl::Status>> TakeDown() { return std::exchange(down_, {}); }

 private:
  // UCX may call the error handler until the close request has completed, so the handler's
  // argument, this struct, lives until then.
  struct Endpoint {
    UcxEndpoints* all;
    LinkId link;
    ucp_ep_h handle = nullptr;
    void* close_request = nullptr;  // Set from Close() on.
  };

  static void OnError(void* arg, ucp_ep_h handle, ucs_status_t status);

  const ucp_worker_h worker_;
  absl::flat_hash_map<LinkId, std::unique_ptr<Endpoint>> endpoints_;
  std::list<std::unique_ptr<Endpoint>> closing_;
  std::vector<std::pair<LinkId, absl::Status>> down_;
};

}  // namespace kvferry
