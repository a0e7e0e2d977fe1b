#include "pool/page_allocator.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "bench/churn.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

PageRuns Pages(const std::vector<int64_t>& pages) { return Must(PageRuns::FromPages(pages)); }

TEST(Allocator, BadSizes) {
  EXPECT_TRUE(
      Fails(PageAllocator::Create(4, 4), absl::StatusCode::kInvalidArgument, "reserved is 4"));
  EXPECT_TRUE(Fails(PageAllocator::Create(4, -1), absl::StatusCode::kInvalidArgument));
  for (const int64_t none : {int64_t{0}, INT64_MIN}) {
    EXPECT_TRUE(Fails(PageAllocator::Create(none, 0), absl::StatusCode::kInvalidArgument,
                      "num_pages is ", "[1, 1073741824]"));
  }
  EXPECT_TRUE(Fails(PageAllocator::Create(PageRuns::kMaxPages + 1, 0),
                    absl::StatusCode::kInvalidArgument, "num_pages is 1073741825"));
}

TEST(Allocator, ReservedPagesAreNeverHandedOut) {
  PageAllocator allocator = Must(PageAllocator::Create(10, 2));
  EXPECT_EQ(allocator.num_free(), 8);
  EXPECT_EQ(Must(allocator.Allocate(8)).ToPages(), (std::vector<int64_t>{2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_TRUE(Fails(allocator.Free(Pages({1})), absl::StatusCode::kInvalidArgument, "outside"));
}

TEST(Allocator, ErrorsChangeNothing) {
  PageAllocator allocator = Must(PageAllocator::Create(10, 0));
  ASSERT_TRUE(IsOk(allocator.Allocate(6)));  // 0..5
  const auto same = [&] {
    return allocator.num_free() == 4 && allocator.num_free_runs() == 1 &&
           allocator.longest_free_run() == 4;
  };
  EXPECT_TRUE(
      Fails(allocator.Allocate(5), absl::StatusCode::kResourceExhausted, "5 pages asked, 4 of 10"));
  EXPECT_TRUE(Fails(allocator.Allocate(0), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(allocator.Allocate(-1), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(same());
  EXPECT_TRUE(Fails(allocator.Free(Pages({0, 1, 6})), absl::StatusCode::kInvalidArgument,
                    "page 6 is already free"));
  EXPECT_TRUE(
      Fails(allocator.Free(Pages({4, 5, 6, 7})), absl::StatusCode::kInvalidArgument, "page 6"));
  EXPECT_TRUE(Fails(allocator.Free(Pages({3, 0, 3})), absl::StatusCode::kInvalidArgument,
                    "page 3 is freed twice"));
  EXPECT_TRUE(
      Fails(allocator.Free(Pages({2, 3, 3, 4})), absl::StatusCode::kInvalidArgument, "page 3"));
  EXPECT_TRUE(
      Fails(allocator.Free(Pages({0, 10})), absl::StatusCode::kInvalidArgument, "[10, 11)"));
  EXPECT_TRUE(Fails(allocator.Free(Pages({9})), absl::StatusCode::kInvalidArgument, "page 9"));
  EXPECT_TRUE(same());
  ASSERT_TRUE(IsOk(allocator.Free(Pages({0}))));
  EXPECT_TRUE(Fails(allocator.Free(Pages({0})), absl::StatusCode::kInvalidArgument,
                    "page 0 is already free"));
}

TEST(Allocator, PrefersTheTightestRunWithRoomToGrow) {
  PageAllocator allocator = Must(PageAllocator::Create(100, 0));
  ASSERT_TRUE(IsOk(allocator.Allocate(100)));
  ASSERT_TRUE(
      IsOk(allocator.Free(Must(PageRuns::FromRuns({{{0, 10}, {20, 12}, {40, 15}, {60, 1}}})))));
  EXPECT_EQ(Must(allocator.Allocate(10)).PageAt(0), 40);  // 15 pages: half as much again.
  EXPECT_EQ(Must(allocator.Allocate(10)).PageAt(0), 0);   // None has that: the tightest.
  // No single run holds 17: the longest first, and the rest from the tightest.
  EXPECT_EQ(Must(allocator.Allocate(17)).Run(0), (PageRun{20, 12}));
  EXPECT_EQ(allocator.num_free_runs(), 1);
  EXPECT_EQ(allocator.num_free(), 1);
}

TEST(Allocator, ExtendTakesWhatLiesBehind) {
  PageAllocator allocator = Must(PageAllocator::Create(10, 0));
  ASSERT_TRUE(IsOk(allocator.Allocate(4)));  // 0..3
  EXPECT_EQ(Must(allocator.Extend(3, 2)).ToPages(), (std::vector<int64_t>{4, 5}));
  ASSERT_TRUE(IsOk(allocator.Free(Pages({1, 2}))));
  EXPECT_EQ(Must(allocator.Extend(0, 3)).Run(0), (PageRun{1, 2}));
  EXPECT_EQ(allocator.num_free(), 3);
}

TEST(Allocator, ExtendLeavesLongRunsToRequests) {
  PageAllocator allocator = Must(PageAllocator::Create(300, 0));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(IsOk(allocator.Allocate(100)));
  ASSERT_TRUE(IsOk(allocator.Free(Must(PageRuns::FromRuns({{{0, 100}, {150, 40}, {250, 3}}})))));
  EXPECT_EQ(Must(allocator.Extend(299, 1)).PageAt(0), 170);  // The middle of 150..189.
  ASSERT_TRUE(IsOk(allocator.Extend(170, 19)));
  ASSERT_TRUE(IsOk(allocator.Extend(149, 10)));              // 150..159 of 150..169.
  EXPECT_EQ(Must(allocator.Extend(299, 1)).PageAt(0), 250);  // Ten are too few to halve: a crumb.
  EXPECT_EQ(allocator.longest_free_run(), 100);
}

TEST(Allocator, ExtendLeavesRoomToGrow) {
  PageAllocator allocator = Must(PageAllocator::Create(1000, 0));
  ASSERT_TRUE(IsOk(allocator.Allocate(100)));
  ASSERT_TRUE(IsOk(allocator.Allocate(100)));
  // Only a run that is long enough for several requests is there: half a request off its end.
  EXPECT_EQ(Must(allocator.Extend(99, 1)).PageAt(0), 950);
  EXPECT_EQ(allocator.ExtendByOne(950), 951);
  EXPECT_EQ(allocator.ExtendByOne(99), 976);  // The middle of 952..999.
  EXPECT_EQ(allocator.longest_free_run(), 750);
}

TEST(Allocator, FreeRunHistogram) {
  PageAllocator allocator = Must(PageAllocator::Create(100, 0));
  EXPECT_EQ(allocator.free_run_histogram(), (std::vector<int64_t>{0, 0, 0, 0, 0, 0, 1}));
  ASSERT_TRUE(IsOk(allocator.Allocate(100)));
  EXPECT_EQ(allocator.free_run_histogram(), std::vector<int64_t>{});
  ASSERT_TRUE(
      IsOk(allocator.Free(Must(PageRuns::FromRuns({{{0, 1}, {10, 2}, {20, 3}, {30, 4}}})))));
  EXPECT_EQ(allocator.free_run_histogram(), (std::vector<int64_t>{1, 2, 1}));
  EXPECT_EQ(allocator.ExtendByOne(29), 30);  // Shorter now: 31..33.
  EXPECT_EQ(allocator.free_run_histogram(), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(allocator.longest_free_run(), 3);
}

TEST(Allocator, ExtendErrorsChangeNothing) {
  PageAllocator allocator = Must(PageAllocator::Create(10, 2));
  ASSERT_TRUE(IsOk(allocator.Allocate(4)));  // 2..5
  for (const int64_t page :
       {int64_t{-1}, int64_t{1}, int64_t{6}, int64_t{10}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_TRUE(Fails(allocator.Extend(page, 1), absl::StatusCode::kInvalidArgument, "last_page"));
  }
  EXPECT_TRUE(Fails(allocator.Extend(5, 0), absl::StatusCode::kInvalidArgument, "count is 0"));
  EXPECT_TRUE(Fails(allocator.Extend(5, 5), absl::StatusCode::kResourceExhausted, "4 of 10"));
  EXPECT_EQ(allocator.num_free(), 4);
  EXPECT_EQ(allocator.longest_free_run(), 4);
}

// A pool whose even pages are free: a list of many runs.
PageAllocator EveryOtherPageFree(int64_t num_pages) {
  PageAllocator allocator = Must(PageAllocator::Create(num_pages, 0));
  EXPECT_TRUE(IsOk(allocator.Allocate(num_pages)));
  for (int64_t page = 0; page < num_pages; page += 2) {
    EXPECT_TRUE(IsOk(allocator.Free(Pages({page}))));
  }
  return allocator;
}

TEST(Allocator, ListsThatFindNoMemoryTakeNoPages) {
  for (const bool extend : {false, true}) {
    SCOPED_TRACE(extend);
    PageAllocator allocator = EveryOtherPageFree(100);
    absl::StatusOr<PageRuns> got;
    CallWithoutMemory([&] { got = extend ? allocator.Extend(1, 50) : allocator.Allocate(50); },
                      [&] {
                        EXPECT_EQ(allocator.num_free(), 50);
                        EXPECT_EQ(allocator.num_free_runs(), 50);
                      });
    std::vector<int64_t> pages = Must(std::move(got)).ToPages();
    std::sort(pages.begin(), pages.end());
    ASSERT_EQ(pages.size(), 50);
    for (int64_t i = 0; i < 50; ++i) EXPECT_EQ(pages[i], 2 * i);
    EXPECT_EQ(allocator.num_free(), 0);
  }
}

TEST(Allocator, RunsInTurnAreThoseOfTheListAndNeedNoMemory) {
  for (const bool whole : {false, true}) {
    const auto make = [&] {
      return whole ? Must(PageAllocator::Create(100, 0)) : EveryOtherPageFree(100);
    };
    PageAllocator lists = make(), runs = make();
    for (const int64_t count : {20, 7, 1}) {
      std::vector<int64_t> want = Must(lists.Allocate(count)).ToPages();
      const int64_t last = want[0];
      for (const int64_t page : Must(lists.Extend(last, 3)).ToPages()) want.push_back(page);
      std::vector<int64_t> got;
      got.reserve(want.size());
      const auto append = [&](PageRun run) {
        for (int64_t i = 0; i < run.count; ++i) got.push_back(run.first + i);
      };
      {
        const FailingNew failing(0);
        runs.AllocateRuns(count, append);
        runs.ExtendRuns(last, 3, append);
      }
      EXPECT_EQ(got, want);
      EXPECT_EQ(runs.num_free(), lists.num_free());
    }
  }
}

TEST(Allocator, FreeEachPassesOverWhatIsNoPage) {
  PageAllocator allocator = Must(PageAllocator::Create(10, 2));
  ASSERT_TRUE(IsOk(allocator.Allocate(8)));
  const std::vector<int32_t> pages = {-1, 0, 1, 2, 3, -1, 9, 8, 0};
  {
    const FailingNew failing(0);
    allocator.FreeEach(pages);
    allocator.FreeEach({});
  }
  EXPECT_EQ(allocator.num_free(), 4);
  EXPECT_EQ(allocator.num_free_runs(), 2);
  for (const int64_t page : {2, 3, 8, 9}) EXPECT_TRUE(allocator.IsFree(page));
}

TEST(Allocator, ALongListIsFreedWithoutMemory) {
  PageAllocator allocator = Must(PageAllocator::Create(64, 1));
  ASSERT_TRUE(IsOk(allocator.Allocate(63)));
  std::vector<int64_t> pages;
  for (int64_t page = 63; page > 0; page -= 2) pages.push_back(page);
  const PageRuns runs = Must(PageRuns::FromPages(pages));
  {
    const FailingNew failing(0);
    allocator.FreeEachRun(runs);
  }
  EXPECT_EQ(allocator.num_free(), 32);
  EXPECT_EQ(allocator.num_free_runs(), 32);
}

// Free lists give a new request of 256 pages 256 runs in this trace, at any load.
TEST(Allocator, RunsStayLongUnderChurn) {
  for (const auto& [full, prompt, sequence] :
       {std::tuple{0.7, 1.1, 4.0}, {0.9, 1.5, 6.0}, {0.97, 20.0, 80.0}}) {
    SCOPED_TRACE(full);
    const bench::ChurnResult runs =
        Must(bench::Churn({.num_pages = 20000, .full = full, .num_requests = 2000}));
    EXPECT_LE(runs.runs_of_prompt, prompt);
    EXPECT_LE(runs.runs_of_sequence, sequence);
  }
}

TEST(Allocator, FreeNeighboursMerge) {
  PageAllocator allocator = Must(PageAllocator::Create(6, 0));
  ASSERT_TRUE(IsOk(allocator.Allocate(6)));
  for (const int64_t page : {1, 3, 5, 0, 4, 2}) ASSERT_TRUE(IsOk(allocator.Free(Pages({page}))));
  EXPECT_EQ(allocator.num_free_runs(), 1);
  EXPECT_EQ(allocator.longest_free_run(), 6);
}

class Model {
 public:
  Model(int64_t pages, int64_t reserved)
      : pages_(pages), reserved_(reserved), taken_(pages, false) {}

  bool Take(const PageRuns& runs) {
    for (const int64_t page : runs.ToPages()) {
      if (page < reserved_ || page >= pages_ || taken_[page]) return false;
      taken_[page] = true;
    }
    return true;
  }
  bool IsFree(int64_t page) const { return page >= reserved_ && page < pages_ && !taken_[page]; }
  bool MayFree(const std::vector<int64_t>& pages) const {
    std::vector<bool> seen(pages_, false);
    for (const int64_t page : pages) {
      if (page < reserved_ || page >= pages_ || !taken_[page] || seen[page]) return false;
      seen[page] = true;
    }
    return true;
  }
  void Free(const std::vector<int64_t>& pages) {
    for (const int64_t page : pages) taken_[page] = false;
  }
  bool IsAllocated(int64_t page) const { return page < pages_ && taken_[page]; }
  // Pages, runs and the longest run, all free.
  std::tuple<int64_t, int64_t, int64_t> Count() const {
    int64_t free = 0, runs = 0, longest = 0, length = 0;
    for (int64_t page = reserved_; page < pages_; ++page) {
      length = taken_[page] ? 0 : length + 1;
      if (length == 1) ++runs;
      if (length > 0) ++free;
      longest = std::max(longest, length);
    }
    return {free, runs, longest};
  }

 private:
  const int64_t pages_;
  const int64_t reserved_;
  std::vector<bool> taken_;
};

TEST(Allocator, AMillionRandomOperationsAgainstASet) {
  constexpr int64_t kPages = 200;
  std::mt19937_64 random(1);
  PageAllocator allocator = Must(PageAllocator::Create(kPages, 3));
  Model model(kPages, 3);
  std::vector<std::vector<int64_t>> held;
  for (int operation = 0; operation < 1000000; ++operation) {
    const auto [free, runs, longest] =
        operation % 64 == 0 ? model.Count()
                            : std::tuple{allocator.num_free(), allocator.num_free_runs(),
                                         allocator.longest_free_run()};
    ASSERT_EQ(allocator.num_free(), free);
    ASSERT_EQ(allocator.num_free_runs(), runs);
    ASSERT_EQ(allocator.longest_free_run(), longest);
    const auto any = static_cast<int64_t>(random() % (kPages + 5));
    ASSERT_EQ(allocator.IsAllocated(any), model.IsAllocated(any));
    const uint64_t choice = random() % 16;
    if (choice < 1 && !held.empty() && free > 0) {
      std::vector<int64_t>& sequence = held[random() % held.size()];
      const int64_t behind = sequence.back() + 1;
      const bool adjacent = model.IsFree(behind);
      sequence.push_back(allocator.ExtendByOne(sequence.back()));
      ASSERT_TRUE(model.Take(Pages({sequence.back()}))) << "a page was handed out twice";
      ASSERT_TRUE(!adjacent || sequence.back() == behind);
    } else if (choice < 3 && !held.empty()) {
      std::vector<int64_t>& sequence = held[random() % held.size()];
      const int64_t count = static_cast<int64_t>(random() % 4);
      const int64_t behind = sequence.back() + 1;
      const bool adjacent = model.IsFree(behind);
      const absl::StatusOr<PageRuns> got = allocator.Extend(sequence.back(), count);
      if (count < 1) {
        ASSERT_TRUE(absl::IsInvalidArgument(got.status()));
      } else if (count > free) {
        ASSERT_TRUE(absl::IsResourceExhausted(got.status()));
      } else {
        ASSERT_TRUE(IsOk(got));
        ASSERT_EQ(got->num_pages(), count);
        ASSERT_TRUE(model.Take(*got)) << "a page was handed out twice";
        ASSERT_TRUE(!adjacent || got->PageAt(0) == behind);
        for (const int64_t page : got->ToPages()) sequence.push_back(page);
      }
    } else if (choice < 8) {
      const int64_t count = static_cast<int64_t>(random() % 20);
      const absl::StatusOr<PageRuns> got = allocator.Allocate(count);
      if (count < 1) {
        ASSERT_TRUE(absl::IsInvalidArgument(got.status()));
      } else if (count > free) {
        ASSERT_TRUE(absl::IsResourceExhausted(got.status()));
      } else {
        ASSERT_TRUE(IsOk(got));
        ASSERT_EQ(got->num_pages(), count);
        ASSERT_TRUE(model.Take(*got)) << "a page was handed out twice";
        ASSERT_TRUE(count > longest || got->num_runs() == 1) << "a single run would have done";
        held.push_back(got->ToPages());
      }
    } else if (choice < 15 && !held.empty()) {
      const size_t index = random() % held.size();
      std::vector<int64_t> pages = std::move(held[index]);
      held[index] = std::move(held.back());
      held.pop_back();
      if (random() % 4 == 0) std::shuffle(pages.begin(), pages.end(), random);
      ASSERT_TRUE(IsOk(allocator.Free(Pages(pages))));
      model.Free(pages);
    } else {  // Any list of pages at all.
      std::vector<int64_t> pages(1 + random() % 3);
      for (int64_t& page : pages) page = static_cast<int64_t>(random() % (kPages + 5));
      const absl::Status status = allocator.Free(Pages(pages));
      if (!model.MayFree(pages)) {
        ASSERT_TRUE(absl::IsInvalidArgument(status)) << status;
      } else {
        ASSERT_TRUE(IsOk(status));
        model.Free(pages);
        for (std::vector<int64_t>& one : held) {
          std::erase_if(
              one, [&](int64_t page) { return std::count(pages.begin(), pages.end(), page) > 0; });
        }
        std::erase_if(held, [](const std::vector<int64_t>& one) { return one.empty(); });
      }
    }
  }
}

}  // namespace
}  // namespace kvferry
