#include "pool/page_runs.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvferry {

void PageRuns::Append(PageRun run) {
  const auto end = static_cast<int32_t>(num_pages() + run.count);
  if (!runs_.empty()) {
    const PageRun last = Run(num_runs() - 1);
    if (last.first + last.count == run.first) {
      runs_.back().end = end;
      return;
    }
  }
  runs_.push_back({static_cast<int32_t>(run.first), end});
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
  result.runs_.shrink_to_fit();
  return result;
}

absl::StatusOr<PageRuns> PageRuns::FromRuns(std::span<const PageRun> runs) {
  PageRuns result;
  result.runs_.reserve(runs.size());
  for (const PageRun& run : runs) {
    if (run.first < 0 || run.count < 1 || run.first > kMaxPages || run.count > kMaxPages ||
        result.num_pages() + run.count > kMaxPages) {
      return absl::InvalidArgumentError(absl::StrCat("page run {first ", run.first, ", count ",
                                                     run.count, "} is not within [0, ", kMaxPages,
                                                     "] pages"));
    }
    result.Append(run);
  }
  result.runs_.shrink_to_fit();
  return result;
}

size_t PageRuns::RunAt(int64_t position) const {
  const auto ends_by = [](int64_t at, const Coded& run) { return at < run.end; };
  return std::upper_bound(runs_.begin(), runs_.end(), position, ends_by) - runs_.begin();
}

int64_t PageRuns::PageAt(int64_t position) const {
  const size_t run = RunAt(position);
  return runs_[run].first + (position - RunBegin(run));
}

absl::StatusOr<PageRuns> PageRuns::Slice(int64_t first, int64_t count) const {
  if (first < 0 || count < 0 || count > num_pages() - first) {
    return absl::OutOfRangeError(absl::StrCat("pages [", first, ", ", first, " + ", count,
                                              ") asked of a list of ", num_pages()));
  }
  PageRuns result;
  int64_t position = first;
  for (size_t run = RunAt(first); position < first + count; ++run) {
    const int64_t take = std::min(RunEnd(run), first + count) - position;
    result.Append({runs_[run].first + (position - RunBegin(run)), take});
    position += take;
  }
  result.runs_.shrink_to_fit();
  return result;
}

std::vector<int64_t> PageRuns::ToPages() const {
  std::vector<int64_t> pages;
  pages.reserve(num_pages());
  for (const PageRun run : runs()) {
    for (int64_t i = 0; i < run.count; ++i) pages.push_back(run.first + i);
  }
  return pages;
}

absl::Status PageRuns::CheckWithin(int64_t pool_pages) const {
  for (const PageRun run : runs()) {
    if (run.first < 0 || run.first >= pool_pages || run.count > pool_pages - run.first) {
      return absl::OutOfRangeError(absl::StrCat("pages [", run.first, ", ", run.first + run.count,
                                                ") are outside of the ", pool_pages,
                                                " pages that there are"));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvferry
