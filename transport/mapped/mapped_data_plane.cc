#include "transport/mapped/mapped_data_plane.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/config.h"
#include "base/epoll.h"
#include "base/log.h"
#include "base/random.h"
#include "base/status.h"
#include "transport/accept_pause.h"
#include "transport/limited_line.h"
#include "transport/mapped/mapped_channel.h"
#include "transport/mapped/mapped_packets.h"
#include "transport/mapped/peers_memory.h"
#include "transport/mapped/unix_socket.h"
#include "transport/messages.h"

namespace kvferry {
namespace mapped {
namespace {

// Beyond these a peer's arena is not believed.
constexpr uint64_t kMaxChunks = uint64_t{1} << 24;
constexpr uint64_t kMaxPoolParts = uint64_t{1} << 16;
constexpr size_t kMaxAccepted = 4096;
// Words of one link's reader, before it is the next one's turn.
constexpr int kReadsATurn = 16;
// What one socket holds is some hundred packets.
constexpr int kMaxLastWords = 1024;
// Words about chunks that wait for a peer that takes none, beside one a chunk of its arena.
constexpr size_t kMaxUnsent = size_t{1} << 14;
class MappedDataPlane : public AddressedPlane {
 public:
  MappedDataPlane(Arena* arena, MappedPool pool, int64_t answer_timeout_ms)
      : arena_(arena), pool_(std::move(pool)), answer_timeout_ms_(answer_timeout_ms) {}
  ~MappedDataPlane() override;
  absl::Status Init();

  const std::string& address() const override { return address_; }
  absl::StatusOr<LinkId> Connect(const std::string& address) override;
  void Close(LinkId link) override;
  void SendPayload(LinkId link, const ChunkHeader& header, std::span<const std::byte> payload,
                   SendDone done) override;
  void SendCredit(LinkId link, const CreditHeader& header) override;
  bool carries_messages() const override { return true; }
  absl::Status SendMessage(LinkId link, const MessageHeader& header,
                           std::string_view bytes) override;
  Backlog BacklogOf(LinkId link) const override;
  bool ReadsPool(LinkId link) const override;
  bool IsOpen(LinkId link) const override;
  bool Progress(DataEvents* events) override;
  int event_fd() const override { return epoll_.fd(); }
  // What has not been read yet keeps the fd readable.
  bool Arm() override { return failed_.empty() && down_.empty(); }
  Deadline Tick(Deadline now) override;

 private:
  // To a peer that reads our arena.
  struct Link {
    Channel channel;
    std::string address;
    Deadline answer_by;
    bool open = false;                                 // The peer has mapped the arena.
    absl::Status why_not{};                            // Or has said that it does not.
    bool reads_parts = false;                          // It has mapped the parts of the pool.
    absl::flat_hash_map<int64_t, SendDone> reading{};  // By chunk of the arena.
  };
  // From a peer whose arena we read.
  struct Accepted {
    Channel channel;
    PeersMemory memory{};              // Without an arena before the hello.
    bool pool_in_parts = false;        // They lie on a device, and come behind the hello.
    bool unmapped = false;             // A part could not be mapped.
    std::vector<std::byte> message{};  // What has come of it.
    bool heard_all = false;            // Nothing more comes, or is to be believed.
  };

  using AcceptedMap = absl::flat_hash_map<uint64_t, std::unique_ptr<Accepted>>;

  void SendParts(Channel& channel);
  void Accept();
  void HearAnswer(Link& link);
  void OnLinkReadable(Link& link);
  // Whether there was a packet, or the end.
  bool OnAcceptedReadable(Accepted& accepted, DataEvents* events);
  void HearLastWords(const Channel& of, DataEvents* events);
  void HearRest(Accepted& accepted, DataEvents* events);
  absl::Status OnPacket(Accepted& accepted, Packet& packet, DataEvents* events);
  absl::Status OnHello(Accepted& accepted, Packet& packet);
  absl::Status OnPoolPart(Accepted& accepted, const Packet& packet);
  absl::Status OnChunk(Accepted& accepted, const ChunkPacket& chunk, DataEvents* events);
  static absl::Status OnMessagePart(Accepted& accepted, const Packet& packet, DataEvents* events);
  void Serve(uint64_t id, uint32_t ready, DataEvents* events);
  // When it has been heard to the end.
  void Drop(AcceptedMap::iterator accepted, DataEvents* events);
  void DropFailed(uint64_t id, DataEvents* events);
  void ReportOpened(DataEvents* events);
  void ReportBroken(DataEvents* events);

