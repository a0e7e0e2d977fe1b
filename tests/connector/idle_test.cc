// Cores are the engine's: a node that waits does not run.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "base/cpu_seconds.h"
#include "tests/support/endpoints.h"
#include "tests/support/raw_peer.h"
#include "tests/support/sanitized.h"
#include "transport/ucx/ucx_data_plane.h"

namespace kvferry {
namespace {

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

  const double before = CpuSeconds(CLOCK_PROCESS_CPUTIME_ID);
  const Deadline end = DeadlineInMs(2000);
  while (Clock::now() < end) peer.Receive(end);  // Nothing but pings comes.
  EXPECT_LT(CpuSeconds(CLOCK_PROCESS_CPUTIME_ID) - before, 0.3) << "of 2 s";
  EXPECT_EQ(Metric(*prefill, "transfers_active"), 1);
}

Config PathOf(const std::string& same_host_path) {
  Config config;
  config.same_host_path = same_host_path;
  return config;
}

#ifdef KVFERRY_SANITIZED
constexpr double kNextToNothing = 1;
#else
constexpr double kNextToNothing = 0.3;
#endif

// Sessions that stand, of which nobody wants anything but pings. bench/sessions_bench.cc measures
// what it costs; this is for a thread that does not sleep.
TEST(Idle, SixtyFourPeersThatRestCostNextToNothing) {
  const auto source = MakePatternPool(SmallLayout(), 8, 1);
  const auto target = MakePatternPool(SmallLayout(), 8, 2);
  for (const std::string path : {"network", "auto"}) {
    const auto prefill = MakePrefill(source, PathOf(path));
    std::vector<std::unique_ptr<DecodeEndpoint>> decodes;
    for (int i = 0; i < 64; ++i) {
      decodes.push_back(MakeDecode(target, PathOf(path)));
      ASSERT_TRUE(IsOk(Fetch(*decodes[i], Publish(*prefill, *source, {1}), {1})->Wait(Soon())));
    }
    ASSERT_EQ(Metric(*prefill, "peers"), 64);
    const double before = CpuSeconds(CLOCK_PROCESS_CPUTIME_ID);
    std::this_thread::sleep_for(std::chrono::seconds(2));
    EXPECT_LT(CpuSeconds(CLOCK_PROCESS_CPUTIME_ID) - before, kNextToNothing)
        << "of 2 s of 65 nodes, " << path;
  }
}

int64_t ThreadsOfThisProcess() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

int64_t ThreadsOfOurs() {
  int64_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    count += name.starts_with("kvf-") ? 1 : 0;
  }
  return count;
}

// However much there is to move.
TEST(Busy, ATransferHasTheThreadsThatTheConfigurationSays) {
  const KvLayout layout = KvLayout::Mha(8, 16, 8, 64, DType::kBFloat16);
  const auto source = MakePatternPool(layout, 64, 1);
  const auto target = MakePatternPool(layout, 64, 2);
  std::mt19937_64 random(4);
  for (const std::string path : {"network", "in_place", "arena"}) {
    for (const auto& [lanes, copy_threads] : {std::pair{1, 1}, std::pair{3, 1}, std::pair{1, 4}}) {
      Config config = PathOf(path);
      config.lanes = lanes;
      config.copy_threads = copy_threads;
      const auto prefill = MakePrefill(source, config);
      const auto decode = MakeDecode(target, config);
      // On each side the progress thread, and those beside it.
      const int64_t expected = 2 * (lanes + copy_threads - 1);
      EXPECT_TRUE(WaitFor([&] { return ThreadsOfOurs() == expected; }, Soon()))
          << path << ", " << lanes << " lanes, " << copy_threads << " copy";
      const int64_t before = ThreadsOfThisProcess();
      for (int round = 0; round < 8; ++round) {
        const std::vector<int64_t> pages = MakePages("rand", 64, 64, &random);
        const auto handle = Fetch(*decode, Publish(*prefill, *source, pages), pages);
        while (!handle->done()) EXPECT_LE(ThreadsOfThisProcess(), before);
        EXPECT_TRUE(IsOk(handle->Wait(Soon())));
      }
    }
  }
}

}  // namespace
}  // namespace kvferry
