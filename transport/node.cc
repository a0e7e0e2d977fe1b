#include "transport/node.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/random.h"
#include "base/status.h"
#include "transport/arena.h"
#include "transport/command_queue.h"
#include "transport/control/zmq_control_plane.h"
#include "transport/metrics.h"
#include "transport/receiver.h"
#include "transport/sender.h"
#include "transport/sessions.h"
#include "transport/ucx/ucx_data_plane.h"

namespace kvferry {
namespace {

// While data flows, control messages are looked for this often rather than every time round.
constexpr auto kControlInterval = std::chrono::microseconds(100);
constexpr int64_t kMaxSleepMs = 60000;
// How long an endpoint that closes waits for its peers to have read its goodbye.
constexpr auto kFarewell = std::chrono::milliseconds(250);

absl::Status CheckOptions(const Node::Options& options) {
  KVFERRY_RETURN_IF_ERROR(options.config.Validate());
  if (options.pool == nullptr) return absl::InvalidArgumentError("node: no pool");
  if (options.model.empty() || options.model.size() > kMaxModelBytes) {
    return absl::InvalidArgumentError(absl::StrCat("node: the model's name has ",
                                                   options.model.size(),
                                                   " bytes but must have 1 to ", kMaxModelBytes));
  }
  if (options.name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("node: the name has ", options.name.size(), " bytes, limit ", kMaxNameBytes));
  }
  return absl::OkStatus();
}

class NodeImpl final : public Node, public ControlEvents, public DataEvents, public Outbox {
 public:
  explicit NodeImpl(Options options) : options_(std::move(options)), epoch_(RandomId()) {}
  ~NodeImpl() override;
  absl::Status Init();

  uint64_t epoch() const override { return epoch_; }
  const std::string& listen_address() const override { return listen_address_; }
  absl::StatusOr<std::shared_ptr<FetchHandle>> Fetch(FetchRequest request) override;
  void LeaseChanged(uint64_t lease_id) override;
  absl::Status AbortLease(uint64_t lease_id, const absl::Status& why, Deadline deadline) override;
  std::vector<std::pair<std::string, int64_t>> Metrics() const override {
    return metrics_.Snapshot();
  }

 private:
  // The progress thread.
  void Run();
  bool Work();
  void Sleep(Deadline until);
  Deadline Tick(Deadline now);
  bool HasReadySession();
  void SayGoodbye();

  // ControlEvents, DataEvents, Outbox.
  void OnMessage(const PeerKey& peer, Message message) override;
  void OnMalformed(const PeerKey& peer, const absl::Status& status) override;
  void OnChunk(const ChunkHeader& header, std::span<const std::byte> payload) override;
  void OnCredit(const CreditHeader& header) override;
  void OnLinkDown(LinkId link, const absl::Status& status) override;
  void Send(const PeerKey& peer, MessageBody body) override;
  DataPlane& data() override { return *data_; }

  // The session that a fetch by that ticket goes through; dials where there is none.
  absl::StatusOr<PeerKey> SessionFor(const Ticket& ticket);
  void StartFetch(Receiver::Fetch fetch);
  void OnHello(const PeerKey& peer, uint64_t epoch, const HelloMsg& hello);
  absl::Status CheckHello(const HelloMsg& hello) const;
  void OnWelcome(const PeerKey& peer, Session& session, uint64_t epoch, const WelcomeMsg& welcome);
  void OnSessionMessage(const PeerKey& peer, Session& session, MessageBody body);
  void RefuseSession(const PeerKey& peer, const absl::Status& status);
  void DropSession(const PeerKey& peer, const absl::Status& status,
                   spdlog::level::level_enum level = spdlog::level::warn);
  void DropSilent(const PeerKey& peer);

  const Options options_;
  const uint64_t epoch_;
  std::string listen_address_;

