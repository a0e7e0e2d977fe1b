#pragma once

// The control plane between endpoints, with a fault wherever a test wants one.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>
#include <zmq.hpp>

#include "transport/messages.h"

namespace kvferry {

// Passes on what endpoints that dial it and the one that listens at `address` say to each other.
// Their data planes do not go through it, and messages over these are refused in the name of either
// side, so that all come this way. A judge sees each message first.
class ControlRelay {
 public:
  enum class Verdict {
    kPass,
    kDrop,
    // It and all that follows on its connection is lost, and both sides learn it at once.
    kBreak,
    // The same, and only the side that dialled learns it: the other has to find out by silence.
    kBreakUnnoticed,
    // It passes just before the next message the other way.
    kHold,
    // It does not pass; its sender gets `answer` instead.
    kAnswer,
  };
  struct Heard {
    const Message& message;
    bool from_dialler;
    MessageBody answer{PongMsg{}};  // Of kAnswer.

    // The call's function or "".
    std::string function() const;
  };
  // On the relay's thread, for one message after another. It may wait; nothing gets through
  // meanwhile.
  using Judge = std::function<Verdict(Heard&)>;

  ControlRelay(std::string address, Judge judge);
  ~ControlRelay();
  ControlRelay(const ControlRelay&) = delete;
  ControlRelay& operator=(const ControlRelay&) = delete;

  // Where to dial.
  const std::string& address() const { return own_address_; }

 private:
  struct Connection {
    zmq::socket_t listener;  // To the one that listens.
    bool broken = false;
    std::optional<std::string> held{};  // On its way there.
  };

  void Run();
  Connection& ConnectionOf(const std::string& dialler);
  void OnFrame(const std::string& dialler, Connection& connection, const std::string& received,
               bool from_dialler);
  void SendToDialler(const std::string& dialler, const std::string& frame);

  const std::string address_;
  const Judge judge_;
  zmq::context_t context_{1};
  zmq::socket_t diallers_;
  std::string own_address_;
  std::map<std::string, Connection> connections_;  // The relay's thread's alone.
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace kvferry
