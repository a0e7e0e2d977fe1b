#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/clock.h"

namespace kvferry {

// For a line of the log that others can cause as often as they like, by connecting or by what they
// send. It is written by the thread that everybody waits for, to a pipe, perhaps, that is read
// slowly. One thread's.
class LimitedLine {
 public:
  // Of lines that each may say something else.
  static constexpr int64_t kSome = 16;

  // `most`: how many there are in 30 s.
  explicit LimitedLine(int64_t most = 1) : most_(most) {}

  // Once each time there is something to say. What belongs at the end of the line, often nothing:
  // how many have not been said. None: this is one of them.
  std::optional<std::string> Next(Deadline now = Clock::now());

 private:
  int64_t most_;
  Deadline again_at_{};  // From then on as many again.
  int64_t said_ = 0;     // Before that.
  int64_t unsaid_ = 0;   // Since the last line.
};

}  // namespace kvferry
