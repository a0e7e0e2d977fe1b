#include "transport/control/listener_pause.h"

#include <sys/stat.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"

namespace kvferry {
namespace {

// ZeroMQ's thread does it when it has its turn.
constexpr int64_t kUntilWatchedMs = 200;
constexpr const char* kDescriptors = "/proc/self/fdinfo";

}  // namespace

absl::StatusOr<ListenerPause> ListenerPause::Create(const Epoll& epoll, int listener) {
  ListenerPause pause;
  absl::StatusOr<PauseTimer> timer = PauseTimer::Create();
  if (!timer.ok()) {
    return absl::Status(timer.status().code(), absl::StrCat("control: ", timer.status().message()));
  }
  pause.timer_ = *std::move(timer);
  KVFERRY_RETURN_IF_ERROR(epoll.Add(pause.timer_.fd(), EPOLLIN | EPOLLET, 0));
  pause.listener_ = listener;
  const Deadline until = DeadlineInMs(kUntilWatchedMs);
  while (!(pause.watch_ = Find(listener)) && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return pause;
}

std::optional<ListenerPause::Watch> ListenerPause::Find(int listener) {
  struct stat status {};
  if (fstat(listener, &status) != 0) return std::nullopt;
  std::error_code error;  // Descriptors come and go meanwhile.
  for (std::filesystem::directory_iterator at(kDescriptors, error), end; !error && at != end;
       at.increment(error)) {
    int fd = -1;
    if (!absl::SimpleAtoi(at->path().filename().string(), &fd)) continue;
    if (auto watch = FindIn(fd, listener, status.st_ino)) return watch;
  }
  return std::nullopt;
}

// By its inode too: an epoll goes on to name what it watches by a number that may have become
// another's.
std::optional<ListenerPause::Watch> ListenerPause::FindIn(int fd, int listener, uint64_t inode) {
  std::ifstream lines(absl::StrCat(kDescriptors, "/", fd));
  for (std::string line; std::getline(lines, line);) {
    int watched = -1;
    unsigned events = 0;
    uint64_t data = 0, its_inode = 0;
    // A number that is too long is none of ours.
    const int read =  // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion)
        std::sscanf(line.c_str(), "tfd: %d events: %x data: %" SCNx64 " pos:%*d ino:%" SCNx64,
                    &watched, &events, &data, &its_inode);
    const bool is_its = read == 4 && watched == listener && its_inode == inode;
    // Not before ZeroMQ's thread, which puts it there, waits for it.
    if (is_its && (events & EPOLLIN) != 0) return Watch{fd, events, data};
  }
  return std::nullopt;
}

void ListenerPause::OnFailure(int error) {
  if (works() && timer_.Begin(error)) Listen(false);
}

void ListenerPause::Progress() {
  if (timer_.End()) Listen(true);
}

void ListenerPause::Listen(bool on) const {
  epoll_event event{};
  event.events = on ? watch_->events : 0;
  event.data.u64 = watch_->data;
  epoll_ctl(watch_->epoll, EPOLL_CTL_MOD, listener_, &event);
}

}  // namespace kvferry
