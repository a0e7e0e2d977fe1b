#include "transport/node.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/thread.h"
#include "transport/control/codec.h"
#include "transport/control/zmq_control_plane.h"
#include "transport/node_impl.h"

namespace kvferry {
namespace {

// While data flows, control messages are looked for this often rather than every time round.
constexpr auto kControlInterval = std::chrono::microseconds(100);
constexpr int64_t kMaxSleepMs = 60000;
// While messages wait for a peer that takes none, which seldom is.
constexpr auto kLookForRoom = std::chrono::milliseconds(5);
// How long an endpoint that closes waits for its peers to have read its goodbye.
constexpr auto kFarewell = std::chrono::milliseconds(250);
// Of messages that wait for one peer: above the first calls and fetches wait until half of it is
// left, above the second what is long of replies is left out. Short words go on up to
// kMaxMessagesWaiting.
constexpr int64_t kRoomForPeer = 4 << 20;
constexpr int64_t kMaxRepliesWaiting = 16 << 20;
constexpr size_t kLongReply = 4 << 10;

absl::Status CheckOptions(const Node::Options& options) {
  KVFERRY_RETURN_IF_ERROR(options.config.Validate());
  if (options.pool == nullptr) return absl::InvalidArgumentError("node: no pool");
  KVFERRY_RETURN_IF_ERROR(CheckHeadShare(options.pool->layout(), options.heads));
  KVFERRY_RETURN_IF_ERROR(CheckScales(options.pool->layout(), options.scales));
  if (options.source != nullptr && options.config.network_path == "direct") {
    KVFERRY_RETURN_IF_ERROR(
        CheckOnHost("network_path is 'direct', but the pool", options.pool->memory()));
  }
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

// So many pages of ours a ticket may be of: it counts the other side's, whose size only that side
// knows.
int64_t MostPages(const Ticket& ticket, const KvLayout& layout) {
  const int64_t full = ticket.num_tokens / layout.page_size;
  return std::max(ticket.num_pages, full + (ticket.num_tokens % layout.page_size > 0 ? 1 : 0));
}

// Whoever has dialled asks, the other side only answers.
std::string PingsMeanwhile(const Session& session) {
  return session.dialled ? absl::StrCat(session.pings, " pings sent meanwhile")
                         : "none of its pings came";
}

}  // namespace

// What a lane's thread does with its chunks; what follows from them is the progress thread's.
class NodeImpl::TakerOfLane final : public LaneTaker {
 public:
  explicit TakerOfLane(NodeImpl* node) : node_(node), copy_(node->lane_copies_.get()) {}
  void OnChunk(const ChunkHeader& header, const Payload& payload, Intact intact) override {
    OnLanded(header, node_->receiver_->Land(header, payload, intact, &copy_));
  }
  std::unique_ptr<ChunkSink> OnChunkBegins(const ChunkHeader& header) override {
    return node_->receiver_->Begin(
        header, &copy_,
        [this](const ChunkHeader& of, const absl::Status& status) { OnLanded(of, status); });
  }
  void Refuse(const ChunkHeader& header, const absl::Status& status) override {
    OnLanded(header, status);
  }

 private:
  void OnLanded(const ChunkHeader& header, const absl::Status& status) {
    node_->commands_->Post(
        [node = node_, header, status] { node->receiver_->OnLanded(header, status); });
  }

