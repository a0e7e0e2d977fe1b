// What the machine itself allows for the same work (driver.h). Besides the driver's commands:
//
//   memcpy SALT LOCAL REMOTE   copies the pages of one pool to another of this process, one memcpy
//   a page and
//                              buffer, in the order of kvferry's stream; then compares
//   tcp BYTES                  as many bytes from a child process over one loopback TCP connection,
//   out of
//                              one buffer into another; then compares
//
// Both answer {"seconds": S, "cpu": of all processes, "verified": true}.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/slab.h"
#include "base/status.h"
#include "bench/driver.h"
#include "examples/two_node/layout_flags.h"
#include "examples/two_node/pattern.h"
#include "examples/two_node/support.h"

namespace kvferry::bench {
namespace {

constexpr int kTcpTimeoutSeconds = 60;
constexpr uint64_t kTcpSalt = 99;

absl::Status Errno(const char* what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

absl::Status SendAll(int fd, const void* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = send(fd, static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
    if (n < 0 && errno != EINTR) return Errno("send");
    if (n > 0) done += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

absl::Status ReceiveAll(int fd, void* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = recv(fd, static_cast<char*>(data) + done, bytes - done, 0);
    if (n == 0) return absl::UnavailableError("recv: the other process has gone");
    if (n < 0 && errno != EINTR) return Errno("recv");
    if (n > 0) done += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

// A connected pair of loopback TCP sockets.
absl::StatusOr<std::pair<int, int>> TcpPair() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0 || client < 0 || bind(listener, generic, size) != 0 ||
      listen(listener, 1) != 0 || getsockname(listener, generic, &size) != 0 ||
      connect(client, generic, size) != 0) {
    return Errno("loopback socket");
  }
  const int server = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  close(listener);
  if (server < 0) return Errno("accept");
  const timeval timeout{kTcpTimeoutSeconds, 0};
  for (const int fd : {client, server}) {
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  }
  return std::pair(client, server);
}

// The sending process: for each length it is sent, that many bytes, then its CPU seconds meanwhile.
[[noreturn]] void Sender(int fd, std::span<const std::byte> bytes) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  uint64_t length = 0;
  // An idle sender waits for longer than any one transfer may take.
  const timeval forever{};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof(forever));
  while (ReceiveAll(fd, &length, sizeof(length)).ok() && length <= bytes.size()) {
    const double before = examples::CpuSeconds();
    if (!SendAll(fd, bytes.data(), length).ok()) break;
    const double cpu = examples::CpuSeconds() - before;
    if (!SendAll(fd, &cpu, sizeof(cpu)).ok()) break;
  }
  _exit(0);
}

class TcpStream {
 public:
  // Forks: call it before any thread starts.
  absl::Status Start(int64_t bytes) {
    KVFERRY_ASSIGN_OR_RETURN(memory_, MapSlab(bytes));
    bytes_ = std::span(memory_.get(), static_cast<size_t>(bytes));
    KVFERRY_ASSIGN_OR_RETURN(const auto fds, TcpPair());
    const pid_t child = fork();
    if (child < 0) return Errno("fork");
    if (child == 0) {
      close(fds.first);
      examples::Pattern(kTcpSalt).Fill(bytes_, 0, 0, 0);
      Sender(fds.second, bytes_);
    }
    close(fds.second);
    fd_ = fds.first;
    std::memset(bytes_.data(), 0, bytes_.size());
    return absl::OkStatus();
  }

