#include "transport/mapped/mapped_data_plane.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
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
#include "transport/mapped/unix_socket.h"
#include "transport/messages.h"

namespace kvferry {
namespace {

// Messages of docs/wire_protocol.md; the structs are their bytes.
enum Kind : uint32_t {
  kHello = 1,
  kChunk = 2,
  kCredit = 3,
  kRead = 4,
  kMessage = 5,
  kPoolPart = 6,
  kReadsPool = 7,
  kAnswer = 8,
};

using Token = std::array<char, 16>;
constexpr uint64_t kMagic = 0x6b7666657272792f;
constexpr uint8_t kVersion = 5;

struct Head {
  uint32_t kind = 0;
  uint32_t zero = 0;
};
struct HelloPacket {
  Head head{kHello};
  uint64_t magic = kMagic;
  uint64_t version = kVersion;
  Token token{};
  uint64_t num_chunks = 0;
  uint64_t chunk_bytes = 0;
  uint64_t pool_bytes = 0;  // 0: there is no pool to read by its fd.
};
struct ChunkPacket {
  Head head{kChunk};
  ChunkHeader header;
  uint64_t slot = 0;
  uint64_t generation = 0;
  uint64_t payload_bytes = 0;
};
struct CreditPacket {
  Head head{kCredit};
  CreditHeader header;
};
struct ReadPacket {
  Head head{kRead};
  uint64_t slot = 0;
};
static_assert(sizeof(HelloPacket) == 64 && sizeof(ChunkPacket) == 64);
// The bytes of this part follow.
struct MessagePacket {
  Head head{kMessage};
  MessageHeader header;
  uint64_t bytes_after = 0;  // Of the message, in parts to come.
};
// The part's name follows.
struct PoolPartPacket {
  Head head{kPoolPart};
  uint64_t bytes = 0;
  uint64_t parts_after = 0;  // To come.
};
struct ReadsPoolPacket {
  Head head{kReadsPool};
};
// To a hello.
enum Taken : uint64_t { kMapped = 0, kCannot = 1, kNotNow = 2 };
struct AnswerPacket {
  Head head{kAnswer};
  uint64_t taken = kMapped;
};
static_assert(sizeof(CreditPacket) == 24 && sizeof(ReadPacket) == 16);
static_assert(sizeof(PoolPartPacket) == 24 && sizeof(ReadsPoolPacket) == 8);
static_assert(sizeof(AnswerPacket) == 16);
static_assert(sizeof(MessagePacket) == 24);
constexpr size_t kMaxPartBytes = kMaxPacketBytes - sizeof(MessagePacket);

// Beyond these a peer's arena is not believed.
constexpr uint64_t kMaxChunks = uint64_t{1} << 24;
constexpr uint64_t kMaxPoolBytes = uint64_t{1} << 45;
constexpr uint64_t kMaxPoolParts = uint64_t{1} << 16;
constexpr uint64_t kMaxPlaces = KvLayout::kMaxLayers * KvLayout::kMaxTensors;
constexpr size_t kMaxAccepted = 4096;
// Words of one link's reader, before it is the next one's turn.
constexpr int kReadsATurn = 16;
// What one socket holds is some hundred packets.
constexpr int kMaxLastWords = 1024;
// Words about chunks that wait for a peer that takes none, beside one a chunk of its arena.
constexpr size_t kMaxUnsent = size_t{1} << 14;
// Of memory that a packet takes while it waits, beside its bytes.
constexpr int64_t kPacketOverhead = 64;

// Entries of a list that lies where its sender can change it: each is read once, and then checked.
class PoolList {
 public:
  PoolList(const std::byte* begin, size_t size) : begin_(begin), size_(size) {}

  size_t size() const { return size_; }
  PoolList From(size_t first) const { return {begin_ + first * sizeof(PoolPiece), size_ - first}; }
  PoolList First(size_t count) const { return {begin_, count}; }
  template <typename Entry>
  Entry Read(size_t index) const {
    static_assert(sizeof(Entry) == sizeof(PoolPiece));
    Entry entry;
    std::memcpy(&entry, begin_ + index * sizeof(entry), sizeof(entry));
    return entry;
  }

