#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "base/epoll.h"
#include "transport/accept_pause.h"

namespace kvferry {

// AcceptPause for ZeroMQ's listener. ZeroMQ waits for it with an epoll of its own and cannot be
// told to stop for a moment: unbinding ends all the connections that came that way. So the listener
// is left out of that epoll from outside, by what /proc/self/fdinfo says of it (proc(5)).
class ListenerPause {
 public:
  ListenerPause() = default;  // None.
  // `listener`: ZeroMQ's, which is open as long as this is used. A pause ends with a sign in
  // `epoll`.
  static absl::StatusOr<ListenerPause> Create(const Epoll& epoll, int listener);

  // False where the system does not say what the listener is waited for with: OnFailure() does
  // nothing.
  bool works() const { return watch_.has_value(); }
  // After accepting has failed with this errno; changes nothing unless that needs a pause.
  void OnFailure(int error);
  // Ends a pause that has lasted long enough.
  void Progress();

 private:
  // The listener's place in an epoll.
  struct Watch {
    int epoll;
    uint32_t events;
    uint64_t data;
  };
  static std::optional<Watch> Find(int listener);
  static std::optional<Watch> FindIn(int fd, int listener, uint64_t inode);
  void Listen(bool on) const;

  PauseTimer timer_;
  int listener_ = -1;
  std::optional<Watch> watch_;
};

}  // namespace kvferry
