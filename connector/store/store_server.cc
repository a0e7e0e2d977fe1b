#include "connector/store/store_server.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <optional>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/random.h"
#include "base/status.h"
#include "connector/attached_node.h"
#include "connector/lease_source.h"
#include "connector/recent_map.h"
#include "connector/store/call_rooms.h"
#include "connector/store/in_pieces.h"
#include "connector/store/kv_store.h"
#include "connector/store/store_wire.h"
#include "connector/store/task_thread.h"
#include "transport/node.h"

namespace kvferry {
namespace {

constexpr int64_t kReplyLeaseMs = 10000;  // At most.

// What one call to a tier may take of those who wait behind it, however long its own caller waits.
// One that hangs is known by then (TieredStore::kPatience) and is not asked by those who come next.
constexpr int64_t kTierWaitMs = 2000;
// So much is put in one such call: it takes not nearly as long unless the tier hangs.
constexpr int64_t kPutTogetherBytes = 16 << 20;

using Bytes = std::vector<std::byte>;

std::vector<std::string_view> Views(const std::vector<std::string>& keys) {
  return {keys.begin(), keys.end()};
}

absl::Status NoRoomAbove() {
  return absl::ResourceExhaustedError("store: no room to bring the page up from the tier below");
}

// What a call is given that waits for a tier: one that hangs uses it up, and what is said then has
// to arrive while it is awaited, and what is found to be fetched.
Deadline InTimeToReply(Deadline deadline) {
  const Deadline now = Clock::now();
  return deadline - std::max(deadline - now, Clock::duration()) / 4;
}

absl::Status CheckMayBeStaged(int64_t bytes) {
  if (bytes <= kMaxStagedBytes) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("store: the value has ", bytes, " bytes; as bytes, and not as pages, values of ",
                   kMaxStagedBytes, " at most are moved"));
}

bool IsQuestion(std::string_view function) {
  return function == store_call::kExists || function == store_call::kExistsEach ||
         function == store_call::kStats;
}

absl::Status TooLate() {
  return absl::DeadlineExceededError("store: the deadline passed before all pages were found");
}

}  // namespace

// Its task thread does what is asked, one call after another, of clients in turn. Where there is a
// tier below, which may be slow, another thread answers what is in memory, so that nobody who asks
// for that waits for a disk, and a third one says what is there, so that nobody who asks that waits
// for others' values. The node's progress thread only hands calls over and lets go of leases.
class StoreServer::Service final : public LeaseSource, public CallHandler {
 public:
  explicit Service(Options options)
      : LeaseSource(options.endpoint.config),
        options_(std::move(options)),
        store_(options_.tiered != nullptr ? std::shared_ptr<KvStore>(options_.tiered)
                                          : options_.host) {}
  ~Service() override { Close(); }

  absl::Status Start();
  // Waits for the tasks that are running: for one that waits for a tier up to kTierWaitMs.
  void Close() {
    closing_ = true;
    in_memory_.Stop();
    questions_.Stop();
    tasks_.Stop();
    owned_node_.reset();  // Its thread goes on until then, and looks at node_.
  }
  const Node& node() const { return *owned_node_; }

  // CallHandler.
  void OnCall(const CallKey& call, const std::string& function, const Fields& args,
              Deadline deadline) override;
  // What it has leased expires.
  void OnCallDropped(const CallKey& call) override {
    Forget(call);
    for (TaskThread* thread : {&in_memory_, &questions_, &tasks_}) thread->Drop(call);
  }
  // Of LeaseSource too; the leases need it once.
  Deadline Tick(Deadline now) override { return LeaseSource::Tick(now); }

