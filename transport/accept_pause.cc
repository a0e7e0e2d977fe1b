#include "transport/accept_pause.h"

#include <sys/timerfd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"

namespace kvferry {
namespace {

constexpr int64_t kPauseNs = 100'000'000;

void Set(const UniqueFd& timer, int64_t ns) {
  const itimerspec once{{}, {0, ns}};
  timerfd_settime(timer.get(), 0, &once, nullptr);
}

}  // namespace

bool IsForWantOfFiles(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

void LogThatPeersWait(int error, const std::string& more) {
  Log().warn("a peer waits to connect and the system refuses: {} (limit of open files?){}",
             std::strerror(error), more);
}

absl::StatusOr<AcceptPause> AcceptPause::Create(const Epoll& epoll, int listener) {
  AcceptPause pause;
  pause.timer_ = UniqueFd(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  pause.listener_ = listener;
  if (!pause.timer_.valid()) {
    return absl::ResourceExhaustedError(absl::StrCat("timerfd: ", std::strerror(errno)));
  }
  KVFERRY_RETURN_IF_ERROR(epoll.Add(listener, EPOLLIN, kListenerId));
  KVFERRY_RETURN_IF_ERROR(epoll.Add(pause.timer_.get(), EPOLLIN, kTimerId));
  return pause;
}

void AcceptPause::OnFailure(const Epoll& epoll, int error) {
  if (!IsForWantOfFiles(error)) return;
  // The peer waits, and this fails, until something is closed: ten times a second.
  if (const auto more = refused_.Next()) LogThatPeersWait(error, *more);
  epoll.Change(listener_, 0, kListenerId);
  Set(timer_, kPauseNs);
}

void AcceptPause::OnTimer(const Epoll& epoll) {
  Set(timer_, 0);  // Not readable any more.
  epoll.Change(listener_, EPOLLIN, kListenerId);
}

}  // namespace kvferry
