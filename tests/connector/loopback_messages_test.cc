// Which way messages of a session take, and what depends on their order.

#include <gtest/gtest.h>

#include "tests/support/captured_log.h"
#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

class Messages : public testing::Test {
 protected:
  CapturedLog log_;
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 8, 1);
  std::shared_ptr<KvPool> target_ = MakePatternPool(SmallLayout(), 8, 2);
  std::unique_ptr<PrefillEndpoint> prefill_ = MakePrefill(source_, SmallChunks());
  EndedLeases ended_{prefill_.get()};
};

TEST_F(Messages, GoOverTheDataConnection) {
  const auto decode = MakeDecode(target_, SmallChunks());
  const Ticket ticket = Publish(*prefill_, *source_, {1, 7});
  ASSERT_TRUE(IsOk(Fetch(*decode, ticket, {5, 0})->Wait(Soon())));
  EXPECT_EQ(ended_.Wait(ticket.lease_id), "fetched");
  EXPECT_EQ(Metric(*decode, "messages_by_link"),
            PathUnderTest() == TestPath::kUcx ? 0 : 2);  // fetch and done
  // A refusal comes back the same way.
  const auto again = Fetch(*decode, ticket, {5, 0});
  EXPECT_TRUE(Fails(again->Wait(Soon()), absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(Metric(*prefill_, "messages_by_link"), PathUnderTest() == TestPath::kUcx ? 0 : 1);
}

// `bye` does not overtake `done`.
TEST_F(Messages, WhoFetchesAndLeavesHasFetched) {
  for (int i = 0; i < 30; ++i) {
    const Ticket ticket = Publish(*prefill_, *source_, {1, 7});
    auto decode = MakeDecode(target_, SmallChunks());
    ASSERT_TRUE(IsOk(Fetch(*decode, ticket, {5, 0})->Wait(Soon())));
    decode.reset();
    EXPECT_EQ(ended_.Wait(ticket.lease_id), "fetched");
  }
  EXPECT_TRUE(WaitFor([&] { return Metric(*prefill_, "peers") == 0; }, Soon()));
}

}  // namespace
}  // namespace kvferry
