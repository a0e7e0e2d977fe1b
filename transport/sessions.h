#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "base/clock.h"
#include "base/random.h"
#include "transport/control_plane.h"
#include "transport/data_plane.h"
#include "transport/messages.h"

namespace kvferry {

// One peer, from hello to goodbye (docs/wire_protocol.md, "Life of a session").
struct Session {
  enum class State {
    kGreeting,  // We wait for the welcome.
    kLinking,   // The hello or welcome is here, and the link is not open yet.
    kReady,
  };

  State state = State::kGreeting;
  bool dialled = false;  // We sent the hello.
  std::string address;   // Where we dialled; empty for an accepted peer.
  std::string name;      // As the peer calls itself, for logs; an accepted one may have none.
  uint64_t epoch = 0;    // The peer's; 0 while greeting.
  LinkId link = 0;       // 0 while greeting.
  // While linking: how the peer can be reached, less what has failed.
  DataAddresses offered{};
  // What each side calls this session in messages over links.
  uint64_t own_id = RandomId();
  uint64_t peers_id = 0;  // 0: it takes none.
  Deadline last_heard{};
  Deadline next_ping{};
  int64_t most_between_pings_ms = INT64_MAX;  // As the peer needs them.
  int64_t pings = 0;                          // Sent since it was last heard.
  Deadline greeting_until{};
  // The answer to the hello, and after it the link, has been waited for. What began later joined
  // somebody else's wait.
  Deadline tried_since = Clock::now();
  int64_t failed_attempts = 0;  // To connect, while greeting.
  std::string unreachable;      // Why; empty: none has, or a connection has been made since.
  // A call waits for whoever will listen at the address, perhaps later.
  bool awaits_anyone = false;
  bool network_only = false;  // Our hello has offered no shared memory.
  Deadline began = Clock::now();
  // Of sessions to this address before, each begun as the one before it ended.
  int64_t quick_ends = 0;
};

// A peer's name, in a log line or an error.
std::string Called(const std::string& name);

// The sessions of one node. Not thread-safe.
class Sessions {
 public:
  Session& Insert(const PeerKey& peer, Session session);
  void Erase(const PeerKey& peer);
  // Null when there is none.
  Session* Find(const PeerKey& peer);
  // The dialled session with that address and epoch (0: any), else one with that address that is
  // greeting, else an empty key. A ready one of another epoch does not count: the process behind
  // the address may have been replaced.
  PeerKey FindDialled(const std::string& address, uint64_t epoch) const;
  // Another dialled session with the same address as `peer` that has been welcomed, or an empty
  // key.
  PeerKey FindTwin(const PeerKey& peer) const;
  PeerKey FindLink(LinkId link) const;
  // By own_id.
  PeerKey FindOwnId(uint64_t id) const;
  size_t size() const { return sessions_.size(); }
  // Nodes that there are sessions with, but for the one of that epoch.
  int64_t CountOthers(uint64_t epoch) const;
  int64_t CountLinks(absl::FunctionRef<bool(LinkId)> matches) const;

  // What to do about a session at `now`.
  enum class Due { kNothing, kPing, kDead, kGreetingFailed };
  // All sessions with something due, and when to ask again at the latest. A session to be pinged
  // counts as pinged. When this is asked late by more than half of timeout_ms, the process did not
  // run (it was stopped, or its machine was): that time is not counted as the peers' silence.
  std::vector<std::pair<PeerKey, Due>> TakeDue(Deadline now, int64_t interval_ms,
                                               int64_t timeout_ms, Deadline* next);
  std::vector<PeerKey> Keys() const;
  // Whether the process did not run, as TakeDue() tells it, and does so again for less than a
  // second: a connection that ends then may be one that its peer closed because of that.
  bool StoppedLately(Deadline now, int64_t timeout_ms) const;

 private:
  // How long the process did not run until `now`; 0 when that is little.
  Clock::duration Stopped(Deadline now, int64_t timeout_ms) const;

  absl::flat_hash_map<PeerKey, Session> sessions_;
  absl::flat_hash_map<uint64_t, PeerKey> own_ids_;
  Deadline ask_by_ = Deadline::max();  // What the last TakeDue() said.
  Deadline stopped_lately_until_{};
};

}  // namespace kvferry