 private:
  const std::byte* begin_;
  size_t size_;
};

int64_t RoomOf(std::span<const std::byte> packet) {
  return static_cast<int64_t>(packet.size()) + kPacketOverhead;
}

int64_t RoomOfMessage(std::span<const std::byte> packet) {
  Head head;
  std::memcpy(&head, packet.data(), sizeof(head));
  return head.kind == kMessage ? RoomOf(packet) : 0;
}

template <typename T>
bool Parse(const Packet& packet, T* message) {
  if (packet.size != sizeof(T)) return false;
  std::memcpy(message, packet.bytes, sizeof(T));
  return true;
}

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
  // One end of a connection, and what could not be sent yet: at most a packet for each chunk of
  // an arena, two credits for each transfer, and kMaxMessagesWaiting in parts of messages.
  struct Channel {
    uint64_t id;
    UniqueFd socket;
    std::deque<std::vector<std::byte>> unsent{};
    // By transfer: the last of each. They do not wait for those, of which there may always be some:
    // without them the peer sends no more chunks.
    absl::btree_map<uint64_t, uint64_t> credits{};
    uint64_t last_credited =
        0;  // Whose was sent last: the next one's is the next, round and round.
    Backlog backlog{};
    bool awaits_room = false;  // Woken when the socket takes more.
    bool broken = false;

    bool waits() const { return !unsent.empty() || !credits.empty(); }
  };
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
  struct PoolPart {
    std::shared_ptr<const std::byte> memory;
    uint64_t begin, bytes;  // In the pool.

    bool Has(uint64_t offset) const { return offset - begin < bytes; }
  };
  // From a peer whose arena we read.
  struct Accepted {
    Channel channel;
    std::shared_ptr<const std::byte> arena{};  // Null before the hello.
    ArenaShape shape{};
    std::vector<PoolPart> pool{};      // One behind the other; empty: it cannot be read.
    bool pool_on_device = false;       // The processor cannot touch it.
    bool unmapped = false;             // A part could not be mapped.
    std::vector<std::byte> message{};  // What has come of it.
    bool heard_all = false;            // Nothing more comes, or is to be believed.

    const PoolPart& PartAt(uint64_t offset) const {
      const auto begins_behind = [](uint64_t at, const PoolPart& part) { return at < part.begin; };
      return *std::prev(std::upper_bound(pool.begin(), pool.end(), offset, begins_behind));
    }
    uint64_t pool_bytes() const { return pool.empty() ? 0 : pool.back().begin + pool.back().bytes; }
  };

  using AcceptedMap = absl::flat_hash_map<uint64_t, std::unique_ptr<Accepted>>;

