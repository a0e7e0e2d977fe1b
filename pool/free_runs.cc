#include "pool/free_runs.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/slab.h"
#include "base/status.h"

namespace kvferry {
namespace {

// With room for the bit behind the last page.
int64_t Words(int64_t num_pages) { return num_pages / 64 + 1; }

// The words that hold the pages of `run`, and in each the bits that are theirs, until see(word,
// bits) is false.
template <typename See>
void SeeWords(PageRun run, const See& see) {
  const int64_t last_page = run.first + run.count - 1;
  int64_t word = run.first / 64;
  uint64_t bits = ~uint64_t{0} << (run.first % 64);
  for (; word < last_page / 64; ++word, bits = ~uint64_t{0}) {
    if (!see(word, bits)) return;
  }
  see(word, bits & ~uint64_t{0} >> (63 - last_page % 64));
}

}  // namespace

absl::StatusOr<FreeRuns> FreeRuns::Create(int64_t num_pages) {
  const int64_t most_runs = num_pages / 2 + 1;
  const int64_t bytes =
      Words(num_pages) * 8 + num_pages * 4 + most_runs * static_cast<int64_t>(sizeof(Record));
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, MapSlab(bytes));
  // With pages of 4 KiB every look would miss the TLB first. Without huge pages it works as well.
  (void)madvise(memory.get(), bytes, MADV_HUGEPAGE);
  return FreeRuns(std::move(memory), num_pages);
}

FreeRuns::FreeRuns(std::shared_ptr<std::byte> memory, int64_t num_pages)
    : memory_(std::move(memory)),
      bits_(reinterpret_cast<uint64_t*>(memory_.get())),
      record_at_(reinterpret_cast<int32_t*>(bits_ + Words(num_pages))),
      records_(reinterpret_cast<Record*>(record_at_ + num_pages)),
      num_pages_(num_pages) {
  Clear();
}

void FreeRuns::Clear() {
  std::memset(bits_, 0, Words(num_pages_) * 8);
  num_free_ = num_runs_ = 0;
  unused_ = kNone;
  never_used_ = 0;
  bins_.fill({kNone, kNone});
  bin_used_.fill(0);
}

// ---------------------------------------------------------------- places

int64_t FreeRuns::FirstFree(PageRun run) const {
  int64_t first = run.first + run.count;
  SeeWords(run, [&](int64_t word, uint64_t bits) {
    const uint64_t free = bits_[word] & bits;
    if (free != 0) first = word * 64 + std::countr_zero(free);
    return free == 0;
  });
  return first;
}

void FreeRuns::Toggle(PageRun run) {
  SeeWords(run, [&](int64_t word, uint64_t bits) {
    bits_[word] ^= bits;
    return true;
  });
}

void FreeRuns::Insert(PageRun run) {
  Toggle(run);
  num_free_ += run.count;
  const int64_t end = run.first + run.count;
  if (IsFree(end)) {
    const Id right = At(end);
    run.count += Run(right).count;
    Remove(right);
  }
  if (run.first > 0 && IsFree(run.first - 1)) {
    const Id left = At(run.first - 1);
    run = {Run(left).first, Run(left).count + run.count};
    Remove(left);
  }
  Add(run);
}

void FreeRuns::PrefetchBits(Id id) const {
  if (id != kNone) __builtin_prefetch(&bits_[records_[id].first / 64], /*write=*/1);
}

PageRun FreeRuns::Take(Id id, int64_t offset, int64_t count) {
  const PageRun run = Run(id);
  const PageRun taken{run.first + offset, std::min(run.count - offset, count)};
  const int64_t behind = run.count - offset - taken.count;
  PrefetchBits(records_[id].next);  // Of its bin, likely to be taken next.
  Remove(id);
  Toggle(taken);
  num_free_ -= taken.count;
  if (offset > 0) Add({run.first, offset});
  if (behind > 0) Add({taken.first + taken.count, behind});
  return taken;
}

void FreeRuns::TakeFront(int64_t page) {
  const Id id = At(page);
  Record& record = records_[id];
  bits_[page / 64] ^= uint64_t{1} << (page % 64);
  --num_free_;
  if (record.first == record.last) return Remove(id);
  ++record.first;
  record_at_[page + 1] = id;
}

void FreeRuns::Add(PageRun run) {
  const Id id = unused_ == kNone ? never_used_++ : std::exchange(unused_, records_[unused_].next);
  Record& record = records_[id];
  record.first = static_cast<int32_t>(run.first);
  record.last = static_cast<int32_t>(run.first + run.count - 1);
  record_at_[record.first] = record_at_[record.last] = id;
  Link(id);
  ++num_runs_;
}

