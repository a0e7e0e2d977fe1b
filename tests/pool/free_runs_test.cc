#include "pool/free_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>

#include "tests/support/status.h"

namespace kvferry {
namespace {

// Every page by itself, and the lengths of all runs counted anew each time.
class Model {
 public:
  explicit Model(int64_t pages) : free_(pages, false) {}

  void Set(PageRun run, bool free) {
    for (int64_t page = run.first; page < run.first + run.count; ++page) {
      EXPECT_NE(free_[page], free);
      free_[page] = free;
    }
  }
  bool IsFree(int64_t page) const { return free_[page]; }
  // The longest run that starts at `page` and is all free, or all taken.
  int64_t Length(int64_t page, int64_t at_most) const {
    int64_t count = 1;
    while (count < at_most && page + count < Size() && free_[page + count] == free_[page]) ++count;
    return count;
  }
  std::vector<int64_t> RunLengths() const {
    std::vector<int64_t> lengths;
    for (int64_t page = 0, count = 0; page < Size(); page += count) {
      count = Length(page, Size());
      if (free_[page]) lengths.push_back(count);
    }
    std::sort(lengths.begin(), lengths.end());
    return lengths;
  }
  int64_t Size() const { return static_cast<int64_t>(free_.size()); }

 private:
  std::vector<bool> free_;
};

void Compare(const FreeRuns& runs, const Model& model) {
  const std::vector<int64_t> lengths = model.RunLengths();
  int64_t free = 0;
  std::vector<int64_t> histogram;
  for (const int64_t length : lengths) {
    free += length;
    const size_t power = std::bit_width(static_cast<uint64_t>(length)) - 1;
    histogram.resize(std::max(histogram.size(), power + 1));
    ++histogram[power];
  }
  ASSERT_EQ(runs.num_free(), free);
  ASSERT_EQ(runs.num_runs(), static_cast<int64_t>(lengths.size()));
  ASSERT_EQ(runs.longest(), lengths.empty() ? 0 : lengths.back());
  ASSERT_EQ(runs.Histogram(), histogram);
  ASSERT_FALSE(runs.IsFree(model.Size()));
  for (int64_t page = 0; page < model.Size(); ++page) {
    ASSERT_EQ(runs.IsFree(page), model.IsFree(page));
  }
}

// The run with this id is one of the model's, from end to end.
void CheckRun(const FreeRuns& runs, FreeRuns::Id id, const Model& model) {
  const PageRun run = runs.Run(id);
  ASSERT_TRUE(model.IsFree(run.first) && (run.first == 0 || !model.IsFree(run.first - 1)));
  ASSERT_EQ(run.count, model.Length(run.first, model.Size()));
  ASSERT_EQ(runs.At(run.first), id);
  ASSERT_EQ(runs.At(run.first + run.count - 1), id);
}

// Whether all that a search of `count` pages finds may share a bin with many that are shorter.
bool MayMiss(const std::vector<int64_t>& lengths, int64_t count, bool shortened) {
  const bool one_bin = shortened || (count > 63 && lengths.back() <= count + count / 32);
  return one_bin && lengths.size() > 64;
}

// Searches find something whenever there is something that does not share a bin with many that are
// shorter, and the best up to 63 pages unless runs have been shortened.
void CheckSearches(FreeRuns* runs, const Model& model, int64_t count, bool shortened) {
  const std::vector<int64_t> lengths = model.RunLengths();
  const auto fit = std::lower_bound(lengths.begin(), lengths.end(), count);
  const auto found = runs->AtLeast(count);
  ASSERT_TRUE(!found || fit != lengths.end());
  ASSERT_TRUE(found || fit == lengths.end() || MayMiss(lengths, count, shortened));
  if (found) {
    CheckRun(*runs, *found, model);
    ASSERT_GE(runs->Run(*found).count, count);
    ASSERT_TRUE(shortened || *fit > 63 || runs->Run(*found).count == *fit);
  }
  const auto below = runs->LongestBelow(count);
  if (below) {
    CheckRun(*runs, *below, model);
    ASSERT_LT(runs->Run(*below).count, count);
  }
  if (count < 64 && !shortened) {
    const int64_t longest_below = fit == lengths.begin() ? 0 : *std::prev(fit);
    ASSERT_EQ(below ? runs->Run(*below).count : 0, longest_below);
  }
  if (!lengths.empty()) {
    const int64_t longest = runs->Run(runs->Longest()).count;
    ASSERT_LE(longest, lengths.back());
    ASSERT_GE(longest + longest / 32 + 1, lengths.back());
  }
}

void RandomOperations(int64_t num_pages, int64_t longest, int operations, bool shorten) {
  SCOPED_TRACE(num_pages);
  std::mt19937_64 random(num_pages);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % limit); };
  FreeRuns runs = Must(FreeRuns::Create(num_pages));
  Model model(num_pages);
  const auto found = [&](int64_t count) {
    const auto id = runs.AtLeast(count);
    return id ? *id : runs.Longest();
  };
  for (int operation = 0; operation < operations && !::testing::Test::HasFatalFailure();
       ++operation) {
    if (operation % 256 == 0) {
      Compare(runs, model);
      CheckSearches(&runs, model, 1 + below(longest), shorten);
    }
    const int64_t page = below(num_pages);
    const PageRun run{page, model.Length(page, 1 + below(longest))};
    const int64_t expected = model.IsFree(page) ? page : page + run.count;
    ASSERT_EQ(runs.FirstFree(run), expected);
    if (!model.IsFree(page)) {
      runs.Insert(run);
      model.Set(run, true);
    } else if (shorten && random() % 4 != 0) {
      const PageRun front{runs.Run(found(run.count)).first, 1};
      runs.TakeFront(front.first);
      model.Set(front, false);
    } else {
      const FreeRuns::Id id = found(run.count);
      const int64_t offset = below(runs.Run(id).count);
      const PageRun from = runs.Run(id);
      const PageRun taken = runs.Take(id, offset, run.count);
      ASSERT_EQ(taken, (PageRun{from.first + offset, std::min(run.count, from.count - offset)}));
      model.Set(taken, false);
    }
    if (operation % 100000 == 99999) {
      runs.Clear();
      model = Model(num_pages);
    }
  }
}

