#include "connector/store/remote_store.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/random.h"
#include "base/status.h"
#include "connector/store/store_wire.h"

namespace kvferry {
namespace {

// Pages of one call: more go in several.
constexpr size_t kMaxPagesPerCall = 4096;
// A lease of ours outlives the call that names it by so much; it is taken back long before.
constexpr int64_t kLeaseSlackMs = 10000;
constexpr int64_t kAbortTimeoutMs = 1000;
constexpr int64_t kStatsTimeoutMs = 1000;
constexpr int64_t kWaitMs =
    60000;  // Waits are for a notice; this is how often one looks for itself.

// Where one thread waits for an answer that another brings.
class Answer {
 public:
  void Set(absl::StatusOr<Fields> reply) {
    const MutexLock lock(&mutex_);
    reply_ = std::move(reply);
    changed_.NotifyAll();
  }
  // The node answers every call, at its deadline at the latest.
  absl::StatusOr<Fields> Wait() {
    const MutexLock lock(&mutex_);
    while (!reply_) changed_.WaitUntil(&mutex_, DeadlineInMs(kWaitMs));
    return *std::move(reply_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::optional<absl::StatusOr<Fields>> reply_ ABSL_GUARDED_BY(mutex_);
};

template <typename DoSome>
std::vector<absl::Status> InPieces(std::span<const std::string_view> keys,
                                   std::span<const int64_t> pages, const DoSome& do_some) {
  std::vector<absl::Status> statuses;
  statuses.reserve(keys.size());
  for (size_t at = 0; at < keys.size(); at += kMaxPagesPerCall) {
    const size_t count = std::min(kMaxPagesPerCall, keys.size() - at);
    const absl::StatusOr<std::vector<absl::Status>> some =
        do_some(keys.subspan(at, count), pages.subspan(at, count));
    if (some.ok()) {
      statuses.insert(statuses.end(), some->begin(), some->end());
    } else {
      statuses.insert(statuses.end(), count, some.status());
    }
  }
  return statuses;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteStore>> RemoteStore::Create(Options options) {
  if (options.pool == nullptr) return absl::InvalidArgumentError("remote store: no pool");
  if (options.max_value_bytes < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "remote store: max_value_bytes is ", options.max_value_bytes, " but must be at least 1"));
  }
  KVFERRY_RETURN_IF_ERROR(CheckHostAllowed(options.address, options.endpoint.config));
  std::unique_ptr<RemoteStore> store(new RemoteStore(std::move(options)));
  Node::Options node;
  node.config = store->options_.endpoint.config;
  node.model = store->options_.endpoint.model;
  node.name = store->options_.endpoint.name;
  node.pool = store->options_.pool;
  node.source = &store->leases_;
  KVFERRY_ASSIGN_OR_RETURN(store->node_, Node::Start(std::move(node)));
  return store;
}

// ---------------------------------------------------------------- asking

absl::StatusOr<Fields> RemoteStore::AskOnce(const std::string& function, const Fields& args,
                                            Deadline deadline) const {
  auto answer = std::make_shared<Answer>();
  KVFERRY_RETURN_IF_ERROR(
      node_
          ->Call({options_.address, function, args, deadline},
                 [answer](absl::StatusOr<Fields> reply) { answer->Set(std::move(reply)); })
          .status());
  return answer->Wait();
}

absl::StatusOr<Fields> RemoteStore::Ask(const std::string& function, const Fields& args,
                                        Deadline deadline) const {
  absl::StatusOr<Fields> reply = AskOnce(function, args, deadline);
  // The session may have been one with a process that is no more. A new one shows.
  if (absl::IsUnavailable(reply.status())) reply = AskOnce(function, args, deadline);
  if (reply.ok()) return reply;
  return absl::Status(reply.status().code(),
                      absl::StrCat("store at ", options_.address, ": ", reply.status().message()));
}

absl::Status RemoteStore::AskOfKey(const std::string& function, std::string_view key,
                                   Deadline deadline) const {
  KVFERRY_ASSIGN_OR_RETURN(std::string packed, PackKeys({&key, 1}));
  return Ask(function, Fields().Set("keys", std::move(packed)), deadline).status();
}

absl::StatusOr<int64_t> RemoteStore::Exists(std::span<const std::string_view> keys,
                                            Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(std::string packed, PackKeys(keys));
  KVFERRY_ASSIGN_OR_RETURN(
      const Fields reply,
      Ask(store_call::kExists, Fields().Set("keys", std::move(packed)), deadline));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t count, reply.Uint("count", keys.size()));
  return static_cast<int64_t>(count);
}

absl::Status RemoteStore::Erase(std::string_view key, Deadline deadline) {
  return AskOfKey(store_call::kErase, key, deadline);
}

absl::Status RemoteStore::Pin(std::string_view key, Deadline deadline) {
  return AskOfKey(store_call::kPin, key, deadline);
}

absl::Status RemoteStore::Unpin(std::string_view key, Deadline deadline) {
  return AskOfKey(store_call::kUnpin, key, deadline);
}

KvStore::Stats RemoteStore::stats() const {
  Stats stats;
  const absl::StatusOr<Fields> reply =
      AskOnce(store_call::kStats, Fields(), DeadlineInMs(kStatsTimeoutMs));
  if (!reply.ok()) {
    ++stats.errors;
    return stats;
  }
  for (const auto& [name, field] :
       {std::pair("entries", &stats.entries), std::pair("bytes", &stats.bytes),
        std::pair("capacity_bytes", &stats.capacity_bytes), std::pair("pinned", &stats.pinned),
        std::pair("puts", &stats.puts), std::pair("hits", &stats.hits),
        std::pair("misses", &stats.misses), std::pair("evictions", &stats.evictions),
        std::pair("errors", &stats.errors)}) {
    const absl::StatusOr<uint64_t> value = reply->Uint(name, INT64_MAX);
    if (value.ok()) *field = static_cast<int64_t>(*value);
  }
  return stats;
}

// ---------------------------------------------------------------- moving

absl::Status RemoteStore::Fetch(const Ticket& ticket, const std::vector<int64_t>& pages,
                                StreamTail tail, Deadline deadline) {
  Node::FetchRequest request;
  request.ticket = ticket;
  const PageRun all{0, ticket.num_pages};
  if (ticket.num_pages > 0) {
    KVFERRY_ASSIGN_OR_RETURN(request.positions, PageRuns::FromRuns({&all, 1}));
  }
  KVFERRY_ASSIGN_OR_RETURN(request.pages, PageRuns::FromPages(pages));
  request.deadline = deadline;
  request.tail = std::move(tail);
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<FetchHandle> handle,
                           node_->Fetch(std::move(request)));
  // It ends at its deadline by itself, and the memory is the transfer's until it has.
  while (!handle->done()) handle->Wait(DeadlineInMs(kAbortTimeoutMs)).IgnoreError();
  return handle->status();
}

void RemoteStore::Decline(const Ticket& ticket) {
  Fetch({ticket.address, ticket.epoch, ticket.lease_id, 0, 0}, {}, {},
        DeadlineInMs(kAbortTimeoutMs))
      .IgnoreError();  // It expires otherwise.
}

absl::Status RemoteStore::Withdraw(uint64_t lease_id) {
  const absl::StatusOr<bool> ended = leases_.Withdraw(lease_id);
  absl::Status status;
  if (ended.ok() && !*ended) {
    status = node_->AbortLease(lease_id, absl::AbortedError("the client took the value back"),
                               Node::Again::kNo, DeadlineInMs(kAbortTimeoutMs));
  }
  leases_.TakeEnded();
  return status;
}

absl::StatusOr<RemoteStore::Offer> RemoteStore::AskForValue(std::string_view key,
                                                            Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(std::string packed, PackKeys({&key, 1}));
  KVFERRY_ASSIGN_OR_RETURN(
      const Fields reply, Ask(store_call::kGet, Fields().Set("keys", std::move(packed)), deadline));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, reply.Uint("lease"));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t epoch, reply.Uint("epoch"));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t bytes, reply.Uint("bytes", INT64_MAX));
  return Offer{{options_.address, epoch, lease_id, 0, 0}, static_cast<int64_t>(bytes)};
}