  Answer Measure(const Words& words) {
    uint64_t length = 0;
    if (!absl::SimpleAtoi(words[0], &length) || length > bytes_.size()) {
      return absl::InvalidArgumentError(absl::StrCat("cannot send ", words[0], " bytes"));
    }
    const double cpu_before = examples::CpuSeconds();
    const Deadline begin = Clock::now();
    KVFERRY_RETURN_IF_ERROR(SendAll(fd_, &length, sizeof(length)));
    KVFERRY_RETURN_IF_ERROR(ReceiveAll(fd_, bytes_.data(), length));
    const double seconds = SecondsBetween(begin, Clock::now());
    double cpu = 0;
    KVFERRY_RETURN_IF_ERROR(ReceiveAll(fd_, &cpu, sizeof(cpu)));
    cpu += examples::CpuSeconds() - cpu_before;
    if (!examples::Pattern(kTcpSalt).Matches(bytes_.first(length), 0, 0, 0)) {
      return absl::DataLossError("the TCP stream delivered other bytes");
    }
    std::memset(bytes_.data(), 0, length);
    return nlohmann::json{{"seconds", seconds}, {"cpu", cpu}, {"verified", true}};
  }

 private:
  std::shared_ptr<std::byte> memory_;
  std::span<std::byte> bytes_;
  int fd_ = -1;
};

Answer MeasureMemcpy(const KvPool& source, const KvPool& target, const Words& words) {
  uint64_t salt = 0;
  if (!absl::SimpleAtoi(words[0], &salt)) return absl::InvalidArgumentError("memcpy: no salt");
  KVFERRY_ASSIGN_OR_RETURN(const PageRuns local, examples::ParseRuns(words[1]));
  KVFERRY_ASSIGN_OR_RETURN(const PageRuns remote, examples::ParseRuns(words[2]));
  KVFERRY_RETURN_IF_ERROR(local.CheckWithin(target.num_pages()));
  KVFERRY_RETURN_IF_ERROR(remote.CheckWithin(source.num_pages()));
  const std::vector<int64_t> to = local.ToPages();
  const std::vector<int64_t> from = remote.ToPages();
  if (to.size() != from.size()) return absl::InvalidArgumentError("memcpy: lists of two lengths");

  const KvLayout& layout = source.layout();
  const double cpu_before = examples::CpuSeconds();
  const Deadline begin = Clock::now();
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
      const BufferInfo& in = source.buffer(layer, tensor);
      const BufferInfo& out = target.buffer(layer, tensor);
      for (size_t i = 0; i < to.size(); ++i) {
        std::memcpy(out.address + to[i] * out.item_bytes, in.address + from[i] * in.item_bytes,
                    in.item_bytes);
      }
    }
  }
  const double seconds = SecondsBetween(begin, Clock::now());
  const double cpu = examples::CpuSeconds() - cpu_before;
  KVFERRY_RETURN_IF_ERROR(examples::Pattern(salt).Verify(target, local, remote));
  examples::ZeroPages(target, local);
  return nlohmann::json{{"seconds", seconds}, {"cpu", cpu}, {"verified", true}};
}

struct Flags {
  examples::LayoutFlags layout;
  int64_t pool_pages = 0;
  int64_t tcp_bytes = 0;
};

absl::StatusOr<int> Run(const Flags& flags) {
  KVFERRY_ASSIGN_OR_RETURN(const KvLayout layout, flags.layout.Make());
  TcpStream tcp;
  KVFERRY_RETURN_IF_ERROR(tcp.Start(flags.tcp_bytes));
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<KvPool> source,
                           TouchedPool(layout, flags.pool_pages));
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<KvPool> target,
                           TouchedPool(layout, flags.pool_pages));
  Driver driver(source);
  driver.Add("memcpy", 3,
             [&](const Words& words) { return MeasureMemcpy(*source, *target, words); });
  driver.Add("tcp", 1, [&](const Words& words) { return tcp.Measure(words); });
  return driver.Run();
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  CLI::App app("Copies and bulk TCP without kvferry, for comparison; bench/run.py drives it.");
  kvferry::bench::Flags flags;
  app.add_option("--pool-pages", flags.pool_pages, "pages of each pool")->required();
  app.add_option("--tcp-bytes", flags.tcp_bytes, "most bytes of a tcp command")->required();
  flags.layout.AddTo(&app);
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<int> rc = kvferry::bench::Run(flags);
  return rc.ok() ? *rc : kvferry::bench::Fail("kvferry_bench_limits", rc.status());
}