  absl::Status Watch(const Channel& channel);
  void SendParts(Channel& channel);
  template <typename Message>
  void Push(Channel& channel, const Message& message) {
    PushBytes(channel, std::as_bytes(std::span(&message, 1)));
  }
  void PushBytes(Channel& channel, std::span<const std::byte> bytes);
  void Flush(Channel& channel);
  SocketResult FlushCredit(Channel& channel);
  // Past what waits.
  SocketResult SendNow(Channel& channel, std::span<const std::byte> bytes);
  void AwaitRoom(Channel& channel, bool await) const;
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
  static void AddPart(Accepted& accepted, std::shared_ptr<const std::byte> memory, uint64_t bytes);
  absl::Status OnChunk(Accepted& accepted, const ChunkPacket& chunk, DataEvents* events);
  static absl::Status OnMessagePart(Accepted& accepted, const Packet& packet, DataEvents* events);
  // Where the chunk's bytes lie; valid until the next call.
  absl::StatusOr<Payload> FindBytes(const Accepted& accepted, const ChunkPacket& chunk);
  absl::StatusOr<Payload> ReadPoolList(const Accepted& accepted, const ChunkPacket& chunk);
  // Fill pieces_, or runs_ and then places_, from parts of it.
  absl::Status ReadPieces(const Accepted& accepted, PoolList list, uint64_t chunk_bytes);
  absl::Status ReadRuns(PoolList list, uint64_t chunk_bytes);
  absl::Status ReadPlaces(const Accepted& accepted, PoolList list, uint64_t chunk_bytes);
  // Gives the last part that it lies in.
  const PoolPart* AddPieces(const PoolPart* part, PoolPiece piece);
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
  // Of the chunk that is being delivered.
  std::vector<std::span<const std::byte>> pieces_;
  std::vector<PageRun> runs_;
  std::vector<ItemsPlace> places_;
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
  for (const auto& [id, accepted] : accepted_) epoll_.HangUp(accepted->channel.socket.get());
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
      Link{{id, std::move(socket)}, address, DeadlineInMs(answer_timeout_ms_)});
  KVFERRY_RETURN_IF_ERROR(Watch(link->channel));
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
    PushBytes(channel, std::span(packet).first(sizeof(head) + part.name.size()));
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

absl::Status MappedDataPlane::Watch(const Channel& channel) {
  return epoll_.Add(channel.socket.get(), EPOLLIN, channel.id);
}

void MappedDataPlane::Close(LinkId id) {
  auto node = links_.extract(id);
  if (node.empty()) return;
  epoll_.HangUp(node.mapped()->channel.socket.get());
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
  Push(link.channel, ChunkPacket{.header = header,
                                 .slot = static_cast<uint64_t>(chunk),
                                 .generation = arena_->Generation(chunk),
                                 .payload_bytes = payload.size()});
}

void MappedDataPlane::SendCredit(LinkId id, const CreditHeader& header) {
  const auto found = links_.find(id);
  if (found == links_.end()) return;
  Channel& channel = found->second->channel;
  // To a peer that takes nothing, and sends chunk after chunk, there would be more and more.
  if (channel.waits()) {
    channel.credits[header.transfer_id] = header.bytes_done;
  } else {
    Push(channel, CreditPacket{.header = header});
  }
}

absl::Status MappedDataPlane::SendMessage(LinkId id, const MessageHeader& header,
                                          std::string_view bytes) {
  const auto found = links_.find(id);
  if (found == links_.end()) return absl::UnavailableError("the link is closed");
  Channel& channel = found->second->channel;
  if (channel.backlog.waiting > kMaxMessagesWaiting) {
    return absl::ResourceExhaustedError(
        absl::StrCat(channel.backlog.waiting, " bytes of messages wait, limit ",
                     kMaxMessagesWaiting, ", and the peer on this host takes none"));
  }
  std::array<std::byte, kMaxPacketBytes> packet;
  while (!bytes.empty()) {
    const std::string_view part = bytes.substr(0, kMaxPartBytes);
    bytes.remove_prefix(part.size());
    const MessagePacket head{.header = header, .bytes_after = bytes.size()};
    std::memcpy(packet.data(), &head, sizeof(head));
    std::memcpy(packet.data() + sizeof(head), part.data(), part.size());
    PushBytes(channel, std::span(packet).first(sizeof(head) + part.size()));
  }
  return absl::OkStatus();
}

Backlog MappedDataPlane::BacklogOf(LinkId id) const {
  const auto found = links_.find(id);
  return found == links_.end() ? Backlog() : found->second->channel.backlog;
}

SocketResult MappedDataPlane::SendNow(Channel& channel, std::span<const std::byte> bytes) {
  const SocketResult result = SendPacket(channel.socket, bytes);
  if (result == SocketResult::kOk) channel.backlog.taken += RoomOf(bytes);
  if (result == SocketResult::kBroken) channel.broken = true;
  return result;
}

void MappedDataPlane::PushBytes(Channel& channel, std::span<const std::byte> bytes) {
  if (channel.broken) return;
  if (!channel.waits()) {
    const SocketResult result = SendNow(channel, bytes);
    if (channel.broken) failed_.push_back(channel.id);
    if (result != SocketResult::kWouldBlock) return;
  }
  channel.unsent.emplace_back(bytes.begin(), bytes.end());
  channel.backlog.waiting += RoomOfMessage(bytes);
  AwaitRoom(channel, true);
}

// In turn: there may always be some of either.
void MappedDataPlane::Flush(Channel& channel) {
  SocketResult result = SocketResult::kOk;
  while (channel.waits() && result == SocketResult::kOk) {
    if (!channel.credits.empty()) result = FlushCredit(channel);
    if (channel.unsent.empty() || result != SocketResult::kOk) continue;
    result = SendNow(channel, channel.unsent.front());
    if (result != SocketResult::kOk) break;
    channel.backlog.waiting -= RoomOfMessage(channel.unsent.front());
    channel.unsent.pop_front();
  }
  AwaitRoom(channel, channel.waits());
}

SocketResult MappedDataPlane::FlushCredit(Channel& channel) {
  auto credit = channel.credits.upper_bound(channel.last_credited);
  if (credit == channel.credits.end()) credit = channel.credits.begin();
  const CreditPacket packet{.header = {credit->first, credit->second}};
  const SocketResult result = SendNow(channel, std::as_bytes(std::span(&packet, 1)));
  if (result != SocketResult::kOk) return result;
  channel.last_credited = credit->first;
  channel.credits.erase(credit);
  return result;
}

void MappedDataPlane::AwaitRoom(Channel& channel, bool await) const {
  if (std::exchange(channel.awaits_room, await) == await) return;
  epoll_.Change(channel.socket.get(), EPOLLIN | (await ? EPOLLOUT : 0U), channel.id);
}

// A peer that cannot map what it is given (another user, a filter of system calls) would not be able to
// the next time; one that is short of something may.
void MappedDataPlane::HearAnswer(Link& link) {
  Packet packet;
  const SocketResult result = ReceivePacket(link.channel.socket, &packet);
  if (result == SocketResult::kWouldBlock) return;
  AnswerPacket answer;
  const bool known =
      result == SocketResult::kOk && Parse(packet, &answer) && answer.head.kind == kAnswer;
  if (known && answer.taken == kMapped) {
    link.open = true;
    opened_.push_back(link.channel.id);
    return;
  }
  link.channel.broken = true;
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
  if (!link.open && !link.channel.broken) HearAnswer(link);
  if (!link.open) return;
  Packet packet;
  for (int i = 0; i < kReadsATurn; ++i) {
    const SocketResult result = ReceivePacket(link.channel.socket, &packet);
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
      link.channel.broken = true;
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
    auto accepted = std::make_unique<Accepted>(Accepted{{id, std::move(socket)}});
    if (status.ok()) status = Watch(accepted->channel);
    if (status.ok()) {
      accepted_.emplace(id, std::move(accepted));
      continue;
    }
    if (const auto more = refused_.Next()) {
      Log().warn("refused a peer on this host: {}{}", status.ToString(), *more);
    }
    SayWhyNot(accepted->channel.socket, status);
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
  accepted.shape = {static_cast<int64_t>(hello.num_chunks),
                    static_cast<int64_t>(hello.chunk_bytes)};
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<const std::byte> arena,
                           MapPeersMemory(packet.passed[0], accepted.shape.total_bytes()));
  if (hello.pool_bytes > 0) {
    if (hello.pool_bytes > kMaxPoolBytes || !packet.passed[1].valid()) {
      return absl::InvalidArgumentError(absl::StrCat("a pool of ", hello.pool_bytes, " bytes"));
    }
    KVFERRY_ASSIGN_OR_RETURN(
        std::shared_ptr<const std::byte> pool,
        MapPeersMemory(packet.passed[1], static_cast<int64_t>(hello.pool_bytes)));
    AddPart(accepted, std::move(pool), hello.pool_bytes);
  }
  accepted.arena = std::move(arena);
  Push(accepted.channel, AnswerPacket());
  return absl::OkStatus();
}

void MappedDataPlane::AddPart(Accepted& accepted, std::shared_ptr<const std::byte> memory,
                              uint64_t bytes) {
  accepted.pool.push_back({std::move(memory), accepted.pool_bytes(), bytes});
}

// Who cannot map all of them says nothing, and gets copies of the pages.
absl::Status MappedDataPlane::OnPoolPart(Accepted& accepted, const Packet& packet) {
  PoolPartPacket head;
  std::memcpy(&head, packet.bytes, sizeof(head));
  if (!accepted.pool_on_device && !accepted.pool.empty()) {
    return absl::InvalidArgumentError("parts of a pool that has come with the hello");
  }
  accepted.pool_on_device = true;
  if (head.bytes == 0 || head.bytes > kMaxPoolBytes - accepted.pool_bytes() ||
      head.parts_after >= kMaxPoolParts - accepted.pool.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a part of ", head.bytes, " bytes of a pool, ", head.parts_after, " to come"));
  }
  // Into pages on the host nothing is copied from a device: that such a pool cannot be mapped is no news.
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
    accepted.pool.clear();
    return absl::OkStatus();
  }
  AddPart(accepted, *std::move(memory), head.bytes);
  if (head.parts_after == 0) Push(accepted.channel, ReadsPoolPacket{});
  return absl::OkStatus();
}

