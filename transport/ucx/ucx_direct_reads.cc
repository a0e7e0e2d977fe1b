#include "transport/ucx/ucx_direct_reads.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <list>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/slab.h"
#include "base/status.h"
#include "transport/fair_share.h"
#include "transport/limited_line.h"
#include "transport/messages.h"
#include "transport/slots.h"
#include "transport/ucx/direct_address.h"
#include "transport/ucx/ucx_endpoints.h"
#include "transport/ucx/ucx_handles.h"

namespace kvferry {
namespace {

// Chunks that are read at once, each into staging memory of its own. What cannot be called back
// lands there and nowhere else; pages are written by the receiver's own copy.
constexpr int64_t kSlots = 16;
// Reads under way, of all peers: enough to hide the latency of each, few enough that a worker's
// queues never fill.
constexpr int64_t kMaxUnderWay = 256;
// A peer that lists more than this does not mean what it says.
constexpr size_t kMaxPieces = 65536;
// Chunks of a peer that wait for a slot: the windows of as many fetches as it serves by default.
constexpr int64_t kMaxWaitingOfPeer = 16384;
// Bytes of such lists, of all peers.
constexpr int64_t kMaxListBytes = 256 << 20;
// Transports without an event for a finished read have to be asked; one that is this often asked in
// vain has one, or its peer is stuck.
constexpr int kFutileRounds = 1000;
constexpr int64_t kDrainMs = 2000;

// A probe: a first read that connects, then rounds of many small reads and of a large one.
constexpr int kProbeRounds = 3;
constexpr int kSmallReads = 64;
constexpr size_t kSmallBytes = 64;
constexpr size_t kMaxLargeBytes = 1 << 20;
// All of that takes milliseconds, and the peer's fetches wait for it. Where packets to it go
// nowhere UCX tries for half a minute (UCX_UD_TIMEOUT), as long as a fetch may take.
constexpr int64_t kProbeMs = 2000;
// Slots that probes may hold: what is read of peers that answer must not wait for those that do
// not.
constexpr int64_t kMaxProbes = kSlots / 2;

std::vector<UcxContext::Option> Options(const Config& config) {
  std::vector<UcxContext::Option> options = {{"TLS", config.direct_tls},
                                             {"PROTO_EMULATION_ENABLE", "n"}};
  // Where there is no network with remote reads, as in tests. UCX leaves shared memory out for
  // endpoints that are to survive their peer, unless it is told that memory can be made invalid for
  // late reads: here they do not count, which is as good.
  const absl::string_view tls = config.direct_tls;
  if (absl::StrContains(tls, "posix")) options.emplace_back("POSIX_ERROR_HANDLING", "y");
  if (absl::StrContains(tls, "cma")) options.emplace_back("CMA_MEMORY_INVALIDATE", "y");
  return options;
}

class UcxDirectReads final : public DirectReads {
 public:
  UcxDirectReads(const Config& config, std::shared_ptr<UcxContext> context,
                 std::unique_ptr<UcxWorker> worker)
      : slot_bytes_(config.chunk_bytes),
        context_(std::move(context)),
        worker_(std::move(worker)),
        endpoints_(worker_->get()) {}
  ~UcxDirectReads() override;
  absl::Status Init(const Readable& readable);

  const std::string& address() const override { return address_; }
  absl::Status Connect(LinkId link, const std::string& address) override;
  void Close(LinkId link) override;
  bool Probing(LinkId link) const override;
  ReadCosts Costs(LinkId link) const override;
  void Read(LinkId link, const ChunkHeader& header, std::span<const std::byte> list) override;
  bool Progress(DataEvents* events) override;
  Deadline Tick(Deadline now) override;
  int event_fd() const override { return event_fd_; }
  bool Arm() override;

 private:
  struct Memory {
    uint64_t address;
    uint64_t bytes;
    uint64_t offset;  // In the row that the pool's memories are.
    UcxKey key;
  };
  struct Peer {
    enum class State { kProbing, kReadable, kBroken };

