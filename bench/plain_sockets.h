#pragma once

// What the kernel lets one thread send to many, without any protocol: the pages of a pool over
// plain sockets, to each in turn as much as it takes, up to a turn, and each is read by a thread of
// its own. sessions_bench.cc drives both sides (driver.h):
//
//   sender     listen                     {"port": PORT}
//              accept COUNT
//              send WHEN PAGES TURN       from then on (nanoseconds of Clock) receiver i gets the
//                                         pages i * PAGES and on, TURN bytes at a time
//   receivers  connect PORT FIRST         each, as the receivers FIRST and on
//              receive WHEN PAGES         receiver i of them into the pages i * PAGES and on:
//                                         {"seconds": [each, from WHEN to its last byte]}

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "pool/kv_pool.h"

namespace kvferry::bench {

// Serve until stdin ends. The process's exit code.
absl::StatusOr<int> ServePlainSender(const std::shared_ptr<KvPool>& pool);
absl::StatusOr<int> ServePlainReceivers(const std::shared_ptr<KvPool>& pool, int64_t receivers);

}  // namespace kvferry::bench
