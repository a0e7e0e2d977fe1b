#include "bench/bulk_tcp.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/host_memory.h"
#include "base/slab.h"
#include "base/status.h"
#include "bench/on_threads.h"
#include "examples/two_node/pattern.h"
#include "examples/two_node/support.h"
#include "pool/bulk_copy.h"

namespace kvferry::bench {
namespace {

constexpr int kTimeoutSeconds = 60;
constexpr uint64_t kSalt = 99;

constexpr size_t kChunkBytes = 1 << 20;  // kvferry's.

// What a child is asked to send of its buffer.
struct Request {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  BulkTcp::Items items;
};

// What follows the bytes: a whole page, or the next bytes would lie in the system's pages a little
// further on than in the buffer. To a place 1 to 15 bytes ahead, modulo a page, `rep movsb` of an
// AMD Zen 3 or 4 copies at a twentieth of its speed
// (lunnova.dev/articles/ryzen-slow-short-rep-mov).
struct Reply {
  double cpu = 0;
  std::array<std::byte, 4096 - sizeof(double)> rest{};
};

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

// Calls use(chunk_bytes, for_each) for chunk after chunk of a share of items in an order that looks
// random and that both sides know; for_each(copy) calls copy(place, packed) for each item of
// the chunk: where it lies in the share and in the chunk.
template <typename Use>
absl::Status ForEachChunk(size_t bytes, size_t item_bytes, const Use& use) {
  const size_t count = bytes / item_bytes;
  std::vector<size_t> places(count);
  std::iota(places.begin(), places.end(), size_t{0});
  std::shuffle(places.begin(), places.end(), std::mt19937_64(count));
  const size_t step = std::max<size_t>(1, kChunkBytes / item_bytes);
  for (size_t first = 0; first < count; first += step) {
    const size_t end = std::min(first + step, count);
    const auto for_each = [&](const auto& copy) {
      for (size_t i = first; i < end; ++i) {
        copy(places[i] * item_bytes, (i - first) * item_bytes);
      }
    };
    KVFERRY_RETURN_IF_ERROR(use((end - first) * item_bytes, for_each));
  }
  return absl::OkStatus();
}

std::vector<std::byte> ChunkOf(size_t item_bytes) {
  return std::vector<std::byte>(std::max(kChunkBytes, item_bytes));
}

absl::Status SendPacked(int fd, const std::byte* share, size_t bytes, size_t item_bytes) {
  std::vector<std::byte> chunk = ChunkOf(item_bytes);
  return ForEachChunk(bytes, item_bytes, [&](size_t chunk_bytes, const auto& for_each) {
    CopyAhead<PlainCopy> copies;
    for_each([&](size_t place, size_t packed) {
      copies.Add(chunk.data() + packed, std::span(share + place, item_bytes));
    });
    copies.Finish();
    return SendAll(fd, chunk.data(), chunk_bytes);
  });
}

absl::Status ReceivePacked(int fd, std::byte* share, size_t bytes, size_t item_bytes) {
  std::vector<std::byte> chunk = ChunkOf(item_bytes);
  return ForEachChunk(bytes, item_bytes, [&](size_t chunk_bytes, const auto& for_each) {
    KVFERRY_RETURN_IF_ERROR(ReceiveAll(fd, chunk.data(), chunk_bytes));
    for_each([&](size_t place, size_t packed) {
      BulkCopy(share + place, chunk.data() + packed, item_bytes);
    });
    FinishBulkCopies();
    return absl::OkStatus();
  });
}

// Calls move(msghdr*), sendmsg(2) or recvmsg(2), until all pieces have gone or come.
template <typename Move>
absl::Status MovePieces(std::vector<iovec>* pieces, const Move& move) {
  for (size_t at = 0; at < pieces->size();) {
    msghdr message{};
    message.msg_iov = &(*pieces)[at];
    message.msg_iovlen = std::min<size_t>(IOV_MAX, pieces->size() - at);
    const ssize_t n = move(&message);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Errno("sendmsg or recvmsg");
    for (auto left = static_cast<size_t>(n); left > 0;) {
      iovec& piece = (*pieces)[at];
      const size_t take = std::min(left, piece.iov_len);
      piece = {static_cast<char*>(piece.iov_base) + take, piece.iov_len - take};
      left -= take;
      if (piece.iov_len == 0) ++at;
    }
  }
  return absl::OkStatus();
}

template <typename Move>
absl::Status MoveStraight(std::byte* share, size_t bytes, size_t item_bytes, const Move& move) {
  std::vector<iovec> pieces;
  return ForEachChunk(bytes, item_bytes, [&](size_t /*chunk_bytes*/, const auto& for_each) {
    pieces.clear();
    for_each([&](size_t place, size_t /*packed*/) {
      pieces.push_back({share + place, item_bytes});
    });
    return MovePieces(&pieces, move);
  });
}

absl::Status SendShare(int fd, std::byte* share, const Request& request) {
  const auto [item_bytes, straight] = request.items;
  if (item_bytes == 0) return SendAll(fd, share, request.bytes);
  if (!straight) return SendPacked(fd, share, request.bytes, item_bytes);
  return MoveStraight(share, request.bytes, item_bytes,
                      [fd](const msghdr* message) { return sendmsg(fd, message, MSG_NOSIGNAL); });
}

absl::Status ReceiveShare(int fd, std::byte* share, const Request& request) {
  const auto [item_bytes, straight] = request.items;
  if (item_bytes == 0) return ReceiveAll(fd, share, request.bytes);
  if (!straight) return ReceivePacked(fd, share, request.bytes, item_bytes);
  return MoveStraight(share, request.bytes, item_bytes,
                      [fd](msghdr* message) { return recvmsg(fd, message, 0); });
}

void SetTimeouts(int fd) {
  const timeval timeout{kTimeoutSeconds, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
}

// Or the last words of a transfer would wait 40 ms for an acknowledgement of those before.
void SendAtOnce(int fd) {
  const int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

// Of what is sent from here; no-op for "".
absl::Status SetCongestionControl(int fd, const std::string& name) {
  if (name.empty() || setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), name.size()) == 0) {
    return absl::OkStatus();
  }
  return Errno(("congestion control '" + name + "'").c_str());
}

UniqueFd NewSocket() { return UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

absl::StatusOr<UniqueFd> Listen(const std::string& host) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) {
    return absl::InvalidArgumentError(absl::StrCat("'", host, "' is no IPv4 address"));
  }
  UniqueFd listener = NewSocket();
  if (!listener.valid() ||
      bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener.get(), 1) != 0) {
    return Errno("listening socket");
  }
  SetTimeouts(listener.get());  // A child may have ended before it connects.
  return listener;
}

