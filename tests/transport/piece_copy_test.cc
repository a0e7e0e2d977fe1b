#include "transport/piece_copy.h"

#include <gtest/gtest.h>

#include <random>

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

class PieceCopies : public testing::TestWithParam<int64_t> {};

TEST_P(PieceCopies, AsScatter) {
  const auto threads = Must(ThreadPool::Create(GetParam()));
  PieceCopy copy(threads.get());
  std::mt19937_64 random(GetParam());
  const KvLayout layout = KvLayout::Mha(3, 16, 4, 64, DType::kBFloat16);  // 8 KiB an item.
  for (int round = 0; round < 60; ++round) {
    const std::string shape = std::vector<std::string>{"seq", "runs8", "rand"}[random() % 3];
    const auto pages = MakePages(shape, 1 + static_cast<int64_t>(random() % 40), 48, &random);
    const auto target = MakePatternPool(layout, 48, 8);
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
      const BufferInfo& a = target->buffer_infos()[buffer];
      const BufferInfo& b = expected->buffer_infos()[buffer];
      ASSERT_EQ(std::memcmp(a.address, b.address, a.bytes), 0) << "buffer " << buffer;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, PieceCopies, testing::Values(0, 1, 3));

}  // namespace
}  // namespace kvferry
