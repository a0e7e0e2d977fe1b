#include "transport/sessions.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace kvferry {
namespace {

// How long after a stop the end of a connection may be a consequence of it.
constexpr auto kAfterStop = std::chrono::seconds(1);

}  // namespace

std::string Called(const std::string& name) {
  return name.empty() ? "without a name" : absl::StrCat("'", absl::CEscape(name), "'");
}

Session& Sessions::Insert(const PeerKey& peer, Session session) {
  Erase(peer);
  own_ids_.emplace(session.own_id, peer);
  return sessions_.emplace(peer, std::move(session)).first->second;
}

void Sessions::Erase(const PeerKey& peer) {
  const auto found = sessions_.find(peer);
  if (found == sessions_.end()) return;
  own_ids_.erase(found->second.own_id);
  sessions_.erase(found);
}

Session* Sessions::Find(const PeerKey& peer) {
  const auto found = sessions_.find(peer);
  return found == sessions_.end() ? nullptr : &found->second;
}

PeerKey Sessions::FindDialled(const std::string& address, uint64_t epoch) const {
  PeerKey greeting;
  for (const auto& [peer, session] : sessions_) {
    if (!session.dialled || session.address != address) continue;
    if (session.state == Session::State::kGreeting) {
      greeting = peer;
    } else if (epoch == 0 || session.epoch == epoch) {
      return peer;
    }
  }
  return greeting;
}

PeerKey Sessions::FindTwin(const PeerKey& peer) const {
  const std::string& address = sessions_.find(peer)->second.address;
  for (const auto& [other, session] : sessions_) {
    if (other != peer && session.dialled && session.state != Session::State::kGreeting &&
        session.address == address) {
      return other;
    }
  }
  return "";
}

PeerKey Sessions::FindLink(LinkId link) const {
  for (const auto& [peer, session] : sessions_) {
    if (session.state != Session::State::kGreeting && session.link == link) return peer;
  }
  return "";
}

PeerKey Sessions::FindOwnId(uint64_t id) const {
  const auto found = own_ids_.find(id);
  return found == own_ids_.end() ? "" : found->second;
}

std::vector<PeerKey> Sessions::Keys() const {
  std::vector<PeerKey> keys;
  for (const auto& [peer, session] : sessions_) keys.push_back(peer);
  return keys;
}

Clock::duration Sessions::Stopped(Deadline now, int64_t timeout_ms) const {
  const auto late = now < ask_by_ ? Clock::duration::zero() : now - ask_by_;
  return 2 * late > std::chrono::milliseconds(timeout_ms) ? late : Clock::duration::zero();
}

bool Sessions::StoppedLately(Deadline now, int64_t timeout_ms) const {
  return now < stopped_lately_until_ || Stopped(now, timeout_ms) > Clock::duration::zero();
}

std::vector<std::pair<PeerKey, Sessions::Due>> Sessions::TakeDue(Deadline now, int64_t interval_ms,
                                                                 int64_t timeout_ms,
                                                                 Deadline* next) {
  const auto timeout = std::chrono::milliseconds(timeout_ms);
  std::vector<std::pair<PeerKey, Due>> due;
  const auto stopped = Stopped(now, timeout_ms);
  if (stopped > Clock::duration::zero()) stopped_lately_until_ = now + kAfterStop;
  *next = Deadline::max();
  for (auto& [peer, session] : sessions_) {
    if (stopped > Clock::duration::zero()) {
      session.last_heard = std::min(now, session.last_heard + stopped);
    }
    if (session.state == Session::State::kGreeting) {
      if (session.greeting_until <= now) due.emplace_back(peer, Due::kGreetingFailed);
      *next = std::min(*next, session.greeting_until);
      continue;
    }
    if (session.last_heard + timeout <= now) {
      due.emplace_back(peer, Due::kDead);
      continue;
    }
    *next = std::min(*next, session.last_heard + timeout);
    // The side that dialled pings; the answer tells it, and the ping tells the other.
    if (!session.dialled) continue;
    if (session.next_ping <= now) {
      due.emplace_back(peer, Due::kPing);
      session.next_ping =
          now + std::chrono::milliseconds(std::min(interval_ms, session.most_between_pings_ms));
      ++session.pings;
    }
    *next = std::min(*next, session.next_ping);
  }
  ask_by_ = *next;
  return due;
}

int64_t Sessions::CountOthers(uint64_t epoch) const {
  absl::flat_hash_set<uint64_t> epochs;
  int64_t unknown = 0;
  for (const auto& [peer, session] : sessions_) {
    if (session.epoch == 0) ++unknown;
    if (session.epoch != 0 && session.epoch != epoch) epochs.insert(session.epoch);
  }
  return unknown + static_cast<int64_t>(epochs.size());
}

int64_t Sessions::CountLinks(absl::FunctionRef<bool(LinkId)> matches) const {
  return std::count_if(sessions_.begin(), sessions_.end(),
                       [&](const auto& entry) { return matches(entry.second.link); });
}

}  // namespace kvferry
