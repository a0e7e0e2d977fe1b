#pragma once

// A driver (driver.h) as a child process: this program again, with other arguments.

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace kvferry::bench {

// What goes wrong, an error that the child answers included, ends the benchmark. For one thread.
class ChildProcess {
 public:
  // Waits for the line with which the child says that it is ready.
  explicit ChildProcess(const std::vector<std::string>& arguments);
  // Closes its stdin, at which it ends, and waits for that.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void Send(const std::string& command);
  // The answer to the oldest command without one.
  nlohmann::json Receive();
  nlohmann::json Ask(const std::string& command) {
    Send(command);
    return Receive();
  }
  // What it said when it was ready.
  const nlohmann::json& ready() const { return ready_; }

 private:
  std::string ReadLine();

  const std::string name_;
  pid_t pid_ = -1;
  UniqueFd to_child_;
  UniqueFd from_child_;
  std::string read_;  // What has been read of the next lines.
  nlohmann::json ready_;
};

}  // namespace kvferry::bench
