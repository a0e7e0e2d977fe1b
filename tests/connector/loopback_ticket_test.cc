// Tickets that cannot be served: what the decode side is told.

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <filesystem>
#include <fstream>

#include "base/random.h"
#include "tests/support/captured_log.h"
#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

class TicketRefused : public testing::Test {
 protected:
  static Config Quick() {
    Config config = SmallChunks();
    config.publish_grace_ms = 50;
    return config;
  }
  absl::Status FetchStatus(const Ticket& ticket) {
    return Fetch(*decode_, ticket, {0, 1, 2})->Wait(Soon());
  }

  CapturedLog log_;
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 8, 1);
  std::shared_ptr<KvPool> target_ = MakePatternPool(SmallLayout(), 8, 2);
  std::unique_ptr<PrefillEndpoint> prefill_ = MakePrefill(source_, Quick());
  std::unique_ptr<DecodeEndpoint> decode_ = MakeDecode(target_, Quick());
};

TEST_F(TicketRefused, UnknownLease) {
  Ticket ticket = Publish(*prefill_, *source_, {4, 5, 6});
  ticket.lease_id = RandomId();
  EXPECT_TRUE(Fails(FetchStatus(ticket), absl::StatusCode::kNotFound, prefill_->address(),
                    "is unknown here", "was the ticket made by this process?"));
  EXPECT_TRUE(IsUntouched(*target_, 2));
  EXPECT_TRUE(log_.Has({"refused a fetch", "unknown"})) << log_.ToString();  // Prefill side.
  EXPECT_TRUE(log_.Has({"fetch", prefill_->address(), "unknown"})) << log_.ToString();  // Decode.
}

TEST_F(TicketRefused, ExpiredLease) {
  const Ticket ticket = Publish(*prefill_, *source_, {4, 5, 6}, -1, 1);
  ASSERT_EQ(EndedLeases(prefill_.get()).Wait(ticket.lease_id), "expired");
  EXPECT_TRUE(Fails(FetchStatus(ticket), absl::StatusCode::kFailedPrecondition, "expired",
                    "raise lease_ms or fetch sooner"));
}

TEST_F(TicketRefused, ReleasedLease) {
  const Ticket ticket = Publish(*prefill_, *source_, {4, 5, 6});
  ASSERT_TRUE(IsOk(prefill_->Release(ticket.lease_id, Soon())));
  EXPECT_TRUE(
      Fails(FetchStatus(ticket), absl::StatusCode::kFailedPrecondition, "already been released"));
  EXPECT_EQ(EndedLeases(prefill_.get()).Wait(ticket.lease_id), "released");
}

TEST_F(TicketRefused, FetchedLease) {
  const Ticket ticket = Publish(*prefill_, *source_, {4, 5, 6});
  ASSERT_TRUE(IsOk(FetchStatus(ticket)));
  EXPECT_TRUE(
      Fails(FetchStatus(ticket), absl::StatusCode::kFailedPrecondition, "already been fetched"));
}

TEST_F(TicketRefused, LeaseThatIsBeingFetched) {
  const Ticket ticket = Publish(*prefill_, *source_, {4, 5, 6}, 1);
  const auto first = Fetch(*decode_, ticket, {3, 4, 5});
  ASSERT_TRUE(IsOk(first->WaitLayer(0, Soon())));
  EXPECT_TRUE(
      Fails(FetchStatus(ticket), absl::StatusCode::kFailedPrecondition, "being fetched already"));
  ASSERT_TRUE(IsOk(prefill_->AllLayersReady(ticket.lease_id)));
  EXPECT_TRUE(IsOk(first->Wait(Soon())));  // Unharmed.
}

// A ticket of a process that has since restarted at the same address.
TEST_F(TicketRefused, AnotherEpoch) {
  Ticket ticket = Publish(*prefill_, *source_, {4, 5, 6});
  ticket.epoch ^= 1;
  EXPECT_TRUE(Fails(FetchStatus(ticket), absl::StatusCode::kNotFound, "has restarted",
                    "prefill the request again"));
  // The same with the session up already.
  EXPECT_TRUE(Fails(FetchStatus(ticket), absl::StatusCode::kNotFound, "has restarted"));
  EXPECT_TRUE(IsUntouched(*target_, 2));
}