// Pieces that lie in the pool, and are all of the chunk.
absl::Status MappedDataPlane::ReadPieces(const Accepted& accepted, PoolList list,
                                         uint64_t chunk_bytes) {
  const uint64_t pool_bytes = accepted.pool_bytes();
  uint64_t sum = 0;
  const PoolPart* part = accepted.pool.data();
  for (size_t i = 0; i < list.size() && sum <= chunk_bytes; ++i) {
    const auto piece = list.Read<PoolPiece>(i);
    if (piece.offset > pool_bytes || piece.bytes > pool_bytes - piece.offset) {
      return absl::InvalidArgumentError(
          absl::StrCat("bytes ", piece.offset, " + ", piece.bytes, " of a pool of ", pool_bytes));
    }
    // Most lie where the last one did.
    if (!part->Has(piece.offset)) part = &accepted.PartAt(piece.offset);
    part = AddPieces(part, piece);
    sum += piece.bytes;
  }
  if (sum == chunk_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("pieces of ", sum, " bytes for a chunk of ", chunk_bytes));
}

// Of items that could be a byte each.
absl::Status MappedDataPlane::ReadRuns(PoolList list, uint64_t chunk_bytes) {
  runs_.clear();
  uint64_t items = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const auto run = list.Read<PoolRun>(i);
    if (run.first > kMaxPoolBytes || run.count == 0 || run.count > chunk_bytes - items) {
      return absl::InvalidArgumentError(absl::StrCat(
          "items ", run.first, " + ", run.count, " after ", items, " of a chunk of ", chunk_bytes));
    }
    items += run.count;
    runs_.push_back({static_cast<int64_t>(run.first), static_cast<int64_t>(run.count)});
  }
  if (items > 0) return absl::OkStatus();
  return absl::InvalidArgumentError("places without runs");
}

