#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/epoll.h"
#include "base/unique_fd.h"
#include "transport/limited_line.h"

namespace kvferry {

// Whether an errno says that there are no descriptors or no memory left: it may pass.
bool IsForWantOfFiles(int error);

// The moment for which a listener is left out where accepting fails until something is closed.
class PauseTimer {
 public:
  PauseTimer() = default;  // None: End() is false.
  static absl::StatusOr<PauseTimer> Create();

  // Readable when a pause is over.
  int fd() const { return timer_.get(); }
  // False, and nothing begins, where accepting has failed with this errno for another reason. Else
  // the log says so, now and then.
  bool Begin(int error);
  // Whether a pause is over that was not before.
  bool End();

 private:
  UniqueFd timer_;
  LimitedLine refused_;
};

// A connection for which the process has no file descriptor left stays in the listener's queue, and
// the listener readable: whoever waits for it would turn without end. It is left out of the epoll
// for a moment instead, and a timer in the same epoll ends that.
class AcceptPause {
 public:
  AcceptPause() = default;                   // None.
  static constexpr int kAcceptedATurn = 64;  // Whoever listens has other work.
  // What the epoll calls the two.
  static constexpr uint64_t kListenerId = 0, kTimerId = UINT64_MAX;
  // Puts them there.
  static absl::StatusOr<AcceptPause> Create(const Epoll& epoll, int listener);

  // After accepting has failed with this errno; changes nothing unless that needs a pause.
  void OnFailure(const Epoll& epoll, int error);
  // The epoll has reported the timer.
  void OnTimer(const Epoll& epoll);

 private:
  PauseTimer timer_;
  int listener_ = -1;
};

}  // namespace kvferry
