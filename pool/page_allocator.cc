#include "pool/page_allocator.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "base/check_range.h"
#include "base/status.h"

namespace kvferry {

absl::StatusOr<PageAllocator> PageAllocator::Create(int64_t num_pages, int64_t reserved) {
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("page allocator", "num_pages", num_pages, 1, PageRuns::kMaxPages));
  KVFERRY_RETURN_IF_ERROR(CheckRange("page allocator", "reserved", reserved, 0, num_pages - 1));
  KVFERRY_ASSIGN_OR_RETURN(FreeRuns free, FreeRuns::Create(num_pages));
  return PageAllocator(std::move(free), num_pages, reserved);
}

PageAllocator::PageAllocator(FreeRuns free, int64_t num_pages, int64_t reserved)
    : free_(std::move(free)), num_pages_(num_pages), reserved_(reserved) {
  Clear();
}

void PageAllocator::Clear() {
  request_pages_ = 0;
  free_.Clear();
  free_.Insert({reserved_, num_pages_ - reserved_});
}

absl::Status PageAllocator::CheckCount(int64_t count) const {
  if (count < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("page allocator: count is ", count, " but must be at least 1"));
  }
  if (count > num_free()) {
    return absl::ResourceExhaustedError(absl::StrCat("page allocator: ", count, " pages asked, ",
                                                     num_free(), " of ", num_pages_, " free"));
  }
  return absl::OkStatus();
}

// Of the tightest with half as much again, else of the tightest, else of the longest there is.
PageRun PageAllocator::TakeForRequest(int64_t count) {
  std::optional<FreeRuns::Id> run = free_.AtLeast(count + count / 2);
  if (!run) run = free_.AtLeast(count);
  if (!run) run = free_.Longest();
  return free_.Take(*run, 0, count);
}

// The second half of the longest run that is too short for a request: both its new neighbours can
// grow. When only crumbs are left of those, a piece as long as half a request off the end of a run
// that is long enough for several; when there is none, the smallest crumb that is still worth
// taking. The constants are the best of a search over 70, 90 and 97% full pools.
PageRun PageAllocator::TakeForGrowth(int64_t count) {
  constexpr int64_t kWorthHalving = 16;
  constexpr int64_t kSeveral = 4;
  constexpr int64_t kCrumbShare = 64;
  std::optional<FreeRuns::Id> run = free_.LongestBelow(request_pages_);
  const int64_t shorter = run ? free_.Run(*run).count : 0;
  if (shorter >= kWorthHalving) return free_.Take(*run, shorter / 2, count);
  const FreeRuns::Id longest = free_.Longest();
  const int64_t most = free_.Run(longest).count;
  if (most >= kSeveral * request_pages_) {
    const int64_t piece = std::min(most, std::max(count, request_pages_ / 2));
    return free_.Take(longest, most - piece, count);
  }
  run = free_.AtLeast(std::max<int64_t>(1, most / kCrumbShare));
  return free_.Take(*run, 0, count);
}

PageRun PageAllocator::TakeBehind(int64_t last_page, int64_t count) {
  if (!free_.IsFree(last_page + 1)) return TakeForGrowth(count);
  return free_.Take(free_.At(last_page + 1), 0, count);
}

void PageAllocator::NoteRequest(int64_t count) {
  constexpr int64_t kForgetShare = 64;
  request_pages_ = std::max(count, request_pages_ - request_pages_ / kForgetShare);
}

// `first`, which has been taken, and what take(left) takes until there are `count`. All are given
// back where the list finds no memory.
template <typename Take>
absl::StatusOr<PageRuns> PageAllocator::List(PageRun first, int64_t count, Take take) {
  if (first.count == count) return PageRuns(first);
  absl::InlinedVector<PageRun, 8> taken = {first};
  absl::Cleanup give_back = [&] {
    for (const PageRun run : taken) free_.Insert(run);
  };
  for (int64_t left = count - first.count; left > 0; left -= taken.back().count) {
    taken.push_back({});  // Before it is taken: where there is no place for it, it stays free.
    taken.back() = take(left);
  }
  absl::StatusOr<PageRuns> list = PageRuns::FromRuns(taken);
  std::move(give_back).Cancel();
  return list;
}

