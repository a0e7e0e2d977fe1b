// Cores are the engine's: a node that waits does not run.

#include <gtest/gtest.h>

#include <ctime>

#include "tests/support/endpoints.h"
#include "tests/support/raw_peer.h"
#include "transport/ucx/ucx_data_plane.h"

namespace kvferry {
namespace {

double CpuSecondsOfThisProcess() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// The peer's kernel has accepted UCX's connection, its UCX has not: the process is stopped, say, or
// waits for a processor that we must not take. UCX's event fd stays readable all the time.
TEST(Idle, APeerThatDoesNotAnswerCostsNoProcessor) {
  const auto source = MakePatternPool(SmallLayout(), 8, 1);
  Config config = SmallChunks();
  config.ucx_tls = "tcp";
  const auto prefill = MakePrefill(source, config);
  const auto silent = Must(MakeUcxDataPlane(config));
  RawDecode peer(prefill->address());
  constexpr uint64_t kEpoch = 4242;
  peer.Send({kEpoch, 0, HelloMsg{"silent", kTestModel, SmallLayout(), {silent->address()}}});
  ASSERT_TRUE(peer.Receive(Soon()).has_value());
  FetchMsg fetch;
  fetch.transfer_id = 1;
  fetch.lease_id = Publish(*prefill, *source, {0, 1, 2}).lease_id;
  fetch.positions = Must(PageRuns::FromPages(std::vector<int64_t>{0, 1, 2}));
  fetch.timeout_ms = 60000;
  fetch.window_bytes = fetch.chunk_bytes = 4096;
  peer.Send({kEpoch, prefill->epoch(), fetch});
  ASSERT_TRUE(WaitFor([&] { return Metric(*prefill, "bytes_sent") > 0; }, Soon()));

  const double before = CpuSecondsOfThisProcess();
  const Deadline end = DeadlineInMs(2000);
  while (Clock::now() < end) peer.Receive(end);  // Nothing but pings comes.
  EXPECT_LT(CpuSecondsOfThisProcess() - before, 0.3) << "of 2 s";
  EXPECT_EQ(Metric(*prefill, "transfers_active"), 1);
}

}  // namespace
}  // namespace kvferry
