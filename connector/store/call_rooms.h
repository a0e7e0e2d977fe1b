#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "transport/control_plane.h"

namespace kvferry {

// Room that a server has for the calls of all its clients, or for values on their way, shared as
// the arena's chunks are: a client has more calls, or more bytes of them, only while it has fewer
// than are left for others. One call each client has in any case. Thread-safe.
class CallRooms : public std::enable_shared_from_this<CallRooms> {
 public:
  static constexpr int64_t kMaxCalls = 65536;
  static constexpr int64_t kMaxBytes = 256 << 20;  // Of what the calls carry.

  // `of_what` the bytes are, for errors.
  static std::shared_ptr<CallRooms> Create(std::string_view of_what = "calls") {
    return std::shared_ptr<CallRooms>(new CallRooms(of_what));
  }

  // The room of a call that carries so many bytes, until what is returned is gone, which may be
  // after this. RESOURCE_EXHAUSTED says of what there is not enough.
  absl::StatusOr<std::shared_ptr<void>> Take(const PeerKey& peer, int64_t bytes);

 private:
  struct Room {
    int64_t calls = 0;
    int64_t bytes = 0;
  };
  using OfPeers = std::map<PeerKey, Room>;
  class Taken;

  explicit CallRooms(std::string_view of_what) : of_what_(of_what) {}
  absl::Status Check(const Room& of_peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(OfPeers::iterator of_peer, int64_t bytes);

  const std::string of_what_;
  Mutex mutex_;
  Room all_ ABSL_GUARDED_BY(mutex_);
  OfPeers of_peers_ ABSL_GUARDED_BY(mutex_);  // Those that have any.
};

}  // namespace kvferry
