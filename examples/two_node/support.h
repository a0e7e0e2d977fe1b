#pragma once

// Small things that both roles, and the benchmarks, need.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/config.h"
#include "pool/page_runs.h"

namespace kvferry::examples {

// The defaults, then KVFERRY_* variables, then "KEY=VALUE" settings of Config fields.
// INVALID_ARGUMENT lists the keys when one is unknown. Changes the environment: call it before any
// thread starts.
absl::StatusOr<Config> ConfigFromSettings(const std::vector<std::string>& settings);

// User and system time of this process, all threads.
double CpuSeconds();

// "8+4,17+1": page 8 to 11, then page 17. What ParseRuns reads.
std::string FormatRuns(const PageRuns& pages);
absl::StatusOr<PageRuns> ParseRuns(absl::string_view text);

// How the pages of a request lie in the pool: one run, runs of 8, or each on its own.
enum class Fragmentation { kSeq, kRuns8, kRand };

// `count` different pages of [0, pool_pages), the same for the same seed. INVALID_ARGUMENT when
// there are not enough.
absl::StatusOr<PageRuns> ChoosePages(Fragmentation fragmentation, int64_t pool_pages, int64_t count,
                                     uint64_t seed);

// "HOST:PORT" or "[IPV6]:PORT".
struct HostPort {
  std::string host;
  int64_t port = 0;
};
absl::StatusOr<HostPort> ParseHostPort(absl::string_view text);

}  // namespace kvferry::examples
