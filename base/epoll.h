#pragma once

#include <sys/epoll.h>

#include <array>
#include <cstdint>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace kvferry {

// An epoll(7) instance: which of its file descriptors are ready. It owns none of those. Like the
// system's, it may be used by several threads at once.
class Epoll {
 public:
  Epoll() = default;  // None: Add() fails.
  // RESOURCE_EXHAUSTED: the process or the system has no file descriptor left.
  static absl::StatusOr<Epoll> Create();

  // Readable when one of those in it is.
  int fd() const { return fd_.get(); }

  // `events` as in epoll_ctl(2); Ready() names `fd` by `id`. RESOURCE_EXHAUSTED as well where the
  // user may not watch more (/proc/sys/fs/epoll/max_user_watches).
  absl::Status Add(int fd, uint32_t events, uint64_t id) const;
  void Change(int fd, uint32_t events, uint64_t id) const;
  void Remove(int fd) const;
  // Takes a socket out and ends its connection. Closing does both, unless a child of this process
  // was forked meanwhile: what it has a copy of stays open and watched.
  void HangUp(int socket) const;

  // For as many as are looked at in a turn.
  using Room = std::array<epoll_event, 64>;
  // Those that are ready now, in `room` and at most so many. Does not wait.
  std::span<const epoll_event> Ready(std::span<epoll_event> room) const;

 private:
  explicit Epoll(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

}  // namespace kvferry
