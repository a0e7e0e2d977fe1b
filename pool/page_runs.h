#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvferry {

// Adjacent pages first, first + 1, ..., first + count - 1.
struct PageRun {
  int64_t first = 0;
  int64_t count = 0;

  bool operator==(const PageRun&) const = default;
};

// To sort runs by place.
inline bool BeginsBefore(const PageRun& a, const PageRun& b) { return a.first < b.first; }

// A list of page ids in order, run-length coded. The position of a page is its index in the list.
// Immutable once made; thread-compatible; memory is 8 bytes a run, whatever the number of pages.
class PageRuns {
 public:
  class Iterator;
  class View;

  PageRuns() = default;
  // One run, which must be valid: FromRuns() checks.
  explicit PageRuns(PageRun run)
      : runs_{{static_cast<int32_t>(run.first), static_cast<int32_t>(run.count)}} {}
  // Merges neighbours: {4, 5, 6, 9} becomes runs {4 x 3}, {9 x 1}. Order is kept, repeats are legal
  // here. INVALID_ARGUMENT on a page id outside [0, kMaxPages).
  static absl::StatusOr<PageRuns> FromPages(std::span<const int64_t> pages);
  // INVALID_ARGUMENT on a negative first, a count below 1, or more than kMaxPages in all.
  static absl::StatusOr<PageRuns> FromRuns(std::span<const PageRun> runs);

  int64_t num_pages() const { return runs_.empty() ? 0 : runs_.back().end; }
  size_t num_runs() const { return runs_.size(); }
  PageRun Run(size_t index) const {
    return {runs_[index].first, runs_[index].end - RunBegin(index)};
  }
  // All of them, in order: a view of this list, which makes them as it goes.
  View runs() const;
  // Index of the run that holds `position`, which must lie in [0, num_pages()).
  size_t RunAt(int64_t position) const;
  // Positions of the first page of run `index`, and of the one after its last.
  int64_t RunBegin(size_t index) const { return index == 0 ? 0 : runs_[index - 1].end; }
  int64_t RunEnd(size_t index) const { return runs_[index].end; }
  // The page id at `position`.
  int64_t PageAt(int64_t position) const;
  // Pages at positions [first, first + count). OUT_OF_RANGE when that is not inside the list.
  absl::StatusOr<PageRuns> Slice(int64_t first, int64_t count) const;
  std::vector<int64_t> ToPages() const;
  // OUT_OF_RANGE naming the run when a page is not in [0, pool_pages).
  absl::Status CheckWithin(int64_t pool_pages) const;

  // Far beyond any pool, and small enough that sums and products with item sizes cannot overflow.
  static constexpr int64_t kMaxPages = int64_t{1} << 30;

 private:
  // A run and all before it. Neither number exceeds kMaxPages.
  struct Coded {
    int32_t first;  // Page id.
    int32_t end;    // Position after its last page.
  };

  void Append(PageRun run);

  // Most lists that an allocator makes are of one or two runs: no memory of their own then.
  absl::InlinedVector<Coded, 2> runs_;
};

class PageRuns::Iterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = PageRun;
  using difference_type = std::ptrdiff_t;
  using pointer = void;
  using reference = PageRun;

  Iterator(const PageRuns* list, size_t index) : list_(list), index_(index) {}
  PageRun operator*() const { return list_->Run(index_); }
  Iterator& operator++() {
    ++index_;
    return *this;
  }
  Iterator operator++(int) { return {list_, index_++}; }
  bool operator==(const Iterator&) const = default;

 private:
  const PageRuns* list_;
  size_t index_;
};

class PageRuns::View {
 public:
  explicit View(const PageRuns* list) : list_(list) {}
  Iterator begin() const { return {list_, 0}; }
  Iterator end() const { return {list_, list_->num_runs()}; }

 private:
  const PageRuns* list_;
};

inline PageRuns::View PageRuns::runs() const { return View(this); }

}  // namespace kvferry