  Arena* const arena_;
  const MappedPool pool_;
  const int64_t answer_timeout_ms_;
  Token token_{};
  std::string address_;
  Epoll epoll_;
  UniqueFd listener_;
  AcceptPause pause_;
  LimitedLine refused_{LimitedLine::kSome}, dropped_{LimitedLine::kSome},
      unmapped_{LimitedLine::kSome};
  LinkId next_link_ = kFirstMappedLink;
  uint64_t next_accepted_ = AcceptPause::kListenerId + 1;
  absl::flat_hash_map<LinkId, std::unique_ptr<Link>> links_;
  AcceptedMap accepted_;
  absl::flat_hash_set<std::string> refused_by_;  // Addresses: who cannot once cannot again.
  // Reported at the end of Progress().
  std::vector<LinkId> opened_;
  std::vector<LinkId> down_;
  std::vector<uint64_t> failed_;  // Whose socket refused a packet: its epoll need not say so.
  PeersMemory::Found found_;      // Of the chunk that is being delivered.
};

std::string SocketName(const std::string& random) {
  return absl::StrCat("kvferry/", absl::BytesToHexString(random));
}

absl::Status MappedDataPlane::Init() {
  const std::string name = RandomBytes16();
  const std::string token = RandomBytes16();
  std::memcpy(token_.data(), token.data(), token_.size());
  address_ = static_cast<char>(kVersion) + name + token;
  KVFERRY_ASSIGN_OR_RETURN(epoll_, Epoll::Create());
  KVFERRY_ASSIGN_OR_RETURN(listener_, ListenUnix(SocketName(name)));
  KVFERRY_ASSIGN_OR_RETURN(pause_, AcceptPause::Create(epoll_, listener_.get()));
  return absl::OkStatus();
}

MappedDataPlane::~MappedDataPlane() {
  while (!links_.empty()) Close(links_.begin()->first);
  for (const auto& [id, accepted] : accepted_) epoll_.HangUp(accepted->channel.socket().get());
}

// ---------------------------------------------------------------- sending

absl::StatusOr<LinkId> MappedDataPlane::Connect(const std::string& address) {
  constexpr size_t kNameBytes = 16;
  HelloPacket hello;
  if (address.size() != 1 + kNameBytes + hello.token.size() ||
      address[0] != static_cast<char>(kVersion)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a peer's local address of ", address.size(), " bytes, or another version"));
  }
  if (refused_by_.contains(address)) {
    return absl::FailedPreconditionError("the peer has said before that it cannot map such memory");
  }
  KVFERRY_ASSIGN_OR_RETURN(UniqueFd socket, ConnectUnix(SocketName(address.substr(1, kNameBytes))));
  KVFERRY_RETURN_IF_ERROR(CheckSameUser(socket));
  address.copy(hello.token.data(), hello.token.size(), 1 + kNameBytes);
  hello.num_chunks = static_cast<uint64_t>(arena_->shape().num_chunks);
  hello.chunk_bytes = static_cast<uint64_t>(arena_->shape().chunk_bytes);
  std::vector<int> memory = {arena_->fd()};
  if (pool_.shared != nullptr) {
    memory.push_back(pool_.shared->fd.get());
    hello.pool_bytes = static_cast<uint64_t>(pool_.shared->bytes);
  }
  if (SendPacket(socket, std::as_bytes(std::span(&hello, 1)), memory) != SocketResult::kOk) {
    return absl::UnavailableError(absl::StrCat("unix socket: hello: ", std::strerror(errno)));
  }
  const LinkId id = next_link_++;
  auto link = std::make_unique<Link>(
      Link{{id, std::move(socket), &epoll_, &failed_}, address, DeadlineInMs(answer_timeout_ms_)});
  KVFERRY_RETURN_IF_ERROR(link->channel.Watch());
  SendParts(link->channel);
  links_.emplace(id, std::move(link));
  return id;
}

void MappedDataPlane::SendParts(Channel& channel) {
  std::array<std::byte, sizeof(PoolPartPacket) + PoolMemory::kMaxSharedName> packet;
  uint64_t left = pool_.parts.size();
  for (const PoolMemory::SharedPart& part : pool_.parts) {
    const PoolPartPacket head{.bytes = static_cast<uint64_t>(part.bytes), .parts_after = --left};
    std::memcpy(packet.data(), &head, sizeof(head));
    std::memcpy(packet.data() + sizeof(head), part.name.data(), part.name.size());
    channel.PushBytes(std::span(packet).first(sizeof(head) + part.name.size()));
  }
}

bool MappedDataPlane::ReadsPool(LinkId id) const {
  const auto found = links_.find(id);
  return found != links_.end() && (pool_.shared != nullptr || found->second->reads_parts);
}

bool MappedDataPlane::IsOpen(LinkId id) const {
  const auto found = links_.find(id);
  return found != links_.end() && found->second->open;
}

void MappedDataPlane::Close(LinkId id) {
  auto node = links_.extract(id);
  if (node.empty()) return;
  epoll_.HangUp(node.mapped()->channel.socket().get());
  for (auto& [chunk, done] : node.mapped()->reading) {
    // The peer may be in the middle of it, or still to come to it.
    arena_->TakeFromReaders(chunk);
    done(absl::UnavailableError("the link was closed"));
  }
}

void MappedDataPlane::SendPayload(LinkId id, const ChunkHeader& header,
                                  std::span<const std::byte> payload, SendDone done) {
  const auto found = links_.find(id);
  if (found == links_.end()) {
    done(absl::UnavailableError("the link is closed"));
    return;
  }
  const int64_t chunk = arena_->ChunkAt(payload.data());
  if (chunk < 0) {
    done(absl::InvalidArgumentError("the payload is no chunk of the arena"));
    return;
  }
  Link& link = *found->second;
  link.reading.emplace(chunk, std::move(done));
  link.channel.Push(ChunkPacket{.header = header,
                                .slot = static_cast<uint64_t>(chunk),
                                .generation = arena_->Generation(chunk),
                                .payload_bytes = payload.size()});
}

void MappedDataPlane::SendCredit(LinkId id, const CreditHeader& header) {
  const auto found = links_.find(id);
  if (found != links_.end()) found->second->channel.PushCredit(header);
}

absl::Status MappedDataPlane::SendMessage(LinkId id, const MessageHeader& header,
                                          std::string_view bytes) {
  const auto found = links_.find(id);
  if (found == links_.end()) return absl::UnavailableError("the link is closed");
  Channel& channel = found->second->channel;
  if (channel.backlog().waiting > kMaxMessagesWaiting) {
    return absl::ResourceExhaustedError(
        absl::StrCat(channel.backlog().waiting, " bytes of messages wait, limit ",
                     kMaxMessagesWaiting, ", and the peer on this host takes none"));
  }
  std::array<std::byte, kMaxPacketBytes> packet;
  while (!bytes.empty()) {
    const std::string_view part = bytes.substr(0, kMaxPartBytes);
    bytes.remove_prefix(part.size());
    const MessagePacket head{.header = header, .bytes_after = bytes.size()};
    std::memcpy(packet.data(), &head, sizeof(head));
    std::memcpy(packet.data() + sizeof(head), part.data(), part.size());
    channel.PushBytes(std::span(packet).first(sizeof(head) + part.size()));
  }
  return absl::OkStatus();
}

Backlog MappedDataPlane::BacklogOf(LinkId id) const {
  const auto found = links_.find(id);
  return found == links_.end() ? Backlog() : found->second->channel.backlog();
}

// A peer that cannot map what it is given (another user, a filter of system calls) would not be
// able to the next time; one that is short of something may.
void MappedDataPlane::HearAnswer(Link& link) {
  Packet packet;
  const SocketResult result = ReceivePacket(link.channel.socket(), &packet);
  if (result == SocketResult::kWouldBlock) return;
  AnswerPacket answer;
  const bool known =
      result == SocketResult::kOk && Parse(packet, &answer) && answer.head.kind == kAnswer;
  if (known && answer.taken == kMapped) {
    link.open = true;
    opened_.push_back(link.channel.id());
    return;
  }
  link.channel.Break();
  if (!known) return;
  if (answer.taken != kCannot) {
    link.why_not = absl::ResourceExhaustedError("the peer on this host takes no memory just now");
    return;
  }
  link.why_not =
      absl::FailedPreconditionError("the peer on this host cannot map this side's memory");
  if (refused_by_.size() >= kMaxAccepted) refused_by_.clear();
  refused_by_.insert(link.address);
}

void MappedDataPlane::OnLinkReadable(Link& link) {
  // One that has been given up is not open any more when its answer comes.
  if (!link.open && !link.channel.broken()) HearAnswer(link);
  if (!link.open) return;
  Packet packet;
  for (int i = 0; i < kReadsATurn; ++i) {
    const SocketResult result = ReceivePacket(link.channel.socket(), &packet);
    if (result == SocketResult::kWouldBlock) return;
    ReadsPoolPacket reads_pool;
    if (result == SocketResult::kOk && Parse(packet, &reads_pool) &&
        reads_pool.head.kind == kReadsPool) {
      link.reads_parts = !pool_.parts.empty();
      continue;
    }
    ReadPacket read;
    const bool known =
        result == SocketResult::kOk && Parse(packet, &read) && read.head.kind == kRead;
    auto node = known ? link.reading.extract(static_cast<int64_t>(read.slot))
                      : decltype(link.reading)::node_type();
    if (node.empty()) {
      link.channel.Break();
      return;
    }
    node.mapped()(absl::OkStatus());
  }
}

// ---------------------------------------------------------------- receiving

// A peer that heard nothing would take this process for one that has ended.
void SayWhyNot(const UniqueFd& socket, const absl::Status& why) {
  const bool passes = absl::IsResourceExhausted(why) || absl::IsUnavailable(why);
  const AnswerPacket answer{.taken = passes ? kNotNow : kCannot};
  SendPacket(socket, std::as_bytes(std::span(&answer, 1)));
}

void MappedDataPlane::Accept() {
  for (int left = AcceptPause::kAcceptedATurn; left > 0; --left) {
    UniqueFd socket = AcceptUnix(listener_);
    if (!socket.valid()) return pause_.OnFailure(epoll_, errno);
    absl::Status status = CheckSameUser(socket);
    if (accepted_.size() >= kMaxAccepted) {
      status = absl::ResourceExhaustedError(absl::StrCat(accepted_.size(), " are connected"));
    }
    const uint64_t id = next_accepted_++;
    auto accepted =
        std::make_unique<Accepted>(Accepted{{id, std::move(socket), &epoll_, &failed_}});
    if (status.ok()) status = accepted->channel.Watch();
    if (status.ok()) {
      accepted_.emplace(id, std::move(accepted));
      continue;
    }
    if (const auto more = refused_.Next()) {
      Log().warn("refused a peer on this host: {}{}", status.ToString(), *more);
    }
    SayWhyNot(accepted->channel.socket(), status);
  }
}

absl::Status MappedDataPlane::OnHello(Accepted& accepted, Packet& packet) {
  HelloPacket hello;
  if (!Parse(packet, &hello) || hello.magic != kMagic || hello.version != kVersion ||
      hello.token != token_ || !packet.passed[0].valid()) {
    return absl::PermissionDeniedError("a hello with another version or token");
  }
  if (hello.num_chunks == 0 || hello.num_chunks > kMaxChunks || hello.chunk_bytes == 0 ||
      hello.chunk_bytes > static_cast<uint64_t>(Config::kMaxChunkBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("an arena of ", hello.num_chunks, " chunks of ", hello.chunk_bytes, " bytes"));
  }
  const ArenaShape shape{static_cast<int64_t>(hello.num_chunks),
                         static_cast<int64_t>(hello.chunk_bytes)};
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<const std::byte> arena,
                           MapPeersMemory(packet.passed[0], shape.total_bytes()));
  if (hello.pool_bytes > 0) {
    if (hello.pool_bytes > PeersMemory::kMaxPoolBytes || !packet.passed[1].valid()) {
      return absl::InvalidArgumentError(absl::StrCat("a pool of ", hello.pool_bytes, " bytes"));
    }
    KVFERRY_ASSIGN_OR_RETURN(
        std::shared_ptr<const std::byte> pool,
        MapPeersMemory(packet.passed[1], static_cast<int64_t>(hello.pool_bytes)));
    accepted.memory.AddPart(std::move(pool), hello.pool_bytes, /*on_device=*/false);
  }
  accepted.memory.TakeArena(std::move(arena), shape);
  accepted.channel.Push(AnswerPacket());
  return absl::OkStatus();
}

// Who cannot map all of them says nothing, and gets copies of the pages.
absl::Status MappedDataPlane::OnPoolPart(Accepted& accepted, const Packet& packet) {
  PoolPartPacket head;
  std::memcpy(&head, packet.bytes, sizeof(head));
  PeersMemory& pool = accepted.memory;
  if (!accepted.pool_in_parts && pool.num_parts() > 0) {
    return absl::InvalidArgumentError("parts of a pool that has come with the hello");
  }
  accepted.pool_in_parts = true;
  if (head.bytes == 0 || head.bytes > PeersMemory::kMaxPoolBytes - pool.pool_bytes() ||
      head.parts_after >= kMaxPoolParts - pool.num_parts()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a part of ", head.bytes, " bytes of a pool, ", head.parts_after, " to come"));
  }
  // Into pages on the host nothing is copied from a device: that such a pool cannot be mapped is no
  // news.
  const bool wants_it = pool_.memory != nullptr && !pool_.memory->on_host();
  if (!wants_it || accepted.unmapped) return absl::OkStatus();
  const absl::string_view name(reinterpret_cast<const char*>(packet.bytes) + sizeof(head),
                               packet.size - sizeof(head));
  absl::StatusOr<std::shared_ptr<const std::byte>> memory =
      pool_.memory->MapShared(name, static_cast<int64_t>(head.bytes));
  if (!memory.ok()) {
    if (const auto more = unmapped_.Next()) {
      Log().warn(
          "a peer on this host sends copies of its pages, as its GPU's memory cannot be read in "
          "place (containers need one namespace of processes for that: shareProcessNamespace, "
          "--pid): {}{}",
          memory.status().ToString(), *more);
    }
    accepted.unmapped = true;
    pool.ForgetParts();
    return absl::OkStatus();
  }
  pool.AddPart(*std::move(memory), head.bytes, /*on_device=*/true);
  if (head.parts_after == 0) accepted.channel.Push(ReadsPoolPacket{});
  return absl::OkStatus();
}

absl::Status MappedDataPlane::OnChunk(Accepted& accepted, const ChunkPacket& chunk,
                                      DataEvents* events) {
  const PeersMemory& memory = accepted.memory;
  const absl::StatusOr<Payload> found = memory.Find(chunk, &found_);
  const auto intact = [&] {
    return GenerationSeenByReader(memory.arena(), static_cast<int64_t>(chunk.slot)) ==
           chunk.generation;
  };
  // A list that makes no sense may be another chunk's by now; whoever sent a slot that is none, or
  // a list that is still the one it meant, is no peer.
  const auto num_chunks = static_cast<uint64_t>(memory.shape().num_chunks);
  const bool in_arena = chunk.slot < num_chunks;
  if (!found.ok() && (!in_arena || intact())) return found.status();
  // Who is told of that many has had all of its arena read, and has not looked.
  if (accepted.channel.num_unsent() >= num_chunks + kMaxUnsent) {
    return absl::ResourceExhaustedError("it does not read what it is told");
  }
  if (found.ok()) {
    events->OnChunk(chunk.header, *found, intact);
  } else {
    // Whatever its generation is when it is looked at again.
    events->OnChunk(chunk.header, Payload(), [] { return false; });
  }
  accepted.channel.Push(ReadPacket{.slot = chunk.slot});
  return absl::OkStatus();
}

absl::Status MappedDataPlane::OnMessagePart(Accepted& accepted, const Packet& packet,
                                            DataEvents* events) {
  MessagePacket head;
  std::memcpy(&head, packet.bytes, sizeof(head));
  const auto part = std::span(packet.bytes).subspan(sizeof(head), packet.size - sizeof(head));
  if (head.bytes_after > kMaxMessageBytes ||
      accepted.message.size() + part.size() > kMaxMessageBytes - head.bytes_after) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message of ", accepted.message.size() + part.size(), " and ",
                     head.bytes_after, " bytes, limit ", kMaxMessageBytes));
  }
  accepted.message.insert(accepted.message.end(), part.begin(), part.end());
  if (head.bytes_after > 0) return absl::OkStatus();
  events->OnLinkMessage(head.header, accepted.message);
  accepted.message = {};
  return absl::OkStatus();
}

