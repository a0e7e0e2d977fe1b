#pragma once

// Requests that come, grow and go: how long a page allocator keeps its runs. Shared by
// micro_bench.cc and tests/pool/.

#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "pool/page_allocator.h"

namespace kvferry::bench {

struct ChurnOptions {
  int64_t num_pages = 100000;
  double full = 0.9;  // Requests are let in while less than this is taken.
  int64_t prompt_pages = 256;
  int64_t max_steps = 512;  // A request lives for up to this many steps, and in every fourth of
                            // them it grows by a page.
  int64_t num_requests = 40000;
};

// Means over the requests after the first quarter.
struct ChurnResult {
  double runs_of_prompt = 0;    // Of a new request's pages.
  double runs_of_sequence = 0;  // Of all its pages when it ends.
};

// Returns the allocator's first error; INTERNAL never happens with a right one.
inline absl::StatusOr<ChurnResult> Churn(const ChurnOptions& options) {
  struct Sequence {
    std::vector<PageRun> runs;
    int64_t steps_left;
  };
  KVFERRY_ASSIGN_OR_RETURN(PageAllocator allocator, PageAllocator::Create(options.num_pages, 0));
  const int64_t keep_free =
      std::llround(static_cast<double>(options.num_pages) * (1 - options.full));
  std::mt19937_64 random(1);
  std::vector<Sequence> live;
  int64_t ended = 0, prompts = 0, sequences = 0;
  ChurnResult sum;
  const auto append = [](std::vector<PageRun>& runs, const PageRuns& more) {
    for (const PageRun& run : more.runs()) {
      if (!runs.empty() && runs.back().first + runs.back().count == run.first) {
        runs.back().count += run.count;
      } else {
        runs.push_back(run);
      }
    }
  };
  while (ended < options.num_requests) {
    const bool counted = ended > options.num_requests / 4;
    while (allocator.num_free() > keep_free + options.prompt_pages) {
      Sequence sequence{{}, static_cast<int64_t>(random() % options.max_steps)};
      KVFERRY_ASSIGN_OR_RETURN(const PageRuns prompt, allocator.Allocate(options.prompt_pages));
      append(sequence.runs, prompt);
      if (counted) {
        sum.runs_of_prompt += static_cast<double>(sequence.runs.size());
        ++prompts;
      }
      live.push_back(std::move(sequence));
    }
    for (size_t i = 0; i < live.size();) {
      Sequence& sequence = live[i];
      if (sequence.steps_left-- == 0) {
        if (counted) {
          sum.runs_of_sequence += static_cast<double>(sequence.runs.size());
          ++sequences;
        }
        KVFERRY_ASSIGN_OR_RETURN(const PageRuns pages, PageRuns::FromRuns(sequence.runs));
        KVFERRY_RETURN_IF_ERROR(allocator.Free(pages));
        std::swap(sequence, live.back());
        live.pop_back();
        ++ended;
        continue;
      }
      if (random() % 4 == 0 && allocator.num_free() > 0) {
        const PageRun last = sequence.runs.back();
        KVFERRY_ASSIGN_OR_RETURN(const PageRuns page,
                                 allocator.Extend(last.first + last.count - 1, 1));
        append(sequence.runs, page);
      }
      ++i;
    }
  }
  return ChurnResult{sum.runs_of_prompt / static_cast<double>(prompts),
                     sum.runs_of_sequence / static_cast<double>(sequences)};
}

}  // namespace kvferry::bench
