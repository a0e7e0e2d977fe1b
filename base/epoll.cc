#include "base/epoll.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvferry {
namespace {

epoll_event Event(uint32_t events, uint64_t id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  return event;
}

absl::Status Failed(const char* what) {
  return absl::ResourceExhaustedError(absl::StrCat(what, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<Epoll> Epoll::Create() {
  UniqueFd fd(epoll_create1(EPOLL_CLOEXEC));
  if (!fd.valid()) return Failed("epoll_create1");
  return Epoll(std::move(fd));
}

absl::Status Epoll::Add(int fd, uint32_t events, uint64_t id) const {
  epoll_event event = Event(events, id);
  if (epoll_ctl(fd_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return Failed("epoll_ctl");
  return absl::OkStatus();
}

void Epoll::Change(int fd, uint32_t events, uint64_t id) const {
  epoll_event event = Event(events, id);
  epoll_ctl(fd_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Epoll::Remove(int fd) const { epoll_ctl(fd_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Epoll::HangUp(int socket) const {
  Remove(socket);
  shutdown(socket, SHUT_RDWR);
}

std::span<const epoll_event> Epoll::Ready(std::span<epoll_event> room) const {
  const int count = epoll_wait(fd_.get(), room.data(), static_cast<int>(room.size()), 0);
  return room.first(count < 0 ? 0 : static_cast<size_t>(count));
}

}  // namespace kvferry
