#include "pool/page_allocator.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {

absl::StatusOr<PageAllocator> PageAllocator::Create(int64_t num_pages, int64_t reserved) {
  if (reserved < 0 || reserved >= num_pages) {
    return absl::InvalidArgumentError(absl::StrCat("page allocator: reserved is ", reserved,
                                                   " but must lie in [0, num_pages = ", num_pages,
                                                   ")"));
  }
  return PageAllocator(num_pages, reserved);
}

PageAllocator::PageAllocator(int64_t num_pages, int64_t reserved)
    : num_pages_(num_pages), reserved_(reserved) {
  InsertFree({reserved, num_pages - reserved});
}

void PageAllocator::InsertFree(PageRun run) {
  by_start_.emplace(run.first, run.count);
  by_size_.emplace(run.count, run.first);
  num_free_ += run.count;
}

void PageAllocator::EraseFree(PageRun run) {
  by_start_.erase(run.first);
  by_size_.erase({run.count, run.first});
  num_free_ -= run.count;
}

absl::StatusOr<PageRuns> PageAllocator::Allocate(int64_t count) {
  if (count < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("page allocator: count is ", count, " but must be at least 1"));
  }
  if (count > num_free_) {
    return absl::ResourceExhaustedError(absl::StrCat("page allocator: ", count, " pages asked, ",
                                                     num_free_, " of ", num_pages_, " free"));
  }
  std::vector<PageRun> taken;
  for (int64_t left = count; left > 0;) {
    auto best = by_size_.lower_bound({left, 0});
    if (best == by_size_.end()) best = std::prev(best);
    const PageRun run{best->second, best->first};
    const int64_t take = std::min(left, run.count);
    EraseFree(run);
    if (take < run.count) InsertFree({run.first + take, run.count - take});
    taken.push_back({run.first, take});
    left -= take;
  }
  return PageRuns::FromRuns(taken);
}

absl::Status PageAllocator::CheckAllocated(std::span<const PageRun> sorted) const {
  int64_t previous_end = reserved_;
  for (const PageRun& run : sorted) {
    if (run.first < reserved_ || run.first + run.count > num_pages_) {
      return absl::InvalidArgumentError(absl::StrCat("page allocator: pages [", run.first, ", ",
                                                     run.first + run.count, ") are outside [",
                                                     reserved_, ", ", num_pages_, ")"));
    }
    if (run.first < previous_end) {
      return absl::InvalidArgumentError(
          absl::StrCat("page allocator: page ", run.first, " is freed twice in one list"));
    }
    previous_end = run.first + run.count;
    // A free run that begins before our end and ends after our start overlaps us.
    auto next = by_start_.lower_bound(previous_end);
    if (next == by_start_.begin()) continue;
    const auto [free_first, free_count] = *std::prev(next);
    if (free_first + free_count > run.first) {
      return absl::InvalidArgumentError(absl::StrCat(
          "page allocator: page ", std::max(free_first, run.first), " is already free"));
    }
  }
  return absl::OkStatus();
}

absl::Status PageAllocator::Free(const PageRuns& pages) {
  std::vector<PageRun> sorted(pages.runs().begin(), pages.runs().end());
  std::sort(sorted.begin(), sorted.end(),
            [](const PageRun& a, const PageRun& b) { return a.first < b.first; });
  KVFERRY_RETURN_IF_ERROR(CheckAllocated(sorted));
  for (PageRun run : sorted) {
    const auto next = by_start_.find(run.first + run.count);
    if (next != by_start_.end()) {
      const PageRun right{next->first, next->second};
      EraseFree(right);
      run.count += right.count;
    }
    const auto after = by_start_.lower_bound(run.first);
    if (after != by_start_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == run.first) {
        const PageRun left{before->first, before->second};
        EraseFree(left);
        run = {left.first, left.count + run.count};
      }
    }
    InsertFree(run);
  }
  return absl::OkStatus();
}

}  // namespace kvferry
