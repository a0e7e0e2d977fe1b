#pragma once

// The two programs. What they say to each other on the ticket connection, one line each:
//
//   decode                          prefill
//   kvferry two_node 1              -> kvferry two_node 1
//   next                            -> ticket TICKET SALT RUNS, or at the end: end CPU_SECONDS
//   failed: WHY
//
// and with --push, instead of a ticket,
//
//   next                            -> register PAGES
//   receive TICKET                  -> pushed SALT RUNS
//
// SALT is that of the request's pattern, RUNS are its pages on the prefill side. "next" also says
// that the request before arrived intact.

#include "absl/status/status.h"
#include "examples/two_node/options.h"

namespace kvferry::examples {

inline constexpr char kGreeting[] = "kvferry two_node 1";

// Serves options.requests requests to one decode side. OK: all have got there.
absl::Status RunPrefill(const Options& options);

// Fetches all requests of the prefill side. OK: all of them arrived intact.
absl::Status RunDecode(const Options& options);

}  // namespace kvferry::examples
