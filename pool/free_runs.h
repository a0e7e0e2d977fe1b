#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "pool/page_runs.h"

namespace kvferry {

// The free pages of a pool and the runs they form, found by place and by length in constant time.
// One bit a page says whether it is free; the first and the last page of a free run know its
// record, which is linked into a bin of runs about as long: exactly as long up to 63 pages, within
// 1/32 beyond. A run that TakeFront() shortens stays in its bin until a search meets it there, so
// that a run is never longer than its bin says, but may be shorter.
//
// Memory is zeroed and not touched before it is needed, by huge pages where the system has them: a
// bit and 4 bytes a page, 20 bytes a free run. Moved, not copied. Arguments are not checked. Not
// thread-safe.
class FreeRuns {
 public:
  // Pages [0, num_pages), none of them free. num_pages must lie in [1, PageRuns::kMaxPages];
  // RESOURCE_EXHAUSTED when the system refuses the memory.
  static absl::StatusOr<FreeRuns> Create(int64_t num_pages);
  FreeRuns(FreeRuns&&) = default;
  FreeRuns& operator=(FreeRuns&&) = default;

  // `page` must lie in [0, num_pages]; the one behind the last is not free.
  bool IsFree(int64_t page) const {
    const auto bit = static_cast<uint64_t>(page);
    return (bits_[bit / 64] >> (bit % 64) & 1) != 0;
  }
  // Bit page % 64 of word page / 64 says the same.
  const uint64_t* bits() const { return bits_; }
  // The first free page of `run`, or the one behind it when there is none.
  int64_t FirstFree(PageRun run) const;
  // A free run as the methods below know it, until it changes.
  using Id = int32_t;
  // The run of which `page` is the first or the last.
  Id At(int64_t page) const { return record_at_[page]; }
  PageRun Run(Id id) const {
    const Record& record = records_[id];
    return {record.first, int64_t{record.last} - record.first + 1};
  }

  int64_t num_free() const { return num_free_; }
  int64_t num_runs() const { return num_runs_; }
  // O(runs in the bins from the longest run's on).
  int64_t longest() const;
  // Element i counts the runs of [2^i, 2^(i + 1)) pages; the last one is not 0. O(num_runs()).
  std::vector<int64_t> Histogram() const;

  // About the shortest run of at least `count` pages, nullopt when there is none, or when the only
  // such runs share a bin with shorter ones and are not among the first few dozen there. O(1).
  std::optional<Id> AtLeast(int64_t count);
  // About the longest run of fewer than `count` pages, not counting those that share a bin with
  // runs of `count`; nullopt when there is none.
  std::optional<Id> LongestBelow(int64_t count);
  // About the longest run; there must be one.
  Id Longest() { return *LongestBelow(PageRuns::kMaxPages * 2); }

  // Fetches what Insert(run) will look at first, which in a large pool is far from any cache.
  void PrefetchInsert(PageRun run) const {
    __builtin_prefetch(&record_at_[run.first], /*write=*/1);
    __builtin_prefetch(&record_at_[run.first + run.count - 1], /*write=*/1);
  }
  // Frees pages none of which is free, and merges them with free neighbours.
  void Insert(PageRun run);
  // Takes `count` pages of a run, from `offset` on, or as many as there are.
  PageRun Take(Id id, int64_t offset, int64_t count);
  // Takes the first page of a run.
  void TakeFront(int64_t page);
  // No page is free.
  void Clear();

 private:
  static constexpr int kBins = 864;  // The bin of PageRuns::kMaxPages is 832.
  static constexpr int32_t kNone = -1;

  struct Record {
    int32_t first;  // Pages.
    int32_t last;
    int32_t bin;
    int32_t next;  // Records of the same bin; `next` also links unused records.
    int32_t previous;
  };
  // Its runs in the order in which they came. Taking the oldest first keeps runs longer than
  // taking the newest, and as long as taking the lowest.
  struct Bin {
    int32_t head;
    int32_t tail;
  };

  FreeRuns(std::shared_ptr<std::byte> memory, int64_t num_pages);

  static int BinOf(int64_t count);
  // The first bin from `bin` on that is not empty, or kBins; the last one below `bin`, or -1.
  int BinFrom(int bin) const;
  int BinBelow(int bin) const;
  // What is free is taken, and the other way round.
  void Toggle(PageRun run);
  void PrefetchBits(Id id) const;
  void Add(PageRun run);
  void Remove(Id id);
  void Link(Id id);
  void Unlink(Id id);
  // A run of at least `count` among the first `tries` of the bin of `count`.
  std::optional<Id> AtLeastInBin(int64_t count, int64_t tries) const;
  // Moves the head of `bin` where it belongs; true when that is where it was.
  bool Settle(int bin);

  std::shared_ptr<std::byte> memory_;  // Of the next three.
  uint64_t* bits_;                     // 1: free.
  int32_t* record_at_;                 // Of the first and the last page of each run.
  Record* records_;
  int64_t num_pages_;
  int64_t num_free_ = 0;
  int64_t num_runs_ = 0;
  int32_t unused_ = kNone;  // Records that have been used: a list.
  int32_t never_used_ = 0;  // The first of those that have not.
  std::array<Bin, kBins> bins_;
  std::array<uint64_t, (kBins + 63) / 64> bin_used_;
};

}  // namespace kvferry
