#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "transport/node_impl.h"

namespace kvferry {
namespace {

// One may be an accident of the network; ZeroMQ makes three within half a second.
constexpr int64_t kMaxFailedAttempts = 3;
constexpr size_t kMaxUnmapped = 4096;
// A session that ends sooner than this has been of no use; a peer that ends so many, one after
// another, would have us dial it for ever.
constexpr int64_t kQuickEndMs = 1000;
constexpr int64_t kMaxQuickEnds = 5;
// However little silence a peer bears.
constexpr int64_t kLeastBetweenPingsMs = 10;

// Of as many tensors.
void TakeDTypes(const KvLayout& from, KvLayout* layout) {
  layout->dtype = from.dtype;
  for (size_t i = 0; i < from.tensors.size(); ++i) layout->tensors[i].dtype = from.tensors[i].dtype;
}

// All else waits until the session is ready: it asks for chunks over a link that is still to come.
bool MayComeEarly(const MessageBody& body) {
  return std::holds_alternative<PingMsg>(body) || std::holds_alternative<PongMsg>(body) ||
         std::holds_alternative<ByeMsg>(body);
}

// ZeroMQ does not say why an attempt to connect failed: perhaps it never left this process.
bool HasFileLeft() { return UniqueFd(eventfd(0, EFD_CLOEXEC)).valid(); }

// What has come of the attempts to connect, of which `failed` was the last.
std::string Unreachable(const Session& session, ControlEvents::Attempt failed) {
  const char* why =
      failed != ControlEvents::Attempt::kUnreachable
          ? "whatever listens there does not have this side's key, or is no kvferry: give both "
            "sides the same key_file, or neither any"
      : session.awaits_anyone
          ? "nobody listens there, its name is not known, or its machine cannot be reached"
          : "the process that gave out the ticket has ended, its address is another one, or its "
            "machine cannot be reached";
  const int64_t attempts = session.failed_attempts;
  const std::string tried = failed == ControlEvents::Attempt::kStranger ? ""
                            : attempts == 1                             ? ", tried once"
                                            : absl::StrCat(", tried ", attempts, " times");
  return absl::StrCat("cannot connect to ", session.address, tried, ": ", why);
}

std::string WithoutFiles(const Session& session) {
  return absl::StrCat("cannot connect to ", session.address,
                      ": this process has no file descriptors left; raise the limit (ulimit -n)");
}

}  // namespace

void NodeImpl::CountPeers() {
  metrics_.peers = static_cast<int64_t>(sessions_.size());
  metrics_.peers_mapped = sessions_.CountLinks(&DataPlanes::IsMapped);
}

absl::StatusOr<PeerKey> NodeImpl::SessionFor(const std::string& address, uint64_t epoch,
                                             bool awaits_anyone) {
  PeerKey peer = sessions_.FindDialled(address, epoch);
  if (!peer.empty()) {
    sessions_.Find(peer)->awaits_anyone |= awaits_anyone;
    return peer;
  }
  const Config& config = options_.config;
  KVFERRY_RETURN_IF_ERROR(CheckRoomFor(epoch));
  KVFERRY_ASSIGN_OR_RETURN(peer, control_->Dial(address));
  Session session;
  session.dialled = true;
  session.address = address;
  session.name = address;
  session.greeting_until = DeadlineInMs(config.connect_timeout_ms);
  session.awaits_anyone = awaits_anyone;
  session.network_only = unmapped_.contains(address);
  sessions_.Insert(peer, session);
  SendHello(peer);
  return peer;
}

void NodeImpl::SendHello(const PeerKey& peer) {
  const Session& session = *sessions_.Find(peer);
  HelloMsg hello{options_.name,        options_.model, options_.pool->layout(),
                 data_->addresses(),   options_.heads, options_.converts_pages,
                 options_.casts_values};
  hello.data.session = session.own_id;
  if (session.network_only) hello.data.local.clear();
  SendAside(peer, std::move(hello));
}

absl::Status NodeImpl::JoinSession(Receiver::Fetch& fetch) {
  if (fetch.redial) {
    KVFERRY_ASSIGN_OR_RETURN(fetch.peer, SessionFor(fetch.ticket.address, fetch.ticket.epoch,
                                                    /*awaits_anyone=*/false));
    return absl::OkStatus();
  }
  const Session* session = sessions_.Find(fetch.peer);
  if (session == nullptr) return absl::UnavailableError("the caller's session has ended");
  fetch.ticket.address =  // For logs and errors alone.
      session->name.empty() ? "a peer without a name" : absl::CEscape(session->name);
  fetch.ticket.epoch = session->epoch;
  return absl::OkStatus();
}

void NodeImpl::StartFetch(Receiver::Fetch fetch) {
  const uint64_t id = fetch.id;
  const absl::Status joined = JoinSession(fetch);
  const PeerKey peer = fetch.peer;
  receiver_->Add(std::move(fetch));
  RequestOrCancel(id, joined, peer);
}

void NodeImpl::RequestOrCancel(uint64_t fetch_id, const absl::Status& joined, const PeerKey& peer) {
  if (!joined.ok()) return receiver_->Cancel(fetch_id, joined);
  const Session* session = sessions_.Find(peer);
  if (session->state == Session::State::kReady) RequestWaiting(peer, *session);
}

void NodeImpl::RequestWaiting(const PeerKey& peer, const Session& session) {
  if (!data_->Probing(session.link)) receiver_->OnPeerReady(peer, session.epoch, session.link);
}

void NodeImpl::StartCall(uint64_t id, const std::string& address, Calls::Call call) {
  const absl::StatusOr<PeerKey> peer = SessionFor(address, call.epoch, call.epoch == 0);
  if (peer.ok()) call.peer = *peer;
  calls_->Add(id, std::move(call));
  if (!peer.ok()) return calls_->Cancel(id, WithCutOff(peer.status(), CutOff::kNotAsked));
  if (sessions_.Find(*peer)->state == Session::State::kReady) calls_->OnPeerReady(*peer);
}

void NodeImpl::OnMalformed(const PeerKey& peer, const absl::Status& status) {
  ++metrics_.messages_malformed;
  if (const auto more = malformed_.Next()) {
    Log().warn("dropped a message from {}: {}{}", absl::CEscape(peer), status.ToString(), *more);
  }
  Session* const session = sessions_.Find(peer);
  // Another version of the protocol: it cannot become a session, and one that is greeting ends.
  const bool is_other_version = absl::IsFailedPrecondition(status);
  if (session != nullptr && !is_other_version) {
    // Perhaps it was the answer to the hello: else it would only be said that there was none.
    if (session->state == Session::State::kGreeting) {
      session->unreachable =
          absl::StrCat("what came from there cannot be read: ", status.message());
    }
    return;
  }
  // Perhaps it was a hello, and its sender waits and does not know what cannot be read here.
  RefuseSession(peer, status);
  if (session != nullptr) DropSession(peer, status);
}

// Whoever gave out a ticket listened at its address before, so where nobody does, that process is
// no more. A call without an epoch may have come before the process that is to serve it.
void NodeImpl::OnAttemptFailed(const PeerKey& peer, Attempt failed) {
  Session* const session = sessions_.Find(peer);
  if (session == nullptr || session->state != Session::State::kGreeting) return;
  const bool is_last = failed == Attempt::kStranger;
  ++session->failed_attempts;
  session->unreachable = Unreachable(*session, failed);
  if (session->failed_attempts < kMaxFailedAttempts && !is_last) return;
  const bool is_ours = failed == Attempt::kUnreachable && !HasFileLeft();
  if (is_ours) session->unreachable = WithoutFiles(*session);
  const absl::Status status = is_ours ? absl::ResourceExhaustedError(session->unreachable)
                                      : absl::UnavailableError(session->unreachable);
  if (session->awaits_anyone && !is_last) {
    receiver_->OnPeerGone(peer, status);
  } else {
    DropSession(peer, status);
  }
}

void NodeImpl::OnMade(const PeerKey& peer) {
  Session* const session = sessions_.Find(peer);
  if (session != nullptr) session->unreachable.clear();
}

absl::Status NodeImpl::NotGreeted(const Session& session) const {
  return absl::UnavailableError(
      absl::StrCat("no answer to the hello from ", session.address, " within connect_timeout_ms (",
                   options_.config.connect_timeout_ms, "); ",
                   session.unreachable.empty()
                       ? "is an endpoint of kvferry's listening there, with file descriptors left, "
                         "and is that port (listen_port) open to this side?"
                       : session.unreachable));
}

// The hello may be lost with the first connection, or its answer. It is said on a new one, where
// the old cannot come after it; whatever waits for the session waits on, for as long as it would
// have.
void NodeImpl::OnMadeAgain(const PeerKey& peer) {
  const Session* const session = sessions_.Find(peer);
  if (session == nullptr || session->state != Session::State::kGreeting) return;
  if (const absl::Status dialled = control_->DialAgain(peer); !dialled.ok()) {
    return DropSession(peer, dialled);
  }
  Session again = *session;
  again.own_id = RandomId();  // What it has heard of may be a session to it.
  again.failed_attempts = 0;
  sessions_.Insert(peer, std::move(again));
  SendHello(peer);
}

void NodeImpl::OnStranger() {
  ++metrics_.strangers;
  const auto more = strangers_.Next();
  if (!more) return;
  Log().warn(
      "control: closed a connection that did not become a peer's: no kvferry, or another {}{}",
      options_.config.key_file.empty() ? "release, or one with a key_file, which is not set here"
                                       : "key_file than here, or none",
      *more);
}

void NodeImpl::RefuseSession(const PeerKey& peer, const absl::Status& status) {
  SendAside(peer, RefuseMsg{0, status});
}

void NodeImpl::OnMessage(const PeerKey& peer, Message message) {
  if (const auto* hello = std::get_if<HelloMsg>(&message.body)) {
    OnHello(peer, message.from_epoch, *hello);
    return;
  }
  Session* session = sessions_.Find(peer);
  const auto* refuse = std::get_if<RefuseMsg>(&message.body);
  if (refuse != nullptr && refuse->transfer_id == 0) {
    if (session == nullptr) return;
    if (!session->dialled) return OnGivenUp(peer, refuse->status);
    const absl::Status status(refuse->status.code(), absl::StrCat("refused by ", session->address,
                                                                  ": ", refuse->status.message()));
    // Was accepted, and is not known any more: it has not heard us for too long, or is another
    // process, which the next hello will show.
    const bool forgotten =
        session->state != Session::State::kGreeting && absl::IsNotFound(refuse->status);
    if (forgotten) {
      DropAndBeginAgain(peer, status);
    } else {
      DropSession(peer, status);
    }
    return;
  }
  if (message.to_epoch != epoch_ || session == nullptr ||
      (session->state != Session::State::kGreeting && message.from_epoch != session->epoch)) {
    ++metrics_.messages_stale;
    // Who has not read our welcome means nothing of this session, which a refusal would end.
    if (session != nullptr && message.to_epoch == 0) return;
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
  if (session->state == Session::State::kLinking && !MayComeEarly(message.body)) {
    ++metrics_.messages_stale;
    return;
  }
  OnSessionMessage(peer, *session, std::move(message.body));
}

// What it fetches goes on with that (FetchSource::OnReaderGone); what it calls it calls again.
void NodeImpl::OnGivenUp(const PeerKey& peer, const absl::Status& status) {
  DropSession(
      peer,
      absl::UnavailableError(absl::StrCat("the peer has given the session up: ", status.message())),
      LogLevel::kInfo);
}

absl::Status NodeImpl::CheckConverts(const HelloMsg& hello) const {
  if (!options_.converts_pages) {
    return absl::UnimplementedError("this endpoint counts in pages like its own alone");
  }
  if (!hello.converts) return absl::UnimplementedError("the other side converts no pages");
  return CheckConvertible(options_.pool->layout(), hello.layout);
}

absl::Status NodeImpl::CheckCasts(const HelloMsg& hello) const {
  if (!options_.casts_values) {
    return absl::UnimplementedError("this endpoint gives out values as they are");
  }
  if (!hello.casts) return absl::UnimplementedError("the other side casts no values");
  return CheckCastable(options_.pool->layout(), hello.layout);
}

std::string NodeImpl::DifferenceFrom(const HelloMsg& hello) const {
  const KvLayout& own = options_.pool->layout();
  KvLayout other = hello.layout;
  std::string why;  // Of what could have been converted.
  if (own.page_size != other.page_size || own.page_format != other.page_format) {
    const absl::Status converts = CheckConverts(hello);
    if (converts.ok()) {
      other.page_size = own.page_size;
      other.page_format = own.page_format;
    } else {
      absl::StrAppend(&why, " (", converts.message(), ")");
    }
  }
  if (own.num_tensors() == other.num_tensors()) {
    const absl::Status casts = SameDTypes(own, other) ? absl::OkStatus() : CheckCasts(hello);
    if (casts.ok()) {
      TakeDTypes(own, &other);
    } else {
      absl::StrAppend(&why, " (", casts.message(), ")");
    }
  }
  std::string difference = DifferenceBetween(own, options_.heads, other, hello.heads);
  if (!difference.empty()) absl::StrAppend(&difference, why);
  return difference;
}

// The session that a peer begins anew may come before the end of the one that it has given up is
// known here: it is one peer. Only so many, as it may say so again and again.
absl::Status NodeImpl::CheckRoomFor(uint64_t epoch) const {
  const int64_t limit = options_.config.max_peers;
  if (sessions_.CountOthers(epoch) < limit && static_cast<int64_t>(sessions_.size()) < 2 * limit) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("max_peers (", limit, ") are connected; raise it on the side that listens"));
}

absl::Status NodeImpl::CheckHello(const HelloMsg& hello, uint64_t epoch) const {
  if (!options_.listen) return absl::FailedPreconditionError("this endpoint accepts no peers");
  if (hello.model != options_.model) {
    return absl::FailedPreconditionError(
        absl::StrCat("model: '", options_.model, "' here, '", hello.model,
                     "' there; start both sides with the same model"));
  }
  KVFERRY_RETURN_IF_ERROR(CheckHeadShare(hello.layout, hello.heads));
  if (const std::string difference = DifferenceFrom(hello); !difference.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("KV layout: ", difference, "; start both sides with the same value"));
  }
  return CheckRoomFor(epoch);
}

