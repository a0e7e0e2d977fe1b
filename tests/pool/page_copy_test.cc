#include "pool/page_copy.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

TEST(PageCopy, RandomWindowsAgainstAByteLoop) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const int64_t item = 1 + static_cast<int64_t>(random() % 40);
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
    GatherPages(buffer, runs, offset, packed);
    for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(packed[i], *naive[offset + i]);

    for (std::byte& byte : packed) byte = static_cast<std::byte>(random());
    std::vector<std::byte> want = memory;
    for (int64_t i = 0; i < bytes; ++i) want[naive[offset + i] - memory.data()] = packed[i];
    ScatterPages(buffer, runs, offset, packed);
    ASSERT_EQ(memory, want);
  }
}

TEST(PageCopy, NothingAtTheEnd) {
  std::vector<std::byte> memory(8);
  const BufferInfo buffer{memory.data(), 8, 4};
  const PageRuns one(PageRun{1, 1});
  GatherPages(buffer, one, 4, {});
  ScatterPages(buffer, PageRuns(), 0, {});
}

}  // namespace
}  // namespace kvferry