    LinkId link;
    std::vector<Memory> memories{};  // The guards, then the pool's.
    State state = State::kProbing;
    bool closed = false;
    ReadCosts costs{};
    int64_t waiting = 0;     // Jobs, for a slot,
    int64_t list_bytes = 0;  // and what they name.
    int64_t slots = 0;       // That its jobs hold.
    int64_t under_way = 0;   // Reads.
    // OnProbed() follows by then, whether the probe has had a slot or not; and has been said, or is
    // about to be.
    Deadline say_by = DeadlineInMs(kProbeMs);
    bool said = false;
    Deadline probe_by = Deadline::max();  // Once it has a slot.
    Deadline close_by{};                  // Once it is closed.
  };
  // One read, from a place in the peer's memory to one behind the start of the job's slot.
  struct Op {
    size_t to;
    const Memory* memory;
    uint64_t at;
    size_t bytes;
  };
  // Reads that belong together, in steps: the next step's begin when all of a step have ended.
  struct Job {
    UcxDirectReads* all;
    std::shared_ptr<Peer> peer;
    bool probe;
    ChunkHeader header{};           // Of a chunk, as the list and the guard.
    std::vector<std::byte> list{};  // While it waits.
    GuardHead guard{};
    int steps = 0;          // That have begun.
    std::vector<Op> ops{};  // Of the last one.
    size_t issued = 0;
    int under_way = 0;
    int64_t slot = -1;
    absl::Status status{};
    Deadline step_began{};
  };
  using JobPtr = std::unique_ptr<Job>;

  absl::Status MakeStaging();
  std::byte* SlotAt(int64_t slot) const { return staging_.get() + slot * slot_stride(); }
  // The guard's word lands behind the chunk.
  int64_t slot_stride() const { return slot_bytes_ + 64; }

  absl::Status CheckRoom(const Peer& peer, std::span<const std::byte> list) const;
  absl::Status AddPieces(Job* job) const;
  absl::Status AddPiece(const Peer& peer, const PoolPiece& piece, size_t to,
                        std::vector<Op>* ops) const;
  void BeginStep(Job& job, std::vector<Op> ops);
  // False: the job has ended.
  bool NextStep(Job& job, DataEvents* events);
  bool NextOfChunk(Job& job, DataEvents* events);
  bool NextOfProbe(Job& job, DataEvents* events);
  std::vector<Op> ProbeOps(const Job& job) const;
  static void NoteProbe(Job& job);
  void FailProbe(Peer& peer, const std::string& why);
  void CloseDrained();
  void Break(Peer& peer, const absl::Status& status);
  void Issue(Job& job);
  void Await(JobPtr job);
  bool Admit();
  void TakeSlot(JobPtr job);
  static void OnRead(void* request, ucs_status_t status, void* user_data);

  const int64_t slot_bytes_;
  const std::shared_ptr<UcxContext> context_;
  const std::unique_ptr<UcxWorker> worker_;
  std::vector<UcxMemory> readable_;
  std::string address_;
  int event_fd_ = -1;

  std::shared_ptr<std::byte> staging_;  // Made for the first peer.
  std::unique_ptr<UcxMemory> staging_memory_;
  Slots slots_{kSlots};

