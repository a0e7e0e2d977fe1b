#include "transport/ticket.h"

#include <gtest/gtest.h>

#include <random>

#include "pool/page_runs.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

TEST(TicketText, RoundTrip) {
  for (const Ticket& ticket :
       {Ticket{"tcp://127.0.0.1:4000", 1, 2, 0, 0},
        Ticket{"tcp://[::1]:65535", UINT64_MAX, UINT64_MAX, PageRuns::kMaxPages,
               PageRuns::kMaxPages},
        Ticket{"tcp://prefill-3.example:1", 0xabcdef, 0x1234567890abcdef, 17, 271}}) {
    EXPECT_EQ(Must(Ticket::Parse(ticket.ToString())), ticket) << ticket.ToString();
  }
  EXPECT_EQ((Ticket{"tcp://10.0.0.1:4000", 255, 16, 3, 48}).ToString(),
            "kvferry1|tcp://10.0.0.1:4000|ff|10|3|48");
}

TEST(TicketText, Hostile) {
  const std::string good = "kvferry1|tcp://10.0.0.1:4000|ff|10|3|48";
  ASSERT_TRUE(IsOk(Ticket::Parse(good)));
  for (const std::string& text : std::vector<std::string>{
           "", "|", "|||||", "kvferry1", "kvferry2|tcp://10.0.0.1:4000|ff|10|3|48", good + "|",
           good + "|1", "kvferry1|tcp://10.0.0.1:4000|ff|10|3", "kvferry1|ipc:///tmp/x|ff|10|3|48",
           "kvferry1|tcp://10.0.0.1|ff|10|3|48", "kvferry1|tcp://:4000|ff|10|3|48",
           "kvferry1|tcp://10.0.0.1:0|ff|10|3|48", "kvferry1|tcp://10.0.0.1:65536|ff|10|3|48",
           "kvferry1|tcp://10.0.0.1:-1|ff|10|3|48", "kvferry1|tcp://10.0.0.1:x|ff|10|3|48",
           "kvferry1|tcp://10.0.0.1:4000|ff|0|3|48", "kvferry1|tcp://10.0.0.1:4000|xyz|10|3|48",
           "kvferry1|tcp://10.0.0.1:4000||10|3|48",
           "kvferry1|tcp://10.0.0.1:4000|1ffffffffffffffff|10|3|48",
           "kvferry1|tcp://10.0.0.1:4000|ff|10|-3|48", "kvferry1|tcp://10.0.0.1:4000|ff|10|3|-1",
           "kvferry1|tcp://10.0.0.1:4000|ff|10|99999999999999999999|48",
           "kvferry1|tcp://10.0.0.1:4000|ff|10|1073741825|48",
           "kvferry1|tcp://10.0.0.1:4000|ff|10|3|",
           // ZeroMQ would read the first as "from this address, to that one".
           "kvferry1|tcp://127.0.0.1;evil.example:4000|ff|10|3|48",
           "kvferry1|tcp://127.0.0.1:1;10.0.0.9:4000|ff|10|3|48",
           "kvferry1|tcp://a b:4000|ff|10|3|48", "kvferry1|tcp://user@host:4000|ff|10|3|48",
           "kvferry1|tcp://a/b:4000|ff|10|3|48", "kvferry1|tcp://[]:4000|ff|10|3|48",
           "kvferry1|tcp://" + std::string(600, 'a') + ":4000|ff|10|3|48"}) {
    EXPECT_TRUE(Fails(Ticket::Parse(text), absl::StatusCode::kInvalidArgument)) << text;
  }
}

// The two kinds are told apart by their first word, so that neither is taken for the other.
TEST(TicketText, OfAReceive) {
  const ReceiveTicket ticket{"tcp://10.0.0.1:4000", 255, 16, 3, 48};
  EXPECT_EQ(ticket.ToString(), "kvferrypush1|tcp://10.0.0.1:4000|ff|10|3|48");
  EXPECT_EQ(Must(ReceiveTicket::Parse(ticket.ToString())), ticket);
  EXPECT_TRUE(Fails(Ticket::Parse(ticket.ToString()), absl::StatusCode::kInvalidArgument,
                    "kvferry1|address|epoch|lease|pages|tokens"));
  EXPECT_TRUE(Fails(ReceiveTicket::Parse("kvferry1|tcp://10.0.0.1:4000|ff|10|3|48"),
                    absl::StatusCode::kInvalidArgument,
                    "kvferrypush1|address|epoch|receive|pages|tokens"));
  EXPECT_TRUE(Fails(ReceiveTicket::Parse("kvferrypush1|tcp://10.0.0.1:4000|ff|0|3|48"),
                    absl::StatusCode::kInvalidArgument, "the receive is no non-zero"));
  EXPECT_TRUE(Fails(ReceiveTicket::Parse("kvferrypush1|tcp://10.0.0.1:4000|0|10|3|48"),
                    absl::StatusCode::kInvalidArgument, "without an epoch"));
}

