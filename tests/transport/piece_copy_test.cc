#include "transport/piece_copy.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/pool/guarded_memory.h"
#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// The bytes, cut anywhere, as pieces of a pool are cut differently from those of another.
std::vector<std::span<const std::byte>> Cut(const std::vector<std::byte>& bytes, int64_t longest,
                                            std::mt19937_64& random) {
  std::vector<std::span<const std::byte>> pieces;
  std::span<const std::byte> rest = bytes;
  while (!rest.empty()) {
    const size_t piece = std::min<size_t>(rest.size(), random() % (longest + 1));
    pieces.push_back(rest.first(piece));  // An empty one now and then.
    rest = rest.subspan(piece);
  }
  return pieces;
}

// Into a pool in `memory`, in pieces, what Scatter() puts into one on the host.
void CopyAsScatter(const std::shared_ptr<const PoolMemory>& memory, int64_t num_threads) {
  const auto threads = Must(ThreadPool::Create(num_threads));
  PieceCopy copy(threads.get());
  std::mt19937_64 random(num_threads);
  const KvLayout layout = KvLayout::Mha(3, 16, 4, 64, DType::kBFloat16);  // 8 KiB an item.
  for (int round = 0; round < 60; ++round) {
    const std::string shape = std::vector<std::string>{"seq", "runs8", "rand"}[random() % 3];
    const auto pages = MakePages(shape, 1 + static_cast<int64_t>(random() % 40), 48, &random);
    const auto target = Must(KvPool::CreateIn(layout, 48, memory));
    FillPattern(*target, 8);
    const auto expected = MakePatternPool(layout, 48, 8);
    const PageRuns runs = Must(PageRuns::FromPages(pages));
    const StreamPlan into = Must(StreamPlan::Create(target, runs));
    const int64_t offset = static_cast<int64_t>(random() % into.total_bytes());
    std::vector<std::byte> bytes(random() % (into.total_bytes() - offset + 1));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    const auto pieces = Cut(bytes, round % 2 == 0 ? 3000 : 200000, random);
    ASSERT_TRUE(IsOk(copy.Run(into, offset, pieces)));
    ASSERT_TRUE(IsOk(Must(StreamPlan::Create(expected, runs)).Scatter(offset, bytes)));
    for (int64_t buffer = 0; buffer < layout.num_buffers(); ++buffer) {
      for (int64_t page = 0; page < 48; ++page) {
        ASSERT_EQ(ReadPage(*target, buffer, page), ReadPage(*expected, buffer, page))
            << "buffer " << buffer << " page " << page;
      }
    }
  }
}

class PieceCopies : public testing::TestWithParam<int64_t> {};

TEST_P(PieceCopies, AsScatter) { CopyAsScatter(HostMemory(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(Threads, PieceCopies, testing::Values(0, 1, 3));

TEST(PieceCopiesToADevice, AsScatter) { CopyAsScatter(std::make_shared<GuardedMemory>(), 0); }

// However many pieces there are.
TEST(PieceCopiesToADevice, AreAskedForAtOnce) {
  const auto memory = std::make_shared<GuardedMemory>();
  const auto pool = Must(KvPool::CreateIn(KvLayout::Mla(1, 1, 1 << 20, DType::kUint8), 4, memory));
  const StreamPlan plan = Must(StreamPlan::Create(pool, PageRuns(PageRun{0, 4})));
  const auto threads = Must(ThreadPool::Create(0));
  PieceCopy copy(threads.get());
  const std::vector<std::byte> bytes(3 << 20);
  const auto runs = [&](size_t piece) {
    std::vector<std::span<const std::byte>> pieces;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      pieces.push_back(std::span(bytes).subspan(at, std::min(piece, bytes.size() - at)));
    }
    const int64_t before = memory->num_runs;
    EXPECT_TRUE(IsOk(copy.Run(plan, 1000, pieces)));
    return memory->num_runs - before;
  };
  EXPECT_EQ(runs(bytes.size()), 1);
  EXPECT_EQ(runs(100), 1);
}

}  // namespace
}  // namespace kvferry
