#include "transport/stream_plan.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// The stream of docs/wire_protocol.md, a byte at a time: where each byte lies, and its page's
// position.
struct Naive {
  std::vector<std::byte*> bytes;
  std::vector<int64_t> position;
};

Naive Expand(const KvPool& pool, const std::vector<int64_t>& pages) {
  Naive naive;
  for (int64_t layer = 0; layer < pool.layout().num_layers; ++layer) {
    for (int64_t tensor = 0; tensor < pool.layout().num_tensors(); ++tensor) {
      for (size_t i = 0; i < pages.size(); ++i) {
        for (std::byte& byte : pool.page(layer, tensor, pages[i])) {
          naive.bytes.push_back(&byte);
          naive.position.push_back(static_cast<int64_t>(i));
        }
      }
    }
  }
  return naive;
}

KvLayout RandomLayout(std::mt19937_64& random) {
  const auto upto = [&](int64_t max) { return 1 + static_cast<int64_t>(random() % max); };
  KvLayout layout{upto(4), upto(4), DType::kUint8, "NHD", {}};
  const int64_t tensors = upto(3);
  for (int64_t i = 0; i < tensors; ++i) layout.tensors.push_back({"t", upto(3), upto(9)});
  return layout;
}

class Plans : public testing::TestWithParam<uint64_t> {};

TEST_P(Plans, WindowsAgainstAByteLoop) {
  std::mt19937_64 random(GetParam());
  for (int round = 0; round < 40; ++round) {
    const KvLayout layout = RandomLayout(random);
    const auto pool = MakePatternPool(layout, 20, 7);
    const std::string shape = std::vector<std::string>{"seq", "runs8", "rand"}[random() % 3];
    const auto pages = MakePages(shape, 1 + static_cast<int64_t>(random() % 16), 20, &random);
    const StreamPlan plan = Must(StreamPlan::Create(pool, Must(PageRuns::FromPages(pages))));
    const Naive naive = Expand(*pool, pages);
    const auto total = static_cast<int64_t>(naive.bytes.size());
    ASSERT_EQ(plan.total_bytes(), total);
    ASSERT_EQ(plan.layer_bytes() * layout.num_layers, total);

    for (int window = 0; window < 30; ++window) {
      const int64_t offset = static_cast<int64_t>(random() % total);
      const int64_t bytes = static_cast<int64_t>(random() % (total - offset + 1));
      std::vector<std::byte> packed(bytes);
      plan.Gather(offset, packed);
      for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(packed[i], *naive.bytes[offset + i]) << i;

      // Scattering into a pool of another pattern changes the window and nothing else.
      const auto target = MakePatternPool(layout, 20, 8);
      const StreamPlan into = Must(StreamPlan::Create(target, Must(PageRuns::FromPages(pages))));
      const auto expected = MakePatternPool(layout, 20, 8);
      const Naive want = Expand(*expected, pages);
      for (int64_t i = 0; i < bytes; ++i) *want.bytes[offset + i] = packed[i];
      into.Scatter(offset, packed);
      for (int64_t buffer = 0; buffer < layout.num_buffers(); ++buffer) {
        const BufferInfo& a = target->buffer_infos()[buffer];
        const BufferInfo& b = expected->buffer_infos()[buffer];
        ASSERT_EQ(std::memcmp(a.address, b.address, a.bytes), 0) << "buffer " << buffer;
      }
    }
  }
}

TEST_P(Plans, PagesTouchedAgainstAByteLoop) {
  std::mt19937_64 random(GetParam() + 100);
  for (int round = 0; round < 60; ++round) {
    const KvLayout layout = RandomLayout(random);
    const auto pool = MakePatternPool(layout, 20, 7);
    const auto pages = MakePages("rand", 1 + static_cast<int64_t>(random() % 16), 20, &random);
    const StreamPlan plan = Must(StreamPlan::Create(pool, Must(PageRuns::FromPages(pages))));
    const Naive naive = Expand(*pool, pages);
    const auto total = static_cast<int64_t>(naive.bytes.size());
    // Gaps as ByteRanges makes them: in order, not touching each other.
    std::vector<std::pair<int64_t, int64_t>> gaps;
    std::set<int64_t> touched;
    for (int64_t at = 0; at < total;) {
      const int64_t begin = at + static_cast<int64_t>(random() % (total / 2 + 1));
      if (begin >= total) break;
      const int64_t end = begin + 1 + static_cast<int64_t>(random() % (total - begin));
      gaps.emplace_back(begin, end);
      for (int64_t i = begin; i < end; ++i) touched.insert(naive.position[i]);
      at = end + 1;
    }
    std::vector<int64_t> want;
    want.reserve(touched.size());
    for (const int64_t position : touched) want.push_back(pages[position]);
    ASSERT_EQ(plan.PagesTouchedBy(gaps), want);
  }
}

INSTANTIATE_TEST_SUITE_P(StreamPlan, Plans, testing::Range<uint64_t>(1, 6));

TEST(StreamPlan, PagesOutsideThePool) {
  const auto pool = MakePatternPool(KvLayout::Mla(2, 4, 8, DType::kUint8), 10, 1);
  const auto create = [&](std::vector<int64_t> pages) {
    return StreamPlan::Create(pool, Must(PageRuns::FromPages(pages))).status();
  };
  EXPECT_TRUE(IsOk(create({9, 0})));
  EXPECT_TRUE(Fails(create({10}), absl::StatusCode::kOutOfRange, "10 pages"));
  EXPECT_TRUE(Fails(create({8, 9, 10}), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(create(std::vector<int64_t>(11, 3)), absl::StatusCode::kOutOfRange));
}

TEST(StreamPlan, NoPages) {
  const auto pool = MakePatternPool(KvLayout::Mla(2, 4, 8, DType::kUint8), 10, 1);
  const StreamPlan plan = Must(StreamPlan::Create(pool, PageRuns()));
  EXPECT_EQ(plan.total_bytes(), 0);
  EXPECT_TRUE(plan.PagesTouchedBy({}).empty());
}

}  // namespace
}  // namespace kvferry
