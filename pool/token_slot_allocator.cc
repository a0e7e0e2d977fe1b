#include "pool/token_slot_allocator.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "base/ceil_div.h"
#include "base/check_range.h"
#include "base/status.h"
#include "pool/slot_kernels.h"

namespace kvferry {
namespace {

constexpr int64_t kMaxSlots = std::numeric_limits<int32_t>::max();

// What is best here, asked once: a call takes less time than a second asking.
const SlotKernels& Kernels() {
  static const SlotKernels& kernels = SlotKernelsOf();
  return kernels;
}

void AppendSlots(int64_t first, int64_t count, std::vector<int32_t>* slots) {
  slots->resize(slots->size() + count);
  Kernels().count_up(static_cast<int32_t>(first), count, slots->data() + slots->size() - count);
}

}  // namespace

absl::StatusOr<TokenSlotAllocator> TokenSlotAllocator::Create(int64_t num_tokens,
                                                              int64_t page_size) {
  KVFERRY_RETURN_IF_ERROR(CheckRange("slot allocator", "page_size", page_size, 1, kMaxSlots / 2));
  const int64_t most_pages = std::min(PageRuns::kMaxPages, kMaxSlots / page_size) - 1;
  if (num_tokens < 1 || num_tokens % page_size != 0 || num_tokens > most_pages * page_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot allocator: num_tokens is ", num_tokens,
                     " but must be a positive multiple of page_size = ", page_size, " and at most ",
                     most_pages * page_size));
  }
  KVFERRY_ASSIGN_OR_RETURN(PageAllocator pages,
                           PageAllocator::Create(num_tokens / page_size + 1, /*reserved=*/1));
  return TokenSlotAllocator(std::move(pages), page_size);
}

TokenSlotAllocator::TokenSlotAllocator(PageAllocator pages, int64_t page_size)
    : pages_(std::move(pages)),
      page_size_(page_size),
      page_shift_(std::has_single_bit(static_cast<uint64_t>(page_size))
                      ? std::countr_zero(static_cast<uint64_t>(page_size))
                      : -1) {}

absl::Status TokenSlotAllocator::CheckRoom(int64_t num_tokens) const {
  if (num_tokens < 1 || num_tokens % page_size_ != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot allocator: num_tokens is ", num_tokens,
                     " but must be a positive multiple of page_size = ", page_size_));
  }
  return pages_.CheckCount(num_tokens / page_size_);
}

absl::Status TokenSlotAllocator::AllocateInto(std::span<int32_t> slots) {
  const auto num_tokens = static_cast<int64_t>(slots.size());
  KVFERRY_RETURN_IF_ERROR(CheckRoom(num_tokens));
  int32_t* to = slots.data();
  pages_.AllocateRuns(num_tokens / page_size_, [&](PageRun run) {
    const int64_t count = run.count * page_size_;
    Kernels().count_up(static_cast<int32_t>(run.first * page_size_), count, to);
    to += count;
  });
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> TokenSlotAllocator::Allocate(int64_t num_tokens) {
  // Before there is a list, which may be a large one.
  KVFERRY_RETURN_IF_ERROR(CheckRoom(num_tokens));
  std::vector<int32_t> slots(num_tokens);
  KVFERRY_RETURN_IF_ERROR(AllocateInto(slots));
  return slots;
}

std::string TokenSlotAllocator::WhyNotAllocated(int64_t slot) const {
  const int64_t end = pages_.num_pages() * page_size_;
  if (slot >= page_size_ && slot < end) return "is not allocated";
  return absl::StrCat("is outside [", page_size_, ", ", end, ")");
}

absl::Status TokenSlotAllocator::NotAllocated(int64_t slot) const {
  return absl::InvalidArgumentError(
      absl::StrCat("slot allocator: slot ", slot, " ", WhyNotAllocated(slot)));
}

// ---------------------------------------------------------------- growing

absl::Status TokenSlotAllocator::CheckGrowth(int64_t sequence, const Growth& growth) const {
  const auto fault = [&](const auto&... words) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot allocator: sequence ", sequence, " of the batch: ", words...));
  };
  if (growth.from < 0 || growth.to < growth.from || growth.to > kMaxSlots) {
    return fault("it cannot grow from ", growth.from, " to ", growth.to, " tokens");
  }
  if (growth.from == 0) return absl::OkStatus();
  const int64_t page = growth.last_slot / page_size_;  // Below 1 where the slot is negative.
  if (!pages_.IsAllocated(page) || IsNoted(page)) {
    return fault("its last slot, ", growth.last_slot, ", ", WhyNotAllocated(growth.last_slot));
  }
  if (growth.last_slot % page_size_ != (growth.from - 1) % page_size_) {
    return fault("its last slot, ", growth.last_slot, ", cannot hold token ", growth.from - 1,
                 " with pages of ", page_size_, " tokens");
  }
  return absl::OkStatus();
}

int64_t TokenSlotAllocator::NewPages(int64_t from, int64_t to) const {
  return CeilDiv(to, page_size_) - CeilDiv(from, page_size_);
}

