// Endpoints with the deployment's key, with another one and without: who gets a session, and what
// the others are told.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <fstream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "tests/support/captured_log.h"
#include "tests/support/endpoints.h"
#include "tests/support/raw_peer.h"
#include "tests/support/temp_folder.h"
#include "transport/control/curve.h"

namespace kvferry {
namespace {

class Keys : public testing::Test {
 protected:
  // A file with that text; its path.
  std::string File(const std::string& name, const std::string& text) const {
    const std::string path = absl::StrCat(folder_.path(), "/", name);
    std::ofstream(path) << text;
    return path;
  }
  Config WithKey(const std::string& key_file) const {
    Config config = SmallChunks();
    config.key_file = key_file;
    return config;
  }

  // A fetch by an endpoint with that key_file fails, saying why, and both sides' logs too.
  void ExpectStranger(PrefillEndpoint& prefill, const std::string& key_file) {
    const auto target = MakePatternPool(SmallLayout(), 8, 2);
    const auto decode = MakeDecode(target, WithKey(key_file));
    const absl::Status status =
        Fetch(*decode, Publish(prefill, *source_, {1, 2}), {3, 4})->Wait(Soon());
    EXPECT_TRUE(
        Fails(status, absl::StatusCode::kUnavailable, prefill.address(), "the same key_file"));
    EXPECT_TRUE(IsUntouched(*target, 2));
    EXPECT_TRUE(WaitFor([&] { return Metric(prefill, "strangers") > 0; }, Soon()));
    // It is said right after it is counted.
    EXPECT_TRUE(WaitFor(
        [&] {
          return log_.Has({"control: closed a connection", "key_file"});
        },
        Soon()))
        << log_.ToString();
    EXPECT_EQ(Metric(prefill, "peers"), 0);
    EXPECT_EQ(Metric(prefill, "messages_malformed"), 0);
  }
  void ExpectServed(PrefillEndpoint& prefill, const std::string& key_file) {
    const auto target = MakePatternPool(SmallLayout(), 8, 3);
    const auto decode = MakeDecode(target, WithKey(key_file));
    EXPECT_TRUE(IsOk(Fetch(*decode, Publish(prefill, *source_, {1, 2}), {5, 6})->Wait(Soon())));
    EXPECT_TRUE(
        HoldsExactly(*target, 3, std::vector<int64_t>{5, 6}, 1, std::vector<int64_t>{1, 2}));
  }

  CapturedLog log_;
  TempFolder folder_;
  const std::string digits_ = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
  const std::string key_ = File("key", absl::StrCat(digits_, "\n"));
  const std::string other_key_ = File("other", std::string(64, 'a'));
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 8, 1);
};

TEST_F(Keys, TheSameOnBothSides) {
  const auto prefill = MakePrefill(source_, WithKey(key_));
  ExpectServed(*prefill, key_);
  // However it is written down.
  ExpectServed(*prefill,
               File("upper", absl::StrCat(" \n", absl::AsciiStrToUpper(digits_), "\n\n")));
  EXPECT_EQ(Metric(*prefill, "strangers"), 0);
}

TEST_F(Keys, AnotherOne) {
  const auto prefill = MakePrefill(source_, WithKey(key_));
  ExpectStranger(*prefill, other_key_);
  ExpectServed(*prefill, key_);
}

TEST_F(Keys, NoneOnTheDecodeSide) {
  const auto prefill = MakePrefill(source_, WithKey(key_));
  ExpectStranger(*prefill, "");
  ExpectServed(*prefill, key_);
}

TEST_F(Keys, NoneOnThePrefillSide) {
  const auto prefill = MakePrefill(source_, SmallChunks());
  ExpectStranger(*prefill, key_);
  ExpectServed(*prefill, "");
}

// Calls wait for whoever will listen there, and say at their deadline what keeps nobody from it.
TEST_F(Keys, CallsSayTooWhatIsWrong) {
  const auto prefill = MakePrefill(source_, WithKey(key_));
  const auto node =
      Must(Node::Start({WithKey(other_key_), kTestModel, "caller", source_, nullptr, nullptr}));
  const auto call = [&](const std::string& address) {
    return BeginCall(*node, address, "f", {}, DeadlineInMs(3000)).get();
  };
  EXPECT_TRUE(Fails(call(prefill->address()), absl::StatusCode::kDeadlineExceeded,
                    prefill->address(), "the same key_file"));
  EXPECT_TRUE(Fails(call("tcp://127.0.0.1:1"), absl::StatusCode::kDeadlineExceeded,
                    "cannot connect to tcp://127.0.0.1:1, tried ", "nobody listens there"));
}

// As does their session, when it has waited for long enough.
TEST_F(Keys, SessionsSayTooWhatIsWrong) {
  Config config = WithKey(other_key_);
  config.connect_timeout_ms = 3000;
  const auto prefill = MakePrefill(source_, WithKey(key_));
  const auto node = Must(Node::Start({config, kTestModel, "caller", source_, nullptr, nullptr}));
  EXPECT_TRUE(Fails(BeginCall(*node, prefill->address(), "f", {}).get(),
                    absl::StatusCode::kUnavailable, "connect_timeout_ms (3000)",
                    "the same key_file"));
}

TEST_F(Keys, Push) {
  const auto target = MakePatternPool(SmallLayout(), 8, 2);
  const auto decode = MakePushedDecode(target, WithKey(key_));
  const auto receiving = Receive(*decode, {3, 4});
  const auto stranger = MakePrefill(source_, WithKey(other_key_));
  EXPECT_TRUE(Fails(Push(*stranger, receiving.ticket, *source_, {1, 2})->Wait(Soon()),
                    absl::StatusCode::kUnavailable, "the same key_file"));
  const auto prefill = MakePrefill(source_, WithKey(key_));
  EXPECT_TRUE(IsOk(Push(*prefill, receiving.ticket, *source_, {1, 2})->Wait(Soon())));
  EXPECT_TRUE(IsOk(receiving.handle->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target, 2, std::vector<int64_t>{3, 4}, 1, std::vector<int64_t>{1, 2}));
}

void Set(zmq::socket_t& socket, int option, const CurveKeys::Key& key) {
  ASSERT_EQ(zmq_setsockopt(socket.handle(), option, key.data(), key.size()), 0);
}

// Whoever has found out the listener's public key has not got in with that.
TEST_F(Keys, OfWhoDialsIsLookedAt) {
  const auto prefill = MakePrefill(source_, WithKey(key_));
  const CurveKeys keys = Must(ReadCurveKeys(key_));
  const CurveKeys others = Must(ReadCurveKeys(other_key_));
  const Message hello{42, 0, HelloMsg{"by hand", kTestModel, SmallLayout(), {}}};
  for (const CurveKeys::Pair& own : {others.dialler, keys.listener, keys.dialler}) {
    RawDecode peer(prefill->address(), [&](zmq::socket_t& socket) {
      Set(socket, ZMQ_CURVE_SERVERKEY, keys.listener.open);
      Set(socket, ZMQ_CURVE_PUBLICKEY, own.open);
      Set(socket, ZMQ_CURVE_SECRETKEY, own.secret);
    });
    const int64_t strangers = Metric(*prefill, "strangers");
    peer.Send(hello);
    if (own.open == keys.dialler.open) {
      // Refused only later, for it has no address.
      EXPECT_TRUE(peer.Receive(Soon()).has_value());
      EXPECT_EQ(Metric(*prefill, "strangers"), strangers);
    } else {
      EXPECT_TRUE(WaitFor([&] { return Metric(*prefill, "strangers") > strangers; }, Soon()));
      EXPECT_FALSE(peer.Receive(Clock::now()).has_value());
      EXPECT_EQ(Metric(*prefill, "hellos_refused"), 0);
    }
  }
}

// With a key or without.
TEST_F(Keys, WhoSaysNothingIsNotKept) {
  for (const std::string& key_file : {std::string(), key_}) {
    Config config = WithKey(key_file);
    config.connect_timeout_ms = 200;
    const auto prefill = MakePrefill(source_, config);
    const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(PortOf(prefill->address())));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ssize_t bytes = 1;
    while (bytes > 0) {  // ZeroMQ's greeting comes first.
      pollfd readable{fd.get(), POLLIN, 0};
      ASSERT_EQ(poll(&readable, 1, 20000), 1);
      std::array<char, 256> greeting;
      bytes = recv(fd.get(), greeting.data(), greeting.size(), 0);
    }
    EXPECT_TRUE(WaitFor([&] { return Metric(*prefill, "strangers") == 1; }, Soon()));
  }
}

