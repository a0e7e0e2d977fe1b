#include "pool/page_runs.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/support/status.h"

namespace kvferry {
namespace {

PageRuns Runs(const std::vector<int64_t>& pages) { return Must(PageRuns::FromPages(pages)); }

std::vector<PageRun> ListOf(const PageRuns& runs) {
  return {runs.runs().begin(), runs.runs().end()};
}

TEST(Runs, Neighbours) {
  const PageRuns runs = Runs({4, 5, 6, 9, 10, 8, 8});
  EXPECT_EQ(ListOf(runs), (std::vector<PageRun>{{4, 3}, {9, 2}, {8, 1}, {8, 1}}));
  EXPECT_EQ(runs.ToPages(), (std::vector<int64_t>{4, 5, 6, 9, 10, 8, 8}));
}

TEST(Runs, BadPages) {
  EXPECT_TRUE(Fails(PageRuns::FromPages(std::vector<int64_t>{0, -1}),
                    absl::StatusCode::kInvalidArgument, "-1"));
  EXPECT_TRUE(Fails(PageRuns::FromPages(std::vector<int64_t>{PageRuns::kMaxPages}),
                    absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(IsOk(PageRuns::FromPages(std::vector<int64_t>{PageRuns::kMaxPages - 1})));
}

TEST(Runs, BadRuns) {
  const auto from = [](std::vector<PageRun> runs) { return PageRuns::FromRuns(runs).status(); };
  const int64_t max = PageRuns::kMaxPages;
  EXPECT_TRUE(IsOk(from({})));
  EXPECT_TRUE(IsOk(from({{0, max}})));
  for (const auto& runs : std::vector<std::vector<PageRun>>{{{-1, 1}},
                                                            {{0, 0}},
                                                            {{0, -1}},
                                                            {{max + 1, 1}},
                                                            {{0, max + 1}},
                                                            {{0, max}, {0, 1}},
                                                            {{INT64_MAX, 1}},
                                                            {{0, INT64_MAX}},
                                                            {{INT64_MAX, INT64_MAX}},
                                                            {{INT64_MIN, 1}}}) {
    EXPECT_TRUE(Fails(from(runs), absl::StatusCode::kInvalidArgument))
        << runs[0].first << " x " << runs[0].count;
  }
}

TEST(Runs, AsFarAsTheyReach) {
  const int64_t max = PageRuns::kMaxPages;
  const PageRuns runs = Must(PageRuns::FromRuns(std::vector<PageRun>{{max, max - 1}, {7, 1}}));
  EXPECT_EQ(ListOf(runs), (std::vector<PageRun>{{max, max - 1}, {7, 1}}));
  EXPECT_EQ(runs.num_pages(), max);
  EXPECT_EQ(runs.PageAt(max - 2), 2 * max - 2);
  EXPECT_EQ(runs.PageAt(max - 1), 7);
  EXPECT_EQ(PageRuns(PageRun{max, max}).num_pages(), max);
}

TEST(Runs, CheckWithin) {
  EXPECT_TRUE(IsOk(Runs({0, 9}).CheckWithin(10)));
  EXPECT_TRUE(
      Fails(Runs({0, 10}).CheckWithin(10), absl::StatusCode::kOutOfRange, "[10, 11)", "10 pages"));
  EXPECT_TRUE(
      Fails(Runs({8, 9, 10, 11}).CheckWithin(10), absl::StatusCode::kOutOfRange, "[8, 12)"));
  EXPECT_TRUE(IsOk(PageRuns().CheckWithin(0)));
}

TEST(Runs, AgainstAVector) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 1000; ++round) {
    std::vector<int64_t> pages;
    int64_t page = static_cast<int64_t>(random() % 50);
    const uint64_t count = random() % 60;
    for (uint64_t i = 0; i < count; ++i) {
      pages.push_back(page);
      page = random() % 3 != 0 ? page + 1 : static_cast<int64_t>(random() % 50);
    }
    const PageRuns runs = Runs(pages);
    const auto n = static_cast<int64_t>(pages.size());
    ASSERT_EQ(runs.num_pages(), n);
    ASSERT_EQ(runs.ToPages(), pages);
    ASSERT_EQ(Must(PageRuns::FromRuns(ListOf(runs))).ToPages(), pages);
    for (int operation = 0; operation < 100; ++operation) {
      if (n > 0) {
        const int64_t position = static_cast<int64_t>(random() % pages.size());
        ASSERT_EQ(runs.PageAt(position), pages[position]);
        const size_t run = runs.RunAt(position);
        ASSERT_LT(position, runs.RunEnd(run));
        ASSERT_GE(position, runs.RunBegin(run));
        ASSERT_EQ(runs.RunEnd(run) - runs.RunBegin(run), runs.Run(run).count);
      }
      const int64_t first = static_cast<int64_t>(random() % 64) - 2;
      const int64_t length = static_cast<int64_t>(random() % 64) - 2;
      const absl::StatusOr<PageRuns> slice = runs.Slice(first, length);
      if (first < 0 || length < 0 || first + length > n) {
        ASSERT_TRUE(Fails(slice, absl::StatusCode::kOutOfRange));
      } else {
        ASSERT_EQ(Must(slice).ToPages(),
                  std::vector<int64_t>(pages.begin() + first, pages.begin() + first + length));
      }
    }
  }
}

TEST(Runs, SliceDoesNotOverflow) {
  EXPECT_TRUE(Fails(Runs({1, 2}).Slice(1, INT64_MAX), absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(Fails(Runs({1, 2}).Slice(INT64_MAX, 1), absl::StatusCode::kOutOfRange));
}

}  // namespace
}  // namespace kvferry
