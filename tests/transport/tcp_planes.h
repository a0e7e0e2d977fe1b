#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "tests/support/captured_log.h"
#include "tests/support/status.h"
#include "tests/support/wait_for.h"
#include "tests/transport/recorder.h"
#include "transport/tcp/tcp_data_plane.h"
#include "transport/tcp/tcp_door.h"
#include "transport/tcp/tcp_frames.h"
#include "transport/tcp/tcp_socket.h"

namespace kvferry {

inline std::vector<std::byte> RandomBytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// The bytes of something that goes over the wire as it lies in memory.
template <typename T>
std::string TextOf(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}
inline std::string TextOf(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Two sides in one process, a that dials and b behind the door, progressed by hand.
class TcpPlanes : public testing::Test {
 protected:
  explicit TcpPlanes(int64_t connect_timeout_ms = 60000) {
    config_.connect_timeout_ms = connect_timeout_ms;
    door_ = Must(TcpDoor::Create(config_, "127.0.0.1", &metrics_));
  }
  void Step() {
    for (TcpDoor::Arrival& arrival : door_->Progress()) {
      arrived_.push_back(arrival.lane);
      const int bytes = 3001;
      if (small_buffers_) {
        setsockopt(arrival.connection.socket.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
      }
      ASSERT_TRUE(IsOk(b_->Join(link_b_, std::move(arrival.connection))));
    }
    if (a_ != nullptr) {
      a_->Tick(Clock::now());
      a_->Progress(&at_a_);
    }
    if (b_ != nullptr) {
      b_->Tick(Clock::now());
      b_->Progress(&at_b_);
    }
    door_->Tick(Clock::now());
  }
  template <typename Predicate>
  bool StepsUntil(const Predicate& holds) {
    return StepUntil([&] { Step(); }, holds);
  }
  void Await() {
    link_b_ = b_->Await(DeadlineInMs(config_.connect_timeout_ms));
    address_ = door_->Expect(link_b_, 1, DeadlineInMs(config_.connect_timeout_ms));
  }
  TcpConnection Connection(const std::string& token, const std::string& answer) {
    return {Must(DialTcp(address_.host, address_.port)), TcpHello::With(token, 0).Bytes(),
            TcpHello::With(answer, 0).Bytes(), "the peer"};
  }
  // By `dial`, to who is awaited.
  TcpConnection ToDial(std::function<absl::StatusOr<UniqueFd>()> dial) const {
    return {UniqueFd(),
            TcpHello::With(address_.token, 0).Bytes(),
            TcpHello::With(address_.answer, 0).Bytes(),
            "the peer",
            0,
            std::move(dial)};
  }
  void Connect() {
    Await();
    link_a_ = Must(a_->Open(Connection(address_.token, address_.answer), DeadlineInMs(5000)));
  }
  // A socket of somebody who has said these bytes.
  UniqueFd Says(const std::string& bytes) {
    UniqueFd socket = Must(DialTcp(address_.host, address_.port));
    pollfd writable{socket.get(), POLLOUT, 0};
    EXPECT_EQ(poll(&writable, 1, 5000), 1);
    EXPECT_EQ(send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    return socket;
  }
  // After the door's answer, if there was one.
  bool IsClosed(const UniqueFd& socket) {
    return StepsUntil([&] {
      char bytes[64];
      const ssize_t got = recv(socket.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
      return got == 0 || (got < 0 && errno != EAGAIN);
    });
  }

  CapturedLog log_;
  Config config_;
  Metrics metrics_;
  std::unique_ptr<TcpDoor> door_;
  std::unique_ptr<TcpDataPlane> a_ = Must(TcpDataPlane::Create());
  std::unique_ptr<TcpDataPlane> b_ = Must(TcpDataPlane::Create());
  Recorder at_a_;
  Recorder at_b_;
  TcpAddress address_;
  bool small_buffers_ = false;  // Of what b sends from.
  LinkId link_a_ = 0;
  LinkId link_b_ = 0;
  std::vector<int64_t> arrived_;
};

// Where somebody is waited for.
class TcpPlanesInTime : public TcpPlanes {
 protected:
  TcpPlanesInTime() : TcpPlanes(300) {}
};

}  // namespace kvferry