 private:
  struct Request {
    CallKey call;
    Deadline deadline;
    Deadline answer_by;
    // These two from its turn on: what waits for that holds nothing of a call that may be dropped.
    std::shared_ptr<const Fields> args{};  // And the call's room, until nothing is left of it.
    std::vector<std::string> keys{};
  };
  // Of one call to the stores. Asked for anew before each of several.
  static Deadline StoreDeadline(const Request& request) {
    return std::min(request.answer_by, DeadlineInMs(kTierWaitMs));
  }
  // Nobody waits for the reply any more, and its caller may have done something else in its place.
  bool IsOver(const Request& request) {
    if (closing_ || Clock::now() >= request.deadline) return true;
    const MutexLock lock(&mutex_);
    return !awaited_.contains(request.call);
  }
  void Reply(const CallKey& call, const absl::StatusOr<Fields>& reply) {
    Forget(call);
    node_.get().Reply(call, reply);
  }
  void Forget(const CallKey& call) {
    decltype(awaited_)::node_type forgotten;  // Destroyed outside of the lock.
    const MutexLock lock(&mutex_);
    forgotten = awaited_.extract(call);
  }
  // What to reply now; nothing: the reply follows.
  using Result = absl::StatusOr<std::optional<Fields>>;
  using Function = Result (Service::*)(const Request&);
  static Function Find(const std::string& name);

  // Keeps what a call carries, if there is room for it.
  absl::Status Take(const CallKey& call, const Fields& args);
  // False when nobody waits for the reply any more.
  bool ReadArgs(Request& request);
  static absl::Status ReadKeys(Request& request);
  // Posts the task; what cannot be posted is answered.
  void Post(TaskThread& thread, const CallKey& call, std::function<void()> task);
  // What finds no memory ends its call, and not the process.
  void Run(const CallKey& call, const std::function<void()>& task);
  void Begin(const std::string& name, Request request);
  // Whether the host store has all that is asked for; it may lose some of it at any time.
  bool IsInMemory(const std::string& name, const Request& request) const;
  void Serve(Function function, const Request& request);
  Result Exists(const Request& request);
  Result ExistsEach(const Request& request);
  template <auto kChange>  // KvStore::Erase, Pin or Unpin.
  Result Change(const Request& request);
  Result Stats(const Request& request);
  Result Get(const Request& request);
  Result Put(const Request& request);
  Result GetPages(const Request& request);
  Result PutPages(const Request& request);

  absl::StatusOr<std::string_view> OneKey(const Request& request) const;
  // ABORTED unless the call may change something still: its client has asked for something in a
  // later era, so it waits for this one no more, and what it has heard since is to stay true.
  absl::Status CheckEra(const Request& request);
  // Of what is served, as bytes.
  int64_t MaxStagedValueBytes() const {
    return std::min(store_->max_value_bytes(), kMaxStagedBytes);
  }
  // The right of a client to memory for a value of `bytes`, until this is gone.
  absl::StatusOr<std::shared_ptr<void>> TakeRoom(const PeerKey& peer, int64_t bytes);
  absl::StatusOr<std::shared_ptr<const Bytes>> ReadValue(const Request& request,
                                                         std::string_view key);
  // RESOURCE_EXHAUSTED: not in the host store, which has no room for what a tier below may have.
  absl::StatusOr<HostStore::ReadLease> Acquire(const std::string& key, bool has_room,
                                               Deadline deadline);
  absl::StatusOr<HostStore::ReadLease> BringUp(const std::string& key, Deadline deadline);
  // What the host store has, if it is a page. All that is offered as pages comes from here: one of
  // another length would shift those behind it.
  absl::StatusOr<HostStore::ReadLease> AcquirePage(const std::string& key);
  absl::Status CheckIsPage(int64_t bytes) const;
  // Offers memory to the caller of the request; `held` is let go of when the lease has ended.
  absl::StatusOr<uint64_t> Lease(const Request& request, PageRuns pages,
                                 std::shared_ptr<const Bytes> tail,
                                 const std::shared_ptr<void>& held);
  // Lets go of what is leased no more.
  void Settle() override;
  // Fetches from the caller's lease and goes on with the outcome on the task thread.
  absl::Status FetchFromCaller(const Request& request, PageRuns positions, PageRuns pages,
                               StreamTail tail, std::function<void(const absl::Status&)> then);

  struct Incoming;  // Pages that are being put.
  void FinishPutPages(Incoming& incoming, const Request& request, const absl::Status& fetched);
  // Into both tiers. Nothing when nobody waits for it any more.
  std::optional<std::vector<absl::Status>> PutTiered(
      Incoming& incoming, const Request& request, std::span<const std::string_view> keys,
      const std::function<absl::Status(size_t)>& show);

