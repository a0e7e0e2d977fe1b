#include "tests/support/control_relay.h"

#include <utility>

#include "tests/support/status.h"
#include "transport/control/codec.h"

namespace kvferry {
namespace {

constexpr std::chrono::milliseconds kLookForStop{20};

std::string Receive(zmq::socket_t& socket) {
  zmq::message_t frame;
  return socket.recv(frame, zmq::recv_flags::none) ? frame.to_string() : "";
}

void SendFrame(zmq::socket_t& socket, const std::string& frame) {
  socket.send(zmq::buffer(frame), zmq::send_flags::none);
}

// As of a peer that takes no messages over links.
void TakeSessionOut(MessageBody* body) {
  if (auto* hello = std::get_if<HelloMsg>(body)) hello->data.session = 0;
  if (auto* welcome = std::get_if<WelcomeMsg>(body)) welcome->data.session = 0;
}

}  // namespace

std::string ControlRelay::Heard::function() const {
  const auto* call = std::get_if<CallMsg>(&message.body);
  return call == nullptr ? "" : call->function;
}

ControlRelay::ControlRelay(std::string address, Judge judge)
    : address_(std::move(address)),
      judge_(std::move(judge)),
      diallers_(context_, zmq::socket_type::router) {
  diallers_.set(zmq::sockopt::linger, 0);
  diallers_.bind("tcp://127.0.0.1:*");
  own_address_ = diallers_.get(zmq::sockopt::last_endpoint);
  thread_ = std::thread([this] { Run(); });
}

ControlRelay::~ControlRelay() {
  stop_ = true;
  thread_.join();
}

void ControlRelay::Run() {
  while (!stop_) {
    std::vector<zmq::pollitem_t> items = {{diallers_.handle(), 0, ZMQ_POLLIN, 0}};
    std::vector<std::string> names;
    for (auto& [name, connection] : connections_) {
      if (connection.broken) continue;
      names.push_back(name);
      items.push_back({connection.listener.handle(), 0, ZMQ_POLLIN, 0});
    }
    zmq::poll(items, kLookForStop);
    for (size_t i = 0; i < names.size(); ++i) {
      Connection& connection = connections_.at(names[i]);
      if ((items[i + 1].revents & ZMQ_POLLIN) == 0) continue;
      OnFrame(names[i], connection, Receive(connection.listener), /*from_dialler=*/false);
    }
    if ((items[0].revents & ZMQ_POLLIN) == 0) continue;
    const std::string name = Receive(diallers_);
    OnFrame(name, ConnectionOf(name), Receive(diallers_), /*from_dialler=*/true);
  }
}

ControlRelay::Connection& ControlRelay::ConnectionOf(const std::string& dialler) {
  const auto [it, is_new] = connections_.try_emplace(dialler);
  if (is_new) {
    it->second.listener = zmq::socket_t(context_, zmq::socket_type::dealer);
    it->second.listener.set(zmq::sockopt::linger, 0);
    it->second.listener.connect(address_);
  }
  return it->second;
}

void ControlRelay::SendToDialler(const std::string& dialler, const std::string& frame) {
  diallers_.send(zmq::buffer(dialler), zmq::send_flags::sndmore);
  SendFrame(diallers_, frame);
}

void ControlRelay::OnFrame(const std::string& dialler, Connection& connection,
                           const std::string& received, bool from_dialler) {
  if (connection.broken) return;
  Message message =
      Must(DecodeMessage({reinterpret_cast<const std::byte*>(received.data()), received.size()}));
  TakeSessionOut(&message.body);
  const std::string frame = EncodeMessage(message);
  Heard heard{message, from_dialler};
  const Verdict verdict = judge_(heard);
  if (!from_dialler && connection.held) {
    SendFrame(connection.listener, *std::exchange(connection.held, std::nullopt));
  }
  const auto answer = [&](MessageBody body) {
    return EncodeMessage({message.to_epoch, message.from_epoch, std::move(body)});
  };
  switch (verdict) {
    case Verdict::kPass:
      if (from_dialler) {
        SendFrame(connection.listener, frame);
      } else {
        SendToDialler(dialler, frame);
      }
      break;
    case Verdict::kDrop:
      break;
    case Verdict::kBreak: {
      const auto [from, to] = from_dialler ? std::pair(message.from_epoch, message.to_epoch)
                                           : std::pair(message.to_epoch, message.from_epoch);
      SendFrame(connection.listener, EncodeMessage({from, to, ByeMsg{}}));
      [[fallthrough]];
    }
    case Verdict::kBreakUnnoticed:
      connection.broken = true;
      SendToDialler(dialler, EncodeMessage({1, 0, RefuseMsg{0, absl::NotFoundError("broken")}}));
      break;
    case Verdict::kHold:
      EXPECT_TRUE(from_dialler);
      connection.held = frame;
      break;
    case Verdict::kAnswer:
      EXPECT_TRUE(from_dialler);
      SendToDialler(dialler, answer(heard.answer));
      break;
  }
}

}  // namespace kvferry
