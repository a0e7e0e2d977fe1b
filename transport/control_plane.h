#pragma once

// Where control messages come from and go to. The one implementation is ZeroMQ (control/); tests
// wrap it.

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/backlog.h"
#include "transport/messages.h"

namespace kvferry {

// Names one peer of one control plane, for as long as the connection lives.
using PeerKey = std::string;

// Called from inside ControlPlane::Progress().
class ControlEvents {
 public:
  virtual ~ControlEvents() = default;
  virtual void OnMessage(const PeerKey& peer, Message message) = 0;
  // Bytes that are no message: status as DecodeMessage gives it.
  virtual void OnMalformed(const PeerKey& peer, const absl::Status& status) = 0;
  // A connection to a dialled peer that has not said anything yet could not be made, or broke. The
  // next attempt follows by itself, unless somebody listens there and has shown that it is no peer
  // (kStranger): it speaks another protocol, or has another key, or none, or has one where this
  // side has none. Some just hang up on us then (kHungUp), and so does a process that ends.
  enum class Attempt { kUnreachable, kHungUp, kStranger };
  virtual void OnAttemptFailed(const PeerKey& peer, Attempt failed) = 0;
  // A connection to such a peer has been made.
  virtual void OnMade(const PeerKey& peer) = 0;
  // A connection to such a peer had been made, has ended and has been made again by itself: what
  // was sent before may be lost, or may still come. DialAgain() leaves it behind.
  virtual void OnMadeAgain(const PeerKey& peer) = 0;
  // The same of somebody who has connected here.
  virtual void OnStranger() = 0;
};

// Not thread-safe: made on one thread, then used by the progress thread alone. No call blocks.
class ControlPlane {
 public:
  virtual ~ControlPlane() = default;

  // The address that peers dial, "tcp://host:port"; empty when not listening.
  virtual const std::string& listen_address() const = 0;
  // Starts a connection; messages may be sent at once. INVALID_ARGUMENT for an address ZeroMQ
  // rejects.
  virtual absl::StatusOr<PeerKey> Dial(const std::string& address) = 0;
  // A new connection to a dialled peer in place of the one there is; on failure there is that one
  // still.
  virtual absl::Status DialAgain(const PeerKey& peer) = 0;
  // Forgets a dialled peer, and of others what waits for them.
  virtual void Hangup(const PeerKey& peer) = 0;
  // What the connection does not take waits. RESOURCE_EXHAUSTED when more than kMaxMessagesWaiting
  // does, UNAVAILABLE when the peer is gone.
  virtual absl::Status Send(const PeerKey& peer, const Message& message) = 0;
  virtual Backlog BacklogOf(const PeerKey& peer) const = 0;
  // Whether some of what was sent waits: event_fd() may not show that there is room for it, nor
  // then what has arrived.
  virtual bool Waits() const = 0;

  // Delivers what has arrived, at most a bounded number of messages. True when there was any.
  virtual bool Progress(ControlEvents* events) = 0;
  // Readable when Progress() may have work; valid after Arm() returned true.
  virtual int event_fd() const = 0;
  // True when nothing is pending and it is safe to sleep on event_fd().
  virtual bool Arm() = 0;
};

}  // namespace kvferry
