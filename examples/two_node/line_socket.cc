#include "examples/two_node/line_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry::examples {
namespace {

constexpr auto kRetryInterval = std::chrono::milliseconds(50);

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

absl::Status Errno(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

std::string Text(const HostPort& address) { return absl::StrCat(address.host, ":", address.port); }

absl::StatusOr<AddressList> Resolve(const HostPort& address, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error =
      getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &list);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot resolve ", address.host, ": ", gai_strerror(error)));
  }
  return AddressList(list, freeaddrinfo);
}

absl::Status WaitFor(int fd, int16_t events, Deadline deadline, absl::string_view what) {
  while (true) {
    pollfd entry{fd, events, 0};
    const int ready = poll(
        &entry, 1, static_cast<int>(std::min<int64_t>(MsUntil(deadline, Clock::now()), 60000)));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return Errno("poll");
    if (Clock::now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat(what, " took longer than --timeout-ms"));
    }
  }
}

absl::StatusOr<Fd> ConnectOnce(const HostPort& address, Deadline deadline) {
  KVFERRY_ASSIGN_OR_RETURN(const AddressList list, Resolve(address, 0));
  absl::Status last = absl::UnavailableError("no address");
  for (const addrinfo* info = list.get(); info != nullptr; info = info->ai_next) {
    Fd fd(socket(info->ai_family, info->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd.get() < 0) {
      last = Errno("socket");
      continue;
    }
    if (connect(fd.get(), info->ai_addr, info->ai_addrlen) != 0 && errno != EINPROGRESS) {
      last = Errno(absl::StrCat("cannot connect to ", Text(address)));
      continue;
    }
    last = WaitFor(fd.get(), POLLOUT, deadline, absl::StrCat("connecting to ", Text(address)));
    if (!last.ok()) continue;
    socklen_t size = sizeof(errno);
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &errno, &size);
    if (errno == 0) return fd;
    last = Errno(absl::StrCat("cannot connect to ", Text(address)));
  }
  return last;
}

std::string NumericHost(int fd, int (*get_name)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  std::array<char, NI_MAXHOST> host{};
  if (get_name(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host.data(), host.size(), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return "";
  }
  return host.data();
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

int Fd::Release() { return std::exchange(fd_, -1); }

absl::StatusOr<LineSocket> LineSocket::Connect(const HostPort& address, Deadline deadline) {
  while (true) {
    absl::StatusOr<Fd> fd = ConnectOnce(address, deadline);
    if (fd.ok()) return LineSocket(*std::move(fd));
    if (!absl::IsUnavailable(fd.status()) || Clock::now() + kRetryInterval >= deadline) {
      return fd.status();
    }
    std::this_thread::sleep_for(kRetryInterval);
  }
}

absl::Status LineSocket::Send(absl::string_view line, Deadline deadline) {
  const std::string bytes = absl::StrCat(line, "\n");
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n = send(fd_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n > 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      KVFERRY_RETURN_IF_ERROR(WaitFor(fd_.get(), POLLOUT, deadline, "sending to the other side"));
    } else if (errno != EINTR) {
      return Errno("sending to the other side");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> LineSocket::Receive(Deadline deadline) {
  while (true) {
    const size_t end = received_.find('\n');
    if (end != std::string::npos) {
      std::string line = received_.substr(0, end);
      received_.erase(0, end + 1);
      return line;
    }
    if (received_.size() > kMaxLineBytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the other side sent a line longer than ", kMaxLineBytes, " bytes"));
    }
    KVFERRY_RETURN_IF_ERROR(WaitFor(fd_.get(), POLLIN, deadline, "the other side's answer"));
    std::array<char, 4096> buffer;
    const ssize_t n = recv(fd_.get(), buffer.data(), buffer.size(), 0);
    if (n > 0) {
      received_.append(buffer.data(), static_cast<size_t>(n));
    } else if (n == 0) {
      return absl::UnavailableError("the other side has closed the ticket connection");
    } else if (errno != EAGAIN && errno != EINTR) {
      return Errno("the ticket connection");
    }
  }
}

std::string LineSocket::local_host() const { return NumericHost(fd_.get(), &getsockname); }
std::string LineSocket::peer_host() const { return NumericHost(fd_.get(), &getpeername); }

absl::StatusOr<LineListener> LineListener::Listen(const HostPort& address) {
  KVFERRY_ASSIGN_OR_RETURN(const AddressList list, Resolve(address, AI_PASSIVE));
  Fd fd(socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) return Errno("socket");
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd.get(), list->ai_addr, list->ai_addrlen) != 0 || listen(fd.get(), 8) != 0) {
    return Errno(absl::StrCat("cannot listen on ", Text(address)));
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  std::array<char, NI_MAXSERV> port{};
  getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &size);
  getnameinfo(reinterpret_cast<sockaddr*>(&bound), size, nullptr, 0, port.data(), port.size(),
              NI_NUMERICSERV);
  int64_t number = 0;
  if (!absl::SimpleAtoi(port.data(), &number)) return Errno("the port listened on is not known");
  return LineListener(std::move(fd), number);
}

absl::StatusOr<LineSocket> LineListener::Accept(Deadline deadline) {
  while (true) {
    KVFERRY_RETURN_IF_ERROR(WaitFor(fd_.get(), POLLIN, deadline, "waiting for a decode side"));
    Fd fd(accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.get() >= 0) return LineSocket(std::move(fd));
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) return Errno("accept");
  }
}

}  // namespace kvferry::examples