  UcxEndpoints endpoints_;
  absl::flat_hash_map<LinkId, std::shared_ptr<Peer>> peers_;
  std::vector<std::shared_ptr<Peer>> draining_;  // Closed, with reads under way.
  // Jobs that wait for a slot, by peer: the one that is first gets the next.
  struct Waiting {
    Peer* peer;
    std::deque<JobPtr> jobs;
  };
  std::list<Waiting> waiting_;
  int64_t list_bytes_ = 0;  // Of all of them.
  // Chunks that were not taken, one of each transfer: that ends, or is begun anew. Said in the next
  // Progress().
  struct Refused {
    LinkId link;
    ChunkHeader header;
    absl::Status status;
  };
  absl::flat_hash_map<uint64_t, Refused> refused_;
  std::list<JobPtr> running_;
  int64_t probes_ = 0;  // Of those that run.
  LimitedLine unreadable_{LimitedLine::kSome}, broken_{LimitedLine::kSome};
  std::vector<LinkId> overdue_;  // Of whose probes the next Progress() says that they are too late.
  int64_t under_way_ = 0;
  bool moved_ = false;  // A read has ended since the last Progress().
  int futile_rounds_ = 0;
};

absl::Status UcxDirectReads::Init(const Readable& readable) {
  KVFERRY_ASSIGN_OR_RETURN(event_fd_, worker_->EventFd());
  if (readable.guards.empty()) return absl::OkStatus();
  DirectAddress address;
  KVFERRY_ASSIGN_OR_RETURN(address.worker, worker_->Address());
  std::vector<std::span<const std::byte>> memories = {readable.guards};
  memories.insert(memories.end(), readable.pool.begin(), readable.pool.end());
  for (const std::span<const std::byte> memory : memories) {
    KVFERRY_ASSIGN_OR_RETURN(UcxMemory registered, UcxMemory::Map(context_, memory));
    KVFERRY_ASSIGN_OR_RETURN(std::string key, registered.PackKey());
    address.memories.push_back(
        {reinterpret_cast<uint64_t>(memory.data()), memory.size(), std::move(key)});
    readable_.push_back(std::move(registered));
  }
  address_ = address.Encode();
  if (address_.size() <= kMaxDirectAddressBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("direct: ", memories.size(), " pieces of memory take ", address_.size(),
                   " bytes to describe, limit ", kMaxDirectAddressBytes,
                   "; let kvferry make the pool, or set network_path=packed"));
}

UcxDirectReads::~UcxDirectReads() {
  while (!peers_.empty()) Close(peers_.begin()->first);
  const Deadline deadline = DeadlineInMs(kDrainMs);
  while (under_way_ > 0 && Clock::now() < deadline) {
    ucp_worker_progress(worker_->get());
    endpoints_.Reap();
  }
  CloseDrained();
  if (under_way_ == 0) return;
  // UCX may still write to the staging memory, and tell a job so.
  Log().error("direct: {} reads did not end in time; their memory is given up", under_way_);
  for (JobPtr& job : running_) static_cast<void>(job.release());
  static_cast<void>(std::make_unique<std::shared_ptr<std::byte>>(staging_).release());
}

// ---------------------------------------------------------------- peers

absl::Status UcxDirectReads::MakeStaging() {
  if (staging_ != nullptr) return absl::OkStatus();
  const int64_t bytes = kSlots * slot_stride();
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> staging, MapSlab(bytes));
  KVFERRY_ASSIGN_OR_RETURN(UcxMemory memory,
                           UcxMemory::Map(context_, {staging.get(), static_cast<size_t>(bytes)}));
  staging_ = std::move(staging);
  staging_memory_ = std::make_unique<UcxMemory>(std::move(memory));
  return absl::OkStatus();
}

absl::Status UcxDirectReads::Connect(LinkId link, const std::string& encoded) {
  KVFERRY_ASSIGN_OR_RETURN(const DirectAddress address, DirectAddress::Decode(encoded));
  KVFERRY_RETURN_IF_ERROR(MakeStaging());
  if (address.memories[0].bytes < kSmallBytes) {
    return absl::InvalidArgumentError("a direct address without guards");
  }
  KVFERRY_RETURN_IF_ERROR(endpoints_.Connect(link, address.worker));
  auto peer = std::make_shared<Peer>(Peer{link});
  uint64_t offset = 0;
  for (const DirectAddress::Memory& memory : address.memories) {
    absl::StatusOr<UcxKey> key = UnpackKey(endpoints_.Find(link), memory.key);
    if (!key.ok()) {
      endpoints_.Close(link);
      return key.status();
    }
    const bool guards = peer->memories.empty();
    peer->memories.push_back({memory.address, memory.bytes, offset, *std::move(key)});
    if (!guards) offset += memory.bytes;
  }
  peers_.emplace(link, peer);
  Await(std::make_unique<Job>(Job{this, peer, /*probe=*/true}));
  return absl::OkStatus();
}

void UcxDirectReads::Close(LinkId link) {
  auto node = peers_.extract(link);
  if (node.empty()) return;
  Peer& peer = *node.mapped();
  peer.closed = true;  // Its jobs drain unheard.
  waiting_.remove_if([&](const Waiting& waiting) { return waiting.peer == &peer; });
  list_bytes_ -= peer.list_bytes;
  peer.close_by = DeadlineInMs(kDrainMs);
  draining_.push_back(std::move(node.mapped()));
  CloseDrained();
}

// UCX aborts the process when an endpoint is closed in the middle of a read by process_vm_readv
// (uct_scopy_ep_t's destructor). Reads end by themselves, with an error where the peer is dead.
void UcxDirectReads::CloseDrained() {
  if (draining_.empty()) return;
  const Deadline now = Clock::now();
  std::erase_if(draining_, [&](const std::shared_ptr<Peer>& peer) {
    const bool drained = peer->under_way == 0 || now > peer->close_by;
    if (drained) endpoints_.Close(peer->link);
    return drained;
  });
}

bool UcxDirectReads::Probing(LinkId link) const {
  const auto found = peers_.find(link);
  return found != peers_.end() && found->second->state == Peer::State::kProbing &&
         !found->second->said;
}

ReadCosts UcxDirectReads::Costs(LinkId link) const {
  const auto found = peers_.find(link);
  const bool readable = found != peers_.end() && found->second->state == Peer::State::kReadable;
  return readable ? found->second->costs : ReadCosts();
}

void UcxDirectReads::Break(Peer& peer, const absl::Status& status) {
  if (peer.state == Peer::State::kBroken) return;
  peer.state = Peer::State::kBroken;
  if (const auto more = broken_.Next()) {
    Log().warn("direct: {}; what the peer sends comes packed from now on{}", status.ToString(),
               *more);
  }
}

// ---------------------------------------------------------------- chunks

void UcxDirectReads::Read(LinkId link, const ChunkHeader& header, std::span<const std::byte> list) {
  const auto found = peers_.find(link);
  if (found == peers_.end()) return;
  auto job = std::make_unique<Job>(Job{this, found->second, /*probe=*/false, header});
  job->header.flags &= ~kChunkInPool;
  if (const absl::Status room = CheckRoom(*found->second, list); !room.ok()) {
    refused_.try_emplace(header.transfer_id, Refused{link, job->header, room});
    return;
  }
  job->list.assign(list.begin(), list.end());
  Await(std::move(job));
}

absl::Status UcxDirectReads::CheckRoom(const Peer& peer, std::span<const std::byte> list) const {
  const auto bytes = static_cast<int64_t>(list.size());
  const int64_t share = FairShare(kMaxListBytes, peers_.size());
  if (list.size() / sizeof(PoolPiece) <= kMaxPieces && peer.waiting < kMaxWaitingOfPeer &&
      peer.list_bytes + bytes <= share && list_bytes_ + bytes <= kMaxListBytes) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(list.size() / sizeof(PoolPiece), " pieces in a chunk, limit ", kMaxPieces, "; ",
                   peer.waiting, " chunks of the peer wait to be read, limit ", kMaxWaitingOfPeer,
                   ", in lists of ", peer.list_bytes, " bytes, limit ", share, ", of all peers ",
                   list_bytes_, ", limit ", kMaxListBytes));
}

