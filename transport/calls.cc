#include "transport/calls.h"

#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace kvferry {
namespace {

// A payload of errors, and what it is.
constexpr char kCutOff[] = "kvferry/cut_off";
constexpr char kNotAsked[] = "not asked";
constexpr char kAsked[] = "asked";

}  // namespace

CutOff CutOffOf(const absl::Status& error) {
  const auto payload = error.GetPayload(kCutOff);
  if (!payload.has_value()) return CutOff::kNo;
  return *payload == kAsked ? CutOff::kAsked : CutOff::kNotAsked;
}

absl::Status WithCutOff(absl::Status error, CutOff cut_off) {
  if (cut_off == CutOff::kNo) {
    error.ErasePayload(kCutOff);
  } else {
    error.SetPayload(kCutOff, absl::Cord(cut_off == CutOff::kAsked ? kAsked : kNotAsked));
  }
  return error;
}

// ---------------------------------------------------------------- asking

void Calls::Add(uint64_t id, Call&& call) {
  call_deadlines_.emplace(call.deadline, id);
  if (call.turn == 0) {
    call.turn = unasked_.NextTurn();
    ++metrics_->calls_started;
  }
  unasked_.Add(call.peer, call.turn, id);
  calls_.emplace(id, std::move(call));
}

template <typename Matches>
std::vector<uint64_t> Calls::IdsWhere(const Matches& matches) const {
  std::vector<uint64_t> ids;
  for (const auto& [id, call] : calls_) {
    if (matches(call)) ids.push_back(id);
  }
  return ids;
}

void Calls::OnPeerReady(const PeerKey& peer) {
  for (uint64_t id; (id = unasked_.First(peer)) != 0 && outbox_->HasRoom(peer);) {
    Ask(id, calls_.find(id)->second);
  }
}

void Calls::Ask(uint64_t id, Call& call) {
  call.asked = true;
  unasked_.Remove(call.peer, call.turn);
  const int64_t timeout_ms = std::max<int64_t>(1, MsUntil(call.deadline, Clock::now()));
  outbox_->Send(call.peer, CallMsg{id, call.function, timeout_ms, std::move(call.args)});
}

std::vector<std::pair<uint64_t, Calls::Call>> Calls::TakeUnasked(const PeerKey& peer,
                                                                 Deadline since) {
  std::vector<std::pair<uint64_t, Call>> taken;
  for (const uint64_t id :
       IdsWhere([&](const Call& c) { return c.peer == peer && !c.asked && c.created > since; })) {
    Call call = std::move(calls_.extract(id).mapped());
    call_deadlines_.erase({call.deadline, id});
    unasked_.Remove(peer, call.turn);
    taken.emplace_back(id, std::move(call));
  }
  std::sort(taken.begin(), taken.end(),
            [](const auto& one, const auto& other) { return one.second.turn < other.second.turn; });
  return taken;
}

void Calls::End(uint64_t id, absl::StatusOr<Fields> reply) {
  auto call = calls_.extract(id);
  if (call.empty()) return;  // Another one's on_reply has ended it.
  call_deadlines_.erase({call.mapped().deadline, id});
  if (!call.mapped().asked) unasked_.Remove(call.mapped().peer, call.mapped().turn);
  const OnReply on_reply = std::move(call.mapped().on_reply);
  if (!reply.ok()) ++metrics_->calls_failed;
  on_reply(std::move(reply));  // Last: it may add calls.
}

void Calls::OnReplyMsg(const PeerKey& peer, ReplyMsg reply) {
  const auto found = calls_.find(reply.call_id);
  if (found == calls_.end() || found->second.peer != peer) return;
  if (reply.status.ok()) {
    End(reply.call_id, std::move(reply.result));
  } else {
    End(reply.call_id, reply.status);
  }
}

void Calls::Cancel(uint64_t id, const absl::Status& status) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) return;
  if (found->second.asked) {
    outbox_->Send(found->second.peer, CancelMsg{id, std::string(status.message())});
  }
  End(id, status);
}

void Calls::CancelAll(const absl::Status& status) {
  for (const uint64_t id : IdsWhere([](const Call&) { return true; })) Cancel(id, status);
}

// ---------------------------------------------------------------- serving

absl::Status Calls::CheckCall(const CallKey& key, bool may_wait) const {
  if (handler_ == nullptr) {
    return absl::UnimplementedError("this endpoint serves no calls");
  }
  if (served_.contains(key)) return absl::AlreadyExistsError("the call's id is in use");
  const auto count = waiting_of_peer_.find(key.peer);
  if (!may_wait || count == waiting_of_peer_.end() || count->second < config_.max_calls_per_peer) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "max_calls_per_peer (", config_.max_calls_per_peer, ") are under way; wait for one to end"));
}