absl::StatusOr<PageRuns> PageAllocator::Allocate(int64_t count) {
  KVFERRY_RETURN_IF_ERROR(CheckCount(count));
  NoteRequest(count);
  return List(TakeForRequest(count), count, [this](int64_t left) { return TakeForRequest(left); });
}

void PageAllocator::AllocateRuns(int64_t count, absl::FunctionRef<void(PageRun)> taken) {
  NoteRequest(count);
  for (PageRun run; count > 0; count -= run.count) {
    run = TakeForRequest(count);
    taken(run);
  }
}

absl::StatusOr<PageRuns> PageAllocator::Extend(int64_t last_page, int64_t count) {
  KVFERRY_RETURN_IF_ERROR(CheckCount(count));
  if (!IsAllocated(last_page)) {
    return absl::InvalidArgumentError(
        absl::StrCat("page allocator: last_page is ", last_page, " but must be an allocated page"));
  }
  return List(TakeBehind(last_page, count), count,
              [this](int64_t left) { return TakeForGrowth(left); });
}

void PageAllocator::ExtendRuns(int64_t last_page, int64_t count,
                               absl::FunctionRef<void(PageRun)> taken) {
  for (PageRun run = TakeBehind(last_page, count);; run = TakeForGrowth(count)) {
    taken(run);
    count -= run.count;
    if (count == 0) return;
  }
}

int64_t PageAllocator::ExtendByOne(int64_t last_page) {
  if (!free_.IsFree(last_page + 1)) return TakeForGrowth(1).first;
  free_.TakeFront(last_page + 1);
  return last_page + 1;
}

int64_t PageAllocator::FirstNotAllocated(PageRun run) const {
  if (run.first < reserved_ || run.first >= num_pages_) return run.first;
  return free_.FirstFree({run.first, std::min(run.count, num_pages_ - run.first)});
}

template <typename Runs>
absl::Status PageAllocator::CheckAllocated(const Runs& sorted) const {
  int64_t previous_end = reserved_;
  for (const PageRun run : sorted) {
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
    free_.PrefetchInsert(run);
    const int64_t free = free_.FirstFree(run);
    if (free < previous_end) {
      return absl::InvalidArgumentError(
          absl::StrCat("page allocator: page ", free, " is already free"));
    }
  }
  return absl::OkStatus();
}

template <typename Runs>
absl::Status PageAllocator::FreeSorted(const Runs& sorted) {
  KVFERRY_RETURN_IF_ERROR(CheckAllocated(sorted));
  for (const PageRun run : sorted) free_.Insert(run);
  return absl::OkStatus();
}

absl::Status PageAllocator::Free(const PageRuns& pages) {
  const auto runs = pages.runs();
  if (std::is_sorted(runs.begin(), runs.end(), BeginsBefore)) return FreeSorted(runs);
  absl::InlinedVector<PageRun, 8> sorted(runs.begin(), runs.end());
  std::sort(sorted.begin(), sorted.end(), BeginsBefore);
  return FreeSorted(sorted);
}

void PageAllocator::FreeEachRun(const PageRuns& pages) {
  for (const PageRun run : pages.runs()) free_.Insert(run);
}

void PageAllocator::FreeEach(std::span<const int32_t> pages) {
  for (size_t i = 0, end = 0; i < pages.size(); i = end) {
    end = i + 1;
    if (pages[i] < reserved_) continue;
    while (end < pages.size() && pages[end] == pages[end - 1] + 1) ++end;
    free_.Insert({pages[i], static_cast<int64_t>(end - i)});
  }
}

}  // namespace kvferry