  const Options options_;
  const std::shared_ptr<KvStore> store_;  // All that is served.
  TaskThread in_memory_;                  // These two run if there is a tier below.
  TaskThread questions_;
  TaskThread tasks_;
  const std::shared_ptr<CallRooms> rooms_ = CallRooms::Create();
  static_assert(CallRooms::kMaxBytes == kMaxStagedBytes);
  const std::shared_ptr<CallRooms> value_rooms_ = CallRooms::Create("values");
  // Of clients, if not 0. The task thread's: all changes are made there.
  RecentMap<uint64_t> eras_;
  // Leases and fetches that hold such memory may end after this server.
  const std::shared_ptr<std::atomic<int64_t>> staged_bytes_ =
      std::make_shared<std::atomic<int64_t>>(0);
  std::atomic<bool> closing_{false};
  Mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<void>> held_ ABSL_GUARDED_BY(mutex_);
  // Calls whose callers wait for a reply. As many as the node serves: each is replied to or
  // dropped, and with it what it carries, though it may not have had its turn.
  absl::btree_map<CallKey, std::shared_ptr<const Fields>> awaited_ ABSL_GUARDED_BY(mutex_);
  AttachedNode node_;
  std::unique_ptr<Node> owned_node_;  // Last: its thread uses the rest.
};

absl::Status StoreServer::Service::Start() {
  Node::Options node;
  node.config = options_.endpoint.config;
  node.model = options_.endpoint.model;
  node.name = options_.endpoint.name;
  node.pool = options_.host->pool();
  node.source = this;
  node.handler = this;
  node.listen = true;
  KVFERRY_ASSIGN_OR_RETURN(owned_node_, Node::Start(std::move(node)));
  node_.Attach(owned_node_.get());
  if (options_.tiered != nullptr) {
    KVFERRY_RETURN_IF_ERROR(in_memory_.Start("store memory"));
    KVFERRY_RETURN_IF_ERROR(questions_.Start("store questions"));
  }
  return tasks_.Start("store server");
}

// ---------------------------------------------------------------- calls

StoreServer::Service::Function StoreServer::Service::Find(const std::string& name) {
  static const auto& functions = *new absl::flat_hash_map<std::string, Function>{
      {store_call::kExists, &Service::Exists},
      {store_call::kExistsEach, &Service::ExistsEach},
      {store_call::kErase, &Service::Change<&KvStore::Erase>},
      {store_call::kPin, &Service::Change<&KvStore::Pin>},
      {store_call::kUnpin, &Service::Change<&KvStore::Unpin>},
      {store_call::kStats, &Service::Stats},
      {store_call::kGet, &Service::Get},
      {store_call::kPut, &Service::Put},
      {store_call::kGetPages, &Service::GetPages},
      {store_call::kPutPages, &Service::PutPages},
  };
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

void StoreServer::Service::OnCall(const CallKey& call, const std::string& function,
                                  const Fields& args, Deadline deadline) {
  if (const absl::Status taken = Take(call, args); !taken.ok()) return Reply(call, taken);
  Post(options_.tiered != nullptr ? in_memory_ : tasks_, call,
       [this, function, request = Request{call, deadline, InTimeToReply(deadline)}] {
         Begin(function, request);
       });
}

absl::Status StoreServer::Service::Take(const CallKey& call, const Fields& args) {
  const auto bytes = static_cast<int64_t>(args.TotalBytes());
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<void> room, rooms_->Take(call.peer, bytes));
  std::shared_ptr<const Fields> held(new Fields(args),
                                     [room](const Fields* fields) { delete fields; });
  const MutexLock lock(&mutex_);
  awaited_.emplace(call, std::move(held));
  return absl::OkStatus();
}

bool StoreServer::Service::ReadArgs(Request& request) {
  const MutexLock lock(&mutex_);
  const auto found = awaited_.find(request.call);
  if (found == awaited_.end()) return false;
  request.args = found->second;
  return true;
}