absl::Status MappedDataPlane::OnPacket(Accepted& accepted, Packet& packet, DataEvents* events) {
  if (!accepted.memory.has_arena()) return OnHello(accepted, packet);
  if (ChunkPacket chunk; Parse(packet, &chunk) && chunk.head.kind == kChunk) {
    return OnChunk(accepted, chunk, events);
  }
  if (CreditPacket credit; Parse(packet, &credit) && credit.head.kind == kCredit) {
    events->OnCredit(credit.header);
    return absl::OkStatus();
  }
  Head head;
  static_assert(sizeof(MessagePacket) == sizeof(PoolPartPacket));
  if (packet.size > sizeof(MessagePacket)) std::memcpy(&head, packet.bytes, sizeof(head));
  if (head.kind == kMessage) return OnMessagePart(accepted, packet, events);
  if (head.kind == kPoolPart) return OnPoolPart(accepted, packet);
  return absl::InvalidArgumentError(absl::StrCat("a packet of ", packet.size, " bytes"));
}

// One packet: it may be a chunk of megabytes, and then it is the next peer's turn.
bool MappedDataPlane::OnAcceptedReadable(Accepted& accepted, DataEvents* events) {
  if (accepted.heard_all) return false;
  Packet packet;
  const SocketResult result = ReceivePacket(accepted.channel.socket(), &packet);
  if (result == SocketResult::kWouldBlock) return false;
  absl::Status status = absl::UnavailableError("it has gone");
  if (result == SocketResult::kOk) {
    status = OnPacket(accepted, packet, events);
    if (const auto more = status.ok() ? std::nullopt : dropped_.Next()) {
      Log().warn("dropped a peer on this host: {}{}", status.ToString(), *more);
    }
  }
  // Also where its memory was lost on the way, for want of descriptors.
  if (!status.ok() && !accepted.memory.has_arena()) SayWhyNot(accepted.channel.socket(), status);
  accepted.heard_all = !status.ok();
  if (accepted.heard_all) accepted.channel.Break();
  return true;
}

