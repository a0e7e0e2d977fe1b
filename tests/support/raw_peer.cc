#include "tests/support/raw_peer.h"

#include <gtest/gtest.h>

#include "tests/support/status.h"
#include "transport/control/codec.h"

namespace kvferry {
namespace {

bool WaitReadable(zmq::socket_t& socket, Deadline deadline) {
  zmq::pollitem_t items[] = {{socket.handle(), 0, ZMQ_POLLIN, 0}};
  return zmq::poll(items, 1, std::chrono::milliseconds(MsUntil(deadline, Clock::now()))) > 0;
}

std::optional<Message> Decode(const zmq::message_t& frame) {
  absl::StatusOr<Message> message =
      DecodeMessage({static_cast<const std::byte*>(frame.data()), frame.size()});
  if (!message.ok()) return std::nullopt;
  return *std::move(message);
}

}  // namespace

std::string WithVersion(std::string encoded, int version) {
  const size_t at = encoded.find("\xa1v\x01");
  EXPECT_NE(at, std::string::npos);
  encoded[at + 2] = static_cast<char>(version);
  return encoded;
}

RawDecode::RawDecode(const std::string& address, const Prepare& prepare)
    : socket_(context_, zmq::socket_type::dealer) {
  socket_.set(zmq::sockopt::linger, 0);
  prepare(socket_);
  socket_.connect(address);
}

void RawDecode::Send(const Message& message) { SendFrames({EncodeMessage(message)}); }

void RawDecode::SendFrames(const std::vector<std::string>& frames) {
  for (size_t i = 0; i < frames.size(); ++i) {
    const bool last = i + 1 == frames.size();
    socket_.send(zmq::buffer(frames[i]), last ? zmq::send_flags::none : zmq::send_flags::sndmore);
  }
}

std::optional<Message> RawDecode::Receive(Deadline deadline) {
  while (WaitReadable(socket_, deadline)) {
    zmq::message_t frame;
    if (!socket_.recv(frame, zmq::recv_flags::dontwait)) continue;
    if (std::optional<Message> message = Decode(frame)) return message;
  }
  return std::nullopt;
}

RawPrefill::RawPrefill() : socket_(context_, zmq::socket_type::router) {
  socket_.set(zmq::sockopt::linger, 0);
  socket_.bind("tcp://127.0.0.1:*");
  address_ = socket_.get(zmq::sockopt::last_endpoint);
}

std::optional<std::pair<std::string, Message>> RawPrefill::Receive(Deadline deadline) {
  while (WaitReadable(socket_, deadline)) {
    zmq::message_t peer;
    zmq::message_t frame;
    if (!socket_.recv(peer, zmq::recv_flags::dontwait)) continue;
    if (!socket_.recv(frame, zmq::recv_flags::none)) continue;
    if (std::optional<Message> message = Decode(frame)) return {{peer.to_string(), *message}};
  }
  return std::nullopt;
}

void RawPrefill::SendBytes(const std::string& peer, const std::string& bytes) {
  socket_.send(zmq::buffer(peer), zmq::send_flags::sndmore);
  socket_.send(zmq::buffer(bytes), zmq::send_flags::none);
}

}  // namespace kvferry
