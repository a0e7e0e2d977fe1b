#include "transport/control/zmq_control_plane.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>
#include <zmq.hpp>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/epoll.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/random.h"
#include "base/status.h"
#include "base/thread.h"
#include "base/unique_fd.h"
#include "transport/accept_pause.h"
#include "transport/control/codec.h"
#include "transport/control/curve.h"
#include "transport/control/listener_pause.h"
#include "transport/message_cost.h"
#include "transport/silence_limits.h"

namespace kvferry {
namespace {

constexpr int kMaxUnread = 64;  // Messages queued a peer that it has sent, each of up to 2 MiB.
// The same that it is sent. ZeroMQ says neither how many there are nor how long they are, and that
// it takes more again when half of them have left; so the others wait here.
constexpr int kMaxUnsent = 64;
// So that control traffic cannot starve the data plane: of those who have come here, and of those
// who were dialled, for whoever floods the one must not keep the other unheard.
constexpr int kMaxMessagesPerProgress = 64;
constexpr int kMaxMessagesOfOneDialled = 16;  // Before it is the next one's turn.
// Of those who come, of which ZeroMQ may say as many again.
constexpr int kMaxEventsPerProgress = 1024;
constexpr int kMaxSockets = 65536;
constexpr int kLingerMs = 200;  // For a goodbye to get out when the plane closes.
// What the threads of a context need, and some to spare.
constexpr int kFilesOfThreads = 16;
constexpr int kThreads = 2;  // Of a context: one for input and output, and one that closes sockets.
// A peer chooses its routing id; the prefix keeps it from posing as a peer that we dialled.
constexpr absl::string_view kAccepted = "accepted:";
constexpr absl::string_view kDialled = "dialled:";

// A signal that is handled in this thread interrupts calls of ZeroMQ, even those that do not wait.
// Our threads block what can be blocked; a change of user ids cannot (nptl(7)).
template <typename Call>
auto Uninterrupted(const Call& call) {
  for (;;) {
    try {
      return call();
    } catch (const zmq::error_t& error) {
      if (error.num() != EINTR) throw;
    }
  }
}

// Of a call that an address was given to.
absl::StatusCode CodeOf(const zmq::error_t& error) {
  return IsForWantOfFiles(error.num()) ? absl::StatusCode::kResourceExhausted
                                       : absl::StatusCode::kInvalidArgument;
}

constexpr int kHandshakeFailed = ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                                 ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                                 ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;

// A peer that brings no routing id gets the next number of a counter. ZeroMQ does not look whether
// another peer has claimed that id, and aborts where one has (4.3.4, router_t::identify_peer; no
// issue of libzmq's is known that says so). The counter begins with rand(), which nobody seeds:
// where everybody knows. Here it begins where nobody does, and the application's rand() goes on as
// if it had not been asked.
zmq::socket_t MakeRouter(zmq::context_t& context) {
  static Mutex mutex;
  // Another thread that does as much may take it for the application's: it is there for ever.
  static std::array<int64_t, 32> state;
  const MutexLock lock(&mutex);
  char* const applications = initstate(static_cast<unsigned>(RandomId()),
                                       reinterpret_cast<char*>(state.data()), sizeof(state));
  const absl::Cleanup restore = [&] { setstate(applications); };
  return {context, zmq::socket_type::router};
}

// A copy of a descriptor would take none of the system's open files.
UniqueFd NewFile() { return UniqueFd(eventfd(0, EFD_CLOEXEC)); }

struct Dealer {
  std::string address;
  zmq::socket_t socket;
  // Says what becomes of attempts to connect; null once the peer has said something.
  zmq::socket_t attempts;
  bool hung_up = false;   // On the last attempt, which the next event says the end of.
  bool was_made = false;  // A connection.
};

class ZmqControlPlane : public ControlPlane {
 public:
  ZmqControlPlane(Epoll epoll, SilenceLimits limits) : limits_(limits), epoll_(std::move(epoll)) {
    context_.set(zmq::ctxopt::max_sockets, kMaxSockets);
  }
  ~ZmqControlPlane() override {
    dealers_.clear();
    router_.close();
  }

