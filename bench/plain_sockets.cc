#include "bench/plain_sockets.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "bench/driver.h"
#include "bench/on_threads.h"

namespace kvferry::bench {
namespace {

constexpr int kTimeoutMs = 60000;

absl::Status Errno(const char* what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

sockaddr_in Loopback(int64_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

absl::StatusOr<UniqueFd> Socket() {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return Errno("socket");
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return fd;
}

// Pages [first, first + pages) of a pool, buffer after buffer: where they lie, and how far one is.
class Stream {
 public:
  Stream(const KvPool& pool, int64_t first, int64_t pages) {
    for (const BufferInfo& buffer : pool.buffer_infos()) {
      parts_.emplace_back(buffer.address + first * buffer.item_bytes, pages * buffer.item_bytes);
    }
  }
  bool done() const { return parts_.empty(); }
  // What lies together from here on.
  std::span<std::byte> next() const { return parts_.front(); }
  void Advance(size_t bytes) {
    parts_.front() = parts_.front().subspan(bytes);
    if (parts_.front().empty()) parts_.erase(parts_.begin());
  }

 private:
  std::vector<std::span<std::byte>> parts_;
};

class Sender {
 public:
  explicit Sender(std::shared_ptr<KvPool> pool) : pool_(std::move(pool)) {}

  Answer Listen() {
    KVFERRY_ASSIGN_OR_RETURN(listener_, Socket());
    sockaddr_in address = Loopback(0);
    socklen_t bytes = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener_.get(), generic, bytes) != 0 || listen(listener_.get(), SOMAXCONN) != 0 ||
        getsockname(listener_.get(), generic, &bytes) != 0) {
      return Errno("listen");
    }
    return nlohmann::json{{"port", ntohs(address.sin_port)}};
  }

  Answer Accept(int64_t count) {
    receivers_.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      int64_t index = -1;
      if (!fd.valid() || recv(fd.get(), &index, sizeof(index), MSG_WAITALL) != sizeof(index)) {
        return Errno("accept");
      }
      if (index < 0 || index >= count) return absl::OutOfRangeError(absl::StrCat(index));
      receivers_[index] = std::move(fd);
    }
    return nlohmann::json::object();
  }

  Answer Send(int64_t when, int64_t pages, int64_t turn) {
    std::vector<Stream> streams;
    for (size_t i = 0; i < receivers_.size(); ++i) {
      streams.emplace_back(*pool_, static_cast<int64_t>(i) * pages, pages);
    }
    std::this_thread::sleep_until(PointInTime(when));
    for (;;) {
      // A negative fd is none to poll (poll(2)).
      std::vector<pollfd> fds;
      for (size_t i = 0; i < streams.size(); ++i) {
        fds.push_back({streams[i].done() ? -1 : receivers_[i].get(), POLLOUT, 0});
      }
      if (std::ranges::all_of(fds, [](const pollfd& fd) { return fd.fd < 0; })) break;
      if (poll(fds.data(), fds.size(), kTimeoutMs) <= 0) return Errno("poll");
      for (size_t i = 0; i < streams.size(); ++i) {
        if (fds[i].revents == 0) continue;
        KVFERRY_RETURN_IF_ERROR(SendTurn(receivers_[i].get(), streams[i], turn));
      }
    }
    return nlohmann::json::object();
  }

 private:
  static absl::Status SendTurn(int fd, Stream& stream, int64_t turn) {
    while (turn > 0 && !stream.done()) {
      const std::span<std::byte> bytes = stream.next();
      const size_t most = std::min(bytes.size(), static_cast<size_t>(turn));
      const ssize_t sent = send(fd, bytes.data(), most, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EAGAIN) return absl::OkStatus();
      if (sent < 0) return Errno("send");
      stream.Advance(static_cast<size_t>(sent));
      turn -= sent;
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<KvPool> pool_;
  UniqueFd listener_;
  std::vector<UniqueFd> receivers_;
};

class Receivers {
 public:
  Receivers(std::shared_ptr<KvPool> pool, int64_t count) : pool_(std::move(pool)), fds_(count) {}

  Answer Connect(int64_t port, int64_t first) {
    const sockaddr_in address = Loopback(port);
    for (UniqueFd& fd : fds_) {
      KVFERRY_ASSIGN_OR_RETURN(fd, Socket());
      if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
          send(fd.get(), &first, sizeof(first), MSG_NOSIGNAL) != sizeof(first)) {
        return Errno("connect");
      }
      ++first;
    }
    return nlohmann::json::object();
  }

  Answer Receive(int64_t when, int64_t pages) {
    std::vector<double> seconds(fds_.size());
    std::vector<absl::Status> statuses(fds_.size());
    OnThreads(static_cast<int>(fds_.size()), [&](int i) {
      statuses[i] = ReceiveAll(fds_[i].get(), Stream(*pool_, i * pages, pages));
      seconds[i] = SecondsBetween(PointInTime(when), Clock::now());
    });
    for (const absl::Status& status : statuses) KVFERRY_RETURN_IF_ERROR(status);
    return nlohmann::json{{"seconds", seconds}};
  }

 private:
  static absl::Status ReceiveAll(int fd, Stream stream) {
    while (!stream.done()) {
      const std::span<std::byte> bytes = stream.next();
      const ssize_t received = recv(fd, bytes.data(), bytes.size(), 0);
      if (received == 0) return absl::UnavailableError("recv: the sender has gone");
      if (received < 0) return Errno("recv");
      stream.Advance(static_cast<size_t>(received));
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<KvPool> pool_;
  std::vector<UniqueFd> fds_;
};

// A handler of numbers.
template <typename Call>
Handler Of(const Call& call) {
  return [call](const Words& words) -> Answer {
    std::vector<int64_t> numbers(words.size());
    for (size_t i = 0; i < words.size(); ++i) {
      KVFERRY_ASSIGN_OR_RETURN(numbers[i], ParseNumber(words[i]));
    }
    return call(numbers);
  };
}

}  // namespace

absl::StatusOr<int> ServePlainSender(const std::shared_ptr<KvPool>& pool) {
  Sender sender(pool);
  Driver driver(pool);
  driver.Add("listen", 0, Of([&](const auto&) { return sender.Listen(); }));
  driver.Add("accept", 1, Of([&](const auto& n) { return sender.Accept(n[0]); }));
  driver.Add("send", 3, Of([&](const auto& n) { return sender.Send(n[0], n[1], n[2]); }));
  return driver.Run();
}

absl::StatusOr<int> ServePlainReceivers(const std::shared_ptr<KvPool>& pool, int64_t receivers) {
  Receivers all(pool, receivers);
  Driver driver(pool);
  driver.Add("connect", 2, Of([&](const auto& n) { return all.Connect(n[0], n[1]); }));
  driver.Add("receive", 2, Of([&](const auto& n) { return all.Receive(n[0], n[1]); }));
  return driver.Run();
}

}  // namespace kvferry::bench