// The news of a peer's end comes by our connection to it, and may overtake what it has said before:
// goodbyes among it, and the words that fetches are done. Which of the others is its connection to
// us its process tells; those whose processes are not known (other containers) are all heard.
void MappedDataPlane::HearLastWords(const Channel& of, DataEvents* events) {
  const pid_t peer = ProcessOf(of.socket());
  for (auto& [id, accepted] : accepted_) {
    if (ProcessOf(accepted->channel.socket()) == peer) HearRest(*accepted, events);
  }
}

void MappedDataPlane::HearRest(Accepted& accepted, DataEvents* events) {
  for (int left = kMaxLastWords; left > 0; --left) {
    if (!OnAcceptedReadable(accepted, events)) return;
  }
}

// ---------------------------------------------------------------- both

void MappedDataPlane::Serve(uint64_t id, uint32_t ready, DataEvents* events) {
  if (id == AcceptPause::kListenerId) return Accept();
  if (id == AcceptPause::kTimerId) return pause_.OnTimer(epoll_);
  if (const auto link = links_.find(id); link != links_.end()) {
    if ((ready & EPOLLOUT) != 0) link->second->channel.Flush();
    if ((ready & ~EPOLLOUT) != 0) OnLinkReadable(*link->second);
    if (link->second->channel.broken()) down_.push_back(id);
    return;
  }
  const auto accepted = accepted_.find(id);
  if (accepted == accepted_.end()) return;
  if ((ready & EPOLLOUT) != 0) accepted->second->channel.Flush();
  if ((ready & ~EPOLLOUT) != 0) OnAcceptedReadable(*accepted->second, events);
  if (accepted->second->channel.broken()) Drop(accepted, events);
}