// Stale tickets do no harm to good ones of the same address that are fetched at the same time.
TEST_F(TicketRefused, AnotherEpochHurtsNobodyElse) {
  ASSERT_TRUE(IsOk(FetchStatus(Publish(*prefill_, *source_, {4, 5, 6}))));
  for (int round = 0; round < 20; ++round) {
    Ticket stale = Publish(*prefill_, *source_, {1});
    stale.epoch ^= 1;
    const auto bad = Fetch(*decode_, stale, {7});
    std::vector<std::shared_ptr<FetchHandle>> good;
    for (int64_t i = 0; i < 4; ++i) {
      good.push_back(Fetch(*decode_, Publish(*prefill_, *source_, {i}), {i}));
    }
    EXPECT_TRUE(Fails(bad->Wait(Soon()), absl::StatusCode::kNotFound, "has restarted"));
    for (const auto& handle : good) ASSERT_TRUE(IsOk(handle->Wait(Soon()))) << "round " << round;
  }
}

// A session that was opened for a stale ticket and is one too many takes no place at the prefill
// side.
TEST_F(TicketRefused, AnotherEpochTakesNobodysPlace) {
  Config config = Quick();
  config.max_peers = 2;
  config.connect_timeout_ms = config.heartbeat_timeout_ms = 600000;  // Nor only until then.
  const auto prefill = MakePrefill(source_, config);
  ASSERT_TRUE(IsOk(FetchStatus(Publish(*prefill, *source_, {4, 5, 6}))));
  for (int round = 0; round < 5; ++round) {
    Ticket stale = Publish(*prefill, *source_, {1});
    stale.epoch ^= 1;
    EXPECT_TRUE(Fails(Fetch(*decode_, stale, {7})->Wait(Soon()), absl::StatusCode::kNotFound,
                      "has restarted"));
    ASSERT_TRUE(WaitFor([&] { return Metric(*prefill, "peers") == 1; }, Soon())) << round;
  }
  EXPECT_TRUE(IsOk(FetchStatus(Publish(*prefill, *source_, {4, 5, 6}))));
}

TEST_F(TicketRefused, MorePagesThanTheLeaseHas) {
  Ticket ticket = Publish(*prefill_, *source_, {4, 5, 6});
  ticket.num_pages = 8;  // Whoever carried the ticket has changed it.
  const absl::Status status = Fetch(*decode_, ticket, {0, 1, 2, 3})->Wait(Soon());
  EXPECT_TRUE(Fails(status, absl::StatusCode::kOutOfRange, "refused by", "3 pages"));
  EXPECT_TRUE(IsUntouched(*target_, 2));
  ticket.num_pages = 3;
  EXPECT_TRUE(IsOk(FetchStatus(ticket)));  // The lease has survived the attempt.
}

