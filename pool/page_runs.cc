#include "pool/page_runs.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvferry {

void PageRuns::Append(PageRun run) {
  const int64_t end = num_pages() + run.count;
  if (!runs_.empty() && runs_.back().first + runs_.back().count == run.first) {
    runs_.back().count += run.count;
    ends_.back() = end;
    return;
  }
  runs_.push_back(run);
  ends_.push_back(end);
}

absl::StatusOr<PageRuns> PageRuns::FromPages(std::span<const int64_t> pages) {
  PageRuns result;
  for (const int64_t page : pages) {
    if (page < 0 || page >= kMaxPages) {
      return absl::InvalidArgumentError(
          absl::StrCat("page id ", page, " does not lie in [0, ", kMaxPages, ")"));
    }
    result.Append({page, 1});
  }
  return result;
}

absl::StatusOr<PageRuns> PageRuns::FromRuns(std::span<const PageRun> runs) {
  PageRuns result;
  for (const PageRun& run : runs) {
    if (run.first < 0 || run.count < 1 || run.first > kMaxPages || run.count > kMaxPages ||
        result.num_pages() + run.count > kMaxPages) {
      return absl::InvalidArgumentError(absl::StrCat("page run {first ", run.first, ", count ",
                                                     run.count, "} is not within [0, ", kMaxPages,
                                                     "] pages"));
    }
    result.Append(run);
  }
  return result;
}

size_t PageRuns::RunAt(int64_t position) const {
  return std::upper_bound(ends_.begin(), ends_.end(), position) - ends_.begin();
}

int64_t PageRuns::PageAt(int64_t position) const {
  const size_t run = RunAt(position);
  return runs_[run].first + runs_[run].count - (ends_[run] - position);
}

absl::StatusOr<PageRuns> PageRuns::Slice(int64_t first, int64_t count) const {
  if (first < 0 || count < 0 || first > num_pages() || count > num_pages() - first) {
    return absl::OutOfRangeError(absl::StrCat("pages [", first, ", ", first, " + ", count,
                                              ") asked of a list of ", num_pages()));
  }
  PageRuns result;
  for (int64_t position = first; position < first + count;) {
    const size_t run = RunAt(position);
    const int64_t take = std::min(ends_[run], first + count) - position;
    result.Append({runs_[run].first + runs_[run].count - (ends_[run] - position), take});
    position += take;
  }
  return result;
}

std::vector<int64_t> PageRuns::ToPages() const {
  std::vector<int64_t> pages;
  pages.reserve(num_pages());
  for (const PageRun& run : runs_) {
    for (int64_t i = 0; i < run.count; ++i) pages.push_back(run.first + i);
  }
  return pages;
}

absl::Status PageRuns::CheckWithin(int64_t pool_pages) const {
  for (const PageRun& run : runs_) {
    if (run.first < 0 || run.first >= pool_pages || run.count > pool_pages - run.first) {
      return absl::OutOfRangeError(absl::StrCat("pages [", run.first, ", ", run.first + run.count,
                                                ") are outside the pool's ", pool_pages, " pages"));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvferry
