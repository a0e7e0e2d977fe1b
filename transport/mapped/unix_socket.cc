#include "transport/mapped/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {
namespace {

constexpr int kBacklog = 128;

struct Address {
  sockaddr_un unix_address{};
  socklen_t bytes = 0;
};

// A leading zero byte makes the name abstract (unix(7)): nothing to clean up in a file system.
absl::StatusOr<Address> AbstractAddress(const std::string& name) {
  Address address;
  if (name.empty() || name.size() + 1 > sizeof(address.unix_address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("unix socket: a name of ", name.size(), " bytes"));
  }
  address.unix_address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.unix_address.sun_path + 1);
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

absl::StatusOr<UniqueFd> NewSocket() {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) {
    return absl::ResourceExhaustedError(absl::StrCat("unix socket: ", std::strerror(errno)));
  }
  return fd;
}

SocketResult FromErrno() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? SocketResult::kWouldBlock
                                                                   : SocketResult::kBroken;
}

union Fds {
  char bytes[CMSG_SPACE(kMaxPassed * sizeof(int))];
  cmsghdr aligned;
};

// Of what came along, the first descriptors are kept and any others are closed.
std::array<UniqueFd, kMaxPassed> TakePassed(msghdr* message) {
  std::array<UniqueFd, kMaxPassed> taken;
  size_t count = 0;
  for (cmsghdr* head = CMSG_FIRSTHDR(message); head != nullptr; head = CMSG_NXTHDR(message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= head->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, reinterpret_cast<const char*>(head) + at, sizeof(fd));
      UniqueFd owned(fd);
      if (count < kMaxPassed) taken[count++] = std::move(owned);
    }
  }
  return taken;
}

absl::StatusOr<ucred> CredentialsOf(const UniqueFd& socket) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    return absl::UnavailableError(absl::StrCat("unix socket: ", std::strerror(errno)));
  }
  return peer;
}

}  // namespace

absl::StatusOr<UniqueFd> ListenUnix(const std::string& name) {
  KVFERRY_ASSIGN_OR_RETURN(const Address address, AbstractAddress(name));
  KVFERRY_ASSIGN_OR_RETURN(UniqueFd fd, NewSocket());
  const auto* raw = reinterpret_cast<const sockaddr*>(&address.unix_address);
  if (bind(fd.get(), raw, address.bytes) != 0 || listen(fd.get(), kBacklog) != 0) {
    return absl::UnavailableError(
        absl::StrCat("unix socket: cannot listen: ", std::strerror(errno)));
  }
  return fd;
}

absl::StatusOr<UniqueFd> ConnectUnix(const std::string& name) {
  KVFERRY_ASSIGN_OR_RETURN(const Address address, AbstractAddress(name));
  KVFERRY_ASSIGN_OR_RETURN(UniqueFd fd, NewSocket());
  const auto* raw = reinterpret_cast<const sockaddr*>(&address.unix_address);
  if (connect(fd.get(), raw, address.bytes) != 0) {
    return absl::UnavailableError(
        absl::StrCat("unix socket: cannot connect: ", std::strerror(errno)));
  }
  return fd;
}

UniqueFd AcceptUnix(const UniqueFd& listener) {
  return UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

absl::Status CheckSameUser(const UniqueFd& socket) {
  KVFERRY_ASSIGN_OR_RETURN(const ucred peer, CredentialsOf(socket));
  if (peer.uid == geteuid()) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("unix socket: the peer runs as user ", peer.uid,
                                                  ", this process as ", geteuid()));
}

pid_t ProcessOf(const UniqueFd& socket) {
  const absl::StatusOr<ucred> peer = CredentialsOf(socket);
  return peer.ok() ? peer->pid : 0;
}

SocketResult SendPacket(const UniqueFd& socket, std::span<const std::byte> bytes,
                        std::span<const int> passed) {
  iovec part = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  Fds control{};
  if (!passed.empty()) {
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(passed.size_bytes());
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(passed.size_bytes());
    std::memcpy(CMSG_DATA(head), passed.data(), passed.size_bytes());
  }
  return sendmsg(socket.get(), &message, MSG_NOSIGNAL) >= 0 ? SocketResult::kOk : FromErrno();
}

SocketResult ReceivePacket(const UniqueFd& socket, Packet* packet) {
  iovec part = {packet->bytes, sizeof(packet->bytes)};
  Fds control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  ssize_t got = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  // That the other end has let go of what it had not read is heard once, and before its last words.
  if (got < 0 && errno == ECONNRESET) got = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  if (got < 0) return FromErrno();
  packet->size = static_cast<size_t>(got);
  packet->passed = TakePassed(&message);
  const bool whole = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
  return got > 0 && whole ? SocketResult::kOk : SocketResult::kBroken;
}

}  // namespace kvferry