void TokenSlotAllocator::Grow(const Growth& growth, std::vector<int32_t>* slots) {
  const int64_t room = RoundUp(growth.from, page_size_) - growth.from;
  const int64_t filled = std::min(room, growth.to - growth.from);
  AppendSlots(growth.last_slot + 1, filled, slots);
  const int64_t new_pages = NewPages(growth.from, growth.to);
  if (new_pages == 0) return;
  int64_t left = growth.to - growth.from - filled;
  const auto append = [&](PageRun run) {
    const int64_t count = std::min(left, run.count * page_size_);
    AppendSlots(run.first * page_size_, count, slots);
    left -= count;
  };
  if (growth.from == 0) {
    pages_.AllocateRuns(new_pages, append);
  } else {
    pages_.ExtendRuns(growth.last_slot / page_size_, new_pages, append);
  }
}

absl::StatusOr<std::vector<TokenSlotAllocator::Growth>> TokenSlotAllocator::PlanExtend(
    std::span<const int64_t> prefix_tokens, std::span<const int64_t> tokens,
    std::span<const int32_t> last_slots) const {
  if (prefix_tokens.size() != tokens.size() || last_slots.size() != tokens.size()) {
    return absl::InvalidArgumentError(absl::StrCat("slot allocator: ", prefix_tokens.size(),
                                                   " prefix_tokens, ", tokens.size(),
                                                   " tokens and ", last_slots.size(),
                                                   " last_slots; there must be one of each "
                                                   "for each sequence"));
  }
  std::vector<Growth> batch;
  batch.reserve(tokens.size());
  int64_t new_pages = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    batch.push_back({prefix_tokens[i], tokens[i], last_slots[i]});
    KVFERRY_RETURN_IF_ERROR(CheckGrowth(static_cast<int64_t>(i), batch[i]));
    new_pages += NewPages(batch[i].from, batch[i].to);
  }
  if (new_pages > pages_.num_free()) {
    return absl::ResourceExhaustedError(absl::StrCat("slot allocator: the batch needs ", new_pages,
                                                     " pages of ", page_size_, " tokens, ",
                                                     pages_.num_free(), " are free"));
  }
  return batch;
}

absl::Status TokenSlotAllocator::CheckExtend(std::span<const int64_t> prefix_tokens,
                                             std::span<const int64_t> tokens,
                                             std::span<const int32_t> last_slots) const {
  return PlanExtend(prefix_tokens, tokens, last_slots).status();
}

absl::StatusOr<std::vector<int32_t>> TokenSlotAllocator::Extend(
    std::span<const int64_t> prefix_tokens, std::span<const int64_t> tokens,
    std::span<const int32_t> last_slots) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<Growth> batch,
                           PlanExtend(prefix_tokens, tokens, last_slots));
  int64_t new_tokens = 0;
  for (const Growth& growth : batch) new_tokens += growth.to - growth.from;
  std::vector<int32_t> slots;
  slots.reserve(new_tokens);
  for (const Growth& growth : batch) Grow(growth, &slots);
  return slots;
}

std::optional<std::vector<int32_t>> TokenSlotAllocator::DecodeUsual(
    std::span<const int64_t> tokens, std::span<const int32_t> last_slots) {
  // Whether pages have been freed in an open group, only Extend() looks.
  if (page_shift_ < 0 || noted_end_ != 0 || tokens.size() != last_slots.size()) return std::nullopt;
  const SlotsBehindFn slots_behind = Kernels().slots_behind;
  const SlotPages pages{pages_.free_bits(), static_cast<uint32_t>(pages_.num_pages() * page_size_),
                        page_shift_};
  const auto sequences = static_cast<int64_t>(tokens.size());
  std::vector<int32_t> slots(sequences);
  absl::InlinedVector<uint64_t, 32> opens(sequences / kSlotBlock + 1);
  int64_t new_pages = 0;
  for (int64_t at = 0; at < sequences; at += kSlotBlock) {
    uint64_t& bits = opens[at / kSlotBlock];
    if (!slots_behind(pages, &tokens[at], &last_slots[at], std::min(kSlotBlock, sequences - at),
                      &slots[at], &bits)) {
      return std::nullopt;
    }
    new_pages += std::popcount(bits);
  }
  if (new_pages > pages_.num_free()) return std::nullopt;
  for (size_t block = 0; block < opens.size(); ++block) {
    for (uint64_t left = opens[block]; left != 0; left &= left - 1) {
      int32_t& slot = slots[block * kSlotBlock + std::countr_zero(left)];
      const int64_t page = pages_.ExtendByOne((slot >> page_shift_) - 1);
      slot = static_cast<int32_t>(page << page_shift_);
    }
  }
  return slots;
}

absl::StatusOr<std::vector<int32_t>> TokenSlotAllocator::Decode(
    std::span<const int64_t> tokens, std::span<const int32_t> last_slots) {
  if (auto slots = DecodeUsual(tokens, last_slots)) return *std::move(slots);
  std::vector<int64_t> prefix_tokens(tokens.begin(), tokens.end());
  for (size_t i = 0; i < prefix_tokens.size(); ++i) {
    if (prefix_tokens[i] < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("slot allocator: sequence ", i, " of the batch: tokens is ",
                       prefix_tokens[i], " but must be at least 1, as the new one counts"));
    }
    --prefix_tokens[i];
  }
  return Extend(prefix_tokens, tokens, last_slots);
}

