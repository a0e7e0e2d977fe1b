#pragma once

// One side of a session, in a process of its own, that sessions_bench.cc drives (driver.h). Points
// in time are nanoseconds of Clock, which all processes of a host read alike. Besides the driver's
// commands:
//
//   prefill   publish COUNT RUNS LAYERS   the same pages so many times, of which LAYERS are final:
//                                         {"tickets": [TEXT, ...]}
//             layers EVERY_MS             makes the layers of the last of them final one by one,
//                                         the first after EVERY_MS: {"last": when}
//             ended COUNT                 waits until so many leases have ended as fetched
//   decode    fetch RUNS TICKET,...       the first endpoint fetches one after another into these
//                                         pages: {"seconds": [each], "end": when the last was done}
//             together WHEN TICKET,...    from then on each endpoint fetches a ticket of its own,
//                                         endpoint i of n pages into the pages i * n and on:
//                                         {"seconds": [each, from WHEN to done]}
//   both      metric NAME                 {"value": summed over the endpoints}

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/two_node/layout_flags.h"

namespace kvferry::bench {

struct PeerFlags {
  std::string role;
  examples::LayoutFlags layout;
  int64_t pool_pages = 0;
  int64_t endpoints = 1;  // Of a decode process, in one pool.
  std::vector<std::string> settings;

  void AddTo(CLI::App* app);
};

// Serves until stdin ends. The process's exit code.
absl::StatusOr<int> ServePeer(const PeerFlags& flags);

}  // namespace kvferry::bench
