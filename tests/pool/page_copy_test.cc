#include "pool/page_copy.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// How pages are gathered and scattered.
struct PageCopyWay {
  std::string name;
  int64_t max_item;
  std::function<void(const BufferInfo&, const PageRuns&, int64_t, std::span<std::byte>)> gather;
  std::function<void(const BufferInfo&, const PageRuns&, int64_t, std::span<const std::byte>)>
      scatter;
};

void Run(const PageCopies& copies) { ASSERT_TRUE(IsOk(HostMemory()->RunApart(copies.copies()))); }

PageCopyWay ByCopies(const std::string& name, int64_t max_item) {
  return {name, max_item,
          [](const BufferInfo& buffer, const PageRuns& runs, int64_t offset, auto packed) {
            PageCopies copies;
            ASSERT_TRUE(IsOk(copies.Gather(buffer, runs, offset, packed)));
            Run(copies);
          },
          [](const BufferInfo& buffer, const PageRuns& runs, int64_t offset, auto packed) {
            PageCopies copies;
            ASSERT_TRUE(IsOk(copies.Scatter(buffer, runs, offset, packed)));
            Run(copies);
          }};
}

class PageCopy : public testing::TestWithParam<PageCopyWay> {};

// Some pieces are long enough for copies of their own, some are not.
INSTANTIATE_TEST_SUITE_P(Ways, PageCopy,
                         testing::Values(PageCopyWay{"Direct", 40, GatherPages, ScatterPages},
                                         ByCopies("CopiesOfSmallPages", 40),
                                         ByCopies("CopiesOfLongPages", 100 << 10)),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(PageCopy, RandomWindowsAgainstAByteLoop) {
  std::mt19937_64 random(1);
  const PageCopyWay& way = GetParam();
  for (int round = 0; round < (way.max_item > 40 ? 30 : 2000); ++round) {
    const int64_t item = 1 + static_cast<int64_t>(random() % way.max_item);
    std::vector<std::byte> memory(24 * item);
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
    const BufferInfo buffer{memory.data(), 24 * item, item};
    const std::string shape = std::vector<std::string>{"seq", "runs8", "rand"}[random() % 3];
    const auto pages = MakePages(shape, 1 + static_cast<int64_t>(random() % 24), 24, &random);
    const PageRuns runs = Must(PageRuns::FromPages(pages));
    std::vector<std::byte*> naive;
    for (const int64_t page : pages) {
      for (int64_t i = 0; i < item; ++i) naive.push_back(memory.data() + page * item + i);
    }
    const int64_t offset = static_cast<int64_t>(random() % (naive.size() + 1));
    const int64_t bytes = static_cast<int64_t>(random() % (naive.size() - offset + 1));

    std::vector<std::byte> packed(bytes);
    way.gather(buffer, runs, offset, packed);
    for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(packed[i], *naive[offset + i]);

    for (std::byte& byte : packed) byte = static_cast<std::byte>(random());
    std::vector<std::byte> want = memory;
    for (int64_t i = 0; i < bytes; ++i) want[naive[offset + i] - memory.data()] = packed[i];
    way.scatter(buffer, runs, offset, packed);
    ASSERT_EQ(memory, want);
  }
}

TEST_P(PageCopy, NothingAtTheEnd) {
  std::vector<std::byte> memory(8);
  const BufferInfo buffer{memory.data(), 8, 4};
  const PageRuns one(PageRun{1, 1});
  GetParam().gather(buffer, one, 4, {});
  GetParam().scatter(buffer, PageRuns(), 0, {});
}

// What a device is asked for: short pieces are one copy, with what a page lacks on either side.
TEST(PageCopiesTest, ShortPiecesAreOneCopyAndLongOnesEachTheirOwn) {
  const auto copies_of = [](int64_t item, std::vector<int64_t> pages, int64_t offset,
                            int64_t bytes) {
    std::vector<std::byte> memory(10 * item), packed(bytes);
    PageCopies copies;
    EXPECT_TRUE(IsOk(copies.Gather({memory.data(), 10 * item, item},
                                   Must(PageRuns::FromPages(pages)), offset, packed)));
    return copies.copies().size();
  };
  EXPECT_EQ(copies_of(1024, {7, 3, 5, 1}, 0, 4096), 1);
  EXPECT_EQ(copies_of(1024, {7, 3, 5, 1}, 100, 3900), 3);
  EXPECT_EQ(copies_of(1024, {7, 3, 5, 1}, 1000, 48), 2);
  EXPECT_EQ(copies_of(1024, {3, 4, 5, 6}, 100, 3900), 1);
  EXPECT_EQ(copies_of(64 << 10, {7, 3, 5, 1}, 0, 256 << 10), 4);
  EXPECT_EQ(copies_of(1024, {7}, 1024, 0), 0);
}

}  // namespace
}  // namespace kvferry