absl::Status StoreServer::Service::ReadKeys(Request& request) {
  if (!request.args->Has("keys")) return absl::OkStatus();
  KVFERRY_ASSIGN_OR_RETURN(const std::string_view packed, request.args->Bytes("keys"));
  KVFERRY_ASSIGN_OR_RETURN(request.keys, UnpackKeys(packed));
  return absl::OkStatus();
}

void StoreServer::Service::Post(TaskThread& thread, const CallKey& call,
                                std::function<void()> task) {
  const absl::Status taken =
      thread.Post(call, [this, call, task = std::move(task)] { Run(call, task); });
  if (!taken.ok()) Reply(call, taken);
}

void StoreServer::Service::Run(const CallKey& call, const std::function<void()>& task) {
  try {
    task();
  } catch (const std::bad_alloc&) {
    Reply(call, absl::ResourceExhaustedError("store: the server found no memory for this call; "
                                             "it may have been carried out in part; try again"));
  }
}

void StoreServer::Service::Begin(const std::string& name, Request request) {
  if (IsOver(request) || !ReadArgs(request)) return;
  const Function function = Find(name);
  if (function == nullptr) {
    return Reply(request.call,
                 absl::UnimplementedError(absl::StrCat("store: no function '", name, "'")));
  }
  if (const absl::Status read = ReadKeys(request); !read.ok()) return Reply(request.call, read);
  if (options_.tiered == nullptr || IsInMemory(name, request)) return Serve(function, request);
  request = {request.call, request.deadline, request.answer_by};
  Post(IsQuestion(name) ? questions_ : tasks_, request.call, [this, function, request]() mutable {
    if (ReadArgs(request) && ReadKeys(request).ok()) Serve(function, request);  // As it was before.
  });
}

bool StoreServer::Service::IsInMemory(const std::string& name, const Request& request) const {
  if (name != store_call::kExists && name != store_call::kExistsEach && name != store_call::kGet &&
      name != store_call::kGetPages) {
    return false;
  }
  const absl::StatusOr<int64_t> count =
      options_.host->Exists(Views(request.keys), request.deadline);
  return count.ok() && *count == std::ssize(request.keys);
}

void StoreServer::Service::Serve(Function function, const Request& request) {
  if (IsOver(request)) return;
  Result result = (this->*function)(request);
  if (!result.ok()) {
    Reply(request.call, result.status());
  } else if (result->has_value()) {
    Reply(request.call, **std::move(result));
  }
}

absl::StatusOr<std::string_view> StoreServer::Service::OneKey(const Request& request) const {
  if (request.keys.size() == 1) return request.keys[0];
  return absl::InvalidArgumentError(
      absl::StrCat("store: ", request.keys.size(), " keys for a function of one"));
}

absl::Status StoreServer::Service::CheckEra(const Request& request) {
  const uint64_t client = request.args->Uint("client").value_or(0);
  if (client == 0) return absl::OkStatus();  // It does not say.
  const uint64_t era = request.args->Uint("era").value_or(0);
  if (era > 0) eras_.Add(client, era);
  uint64_t* const latest = eras_.Find(client);
  if (latest == nullptr || era == *latest) return absl::OkStatus();
  if (era < *latest) return absl::AbortedError("store: the client has given this call up");
  *latest = era;
  return absl::OkStatus();
}

StoreServer::Service::Result StoreServer::Service::Exists(const Request& request) {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t count,
                           store_->Exists(Views(request.keys), StoreDeadline(request)));
  return Fields().Set("count", static_cast<uint64_t>(count));
}

StoreServer::Service::Result StoreServer::Service::ExistsEach(const Request& request) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<bool> there,
                           store_->ExistsEach(Views(request.keys), StoreDeadline(request)));
  return Fields().Set("there", std::string(there.begin(), there.end()));
}

template <auto kChange>
StoreServer::Service::Result StoreServer::Service::Change(const Request& request) {
  KVFERRY_ASSIGN_OR_RETURN(const std::string_view key, OneKey(request));
  KVFERRY_RETURN_IF_ERROR(CheckEra(request));
  KVFERRY_RETURN_IF_ERROR(((*store_).*kChange)(key, StoreDeadline(request)));
  return Fields();
}

