// Calls between two nodes over the real planes, and pages that the one who is called fetches from
// the caller.

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "connector/lease_table.h"
#include "tests/support/endpoints.h"
#include "tests/support/files.h"
#include "transport/node.h"

namespace kvferry {
namespace {

constexpr uint64_t kLease = 33;

// Does with a call what the test says.
class Server : public CallHandler {
 public:
  using Serve = std::function<void(const CallKey&, const std::string&, const Fields&)>;
  void OnCall(const CallKey& call, const std::string& function, const Fields& args,
              Deadline) override {
    Serve serve;
    {
      const MutexLock lock(&mutex_);
      serve = serve_;
    }
    serve(call, function, args);
  }
  void OnCallDropped(const CallKey& call) override {
    if (!any_dropped_.exchange(true)) dropped.set_value(call);
  }

  void ServeWith(Serve serve) {
    const MutexLock lock(&mutex_);
    serve_ = std::move(serve);
  }

  std::promise<CallKey> dropped;  // The first one.

 private:
  std::atomic<bool> any_dropped_ = false;
  Mutex mutex_;
  Serve serve_ ABSL_GUARDED_BY(mutex_) = [](const CallKey&, const std::string&, const Fields&) {};
};

class NodeCalls : public testing::Test {
 protected:
  explicit NodeCalls(const Config& config = SmallChunks()) : config_(config) {
    server_ = Start(server_pool_, &handler_, nullptr, /*listen=*/true);
    client_ = Start(client_pool_, nullptr, &leases_, /*listen=*/false);
  }
  std::unique_ptr<Node> Start(std::shared_ptr<const KvPool> pool, CallHandler* handler,
                              FetchSource* source, bool listen) {
    Node::Options options;
    options.config = config_;
    options.model = kTestModel;
    options.name = listen ? "server" : "client";
    options.pool = std::move(pool);
    options.source = source;
    options.handler = handler;
    options.listen = listen;
    return Must(Node::Start(std::move(options)));
  }
  struct Asked {
    uint64_t id;
    std::future<absl::StatusOr<Fields>> reply;
  };
  Asked Ask(const std::string& function, Fields args, int64_t timeout_ms = 20000,
            std::string address = "") {
    auto promise = std::make_shared<std::promise<absl::StatusOr<Fields>>>();
    Asked asked{0, promise->get_future()};
    if (address.empty()) address = server_->listen_address();
    asked.id = Must(client_->Call(
        {std::move(address), function, std::move(args), DeadlineInMs(timeout_ms)},
        [promise](absl::StatusOr<Fields> reply) { promise->set_value(std::move(reply)); }));
    return asked;
  }

  static PageRuns OnePage() { return Must(PageRuns::FromPages(std::vector<int64_t>{0})); }