// Each with all of the runs in one part; together they are all of the chunk.
absl::Status MappedDataPlane::ReadPlaces(const Accepted& accepted, PoolList list,
                                         uint64_t chunk_bytes) {
  places_.clear();
  uint64_t items = 0, end = 0, left = chunk_bytes;
  for (const PageRun& run : runs_) {
    items += static_cast<uint64_t>(run.count);
    end = std::max(end, static_cast<uint64_t>(run.first + run.count));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    const auto place = list.Read<PoolPlace>(i);
    if (place.item_bytes == 0 || place.item_bytes > left / items) {
      return absl::InvalidArgumentError(absl::StrCat(items, " items of ", place.item_bytes,
                                                     " bytes, of ", chunk_bytes, " in the chunk ",
                                                     left, " left"));
    }
    const PoolPart* const part =
        place.offset < accepted.pool_bytes() ? &accepted.PartAt(place.offset) : nullptr;
    if (part == nullptr || end > (part->bytes - (place.offset - part->begin)) / place.item_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          end, " items of ", place.item_bytes, " bytes from ", place.offset, " of a pool's part"));
    }
    left -= items * place.item_bytes;
    places_.push_back({part->memory.get() + (place.offset - part->begin),
                       static_cast<int64_t>(place.item_bytes)});
  }
  if (left == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("places of ", chunk_bytes - left, " bytes for a chunk of ", chunk_bytes));
}