StoreServer::Service::Result StoreServer::Service::Stats(const Request& /*request*/) {
  const KvStore::Stats stats = store_->stats();
  Fields fields;
  for (const auto& [name, field] : kStatsFields) {
    if (stats.*field >= 0) fields.Set(name, static_cast<uint64_t>(stats.*field));
  }
  return fields.Set("max_value_bytes", static_cast<uint64_t>(MaxStagedValueBytes()));
}

// ---------------------------------------------------------------- leases and fetches

absl::StatusOr<std::shared_ptr<void>> StoreServer::Service::TakeRoom(const PeerKey& peer,
                                                                     int64_t bytes) {
  // Its share: whoever sends much, or does not come for what it asks for, leaves some to others.
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<void> share, value_rooms_->Take(peer, bytes));
  const auto give_back = [staged = staged_bytes_, share, bytes](void*) { *staged -= bytes; };
  if (staged_bytes_->fetch_add(bytes) + bytes > kMaxStagedBytes) {
    give_back(nullptr);
    return absl::ResourceExhaustedError(absl::StrCat("store: a value of ", bytes,
                                                     " bytes beside others on their way, limit ",
                                                     kMaxStagedBytes, "; try again"));
  }
  return std::shared_ptr<void>(nullptr, give_back);  // Which is called if this throws, too.
}

absl::StatusOr<uint64_t> StoreServer::Service::Lease(const Request& request, PageRuns pages,
                                                     std::shared_ptr<const Bytes> tail,
                                                     const std::shared_ptr<void>& held) {
  if (IsOver(request)) return TooLate();  // Nobody would come for it.
  const uint64_t id = RandomId();
  // Who has not come by the call's deadline has given up, or never got the reply: pages that were
  // held for longer would be missed by others. Nor do they stay for one whose session has ended.
  const Deadline expiry = std::min(DeadlineInMs(kReplyLeaseMs), request.deadline);
  {
    const MutexLock lock(&mutex_);
    held_.emplace(id, held);
  }
  absl::Cleanup let_go = [this, id] {
    const MutexLock lock(&mutex_);
    held_.erase(id);
  };
  KVFERRY_RETURN_IF_ERROR(leases_.Publish(id, std::move(pages),
                                          options_.host->pool()->layout().num_layers, expiry,
                                          std::move(tail), request.deadline));
  std::move(let_go).Cancel();    // The lease's end does it.
  node_.get().LeaseChanged(id);  // It may be the next to expire.
  return id;
}

void StoreServer::Service::Settle() {
  for (const EndedLease& lease : leases_.TakeEnded()) {
    decltype(held_)::node_type ended;  // Destroyed outside of the lock.
    const MutexLock lock(&mutex_);
    ended = held_.extract(lease.lease_id);
  }
}

absl::Status StoreServer::Service::FetchFromCaller(const Request& request, PageRuns positions,
                                                   PageRuns pages, StreamTail tail,
                                                   std::function<void(const absl::Status&)> then) {
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, request.args->Uint("lease"));
  Node::FetchRequest fetch;
  fetch.ticket.lease_id = lease_id;
  fetch.ticket.num_pages = static_cast<int64_t>(request.keys.size());
  fetch.positions = std::move(positions);
  fetch.pages = std::move(pages);
  fetch.deadline = request.deadline;
  fetch.peer = request.call.peer;
  fetch.tail = std::move(tail);
  // This is the task thread, and so is what follows: the handle is set by then.
  auto handle = std::make_shared<std::shared_ptr<FetchHandle>>();
  fetch.on_done = [this, call = request.call, handle, then = std::move(then)] {
    // Refused only when the server closes: then the caller's deadline ends it.
    tasks_
        .Post(call, [this, call, handle,
                     then] { Run(call, [&] { then(OfTransfer((*handle)->status())); }); })
        .IgnoreError();
  };
  KVFERRY_ASSIGN_OR_RETURN(*handle, node_.get().Fetch(std::move(fetch)));
  return absl::OkStatus();
}

// ---------------------------------------------------------------- values as bytes