TEST_F(Keys, FilesThatHoldNone) {
  const struct {
    std::string file;
    absl::string_view says;
  } cases[] = {{absl::StrCat(folder_.path(), "/missing"), "cannot be read: No such file"},
               {folder_.path(), "cannot be read"},
               {File("empty", ""), "does not hold 64 hexadecimal digits"},
               {File("short", digits_.substr(1)), "does not hold 64 hexadecimal digits"},
               {File("long", absl::StrCat(digits_, "0")), "openssl rand -hex 32"},
               {File("two", absl::StrCat(digits_, "\n", digits_)), "and nothing else"},
               {File("other", absl::StrCat(digits_.substr(1), "g")), "hexadecimal digits"},
               {File("large", std::string(1 << 20, '0')), "more than 4096 bytes"}};
  for (const auto& [file, says] : cases) {
    const auto prefill = PrefillEndpoint::Create(source_, {WithKey(file), kTestModel, "prefill"});
    EXPECT_TRUE(
        Fails(prefill.status(), absl::StatusCode::kInvalidArgument, "key_file", file, says));
    const auto decode = DecodeEndpoint::Create(source_, {WithKey(file), kTestModel, "decode"});
    EXPECT_TRUE(Fails(decode.status(), absl::StatusCode::kInvalidArgument, "key_file", file, says));
  }
}

// As docs/wire_protocol.md says; the numbers are another program's (Python's hmac, and RFC 7748's
// steps).
TEST_F(Keys, FollowFromTheDeploymentsAsTheProtocolSays) {
  const CurveKeys keys = Must(ReadCurveKeys(key_));
  const auto hex = [](const CurveKeys::Key& key) {
    return absl::BytesToHexString({reinterpret_cast<const char*>(key.data()), key.size()});
  };
  EXPECT_EQ(hex(keys.listener.secret),
            "1ac3e0af35683422eda4a04f2f4d6f36f42ba72dc0ed90e99eaaa05759d4c91c");
  EXPECT_EQ(hex(keys.listener.open),
            "5f21937d75903d9ea492449717678b566530b20393be969b379068c513c82c6d");
  EXPECT_EQ(hex(keys.dialler.secret),
            "af52ef0064c6ac45e23c2a6eb65b69494fe11d395818e536f8cfddb96b41e1ff");
  EXPECT_EQ(hex(keys.dialler.open),
            "ec455788f5a58605e86d05b682a3c64b39d83647210a1cce45a4fbc5aac42f0a");
}

}  // namespace
}  // namespace kvferry
