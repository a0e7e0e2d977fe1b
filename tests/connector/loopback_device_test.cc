// Pools that the processor cannot touch, on either side or both.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <tuple>

#include "tests/pool/guarded_memory.h"
#include "tests/support/endpoints.h"

namespace kvferry {
namespace {

constexpr uint64_t kSourceSeed = 1;
constexpr uint64_t kOwnSeed = 2;
constexpr int64_t kPoolPages = 64;

std::shared_ptr<KvPool> PatternPoolIn(std::shared_ptr<const PoolMemory> memory,
                                      const KvLayout& layout, uint64_t seed) {
  auto pool = Must(KvPool::CreateIn(layout, kPoolPages, std::move(memory)));
  FillPattern(*pool, seed);
  return pool;
}

// The pool of the path, and one on a device.
class BetweenPools
    : public testing::TestWithParam<std::tuple<std::string, std::string, std::string>> {};

TEST_P(BetweenPools, EveryByteAndNoOther) {
  const auto& [way, layout_name, shape] = GetParam();
  if (PathUnderTest() == TestPath::kDirect && way != "to") {
    GTEST_SKIP() << "a device is not read from afar";
  }
  const KvLayout layout = LayoutNamed(layout_name);
  const auto make = [&](bool on_device, uint64_t seed) {
    return on_device ? PatternPoolIn(memory_of_device(), layout, seed)
                     : MakePatternPool(layout, kPoolPages, seed);
  };
  const auto source = make(way != "to", kSourceSeed);
  const auto target = make(way != "from", kOwnSeed);
  const auto prefill = MakePrefill(source, SmallChunks());
  const auto decode = MakePushedDecode(target, SmallChunks());
  std::mt19937_64 random(7);
  const std::vector<int64_t> published = MakePages(shape, 40, kPoolPages, &random);
  const std::vector<int64_t> local = MakePages(shape, 40, kPoolPages, &random);
  const auto fetch = Fetch(*decode, Publish(*prefill, *source, published), local);
  ASSERT_TRUE(IsOk(fetch->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target, kOwnSeed, local, kSourceSeed, published));

  FillPattern(*target, kOwnSeed);
  const auto receive = Receive(*decode, local);
  const auto push = Push(*prefill, receive.ticket, *source, published);
  ASSERT_TRUE(IsOk(receive.handle->Wait(Soon())));
  EXPECT_TRUE(HoldsExactly(*target, kOwnSeed, local, kSourceSeed, published));
  EXPECT_TRUE(IsUntouched(*source, kSourceSeed));
}

INSTANTIATE_TEST_SUITE_P(Loopback, BetweenPools,
                         testing::Combine(testing::Values("to", "from", "on"),
                                          testing::Values("mha", "mla", "odd"),
                                          testing::Values("seq", "rand")),
                         [](const auto& instance) {
                           return std::get<0>(instance.param) + "_device_" +
                                  std::get<1>(instance.param) + "_" + std::get<2>(instance.param);
                         });

// A fetch whose pages cannot be copied fails with the reason, on whichever side; what can be
// fetched then is.
class FailingDevices : public testing::Test {
 protected:
  void SetUp() override {
    if (PathUnderTest() == TestPath::kDirect) GTEST_SKIP() << "a device is not read from afar";
  }
  void FailsWhile(GuardedMemory* memory, const std::string& told) {
    const Ticket ticket = Publish(*prefill_, *source_, pages_, -1, 60000);
    memory->failure = absl::UnavailableError("fell off the bus");
    const auto failed = Fetch(*decode_, ticket, pages_);
    EXPECT_TRUE(Fails(failed->Wait(Soon()), absl::StatusCode::kInternal, told,
                      "pages in guarded memory could not be copied: fell off the bus"));
    EXPECT_EQ(failed->missing_pages(), pages_);
    memory->failure = absl::OkStatus();
    EXPECT_TRUE(IsUntouched(*target_, kOwnSeed));
    const auto again = Fetch(*decode_, ticket, pages_);
    EXPECT_TRUE(IsOk(again->Wait(Soon())));
    EXPECT_TRUE(HoldsExactly(*target_, kOwnSeed, pages_, kSourceSeed, pages_));
  }

  const std::vector<int64_t> pages_ = {9, 4, 5, 40};
  const std::shared_ptr<GuardedMemory> there_ = std::make_shared<GuardedMemory>();
  const std::shared_ptr<GuardedMemory> here_ = std::make_shared<GuardedMemory>();
  const std::shared_ptr<KvPool> source_ = PatternPoolIn(there_, SmallLayout(), kSourceSeed);
  const std::shared_ptr<KvPool> target_ = PatternPoolIn(here_, SmallLayout(), kOwnSeed);
  const Config config_ = [] {
    Config config = SmallChunks();
    config.lanes = 1;  // GuardedMemory is one thread's.
    return config;
  }();
  const std::unique_ptr<PrefillEndpoint> prefill_ =
      PathUnderTest() == TestPath::kDirect ? nullptr : MakePrefill(source_, config_);
  const std::unique_ptr<DecodeEndpoint> decode_ = MakeDecode(target_, config_);
};

TEST_F(FailingDevices, OfTheSender) { FailsWhile(there_.get(), "given up by "); }

// The lease had expired while it was read, and nothing else happens.
TEST_F(FailingDevices, OfTheSenderEndTheLease) {
  Config config = config_;
  config.heartbeat_interval_ms = 100000;
  config.heartbeat_timeout_ms = 600000;
  const auto prefill = MakePrefill(source_, config);
  const auto decode = MakeDecode(target_, config);
  const Ticket ticket = Publish(*prefill, *source_, pages_, 1, 3000);
  const Deadline expired = DeadlineInMs(3100);
  const auto fetch = Fetch(*decode, ticket, pages_);
  ASSERT_TRUE(IsOk(fetch->WaitLayer(0, Soon())));
  ASSERT_TRUE(WaitFor([&] { return Clock::now() > expired; }, Soon()));
  there_->failure = absl::UnavailableError("fell off the bus");
  ASSERT_TRUE(IsOk(prefill->AllLayersReady(ticket.lease_id)));
  EXPECT_FALSE(fetch->Wait(Soon()).ok());
  EXPECT_EQ(EndedLeases(prefill.get()).Wait(ticket.lease_id), "expired");
}

TEST_F(FailingDevices, OfTheReceiver) { FailsWhile(here_.get(), ""); }

TEST(DevicePoolsAfar, AreRefused) {
  const auto pool = PatternPoolIn(std::make_shared<GuardedMemory>(), SmallLayout(), 1);
  Config config;
  config.network_path = "direct";
  EXPECT_TRUE(Fails(PrefillEndpoint::Create(pool, {config, kTestModel, "prefill"}),
                    absl::StatusCode::kFailedPrecondition,
                    "network_path is 'direct', but the pool lies in guarded memory"));
}

}  // namespace
}  // namespace kvferry
