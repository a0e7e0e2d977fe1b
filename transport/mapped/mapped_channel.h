#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "base/epoll.h"
#include "base/unique_fd.h"
#include "transport/backlog.h"
#include "transport/data_plane.h"
#include "transport/mapped/mapped_packets.h"
#include "transport/mapped/unix_socket.h"

namespace kvferry::mapped {

// One end of a connection, and what could not be sent yet: at most a packet for each chunk of
// an arena, a credit for each transfer, and kMaxMessagesWaiting in parts of messages.
class Channel {
 public:
  // What comes is told by `epoll` under `id`. An id that breaks while it is given something to send
  // goes to `failed`. Both outlive it.
  Channel(uint64_t id, UniqueFd socket, Epoll* epoll, std::vector<uint64_t>* failed);
  Channel(Channel&&) noexcept = default;

  uint64_t id() const { return id_; }
  const UniqueFd& socket() const { return socket_; }
  const Backlog& backlog() const { return backlog_; }
  size_t num_unsent() const { return unsent_.size(); }
  // Nothing more is sent.
  bool broken() const { return broken_; }
  void Break() { broken_ = true; }

  absl::Status Watch() const;
  template <typename Message>
  void Push(const Message& message) {
    PushBytes(std::as_bytes(std::span(&message, 1)));
  }
  void PushBytes(std::span<const std::byte> packet);
  // Of those of a transfer that wait, the last is sent.
  void PushCredit(const CreditHeader& credit);
  // Once the socket takes more.
  void Flush();

 private:
  bool waits() const { return !unsent_.empty() || !credits_.empty(); }
  // Past what waits.
  SocketResult SendNow(std::span<const std::byte> packet);
  SocketResult FlushCredit();
  void AwaitRoom(bool await);

  uint64_t id_;
  UniqueFd socket_;
  Epoll* epoll_;
  std::vector<uint64_t>* failed_;
  std::deque<std::vector<std::byte>> unsent_;
  // By transfer: the last of each. They do not wait for those, of which there may always be some:
  // without them the peer sends no more chunks.
  absl::btree_map<uint64_t, uint64_t> credits_;
  uint64_t last_credited_ = 0;  // Whose was sent last: the next one's is the next, round and round.
  Backlog backlog_;
  bool awaits_room_ = false;  // Woken when the socket takes more.
  bool broken_ = false;
};

}  // namespace kvferry::mapped
