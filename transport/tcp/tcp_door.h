#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/epoll.h"
#include "base/unique_fd.h"
#include "transport/accept_pause.h"
#include "transport/limited_line.h"
#include "transport/messages.h"
#include "transport/metrics.h"
#include "transport/tcp/tcp_data_plane.h"

namespace kvferry {

// Where peers connect for data. Each expected peer is told a token of its own, in the welcome; a
// connection that does not present one is closed, and nothing else of it is read. Progress thread
// only.
class TcpDoor {
 public:
  // Listens at `host`, a numeric address, or at that of config.net_device, on config.data_port.
  // `metrics` outlives this.
  static absl::StatusOr<std::unique_ptr<TcpDoor>> Create(const Config& config,
                                                         const std::string& host, Metrics* metrics);

  // For the peer of `link`, which is to make `lanes` connections before `until`.
  TcpAddress Expect(LinkId link, int64_t lanes, Deadline until);
  void Forget(LinkId link);

  struct Arrival {
    LinkId link;
    int64_t lane;
    TcpConnection connection;
  };
  // Those who have presented a token since the last call.
  std::vector<Arrival> Progress();
  // Forgets who is overdue; returns when to be called again at the latest.
  Deadline Tick(Deadline now);
  // Whether somebody has come since the last call, with a deadline that Tick() has to know of.
  bool TakeAccepted() { return std::exchange(accepted_, false); }
  int event_fd() const { return epoll_.fd(); }

 private:
  struct Expected {
    TcpAddress address;
    std::vector<bool> came;  // By lane.
    Deadline until;
  };
  // A connection of nobody knows whom.
  struct Stranger {
    UniqueFd socket;
    std::string said{};
    Deadline until{};
  };

  explicit TcpDoor(Metrics* metrics) : metrics_(metrics) {}
  void Accept(std::vector<Arrival>* arrivals);
  // For one more: the one that came first is heard once more, and goes.
  void MakeRoom(std::vector<Arrival>* arrivals);
  // Whether it is a stranger no longer.
  bool Hear(Stranger& stranger, std::vector<Arrival>* arrivals);
  void LetIn(Stranger& stranger, std::vector<Arrival>* arrivals);
  // One that was not let in.
  void HangUp(const Stranger& stranger) const;

  Metrics* const metrics_;
  std::string host_;
  int64_t port_ = 0;
  int64_t timeout_ms_ = 0;
  int64_t unheard_ms_ = 0;  // Of the connections that are let in.
  Epoll epoll_;
  UniqueFd listener_;
  AcceptPause pause_;
  LimitedLine no_token_;
  LimitedLine second_;
  bool accepted_ = false;
  uint64_t next_stranger_ = AcceptPause::kListenerId + 1;
  absl::flat_hash_map<LinkId, Expected> expected_;
  absl::flat_hash_map<std::string, LinkId> by_token_;
  absl::flat_hash_map<uint64_t, Stranger> strangers_;
};

}  // namespace kvferry