void MappedDataPlane::Drop(AcceptedMap::iterator accepted, DataEvents* events) {
  HearRest(*accepted->second, events);
  epoll_.HangUp(accepted->second->channel.socket().get());
  accepted_.erase(accepted);
}

bool MappedDataPlane::Progress(DataEvents* events) {
  Epoll::Room room;
  const std::span<const epoll_event> ready = epoll_.Ready(room);
  for (const epoll_event& event : ready) Serve(event.data.u64, event.events, events);
  const std::vector<uint64_t> failed = std::exchange(failed_, {});
  for (const uint64_t id : failed) DropFailed(id, events);
  ReportOpened(events);
  ReportBroken(events);
  return !ready.empty() || !failed.empty();
}

// What it was to be told is lost, so all that follows would be out of order.
void MappedDataPlane::DropFailed(uint64_t id, DataEvents* events) {
  if (links_.contains(id)) down_.push_back(id);
  if (const auto accepted = accepted_.find(id); accepted != accepted_.end()) {
    Drop(accepted, events);
  }
}

Deadline MappedDataPlane::Tick(Deadline now) {
  Deadline next = Deadline::max();
  for (const auto& [id, link] : links_) {
    if (link->open || link->channel.broken()) continue;
    if (link->answer_by > now) {
      next = std::min(next, link->answer_by);
      continue;
    }
    link->channel.Break();
    link->why_not = absl::ResourceExhaustedError(
        absl::StrCat("the peer on this host has not taken this side's memory within ",
                     answer_timeout_ms_, " ms; has it file descriptors left?"));
    down_.push_back(id);
  }
  return next;
}

