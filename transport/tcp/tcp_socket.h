#pragma once

// TCP sockets that never block.

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace kvferry {

// `host` is a numeric address, IPv4 or IPv6, without brackets. Port 0 takes a free one.
absl::StatusOr<UniqueFd> ListenTcp(const std::string& host, int64_t port);
// The port that a socket is bound to.
absl::StatusOr<int64_t> PortOf(const UniqueFd& socket);
// Has a socket, and all that a listening one accepts later, use that congestion control; "" leaves
// the system's default. INVALID_ARGUMENT: the system does not have or give it.
absl::Status ChooseCongestionControl(const UniqueFd& socket, const std::string& name);
// Whether that would work.
absl::Status CheckCongestionControl(const std::string& name);
// The connection breaks when for so long, a second at least, the other side's kernel has been
// silent (SilenceLimits). Whoever reads must not let what has come wait for longer.
void LimitSilence(const UniqueFd& socket, int64_t timeout_ms);
// What of all that was written the other side's kernel has not acknowledged, and whether that has
// been sent again, so far in vain: what only waits because the other side takes no more is not.
struct Unacknowledged {
  int64_t bytes = 0;
  bool sent_again = false;
};
Unacknowledged WhatIsUnacknowledged(const UniqueFd& socket);
// Whether a connection that broke with this errno did so because nothing came back.
bool IsSilence(int error);
// A socket that is connecting: writable when it is through, broken when that failed.
// DEADLINE_EXCEEDED: there is no way to that host just now (IsSilence).
absl::StatusOr<UniqueFd> DialTcp(const std::string& host, int64_t port);
// An invalid fd when nobody waits, or errno says why not.
UniqueFd AcceptTcp(const UniqueFd& listener);
// The numeric address of a network interface, such as "eth0": IPv4 if it has one.
absl::StatusOr<std::string> AddressOfInterface(const std::string& name);

// How many bytes a call has moved.
struct Moved {
  enum class Result { kSome, kWouldBlock, kBroken };
  Result result = Result::kWouldBlock;
  int64_t bytes = 0;
  int error = 0;  // Of one that is broken; 0: the other side has closed it.

  bool some() const { return result == Result::kSome; }
};
// As many of these as the socket takes at once; the list is not empty.
Moved SendTcp(int fd, std::span<const iovec> parts);
Moved ReceiveTcp(int fd, std::span<const iovec> parts);
// Parts of one call; the system takes no more.
inline constexpr size_t kMaxParts = 1024;

}  // namespace kvferry
