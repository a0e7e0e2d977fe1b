#include "transport/tcp/tcp_door.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/random.h"
#include "base/status.h"
#include "transport/silence_limits.h"
#include "transport/tcp/tcp_frames.h"

namespace kvferry {
namespace {

// Whoever comes when so many have not said who they are yet takes the place of the one that came
// first.
constexpr size_t kMaxStrangers = 256;

}  // namespace

absl::StatusOr<std::unique_ptr<TcpDoor>> TcpDoor::Create(const Config& config,
                                                         const std::string& host,
                                                         Metrics* metrics) {
  std::unique_ptr<TcpDoor> door(new TcpDoor(metrics));
  door->timeout_ms_ = config.connect_timeout_ms;
  door->unheard_ms_ = SilenceLimits(config.heartbeat_timeout_ms).user_timeout_ms;
  door->host_ = host;
  if (!config.net_device.empty()) {
    KVFERRY_ASSIGN_OR_RETURN(door->host_, AddressOfInterface(config.net_device));
  }
  KVFERRY_ASSIGN_OR_RETURN(door->listener_, ListenTcp(door->host_, config.data_port));
  KVFERRY_RETURN_IF_ERROR(ChooseCongestionControl(door->listener_, config.tcp_congestion_control));
  KVFERRY_ASSIGN_OR_RETURN(door->port_, PortOf(door->listener_));
  KVFERRY_ASSIGN_OR_RETURN(door->epoll_, Epoll::Create());
  KVFERRY_ASSIGN_OR_RETURN(door->pause_, AcceptPause::Create(door->epoll_, door->listener_.get()));
  return door;
}

TcpAddress TcpDoor::Expect(LinkId link, int64_t lanes, Deadline until) {
  Expected expected{{lanes, host_, port_, RandomBytes16(), RandomBytes16()},
                    std::vector<bool>(lanes, false),
                    until};
  by_token_.emplace(expected.address.token, link);
  return expected_.emplace(link, std::move(expected)).first->second.address;
}

void TcpDoor::Forget(LinkId link) {
  const auto found = expected_.find(link);
  if (found == expected_.end()) return;
  by_token_.erase(found->second.address.token);
  expected_.erase(found);
}

void TcpDoor::Accept(std::vector<Arrival>* arrivals) {
  for (int left = AcceptPause::kAcceptedATurn; left > 0; --left) {
    Stranger stranger{AcceptTcp(listener_), "", DeadlineInMs(timeout_ms_)};
    if (!stranger.socket.valid()) return pause_.OnFailure(epoll_, errno);
    accepted_ = true;
    // A peer has said its token by now, unless the network has not brought it yet: it takes no
    // place.
    if (Hear(stranger, arrivals)) continue;
    if (strangers_.size() >= kMaxStrangers) MakeRoom(arrivals);
    const uint64_t id = next_stranger_++;
    if (!epoll_.Add(stranger.socket.get(), EPOLLIN, id).ok()) continue;
    strangers_.emplace(id, std::move(stranger));
  }
}

void TcpDoor::MakeRoom(std::vector<Arrival>* arrivals) {
  const auto first =
      std::min_element(strangers_.begin(), strangers_.end(),
                       [](const auto& one, const auto& other) { return one.first < other.first; });
  if (!Hear(first->second, arrivals)) HangUp(first->second);
  strangers_.erase(first);
}

bool TcpDoor::Hear(Stranger& stranger, std::vector<Arrival>* arrivals) {
  std::array<std::byte, sizeof(TcpHello)> words;
  const iovec part{words.data(), words.size() - stranger.said.size()};
  const Moved moved = ReceiveTcp(stranger.socket.get(), {&part, 1});
  if (moved.result != Moved::Result::kBroken) {
    stranger.said.append(reinterpret_cast<const char*>(words.data()), moved.bytes);
    if (stranger.said.size() < sizeof(TcpHello)) return false;
    LetIn(stranger, arrivals);
  }
  HangUp(stranger);
  return true;
}

void TcpDoor::HangUp(const Stranger& stranger) const {
  if (stranger.socket.valid()) epoll_.HangUp(stranger.socket.get());
}

void TcpDoor::LetIn(Stranger& stranger, std::vector<Arrival>* arrivals) {
  TcpHello hello;
  std::memcpy(&hello, stranger.said.data(), sizeof(hello));
  const auto named = by_token_.find(std::string(hello.token.data(), hello.token.size()));
  if (hello.magic != kTcpMagic || hello.version != kTcpVersion || named == by_token_.end()) {
    ++metrics_->strangers;
    if (const auto more = no_token_.Next()) {
      Log().warn("tcp: closed a connection that presented no token of ours{}", *more);
    }
    return;
  }
  const LinkId link = named->second;
  Expected& expected = expected_.find(link)->second;
  if (hello.lane >= expected.came.size() || expected.came[hello.lane]) {
    if (const auto more = second_.Next()) {
      Log().warn("tcp: closed a second connection for lane {} of one peer{}", hello.lane, *more);
    }
    return;
  }
  expected.came[hello.lane] = true;
  // Data may follow at once: whoever reads the socket next looks without being told.
  epoll_.Remove(stranger.socket.get());
  TcpConnection connection{std::move(stranger.socket),
                           TcpHello::With(expected.address.answer, hello.lane).Bytes(),
                           "",
                           "a peer",
                           0,
                           nullptr,
                           unheard_ms_};
  arrivals->push_back({link, hello.lane, std::move(connection)});
  if (std::find(expected.came.begin(), expected.came.end(), false) == expected.came.end()) {
    Forget(link);
  }
}

std::vector<TcpDoor::Arrival> TcpDoor::Progress() {
  std::vector<Arrival> arrivals;
  Epoll::Room room;
  for (const epoll_event& event : epoll_.Ready(room)) {
    if (event.data.u64 == AcceptPause::kListenerId) {
      Accept(&arrivals);
      continue;
    }
    if (event.data.u64 == AcceptPause::kTimerId) {
      pause_.OnTimer(epoll_);
      continue;
    }
    const auto found = strangers_.find(event.data.u64);
    if (found != strangers_.end() && Hear(found->second, &arrivals)) strangers_.erase(found);
  }
  return arrivals;
}

Deadline TcpDoor::Tick(Deadline now) {
  Deadline next = Deadline::max();
  absl::erase_if(strangers_, [&](const auto& entry) {
    const bool overdue = entry.second.until <= now;
    if (overdue) HangUp(entry.second);
    return overdue;
  });
  for (const auto& [id, stranger] : strangers_) next = std::min(next, stranger.until);
  std::vector<LinkId> overdue;
  for (const auto& [link, expected] : expected_) {
    if (expected.until <= now)
      overdue.push_back(link);
    else
      next = std::min(next, expected.until);
  }
  for (const LinkId link : overdue) Forget(link);
  return next;
}

}  // namespace kvferry
