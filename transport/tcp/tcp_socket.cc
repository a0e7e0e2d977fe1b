#include "transport/tcp/tcp_socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "transport/silence_limits.h"

namespace kvferry {
namespace {

constexpr int kBacklog = 1024;

struct Address {
  union {
    sockaddr generic;
    sockaddr_in v4;
    sockaddr_in6 v6;
  };
  socklen_t bytes;
};

absl::StatusOr<Address> NumericAddress(const std::string& host, int64_t port) {
  Address address{};
  if (port >= 0 && port <= 65535) {
    const auto number = htons(static_cast<uint16_t>(port));
    if (inet_pton(AF_INET, host.c_str(), &address.v4.sin_addr) == 1) {
      address.v4.sin_family = AF_INET;
      address.v4.sin_port = number;
      address.bytes = sizeof(address.v4);
      return address;
    }
    if (inet_pton(AF_INET6, host.c_str(), &address.v6.sin6_addr) == 1) {
      address.v6.sin6_family = AF_INET6;
      address.v6.sin6_port = number;
      address.bytes = sizeof(address.v6);
      return address;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("tcp: '", host, "' port ", port, " is no numeric address"));
}

absl::StatusOr<UniqueFd> NewSocket(sa_family_t family) {
  UniqueFd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.valid()) return fd;
  return absl::ResourceExhaustedError(absl::StrCat("tcp: a socket: ", std::strerror(errno)));
}

// Chunks are written whole; what waits for more would wait for nothing.
void SetNoDelay(const UniqueFd& fd) {
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Moved FromResult(ssize_t bytes) {
  if (bytes > 0) return {Moved::Result::kSome, bytes};
  const int error = bytes < 0 ? errno : 0;
  // An interrupted call may be made again at once.
  if (error == EINTR) return {Moved::Result::kSome, 0};
  const bool later = error == EAGAIN || error == EWOULDBLOCK;
  return {later ? Moved::Result::kWouldBlock : Moved::Result::kBroken, 0, error};
}

msghdr MessageOf(std::span<const iovec> parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  return message;
}

std::string TextOf(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text,
              sizeof(text));
  } else {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text,
              sizeof(text));
  }
  return text;
}

}  // namespace

absl::StatusOr<UniqueFd> ListenTcp(const std::string& host, int64_t port) {
  KVFERRY_ASSIGN_OR_RETURN(const Address address, NumericAddress(host, port));
  KVFERRY_ASSIGN_OR_RETURN(UniqueFd fd, NewSocket(address.generic.sa_family));
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd.get(), &address.generic, address.bytes) != 0 || listen(fd.get(), kBacklog) != 0) {
    return absl::UnavailableError(absl::StrCat("tcp: cannot listen for data on ", host, " port ",
                                               port, ": ", std::strerror(errno),
                                               "; set data_port to one that is free"));
  }
  return fd;
}

absl::Status ChooseCongestionControl(const UniqueFd& socket, const std::string& name) {
  if (name.empty() || setsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(),
                                 static_cast<socklen_t>(name.size())) == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "config: tcp_congestion_control is '", name, "', which the system refuses: ",
      std::strerror(errno), "; net.ipv4.tcp_allowed_congestion_control lists what it gives"));
}

absl::Status CheckCongestionControl(const std::string& name) {
  KVFERRY_ASSIGN_OR_RETURN(const UniqueFd fd, NewSocket(AF_INET));
  return ChooseCongestionControl(fd, name);
}

absl::StatusOr<int64_t> PortOf(const UniqueFd& socket) {
  Address address{};
  address.bytes = sizeof(address.v6);
  if (getsockname(socket.get(), &address.generic, &address.bytes) != 0) {
    return absl::UnavailableError(absl::StrCat("tcp: getsockname: ", std::strerror(errno)));
  }
  return ntohs(address.generic.sa_family == AF_INET ? address.v4.sin_port : address.v6.sin6_port);
}

absl::StatusOr<UniqueFd> DialTcp(const std::string& host, int64_t port) {
  KVFERRY_ASSIGN_OR_RETURN(const Address address, NumericAddress(host, port));
  KVFERRY_ASSIGN_OR_RETURN(UniqueFd fd, NewSocket(address.generic.sa_family));
  SetNoDelay(fd);
  if (connect(fd.get(), &address.generic, address.bytes) != 0 && errno != EINPROGRESS) {
    return absl::Status(
        IsSilence(errno) ? absl::StatusCode::kDeadlineExceeded : absl::StatusCode::kUnavailable,
        absl::StrCat("tcp: cannot connect to ", host, " port ", port, ": ", std::strerror(errno)));
  }
  return fd;
}

UniqueFd AcceptTcp(const UniqueFd& listener) {
  UniqueFd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.valid()) SetNoDelay(fd);
  return fd;
}

void LimitSilence(const UniqueFd& socket, int64_t timeout_ms) {
  const SilenceLimits limits(timeout_ms);
  const int on = 1;
  setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &limits.user_timeout_ms,
             sizeof(limits.user_timeout_ms));
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &limits.probe_s, sizeof(limits.probe_s));
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, &limits.probe_s, sizeof(limits.probe_s));
  setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

Unacknowledged WhatIsUnacknowledged(const UniqueFd& socket) {
  int bytes = 0;
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (ioctl(socket.get(), SIOCOUTQ, &bytes) != 0 ||
      getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
    return {};
  }
  // Probes of a window that is closed are counted apart, and any acknowledgement sets this to 0.
  return {bytes, info.tcpi_retransmits > 0};
}

bool IsSilence(int error) {
  // Instead of the first it is one of the others where a router has said so.
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
}

absl::StatusOr<std::string> AddressOfInterface(const std::string& name) {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) {
    return absl::UnavailableError(absl::StrCat("tcp: getifaddrs: ", std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(found, freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* each = all.get(); each != nullptr; each = each->ifa_next) {
      if (each->ifa_addr != nullptr && each->ifa_addr->sa_family == family &&
          name == each->ifa_name) {
        return TextOf(each->ifa_addr);
      }
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "config: net_device is '", name, "', which is no interface of this host with an address"));
}

Moved SendTcp(int fd, std::span<const iovec> parts) {
  const msghdr message = MessageOf(parts);
  return FromResult(sendmsg(fd, &message, MSG_NOSIGNAL));
}

Moved ReceiveTcp(int fd, std::span<const iovec> parts) {
  msghdr message = MessageOf(parts);
  return FromResult(recvmsg(fd, &message, 0));
}

}  // namespace kvferry