void NodeImpl::OnHello(const PeerKey& peer, uint64_t epoch, const HelloMsg& hello) {
  // A second hello on one connection: the peer has given the old session up.
  if (sessions_.Find(peer) != nullptr) {
    DropSession(peer, absl::UnavailableError("the peer started a new session"));
  }
  if (const absl::Status status = CheckHello(hello, epoch); !status.ok()) {
    return RefuseHello(peer, hello.name, status);
  }
  Session session;
  session.name = hello.name;
  session.epoch = epoch;
  session.peers_id = hello.data.session;
  session.offered = hello.data;
  session.last_heard = Clock::now();
  sessions_.Insert(peer, std::move(session));
  if (!SameDTypes(options_.pool->layout(), hello.layout)) {
    Log().info("values are cast between this side and peer {}: {} here, {} there",
               Called(hello.name), options_.pool->layout().ToString(), hello.layout.ToString());
  }
  LinkTo(peer);
}

void NodeImpl::RefuseHello(const PeerKey& peer, const std::string& name,
                           const absl::Status& status) {
  ++metrics_.hellos_refused;
  if (const auto more = refused_.Next()) {
    Log().warn("refused peer {}: {}{}", Called(name), status.ToString(), *more);
  }
  RefuseSession(peer, status);
}

void NodeImpl::OnWelcome(const PeerKey& peer, Session& session, uint64_t epoch,
                         const WelcomeMsg& welcome) {
  session.epoch = epoch;
  session.name = welcome.name.empty() ? session.address : welcome.name;
  session.peers_id = welcome.data.session;
  session.offered = welcome.data;
  // As often as each side has to hear of its own pings (Config::Validate).
  if (welcome.silence_ms != 0) {
    session.most_between_pings_ms = std::max(kLeastBetweenPingsMs, welcome.silence_ms / 2);
  }
  const auto unmapped = unmapped_.find(session.address);
  if (unmapped != unmapped_.end() && unmapped->second != epoch) unmapped_.erase(unmapped);
  if (!EndTwin(peer, session)) LinkTo(peer);
}

