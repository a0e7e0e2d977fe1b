#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/epoll.h"
#include "base/unique_fd.h"
#include "transport/limited_line.h"

namespace kvferry {

// Whether accepting that has failed with this errno fails again until something is closed.
bool IsForWantOfFiles(int error);
// `more`: LimitedLine's.
void LogThatPeersWait(int error, const std::string& more);

// A connection for which the process has no file descriptor left stays in the listener's queue, and the
// listener readable: whoever waits for it would turn without end. It is left out of the epoll for a
// moment instead, and a timer in the same epoll ends that.
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
  UniqueFd timer_;
  int listener_ = -1;
  LimitedLine refused_;
};

}  // namespace kvferry