  // Before anything else. ZeroMQ makes a context's threads with its first socket, and where the
  // system has no file descriptor or no thread left for them it aborts: so while there are, and not
  // in the first Dial(). They may still go between the look and the making.
  absl::Status StartThreads() {
    KVFERRY_RETURN_IF_ERROR(CheckFiles());
    const absl::Status threads = CheckThreadsStart(kThreads);
    if (!threads.ok()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("control: ", threads.message(),
                       "; raise the limit (ulimit -u, pids.max of the control group)"));
    }
    zmq::socket_t first(context_, zmq::socket_type::pair);
    return absl::OkStatus();
  }

  // Before the sockets of peers: only those who have these too are peers.
  absl::Status UseKeys(const CurveKeys& keys) {
    doorkeeper_.emplace(context_, keys);
    return Watch(doorkeeper_->questions());
  }

  absl::Status Listen(const Config& config) {
    try {
      router_ = MakeSocket(zmq::socket_type::router);
      router_.set(zmq::sockopt::router_mandatory, 1);
      // Whoever has not shown by then that it speaks ZeroMQ, and has the key.
      router_.set(zmq::sockopt::handshake_ivl, static_cast<int>(config.connect_timeout_ms));
      if (doorkeeper_) doorkeeper_->Guard(router_);
      strangers_ = Monitor(router_, "inproc://strangers",
                           kHandshakeFailed | ZMQ_EVENT_LISTENING | ZMQ_EVENT_ACCEPT_FAILED);
      const bool ipv6 = config.listen_host.find(':') != std::string::npos;
      const bool bare_ipv6 = ipv6 && config.listen_host[0] != '[';
      // Only then: an IPv4 address would be reported in its IPv6 form.
      router_.set(zmq::sockopt::ipv6, ipv6 ? 1 : 0);
      const std::string host =
          bare_ipv6 ? absl::StrCat("[", config.listen_host, "]") : config.listen_host;
      const std::string port = config.listen_port == 0 ? "*" : absl::StrCat(config.listen_port);
      Uninterrupted([&] { router_.bind(absl::StrCat("tcp://", host, ":", port)); });
      address_ = router_.get(zmq::sockopt::last_endpoint);
      KVFERRY_RETURN_IF_ERROR(MakePause());
    } catch (const zmq::error_t& error) {
      return absl::UnavailableError(
          absl::StrCat("control: cannot listen on ", config.listen_host, ":", config.listen_port,
                       ": ", error.what(),
                       "; set listen_host to a numeric address or an interface of this host, and "
                       "listen_port to one that is free"));
    }
    KVFERRY_RETURN_IF_ERROR(Watch(strangers_));
    return Watch(router_);
  }

  const std::string& listen_address() const override { return address_; }

  absl::StatusOr<PeerKey> Dial(const std::string& address) override {
    PeerKey peer = absl::StrCat(kDialled, next_dealer_++);
    KVFERRY_ASSIGN_OR_RETURN(Dealer dealer, MakeDealer(address));
    dealers_.emplace(peer, std::move(dealer));
    return peer;
  }

  absl::Status DialAgain(const PeerKey& peer) override {
    const auto found = dealers_.find(peer);
    if (found == dealers_.end()) return absl::UnavailableError("control: no such peer");
    KVFERRY_ASSIGN_OR_RETURN(Dealer dealer, MakeDealer(found->second.address));
    Forget(found->second);
    // Nothing comes after it that was sent on it.
    found->second.socket.set(zmq::sockopt::linger, 0);
    waiting_.erase(peer);
    found->second = std::move(dealer);
    return absl::OkStatus();
  }

  void Hangup(const PeerKey& peer) override {
    waiting_.erase(peer);
    const auto found = dealers_.find(peer);
    if (found == dealers_.end()) return;
    Forget(found->second);
    dealers_.erase(found);
  }