  kvferry::Metrics metrics_;
  // Shared with handles, which may outlive the node.
  const std::shared_ptr<CommandQueue> commands_ = std::make_shared<CommandQueue>();
  std::atomic<bool> stop_{false};

  // From here on: the progress thread's alone, once it runs. The arena outlives the data plane,
  // which may still be sending from it.
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<ControlPlane> control_;
  std::unique_ptr<DataPlane> data_;
  std::unique_ptr<Sender> sender_;
  std::unique_ptr<Receiver> receiver_;
  Sessions sessions_;
  std::vector<std::pair<PeerKey, absl::Status>>
      lost_;  // Found while sending; dropped when it is safe.
  Deadline next_control_{};
  Deadline next_tick_{};
  bool tick_now_ = false;

  std::thread thread_;
};

absl::Status NodeImpl::Init() {
  const Config& config = options_.config;
  KVFERRY_ASSIGN_OR_RETURN(arena_, Arena::Create(config.arena_bytes, config.chunk_bytes));
  KVFERRY_ASSIGN_OR_RETURN(control_, MakeZmqControlPlane(config, options_.listen));
  KVFERRY_ASSIGN_OR_RETURN(data_, MakeUcxDataPlane(config));
  listen_address_ = control_->listen_address();
  sender_ = std::make_unique<Sender>(config, options_.pool, options_.source, arena_.get(), this,
                                     &metrics_);
  receiver_ = std::make_unique<Receiver>(config, this, &metrics_);
  if (commands_->wake().get() < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("node: eventfd: ", std::strerror(errno)));
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

NodeImpl::~NodeImpl() {
  stop_ = true;
  commands_->wake().Wake();
  if (thread_.joinable()) thread_.join();
}

// ---------------------------------------------------------------- called from any thread

absl::StatusOr<std::shared_ptr<FetchHandle>> NodeImpl::Fetch(FetchRequest request) {
  const Ticket& ticket = request.ticket;
  KVFERRY_RETURN_IF_ERROR(CheckHostAllowed(ticket.address, options_.config));
  KVFERRY_RETURN_IF_ERROR(request.positions.CheckWithin(ticket.num_pages));
  if (request.positions.num_pages() != request.pages.num_pages()) {
    return absl::InvalidArgumentError(absl::StrCat("fetch: ", request.positions.num_pages(),
                                                   " pages of the ticket into ",
                                                   request.pages.num_pages(), " local pages"));
  }
  if (request.positions.runs().size() > kMaxRuns) {
    return absl::InvalidArgumentError(absl::StrCat("fetch: ", request.positions.runs().size(),
                                                   " runs of pages, limit ", kMaxRuns,
                                                   "; fetch in several parts"));
  }
  const std::vector<int64_t> pages = request.pages.ToPages();
  KVFERRY_ASSIGN_OR_RETURN(StreamPlan plan,
                           StreamPlan::Create(options_.pool, std::move(request.pages)));
  const uint64_t id = RandomId();
  auto handle = std::make_shared<FetchHandle>(
      pages, plan.num_layers(), plan.total_bytes(), [this, commands = commands_, id] {
        commands->Post([this, id] { receiver_->Cancel(id, absl::CancelledError("cancelled")); });
      });
  Receiver::Fetch fetch{
      id,          handle, ticket, std::move(request.positions), std::move(plan), request.deadline,
      Clock::now()};
  commands_->Post([this, fetch = std::move(fetch)]() mutable { StartFetch(std::move(fetch)); });
  return handle;
}

void NodeImpl::LeaseChanged(uint64_t lease_id) {
  commands_->Post([this, lease_id] { sender_->OnLeaseChanged(lease_id); });
}

absl::Status NodeImpl::AbortLease(uint64_t lease_id, const absl::Status& why, Deadline deadline) {
  auto latch = std::make_shared<Latch>();
  commands_->Post([this, lease_id, why, latch] {
    sender_->AbortLease(lease_id, why);
    latch->Open();
  });
  if (latch->Wait(deadline)) return absl::OkStatus();
  return absl::DeadlineExceededError("the progress thread did not answer in time");
}

// ---------------------------------------------------------------- the progress thread

void NodeImpl::Run() {
  const auto busy_poll = std::chrono::microseconds(options_.config.busy_poll_us);
  Deadline last_busy = Clock::now();
  while (!stop_) {
    const bool busy = Work();
    const Deadline now = Clock::now();
    if (now >= next_tick_ || tick_now_) next_tick_ = Tick(now);
    if (busy) {
      last_busy = now;
    } else if (now - last_busy >= busy_poll &&
               !tick_now_) {  // The tick itself may ask for another.
      Sleep(next_tick_);
    }
  }
  SayGoodbye();
}

bool NodeImpl::Work() {
  bool busy = commands_->Run();
  // A command may have brought a deadline nearer than the next tick.
  tick_now_ |= busy;
  const bool data_busy = data_->Progress(this) | sender_->Pump();
  const Deadline now = Clock::now();
  if (!data_busy || now >= next_control_) {
    busy |= control_->Progress(this);
    next_control_ = now + kControlInterval;
  }
  for (const auto& [peer, status] : std::exchange(lost_, {})) DropSession(peer, status);
  return busy || data_busy;
}

void NodeImpl::Sleep(Deadline until) {
  // Anything that arrives after the planes are armed makes their fds readable.
  if (!data_->Arm() || !control_->Arm()) return;
  pollfd fds[] = {{data_->event_fd(), POLLIN, 0},
                  {control_->event_fd(), POLLIN, 0},
                  {commands_->wake().get(), POLLIN, 0}};
  const int64_t sleep_ms = std::min(MsUntil(until, Clock::now()), kMaxSleepMs);
  poll(fds, std::size(fds), static_cast<int>(sleep_ms));
  if ((fds[2].revents & POLLIN) != 0) commands_->wake().Drain();
}

Deadline NodeImpl::Tick(Deadline now) {
  tick_now_ = false;
  Deadline next = std::min(sender_->Tick(now), receiver_->Tick(now));
  Deadline sessions_next;
  const Config& config = options_.config;
  for (const auto& [peer, due] : sessions_.TakeDue(now, config.heartbeat_interval_ms,
                                                   config.heartbeat_timeout_ms, &sessions_next)) {
    switch (due) {
      case Sessions::Due::kNothing:
        break;
      case Sessions::Due::kPing:
        Send(peer, PingMsg{});
        break;
      case Sessions::Due::kDead:
        DropSilent(peer);
        break;
      case Sessions::Due::kGreetingFailed:
        DropSession(peer, absl::UnavailableError(absl::StrCat(
                              "no answer to the hello from ", sessions_.Find(peer)->address,
                              " within ", "connect_timeout_ms (", config.connect_timeout_ms,
                              "); is a prefill endpoint listening there?")));
        break;
    }
  }
  return std::min(next, sessions_next);
}

bool NodeImpl::HasReadySession() {
  const std::vector<PeerKey> peers = sessions_.Keys();
  return std::any_of(peers.begin(), peers.end(), [&](const PeerKey& peer) {
    return sessions_.Find(peer)->state == Session::State::kReady;
  });
}

void NodeImpl::SayGoodbye() {
  commands_->Run();
  sender_->AbortAll(absl::UnavailableError("the prefill endpoint is closing"));
  receiver_->CancelAll(absl::CancelledError("the decode endpoint is closing"));
  for (const PeerKey& peer : sessions_.Keys()) Send(peer, ByeMsg{});
  // A peer that has read the goodbye answers it. If we closed our links at once, it could see a
  // broken connection before it reads why.
  const Deadline farewell = Clock::now() + kFarewell;
  while (HasReadySession() && Clock::now() < farewell) {
    if (!Work()) Sleep(farewell);
  }
  for (const PeerKey& peer : sessions_.Keys()) {
    DropSession(peer, absl::CancelledError("this endpoint is closing"), spdlog::level::info);
  }
  data_.reset();     // Waits for the links, so that no send is left that reads the arena.
  control_.reset();  // Lets the goodbyes out.
}

void NodeImpl::Send(const PeerKey& peer, MessageBody body) {
  const Session* session = sessions_.Find(peer);
  const Message message{epoch_, session == nullptr ? 0 : session->epoch, std::move(body)};
  const absl::Status status = control_->Send(peer, message);
  if (!status.ok() && session != nullptr) lost_.emplace_back(peer, status);
}

// ---------------------------------------------------------------- sessions

absl::StatusOr<PeerKey> NodeImpl::SessionFor(const Ticket& ticket) {
  PeerKey peer = sessions_.FindDialled(ticket.address, ticket.epoch);
  if (!peer.empty()) return peer;
  const Config& config = options_.config;
  if (static_cast<int64_t>(sessions_.size()) >= config.max_peers) {
    return absl::ResourceExhaustedError(
        absl::StrCat("max_peers (", config.max_peers, ") are connected"));
  }
  KVFERRY_ASSIGN_OR_RETURN(peer, control_->Dial(ticket.address));
  Session session;
  session.dialled = true;
  session.address = ticket.address;
  session.name = ticket.address;
  session.greeting_until = DeadlineInMs(config.connect_timeout_ms);
  sessions_.Insert(peer, session);
  Send(peer,
       HelloMsg{options_.name, options_.model, options_.pool->layout(), data_->worker_address()});
  return peer;
}

void NodeImpl::StartFetch(Receiver::Fetch fetch) {
  const uint64_t id = fetch.id;
  const absl::StatusOr<PeerKey> peer = SessionFor(fetch.ticket);
  if (peer.ok()) fetch.peer = *peer;
  receiver_->Add(std::move(fetch));
  if (!peer.ok()) return receiver_->Cancel(id, peer.status());
  const Session* session = sessions_.Find(*peer);
  if (session->state == Session::State::kReady) {
    receiver_->OnPeerReady(*peer, session->epoch, session->link);
  }
}

void NodeImpl::OnMalformed(const PeerKey& peer, const absl::Status& status) {
  ++metrics_.messages_malformed;
  Log().warn("dropped a message from {}: {}", absl::CEscape(peer), status.ToString());
  if (!absl::IsFailedPrecondition(status)) return;
  // Another version of the protocol: it cannot become a session, and one that is greeting ends.
  RefuseSession(peer, status);
  if (sessions_.Find(peer) != nullptr) DropSession(peer, status);
}

void NodeImpl::RefuseSession(const PeerKey& peer, const absl::Status& status) {
  Send(peer, RefuseMsg{0, status});
}

void NodeImpl::OnMessage(const PeerKey& peer, Message message) {
  if (const auto* hello = std::get_if<HelloMsg>(&message.body)) {
    OnHello(peer, message.from_epoch, *hello);
    return;
  }
  Session* session = sessions_.Find(peer);
  const auto* refuse = std::get_if<RefuseMsg>(&message.body);
  if (refuse != nullptr && refuse->transfer_id == 0) {
    if (session != nullptr && session->dialled) {
      DropSession(
          peer, absl::Status(refuse->status.code(), absl::StrCat("refused by ", session->address,
                                                                 ": ", refuse->status.message())));
    }
    return;
  }
  if (message.to_epoch != epoch_ || session == nullptr ||
      (session->state == Session::State::kReady && message.from_epoch != session->epoch)) {
    ++metrics_.messages_stale;
    RefuseSession(peer,
                  absl::NotFoundError("no session with that epoch; this process has restarted or "
                                      "has given the session up"));
    return;
  }
  session->last_heard = Clock::now();
  session->pings = 0;
  if (session->state == Session::State::kGreeting) {
    const auto* welcome = std::get_if<WelcomeMsg>(&message.body);
    if (welcome != nullptr) OnWelcome(peer, *session, message.from_epoch, *welcome);
    return;
  }
  OnSessionMessage(peer, *session, std::move(message.body));
}

absl::Status NodeImpl::CheckHello(const HelloMsg& hello) const {
  if (!options_.listen) return absl::FailedPreconditionError("this endpoint accepts no peers");
  if (hello.model != options_.model) {
    return absl::FailedPreconditionError(
        absl::StrCat("model: '", options_.model, "' here, '", hello.model,
                     "' there; start both sides with the same model"));
  }
  const std::string difference = options_.pool->layout().FirstDifference(hello.layout);
  if (!difference.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("KV layout: ", difference, "; start both sides with the same value"));
  }
  if (static_cast<int64_t>(sessions_.size()) >= options_.config.max_peers) {
    return absl::ResourceExhaustedError(
        absl::StrCat("max_peers (", options_.config.max_peers, ") are connected"));
  }
  return absl::OkStatus();
}

void NodeImpl::OnHello(const PeerKey& peer, uint64_t epoch, const HelloMsg& hello) {
  // A second hello on one connection: the peer has given the old session up.
  if (sessions_.Find(peer) != nullptr) {
    DropSession(peer, absl::UnavailableError("the peer started a new session"));
  }
  absl::Status status = CheckHello(hello);
  LinkId link = 0;
  if (status.ok()) {
    absl::StatusOr<LinkId> connected = data_->Connect(hello.worker_address);
    status = connected.status();
    if (connected.ok()) link = *connected;
  }
  if (!status.ok()) {
    ++metrics_.hellos_refused;
    Log().warn("refused peer '{}': {}", absl::CEscape(hello.name), status.ToString());
    RefuseSession(peer, status);
    return;
  }
  Session session;
  session.state = Session::State::kReady;
  session.name = hello.name;
  session.epoch = epoch;
  session.link = link;
  session.last_heard = Clock::now();
  sessions_.Insert(peer, session);
  metrics_.peers = static_cast<int64_t>(sessions_.size());
  tick_now_ = true;
  Log().info("accepted peer '{}'", absl::CEscape(hello.name));
  Send(peer, WelcomeMsg{options_.name, data_->worker_address()});
}

void NodeImpl::OnWelcome(const PeerKey& peer, Session& session, uint64_t epoch,
                         const WelcomeMsg& welcome) {
  const absl::StatusOr<LinkId> link = data_->Connect(welcome.worker_address);
  if (!link.ok()) {
    DropSession(peer, link.status());
    return;
  }
  session.state = Session::State::kReady;
  session.name = welcome.name.empty() ? session.address : welcome.name;
  session.epoch = epoch;
  session.link = *link;
  metrics_.peers = static_cast<int64_t>(sessions_.size());
  tick_now_ = true;
  Log().info("connected to '{}' at {}", absl::CEscape(session.name), session.address);
  receiver_->OnPeerReady(peer, epoch, *link);
  // A second session to one address was opened because a ticket named another epoch. Either the
  // process there is new, and the old session a ghost, or the ticket was stale, and this session is
  // one too many.
  const PeerKey twin = sessions_.FindTwin(peer);
  if (twin.empty()) return;
  if (sessions_.Find(twin)->epoch == epoch) {
    DropSession(peer, absl::AlreadyExistsError("there is a session with this process already"));
  } else {
    DropSession(twin, absl::UnavailableError("another process has taken its address"));
  }
}

void NodeImpl::OnSessionMessage(const PeerKey& peer, Session& session, MessageBody body) {
  // Whatever begins or ends a transfer may bring a deadline nearer; beats do not.
  if (!std::holds_alternative<PingMsg>(body) && !std::holds_alternative<PongMsg>(body))
    tick_now_ = true;
  if (auto* fetch = std::get_if<FetchMsg>(&body)) {
    sender_->OnFetch(peer, session.link, std::move(*fetch));
  } else if (const auto* done = std::get_if<DoneMsg>(&body)) {
    sender_->OnDone(peer, *done);
  } else if (const auto* cancel = std::get_if<CancelMsg>(&body)) {
    sender_->OnCancel(peer, *cancel);
  } else if (const auto* refuse = std::get_if<RefuseMsg>(&body)) {
    receiver_->OnRefuse(peer, *refuse);
  } else if (const auto* abort = std::get_if<AbortMsg>(&body)) {
    receiver_->OnAbort(peer, *abort);
  } else if (std::holds_alternative<PingMsg>(body)) {
    Send(peer, PongMsg{});
  } else if (std::holds_alternative<ByeMsg>(body)) {
    if (!stop_) Send(peer, ByeMsg{});  // Else ours is on its way already.
    DropSession(peer,
                absl::UnavailableError(
                    absl::StrCat("peer ", absl::CEscape(session.name), " has closed its endpoint")),
                spdlog::level::info);
  }
}

void NodeImpl::DropSession(const PeerKey& peer, const absl::Status& status,
                           spdlog::level::level_enum level) {
  const Session* found = sessions_.Find(peer);
  if (found == nullptr) return;
  const Session session = *found;
  Log().log(level, "session with '{}' ended: {}", absl::CEscape(session.name), status.ToString());
  sessions_.Erase(peer);  // First: nothing below may try to send to it.
  metrics_.peers = static_cast<int64_t>(sessions_.size());
  ++metrics_.peers_lost;
  if (session.link != 0) data_->Close(session.link);
  control_->Hangup(peer);
  sender_->OnPeerGone(peer, status);
  receiver_->OnPeerGone(peer, status);
  tick_now_ = true;  // Leases whose transfers have just ended can expire again.
}

void NodeImpl::DropSilent(const PeerKey& peer) {
  const Session& session = *sessions_.Find(peer);
  const absl::Status status = absl::UnavailableError(
      absl::StrCat("peer ", absl::CEscape(session.name), " was silent for heartbeat_timeout_ms (",
                   options_.config.heartbeat_timeout_ms, "), ", session.pings,
                   " pings sent meanwhile; it is ", "taken for dead"));
  // Silence may be the connection's and not the peer's, so what can begin again does, on a new one.
  // A connection that breaks is another matter: then the peer's process has ended.
  std::vector<Receiver::Fetch> again = receiver_->TakeUnread(peer);
  DropSession(peer, status);
  for (Receiver::Fetch& fetch : again) StartFetch(std::move(fetch));
}

// ---------------------------------------------------------------- data plane events

void NodeImpl::OnChunk(const ChunkHeader& header, std::span<const std::byte> payload) {
  receiver_->OnChunk(header, payload);
}

void NodeImpl::OnCredit(const CreditHeader& header) { sender_->OnCredit(header); }

void NodeImpl::OnLinkDown(LinkId link, const absl::Status& status) {
  // A peer that closes in order says so on the other plane: better that than a lost connection.
  control_->Progress(this);
  const PeerKey peer = sessions_.FindLink(link);
  if (peer.empty()) return;
  // The notice may still be on its way: a peer that leaves while nothing moves is no cause for
  // alarm.
  const bool idle = metrics_.fetches_active == 0 && metrics_.transfers_active == 0;
  DropSession(peer, status, idle ? spdlog::level::info : spdlog::level::warn);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Node>> Node::Start(Options options) {
  KVFERRY_RETURN_IF_ERROR(CheckOptions(options));
  auto node = std::make_unique<NodeImpl>(std::move(options));
  KVFERRY_RETURN_IF_ERROR(node->Init());
  return node;
}

}  // namespace kvferry
