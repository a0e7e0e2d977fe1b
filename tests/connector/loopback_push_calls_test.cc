// Pushes by calls that no endpoint of ours makes, and answers that none gives.

#include <gtest/gtest.h>

#include <future>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "connector/receive_table.h"
#include "tests/support/captured_log.h"
#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

constexpr uint64_t kSourceSeed = 1;
constexpr uint64_t kOwnSeed = 2;

// A node of ours that says what it likes to a decode endpoint.
class PushCalls : public testing::Test {
 protected:
  absl::Status Ask(const std::string& function, Fields args) {
    auto status = std::make_shared<absl::Status>();
    auto latch = std::make_shared<Latch>();
    Must(node_->Call({decode_->address(), function, std::move(args), Soon()},
                     [status, latch](const absl::StatusOr<Fields>& reply) {
                       *status = reply.status();
                       latch->Open();
                     }));
    EXPECT_TRUE(latch->Wait(Soon()));
    return *status;
  }
  static Config Quick() {
    Config config = SmallChunks();
    config.publish_grace_ms = 50;
    return config;
  }

  LeaseTable leases_{Quick()};
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 8, kSourceSeed);
  std::shared_ptr<KvPool> target_ = MakePatternPool(SmallLayout(), 8, kOwnSeed);
  std::unique_ptr<DecodeEndpoint> decode_ = MakePushedDecode(target_, Quick());
  std::unique_ptr<Node> node_ =
      Must(Node::Start({Quick(), kTestModel, "raw", source_, &leases_, nullptr, false}));
};

// What a peer calls itself, or asks for, begins no line of its own in an error.
TEST_F(PushCalls, ErrorsStayOnOneLine) {
  node_ = Must(Node::Start({Quick(), kTestModel, "x\nforged", source_, &leases_, nullptr, false}));
  EXPECT_TRUE(Fails(Ask("p\nforged", {}), absl::StatusCode::kUnimplemented, "'p\\nforged'"));
  const auto receive = Receive(*decode_, {1, 2, 3});
  const Fields push = Fields().Set("receive", receive.ticket.receive_id).Set("lease", 7);
  EXPECT_TRUE(Fails(Ask("push", Fields(push).Set("pages", 3).Set("tokens", uint64_t{0})),
                    absl::StatusCode::kNotFound, "refused by x\\nforged: "));
}

TEST_F(PushCalls, WrongArguments) {
  const auto receive = Receive(*decode_, {1, 2, 3});
  const uint64_t id = receive.ticket.receive_id;
  const auto args = [&] {
    return Fields().Set("receive", id).Set("lease", 7).Set("pages", 3).Set("tokens", uint64_t{0});
  };
  const auto is_invalid = [&](const Fields& wrong, const char* what) {
    return Fails(Ask("push", wrong), absl::StatusCode::kInvalidArgument, what);
  };
  EXPECT_TRUE(is_invalid(Fields(), "receive"));
  EXPECT_TRUE(is_invalid(Fields().Set("receive", id), "lease"));
  EXPECT_TRUE(is_invalid(Fields().Set("receive", id).Set("lease", 7), "pages"));
  EXPECT_TRUE(is_invalid(Fields().Set("receive", id).Set("lease", 7).Set("pages", 3), "tokens"));
  EXPECT_TRUE(is_invalid(args().Set("receive", std::string("x")), "receive"));
  EXPECT_TRUE(is_invalid(args().Set("lease", uint64_t{0}), "lease"));
  EXPECT_TRUE(is_invalid(args().Set("pages", UINT64_MAX), "pages"));
  EXPECT_TRUE(is_invalid(args().Set("tokens", UINT64_MAX), "tokens"));
  EXPECT_TRUE(Fails(Ask("pull", args()), absl::StatusCode::kUnimplemented, "pull"));
  EXPECT_TRUE(Fails(Ask("push", args().Set("pages", 4)), absl::StatusCode::kFailedPrecondition,
                    "is of 3 pages, the push of 4"));
  // Pages of another size are other numbers of them: 3 of 16 tokens are 1 or 2 of 32.
  EXPECT_TRUE(is_invalid(args().Set("page", uint64_t{0}), "page"));
  EXPECT_TRUE(is_invalid(args().Set("page", (1 << 20) + 1), "page"));
  EXPECT_TRUE(is_invalid(args().Set("page", std::string("x")), "page"));
  EXPECT_TRUE(Fails(Ask("push", args().Set("page", 32)), absl::StatusCode::kFailedPrecondition,
                    "is of 3 pages (16 tokens each), the push of 3 (32 tokens each)"));
  EXPECT_TRUE(Fails(Ask("push", args().Set("page", 32).Set("pages", uint64_t{0})),
                    absl::StatusCode::kFailedPrecondition, "the push of 0"));
  EXPECT_TRUE(Fails(Ask("push", args().Set("page", 1 << 20).Set("pages", 1 << 30)),
                    absl::StatusCode::kFailedPrecondition, "the push of 1073741824"));
  EXPECT_TRUE(Fails(Ask("push", args().Set("receive", uint64_t{0})), absl::StatusCode::kNotFound));
  EXPECT_FALSE(receive.handle->done());
}