absl::Status UcxDirectReads::AddPieces(Job* job) const {
  const std::vector<std::byte>& list = job->list;
  const auto refused = [&](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("the chunk at byte ", job->header.offset, " names ", what));
  };
  if (list.size() < sizeof(GuardHead) || list.size() % sizeof(PoolPiece) != 0) {
    return refused(absl::StrCat("its pieces in ", list.size(), " bytes"));
  }
  std::memcpy(&job->guard, list.data(), sizeof(GuardHead));
  if (job->guard.index >= job->peer->memories[0].bytes / sizeof(uint64_t)) {
    return refused(absl::StrCat("guard ", job->guard.index));
  }
  size_t to = 0;
  for (size_t at = sizeof(GuardHead); at < list.size(); at += sizeof(PoolPiece)) {
    PoolPiece piece;
    std::memcpy(&piece, list.data() + at, sizeof(piece));
    if (piece.bytes == 0 || piece.bytes > job->header.bytes - to) {
      return refused(absl::StrCat("other bytes than its ", job->header.bytes));
    }
    KVFERRY_RETURN_IF_ERROR(AddPiece(*job->peer, piece, to, &job->ops));
    to += piece.bytes;
  }
  if (to != job->header.bytes || job->header.bytes > static_cast<uint64_t>(slot_bytes_)) {
    return refused(absl::StrCat(to, " bytes for its ", job->header.bytes));
  }
  return absl::OkStatus();
}

