#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace kvferry {

// Asks the system's resolver, which knows no deadline, for the addresses of a host, on a thread of
// its own: whoever waits does so until his deadline. Those that wait at a time wait for one answer.
// A resolver that does not answer keeps the thread and a little memory until it gives up, also when
// this is gone. Thread-safe.
class HostLookup {
 public:
  explicit HostLookup(std::string host) : host_(std::move(host)) {}

  // Numeric ones, IPv4 if it has any; never none. UNAVAILABLE with what the resolver says,
  // DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED without a thread. A host that is an address itself is not
  // looked up.
  absl::StatusOr<std::vector<std::string>> Find(Deadline deadline);

 private:
  class Answer;

  absl::StatusOr<std::shared_ptr<Answer>> Ask();

  const std::string host_;
  Mutex mutex_;
  std::shared_ptr<Answer> asked_ ABSL_GUARDED_BY(mutex_);  // Null, or the last one.
};

}  // namespace kvferry
