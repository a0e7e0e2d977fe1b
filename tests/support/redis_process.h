#pragma once

// A Redis server of a test's own, or of a benchmark's. What goes wrong here ends the program, with
// the reason on standard error.

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry {

// Why there can be none; empty when there can.
std::string WhyNoRedis();

// A port of 127.0.0.1 that nobody listens on.
int64_t FreePort();

// On 127.0.0.1, keeping nothing on disk.
class RedisProcess {
 public:
  explicit RedisProcess(std::vector<std::string> arguments = {});
  ~RedisProcess();  // kill -9, and reaps.
  RedisProcess(const RedisProcess&) = delete;
  RedisProcess& operator=(const RedisProcess&) = delete;

  // Again, at the same port, without what it had. Returns when it accepts.
  void Start();
  void Kill();
  void Signal(int signal) const;
  int64_t port() const { return port_; }

 private:
  const std::vector<std::string> arguments_;
  int64_t port_;
  pid_t pid_ = -1;
};

}  // namespace kvferry