TEST(FreeRuns, AMillionRandomOperationsAgainstAListOfPages) {
  for (const bool shorten : {false, true}) {
    RandomOperations(/*num_pages=*/64, /*longest=*/8, 200000, shorten);
    RandomOperations(/*num_pages=*/200, /*longest=*/70, 200000, shorten);
    RandomOperations(/*num_pages=*/3000, /*longest=*/700, 100000, shorten);
  }
}

// However many runs lie in a bin: of 64 and 65 pages here, which is one.
TEST(FreeRuns, ASearchLooksAtFewRuns) {
  for (const int64_t shorter : {int64_t{10}, int64_t{63}, int64_t{64}, int64_t{1000}}) {
    SCOPED_TRACE(shorter);
    FreeRuns runs = Must(FreeRuns::Create(70000));
    for (int64_t i = 0; i < shorter; ++i) runs.Insert({i * 65, 64});
    runs.Insert({shorter * 65, 65});
    EXPECT_EQ(runs.AtLeast(65).has_value(), shorter < 64);
    EXPECT_GE(runs.Run(runs.Longest()).count, 64);
    EXPECT_TRUE(runs.AtLeast(64).has_value());
    runs.Insert({69900, 66});
    EXPECT_EQ(runs.Run(runs.AtLeast(66).value()).count, 66);
    EXPECT_GE(runs.Run(runs.AtLeast(65).value()).count, 65);
  }
}

// A run that is taken from the front stays in its bin until a search meets it there: what was long
// once is no answer, and hides none.
TEST(FreeRuns, RunsTakenFromTheFrontHideNone) {
  FreeRuns runs = Must(FreeRuns::Create(20000));
  const auto insert = [&runs](PageRun run, int64_t left) {
    runs.Insert(run);
    for (int64_t i = 0; i < run.count - left; ++i) runs.TakeFront(run.first + i);
  };
  // 129 and 131 pages are of one bin, which is not the first one's.
  insert({19000, 131}, 131);
  insert({19200, 200}, 129);
  EXPECT_EQ(runs.longest(), 131);
  insert({18000, 700}, 1);
  EXPECT_EQ(runs.Run(runs.Longest()).count, 131);
  EXPECT_EQ(runs.Run(runs.LongestBelow(1000).value()).count, 131);
  // As many as a search looks at, and more, before the one that is left.
  for (int64_t i = 0; i < 100; ++i) insert({i * 170, 160}, 1);
  insert({17500, 160}, 160);
  EXPECT_EQ(runs.AtLeast(160).value(), runs.At(17500));
}

TEST(FreeRuns, TheLargestPool) {
  FreeRuns runs = Must(FreeRuns::Create(PageRuns::kMaxPages));
  runs.Insert({PageRuns::kMaxPages - 5, 5});
  EXPECT_EQ(runs.Run(runs.Longest()), (PageRun{PageRuns::kMaxPages - 5, 5}));
  EXPECT_EQ(runs.AtLeast(PageRuns::kMaxPages), std::nullopt);
  EXPECT_EQ(runs.Histogram(), (std::vector<int64_t>{0, 0, 1}));
}

}  // namespace
}  // namespace kvferry
