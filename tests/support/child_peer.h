#pragma once

// An endpoint in a process of its own (tests/process/peer_main.cc), driven by lines.

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/clock.h"

namespace kvferry {

// How a peer's pool keeps values: 4 heads of 64.
struct PeerPages {
  int64_t page_size = 16;
  std::string order = "NHD";
  std::string dtype = "bfloat16";
  std::string scale = "1";

  std::string ToString() const;
};

class ChildPeer {
 public:
  struct Options {
    std::string role;                // As peer_main.cc has them.
    std::string config_json = "{}";  // kvferry::Config
    int64_t num_layers = 4;
    int64_t num_pages = 64;
    uint64_t seed = 1;       // Of the pattern that its pool begins with.
    std::string netns = {};  // Run inside this network namespace.
    PeerPages pages_are = {};
  };
  explicit ChildPeer(const Options& options);
  ~ChildPeer();  // kill -9, and reaps.
  ChildPeer(const ChildPeer&) = delete;
  ChildPeer& operator=(const ChildPeer&) = delete;

  // Sends a command and returns the line that answers it; "" when none came in time or the process
  // died.
  std::string Ask(const std::string& command, Deadline deadline);
  std::string Ask(const std::string& command);  // Within 20 s.

  // Returns after SIGSTOP when every thread has stopped: one that runs goes on for a while.
  void Signal(int signal);
  // kill -9 and reap.
  void Kill();
  // Lets it end by itself, its endpoint destroyed; whether it did so in time and without complaint.
  bool Quit();
  bool alive();
  // That it has open, but for files on a disk: a store may have any number of those.
  int64_t num_fds() const;
  // The prefill side's "tcp://...".
  const std::string& address() const { return address_; }

  // --- Words for the commands ---
  std::string Publish(const std::vector<int64_t>& pages, int64_t ready_layers, int64_t lease_ms);
  // The number of the fetch.
  std::string Fetch(const std::string& ticket, const std::vector<int64_t>& pages,
                    int64_t timeout_ms);
  // "OK", or a status, or "PENDING" when it is still under way after `ms`.
  std::string Wait(const std::string& fetch, int64_t ms);
  std::string WaitLayer(const std::string& fetch, int64_t layer, int64_t ms);
  int64_t Metric(const std::string& name);
  // Whether its pool's `pages` hold what `source_pages` hold under the seed, and nothing else has
  // changed.
  std::string Verify(uint64_t seed, const std::vector<int64_t>& source_pages,
                     const std::vector<int64_t>& pages);

 private:
  std::string ReadLine(Deadline deadline);
  void CloseFds();

  pid_t pid_ = -1;
  int to_child_ = -1;
  int from_child_ = -1;
  std::string buffer_;
  std::string address_;
};

// A peer of 8 layers; the source's pattern has seed 11.
ChildPeer::Options PeerOptions(const std::string& role, const std::string& config_json,
                               int64_t num_pages);
inline constexpr int64_t kPeerLayers = 8;

// A few pages get across whole, and nothing else in decode's pool has changed.
void ExpectServes(ChildPeer& prefill, ChildPeer& decode,
                  const std::vector<int64_t>& pages = {100, 3, 4, 77});

// The lease id in a ticket's text.
std::string LeaseOf(absl::string_view ticket);

}  // namespace kvferry
