#pragma once

// Plain TCP streams from child processes to this one: what the kernel allows, without any protocol;
// of bytes as they lie, or of scattered items, with the two copies of whoever packs them or
// straight from where they are to where they go.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace kvferry::bench {

class BulkTcp {
 public:
  struct Options {
    int64_t bytes = 0;  // Most that Measure() may be asked for.
    int streams = 1;    // Most of these, each with a child process of its own.
    // An IPv4 address of this process, to which the children connect.
    std::string host = "127.0.0.1";
    // The network namespace that the children join, as a file (/run/netns/NAME); "": this one.
    std::string senders_netns;
    std::vector<int> senders_cpus;   // Where the children run; none: anywhere.
    std::string congestion_control;  // Of what the children send; "": the system's.
  };
  // What is sent: items of `bytes` each in random order, or, if 0, all as it lies.
  struct Items {
    size_t bytes = 0;
    // The kernel takes and brings them piece by piece (sendmsg(2), recvmsg(2)). Else the child
    // gathers them into chunks of 1 MiB, and this process scatters those.
    bool straight = false;
  };
  struct Result {
    double seconds = 0;  // From the request until the last byte has come.
    double cpu = 0;      // Of all processes meanwhile.
  };

  // Forks: call it before any thread starts. The children end with this process.
  static absl::StatusOr<std::unique_ptr<BulkTcp>> Start(const Options& options);

  // Has `streams` children send an equal part of `bytes` each, at once, out of one buffer into
  // another, to the same places, and compares what came with what was sent; the latter is not
  // timed. Items divide `bytes`. INVALID_ARGUMENT for more of either than there are, UNAVAILABLE
  // when a child has gone, DATA_LOSS for other bytes.
  absl::StatusOr<Result> Measure(size_t bytes, int streams, Items items);

 private:
  absl::Status AddStream(int listener, const Options& options, std::span<std::byte> source);
  // Bytes [first, end); returns the sender's CPU seconds.
  absl::StatusOr<double> Receive(int stream, size_t first, size_t end, Items items);

  std::shared_ptr<std::byte> memory_;
  std::span<std::byte> bytes_;
  std::vector<UniqueFd> streams_;
};

}  // namespace kvferry::bench
