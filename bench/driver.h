#pragma once

// A benchmark process that run.py drives: it reads commands from stdin, one a line, words apart by
// spaces, and answers each with one JSON object on one line of stdout. It ends at "quit" or at the
// end of stdin.

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "pool/kv_pool.h"
#include "pool/page_runs.h"

namespace kvferry::bench {

using Answer = absl::StatusOr<nlohmann::json>;
using Words = std::vector<std::string>;
// Given the words after the command's name, of which there are as many as it was added with.
using Handler = std::function<Answer(const Words&)>;

template <typename T = int64_t>
absl::StatusOr<T> ParseNumber(const std::string& word) {
  T number = 0;
  if (absl::SimpleAtoi(word, &number)) return number;
  return absl::InvalidArgumentError(absl::StrCat("'", word, "' is no number"));
}

// Points in time, as processes tell each other: nanoseconds of Clock, which all of a host read
// alike.
inline int64_t Nanoseconds(Deadline when) {
  return std::chrono::nanoseconds(when.time_since_epoch()).count();
}
inline Deadline PointInTime(int64_t nanoseconds) {
  return Deadline{std::chrono::nanoseconds(nanoseconds)};
}

class Driver {
 public:
  // Knows "cpu" (seconds of this process so far) and what works on `pool`: "fill SALT" (all pages),
  // "zero RUNS", "verify SALT LOCAL_RUNS REMOTE_RUNS" (examples/two_node/pattern.h). Where the pool
  // lies on a device they work on a copy of it in host memory, which is there only meanwhile.
  explicit Driver(std::shared_ptr<KvPool> pool);

  void Add(const std::string& name, size_t arguments, Handler handler);
  // Says {"ready": true, "ucx": VERSION, "build": TYPE}, then serves. A command that fails is
  // answered with
  // {"error": TEXT}. Returns the process's exit code.
  int Run();

 private:
  struct Command {
    size_t arguments;
    Handler handler;
  };
  Answer Dispatch(const std::string& line) const;

  const std::shared_ptr<KvPool> pool_;
  std::map<std::string, Command> commands_;
};

// A pool whose memory has been touched, so that no measured copy pays for that; a private one is
// not read in place by peers, as an engine's own memory is not.
absl::StatusOr<std::shared_ptr<KvPool>> TouchedPool(const KvLayout& layout, int64_t num_pages,
                                                    bool is_private = false);

// Prints "NAME: STATUS" to stderr; returns 1.
int Fail(const std::string& name, const absl::Status& status);

}  // namespace kvferry::bench
