#include "connector/receive_table.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/random.h"
#include "base/status.h"
#include "pool/page_runs.h"

namespace kvferry {
namespace {

std::string Name(uint64_t receive_id) { return absl::StrCat("receive ", absl::Hex(receive_id)); }

// Whether some number of tokens makes so many pages of either size.
bool HoldAsMuch(int64_t pages, int64_t page_size, int64_t other_pages, int64_t other_page_size) {
  const int64_t before_last =
      std::max((pages - 1) * page_size, (other_pages - 1) * other_page_size);
  return before_last < std::min(pages * page_size, other_pages * other_page_size);
}

}  // namespace

absl::StatusOr<ReceiveTable::Added> ReceiveTable::Add(Node::FetchRequest fetch, int64_t num_pages,
                                                      int64_t num_tokens) {
  const uint64_t receive_id = RandomId();
  fetch.await_id = receive_id;
  fetch.on_done = [this, receive_id] { OnEnded(receive_id); };
  // Held until the handle is known: the fetch may end at once.
  const MutexLock lock(&mutex_);
  // Before the fetch, which nobody could end that is not among these.
  Receive& receive = receives_[receive_id] = {num_pages, num_tokens, nullptr, std::nullopt};
  absl::Cleanup remove = [&]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { receives_.erase(receive_id); };
  KVFERRY_ASSIGN_OR_RETURN(receive.handle, node().Fetch(std::move(fetch)));
  std::move(remove).Cancel();
  return Added{receive_id, receive.handle};
}

int64_t ReceiveTable::num_waiting() const {
  const MutexLock lock(&mutex_);
  return static_cast<int64_t>(receives_.size() - pushes_.size());
}

void ReceiveTable::OnCall(const CallKey& call, const std::string& function, const Fields& args,
                          Deadline /*deadline*/) {
  const absl::Status status =
      function == push_call::kPush
          ? Push(call, args)
          : absl::UnimplementedError(absl::StrCat("no function '", absl::CEscape(function),
                                                  "'; this is a decode endpoint"));
  if (!status.ok()) node().Reply(call, status);
}

absl::Status ReceiveTable::Push(const CallKey& call, const Fields& args) {
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t receive_id, args.Uint(push_call::kReceive));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t lease_id, args.Uint(push_call::kLease));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t num_pages,
                           args.Uint(push_call::kPages, PageRuns::kMaxPages));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t num_tokens,
                           args.Uint(push_call::kTokens, PageRuns::kMaxPages));
  Pushed pushed{static_cast<int64_t>(num_pages), static_cast<int64_t>(num_tokens), page_size_};
  if (args.Has(push_call::kPage)) {
    KVFERRY_ASSIGN_OR_RETURN(const uint64_t page,
                             args.Uint(push_call::kPage, KvLayout::kMaxPageSize));
    if (page == 0) return absl::InvalidArgumentError("push: the page is of 0 tokens");
    pushed.page_size = static_cast<int64_t>(page);
  }
  if (lease_id == 0) return absl::InvalidArgumentError("push: the lease is 0");
  const MutexLock lock(&mutex_);
  // One that was cancelled is answered only when its fetch has ended.
  if (pushes_.contains(call)) {
    return absl::AlreadyExistsError("push: the call's id is in use by one that has not ended yet");
  }
  KVFERRY_RETURN_IF_ERROR(CheckPush(receive_id, pushed));
  receives_.find(receive_id)->second.push = call;
  pushes_.emplace(call, receive_id);
  node().StartAwaited(receive_id, call.peer, lease_id);
  return absl::OkStatus();
}

// Of the same request: as many tokens, as far as both say, and pages that some number of tokens
// fills.
absl::Status ReceiveTable::CheckCounts(const Receive& receive, const Pushed& pushed) const {
  const bool both_say = receive.num_tokens != 0 && pushed.num_tokens != 0;
  if (both_say && pushed.num_tokens != receive.num_tokens) {
    return absl::FailedPreconditionError(
        absl::StrCat("is of ", receive.num_tokens, " tokens, the push of ", pushed.num_tokens));
  }
  const bool same_size = pushed.page_size == page_size_;
  if (same_size ? pushed.num_pages == receive.num_pages
                : HoldAsMuch(receive.num_pages, page_size_, pushed.num_pages, pushed.page_size)) {
    return absl::OkStatus();
  }
  const auto of_size = [&](int64_t page_size) {
    return same_size ? "" : absl::StrCat(" (", page_size, " tokens each)");
  };
  return absl::FailedPreconditionError(absl::StrCat("is of ", receive.num_pages, " pages",
                                                    of_size(page_size_), ", the push of ",
                                                    pushed.num_pages, of_size(pushed.page_size)));
}

absl::Status ReceiveTable::CheckPush(uint64_t receive_id, const Pushed& pushed) const {
  const auto found = receives_.find(receive_id);
  if (found == receives_.end()) {
    const absl::StatusCode* const ended = ended_.Find(receive_id);
    if (ended == nullptr) {
      return absl::NotFoundError(
          absl::StrCat(Name(receive_id), " is unknown here; was the ticket made by this process?"));
    }
    return absl::FailedPreconditionError(
        absl::StrCat(Name(receive_id), " has already ended: ", absl::StatusCodeToString(*ended)));
  }
  const Receive& receive = found->second;
  if (receive.push) {
    return absl::FailedPreconditionError(
        absl::StrCat(Name(receive_id), " is being pushed to already"));
  }
  const absl::Status counts = CheckCounts(receive, pushed);
  return counts.ok()
             ? counts
             : absl::Status(counts.code(), absl::StrCat(Name(receive_id), " ", counts.message()));
}

void ReceiveTable::OnCallDropped(const CallKey& call) {
  const MutexLock lock(&mutex_);
  const auto found = pushes_.find(call);
  if (found == pushes_.end()) return;
  // The rest follows when the handle is done.
  node().EndAwaited(found->second,
                    absl::AbortedError("the prefill side gave the push up: it was taken back, or "
                                       "its deadline has passed"));
}

void ReceiveTable::OnEnded(uint64_t receive_id) {
  const MutexLock lock(&mutex_);
  const auto ended = receives_.extract(receive_id);
  if (ended.empty()) return;  // There was no memory to add it.
  const Receive& receive = ended.mapped();
  const absl::Status status = receive.handle->status();
  ended_.Add(receive_id, status.code());
  if (!receive.push) return;
  pushes_.erase(*receive.push);
  node().Reply(*receive.push, status.ok() ? absl::StatusOr<Fields>(Fields()) : status);
}

}  // namespace kvferry
