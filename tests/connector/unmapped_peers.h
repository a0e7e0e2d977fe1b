#pragma once

// Peers on this host, played by hand, that map no memory of others, and so are reached over the
// network.

#include <gtest/gtest.h>

#include <climits>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/random.h"
#include "tests/support/endpoints.h"
#include "tests/support/raw_peer.h"
#include "transport/control/codec.h"
#include "transport/mapped/unix_socket.h"
#include "transport/tcp/tcp_frames.h"
#include "transport/tcp/tcp_socket.h"

namespace kvferry {

// These play a peer whose data goes over plain connections.
class HelloToOthersOverTcp : public testing::Test {
 protected:
  void SetUp() override {
    if (PathUnderTest() == TestPath::kUcx || PathUnderTest() == TestPath::kDirect) {
      GTEST_SKIP() << "the network is UCX's here";
    }
  }
};

using HelloFromOthersOverTcp = HelloToOthersOverTcp;

// How a process says that it has taken the memory which it is given.
enum class Takes : uint64_t { kAndReadsNothing = 0, kNever = 1, kNotNow = 2, kSaysNothing };

// Where a process on this host is given memory of others, which it does not map.
class UnmappedMemory {
 public:
  // What a hello or welcome says of it.
  std::string local() const { return absl::StrCat("\x05", name_, std::string(16, 't')); }
  // The next one that gives memory is told so.
  void Answer(Takes takes) {
    Packet hello;
    UniqueFd taken;
    EXPECT_TRUE(WaitFor([&] { return (taken = AcceptUnix(listener_)).valid(); }, Soon()));
    EXPECT_TRUE(WaitFor([&] { return ReceivePacket(taken, &hello) == SocketResult::kOk; }, Soon()));
    if (takes != Takes::kSaysNothing) {
      const uint64_t answer[] = {8, static_cast<uint64_t>(takes)};
      EXPECT_EQ(SendPacket(taken, std::as_bytes(std::span(answer))), SocketResult::kOk);
    }
    const bool ends = takes == Takes::kNever || takes == Takes::kNotNow;
    if (!ends) held_.push_back(std::move(taken));
  }
  // What its socket holds, or about so much.
  void ReadSome() {
    Packet packet;
    for (int left = 100; left > 0; --left) {
      if (ReceivePacket(held_.back(), &packet) != SocketResult::kOk) return;
    }
  }

 private:
  const std::string name_ = RandomBytes16();
  const UniqueFd listener_ =
      Must(ListenUnix(absl::StrCat("kvferry/", absl::BytesToHexString(name_))));
  std::vector<UniqueFd> held_;
};

// Welcomes whoever says hello as such a process.
class MapsNothing {
 public:
  // The next message that is no goodbye and no ping; none: the test has failed.
  std::optional<std::pair<std::string, Message>> Receive() {
    if (!kept_.empty()) {
      auto received = std::move(kept_.front());
      kept_.pop_front();
      return received;
    }
    auto received = Next();
    EXPECT_TRUE(received.has_value());
    return received;
  }
  // So many goodbyes in all, and no more so far. Each comes over its own session's connection, and
  // others may overtake it.
  void ExpectByes(int count) {
    while (byes_ < count) {
      auto received = Next(count);
      if (!received.has_value()) break;
      kept_.push_back(*std::move(received));
    }
    EXPECT_EQ(byes_, count);
  }
  // Until then, of a peer that says nothing else.
  void AnswerPings(Deadline until) {
    while (const auto received = peer_.Receive(until)) EXPECT_TRUE(IsPing(*received));
  }
  // The next message, if it comes by then; a ping is answered.
  void HearOne(Deadline until) {
    if (const auto received = peer_.Receive(until)) IsPing(*received);
  }
  // Of what it is told over the connection that was made last.
  void ReadSome() { memory_.ReadSome(); }
  // The next hello, which is answered as by the process of that epoch: by shared memory where that
  // is offered, else by a port where nobody is in a hurry. Without `takes` no memory is to be
  // given.
  HelloMsg Welcome(uint64_t epoch, std::optional<Takes> takes = Takes::kNever) {
    const auto received = Receive();
    if (!received.has_value() || !std::holds_alternative<HelloMsg>(received->second.body)) {
      ADD_FAILURE() << "no hello";
      return {};
    }
    const auto& [from, message] = *received;
    const HelloMsg hello = std::get<HelloMsg>(message.body);
    WelcomeMsg welcome{"prefill", {}};
    welcome.data.session = session;
    welcome.silence_ms = silence_ms;
    if (hello.data.local.empty()) {
      welcome.data.tcp = {lanes, "127.0.0.1", Must(PortOf(door_)), std::string(16, 't'),
                          std::string(16, 'a')};
    } else {
      welcome.data.local = memory_.local();
      welcome.data.session = 9;  // Messages over the link, too.
    }
    Say(from, message.from_epoch, epoch, welcome);
    if (takes && !hello.data.local.empty()) memory_.Answer(*takes);
    return hello;
  }
  void Say(const std::string& to, uint64_t to_epoch, uint64_t epoch, const MessageBody& body) {
    peer_.SendBytes(to, EncodeMessage({epoch, to_epoch, body}));
  }
  const std::string& address() const { return peer_.address(); }
  // Whoever has been welcomed over the network finds a door that closes.
  void CloseNextLink() {
    UniqueFd link;
    EXPECT_TRUE(WaitFor([&] { return (link = AcceptTcp(door_)).valid(); }, Soon()));
  }