// What is in memory is read only if there is room for it. The length of a value below is known when
// it has been read: by the task thread one at a time, and one more where the thread that answers
// what is in memory has come for what was evicted meanwhile.
absl::StatusOr<std::shared_ptr<const Bytes>> StoreServer::Service::ReadValue(const Request& request,
                                                                             std::string_view key) {
  Bytes value;
  std::shared_ptr<void> room;
  const absl::StatusOr<HostStore::ReadLease> here = options_.host->Acquire(key);
  if (here.ok()) {
    KVFERRY_RETURN_IF_ERROR(CheckMayBeStaged(here->bytes()));
    KVFERRY_ASSIGN_OR_RETURN(room, TakeRoom(request.call.peer, here->bytes()));
    value.resize(static_cast<size_t>(here->bytes()));
    const std::span<std::byte> out = value;
    KVFERRY_RETURN_IF_ERROR(here->CopyTo({&out, 1}));
    if (options_.tiered != nullptr) options_.tiered->CountHitAbove();
  } else {
    if (options_.tiered == nullptr) return here.status();
    KVFERRY_ASSIGN_OR_RETURN(value, options_.tiered->GetBytes(key, StoreDeadline(request)));
    KVFERRY_RETURN_IF_ERROR(CheckMayBeStaged(std::ssize(value)));
    KVFERRY_ASSIGN_OR_RETURN(room, TakeRoom(request.call.peer, std::ssize(value)));
  }
  return std::shared_ptr<const Bytes>(new Bytes(std::move(value)),
                                      [room](const Bytes* staged) { delete staged; });
}

StoreServer::Service::Result StoreServer::Service::Get(const Request& request) {
  KVFERRY_ASSIGN_OR_RETURN(const std::string_view key, OneKey(request));
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<const Bytes> value, ReadValue(request, key));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, Lease(request, PageRuns(), value, nullptr));
  return Fields()
      .Set("lease", lease_id)
      .Set("bytes", static_cast<uint64_t>(value->size()))
      .Set("epoch", node_.get().epoch());
}

StoreServer::Service::Result StoreServer::Service::Put(const Request& request) {
  KVFERRY_RETURN_IF_ERROR(OneKey(request));
  KVFERRY_RETURN_IF_ERROR(CheckEra(request));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t bytes, request.args->Uint("bytes", INT64_MAX));
  KVFERRY_RETURN_IF_ERROR(CheckValueBytes(static_cast<int64_t>(bytes), MaxStagedValueBytes()));
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<void> room,
                           TakeRoom(request.call.peer, static_cast<int64_t>(bytes)));
  // That it is so many is the client's word: none is touched before it comes.
  const std::shared_ptr<std::byte> memory(new std::byte[bytes],
                                          [room](const std::byte* staged) { delete[] staged; });
  const auto store = [this, memory, bytes, request](const absl::Status& fetched) {
    if (IsOver(request)) return;
    absl::Status status = fetched;
    status.Update(CheckEra(request));
    const std::span<const std::byte> value(memory.get(), bytes);
    if (status.ok()) status = store_->Put(request.keys[0], {&value, 1}, StoreDeadline(request));
    Reply(request.call,
          status.ok() ? absl::StatusOr<Fields>(Fields()) : absl::StatusOr<Fields>(status));
  };
  KVFERRY_RETURN_IF_ERROR(FetchFromCaller(
      request, PageRuns(), PageRuns(), {memory.get(), static_cast<int64_t>(bytes), memory}, store));
  return std::nullopt;
}

// ---------------------------------------------------------------- values as pages

absl::Status StoreServer::Service::CheckIsPage(int64_t bytes) const {
  const int64_t page_bytes = options_.host->pool()->layout().page_bytes();
  if (bytes == page_bytes) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("store: a value of ", bytes, " bytes is no page of ", page_bytes));
}

absl::StatusOr<HostStore::ReadLease> StoreServer::Service::BringUp(const std::string& key,
                                                                   Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const Bytes below, store_->GetBytes(key, deadline));
  KVFERRY_RETURN_IF_ERROR(CheckIsPage(std::ssize(below)));
  // Somebody may have replaced it since.
  absl::StatusOr<HostStore::ReadLease> value = AcquirePage(key);
  if (absl::IsNotFound(value.status())) return NoRoomAbove();
  return value;
}