// A second session to one address is opened because a ticket names another epoch. Either the
// process there is new, and the first session a ghost, or the ticket was stale, and this session is
// one too many: what waits for it meant a process that is no more. Before it is linked, since from
// then on it would be taken for the session of its epoch, by what was to end with it.
bool NodeImpl::EndTwin(const PeerKey& peer, const Session& session) {
  const PeerKey twin = sessions_.FindTwin(peer);
  if (twin.empty()) return false;
  const bool is_stale = sessions_.Find(twin)->epoch == session.epoch;
  if (is_stale) {
    SendAside(peer, ByeMsg{});
    DropSession(peer,
                absl::NotFoundError(absl::StrCat(
                    "the process at ", session.address,
                    " has restarted since it gave out the ticket, and what that named is gone: "
                    "the request needs to be prefilled, or received, anew")));
  } else {
    DropSession(twin, absl::UnavailableError("another process has taken its address"));
  }
  return is_stale;
}

void NodeImpl::LinkTo(const PeerKey& peer) {
  Session& session = *sessions_.Find(peer);
  session.state = Session::State::kLinking;
  session.tried_since = Clock::now();
  const absl::StatusOr<LinkId> link =
      session.dialled ? data_->Connect(session.offered) : data_->Accept(session.offered);
  if (!link.ok()) return OnNotLinked(peer, link.status());
  session.link = *link;
  CountPeers();
  tick_now_ = true;
  if (data_->IsOpen(*link)) OnLinked(peer);
}