  // All of the lanes that are dialled, of which the first `answered` are answered.
  void TakeLanes(int64_t answered) {
    lanes_.clear();
    lanes_.resize(static_cast<size_t>(lanes));
    for (int64_t left = lanes; left > 0; --left) {
      UniqueFd link;
      ASSERT_TRUE(WaitFor([&] { return (link = AcceptTcp(door_)).valid(); }, Soon()));
      TcpHello hello;
      const iovec words{&hello, sizeof(hello)};
      ASSERT_TRUE(WaitFor([&] { return ReceiveTcp(link.get(), {&words, 1}).some(); }, Soon()));
      ASSERT_LT(hello.lane, lanes);
      if (hello.lane < answered) Answer(link, hello.lane);
      lanes_[hello.lane] = std::move(link);
    }
  }
  void CloseLane(size_t lane) { lanes_[lane] = UniqueFd(); }
  // What has come over one of them since the last call.
  int64_t ReadLane(size_t lane) {
    std::string bytes(64 << 10, '\0');
    const iovec part{bytes.data(), bytes.size()};
    return ReceiveTcp(lanes_[lane].get(), {&part, 1}).bytes;
  }

  int64_t lanes = 1;  // Of each session's connections, as its welcomes say.
  int pings = 0;
  // Not 0: it takes messages over the network, and reads none.
  uint64_t session = 0;
  int64_t silence_ms = 0;  // As its welcomes say.
  // Not 0: the epoch that its answers to pings are from.
  uint64_t pongs_as = 0;

 private:
  static void Answer(const UniqueFd& link, uint32_t lane) {
    std::string answer = TcpHello::With(std::string(16, 'a'), lane).Bytes();
    const iovec words{answer.data(), answer.size()};
    EXPECT_TRUE(SendTcp(link.get(), {&words, 1}).some());
  }
  // The next message that is no goodbye and no ping; none with the last of `byes` goodbyes, too.
  std::optional<std::pair<std::string, Message>> Next(int byes = INT_MAX) {
    for (const Deadline by = Soon();;) {
      auto received = peer_.Receive(by);
      if (!received.has_value()) return received;
      if (IsPing(*received)) continue;
      if (!std::holds_alternative<ByeMsg>(received->second.body)) return received;
      if (++byes_ >= byes) return std::nullopt;
    }
  }
  bool IsPing(const std::pair<std::string, Message>& received) {
    const auto& [from, message] = received;
    if (!std::holds_alternative<PingMsg>(message.body)) return false;
    ++pings;
    if (pongs_as != 0) Say(from, message.from_epoch, pongs_as, PongMsg{});
    return true;
  }

  RawPrefill peer_;
  // What was heard while goodbyes were waited for.
  std::deque<std::pair<std::string, Message>> kept_;
  int byes_ = 0;
  UnmappedMemory memory_;
  const UniqueFd door_ = Must(ListenTcp("127.0.0.1", 0));
  std::vector<UniqueFd> lanes_;  // Of the last session.
};

}  // namespace kvferry