TEST_F(TicketRefused, BeforeAnythingIsSent) {
  const Ticket ticket = Publish(*prefill_, *source_, {4, 5, 6});
  const auto fetch = [&](const Ticket& from, int64_t first, std::vector<int64_t> pages,
                         int64_t timeout_ms = 0) {
    return decode_->Fetch(from, first, pages, timeout_ms).status();
  };
  EXPECT_TRUE(Fails(fetch(ticket, 1, {0, 1, 2}), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(fetch(ticket, 3, {0}), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(fetch(ticket, -1, {0}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(fetch(ticket, 0, {8}), absl::StatusCode::kOutOfRange, "8 pages"));
  EXPECT_TRUE(Fails(fetch(ticket, 0, {-1}), absl::StatusCode::kInvalidArgument, "-1"));
  EXPECT_TRUE(Fails(fetch(ticket, 0, {0}, -5), absl::StatusCode::kInvalidArgument, "timeout_ms"));
  EXPECT_TRUE(Fails(fetch(ticket, 0, {0}, Config().max_fetch_timeout_ms + 1),
                    absl::StatusCode::kInvalidArgument, "timeout_ms"));
  Ticket elsewhere = ticket;
  elsewhere.address = "tcp://192.0.2.1:4000";
  EXPECT_TRUE(Fails(fetch(elsewhere, 0, {0}), absl::StatusCode::kPermissionDenied, "192.0.2.1",
                    "allowed_hosts"));
  elsewhere.address = "ipc:///tmp/x";
  EXPECT_TRUE(Fails(fetch(elsewhere, 0, {0}), absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(Metric(*decode_, "fetches_started"), 0);
  EXPECT_EQ(Metric(*prefill_, "peers"), 0);
}

TEST_F(TicketRefused, PublishErrors) {
  PrefillEndpoint::Publication publication;
  EXPECT_TRUE(
      Fails(prefill_->Publish(publication), absl::StatusCode::kInvalidArgument, "no pages"));
  publication.pages = {0, 8};
  EXPECT_TRUE(Fails(prefill_->Publish(publication), absl::StatusCode::kOutOfRange, "8 pages"));
  publication.pages = {-1};
  EXPECT_TRUE(Fails(prefill_->Publish(publication), absl::StatusCode::kInvalidArgument, "-1"));
  publication.pages = {0};
  publication.lease_ms = -1;
  EXPECT_TRUE(
      Fails(prefill_->Publish(publication), absl::StatusCode::kInvalidArgument, "lease_ms"));
  publication.lease_ms = 0;
  // A ticket can name as many.
  for (const int64_t wrong : {int64_t{-1}, PageRuns::kMaxPages + 1, INT64_MAX}) {
    publication.num_tokens = wrong;
    EXPECT_TRUE(Fails(prefill_->Publish(publication), absl::StatusCode::kInvalidArgument,
                      absl::StrCat("num_tokens is ", wrong), "[0, 1073741824]"));
  }
  publication.num_tokens = 0;
  const int64_t layers = SmallLayout().num_layers;
  for (const int64_t wrong : {int64_t{-1}, layers + 1, INT64_MAX}) {
    publication.ready_layers = wrong;
    EXPECT_TRUE(Fails(prefill_->Publish(publication), absl::StatusCode::kInvalidArgument,
                      absl::StrCat("ready_layers is ", wrong), absl::StrCat("[0, ", layers, "]")));
  }
  EXPECT_EQ(prefill_->num_live_leases(), 0);
  publication.ready_layers = layers;
  publication.lease_id = 77;
  EXPECT_TRUE(IsOk(prefill_->Publish(publication)));
  EXPECT_TRUE(Fails(prefill_->Publish(publication), absl::StatusCode::kAlreadyExists, "4d"));
}

TEST_F(TicketRefused, NobodyListens) {
  Config config = Quick();
  config.connect_timeout_ms = 600000;  // Not what ends it.
  const auto decode = MakeDecode(target_, config);
  Ticket ticket = Publish(*prefill_, *source_, {4, 5, 6});
  ticket.address = "tcp://127.0.0.1:1";  // tcpmux; nothing here listens.
  const absl::Status status = Fetch(*decode, ticket, {0, 1, 2})->Wait(Soon());
  EXPECT_TRUE(Fails(status, absl::StatusCode::kUnavailable, "cannot connect to tcp://127.0.0.1:1",
                    "has ended"));
  // With a shorter deadline of its own, the fetch ends at that.
  const Deadline begin = Clock::now();
  EXPECT_TRUE(Fails(Fetch(*decode, ticket, {0}, 0, 50)->Wait(Soon()),
                    absl::StatusCode::kDeadlineExceeded, "never answered"));
  EXPECT_LT(SecondsBetween(begin, Clock::now()), 15);
}

TEST(Endpoints, BadOptions) {
  const auto pool = MakePatternPool(SmallLayout(), 2, 1);
  Config config;
  config.chunk_bytes = 1;
  EXPECT_TRUE(Fails(PrefillEndpoint::Create(pool, {config, "m", ""}).status(),
                    absl::StatusCode::kInvalidArgument, "chunk_bytes"));
  EXPECT_TRUE(Fails(PrefillEndpoint::Create(pool, {Config(), "", ""}).status(),
                    absl::StatusCode::kInvalidArgument, "model"));
  EXPECT_TRUE(Fails(DecodeEndpoint::Create(pool, {Config(), std::string(257, 'm'), ""}).status(),
                    absl::StatusCode::kInvalidArgument, "model"));
  EXPECT_TRUE(Fails(DecodeEndpoint::Create(pool, {Config(), "m", std::string(129, 'n')}).status(),
                    absl::StatusCode::kInvalidArgument, "name"));
  EXPECT_TRUE(Fails(PrefillEndpoint::Create(nullptr, {Config(), "m", ""}).status(),
                    absl::StatusCode::kInvalidArgument, "pool"));
  EXPECT_TRUE(Fails(DecodeEndpoint::Create(nullptr, {Config(), "m", ""}).status(),
                    absl::StatusCode::kInvalidArgument, "pool"));
}

TEST(Endpoints, PortTaken) {
  const auto pool = MakePatternPool(SmallLayout(), 2, 1);
  const auto first = MakePrefill(pool, Config());
  Config config;
  config.listen_port = PortOf(first->address());
  EXPECT_TRUE(Fails(PrefillEndpoint::Create(pool, {config, "m", ""}).status(),
                    absl::StatusCode::kUnavailable, "listen_port"));
}

TEST(Endpoints, InterfaceThatDoesNotExist) {
  const auto pool = MakePatternPool(SmallLayout(), 2, 1);
  Config config;
  config.net_device = "nosuchdev0";
  const absl::Status status = DecodeEndpoint::Create(pool, {config, "m", ""}).status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("net_device"), std::string::npos) << status.ToString();
}

TEST(Endpoints, CongestionControlThatDoesNotExist) {
  const auto pool = MakePatternPool(SmallLayout(), 2, 1);
  Config config;
  config.tcp_congestion_control = "nosuchcc";
  EXPECT_TRUE(Fails(DecodeEndpoint::Create(pool, {config, "m", ""}).status(),
                    absl::StatusCode::kInvalidArgument, "tcp_congestion_control is 'nosuchcc'"));
}

// Of the sockets of this process that are connected.
int64_t CountConnectionsWith(const std::string& congestion_control) {
  int64_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    char name[32] = "";
    socklen_t name_bytes = sizeof(name);
    sockaddr_storage peer{};
    socklen_t peer_bytes = sizeof(peer);
    if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &name_bytes) == 0 &&
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_bytes) == 0) {
      count += name == congestion_control ? 1 : 0;
    }
  }
  return count;
}

// Both ends of each lane have it, and nothing else.
TEST(Endpoints, CongestionControlOfChunksIsChosen) {
  if (PathUnderTest() != TestPath::kTcp) GTEST_SKIP() << "no chunks over TCP";
  std::string usual;
  std::ifstream("/proc/sys/net/ipv4/tcp_congestion_control") >> usual;
  if (usual == "reno") GTEST_SKIP() << "all connections have it";
  const auto source = MakePatternPool(SmallLayout(), 2, 1);
  const auto target = MakePatternPool(SmallLayout(), 2, 2);
  Config config = TestConfig();
  const int64_t others = CountConnectionsWith("reno");
  config.tcp_congestion_control = "reno";  // Every system has and gives it.
  const auto prefill = MakePrefill(source, config);
  const auto decode = MakeDecode(target, config);
  ASSERT_TRUE(IsOk(Fetch(*decode, Publish(*prefill, *source, {0}), {1})->Wait(Soon())));
  // The bytes may have come over one of the lanes before the others were there.
  const auto count = [&] { return CountConnectionsWith("reno") - others; };
  EXPECT_TRUE(WaitFor([&] { return count() >= 2 * config.lanes; }, Soon()));
  EXPECT_EQ(count(), 2 * config.lanes);
}

}  // namespace
}  // namespace kvferry