absl::Status UcxDirectReads::AddPiece(const Peer& peer, const PoolPiece& piece, size_t to,
                                      std::vector<Op>* ops) const {
  const auto after =
      std::upper_bound(peer.memories.begin() + 1, peer.memories.end(), piece.offset,
                       [](uint64_t at, const Memory& memory) { return at < memory.offset; });
  const Memory& memory = *(after - 1);
  const uint64_t at = piece.offset - memory.offset;
  if (at > memory.bytes || piece.bytes > memory.bytes - at) {
    return absl::InvalidArgumentError(absl::StrCat("bytes ", piece.offset, " + ", piece.bytes,
                                                   " are of no memory of the peer's"));
  }
  ops->push_back({to, &memory, at, piece.bytes});
  return absl::OkStatus();
}

// ---------------------------------------------------------------- jobs

void UcxDirectReads::BeginStep(Job& job, std::vector<Op> ops) {
  ++job.steps;
  job.ops = std::move(ops);
  job.issued = 0;
  job.step_began = Clock::now();
}

void UcxDirectReads::Await(JobPtr job) {
  ++job->peer->waiting;
  const auto bytes = static_cast<int64_t>(job->list.size());
  job->peer->list_bytes += bytes;
  list_bytes_ += bytes;
  Peer* const peer = job->peer.get();
  auto of_peer = std::ranges::find(waiting_, peer, &Waiting::peer);
  if (of_peer == waiting_.end()) of_peer = waiting_.insert(of_peer, Waiting{peer, {}});
  of_peer->jobs.push_back(std::move(job));
}

bool UcxDirectReads::Admit() {
  const size_t before = running_.size();
  const int64_t share = FairShare(kSlots, peers_.size());
  for (auto it = waiting_.begin(); it != waiting_.end() && slots_.num_free() > 0;) {
    const auto of_peer = it++;
    std::deque<JobPtr>& jobs = of_peer->jobs;
    if (of_peer->peer->slots >= share || (jobs.front()->probe && probes_ == kMaxProbes)) continue;
    TakeSlot(std::move(jobs.front()));
    jobs.pop_front();
    if (jobs.empty()) {
      waiting_.erase(of_peer);
      continue;
    }
    waiting_.splice(waiting_.end(), waiting_, of_peer);
    if (it == waiting_.end()) it = of_peer;
  }
  return running_.size() > before;
}

void UcxDirectReads::TakeSlot(JobPtr job) {
  job->slot = slots_.Take();
  --job->peer->waiting;
  job->peer->list_bytes -= static_cast<int64_t>(job->list.size());
  list_bytes_ -= static_cast<int64_t>(job->list.size());
  ++job->peer->slots;
  probes_ += job->probe ? 1 : 0;
  if (job->probe) job->peer->probe_by = DeadlineInMs(kProbeMs);
  if (!job->probe) job->status = AddPieces(job.get());
  std::vector<std::byte>().swap(job->list);  // Its memory, too.
  BeginStep(*job, job->probe ? ProbeOps(*job) : std::move(job->ops));
  running_.push_back(std::move(job));
}