absl::StatusOr<HostStore::ReadLease> StoreServer::Service::AcquirePage(const std::string& key) {
  KVFERRY_ASSIGN_OR_RETURN(HostStore::ReadLease value, options_.host->Acquire(key));
  KVFERRY_RETURN_IF_ERROR(CheckIsPage(value.bytes()));
  return value;
}

absl::StatusOr<HostStore::ReadLease> StoreServer::Service::Acquire(const std::string& key,
                                                                   bool has_room,
                                                                   Deadline deadline) {
  absl::StatusOr<HostStore::ReadLease> value = AcquirePage(key);
  if (absl::IsNotFound(value.status()) && options_.tiered != nullptr) {
    return has_room ? BringUp(key, deadline) : NoRoomAbove();
  }
  KVFERRY_RETURN_IF_ERROR(value.status());
  if (options_.tiered != nullptr) options_.tiered->CountHitAbove();
  return value;
}

StoreServer::Service::Result StoreServer::Service::GetPages(const Request& request) {
  // Let go of last to first, so that the first is the one that was used last.
  const std::shared_ptr<std::vector<HostStore::ReadLease>> held(
      new std::vector<HostStore::ReadLease>, [](auto* leases) {
        while (!leases->empty()) leases->pop_back();
        delete leases;
      });
  std::vector<absl::Status> statuses;
  std::vector<int64_t> pages;
  bool has_room = true;
  for (const std::string& key : request.keys) {
    if (IsOver(request)) return TooLate();
    // Without room the tier below would be read for nothing.
    absl::StatusOr<HostStore::ReadLease> value = Acquire(key, has_room, StoreDeadline(request));
    has_room &= !absl::IsResourceExhausted(value.status());
    statuses.push_back(value.status());
    if (!value.ok()) continue;
    pages.push_back(value->pages().PageAt(0));  // Its only one.
    held->push_back(*std::move(value));
  }
  Fields reply;
  reply.Set("codes", PackCodes(statuses));
  if (held->empty()) return reply;
  if (!has_room) reply.Set("again", 1);
  KVFERRY_ASSIGN_OR_RETURN(PageRuns runs, PageRuns::FromPages(pages));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, Lease(request, std::move(runs), nullptr, held));
  return reply.Set("lease", lease_id).Set("epoch", node_.get().epoch());
}

struct StoreServer::Service::Incoming {
  std::vector<absl::Status> statuses;  // One a key.
  std::vector<size_t> keys;            // Which key each reservation is for.
  std::vector<HostStore::Reservation> reservations;
  std::vector<int64_t> pages;

  Fields Reply(bool again) const {
    Fields reply;
    reply.Set("codes", PackCodes(statuses));
    return again ? reply.Set("again", 1) : reply;
  }
};

StoreServer::Service::Result StoreServer::Service::PutPages(const Request& request) {
  KVFERRY_RETURN_IF_ERROR(CheckEra(request));
  auto incoming = std::make_shared<Incoming>();
  std::vector<int64_t> positions;
  const std::vector<std::string_view> keys = Views(request.keys);
  const std::vector<int64_t> bytes(keys.size(), options_.host->pool()->layout().page_bytes());
  std::vector<absl::StatusOr<HostStore::Reservation>> rooms = options_.host->ReserveEach(bytes);
  const auto full = std::ranges::find_if(rooms, [](const auto& room) { return !room.ok(); });
  const auto fit = static_cast<size_t>(full - rooms.begin());
  incoming->statuses.resize(keys.size(), full == rooms.end() ? absl::OkStatus() : full->status());
  // With a tier below the others come in later rounds. The first come last, so that they stay where
  // that has no room for all either; but of two values of one key the later one stays.
  const bool last_first = options_.tiered != nullptr && CountDistinct(keys) == keys.size();
  const size_t first = last_first ? keys.size() - fit : 0;
  for (size_t i = first; i < first + fit; ++i) {
    HostStore::Reservation room = *std::move(rooms[i - first]);
    incoming->statuses[i] = absl::OkStatus();
    positions.push_back(static_cast<int64_t>(i));
    incoming->keys.push_back(i);
    incoming->pages.push_back(room.pages().PageAt(0));
    incoming->reservations.push_back(std::move(room));
  }
  if (positions.empty()) return incoming->Reply(/*again=*/false);
  KVFERRY_ASSIGN_OR_RETURN(PageRuns at, PageRuns::FromPages(positions));
  KVFERRY_ASSIGN_OR_RETURN(PageRuns pages, PageRuns::FromPages(incoming->pages));
  KVFERRY_RETURN_IF_ERROR(FetchFromCaller(request, std::move(at), std::move(pages), {},
                                          [this, incoming, request](const absl::Status& status) {
                                            FinishPutPages(*incoming, request, status);
                                          }));
  return std::nullopt;
}