// Both sides are told when the lease that the call names is not there, or is shorter than it says.
TEST_F(PushCalls, LeasesThatAreNotWhatTheCallSays) {
  const auto push = [&](const ReceiveTicket& ticket, uint64_t lease) {
    return Ask("push", Fields()
                           .Set("receive", ticket.receive_id)
                           .Set("lease", lease)
                           .Set("pages", 3)
                           .Set("tokens", uint64_t{0}));
  };
  const auto unknown = Receive(*decode_, {1, 2, 3});
  EXPECT_TRUE(Fails(push(unknown.ticket, 7), absl::StatusCode::kNotFound, "refused by"));
  EXPECT_TRUE(Fails(unknown.handle->Wait(Soon()), absl::StatusCode::kNotFound, "refused by"));
  ASSERT_TRUE(IsOk(leases_.Publish(8, Must(PageRuns::FromPages(std::vector<int64_t>{4, 5})), 4,
                                   DeadlineInMs(60000))));
  const auto shorter = Receive(*decode_, {1, 2, 3});
  EXPECT_TRUE(Fails(push(shorter.ticket, 8), absl::StatusCode::kOutOfRange, "2 pages"));
  EXPECT_TRUE(Fails(shorter.handle->Wait(Soon()), absl::StatusCode::kOutOfRange, "2 pages"));
  EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
}

// A decode side that has not fetched anything cannot have everything.
TEST_F(PushCalls, SuccessWithoutAFetchIsNone) {
  class Liar : public CallHandler {
   public:
    void OnCall(const CallKey& call, const std::string&, const Fields&, Deadline) override {
      node->Reply(call, Fields());
    }
    void OnCallDropped(const CallKey&) override {}
    Node* node = nullptr;
  };
  Liar liar;
  const std::unique_ptr<Node> node =
      Must(Node::Start({Quick(), kTestModel, "liar", target_, nullptr, &liar, true}));
  liar.node = node.get();
  const auto prefill = MakePrefill(source_, Quick());
  const auto push =
      Push(*prefill, {node->listen_address(), node->epoch(), 5, 2, 0}, *source_, {1, 2});
  EXPECT_TRUE(Fails(push->Wait(Soon()), absl::StatusCode::kInternal, "has not fetched"));
  EXPECT_EQ(EndedLeases(prefill.get()).Wait(push->lease_id(), Clock::now()), "released");
}

// The lease stays, and so does its transfer: it is the call that is taken back.
TEST_F(PushCalls, ACallThatIsTakenBackEndsTheReceive) {
  CapturedLog log;
  const std::vector<int64_t> pages = {4, 5, 6};
  ASSERT_TRUE(IsOk(leases_.Publish(9, Must(PageRuns::FromPages(pages)), 1, DeadlineInMs(60000))));
  const auto receive = Receive(*decode_, {1, 2, 3});
  const uint64_t call = Must(node_->Call({decode_->address(), "push",
                                          Fields()
                                              .Set("receive", receive.ticket.receive_id)
                                              .Set("lease", 9)
                                              .Set("pages", 3)
                                              .Set("tokens", uint64_t{0}),
                                          Soon()},
                                         [](const absl::StatusOr<Fields>&) {}));
  ASSERT_TRUE(IsOk(receive.handle->WaitLayer(0, Soon())));
  node_->CancelCall(call);
  EXPECT_TRUE(Fails(receive.handle->Wait(Soon()), absl::StatusCode::kAborted,
                    "the prefill side gave the push up"));
  // Who knows the ticket must not know the transfer's id: chunks are sent to it.
  const std::string id = absl::StrCat("fetch ", absl::Hex(receive.ticket.receive_id));
  EXPECT_TRUE(log.Has({"fetch", "gave the push up"})) << log.ToString();
  EXPECT_FALSE(log.Has({id, "gave the push up"})) << log.ToString();
}

// A call that its caller has cancelled is answered when its receive has ended; until then another
// of the same id would be given that answer.
TEST_F(PushCalls, ACallsIdIsInUseUntilItsReceiveHasEnded) {
  class Keeper : public CallHandler {
   public:
    void OnCall(const CallKey& call, const std::string& function, const Fields& args,
                Deadline deadline) override {
      last = call;
      table.OnCall(call, function, args, deadline);
    }
    void OnCallDropped(const CallKey& call) override { table.OnCallDropped(call); }
    ReceiveTable table{16};
    CallKey last;
  };
  Keeper keeper;
  const std::unique_ptr<Node> node =
      Must(Node::Start({Quick(), kTestModel, "decode", target_, nullptr, &keeper, true}));
  keeper.table.Attach(node.get());
  const auto receive = [&](int64_t page) {
    Node::FetchRequest request;
    request.ticket.num_pages = 1;
    request.positions = Must(PageRuns::FromPages(std::vector<int64_t>{0}));
    request.pages = Must(PageRuns::FromPages(std::vector<int64_t>{page}));
    request.deadline = Soon();
    return Must(keeper.table.Add(std::move(request), 1, 0));
  };
  const auto first = receive(1), second = receive(2);
  const auto args = [](const ReceiveTable::Added& added) {
    return Fields()
        .Set("receive", added.receive_id)
        .Set("lease", 9)
        .Set("pages", 1)
        .Set("tokens", uint64_t{0});
  };
  ASSERT_TRUE(IsOk(leases_.Publish(9, Must(PageRuns::FromPages(std::vector<int64_t>{4})), 1,
                                   DeadlineInMs(60000))));
  auto answered = BeginCall(*node_, node->listen_address(), "push", args(first));
  ASSERT_TRUE(IsOk(first.handle->WaitLayer(0, Soon())));
  keeper.table.OnCall(keeper.last, "push", args(second), Soon());
  ASSERT_EQ(answered.wait_until(DeadlineInMs(10000)), std::future_status::ready);
  EXPECT_TRUE(Fails(answered.get(), absl::StatusCode::kAlreadyExists, "id is in use"));
  EXPECT_FALSE(second.handle->done());
}

}  // namespace
}  // namespace kvferry