  Config config_;
  LeaseTable leases_{config_};
  Server handler_;
  std::shared_ptr<KvPool> client_pool_ = MakePatternPool(SmallLayout(), 16, 1);
  std::shared_ptr<KvPool> server_pool_ = MakePatternPool(SmallLayout(), 16, 2);
  std::unique_ptr<Node> server_;
  std::unique_ptr<Node> client_;
};

TEST_F(NodeCalls, TheReplyComesBack) {
  handler_.ServeWith([&](const CallKey& call, const std::string& function, const Fields& args) {
    if (function == "add") {
      server_->Reply(call, Fields().Set("sum", *args.Uint("a") + *args.Uint("b")));
    } else {
      server_->Reply(call, absl::NotFoundError("no function '" + function + "'"));
    }
  });
  for (uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(*Ask("add", Fields().Set("a", i).Set("b", 2 * i)).reply.get()->Uint("sum"), 3 * i);
  }
  EXPECT_TRUE(
      Fails(Ask("cook", {}).reply.get(), absl::StatusCode::kNotFound, "no function 'cook'"));
  EXPECT_TRUE(Fails(client_->Call({server_->listen_address(), "", {}, Soon()}, nullptr),
                    absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(
      Fails(client_->Call({server_->listen_address(), std::string(33, 'f'), {}, Soon()}, nullptr),
            absl::StatusCode::kInvalidArgument, "33 bytes"));
  Fields many;
  for (int i = 0; i < 17; ++i) many.Set(std::to_string(i), i);
  EXPECT_TRUE(Fails(client_->Call({server_->listen_address(), "f", many, Soon()}, nullptr),
                    absl::StatusCode::kInvalidArgument, "17 fields"));
  EXPECT_TRUE(Fails(client_->Call({"tcp://10.9.8.7:1", "f", {}, Soon()}, nullptr),
                    absl::StatusCode::kPermissionDenied));
}

TEST_F(NodeCalls, NoAnswerEndsAtTheDeadlineOnBothSides) {
  std::atomic<uint64_t> first_heard = 0;
  handler_.ServeWith([&](const CallKey& call, const std::string&, const Fields&) {
    uint64_t none = 0;
    first_heard.compare_exchange_strong(none, call.id);
  });
  // On a loaded machine the time of the first may be over before the server hears of it.
  int64_t timeout_ms = 100;
  EXPECT_TRUE(WaitFor(
      [&] {
        EXPECT_TRUE(Fails(Ask("wait", {}, timeout_ms *= 2).reply.get(),
                          absl::StatusCode::kDeadlineExceeded));
        return first_heard != 0;
      },
      Soon()));
  std::future<CallKey> dropped = handler_.dropped.get_future();
  ASSERT_EQ(dropped.wait_until(Soon()), std::future_status::ready);
  EXPECT_EQ(dropped.get().id, first_heard);
}

// Processes start in any order. What comes of a ticket is another matter: its process listened.
TEST_F(NodeCalls, ACallWaitsForAServerThatIsYetToListen) {
  std::promise<CallKey> heard;
  handler_.ServeWith(
      [&](const CallKey& call, const std::string&, const Fields&) { heard.set_value(call); });
  const std::string address = server_->listen_address();
  config_.listen_port = PortOf(address);
  server_.reset();  // Nobody else is given its port so soon.
  Asked asked = Ask("f", {}, 20000, address);
  const auto fetch = Must(client_->Fetch({{address, 5, 6, 1, 16}, OnePage(), OnePage(), Soon()}));
  EXPECT_TRUE(Fails(fetch->Wait(Soon()), absl::StatusCode::kUnavailable, "cannot connect to"));
  server_ = Start(server_pool_, &handler_, nullptr, /*listen=*/true);
  server_->Reply(heard.get_future().get(), Fields());
  EXPECT_TRUE(IsOk(asked.reply.get()));
}

// The session is the fetch's, which would have ended it.
TEST_F(NodeCalls, SoDoesACallThatComesToTheSessionOfAFetch) {
  std::promise<CallKey> heard;
  handler_.ServeWith(
      [&](const CallKey& call, const std::string&, const Fields&) { heard.set_value(call); });
  const std::string address = server_->listen_address();
  config_.listen_port = PortOf(address);
  server_.reset();
  const auto fetch = Must(client_->Fetch({{address, 5, 6, 1, 16}, OnePage(), OnePage(), Soon()}));
  Asked asked = Ask("f", {}, 20000, address);
  EXPECT_TRUE(Fails(fetch->Wait(Soon()), absl::StatusCode::kUnavailable, "cannot connect to"));
  server_ = Start(server_pool_, &handler_, nullptr, /*listen=*/true);
  server_->Reply(heard.get_future().get(), Fields());
  EXPECT_TRUE(IsOk(asked.reply.get()));
}

// ZeroMQ says of both alike that there is no connection. The session is a call's, which tries on.
TEST_F(NodeCalls, WhoHasNoFilesLeftDoesNotBlameThePeer) {
  KVFERRY_SKIP_WHERE_DESCRIPTORS_ARE_NEEDED();
  const std::string address = server_->listen_address();
  server_.reset();  // Nobody else is given its port so soon.
  Asked asked = Ask("f", {}, 20000, address);
  const auto fetch = [&] {
    const auto begun = client_->Fetch({{address, 5, 6, 1, 16}, OnePage(), OnePage(), Soon()});
    return begun.ok() ? (*begun)->Wait(Soon()) : begun.status();
  };
  EXPECT_TRUE(Fails(fetch(), absl::StatusCode::kUnavailable, "cannot connect to"));
  absl::Status status;
  // The file of an attempt that ends as the limit is set is one that is left.
  for (int i = 0; i < 10 && !absl::IsResourceExhausted(status); ++i) {
    const FileLimit limit(0);
    status = fetch();
  }
  EXPECT_TRUE(Fails(status, absl::StatusCode::kResourceExhausted, "no file descriptors left"));
  client_->CancelCall(asked.id);
  EXPECT_TRUE(Fails(asked.reply.get(), absl::StatusCode::kCancelled));
}

TEST_F(NodeCalls, FewFilesLeftEndInAStatusWhereverTheyRunOut) {
  KVFERRY_SKIP_WHERE_DESCRIPTORS_ARE_NEEDED();
  for (int free = 0; free < 16; ++free) {
    const FileLimit limit(free);
    // Another one each time: a session that is there needs none.
    const std::string address = absl::StrCat("tcp://127.0.0.1:", free + 1);
    const auto fetch = client_->Fetch({{address, 5, 6, 1, 16}, OnePage(), OnePage(), Soon()});
    EXPECT_FALSE((fetch.ok() ? (*fetch)->Wait(Soon()) : fetch.status()).ok());
  }
}

TEST_F(NodeCalls, CancelReachesTheServer) {
  std::promise<void> begun;
  handler_.ServeWith([&](const CallKey&, const std::string&, const Fields&) { begun.set_value(); });
  Asked asked = Ask("wait", {});
  begun.get_future().wait();
  client_->CancelCall(asked.id);
  EXPECT_TRUE(Fails(asked.reply.get(), absl::StatusCode::kCancelled));
  EXPECT_EQ(handler_.dropped.get_future().get().id, asked.id);
}

TEST_F(NodeCalls, TheCallerGoesAway) {
  std::promise<void> begun;
  handler_.ServeWith([&](const CallKey&, const std::string&, const Fields&) { begun.set_value(); });
  Asked asked = Ask("wait", {});
  begun.get_future().wait();
  client_.reset();
  EXPECT_TRUE(Fails(asked.reply.get(), absl::StatusCode::kCancelled));
  EXPECT_EQ(handler_.dropped.get_future().get().id, asked.id);
}

TEST_F(NodeCalls, TheServerGoesAway) {
  std::promise<void> begun;
  handler_.ServeWith([&](const CallKey&, const std::string&, const Fields&) { begun.set_value(); });
  Asked asked = Ask("wait", {});
  begun.get_future().wait();
  server_.reset();
  EXPECT_TRUE(Fails(asked.reply.get(), absl::StatusCode::kUnavailable));
}

// "Come and get it": the server fetches pages of the client over the client's own session.
TEST_F(NodeCalls, TheServerFetchesFromItsCaller) {
  const std::vector<int64_t> theirs = {3, 4, 9};
  const std::vector<int64_t> ours = {7, 1, 2};
  ASSERT_TRUE(
      IsOk(leases_.Publish(kLease, Must(PageRuns::FromPages(theirs)), 4, DeadlineInMs(60000))));
  std::promise<std::shared_ptr<FetchHandle>> fetch;
  handler_.ServeWith([&](const CallKey& call, const std::string&, const Fields& args) {
    Node::FetchRequest request;
    request.ticket.lease_id = *args.Uint("lease");
    request.ticket.num_pages = 3;
    const PageRun all{0, 3};
    request.positions = Must(PageRuns::FromRuns({&all, 1}));
    request.pages = Must(PageRuns::FromPages(ours));
    request.deadline = Soon();
    request.peer = call.peer;
    fetch.set_value(Must(server_->Fetch(std::move(request))));
    server_->Reply(call, Fields());
  });
  ASSERT_TRUE(IsOk(Ask("take", Fields().Set("lease", kLease)).reply.get()));
  ASSERT_TRUE(IsOk(fetch.get_future().get()->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*server_pool_, 2, ours, 1, theirs));
  EXPECT_TRUE(WaitFor([&] { return leases_.num_live() == 0; }, Soon()));
}

TEST_F(NodeCalls, RequestsThatCannotWorkAreRefusedAtOnce) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const auto fetch = [&](int64_t positions, int64_t pages, LeaseReader reader = {}) {
    Node::FetchRequest request;
    request.ticket.num_pages = 3;
    request.positions = PageRuns(PageRun{0, positions});
    request.pages = PageRuns(PageRun{0, pages});
    request.deadline = Soon();
    request.reader = reader;
    request.await_id = 1;
    return client_->Fetch(std::move(request)).status();
  };
  EXPECT_TRUE(Fails(fetch(4, 4), absl::StatusCode::kOutOfRange, "3 pages that there are"));
  EXPECT_TRUE(Fails(fetch(3, 2), kInvalid, "3 pages of the ticket into 2 local pages"));
  EXPECT_TRUE(Fails(fetch(3, 4), kInvalid, "3 pages of the ticket into 4 local pages"));
  for (const LeaseReader reader : {LeaseReader{0, 0}, LeaseReader{2, 2}, LeaseReader{-1, 2},
                                   LeaseReader{0, LeaseReader::kMax + 1}}) {
    EXPECT_TRUE(Fails(fetch(3, 3, reader), kInvalid, "fetch: reader "));
  }
  for (const std::string& function : {std::string(), std::string(kMaxFunctionBytes + 1, 'f')}) {
    EXPECT_TRUE(Fails(client_->Call({server_->listen_address(), function, {}, Soon()},
                                    [](const absl::StatusOr<Fields>&) { FAIL(); }),
                      kInvalid, "call: a function's name of "));
  }
}

TEST_F(NodeCalls, OptionsThatCannotWorkAreRefusedAtOnce) {
  const auto start = [&](void (*change)(Node::Options&)) {
    Node::Options options;
    options.config = config_;
    options.model = kTestModel;
    options.pool = client_pool_;
    change(options);
    return Node::Start(std::move(options)).status();
  };
  using Options = Node::Options;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_TRUE(Fails(start([](Options& it) { it.pool = nullptr; }), kInvalid, "no pool"));
  EXPECT_TRUE(Fails(start([](Options& it) { it.model = ""; }), kInvalid, "has 0 bytes"));
  EXPECT_TRUE(Fails(start([](Options& it) { it.model.assign(kMaxModelBytes + 1, 'm'); }), kInvalid,
                    "model's name has "));
  EXPECT_TRUE(Fails(start([](Options& it) { it.name.assign(kMaxNameBytes + 1, 'n'); }), kInvalid,
                    "the name has "));
  EXPECT_TRUE(Fails(start([](Options& it) { it.scales = {1}; }), kInvalid, "1 scales"));
  EXPECT_TRUE(Fails(start([](Options& it) { it.heads = {1000, 1001}; }), kInvalid));
}

// Whoever must not read pages any more is not told that nobody does.
TEST_F(NodeCalls, AnAbortThatHasNoAnswerInTimeSaysSo) {
  Latch is_busy, go_on;
  handler_.ServeWith([&](const CallKey& call, const std::string&, const Fields&) {
    server_->Reply(call, Fields());
  });
  const auto hold = [&](const absl::StatusOr<Fields>&) {
    is_busy.Open();
    EXPECT_TRUE(go_on.Wait(Soon()));
  };
  ASSERT_TRUE(IsOk(client_->Call({server_->listen_address(), "hold", {}, Soon()}, hold)));
  ASSERT_TRUE(is_busy.Wait(Soon()));
  const auto abort = [&](Deadline deadline) {
    return client_->AbortLease(kLease, absl::AbortedError("enough"), Node::Again::kNo, deadline);
  };
  EXPECT_TRUE(Fails(abort(Clock::now()), absl::StatusCode::kDeadlineExceeded, "did not answer"));
  go_on.Open();
  EXPECT_TRUE(IsOk(abort(Soon())));
}

// What lies in no page travels behind the pages, in as many chunks as it takes.
TEST_F(NodeCalls, ATailFollowsThePages) {
  auto tail = std::make_shared<std::vector<std::byte>>(100001);
  for (size_t i = 0; i < tail->size(); ++i) (*tail)[i] = static_cast<std::byte>(i * 7 + i / 256);
  std::shared_ptr<const std::vector<std::byte>> kept = tail;
  std::vector<std::byte> received(tail->size());
  const auto fetch = [&](uint64_t lease, int64_t tail_bytes) {
    EXPECT_TRUE(IsOk(leases_.Publish(lease, Must(PageRuns::FromPages(std::vector<int64_t>{3, 4})),
                                     4, DeadlineInMs(60000), kept)));
    std::promise<std::shared_ptr<FetchHandle>> begun;
    handler_.ServeWith([&](const CallKey& call, const std::string&, const Fields&) {
      Node::FetchRequest request;
      request.ticket.lease_id = lease;
      request.ticket.num_pages = 2;
      const PageRun all{0, 2};
      request.positions = Must(PageRuns::FromRuns({&all, 1}));
      request.pages = Must(PageRuns::FromPages(std::vector<int64_t>{8, 1}));
      request.deadline = Soon();
      request.peer = call.peer;
      request.tail = {received.data(), tail_bytes};
      begun.set_value(Must(server_->Fetch(std::move(request))));
      server_->Reply(call, Fields());
    });
    EXPECT_TRUE(IsOk(Ask("take", {}).reply.get()));
    return begun.get_future().get()->Wait(Soon());
  };
  EXPECT_TRUE(IsOk(fetch(kLease, 0)));  // Not wanted, not sent.
  EXPECT_EQ(received, std::vector<std::byte>(received.size()));
  EXPECT_TRUE(Fails(fetch(kLease + 1, 100000), absl::StatusCode::kOutOfRange,
                    "a tail of 100000 bytes asked of a lease with 100001"));
  EXPECT_TRUE(IsOk(fetch(kLease + 2, 100001)));
  EXPECT_EQ(received, *tail);
  EXPECT_TRUE(
      HoldsExactly(*server_pool_, 2, std::vector<int64_t>{8, 1}, 1, std::vector<int64_t>{3, 4}));
}

TEST_F(NodeCalls, AFetchFromACallerThatIsGoneFails) {
  Node::FetchRequest request;
  request.ticket.lease_id = kLease;
  request.ticket.num_pages = 1;
  const PageRun all{0, 1};
  request.positions = Must(PageRuns::FromRuns({&all, 1}));
  request.pages = Must(PageRuns::FromRuns({&all, 1}));
  request.deadline = Soon();
  request.peer = "accepted:nobody";
  EXPECT_TRUE(Fails(Must(server_->Fetch(request))->Wait(Soon()), absl::StatusCode::kUnavailable,
                    "session has ended"));
}

// More at once than a connection is given to take, by each way that messages go.
class BurstsOfCalls : public NodeCalls, public testing::WithParamInterface<const char*> {
 protected:
  static constexpr int64_t kPatientMs = 120000;

  BurstsOfCalls() : NodeCalls(MakeConfig(GetParam())) {}
  // Over UCX messages go by ZeroMQ.
  static Config MakeConfig(const std::string& way) {
    Config config = SmallChunks();
    config.same_host_path = way == "auto" ? "auto" : "network";
    if (way == "ucx") config.ucx_tls = "tcp";
    config.max_calls_per_peer = 65536;
    // So much to copy that a loaded machine may keep either side from its pings for a while.
    config.heartbeat_timeout_ms = config.connect_timeout_ms = kPatientMs;
    return config;
  }
  void SetUp() override {
    handler_.ServeWith([&](const CallKey& call, const std::string& function, const Fields&) {
      Fields reply;
      if (function == "long") reply.Set("x", std::string(1 << 20, 'x'));
      server_->Reply(call, reply);
    });
  }
  // So many calls with so long a question.
  std::vector<absl::StatusOr<Fields>> AskMany(int calls, const std::string& function,
                                              size_t bytes) {
    std::vector<Asked> asked;
    const Fields args = Fields().Set("x", std::string(bytes, 'x'));
    for (int i = 0; i < calls; ++i) asked.push_back(Ask(function, args, kPatientMs));
    std::vector<absl::StatusOr<Fields>> replies;
    for (Asked& one : asked) replies.push_back(one.reply.get());
    return replies;
  }
};
INSTANTIATE_TEST_SUITE_P(, BurstsOfCalls, testing::Values("network", "auto", "ucx"));

TEST_P(BurstsOfCalls, ThatHaveWaitedForTheSessionAreAllAsked) {
  for (const auto& reply : AskMany(800, "short", 50 << 10)) EXPECT_TRUE(IsOk(reply));
  EXPECT_EQ(Metric(*client_, "peers_lost"), 0);
}

TEST_P(BurstsOfCalls, OfManyThatHaveWaitedForTheSessionAllAreAsked) {
  for (const auto& reply : AskMany(20000, "short", 1)) ASSERT_TRUE(IsOk(reply));
  EXPECT_EQ(Metric(*client_, "peers_lost"), 0);
}

TEST_P(BurstsOfCalls, OfASessionThatIsReadyAreAllAsked) {
  ASSERT_TRUE(IsOk(Ask("short", {}).reply.get()));
  for (const auto& reply : AskMany(60, "short", 1 << 20)) EXPECT_TRUE(IsOk(reply));
  EXPECT_EQ(Metric(*client_, "peers_lost"), 0);
}

// What there is no room for is said in short, and neither the session nor a fetch beside it ends.
TEST_P(BurstsOfCalls, LongRepliesThatHaveNoRoomAreErrors) {
  std::vector<CallKey> calls;
  std::promise<void> all_came;
  std::promise<std::shared_ptr<FetchHandle>> fetch;
  handler_.ServeWith([&](const CallKey& call, const std::string& function, const Fields&) {
    if (function == "fetch") {
      Node::FetchRequest request;
      request.ticket.lease_id = kLease;
      request.ticket.num_pages = 1;
      request.positions = OnePage();
      request.pages = OnePage();
      request.deadline = DeadlineInMs(kPatientMs);
      request.peer = call.peer;
      fetch.set_value(Must(server_->Fetch(std::move(request))));
      server_->Reply(call, Fields());
    } else {
      calls.push_back(call);
      if (calls.size() == 60) all_came.set_value();
    }
  });
  ASSERT_TRUE(
      IsOk(leases_.Publish(kLease, OnePage(), /*ready_layers=*/1, DeadlineInMs(kPatientMs))));
  ASSERT_TRUE(IsOk(Ask("fetch", {}).reply.get()));
  const std::shared_ptr<FetchHandle> fetched = fetch.get_future().get();
  ASSERT_TRUE(IsOk(fetched->WaitLayer(0, Soon())));
  std::vector<Asked> asked;
  for (int i = 0; i < 60; ++i) asked.push_back(Ask("f", {}, kPatientMs));
  all_came.get_future().wait();
  // From the thread that sends them, so that none has left before the last is there.
  handler_.ServeWith([&](const CallKey& last, const std::string&, const Fields&) {
    for (const CallKey& call : calls) {
      server_->Reply(call, Fields().Set("x", std::string(1 << 20, 'x')));
    }
    server_->Reply(last, Fields());
  });
  ASSERT_TRUE(IsOk(Ask("go", {}).reply.get()));
  int ok = 0;
  for (Asked& one : asked) {
    const absl::StatusOr<Fields> reply = one.reply.get();
    ok += reply.ok() ? 1 : 0;
    if (!reply.ok()) {
      EXPECT_TRUE(Fails(reply, absl::StatusCode::kResourceExhausted, "ask for less at a time"));
    }
  }
  EXPECT_GE(ok, 16);
  if (std::string_view(GetParam()) != "ucx") {  // ZeroMQ may take them all.
    EXPECT_LT(ok, 60);
  }
  for (const auto& reply : AskMany(5, "f", 1)) EXPECT_TRUE(IsOk(reply));  // There is room again.
  EXPECT_FALSE(fetched->done());
  EXPECT_EQ(Metric(*server_, "peers_lost"), 0);
  EXPECT_TRUE(IsOk(leases_.SetReadyLayers(kLease, server_pool_->layout().num_layers)));
  client_->LeaseChanged(kLease);
  EXPECT_TRUE(IsOk(fetched->Wait(Soon())));
}

}  // namespace
}  // namespace kvferry