void Calls::OnCallMsg(const PeerKey& peer, const CallMsg& call) {
  const CallKey key{peer, call.call_id};
  const bool may_wait = handler_ == nullptr || handler_->MayWait(call.function);
  if (const absl::Status status = CheckCall(key, may_wait); !status.ok()) {
    outbox_->Send(peer, ReplyMsg{call.call_id, status, {}});
    return;
  }
  const Deadline deadline = DeadlineInMs(std::min(call.timeout_ms, config_.max_fetch_timeout_ms));
  const bool is_cut = call.timeout_ms > config_.max_fetch_timeout_ms;
  served_.emplace(key, Served{deadline, may_wait, is_cut});
  served_deadlines_.emplace(deadline, key);
  if (may_wait) ++waiting_of_peer_[peer];
  ++metrics_->calls_served;
  handler_->OnCall(key, call.function, call.args, deadline);
}

bool Calls::StopServing(const CallKey& key) {
  const auto found = served_.find(key);
  if (found == served_.end()) return false;
  const Served served = found->second;
  served_deadlines_.erase({served.deadline, key});
  served_.erase(found);
  if (served.may_wait && --waiting_of_peer_[key.peer] == 0) waiting_of_peer_.erase(key.peer);
  return true;
}

void Calls::Reply(const CallKey& call, const absl::StatusOr<Fields>& reply) {
  if (!StopServing(call)) return;
  absl::Status status = reply.status();
  if (status.ok()) status = reply->Check();
  outbox_->Send(call.peer, ReplyMsg{call.id, status, status.ok() ? *reply : Fields()});
}

void Calls::Drop(const CallKey& key) {
  if (StopServing(key)) handler_->OnCallDropped(key);
}

void Calls::OnCancelMsg(const PeerKey& peer, uint64_t id) { Drop({peer, id}); }

// ---------------------------------------------------------------- both

void Calls::OnPeerGone(const PeerKey& peer, const absl::Status& status) {
  for (const uint64_t id : IdsWhere([&](const Call& c) { return c.peer == peer; })) {
    const auto call = calls_.find(id);
    if (call == calls_.end()) continue;  // Another one's on_reply has ended it.
    End(id, WithCutOff(status, call->second.asked ? CutOff::kAsked : CutOff::kNotAsked));
  }
  std::vector<CallKey> gone;
  for (auto it = served_.lower_bound({peer, 0}); it != served_.end() && it->first.peer == peer;
       ++it) {
    gone.push_back(it->first);
  }
  for (const CallKey& key : gone) Drop(key);
}

absl::Status Calls::OverLimit() const {
  return absl::DeadlineExceededError(
      absl::StrCat("the call was given up after this side's max_fetch_timeout_ms (",
                   config_.max_fetch_timeout_ms, ")"));
}

absl::Status Calls::Overdue(const Call& call) const {
  const std::string began = absl::StrCat("no answer to '", call.function, "' in time");
  if (call.asked) return absl::DeadlineExceededError(began);
  const std::string unreachable = outbox_->WhyUnreachable(call.peer);
  return WithCutOff(
      absl::DeadlineExceededError(absl::StrCat(
          began, ": ",
          unreachable.empty() ? "the peer never answered, or took no more" : unreachable)),
      CutOff::kNotAsked);
}

Deadline Calls::Tick(Deadline now) {
  while (!call_deadlines_.empty() && call_deadlines_.begin()->first <= now) {
    const uint64_t id = call_deadlines_.begin()->second;
    Cancel(id, Overdue(calls_.find(id)->second));
  }
  while (!served_deadlines_.empty() && served_deadlines_.begin()->first <= now) {
    const CallKey key = served_deadlines_.begin()->second;
    // Its caller waits on: else it has the same deadline.
    if (served_.at(key).is_cut) {
      outbox_->Send(key.peer, ReplyMsg{key.id, OverLimit(), {}});
    }
    Drop(key);
  }
  Deadline next = handler_ == nullptr ? Deadline::max() : handler_->Tick(now);
  if (!call_deadlines_.empty()) next = std::min(next, call_deadlines_.begin()->first);
  if (!served_deadlines_.empty()) next = std::min(next, served_deadlines_.begin()->first);
  return next;
}

}  // namespace kvferry