absl::StatusOr<sockaddr_in> AddressOf(int listener) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return Errno("getsockname");
  }
  return address;
}

absl::StatusOr<UniqueFd> Connect(const sockaddr_in& address, const std::string& congestion) {
  UniqueFd client = NewSocket();
  KVFERRY_RETURN_IF_ERROR(SetCongestionControl(client.get(), congestion));
  if (!client.valid() ||
      connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Errno("connecting socket");
  }
  SendAtOnce(client.get());
  return client;
}

absl::Status Join(const std::string& netns) {
  if (netns.empty()) return absl::OkStatus();
  const UniqueFd fd(open(netns.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid() || setns(fd.get(), CLONE_NEWNET) != 0) return Errno(netns.c_str());
  return absl::OkStatus();
}

absl::Status RunOn(const std::vector<int>& cpus) {
  if (cpus.empty()) return absl::OkStatus();
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(static_cast<size_t>(cpu), &set);
  return sched_setaffinity(0, sizeof(set), &set) == 0 ? absl::OkStatus() : Errno("processors");
}

absl::Status Answer(int fd, const Request& request, std::span<std::byte> source) {
  const double before = examples::CpuSeconds();
  KVFERRY_RETURN_IF_ERROR(SendShare(fd, source.data() + request.offset, request));
  const Reply reply{examples::CpuSeconds() - before};
  return SendAll(fd, &reply, sizeof(reply));
}

// A child: answers requests until the parent has gone. It sleeps in between, however long.
absl::Status Serve(int listener, const BulkTcp::Options& options, std::span<std::byte> source) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  KVFERRY_RETURN_IF_ERROR(RunOn(options.senders_cpus));
  KVFERRY_ASSIGN_OR_RETURN(const sockaddr_in address, AddressOf(listener));
  KVFERRY_RETURN_IF_ERROR(Join(options.senders_netns));
  KVFERRY_ASSIGN_OR_RETURN(const UniqueFd fd, Connect(address, options.congestion_control));
  Request request;
  while (ReceiveAll(fd.get(), &request, sizeof(request)).ok() && request.offset <= source.size() &&
         request.bytes <= source.size() - request.offset) {
    KVFERRY_RETURN_IF_ERROR(Answer(fd.get(), request, source));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<BulkTcp>> BulkTcp::Start(const Options& options) {
  auto bulk = std::make_unique<BulkTcp>();
  const auto size = static_cast<size_t>(options.bytes);
  KVFERRY_ASSIGN_OR_RETURN(bulk->memory_, MapSlab(options.bytes));
  UseHugePages(bulk->memory_.get(), options.bytes);  // As kvferry's pools, and NumPy's arrays.
  bulk->bytes_ = std::span(bulk->memory_.get(), size);
  std::memset(bulk->bytes_.data(), 0, size);
  // Filled here and read by all children, which inherit it.
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> source, MapSlab(options.bytes));
  UseHugePages(source.get(), options.bytes);
  examples::Pattern(kSalt).Fill({source.get(), size}, 0, 0, 0);
  KVFERRY_ASSIGN_OR_RETURN(const UniqueFd listener, Listen(options.host));
  for (int i = 0; i < options.streams; ++i) {
    KVFERRY_RETURN_IF_ERROR(bulk->AddStream(listener.get(), options, {source.get(), size}));
  }
  return bulk;
}

absl::Status BulkTcp::AddStream(int listener, const Options& options, std::span<std::byte> source) {
  const pid_t child = fork();
  if (child < 0) return Errno("fork");
  if (child == 0) {
    streams_.clear();  // Or an older child would not see that the parent has gone.
    const absl::Status served = Serve(listener, options, source);
    if (!served.ok()) std::fprintf(stderr, "bulk TCP child: %s\n", served.ToString().c_str());
    _exit(served.ok() ? 0 : 1);
  }
  UniqueFd stream(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!stream.valid()) return Errno("accept");
  SetTimeouts(stream.get());
  SendAtOnce(stream.get());
  streams_.push_back(std::move(stream));
  return absl::OkStatus();
}

absl::StatusOr<double> BulkTcp::Receive(int stream, size_t first, size_t end, Items items) {
  const int fd = streams_[static_cast<size_t>(stream)].get();
  const Request request{first, end - first, items};
  KVFERRY_RETURN_IF_ERROR(SendAll(fd, &request, sizeof(request)));
  KVFERRY_RETURN_IF_ERROR(ReceiveShare(fd, bytes_.data() + first, request));
  Reply reply;
  KVFERRY_RETURN_IF_ERROR(ReceiveAll(fd, &reply, sizeof(reply)));
  return reply.cpu;
}

absl::StatusOr<BulkTcp::Result> BulkTcp::Measure(size_t bytes, int streams, Items items) {
  if (bytes > bytes_.size() || streams < 1 || static_cast<size_t>(streams) > streams_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("cannot send ", bytes, " bytes over ", streams,
                                                   " streams; at most ", bytes_.size(), " over ",
                                                   streams_.size()));
  }
  const size_t unit = std::max<size_t>(1, items.bytes);
  if (bytes % unit != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(bytes, " bytes are no whole number of items of ", items.bytes));
  }
  const auto count = static_cast<size_t>(streams);
  const auto share = [&](size_t stream) { return bytes / unit * stream / count * unit; };
  std::vector<absl::StatusOr<double>> sender_cpu(count);
  const double cpu_before = examples::CpuSeconds();
  const Deadline begin = Clock::now();
  OnThreads(streams, [&](int stream) {
    const auto i = static_cast<size_t>(stream);
    sender_cpu[i] = Receive(stream, share(i), share(i + 1), items);
  });
  Result result{SecondsBetween(begin, Clock::now()), examples::CpuSeconds() - cpu_before};
  for (const absl::StatusOr<double>& cpu : sender_cpu) {
    KVFERRY_RETURN_IF_ERROR(cpu.status());
    result.cpu += *cpu;
  }
  if (!examples::Pattern(kSalt).Matches(bytes_.first(bytes), 0, 0, 0)) {
    return absl::DataLossError("the TCP streams delivered other bytes");
  }
  std::memset(bytes_.data(), 0, bytes);
  return result;
}

}  // namespace kvferry::bench
