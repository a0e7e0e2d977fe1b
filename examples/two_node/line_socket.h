#pragma once

// Lines of text over TCP: how the two programs of this example hand a ticket over, in place of the
// router that a serving system has. Every wait has a deadline and a line has a longest length.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "examples/two_node/support.h"

namespace kvferry::examples {

// Owner of a file descriptor.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  ~Fd();
  Fd(Fd&& other) noexcept : fd_(other.Release()) {}
  Fd& operator=(Fd&& other) noexcept;
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;

  int get() const { return fd_; }
  int Release();

 private:
  int fd_;
};

// One connection. Not thread-safe.
class LineSocket {
 public:
  // Tries again until the deadline while nobody listens there.
  static absl::StatusOr<LineSocket> Connect(const HostPort& address, Deadline deadline);

  absl::Status Send(absl::string_view line, Deadline deadline);
  // Without the newline. UNAVAILABLE when the peer has closed, DEADLINE_EXCEEDED,
  // RESOURCE_EXHAUSTED for a line longer than kMaxLineBytes.
  absl::StatusOr<std::string> Receive(Deadline deadline);

  // Numeric addresses of the two ends.
  std::string local_host() const;
  std::string peer_host() const;

  static constexpr size_t kMaxLineBytes = 1 << 20;

 private:
  friend class LineListener;
  explicit LineSocket(Fd fd) : fd_(std::move(fd)) {}

  Fd fd_;
  std::string received_;  // Beyond the last line returned.
};

class LineListener {
 public:
  // Port 0 takes a free one.
  static absl::StatusOr<LineListener> Listen(const HostPort& address);
  absl::StatusOr<LineSocket> Accept(Deadline deadline);
  int64_t port() const { return port_; }

 private:
  LineListener(Fd fd, int64_t port) : fd_(std::move(fd)), port_(port) {}
  Fd fd_;
  int64_t port_;
};

}  // namespace kvferry::examples