void UcxDirectReads::Issue(Job& job) {
  const ucp_ep_h endpoint = job.peer->closed ? nullptr : endpoints_.Find(job.peer->link);
  if (job.status.ok() && (endpoint == nullptr || job.peer->state == Peer::State::kBroken)) {
    job.status = absl::UnavailableError("the connection that reads go over is gone");
  }
  const int64_t share = FairShare(kMaxUnderWay, peers_.size());
  while (job.status.ok() && job.issued < job.ops.size() && job.peer->under_way < share &&
         under_way_ < kMaxUnderWay) {
    const Op& op = job.ops[job.issued++];
    ucp_request_param_t param{};
    param.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
    param.cb.send = &OnRead;
    param.user_data = &job;
    param.memh = staging_memory_->get();
    void* request = ucp_get_nbx(endpoint, SlotAt(job.slot) + op.to, op.bytes,
                                op.memory->address + op.at, op.memory->key.get(), &param);
    if (UCS_PTR_IS_PTR(request)) {
      ++job.under_way;
      ++job.peer->under_way;
      ++under_way_;
    } else {
      job.status = UcxStatus(UCS_PTR_RAW_STATUS(request), "reading the peer's memory");
    }
  }
}

void UcxDirectReads::OnRead(void* request, ucs_status_t status, void* user_data) {
  auto* job = static_cast<Job*>(user_data);
  ucp_request_free(request);
  --job->under_way;
  --job->peer->under_way;
  --job->all->under_way_;
  job->all->moved_ = true;
  if (job->status.ok()) job->status = UcxStatus(status, "reading the peer's memory");
}

bool UcxDirectReads::NextStep(Job& job, DataEvents* events) {
  if (job.peer->closed) return false;
  return job.probe ? NextOfProbe(job, events) : NextOfChunk(job, events);
}

bool UcxDirectReads::NextOfChunk(Job& job, DataEvents* events) {
  if (!job.status.ok()) {
    // Anything else is about this list.
    if (absl::IsUnavailable(job.status)) Break(*job.peer, job.status);
    events->OnReadFailed(job.header, job.status);
    return false;
  }
  const auto guard_at = static_cast<size_t>(slot_bytes_);
  if (job.steps == 1) {
    // Only now: what has been read counts if the word was still good after it.
    BeginStep(job, {{guard_at, job.peer->memories.data(), job.guard.index * sizeof(uint64_t),
                     sizeof(uint64_t)}});
    return true;
  }
  const std::byte* const slot = SlotAt(job.slot);
  uint64_t generation = 0;
  std::memcpy(&generation, slot + guard_at, sizeof(generation));
  const std::span<const std::byte> payload(slot, job.header.bytes);
  events->OnChunk(job.header, Pieces(&payload, 1),
                  [&] { return generation == job.guard.generation; });
  return false;
}

// ---------------------------------------------------------------- probes

std::vector<UcxDirectReads::Op> UcxDirectReads::ProbeOps(const Job& job) const {
  const std::vector<Memory>& memories = job.peer->memories;
  if (job.steps == 0) return {{0, memories.data(), 0, kSmallBytes}};
  if (job.steps <= kProbeRounds) {
    return std::vector<Op>(kSmallReads, {0, memories.data(), 0, kSmallBytes});
  }
  const size_t bytes = std::min(
      {static_cast<size_t>(slot_bytes_), static_cast<size_t>(memories[1].bytes), kMaxLargeBytes});
  return {{0, &memories[1], 0, bytes}};
}

// The quickest of a step's rounds: the others waited for something else.
void UcxDirectReads::NoteProbe(Job& job) {
  if (job.steps == 1) return;
  const auto took =
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - job.step_began);
  const bool small = job.steps <= 1 + kProbeRounds;
  const double ns =
      small ? static_cast<double>(took.count()) / kSmallReads
            : static_cast<double>(took.count()) * (1 << 20) / static_cast<double>(job.ops[0].bytes);
  int64_t& best = small ? job.peer->costs.read_ns : job.peer->costs.mib_ns;
  const int64_t seen = std::max<int64_t>(1, static_cast<int64_t>(ns));
  best = best == 0 ? seen : std::min(best, seen);
}

void UcxDirectReads::FailProbe(Peer& peer, const std::string& why) {
  peer.state = Peer::State::kBroken;
  if (const auto more = unreadable_.Next()) {
    Log().warn("direct: a peer's memory cannot be read from here ({}); its KV comes packed{}", why,
               *more);
  }
}