// The tier below takes pages while they are still reserved: once committed they may be evicted.
std::optional<std::vector<absl::Status>> StoreServer::Service::PutTiered(
    Incoming& incoming, const Request& request, std::span<const std::string_view> keys,
    const std::function<absl::Status(size_t)>& show) {
  const KvPool& pool = *options_.host->pool();
  const auto most =
      static_cast<size_t>(std::max<int64_t>(1, kPutTogetherBytes / pool.layout().page_bytes()));
  const bool last_first = CountDistinct(keys) == keys.size();  // As in PutPages.
  bool is_over = false;
  const auto put = [&](size_t first, size_t count) {
    is_over = is_over || IsOver(request);
    if (is_over) return std::vector<absl::Status>(count, TooLate());
    return options_.tiered->PutShown(
        keys.subspan(first, count), pool, std::span(incoming.pages).subspan(first, count),
        [&](size_t i) { return show(first + i); }, StoreDeadline(request));
  };
  std::vector<absl::Status> statuses = InPieces(keys.size(), most, last_first, put);
  if (is_over) return std::nullopt;
  return statuses;
}

void StoreServer::Service::FinishPutPages(Incoming& incoming, const Request& request,
                                          const absl::Status& fetched) {
  if (IsOver(request)) return;
  absl::Status may_put = fetched;
  may_put.Update(CheckEra(request));
  if (!may_put.ok()) return Reply(request.call, may_put);
  std::vector<std::string_view> keys;
  for (const size_t key : incoming.keys) keys.push_back(request.keys[key]);
  const auto show = [&](size_t i) {
    return options_.host->Commit(std::move(incoming.reservations[i]), keys[i]);
  };
  std::vector<absl::Status> put;
  if (options_.tiered != nullptr) {
    std::optional<std::vector<absl::Status>> done = PutTiered(incoming, request, keys, show);
    if (!done) return;
    put = *std::move(done);
  } else {
    for (size_t i = 0; i < keys.size(); ++i) put.push_back(show(i));
  }
  // Used last to first: of one batch the first is kept longest.
  options_.host->ExistsEach(keys, request.answer_by).IgnoreError();
  for (size_t i = 0; i < keys.size(); ++i) incoming.statuses[incoming.keys[i]] = std::move(put[i]);
  // What found no room beside these finds it in their place, as they are below too. Without a tier
  // below, the last pages would drive out the first.
  const bool again = options_.tiered != nullptr && keys.size() < request.keys.size();
  Reply(request.call, incoming.Reply(again));
}

// ---------------------------------------------------------------- the server

absl::StatusOr<std::unique_ptr<StoreServer>> StoreServer::Create(Options options) {
  if (options.host == nullptr) return absl::InvalidArgumentError("store server: no host store");
  if (options.tiered != nullptr && options.tiered->upper() != options.host.get()) {
    return absl::InvalidArgumentError("store server: the host store is not the tiered one's upper");
  }
  auto service = std::make_shared<Service>(std::move(options));
  KVFERRY_RETURN_IF_ERROR(service->Start());
  return std::unique_ptr<StoreServer>(new StoreServer(std::move(service)));
}

const std::string& StoreServer::address() const { return service_->node().listen_address(); }

std::vector<std::pair<std::string, int64_t>> StoreServer::Metrics() const {
  return service_->node().Metrics();
}

}  // namespace kvferry