void NodeImpl::OnLinked(const PeerKey& peer) {
  Session& session = *sessions_.Find(peer);
  session.state = Session::State::kReady;
  session.offered = {};
  tick_now_ = true;
  if (session.dialled) {
    OnConnected(peer, session);
  } else {
    WelcomePeer(peer, session);
    // What a call has begun before the peer began its session anew.
    RequestWaiting(peer, session);
  }
}

void NodeImpl::WelcomePeer(const PeerKey& peer, const Session& session) {
  Log().info("accepted peer {} over {}", Called(session.name), data_->PathName(session.link));
  WelcomeMsg welcome{options_.name, data_->AddressesFor(session.link),
                     options_.config.heartbeat_timeout_ms};
  welcome.data.session = session.own_id;
  SendAside(peer, std::move(welcome));
}

void NodeImpl::OnConnected(const PeerKey& peer, const Session& session) {
  Log().info("connected to peer {} at {} over {}", Called(session.name), session.address,
             data_->PathName(session.link));
  RequestWaiting(peer, session);
  calls_->OnPeerReady(peer);
}

void NodeImpl::OnNotLinked(const PeerKey& peer, const absl::Status& status) {
  Session& session = *sessions_.Find(peer);
  const bool over_tcp = data_->addresses().tcp.lanes > 0;
  const DataAddresses& offered = session.offered;
  // It has mapped our memory and has offered nothing else, so another hello has to ask for more.
  if (session.dialled && over_tcp && offered.tcp.port == 0 && !offered.local.empty() &&
      !session.network_only) {
    return BeginOverNetwork(peer, status);
  }
  if (session.link != 0) {
    Log().info("peer {} is not reached through shared memory: {}", Called(session.name),
               status.ToString());
    data_->Close(std::exchange(session.link, 0));
    session.offered.local.clear();
    return LinkTo(peer);
  }
  if (session.dialled) {
    // The peer has accepted a session that is not to be: unless it is told it keeps a place for it,
    // of max_peers, until it hears no heartbeat.
    SendAside(peer, ByeMsg{});
    return DropSession(peer, status);
  }
  const std::string name = session.name;
  sessions_.Erase(peer);
  CountPeers();
  receiver_->OnPeerGone(peer, status);  // What a call of the session before it has begun.
  RefuseHello(peer, name, status);
}