  absl::Status Send(const PeerKey& peer, const Message& message) override {
    std::string bytes = EncodeMessage(message);
    if (const auto line = waiting_.find(peer); line == waiting_.end()) {
      const absl::StatusOr<bool> sent = SendNow(peer, bytes);
      if (!sent.ok() || *sent) return sent.status();
    } else if (line->second.backlog.waiting > kMaxMessagesWaiting) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "control: ", line->second.backlog.waiting, " bytes wait for one peer (",
          absl::CEscape(peer), "), limit ", kMaxMessagesWaiting, ", and it takes none"));
    }
    Line& line = waiting_[peer];
    line.backlog.waiting += static_cast<int64_t>(bytes.size());
    line.messages.push_back(std::move(bytes));
    return absl::OkStatus();
  }

  Backlog BacklogOf(const PeerKey& peer) const override {
    const auto line = waiting_.find(peer);
    return line == waiting_.end() ? Backlog() : line->second.backlog;
  }

  bool Waits() const override { return !waiting_.empty(); }

  bool Progress(ControlEvents* events) override {
    Drain();
    const bool sent = SendWaiting();
    if (doorkeeper_) AnswerQuestions();
    pause_.Progress();
    int of_accepted = kMaxMessagesPerProgress;
    if (router_) ReceiveFromRouter(events, &of_accepted);
    if (strangers_) ReportStrangers(events);
    int of_dialled = kMaxMessagesPerProgress;
    ListReady();
    for (const PeerKey& peer : ready_) {
      ReceiveFromDealer(peer, events, &of_dialled);
      ReportAttempts(peer, events);
    }
    return sent || std::min(of_accepted, of_dialled) < kMaxMessagesPerProgress;
  }

  int event_fd() const override { return epoll_.fd(); }

  bool Arm() override {
    Drain();
    pause_.Progress();
    if (doorkeeper_ && HasInput(doorkeeper_->questions())) return false;
    if (router_ && HasInput(router_)) return false;
    if (strangers_ && HasInput(strangers_)) return false;
    for (auto& [peer, dealer] : dealers_) {
      if (HasInput(dealer)) return false;
    }
    // Takes the sign of what has arrived at such a socket since it was asked, as any send may:
    // Waits().
    return !SendWaiting();
  }

 private:
  // What ZeroMQ has not taken yet of what one peer is sent.
  struct Line {
    std::deque<std::string> messages;
    Backlog backlog;
  };

  static absl::Status CheckFiles() {
    std::array<UniqueFd, kFilesOfThreads> room;
    for (UniqueFd& fd : room) {
      fd = NewFile();
      if (!fd.valid()) {
        return absl::ResourceExhaustedError(
            absl::StrCat("control: ", std::strerror(errno), ": ", kFilesOfThreads,
                         " file descriptors are needed; raise the limit (ulimit -n)"));
      }
    }
    return absl::OkStatus();
  }

  zmq::socket_t MakeSocket(zmq::socket_type type) {
    zmq::socket_t socket =
        type == zmq::socket_type::router ? MakeRouter(context_) : zmq::socket_t(context_, type);
    socket.set(zmq::sockopt::linger, kLingerMs);
    socket.set(zmq::sockopt::sndhwm, kMaxUnsent);
    socket.set(zmq::sockopt::rcvhwm, kMaxUnread);
    socket.set(zmq::sockopt::maxmsgsize, static_cast<int64_t>(kMaxMessageBytes));
    socket.set(zmq::sockopt::reconnect_ivl, 50);
    socket.set(zmq::sockopt::reconnect_ivl_max, 1000);
    // A ROUTER's connections end no other way when the other side's host is gone: it cannot be told
    // to close one, and our heartbeats end sessions only.
    socket.set(zmq::sockopt::tcp_maxrt, limits_.user_timeout_ms);
    socket.set(zmq::sockopt::tcp_keepalive, 1);
    socket.set(zmq::sockopt::tcp_keepalive_idle, limits_.probe_s);
    socket.set(zmq::sockopt::tcp_keepalive_intvl, limits_.probe_s);
    return socket;
  }

  absl::StatusOr<Dealer> MakeDealer(const std::string& address) {
    try {
      Dealer dealer{address, MakeSocket(zmq::socket_type::dealer), {}};
      dealer.socket.set(zmq::sockopt::ipv6, 1);  // A host name may resolve to either.
      if (doorkeeper_) doorkeeper_->Introduce(dealer.socket);
      // ZeroMQ adds that it tries again both when connecting has failed and when a connection has
      // broken.
      dealer.attempts =
          Monitor(dealer.socket, absl::StrCat("inproc://attempts:", next_monitor_++),
                  ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED | kHandshakeFailed);
      Uninterrupted([&] { dealer.socket.connect(address); });
      KVFERRY_RETURN_IF_ERROR(Watch(dealer.socket));
      KVFERRY_RETURN_IF_ERROR(Watch(dealer.attempts));
      return dealer;
    } catch (const zmq::error_t& error) {
      return absl::Status(CodeOf(error), absl::StrCat("control: cannot connect to '", address,
                                                      "': ", error.what()));
    }
  }

  // Of the listener, which ZeroMQ tells the monitor before anything else. Where there can be none,
  // it would say without end that accepting fails: it says nothing of that then.
  absl::Status MakePause() {
    if (!Receive(strangers_) || EventReceived() != ZMQ_EVENT_LISTENING) {
      return absl::InternalError("control: ZeroMQ does not say that it listens");
    }
    KVFERRY_ASSIGN_OR_RETURN(pause_, ListenerPause::Create(epoll_, ValueReceived()));
    if (!pause_.works())
      strangers_ = Monitor(router_, "inproc://strangers-alone", kHandshakeFailed);
    return absl::OkStatus();
  }

  // What ZeroMQ says of connections it says nowhere else (zmq_socket_monitor(3)).
  zmq::socket_t Monitor(zmq::socket_t& socket, const std::string& name, int events) {
    if (zmq_socket_monitor(socket.handle(), name.c_str(), events) != 0) throw zmq::error_t();
    zmq::socket_t monitor(context_, zmq::socket_type::pair);
    monitor.set(zmq::sockopt::rcvhwm, 0);  // Or ZeroMQ's own thread would wait until it is read.
    monitor.connect(name);
    return monitor;
  }

  void StopWatching(Dealer& dealer) {
    if (!dealer.attempts) return;
    zmq_socket_monitor(dealer.socket.handle(), nullptr, 0);
    epoll_.Remove(dealer.attempts.get(zmq::sockopt::fd));
    dealer.attempts.close();
  }

  void Forget(Dealer& dealer) {
    StopWatching(dealer);
    epoll_.Remove(dealer.socket.get(zmq::sockopt::fd));
  }

  // Sockets' fds are edge-triggered; one epoll fd stands for them all.
  absl::Status Watch(zmq::socket_t& socket) const {
    return epoll_.Add(socket.get(zmq::sockopt::fd), EPOLLIN | EPOLLET, 0);
  }

  // Takes the edges, so that the epoll fd itself stops being readable.
  void Drain() const {
    Epoll::Room room;
    while (epoll_.Ready(room).size() == room.size()) {
    }
  }

  // False when it takes nothing now.
  static bool SendFrame(zmq::socket_t& socket, const std::string& bytes, zmq::send_flags more) {
    const auto flags = zmq::send_flags::dontwait | more;
    return Uninterrupted([&] { return socket.send(zmq::buffer(bytes), flags); }).has_value();
  }

  // The same of a peer.
  absl::StatusOr<bool> SendNow(const PeerKey& peer, const std::string& bytes) {
    try {
      const auto dealer = dealers_.find(peer);
      if (dealer != dealers_.end()) {
        return SendFrame(dealer->second.socket, bytes, zmq::send_flags::none);
      }
      // One that was dialled and hung up is no routing id.
      if (!router_ || !absl::StartsWith(peer, kAccepted)) {
        return absl::UnavailableError("control: no such peer");
      }
      const std::string routing_id = peer.substr(kAccepted.size());
      return SendFrame(router_, routing_id, zmq::send_flags::sndmore) &&
             SendFrame(router_, bytes, zmq::send_flags::none);
    } catch (const zmq::error_t& error) {
      // Of the router, which says so of a connection that has ended: no word of the network.
      return absl::UnavailableError(error.num() == EHOSTUNREACH
                                        ? "control: the peer's connection is closed"
                                        : absl::StrCat("control: cannot send: ", error.what()));
    }
  }

  // True when some of what waited does not any more.
  bool SendWaiting() {
    bool any = false;
    absl::erase_if(waiting_, [&](auto& entry) {
      any |= SendSome(entry.first, &entry.second);
      return entry.second.messages.empty();
    });
    return any;
  }

  bool SendSome(const PeerKey& peer, Line* line) {
    bool any = false;
    for (int left = kMaxUnsent; left > 0 && !line->messages.empty(); --left, any = true) {
      const absl::StatusOr<bool> sent = SendNow(peer, line->messages.front());
      if (!sent.ok()) {  // It is gone, as the next Send() says.
        line->messages.clear();
        return true;
      }
      if (!*sent) break;
      const auto bytes = static_cast<int64_t>(line->messages.front().size());
      line->backlog.waiting -= bytes;
      line->backlog.taken += bytes;
      line->messages.pop_front();
    }
    return any;
  }

  // Reading ZMQ_EVENTS also re-arms the socket's fd.
  static bool HasInput(zmq::socket_t& socket) {
    return (Uninterrupted([&] { return socket.get(zmq::sockopt::events); }) & ZMQ_POLLIN) != 0;
  }
  static bool HasInput(Dealer& dealer) {
    return HasInput(dealer.socket) || (dealer.attempts && HasInput(dealer.attempts));
  }

  // Dialled peers who have something to say, each one first in its turn. A handler may dial or hang
  // up, so they are listed before any of them is heard.
  void ListReady() {
    ready_.clear();
    for (auto& [peer, dealer] : dealers_) {
      if (HasInput(dealer)) ready_.push_back(peer);
    }
    if (ready_.empty()) return;
    const auto first = static_cast<std::ptrdiff_t>(turn_++ % ready_.size());
    std::rotate(ready_.begin(), ready_.begin() + first, ready_.end());
  }

  static void Deliver(const PeerKey& peer, const zmq::message_t& frame, ControlEvents* events) {
    DeliverMessage(peer, {static_cast<const std::byte*>(frame.data()), frame.size()}, events);
  }

  // What the message in frames_ counts as.
  int CostOfReceived() const {
    size_t bytes = 0;
    for (const zmq::message_t& frame : frames_) bytes += frame.size();
    return static_cast<int>(MessageCost(static_cast<int64_t>(bytes)));
  }

  // Receives one whole message into frames_; false when there was none.
  bool Receive(zmq::socket_t& socket) {
    frames_.clear();
    for (bool more = true; more;) {
      zmq::message_t frame;
      const auto receive = [&] { return socket.recv(frame, zmq::recv_flags::dontwait); };
      if (!Uninterrupted(receive).has_value()) return false;
      more = frame.more();
      // A message of ours has at most two frames; more are read, to find its end, and not kept.
      if (frames_.size() < 3) frames_.push_back(std::move(frame));
    }
    return true;
  }

  void ReceiveFromRouter(ControlEvents* events, int* budget) {
    try {
      while (*budget > 0 && Receive(router_)) {
        *budget -= CostOfReceived();
        const PeerKey peer = absl::StrCat(kAccepted, frames_[0].to_string());
        if (frames_.size() == 2) {
          Deliver(peer, frames_[1], events);
        } else {
          events->OnMalformed(peer, absl::InvalidArgumentError("malformed message: not one frame"));
        }
      }
    } catch (const zmq::error_t& error) {
      Log().error("control: receiving failed: {}", error.what());
    }
  }

  void ReceiveFromDealer(const PeerKey& peer, ControlEvents* events, int* budget) {
    try {
      for (int left = kMaxMessagesOfOneDialled; *budget > 0 && left > 0;) {
        const auto found = dealers_.find(peer);
        if (found == dealers_.end() || !Receive(found->second.socket)) return;
        StopWatching(found->second);
        const int cost = CostOfReceived();
        left -= cost;
        *budget -= cost;
        if (frames_.size() == 1) {
          Deliver(peer, frames_[0], events);
        } else {
          events->OnMalformed(peer, absl::InvalidArgumentError("malformed message: not one frame"));
        }
      }
    } catch (const zmq::error_t& error) {
      Log().error("control: receiving failed: {}", error.what());
    }
  }

  // Of what a monitor has said, in frames_.
  int EventReceived() const {
    uint16_t event = 0;
    if (frames_[0].size() >= sizeof event) std::memcpy(&event, frames_[0].data(), sizeof event);
    return event;
  }

  void ReportAttempts(const PeerKey& peer, ControlEvents* events) {
    try {
      for (auto found = dealers_.find(peer);
           found != dealers_.end() && found->second.attempts && Receive(found->second.attempts);
           found = dealers_.find(peer)) {
        const int event = EventReceived();
        if (event == ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL) {
          found->second.hung_up = true;
          continue;
        }
        if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
          const bool again = std::exchange(found->second.was_made, true);
          events->OnMade(peer);
          if (again) events->OnMadeAgain(peer);
          continue;
        }
        const bool retried = event == ZMQ_EVENT_CONNECT_RETRIED;
        const bool hung_up = std::exchange(found->second.hung_up, false);
        events->OnAttemptFailed(peer, !retried  ? ControlEvents::Attempt::kStranger
                                      : hung_up ? ControlEvents::Attempt::kHungUp
                                                : ControlEvents::Attempt::kUnreachable);
      }
    } catch (const zmq::error_t& error) {
      Log().error("control: watching a connection failed: {}", error.what());
    }
  }

  // And what goes with it: an errno, or a file descriptor.
  int ValueReceived() const {
    int32_t value = 0;
    const size_t at = sizeof(uint16_t);
    if (frames_[0].size() >= at + sizeof value) {
      std::memcpy(&value, static_cast<const char*>(frames_[0].data()) + at, sizeof value);
    }
    return value;
  }

  void ReportStrangers(ControlEvents* events) {
    try {
      for (int left = kMaxEventsPerProgress; left > 0 && Receive(strangers_); --left) {
        const int event = EventReceived();
        if (event != ZMQ_EVENT_ACCEPT_FAILED) {
          events->OnStranger();
        } else {
          pause_.OnFailure(ValueReceived());
        }
      }
    } catch (const zmq::error_t& error) {
      Log().error("control: watching who connects failed: {}", error.what());
    }
  }

  void AnswerQuestions() {
    try {
      Uninterrupted([&] { doorkeeper_->Answer(); });
    } catch (const zmq::error_t& error) {
      Log().error("control: letting peers in failed: {}", error.what());
    }
  }

  zmq::context_t context_{1};
  const SilenceLimits limits_;
  const Epoll epoll_;
  std::optional<Doorkeeper> doorkeeper_;
  zmq::socket_t router_;
  zmq::socket_t
      strangers_;  // Says that the handshake of one has failed, and that accepting one has.
  ListenerPause pause_;
  std::string address_;
  uint64_t next_dealer_ = 1;
  uint64_t next_monitor_ = 1;
  absl::flat_hash_map<PeerKey, Dealer> dealers_;
  absl::flat_hash_map<PeerKey, Line> waiting_;
  std::vector<PeerKey> ready_;
  size_t turn_ = 0;
  std::vector<zmq::message_t> frames_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ControlPlane>> MakeZmqControlPlane(const Config& config,
                                                                  bool listen) {
  KVFERRY_ASSIGN_OR_RETURN(Epoll epoll, Epoll::Create());
  try {
    auto plane = std::make_unique<ZmqControlPlane>(std::move(epoll),
                                                   SilenceLimits(config.heartbeat_timeout_ms));
    KVFERRY_RETURN_IF_ERROR(plane->StartThreads());
    if (!config.key_file.empty()) {
      KVFERRY_ASSIGN_OR_RETURN(const CurveKeys keys, ReadCurveKeys(config.key_file));
      KVFERRY_RETURN_IF_ERROR(plane->UseKeys(keys));
    }
    if (listen) KVFERRY_RETURN_IF_ERROR(plane->Listen(config));
    return plane;
  } catch (const zmq::error_t& error) {
    return absl::ResourceExhaustedError(absl::StrCat("control: ZeroMQ: ", error.what()));
  }
}

absl::Status CheckKeyFile(const Config& config) {
  return config.key_file.empty() ? absl::OkStatus() : ReadCurveKeys(config.key_file).status();
}

}  // namespace kvferry
