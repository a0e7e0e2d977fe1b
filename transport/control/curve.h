#pragma once

// Which peers the control plane's connections are made with: those that have the deployment's key.

#include <array>
#include <cstdint>
#include <string>
#include <zmq.hpp>

#include "absl/status/statusor.h"

namespace kvferry {

// Two Curve25519 key pairs that everybody with the same deployment key has: one of whoever listens,
// one of whoever dials. docs/wire_protocol.md, "Keys", says how they follow from it.
struct CurveKeys {
  using Key = std::array<uint8_t, 32>;
  struct Pair {
    Key secret{};
    Key open{};  // The public one; outside the deployment nobody knows it either.
  };
  Pair listener;
  Pair dialler;
};

// Of the deployment key in that file: 64 hexadecimal digits, and white space around them.
// INVALID_ARGUMENT, naming the file and what is wrong with it; UNIMPLEMENTED if ZeroMQ has no
// CURVE.
absl::StatusOr<CurveKeys> ReadCurveKeys(const std::string& key_file);

// Lets ZeroMQ's sockets make connections with the deployment's peers alone, encrypted (CurveZMQ,
// https://rfc.zeromq.org/spec/26/). ZeroMQ asks for each that has come whether to take it (ZAP,
// https://rfc.zeromq.org/spec/27/); whoever polls calls Answer(). Not thread-safe.
class Doorkeeper {
 public:
  // Throws zmq::error_t. The context outlives it, and has no other doorkeeper.
  Doorkeeper(zmq::context_t& context, const CurveKeys& keys);

  // Before bind() and connect(); throw zmq::error_t.
  void Guard(zmq::socket_t& listener) const;
  void Introduce(zmq::socket_t& dialler) const;

  // Readable when there is a question.
  zmq::socket_t& questions() { return questions_; }
  void Answer();

 private:
  const CurveKeys keys_;
  zmq::socket_t questions_;
};

}  // namespace kvferry