  NodeImpl* const node_;
  PieceCopy copy_;
};

absl::Status NodeImpl::Init() {
  if (const int error = commands_->wake().error(); error != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("node: eventfd: ", std::strerror(error)));
  }
  const Config& config = options_.config;
  KVFERRY_ASSIGN_OR_RETURN(arena_, Arena::Create(config.arena_bytes, config.chunk_bytes));
  PinArena();
  KVFERRY_ASSIGN_OR_RETURN(control_, MakeZmqControlPlane(config, options_.listen));
  listen_address_ = control_->listen_address();
  const bool chooses =
      options_.source != nullptr && ((SharedPool() != nullptr && config.same_host_path == "auto") ||
                                     config.network_path == "auto");
  const MachineTraits machine{chooses ? MeasuredCopyCosts() : CopyCosts{},
                              std::max(1U, std::thread::hardware_concurrency())};
  ValueFormat values;
  if (options_.casts_values) values = ValueFormatOf(options_.pool->layout(), options_.scales);
  sender_ = std::make_unique<Sender>(config, options_.pool, options_.source, arena_.get(), this,
                                     &metrics_, machine, options_.heads, values);
  KVFERRY_ASSIGN_OR_RETURN(copy_threads_, ThreadPool::Create(config.copy_threads - 1));
  KVFERRY_ASSIGN_OR_RETURN(lane_copies_, ThreadPool::Create(0));
  receiver_ =
      std::make_unique<Receiver>(config, copy_threads_.get(), this, &metrics_, std::move(values));
  calls_ = std::make_unique<Calls>(config, options_.handler, this, &metrics_);
  // After the receiver, which the lanes' threads call.
  KVFERRY_ASSIGN_OR_RETURN(DirectReads::Readable readable, MakeReadable());
  KVFERRY_ASSIGN_OR_RETURN(
      data_, DataPlanes::Create(
                 {config, arena_.get(), PoolForPeers(), std::move(readable), commands_, &metrics_,
                  [this] { return std::make_unique<TakerOfLane>(this); }, listen_address_}));
  KVFERRY_ASSIGN_OR_RETURN(thread_, StartThread("node", [this] { Run(); }));
  if (options_.listen) {
    Log().info("'{}' listens on {}, {}", options_.name, listen_address_,
               config.key_file.empty() ? "for all who reach it" : "for who has the key");
  }
  return absl::OkStatus();
}

// So that a device gathers straight into chunks. It can gather without.
void NodeImpl::PinArena() {
  if (options_.source == nullptr) return;
  auto pinned = options_.pool->memory().Pin(arena_->memory());
  if (pinned.ok()) {
    arena_pin_ = *std::move(pinned);
  } else {
    Log().warn("chunks are copied once more on their way from {}: {}",
               options_.pool->memory().name(), pinned.status().ToString());
  }
}

// What peers may read in place: nothing of a node that publishes nothing.
const SharedMemory* NodeImpl::SharedPool() const {
  return options_.source == nullptr ? nullptr : options_.pool->shared_memory();
}

MappedPool NodeImpl::PoolForPeers() {
  const PoolMemory& memory = options_.pool->memory();
  MappedPool pool{SharedPool(), {}, &memory};
  if (memory.on_host()) return pool;
  if (options_.source == nullptr || options_.config.same_host_path == "network") return pool;
  if (arena_->fd() < 0) return pool;  // Nor is there a plane for them.
  pool.parts = PoolParts();
  Sender::OnDevice on_device{.pages = !pool.parts.empty()};
  for (const auto& part : pool.parts) on_device.arena_at += static_cast<uint64_t>(part.bytes);
  MakeDeviceArena();
  if (device_arena_ != nullptr) {
    on_device.arena = device_arena_.get();
    const auto& parts = device_arena_->parts();
    pool.parts.insert(pool.parts.end(), parts.begin(), parts.end());
  }
  sender_->UseOnDevice(on_device);
  return pool;
}

// Of a pool on a device; none where its memory has no names that others could map all of it by.
std::vector<PoolMemory::SharedPart> NodeImpl::PoolParts() const {
  const PoolMemory& memory = options_.pool->memory();
  std::vector<PoolMemory::SharedPart> all;
  for (const PoolRegions::Region& region : sender_->regions().regions()) {
    absl::StatusOr<std::vector<PoolMemory::SharedPart>> parts = memory.Share(region);
    if (!parts.ok()) {
      Log().warn("peers on this host get copies of the pages in {}: {}", memory.name(),
                 parts.status().ToString());
      return {};
    }
    all.insert(all.end(), parts->begin(), parts->end());
  }
  if (sender_->regions().EachInOne(*options_.pool, all)) return all;
  Log().warn("peers on this host get copies of the pages in {}: a buffer lies in two allocations",
             memory.name());
  return {};
}

// Pages that cannot be read in place can do without, by way of the host.
void NodeImpl::MakeDeviceArena() {
  const int64_t bytes = options_.config.device_arena_bytes;
  if (bytes == 0) return;
  const PoolMemory& memory = options_.pool->memory();
  absl::StatusOr<std::unique_ptr<DeviceArena>> arena = DeviceArena::Create(memory, bytes);
  if (arena.ok()) {
    device_arena_ = *std::move(arena);
  } else {
    Log().warn("pages that peers on this host cannot read in {} go through the host: {}",
               memory.name(), arena.status().ToString());
  }
}

absl::StatusOr<DirectReads::Readable> NodeImpl::MakeReadable() {
  if (options_.source == nullptr || options_.config.network_path == "packed" ||
      !options_.pool->memory().on_host()) {
    return DirectReads::Readable();
  }
  KVFERRY_ASSIGN_OR_RETURN(guards_, Guards::Create());
  sender_->UseGuards(guards_.get());
  return DirectReads::Readable{guards_->memory(), sender_->regions().regions()};
}

NodeImpl::~NodeImpl() {
  if (getpid() != maker_) {
    LeaveToMaker();
    return;
  }
  stop_ = true;
  commands_->wake().Wake();
  if (thread_.joinable()) thread_.join();
}

// In a child that was forked meanwhile. What these have to end are its parent's connections too,
// and threads to wait for are not here: they are never destroyed.
void NodeImpl::LeaveToMaker() {
  const auto leak = [](auto& owner) { new auto(std::move(owner)); };
  leak(thread_);
  leak(control_);
  leak(data_);
  leak(sender_);
  leak(receiver_);
  leak(calls_);
  leak(copy_threads_);
  leak(lane_copies_);
  leak(device_arena_);
  leak(arena_pin_);
}

// ---------------------------------------------------------------- called from any thread

absl::Status NodeImpl::CheckFetch(const FetchRequest& request) const {
  const int64_t most_pages = options_.converts_pages
                                 ? MostPages(request.ticket, options_.pool->layout())
                                 : request.ticket.num_pages;
  KVFERRY_RETURN_IF_ERROR(request.positions.CheckWithin(most_pages));
  if (request.positions.num_pages() != request.pages.num_pages()) {
    return absl::InvalidArgumentError(absl::StrCat("fetch: ", request.positions.num_pages(),
                                                   " pages of the ticket into ",
                                                   request.pages.num_pages(), " local pages"));
  }
  if (request.positions.num_runs() > kMaxRuns) {
    return absl::InvalidArgumentError(absl::StrCat("fetch: ", request.positions.num_runs(),
                                                   " runs of pages, limit ", kMaxRuns,
                                                   "; fetch in several parts"));
  }
  if (request.reader.of > LeaseReader::kMax || request.reader.index < 0 ||
      request.reader.index >= request.reader.of) {
    return absl::InvalidArgumentError(absl::StrCat("fetch: reader ", request.reader.index, " of ",
                                                   request.reader.of, ", limit ",
                                                   LeaseReader::kMax));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<FetchHandle>> NodeImpl::Fetch(FetchRequest request) {
  Ticket& ticket = request.ticket;
  const bool awaited = request.await_id != 0;
  if (awaited) ticket.address = "nobody yet";  // In logs.
  const bool by_ticket = request.peer.empty() && !awaited;
  if (by_ticket) {
    KVFERRY_RETURN_IF_ERROR(CheckHostAllowed(ticket.address, options_.config));
  }
  KVFERRY_RETURN_IF_ERROR(CheckFetch(request));
  const KvLayout& layout = options_.pool->layout();
  const HeadRange heads =
      request.heads != HeadRange() ? request.heads : HeadsOf(layout, options_.heads);
  KVFERRY_ASSIGN_OR_RETURN(const HeadRange local, LocalHeads(layout, options_.heads, heads));
  KVFERRY_ASSIGN_OR_RETURN(
      StreamPlan made,
      StreamPlan::Create(options_.pool, std::move(request.pages), std::move(request.tail), local));
  const auto plan = std::make_shared<const StreamPlan>(std::move(made));
  const uint64_t id = awaited ? request.await_id : RandomId();
  auto handle = std::make_shared<FetchHandle>(
      std::shared_ptr<const PageRuns>(plan, &plan->pages()), plan->num_layers(),
      plan->total_bytes(),
      [this, commands = commands_, id] {
        commands->Post([this, id] { receiver_->Cancel(id, absl::CancelledError("cancelled")); });
      },
      std::move(request.on_done));
  Receiver::Fetch fetch{id,
                        handle,
                        ticket,
                        std::move(request.positions),
                        plan,
                        request.deadline,
                        Clock::now(),
                        request.peer,
                        /*redial=*/by_ticket,
                        /*early=*/by_ticket && ticket.epoch == 0,
                        heads,
                        request.reader};
  if (options_.converts_pages) fetch.form = FormOf(layout);
  // Others know the await_id: no name for what they could send chunks to.
  if (awaited) fetch.transfer_id = RandomId();
  commands_->Post([this, awaited, fetch = std::move(fetch)]() mutable {
    awaited ? receiver_->Add(std::move(fetch)) : StartFetch(std::move(fetch));
  });
  return handle;
}

void NodeImpl::StartAwaited(uint64_t await_id, const PeerKey& peer, uint64_t lease_id) {
  commands_->Post([this, await_id, peer, lease_id] {
    Receiver::Fetch* fetch = receiver_->Assign(await_id, peer, lease_id);
    if (fetch != nullptr) RequestOrCancel(await_id, JoinSession(*fetch), peer);
  });
}

void NodeImpl::EndAwaited(uint64_t await_id, const absl::Status& why) {
  commands_->Post([this, await_id, why] { receiver_->Cancel(await_id, why); });
}

absl::StatusOr<uint64_t> NodeImpl::Call(CallRequest request, Calls::OnReply on_reply) {
  KVFERRY_RETURN_IF_ERROR(CheckHostAllowed(request.address, options_.config));
  KVFERRY_RETURN_IF_ERROR(request.args.Check());
  if (request.function.empty() || request.function.size() > kMaxFunctionBytes) {
    return absl::InvalidArgumentError(absl::StrCat("call: a function's name of ",
                                                   request.function.size(), " bytes, not 1 to ",
                                                   kMaxFunctionBytes));
  }
  const uint64_t id = RandomId();
  Calls::Call call{{},
                   std::move(request.function),
                   std::move(request.args),
                   request.deadline,
                   std::move(on_reply),
                   request.epoch};
  commands_->Post([this, id, address = std::move(request.address),
                   call = std::move(call)]() mutable { StartCall(id, address, std::move(call)); });
  return id;
}

void NodeImpl::CancelCall(uint64_t id) {
  commands_->Post([this, id] { calls_->Cancel(id, absl::CancelledError("cancelled")); });
}

void NodeImpl::Reply(const CallKey& call, absl::StatusOr<Fields> reply) {
  commands_->Post([this, call, reply = std::move(reply)] { calls_->Reply(call, reply); });
}

void NodeImpl::LeaseChanged(uint64_t lease_id) {
  commands_->Post([this, lease_id] { sender_->OnLeaseChanged(lease_id); });
}

absl::Status NodeImpl::AbortLease(uint64_t lease_id, const absl::Status& why, Again again,
                                  Deadline deadline) {
  auto latch = std::make_shared<Latch>();
  AbortLease(lease_id, why, again, [latch] { latch->Open(); });
  if (latch->Wait(deadline)) return absl::OkStatus();
  return absl::DeadlineExceededError("the progress thread did not answer in time");
}

void NodeImpl::AbortLease(uint64_t lease_id, const absl::Status& why, Again again,
                          std::function<void()> then) {
  commands_->Post([this, lease_id, why, again, then = std::move(then)] {
    sender_->AbortLease(lease_id, why, again == Again::kYes);
    then();
  });
}

// ---------------------------------------------------------------- the progress thread

void NodeImpl::Run() {
  const auto busy_poll = std::chrono::microseconds(options_.config.busy_poll_us);
  Deadline last_busy = Clock::now();
  while (!stop_) {
    const bool busy =
        Work() || (std::exchange(moved_, false) && linger_.Await([this] { return Work(); }));
    const Deadline now = Clock::now();
    if (now >= next_tick_ || tick_now_) next_tick_ = Tick(now);
    if (busy) {
      last_busy = now;
      futile_wakes_.OnBusy();
    } else if (now - last_busy >= busy_poll &&
               !tick_now_) {  // The tick itself may ask for another.
      Sleep(next_tick_);
    } else {
      std::this_thread::yield();
    }
  }
  SayGoodbye();
}

bool NodeImpl::Work() {
  bool busy = commands_->Run();
  // A command may have brought a deadline nearer than the next tick.
  tick_now_ |= busy;
  bool data_busy = data_->Progress(this);
  HearLinks();
  AskMore();
  data_busy |= sender_->Pump();
  moved_ |= data_busy;
  tick_now_ |= sender_->wants_tick() || data_->TakeNewDeadline();
  const Deadline now = Clock::now();
  if (!data_busy || now >= next_control_) {
    busy |= control_->Progress(this);
    next_control_ = now + kControlInterval;
  }
  for (const auto& [peer, status] : std::exchange(lost_, {})) DropSession(peer, status);
  return busy || data_busy;
}

void NodeImpl::Sleep(Deadline until) {
  if (!lost_.empty()) return;  // The tick has sent.
  // Anything that arrives after the planes are armed makes their fds readable.
  if (!data_->Arm() || !control_->Arm()) return;
  const bool pause = futile_wakes_.Pause();
  pollfd fds[] = {{pause ? -1 : data_->network_fd(), POLLIN, 0},
                  {data_->local_fd(), POLLIN, 0},
                  {data_->direct_fd(), POLLIN, 0},
                  {control_->event_fd(), POLLIN, 0},
                  {commands_->wake().get(), POLLIN, 0},
                  {data_->door_fd(), POLLIN, 0}};
  const Deadline now = Clock::now();
  if (pause) until = std::min(until, now + FutileWakes::kPause);
  if (control_->Waits()) until = std::min(until, now + kLookForRoom);
  const int64_t sleep_ms = std::min(MsUntil(until, now), kMaxSleepMs);
  poll(fds, std::size(fds), static_cast<int>(sleep_ms));
  if ((fds[0].revents & POLLIN) != 0) futile_wakes_.OnWake();
  if ((fds[4].revents & POLLIN) != 0) commands_->wake().Drain();
}

Deadline NodeImpl::Tick(Deadline now) {
  tick_now_ = false;
  Deadline next =
      std::min({sender_->Tick(now), receiver_->Tick(now), calls_->Tick(now), data_->Tick(now)});
  Deadline sessions_next;
  const Config& config = options_.config;
  for (const auto& [peer, due] : sessions_.TakeDue(now, config.heartbeat_interval_ms,
                                                   config.heartbeat_timeout_ms, &sessions_next)) {
    switch (due) {
      case Sessions::Due::kNothing:
        break;
      case Sessions::Due::kPing:
        SendAside(peer, PingMsg{});
        break;
      case Sessions::Due::kDead:
        TakeForDead(peer, "was silent", PingsMeanwhile(*sessions_.Find(peer)));
        break;
      case Sessions::Due::kGreetingFailed:
        if (sessions_.Find(peer)->greeting_until > now)
          break;  // It has been given more time just now.
        // What has joined since the hello is to have as much time as what it was said for.
        DropAndMove(peer, NotGreeted(*sessions_.Find(peer)), sessions_.Find(peer)->tried_since);
        break;
    }
  }
  return std::min({next, sessions_next, EndCrowded(now)});
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
  calls_->CancelAll(absl::CancelledError("this endpoint is closing"));
  for (const PeerKey& peer : sessions_.Keys()) Send(peer, ByeMsg{});
  // A peer that has read the goodbye answers it. If we closed our links at once, it could see a
  // broken connection before it reads why.
  const Deadline farewell = Clock::now() + kFarewell;
  while (HasReadySession() && Clock::now() < farewell) {
    if (!Work()) Sleep(farewell);
  }
  for (const PeerKey& peer : sessions_.Keys()) {
    DropSession(peer, absl::CancelledError("this endpoint is closing"), LogLevel::kInfo);
  }
  data_.reset();     // Waits for the links, so that no send is left that reads the arena.
  control_.reset();  // Lets the goodbyes out.
}

bool NodeImpl::GoesByLink(const Session* session) const {
  return session != nullptr && session->state == Session::State::kReady && session->peers_id != 0 &&
         data_->CarriesMessages(session->link);
}

Backlog NodeImpl::BacklogOf(const PeerKey& peer, const Session& session) const {
  return GoesByLink(&session) ? data_->BacklogOf(session.link) : control_->BacklogOf(peer);
}

// Over the link, which is quicker: two threads of ZeroMQ's less have to wake up for it.
void NodeImpl::Send(const PeerKey& peer, MessageBody body) {
  const Session* session = sessions_.Find(peer);
  auto* const reply = std::get_if<ReplyMsg>(&body);
  if (session != nullptr && reply != nullptr) ShortenReply(peer, *session, reply);
  if (!GoesByLink(session)) return SendAside(peer, std::move(body));
  ++metrics_.messages_by_link;
  const std::string bytes = EncodeMessage({epoch_, session->epoch, std::move(body)});
  const absl::Status status = data_->SendMessage(session->link, {session->peers_id}, bytes);
  if (!status.ok()) lost_.emplace_back(peer, status);
}

void NodeImpl::ShortenReply(const PeerKey& peer, const Session& session, ReplyMsg* reply) {
  const Backlog backlog = BacklogOf(peer, session);
  if (backlog.waiting <= kMaxRepliesWaiting) return;
  const size_t bytes = EncodeMessage({epoch_, session.epoch, *reply}).size();
  if (bytes <= kLongReply) return;
  NoteCrowded(peer, backlog);
  reply->status = absl::ResourceExhaustedError(absl::StrCat(
      "a reply of ", bytes, " bytes has no room behind ", backlog.waiting,
      " that wait for this peer, limit ", kMaxRepliesWaiting, "; ask for less at a time"));
  reply->result = {};
}

bool NodeImpl::HasRoom(const PeerKey& peer) {
  const Session* session = sessions_.Find(peer);
  if (session == nullptr) return true;
  const Backlog backlog = BacklogOf(peer, *session);
  if (backlog.open && backlog.waiting < kRoomForPeer) return true;
  NoteCrowded(peer, backlog);
  return false;
}

std::string NodeImpl::WhyUnreachable(const PeerKey& peer) {
  const Session* const session = sessions_.Find(peer);
  if (session == nullptr) return "";
  if (BacklogOf(peer, *session).open) return session->unreachable;
  if (session->address.empty()) return "the peer has not made its connection for data yet";
  return absl::StrCat("the connection for data to ", session->address,
                      " is not made yet; is its port (data_port) open to this side?");
}

void NodeImpl::NoteCrowded(const PeerKey& peer, const Backlog& backlog) {
  tick_now_ |= crowded_.try_emplace(peer, backlog.taken, Clock::now()).second;
}

void NodeImpl::AskMore() {
  std::vector<PeerKey> roomy;
  for (const auto& [peer, crowded] : crowded_) {
    const Backlog backlog = BacklogOf(peer, *sessions_.Find(peer));
    if (backlog.open && backlog.waiting <= kRoomForPeer / 2) roomy.push_back(peer);
  }
  for (const PeerKey& peer : roomy) {
    crowded_.erase(peer);
    RequestWaiting(peer, *sessions_.Find(peer));
    calls_->OnPeerReady(peer);
  }
}

// Its pings may be answered all the same. Who is slow, and takes something now and then, goes on.
Deadline NodeImpl::EndCrowded(Deadline now) {
  const int64_t timeout_ms = options_.config.heartbeat_timeout_ms;
  Deadline next = Deadline::max();
  std::vector<PeerKey> ended;
  for (auto& [peer, crowded] : crowded_) {
    const Backlog backlog = BacklogOf(peer, *sessions_.Find(peer));
    // Before it is open connect_timeout_ms counts.
    if (!backlog.open || backlog.taken != crowded.taken ||
        sessions_.StoppedLately(now, timeout_ms)) {
      crowded = {backlog.taken, now};
    }
    const Deadline until = crowded.since + std::chrono::milliseconds(timeout_ms);
    if (until <= now) {
      ended.push_back(peer);
    } else {
      next = std::min(next, until);
    }
  }
  for (const PeerKey& peer : ended) {
    const int64_t waiting = BacklogOf(peer, *sessions_.Find(peer)).waiting;
    TakeForDead(peer, "took nothing", absl::StrCat(waiting, " bytes of messages wait"));
  }
  return next;
}

void NodeImpl::TakeForDead(const PeerKey& peer, const char* did, const std::string& seen) {
  GiveUpAndBeginAgain(peer, absl::UnavailableError(absl::StrCat(
                                "peer ", Called(sessions_.Find(peer)->name), " ", did,
                                " for heartbeat_timeout_ms (", options_.config.heartbeat_timeout_ms,
                                "), ", seen, "; it is taken for dead")));
}

void NodeImpl::SendAside(const PeerKey& peer, MessageBody body) {
  const Session* session = sessions_.Find(peer);
  // Who is no peer and takes nothing is told nothing more.
  if (session == nullptr && control_->BacklogOf(peer).waiting > 0) return;
  const Message message{epoch_, session == nullptr ? 0 : session->epoch, std::move(body)};
  const absl::Status status = control_->Send(peer, message);
  if (!status.ok() && session != nullptr) lost_.emplace_back(peer, status);
}

// ---------------------------------------------------------------- data plane events

void NodeImpl::OnChunk(const ChunkHeader& header, const Payload& payload, Intact intact) {
  receiver_->OnChunk(header, payload, intact);
}

void NodeImpl::OnChunkElsewhere(const ChunkHeader& header, std::span<const std::byte> list) {
  receiver_->OnChunkElsewhere(header, list);
}

void NodeImpl::OnReadFailed(const ChunkHeader& header, const absl::Status& status) {
  receiver_->OnReadFailed(header, status);
}

void NodeImpl::OnProbed(LinkId link) {
  const PeerKey peer = sessions_.FindLink(link);
  if (!peer.empty()) RequestWaiting(peer, *sessions_.Find(peer));
}

void NodeImpl::OnLinkOpen(LinkId link) {
  const PeerKey peer = sessions_.FindLink(link);
  if (peer.empty()) return;
  // Over a network it has been used since it was begun.
  if (sessions_.Find(peer)->state == Session::State::kLinking) OnLinked(peer);
}

std::unique_ptr<ChunkSink> NodeImpl::OnChunkBegins(const ChunkHeader& header) {
  return receiver_->OnChunkBegins(header);
}

void NodeImpl::OnCredit(const CreditHeader& header) { sender_->OnCredit(header); }

// Heard later: it may end the session, whose link is being read.
void NodeImpl::OnLinkMessage(const MessageHeader& header, std::span<const std::byte> bytes) {
  heard_.emplace_back(header, std::vector(bytes.begin(), bytes.end()));
}

void NodeImpl::HearLinks() {
  for (const auto& [header, bytes] : std::exchange(heard_, {})) {
    const PeerKey peer = sessions_.FindOwnId(header.session);
    if (peer.empty()) {
      ++metrics_.messages_stale;  // Of a session that has ended.
    } else {
      DeliverMessage(peer, bytes, this);
    }
  }
}

void NodeImpl::OnLinkDown(LinkId link, const absl::Status& status) {
  // A peer that closes in order says so first: better that than a lost connection.
  HearLinks();
  control_->Progress(this);
  const PeerKey peer = sessions_.FindLink(link);
  if (peer.empty()) return;
  if (!data_->IsOpen(link) && !absl::IsUnavailable(status)) return OnNotLinked(peer, status);
  // The path to it may be dead and the peer not: on a new connection what can go on does.
  if (absl::IsDeadlineExceeded(status)) {
    return GiveUpAndBeginAgain(peer, absl::UnavailableError(status.message()));
  }
  // A lane beside the first was never made, while that one is: what goes on does, and the next
  // session may have all of them.
  const bool is_open = data_->BacklogOf(link).open;
  if (sessions_.Find(peer)->dialled && is_open && !data_->IsWhole(link)) {
    return GiveUpAndBeginAgain(peer, status);
  }
  // The peer may have given us up, and its word for that may come after this, or never: we did not
  // run, or control passes nothing on, as pings say that had time to be answered. Where it has
  // ended instead, what goes on fails soon after, for nobody listens there.
  constexpr int kUnanswered = 2;
  if (sessions_.StoppedLately(Clock::now(), options_.config.heartbeat_timeout_ms) ||
      sessions_.Find(peer)->pings >= kUnanswered) {
    return GiveUpAndBeginAgain(peer, status);
  }
  // The notice may still be on its way: a peer that leaves while nothing moves is no cause for
  // alarm.
  const bool idle = metrics_.fetches_active == 0 && metrics_.transfers_active == 0;
  // The peer may see nothing of it, and would keep a place for this side, of max_peers.
  if (sessions_.Find(peer)->dialled) SendAside(peer, ByeMsg{});
  // Of a link that never opened what has joined since it was begun is to have as much time again.
  const Deadline since = is_open ? Deadline::max() : sessions_.Find(peer)->tried_since;
  DropAndMove(peer, status, since, idle ? LogLevel::kInfo : LogLevel::kWarn);
}

absl::StatusOr<std::unique_ptr<Node>> Node::Start(Options options) {
  KVFERRY_RETURN_IF_ERROR(CheckOptions(options));
  auto node = std::make_unique<NodeImpl>(std::move(options));
  KVFERRY_RETURN_IF_ERROR(node->Init());
  return node;
}

absl::Status Node::CheckKeyFile(const Config& config) { return kvferry::CheckKeyFile(config); }

}  // namespace kvferry
