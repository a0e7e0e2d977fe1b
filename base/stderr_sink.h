#pragma once

#include <spdlog/sinks/base_sink.h>

#include <cstdint>
#include <mutex>
#include <string_view>

namespace kvferry {

// Standard error, for which no thread waits: where nobody takes what is written there (a pipe whose
// reader stands still, a terminal that was stopped), a line is left out, and the next one that
// finds room says how many were. A file is waited for as any other; so, for lack of another way,
// may be a pipe of another user's that fills up at this very moment, before Linux 6.4.
//
// A line has at most 4,096 bytes, which pipes take whole or not at all (PIPE_BUF): what is longer
// ends in "...". Thread-safe.
class StderrSink : public spdlog::sinks::base_sink<std::mutex> {
 private:
  void sink_it_(const spdlog::details::log_msg& message) override;
  void flush_() override {}
  bool Write(const spdlog::details::log_msg& message);

  int64_t left_out_ = 0;  // Since the last line that was written.
};

// Whole, or not at all: false. `fd`: what takes part of a line and then no more has that part.
bool WriteWithoutWaiting(int fd, std::string_view line);

}  // namespace kvferry