void NodeImpl::BeginOverNetwork(const PeerKey& peer, const absl::Status& status) {
  const Session& session = *sessions_.Find(peer);
  const std::string address = session.address;
  if (unmapped_.size() >= kMaxUnmapped) unmapped_.clear();
  unmapped_[address] = session.epoch;
  SendAside(peer, ByeMsg{});
  DropAndBeginAgain(peer, absl::UnavailableError(status.message()));
  // What one side is short of it may have by the next session.
  const bool stays = absl::IsFailedPrecondition(status) || absl::IsPermissionDenied(status);
  if (!stays) unmapped_.erase(address);
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
    calls_->OnCancelMsg(peer, cancel->transfer_id);
  } else if (const auto* refuse = std::get_if<RefuseMsg>(&body)) {
    receiver_->OnRefuse(peer, *refuse);
  } else if (const auto* abort = std::get_if<AbortMsg>(&body)) {
    receiver_->OnAbort(peer, *abort);
  } else if (const auto* call = std::get_if<CallMsg>(&body)) {
    calls_->OnCallMsg(peer, *call);
  } else if (auto* reply = std::get_if<ReplyMsg>(&body)) {
    calls_->OnReplyMsg(peer, std::move(*reply));
  } else if (std::holds_alternative<PingMsg>(body)) {
    SendAside(peer, PongMsg{});
  } else if (std::holds_alternative<ByeMsg>(body)) {
    if (!stop_) SendAside(peer, ByeMsg{});  // Else ours is on its way already.
    DropSession(peer,
                absl::UnavailableError(
                    absl::StrCat("peer ", Called(session.name), " has closed its endpoint")),
                LogLevel::kInfo);
  }
}