absl::StatusOr<Payload> MappedDataPlane::ReadPoolList(const Accepted& accepted,
                                                      const ChunkPacket& chunk) {
  const int64_t slot = accepted.shape.chunk_at(static_cast<int64_t>(chunk.slot));
  const PoolList all(accepted.arena.get() + slot, chunk.payload_bytes / sizeof(PoolPiece));
  if (all.size() == 0) return absl::InvalidArgumentError("a list without a head");
  const uint64_t places = all.Read<PoolListHead>(0).places;
  if (places == 0) {
    KVFERRY_RETURN_IF_ERROR(ReadPieces(accepted, all.From(1), chunk.header.bytes));
    return Payload(Pieces(pieces_));
  }
  if (!accepted.pool_on_device || places > kMaxPlaces || places > all.size() - 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(places, " places in a list of ", all.size(),
                     accepted.pool_on_device ? "" : ", of a pool on the host"));
  }
  KVFERRY_RETURN_IF_ERROR(ReadRuns(all.From(1 + places), chunk.header.bytes));
  KVFERRY_RETURN_IF_ERROR(ReadPlaces(accepted, all.From(1).First(places), chunk.header.bytes));
  return Payload(PlacedRuns{runs_, places_});
}

// It begins in `part` and lies in the pool: perhaps in the parts behind, too.
const MappedDataPlane::PoolPart* MappedDataPlane::AddPieces(const PoolPart* part, PoolPiece piece) {
  while (piece.bytes > 0) {
    const uint64_t at = piece.offset - part->begin;
    const uint64_t bytes = std::min(piece.bytes, part->bytes - at);
    pieces_.emplace_back(part->memory.get() + at, bytes);
    piece = {piece.offset + bytes, piece.bytes - bytes};
    if (piece.bytes > 0) ++part;
  }
  return part;
}

absl::StatusOr<Payload> MappedDataPlane::FindBytes(const Accepted& accepted,
                                                   const ChunkPacket& chunk) {
  pieces_.clear();
  const bool in_pool = (chunk.header.flags & kChunkInPool) != 0;
  if (chunk.slot >= static_cast<uint64_t>(accepted.shape.num_chunks) ||
      chunk.payload_bytes > static_cast<uint64_t>(accepted.shape.chunk_bytes) ||
      (in_pool ? accepted.pool.empty() : chunk.payload_bytes != chunk.header.bytes)) {
    return absl::InvalidArgumentError(absl::StrCat("a chunk of ", chunk.header.bytes, " bytes, ",
                                                   chunk.payload_bytes, " in slot ", chunk.slot));
  }
  if (in_pool && accepted.pool_on_device && (chunk.header.flags & kChunkHasChecksum) != 0) {
    return absl::InvalidArgumentError("a checksum of what the processor cannot read");
  }
  if (in_pool) return ReadPoolList(accepted, chunk);
  const int64_t at = accepted.shape.chunk_at(static_cast<int64_t>(chunk.slot));
  pieces_.emplace_back(accepted.arena.get() + at, chunk.header.bytes);
  return Payload(Pieces(pieces_));
}

