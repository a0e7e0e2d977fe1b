#pragma once

#include <functional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvferry {

// A thread of kvferry's own inside of somebody's process. It handles none of the process's signals
// (those that a fault of its own raises excepted), so that no handler runs where a call must not be
// interrupted; the application's threads handle them. The system's tools show it as "kvf-" and the
// beginning of `what`. RESOURCE_EXHAUSTED, naming `what`, when the system gives no thread.
absl::StatusOr<std::thread> StartThread(const std::string& what, std::function<void()> run);

// RESOURCE_EXHAUSTED where the system would not start as many threads at once.
absl::Status CheckThreadsStart(int count);

}  // namespace kvferry