// ---------------------------------------------------------------- freeing

// Adds the pages of neighbouring slots [first, first + count).
absl::Status TokenSlotAllocator::AddRun(int64_t first, int64_t count, Runs* runs) const {
  if (first < 0) return NotAllocated(first);
  PageRun run{PageOf(first), 0};
  const int64_t end = PageOf(first + count - 1) + 1;
  run.count = end - run.first;
  const int64_t wrong = pages_.FirstNotAllocated(run);
  if (wrong < end) return NotAllocated(std::max(first, wrong * page_size_));
  // Slots of a page may come in several calls; a page of one token has no second.
  for (int64_t page = run.first; in_group_ && page_size_ == 1 && page < end; ++page) {
    if (IsNoted(page)) return NotAllocated(page);
  }
  if (!runs->empty() && runs->back().first + runs->back().count == run.first) {
    runs->back().count += run.count;
  } else {
    runs->push_back(run);
  }
  return absl::OkStatus();
}

// In ascending order, each page once.
absl::StatusOr<TokenSlotAllocator::Runs> TokenSlotAllocator::RunsOf(
    std::span<const int32_t> slots) const {
  Runs runs;
  const auto size = static_cast<int64_t>(slots.size());
  for (int64_t i = 0, count = 0; i < size; i += count) {
    // Scattered slots are told at once.
    const bool alone = i + 1 < size && int64_t{slots[i]} + 1 != slots[i + 1];
    count = alone ? 1 : Kernels().neighbours(&slots[i], size - i);
    KVFERRY_RETURN_IF_ERROR(AddRun(slots[i], count, &runs));
  }
  if (!std::is_sorted(runs.begin(), runs.end(), BeginsBefore)) {
    std::sort(runs.begin(), runs.end(), BeginsBefore);
  }
  size_t kept = 0;
  for (const PageRun run : runs) {
    if (kept == 0 || run.first >= runs[kept - 1].first + runs[kept - 1].count) {
      runs[kept++] = run;
      continue;
    }
    if (page_size_ == 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("slot allocator: slot ", run.first, " is freed twice in one list"));
    }
    PageRun& last = runs[kept - 1];
    last.count = std::max(last.count, run.first + run.count - last.first);
  }
  runs.resize(kept);
  return runs;
}

absl::Status TokenSlotAllocator::Free(std::span<const int32_t> slots) {
  KVFERRY_ASSIGN_OR_RETURN(const Runs runs, RunsOf(slots));
  return FreePages(runs);
}

absl::Status TokenSlotAllocator::FreePages(const Runs& runs) {
  if (in_group_) {
    Note(runs);
    return absl::OkStatus();
  }
  KVFERRY_ASSIGN_OR_RETURN(const PageRuns pages, PageRuns::FromRuns(runs));
  return pages_.Free(pages);
}

// ---------------------------------------------------------------- free groups

void TokenSlotAllocator::Note(const Runs& runs) {
  if (runs.empty()) return;
  noted_.resize(pages_.num_pages() / 64 + 1);
  noted_first_ = noted_end_ == 0 ? runs.front().first : std::min(noted_first_, runs.front().first);
  noted_end_ = std::max(noted_end_, runs.back().first + runs.back().count);
  for (const PageRun& run : runs) {
    for (int64_t page = run.first; page < run.first + run.count; ++page) {
      noted_[page / 64] |= uint64_t{1} << (page % 64);
    }
  }
}

int64_t TokenSlotAllocator::NextNoted(int64_t page, bool noted) const {
  for (; page < noted_end_; page += 64 - page % 64) {
    const uint64_t word = noted ? noted_[page / 64] : ~noted_[page / 64];
    const uint64_t bits = word >> (page % 64);
    if (bits != 0) return page + std::countr_zero(bits);  // At the end none is noted.
  }
  return noted_end_;
}

void TokenSlotAllocator::ForEachNoted(absl::FunctionRef<void(PageRun)> see) const {
  for (int64_t page = NextNoted(noted_first_, true), end = 0; page < noted_end_;
       page = NextNoted(end, true)) {
    end = NextNoted(page, false);
    see({page, end - page});
  }
}

void TokenSlotAllocator::CloseGroup() {
  in_group_ = false;
  if (noted_end_ == 0) return;
  std::fill(noted_.begin() + noted_first_ / 64, noted_.begin() + (noted_end_ + 63) / 64, 0);
  noted_first_ = noted_end_ = 0;
}

void TokenSlotAllocator::EndFreeGroup() {
  // Cannot fail: each was allocated when it was noted, and nothing in between frees.
  ForEachNoted([this](PageRun run) { pages_.Free(PageRuns(run)).IgnoreError(); });
  CloseGroup();
}

void TokenSlotAllocator::Clear() {
  CloseGroup();
  pages_.Clear();
}

}  // namespace kvferry