void MappedDataPlane::ReportOpened(DataEvents* events) {
  for (const LinkId id : std::exchange(opened_, {})) events->OnLinkOpen(id);
}

void MappedDataPlane::ReportBroken(DataEvents* events) {
  for (const LinkId id : std::exchange(down_, {})) {
    // Once: its fd stays readable until it is closed.
    const auto link = links_.find(id);
    if (link == links_.end()) continue;
    if (link->second->open) HearLastWords(link->second->channel, events);
    if (!links_.contains(id)) continue;  // They were about it.
    Link& broken = *link->second;
    // What was sent to it has failed, and its answer may lie there unread.
    if (!broken.open && broken.why_not.ok()) HearAnswer(broken);
    epoll_.Remove(broken.channel.socket().get());
    events->OnLinkDown(id, broken.why_not.ok()
                               ? absl::UnavailableError("the peer on this host is gone")
                               : broken.why_not);
  }
}

}  // namespace
}  // namespace mapped

absl::StatusOr<std::unique_ptr<AddressedPlane>> MakeMappedDataPlane(Arena* arena, MappedPool pool,
                                                                    int64_t answer_timeout_ms) {
  if (arena->fd() < 0) return absl::FailedPreconditionError("the arena's memory is not shared");
  auto plane = std::make_unique<mapped::MappedDataPlane>(arena, std::move(pool), answer_timeout_ms);
  KVFERRY_RETURN_IF_ERROR(plane->Init());
  return plane;
}

}  // namespace kvferry
