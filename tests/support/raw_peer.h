#pragma once

// Peers that speak ZeroMQ by hand, and so can say what no endpoint of ours would.

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "base/clock.h"
#include "pool/kv_layout.h"
#include "transport/messages.h"

namespace kvferry {

// An encoded message as a process of another protocol version would send it.
std::string WithVersion(std::string encoded, int version);

// Dials a prefill endpoint.
class RawDecode {
 public:
  using Prepare = std::function<void(zmq::socket_t&)>;
  // prepare: sets options of the socket before it connects.
  explicit RawDecode(
      const std::string& address, const Prepare& prepare = [](zmq::socket_t&) {});
  void Send(const Message& message);
  void SendFrames(const std::vector<std::string>& frames);
  // The next message that decodes, or nothing by the deadline.
  std::optional<Message> Receive(Deadline deadline);

 private:
  zmq::context_t context_{1};
  zmq::socket_t socket_;
};

// Listens like a prefill endpoint.
class RawPrefill {
 public:
  RawPrefill();
  const std::string& address() const { return address_; }
  // A message and who sent it.
  std::optional<std::pair<std::string, Message>> Receive(Deadline deadline);
  void SendBytes(const std::string& peer, const std::string& bytes);

 private:
  zmq::context_t context_{1};
  zmq::socket_t socket_;
  std::string address_;
};

}  // namespace kvferry
