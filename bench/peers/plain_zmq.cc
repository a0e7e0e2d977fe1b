#include "bench/peers/plain_zmq.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <zmq.hpp>

#include "base/clock.h"

namespace kvferry::bench {

struct PlainZmq::Sockets {
  zmq::context_t context{1};
  zmq::socket_t dealer{context, zmq::socket_type::dealer};
};

void ServePlainZmq() {
  zmq::context_t context{1};
  zmq::socket_t router(context, zmq::socket_type::router);
  router.bind("tcp://127.0.0.1:*");
  const nlohmann::json ready = {{"address", router.get(zmq::sockopt::last_endpoint)}};
  std::cout << ready.dump() << std::endl;
  for (;;) {
    zmq::message_t who;
    zmq::message_t what;
    if (!router.recv(who) || !router.recv(what) || what.empty()) return;
    router.send(who, zmq::send_flags::sndmore);
    router.send(what, zmq::send_flags::none);
  }
}

PlainZmq::PlainZmq(const std::string& address) : sockets_(std::make_unique<Sockets>()) {
  sockets_->dealer.connect(address);
}

PlainZmq::~PlainZmq() { sockets_->dealer.send(zmq::message_t(), zmq::send_flags::none); }

std::vector<double> PlainZmq::RoundTrips(int64_t count) {
  std::vector<double> seconds;
  std::array<char, 64> bytes{};
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(bytes.data(), &i, sizeof(i));
    zmq::message_t back;
    const Deadline begin = Clock::now();
    sockets_->dealer.send(zmq::buffer(bytes), zmq::send_flags::none);
    const auto received = sockets_->dealer.recv(back);
    seconds.push_back(SecondsBetween(begin, Clock::now()));
    if (received && back.size() == bytes.size() &&
        std::memcmp(back.data(), bytes.data(), bytes.size()) == 0) {
      continue;
    }
    std::cerr << "ZeroMQ: message " << i << " came back changed" << std::endl;
    std::exit(1);
  }
  return seconds;
}

}  // namespace kvferry::bench
