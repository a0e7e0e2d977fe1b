#include "connector/store/call_rooms.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {
namespace {

absl::Status CheckShare(int64_t has, int64_t all_have, int64_t limit, std::string_view what) {
  const int64_t left = std::max<int64_t>(0, limit - all_have);
  if (has < left) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "store: this client has ", has, " ", std::string(what), " waiting or under way; all have ",
      limit, " together, of which ", left, " are left for others; try again in a moment"));
}

}  // namespace

// What a client has taken for one call.
class CallRooms::Taken {
 public:
  Taken(std::shared_ptr<CallRooms> rooms, OfPeers::iterator of_peer, int64_t bytes)
      : rooms_(std::move(rooms)), of_peer_(of_peer), bytes_(bytes) {}
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
  ~Taken() { rooms_->GiveBack(of_peer_, bytes_); }

 private:
  const std::shared_ptr<CallRooms> rooms_;
  const OfPeers::iterator of_peer_;
  const int64_t bytes_;
};

absl::Status CallRooms::Check(const Room& of_peer) const {
  KVFERRY_RETURN_IF_ERROR(CheckShare(of_peer.calls, all_.calls, kMaxCalls, "calls"));
  return CheckShare(of_peer.bytes, all_.bytes, kMaxBytes, absl::StrCat("bytes of ", of_what_));
}

absl::StatusOr<std::shared_ptr<void>> CallRooms::Take(const PeerKey& peer, int64_t bytes) {
  OfPeers::iterator of_peer;
  {
    const MutexLock lock(&mutex_);
    const auto found = of_peers_.find(peer);
    if (found != of_peers_.end()) KVFERRY_RETURN_IF_ERROR(Check(found->second));
    of_peer = of_peers_.try_emplace(peer).first;
    for (Room* room : {&of_peer->second, &all_}) {
      ++room->calls;
      room->bytes += bytes;
    }
  }
  try {
    return std::make_shared<Taken>(shared_from_this(), of_peer, bytes);
  } catch (...) {
    GiveBack(of_peer, bytes);
    throw;
  }
}

void CallRooms::GiveBack(OfPeers::iterator of_peer, int64_t bytes) {
  const MutexLock lock(&mutex_);
  for (Room* room : {&of_peer->second, &all_}) {
    --room->calls;
    room->bytes -= bytes;
  }
  if (of_peer->second.calls == 0) of_peers_.erase(of_peer);
}

}  // namespace kvferry