absl::Status RemoteStore::Get(std::string_view key, Parts out, Deadline deadline) {
  const int64_t wanted = BytesOf(out);
  KVFERRY_ASSIGN_OR_RETURN(const Offer offer, AskForValue(key, deadline));
  if (offer.bytes != wanted) {
    Decline(offer.ticket);
    return absl::FailedPreconditionError(
        absl::StrCat("store: the value has ", offer.bytes, " bytes, the memory for it ", wanted));
  }
  if (out.size() == 1) return Fetch(offer.ticket, {}, {out[0].data(), wanted}, deadline);
  const auto whole = std::make_shared<std::vector<std::byte>>(wanted);
  KVFERRY_RETURN_IF_ERROR(Fetch(offer.ticket, {}, {whole->data(), wanted, whole}, deadline));
  const std::byte* from = whole->data();
  for (const std::span<std::byte> part : out) {
    if (!part.empty()) std::memcpy(part.data(), from, part.size());
    from += part.size();
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::byte>> RemoteStore::GetBytes(std::string_view key,
                                                             Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const Offer offer, AskForValue(key, deadline));
  if (const absl::Status valid = CheckValueBytes(offer.bytes, options_.max_value_bytes);
      !valid.ok()) {
    Decline(offer.ticket);
    return absl::FailedPreconditionError(valid.message());
  }
  std::vector<std::byte> value(offer.bytes);
  KVFERRY_RETURN_IF_ERROR(Fetch(offer.ticket, {}, {value.data(), offer.bytes}, deadline));
  return value;
}

absl::Status RemoteStore::Put(std::string_view key, ConstParts value, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(std::string packed, PackKeys({&key, 1}));
  const int64_t bytes = BytesOf(value);
  KVFERRY_RETURN_IF_ERROR(CheckValueBytes(bytes, options_.max_value_bytes));
  auto whole = std::make_shared<std::vector<std::byte>>();
  whole->reserve(bytes);
  for (const std::span<const std::byte> part : value) {
    whole->insert(whole->end(), part.begin(), part.end());
  }
  const uint64_t lease_id = RandomId();
  KVFERRY_RETURN_IF_ERROR(leases_.Publish(lease_id, PageRuns(), options_.pool->layout().num_layers,
                                          deadline + std::chrono::milliseconds(kLeaseSlackMs),
                                          whole));
  absl::Status status = Ask(store_call::kPut,
                            Fields()
                                .Set("keys", std::move(packed))
                                .Set("lease", lease_id)
                                .Set("bytes", static_cast<uint64_t>(bytes)),
                            deadline)
                            .status();
  Withdraw(lease_id).IgnoreError();  // What is read until then is our own copy.
  return status;
}

absl::StatusOr<std::vector<absl::Status>> RemoteStore::PutSomePages(
    std::span<const std::string_view> keys, std::span<const int64_t> pages, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(std::string packed, PackKeys(keys));
  KVFERRY_ASSIGN_OR_RETURN(PageRuns runs, PageRuns::FromPages(pages));
  const uint64_t lease_id = RandomId();
  KVFERRY_RETURN_IF_ERROR(leases_.Publish(lease_id, std::move(runs),
                                          options_.pool->layout().num_layers,
                                          deadline + std::chrono::milliseconds(kLeaseSlackMs)));
  const absl::StatusOr<Fields> reply =
      Ask(store_call::kPutPages, Fields().Set("keys", std::move(packed)).Set("lease", lease_id),
          deadline);
  // From here on the caller may change the pages.
  KVFERRY_RETURN_IF_ERROR(Withdraw(lease_id));
  KVFERRY_RETURN_IF_ERROR(reply.status());
  KVFERRY_ASSIGN_OR_RETURN(const std::string_view codes, reply->Bytes("codes"));
  return UnpackCodes(codes, keys.size());
}

absl::StatusOr<std::vector<absl::Status>> RemoteStore::GetSomePages(
    std::span<const std::string_view> keys, std::span<const int64_t> pages, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(std::string packed, PackKeys(keys));
  KVFERRY_ASSIGN_OR_RETURN(
      const Fields reply,
      Ask(store_call::kGetPages, Fields().Set("keys", std::move(packed)), deadline));
  KVFERRY_ASSIGN_OR_RETURN(const std::string_view codes, reply.Bytes("codes"));
  KVFERRY_ASSIGN_OR_RETURN(std::vector<absl::Status> statuses, UnpackCodes(codes, keys.size()));
  std::vector<int64_t> into;
  for (size_t i = 0; i < statuses.size(); ++i) {
    if (statuses[i].ok()) into.push_back(pages[i]);
  }
  if (into.empty()) return statuses;
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, reply.Uint("lease"));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t epoch, reply.Uint("epoch"));
  const Ticket ticket{options_.address, epoch, lease_id, static_cast<int64_t>(into.size()), 0};
  if (const absl::Status fetched = Fetch(ticket, into, {}, deadline); !fetched.ok()) {
    for (absl::Status& status : statuses) {
      if (status.ok()) status = fetched;
    }
  }
  return statuses;
}

std::vector<absl::Status> RemoteStore::DoPutPages(std::span<const std::string_view> keys,
                                                  const KvPool& pool,
                                                  std::span<const int64_t> pages,
                                                  Deadline deadline) {
  if (&pool != options_.pool.get()) return KvStore::DoPutPages(keys, pool, pages, deadline);
  return InPieces(keys, pages, [&](auto some_keys, auto some_pages) {
    return PutSomePages(some_keys, some_pages, deadline);
  });
}

std::vector<absl::Status> RemoteStore::DoGetPages(std::span<const std::string_view> keys,
                                                  const KvPool& pool,
                                                  std::span<const int64_t> pages,
                                                  Deadline deadline) {
  if (&pool != options_.pool.get()) return KvStore::DoGetPages(keys, pool, pages, deadline);
  return InPieces(keys, pages, [&](auto some_keys, auto some_pages) {
    return GetSomePages(some_keys, some_pages, deadline);
  });
}

}  // namespace kvferry
