#pragma once

// One small message to another process and back, by ZeroMQ without kvferry: what the requests of
// sessions are measured beside.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvferry::bench {

// Sends back what arrives at a ROUTER, blocking in between, and ends at an empty message. Prints
// its address, as a line of JSON ({"address": TEXT}), first.
void ServePlainZmq();

// The DEALER that asks. For one thread; ends the one who serves.
class PlainZmq {
 public:
  explicit PlainZmq(const std::string& address);
  ~PlainZmq();
  // Seconds that each of `count` messages of 64 bytes was away, one after another. Ends the
  // benchmark when another message than the one sent comes back.
  std::vector<double> RoundTrips(int64_t count);

 private:
  struct Sockets;
  const std::unique_ptr<Sockets> sockets_;
};

}  // namespace kvferry::bench
