#include "transport/accept_pause.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"

namespace kvferry {
namespace {

constexpr int64_t kPauseNs = 100'000'000;

}  // namespace

bool IsForWantOfFiles(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

absl::StatusOr<PauseTimer> PauseTimer::Create() {
  PauseTimer made;
  made.timer_ = UniqueFd(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (made.timer_.valid()) return made;
  return absl::ResourceExhaustedError(absl::StrCat("timerfd: ", std::strerror(errno)));
}

bool PauseTimer::Begin(int error) {
  if (!IsForWantOfFiles(error)) return false;
  // Until something is closed: ten times a second.
  if (const auto more = refused_.Next()) {
    Log().warn("a peer waits to connect and the system refuses: {} (limit of open files?){}",
               std::strerror(error), *more);
  }
  const itimerspec once{{}, {0, kPauseNs}};
  timerfd_settime(timer_.get(), 0, &once, nullptr);
  return true;
}

bool PauseTimer::End() {
  uint64_t times = 0;
  return timer_.valid() && read(timer_.get(), &times, sizeof times) == sizeof times;
}

absl::StatusOr<AcceptPause> AcceptPause::Create(const Epoll& epoll, int listener) {
  AcceptPause pause;
  KVFERRY_ASSIGN_OR_RETURN(pause.timer_, PauseTimer::Create());
  pause.listener_ = listener;
  KVFERRY_RETURN_IF_ERROR(epoll.Add(listener, EPOLLIN, kListenerId));
  KVFERRY_RETURN_IF_ERROR(epoll.Add(pause.timer_.fd(), EPOLLIN, kTimerId));
  return pause;
}

void AcceptPause::OnFailure(const Epoll& epoll, int error) {
  if (timer_.Begin(error)) epoll.Change(listener_, 0, kListenerId);
}

void AcceptPause::OnTimer(const Epoll& epoll) {
  if (timer_.End()) epoll.Change(listener_, EPOLLIN, kListenerId);
}

}  // namespace kvferry