absl::Status MappedDataPlane::OnChunk(Accepted& accepted, const ChunkPacket& chunk,
                                      DataEvents* events) {
  const absl::StatusOr<Payload> found = FindBytes(accepted, chunk);
  const auto intact = [&] {
    return GenerationSeenByReader(accepted.arena.get(), static_cast<int64_t>(chunk.slot)) ==
           chunk.generation;
  };
  // A list that makes no sense may be another chunk's by now; whoever sent a slot that is none, or
  // a list that is still the one it meant, is no peer.
  const bool in_arena = chunk.slot < static_cast<uint64_t>(accepted.shape.num_chunks);
  if (!found.ok() && (!in_arena || intact())) return found.status();
  // Who is told of that many has had all of its arena read, and has not looked.
  if (accepted.channel.unsent.size() >=
      static_cast<size_t>(accepted.shape.num_chunks) + kMaxUnsent) {
    return absl::ResourceExhaustedError("it does not read what it is told");
  }
  if (found.ok()) {
    events->OnChunk(chunk.header, *found, intact);
  } else {
    // Whatever its generation is when it is looked at again.
    events->OnChunk(chunk.header, Payload(), [] { return false; });
  }
  Push(accepted.channel, ReadPacket{.slot = chunk.slot});
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
  if (accepted.arena == nullptr) return OnHello(accepted, packet);
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
  const SocketResult result = ReceivePacket(accepted.channel.socket, &packet);
  if (result == SocketResult::kWouldBlock) return false;
  absl::Status status = absl::UnavailableError("it has gone");
  if (result == SocketResult::kOk) {
    status = OnPacket(accepted, packet, events);
    if (const auto more = status.ok() ? std::nullopt : dropped_.Next()) {
      Log().warn("dropped a peer on this host: {}{}", status.ToString(), *more);
    }
  }
  // Also where its memory was lost on the way, for want of descriptors.
  if (!status.ok() && accepted.arena == nullptr) SayWhyNot(accepted.channel.socket, status);
  accepted.heard_all = !status.ok();
  accepted.channel.broken |= accepted.heard_all;
  return true;
}

// The news of a peer's end comes by our connection to it, and may overtake what it has said before: goodbyes
// among it, and the words that fetches are done. Which of the others is its connection to us its process tells;
// those whose processes are not known (other containers) are all heard.
void MappedDataPlane::HearLastWords(const Channel& of, DataEvents* events) {
  const pid_t peer = ProcessOf(of.socket);
  for (auto& [id, accepted] : accepted_) {
    if (ProcessOf(accepted->channel.socket) == peer) HearRest(*accepted, events);
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
    if ((ready & EPOLLOUT) != 0) Flush(link->second->channel);
    if ((ready & ~EPOLLOUT) != 0) OnLinkReadable(*link->second);
    if (link->second->channel.broken) down_.push_back(id);
    return;
  }
  const auto accepted = accepted_.find(id);
  if (accepted == accepted_.end()) return;
  if ((ready & EPOLLOUT) != 0) Flush(accepted->second->channel);
  if ((ready & ~EPOLLOUT) != 0) OnAcceptedReadable(*accepted->second, events);
  if (accepted->second->channel.broken) Drop(accepted, events);
}

void MappedDataPlane::Drop(AcceptedMap::iterator accepted, DataEvents* events) {
  HearRest(*accepted->second, events);
  epoll_.HangUp(accepted->second->channel.socket.get());
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
    if (link->open || link->channel.broken) continue;
    if (link->answer_by > now) {
      next = std::min(next, link->answer_by);
      continue;
    }
    link->channel.broken = true;
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
    epoll_.Remove(broken.channel.socket.get());
    events->OnLinkDown(id, broken.why_not.ok()
                               ? absl::UnavailableError("the peer on this host is gone")
                               : broken.why_not);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<AddressedPlane>> MakeMappedDataPlane(Arena* arena, MappedPool pool,
                                                                    int64_t answer_timeout_ms) {
  if (arena->fd() < 0) return absl::FailedPreconditionError("the arena's memory is not shared");
  auto plane = std::make_unique<MappedDataPlane>(arena, std::move(pool), answer_timeout_ms);
  KVFERRY_RETURN_IF_ERROR(plane->Init());
  return plane;
}

}  // namespace kvferry