void FreeRuns::Remove(Id id) {
  Unlink(id);
  records_[id].next = std::exchange(unused_, id);
  --num_runs_;
}

// ---------------------------------------------------------------- lengths

int FreeRuns::BinOf(int64_t count) {
  constexpr int kExact = 64, kSteps = 32;  // Steps in each power of two from kExact on.
  if (count < kExact) return static_cast<int>(count);
  const int log = std::bit_width(static_cast<uint64_t>(count)) - 1;
  return kExact + (log - 6) * kSteps + static_cast<int>(count >> (log - 5) & (kSteps - 1));
}

int FreeRuns::BinFrom(int bin) const {
  for (int word = bin / 64; word * 64 < kBins; ++word) {
    uint64_t used = bin_used_[word];
    if (word == bin / 64) used &= ~uint64_t{0} << (bin % 64);
    if (used != 0) return word * 64 + std::countr_zero(used);
  }
  return kBins;
}

int FreeRuns::BinBelow(int bin) const {
  for (int word = bin / 64; word >= 0; --word) {
    uint64_t used = bin_used_[word];
    if (word == bin / 64) used &= ~(~uint64_t{0} << (bin % 64));
    if (used != 0) return word * 64 + std::bit_width(used) - 1;
  }
  return -1;
}

void FreeRuns::Link(Id id) {
  Record& record = records_[id];
  record.bin = BinOf(Run(id).count);
  Bin& bin = bins_[record.bin];
  record.next = kNone;
  record.previous = std::exchange(bin.tail, id);
  (record.previous == kNone ? bin.head : records_[record.previous].next) = id;
  bin_used_[record.bin / 64] |= uint64_t{1} << (record.bin % 64);
}

void FreeRuns::Unlink(Id id) {
  const Record& record = records_[id];
  Bin& bin = bins_[record.bin];
  (record.previous == kNone ? bin.head : records_[record.previous].next) = record.next;
  (record.next == kNone ? bin.tail : records_[record.next].previous) = record.previous;
  if (bin.head == kNone) bin_used_[record.bin / 64] &= ~(uint64_t{1} << (record.bin % 64));
}

bool FreeRuns::Settle(int bin) {
  const Id id = bins_[bin].head;
  if (BinOf(Run(id).count) == bin) return true;
  Unlink(id);
  Link(id);
  return false;
}

std::optional<FreeRuns::Id> FreeRuns::AtLeastInBin(int64_t count, int64_t tries) const {
  for (Id i = bins_[BinOf(count)].head; i != kNone && tries > 0; i = records_[i].next, --tries) {
    if (Run(i).count >= count) return i;
  }
  return std::nullopt;
}

std::optional<FreeRuns::Id> FreeRuns::AtLeast(int64_t count) {
  // Of its own bin, whose runs may be shorter: some before the tightest of the next bins is taken,
  // more when there is none.
  constexpr int64_t kFew = 8, kMost = 64;
  const int own = BinOf(count);
  while (bins_[own].head != kNone && !Settle(own)) {
  }
  if (const auto found = AtLeastInBin(count, kFew)) return found;
  int bin = BinFrom(own + 1);
  while (bin < kBins && !Settle(bin)) bin = BinFrom(own + 1);
  if (bin < kBins) return bins_[bin].head;
  return AtLeastInBin(count, kMost);
}

std::optional<FreeRuns::Id> FreeRuns::LongestBelow(int64_t count) {
  const int below = BinOf(count);
  int bin = BinBelow(below);
  while (bin >= 0 && !Settle(bin)) bin = BinBelow(below);
  if (bin < 0) return std::nullopt;
  return bins_[bin].head;
}

int64_t FreeRuns::longest() const {
  int64_t longest = 0;
  for (int bin = BinBelow(kBins); bin >= BinOf(longest); bin = BinBelow(bin)) {
    for (Id i = bins_[bin].head; i != kNone; i = records_[i].next) {
      longest = std::max(longest, Run(i).count);
    }
  }
  return longest;
}

std::vector<int64_t> FreeRuns::Histogram() const {
  std::vector<int64_t> runs(std::bit_width(static_cast<uint64_t>(longest())));
  for (int bin = BinFrom(0); bin < kBins; bin = BinFrom(bin + 1)) {
    for (Id i = bins_[bin].head; i != kNone; i = records_[i].next) {
      ++runs[std::bit_width(static_cast<uint64_t>(Run(i).count)) - 1];
    }
  }
  return runs;
}

}  // namespace kvferry