bool UcxDirectReads::NextOfProbe(Job& job, DataEvents* events) {
  if (job.peer->state != Peer::State::kProbing) return false;  // It was overdue.
  if (job.status.ok()) {
    NoteProbe(job);
    if (job.steps <= 2 * kProbeRounds) {
      BeginStep(job, ProbeOps(job));
      return true;
    }
    job.peer->state = Peer::State::kReadable;
    Log().info("direct: a read takes {} ns, a MiB {} us", job.peer->costs.read_ns,
               job.peer->costs.mib_ns / 1000);
  } else {
    FailProbe(*job.peer, job.status.ToString());
  }
  if (!std::exchange(job.peer->said, true)) events->OnProbed(job.peer->link);
  return false;
}

// ---------------------------------------------------------------- progress

bool UcxDirectReads::Progress(DataEvents* events) {
  moved_ = false;
  bool busy = ucp_worker_progress(worker_->get()) != 0;
  CloseDrained();
  endpoints_.Reap();
  for (const auto& [link, status] : endpoints_.TakeDown()) {
    busy = true;
    const auto found = peers_.find(link);
    // A probe under way finds out itself, and says so.
    if (found == peers_.end() || found->second->state == Peer::State::kProbing) continue;
    Break(*found->second, status);
  }
  for (const LinkId link : std::exchange(overdue_, {})) {
    busy = true;
    events->OnProbed(link);
  }
  for (const auto& [transfer_id, refused] : std::exchange(refused_, {})) {
    busy = true;
    if (peers_.contains(refused.link)) events->OnReadFailed(refused.header, refused.status);
  }
  // What ended below made room only for the next round, which a busy one is followed by.
  busy |= Admit();
  for (auto it = running_.begin(); it != running_.end();) {
    Job& job = **it;
    Issue(job);
    const bool step_done = job.under_way == 0 && (!job.status.ok() || job.issued == job.ops.size());
    if (!step_done || NextStep(job, events)) {
      busy |= step_done;
      ++it;
      continue;
    }
    slots_.GiveBack(job.slot);
    --job.peer->slots;
    probes_ -= job.probe ? 1 : 0;
    it = running_.erase(it);
    busy = true;
  }
  busy |= moved_;
  futile_rounds_ = busy ? 0 : futile_rounds_ + 1;
  return busy;
}

Deadline UcxDirectReads::Tick(Deadline now) {
  Deadline next = Deadline::max();
  for (const auto& [link, peer] : peers_) {
    if (peer->state != Peer::State::kProbing) continue;
    // One that others kept from beginning says nothing of its peer: it goes on, and later fetches
    // can be read.
    if (peer->say_by <= now && !std::exchange(peer->said, true)) overdue_.push_back(link);
    if (peer->probe_by <= now) {
      FailProbe(*peer, absl::StrCat("no answer within ", kProbeMs, " ms"));
      continue;  // Its reads may still land in their slot.
    }
    next = std::min({next, peer->said ? Deadline::max() : peer->say_by, peer->probe_by});
  }
  return next;
}

bool UcxDirectReads::Arm() {
  if (!overdue_.empty() || !refused_.empty()) return false;
  if (under_way_ > 0 && futile_rounds_ < kFutileRounds) return false;
  return ucp_worker_arm(worker_->get()) == UCS_OK;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DirectReads>> MakeUcxDirectReads(
    const Config& config, const DirectReads::Readable& readable) {
  if (UcxIsBefore(22)) {
    return absl::FailedPreconditionError(
        absl::StrCat("direct: this is UCX ", ucp_get_version_string(),
                     ", which may emulate remote reads in software, so that a peer that dies takes "
                     "this process along; use 1.22 or newer, or set network_path=packed"));
  }
  KVFERRY_ASSIGN_OR_RETURN(
      std::shared_ptr<UcxContext> context,
      UcxContext::Create(Options(config), UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP));
  KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<UcxWorker> worker, UcxWorker::Create(context));
  auto reads = std::make_unique<UcxDirectReads>(config, std::move(context), std::move(worker));
  KVFERRY_RETURN_IF_ERROR(reads->Init(readable));
  return reads;
}

}  // namespace kvferry