TEST(TicketText, WithoutAnEpoch) {
  const Ticket ticket{"tcp://10.0.0.1:4000", 0, 16, 3, 48};
  EXPECT_EQ(ticket.ToString(), "kvferry1|tcp://10.0.0.1:4000|0|10|3|48");
  EXPECT_EQ(Must(Ticket::Parse(ticket.ToString())), ticket);
}

// Whatever is done to a ticket, parsing ends, and what parses means what it says.
TEST(TicketText, RandomMutations) {
  std::mt19937_64 random(1);
  const std::string good = "kvferry1|tcp://10.0.0.1:4000|ff|10|3|48";
  for (int i = 0; i < 100000; ++i) {
    std::string text = good;
    for (uint64_t j = 0; j <= random() % 4; ++j)
      text[random() % text.size()] = static_cast<char>(random());
    const absl::StatusOr<Ticket> ticket = Ticket::Parse(text);
    if (ticket.ok()) {
      ASSERT_EQ(Must(Ticket::Parse(ticket->ToString())), *ticket);
    }
  }
}

TEST(TicketHosts, DefaultIsLoopbackAndOneself) {
  Config config;
  EXPECT_TRUE(IsOk(CheckHostAllowed("tcp://127.0.0.1:4000", config)));
  EXPECT_TRUE(IsOk(CheckHostAllowed("tcp://127.8.9.1:4000", config)));
  EXPECT_TRUE(IsOk(CheckHostAllowed("tcp://localhost:4000", config)));
  EXPECT_TRUE(IsOk(CheckHostAllowed("tcp://[::1]:4000", config)));
  for (const char* address :
       {"tcp://10.0.0.1:4000", "tcp://127.example.com:4000", "tcp://127.0.0.1.example.com:4000",
        "tcp://localhost.example.com:4000", "tcp://0.0.0.0:4000", "tcp://169.254.169.254:80",
        "tcp://[::ffff:10.0.0.1]:4000", "tcp://2130706433:4000", "tcp://0x7f.1:4000"}) {
    EXPECT_TRUE(Fails(CheckHostAllowed(address, config), absl::StatusCode::kPermissionDenied,
                      "allowed_hosts"))
        << address;
  }
  const std::string with_nul("tcp://127.0.0.1\0.example.com:4000", 33);
  EXPECT_FALSE(CheckHostAllowed(with_nul, config).ok());
  config.listen_host = "10.0.0.1";
  EXPECT_TRUE(IsOk(CheckHostAllowed("tcp://10.0.0.1:4000", config)));
}

TEST(TicketHosts, ListReplacesTheDefault) {
  Config config;
  config.allowed_hosts = " prefill-0 ,10.0.0.7, fd00::1";
  EXPECT_TRUE(IsOk(CheckHostAllowed("tcp://prefill-0:4000", config)));
  EXPECT_TRUE(IsOk(CheckHostAllowed("tcp://10.0.0.7:1", config)));
  EXPECT_TRUE(IsOk(CheckHostAllowed("tcp://[fd00::1]:1", config)));
  EXPECT_TRUE(
      Fails(CheckHostAllowed("tcp://127.0.0.1:4000", config), absl::StatusCode::kPermissionDenied));
  EXPECT_TRUE(Fails(CheckHostAllowed("tcp://prefill-01:4000", config),
                    absl::StatusCode::kPermissionDenied));
  config.allowed_hosts = "10.0.0.0/8";
  EXPECT_TRUE(IsOk(CheckHostAllowed("tcp://10.1.2.3:4000", config)));
  EXPECT_TRUE(Fails(CheckHostAllowed("tcp://192.0.2.1:4000", config),
                    absl::StatusCode::kPermissionDenied, "tcp://192.0.2.1:4000", "10.0.0.0/8"));
  config.allowed_hosts = "*";
  EXPECT_TRUE(IsOk(CheckHostAllowed("tcp://anything.example:4000", config)));
  EXPECT_TRUE(Fails(CheckHostAllowed("udp://anything.example:4000", config),
                    absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace kvferry