void NodeImpl::DropSession(const PeerKey& peer, const absl::Status& status, LogLevel level) {
  const Session* found = sessions_.Find(peer);
  if (found == nullptr) return;
  const Session session = *found;
  if (const auto more = level == LogLevel::kWarn ? ended_.Next() : "") {
    Log().log(level, "session with peer {} ended: {}{}", Called(session.name), status.ToString(),
              *more);
  }
  sessions_.Erase(peer);  // First: nothing below may try to send to it.
  crowded_.erase(peer);
  CountPeers();
  ++metrics_.peers_lost;
  if (session.link != 0) data_->Close(session.link);
  control_->Hangup(peer);
  sender_->OnPeerGone(peer, status);
  receiver_->OnPeerGone(peer, status);
  calls_->OnPeerGone(peer, status);
  tick_now_ = true;  // Leases whose transfers have just ended can expire again.
}

void NodeImpl::DropAndMove(const PeerKey& peer, const absl::Status& status, Deadline since,
                           LogLevel level) {
  const std::string address = sessions_.Find(peer)->address;
  std::vector<Receiver::Fetch> fetches = receiver_->TakeUnfinished(peer, since);
  std::vector<std::pair<uint64_t, Calls::Call>> calls = calls_->TakeUnasked(peer, since);
  DropSession(peer, status, level);
  for (Receiver::Fetch& fetch : fetches) StartFetch(std::move(fetch));
  for (auto& [id, call] : calls) StartCall(id, address, std::move(call));
}

// The peer may only have been stopped, or see nothing of it and have this side's calls and fetches
// still: this is the word that it finds beside the end of its connections.
void NodeImpl::GiveUpAndBeginAgain(const PeerKey& peer, const absl::Status& status) {
  RefuseSession(peer, absl::NotFoundError(
                          absl::StrCat("this side has given the session up: ", status.message())));
  DropAndBeginAgain(peer, status);
}

// Silence may be the connection's and not the peer's, or have been our own: what can go on does, on
// a new session. A connection that breaks is another matter: then the peer's process has ended.
void NodeImpl::DropAndBeginAgain(const PeerKey& peer, const absl::Status& status) {
  const Session session = *sessions_.Find(peer);
  // Otherwise a session has been of use, or has taken its time to end, as a silent one does.
  const int64_t quick_ms = std::min(kQuickEndMs, options_.config.heartbeat_timeout_ms / 2);
  const bool is_quick = Clock::now() - session.began < std::chrono::milliseconds(quick_ms);
  const int64_t quick_ends = is_quick ? session.quick_ends + 1 : 0;
  if (quick_ends > kMaxQuickEnds) return DropSession(peer, status);
  DropAndMove(peer, status, Deadline::min());
  Session* const next = sessions_.Find(sessions_.FindDialled(session.address, 0));
  if (next == nullptr || next->state != Session::State::kGreeting) return;
  next->quick_ends = quick_ends;
  // It may be one that a stale ticket has begun, long ago.
  next->tried_since = Clock::now();
  next->greeting_until = DeadlineInMs(options_.config.connect_timeout_ms);
}

}  // namespace kvferry
