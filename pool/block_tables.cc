#include "pool/block_tables.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/ceil_div.h"
#include "base/check_range.h"
#include "base/status.h"
#include "pool/page_runs.h"

namespace kvferry {
namespace {

// A part of a table that is worth waking a thread for.
constexpr int64_t kEntriesPerPart = 16384;

template <typename... Words>
absl::Status Invalid(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat("block tables: ", words...));
}
template <typename... Words>
absl::Status Exhausted(const Words&... words) {
  return absl::ResourceExhaustedError(absl::StrCat("block tables: ", words...));
}

absl::Status CheckOptions(const BlockTables::Options& options) {
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("block tables", "num_blocks", options.num_blocks, 1, PageRuns::kMaxPages));
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("block tables", "block_size", options.block_size, 1, BlockTables::kMaxTokens));
  KVFERRY_RETURN_IF_ERROR(CheckRange("block tables", "max_sequences", options.max_sequences, 1,
                                     BlockTables::kMaxSequences));
  KVFERRY_RETURN_IF_ERROR(CheckRange("block tables", "reserved_blocks", options.reserved_blocks, 0,
                                     options.num_blocks - 1));
  const int64_t places = options.num_blocks * options.block_size;
  return CheckRange("block tables", "bytes_per_token", options.bytes_per_token, 0,
                    std::numeric_limits<int64_t>::max() / places);
}

// Room for `count` more: appending them cannot throw. Unlike reserve(), which makes just that much,
// it costs a constant time an element however often it is called.
void ReserveMore(std::vector<int32_t>* list, size_t count) {
  const size_t needed = list->size() + count;
  if (needed > list->capacity()) list->reserve(std::max(needed, 2 * list->capacity()));
}

}  // namespace

absl::StatusOr<BlockTables> BlockTables::Create(const Options& options) {
  KVFERRY_RETURN_IF_ERROR(CheckOptions(options));
  KVFERRY_ASSIGN_OR_RETURN(PageAllocator pages,
                           PageAllocator::Create(options.num_blocks, options.reserved_blocks));
  return BlockTables(std::move(pages), options);
}

BlockTables::BlockTables(PageAllocator pages, const Options& options)
    : pages_(std::move(pages)), options_(options) {
  Clear();
}

void BlockTables::Clear() {
  pages_.Clear();
  sequences_.assign(options_.max_sequences, {});
  free_ids_.resize(options_.max_sequences);
  std::iota(free_ids_.rbegin(), free_ids_.rend(), 0);  // Low ids first.
}

// ---------------------------------------------------------------- checks

absl::Status BlockTables::CheckAlive(int64_t id) const {
  if (id < 0 || id >= max_sequences()) {
    return Invalid("sequence ", id, " is outside [0, max_sequences = ", max_sequences(), ")");
  }
  if (!sequences_[id].alive) return Invalid("sequence ", id, " is not alive");
  return absl::OkStatus();
}

absl::Status BlockTables::CheckAlive(std::span<const int64_t> ids) const {
  for (const int64_t id : ids) KVFERRY_RETURN_IF_ERROR(CheckAlive(id));
  return absl::OkStatus();
}

absl::Status BlockTables::CheckEachOnce(std::span<const int64_t> ids) {
  ++num_calls_;
  for (const int64_t id : ids) {
    KVFERRY_RETURN_IF_ERROR(CheckAlive(id));
    if (std::exchange(sequences_[id].named_in_call, num_calls_) == num_calls_) {
      return Invalid("sequence ", id, " stands twice in one list");
    }
  }
  return absl::OkStatus();
}

absl::Status BlockTables::CheckGrowth(int64_t id, int64_t tokens) const {
  const int64_t has = sequences_[id].tokens;
  if (tokens >= 0 && tokens <= kMaxTokens - has) return absl::OkStatus();
  return Invalid("sequence ", id, " of ", has, " tokens cannot grow by ", tokens,
                 ", which must lie in [0, ", kMaxTokens - has, "]");
}

// ---------------------------------------------------------------- coming and growing

bool BlockTables::LostItsTail(const Sequence& sequence) const {
  return sequence.tokens % block_size() != 0 && sequence.blocks.back() < 0;
}

int64_t BlockTables::NewBlocks(const Sequence& sequence, int64_t tokens) const {
  if (tokens == 0) return 0;
  const int64_t entries = CeilDiv(sequence.tokens + tokens, block_size());
  const int64_t replaced = LostItsTail(sequence) ? 1 : 0;
  return entries - static_cast<int64_t>(sequence.blocks.size()) + replaced;
}

void BlockTables::Extend(Sequence* sequence, int64_t tokens) {
  const int64_t count = NewBlocks(*sequence, tokens);
  std::vector<int32_t>& blocks = sequence->blocks;
  if (count > 0) {
    if (LostItsTail(*sequence)) blocks.pop_back();
    const int64_t last = blocks.empty() ? -1 : blocks.back();
    const auto append = [&](PageRun run) {
      for (int64_t i = 0; i < run.count; ++i) blocks.push_back(static_cast<int32_t>(run.first + i));
    };
    if (last < 0) {
      pages_.AllocateRuns(count, append);
    } else {
      pages_.ExtendRuns(last, count, append);
    }
  }
  sequence->num_held += count;
  sequence->tokens += tokens;
}

absl::StatusOr<int64_t> BlockTables::Add(int64_t tokens) {
  KVFERRY_RETURN_IF_ERROR(CheckRange("block tables", "tokens", tokens, 0, kMaxTokens));
  if (free_ids_.empty()) {
    return Exhausted("all ", max_sequences(), " sequences (max_sequences) are alive");
  }
  const int64_t count = CeilDiv(tokens, block_size());
  if (count > num_free()) {
    return Exhausted("a sequence of ", tokens, " tokens needs ", count, " blocks of ", block_size(),
                     ", ", num_free(), " of ", options_.num_blocks, " are free");
  }
  const int64_t id = free_ids_.back();
  // All the memory that this needs, before anything changes.
  ReserveMore(&sequences_[id].blocks, count);
  free_ids_.pop_back();
  sequences_[id].alive = true;
  sequences_[id].number = num_added_++;
  Extend(&sequences_[id], tokens);
  return id;
}

absl::Status BlockTables::Grow(std::span<const int64_t> ids, std::span<const int64_t> tokens) {
  if (ids.size() != tokens.size()) {
    return Invalid(ids.size(), " ids and ", tokens.size(), " tokens; there must be one for each");
  }
  KVFERRY_RETURN_IF_ERROR(CheckEachOnce(ids));
  int64_t count = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    KVFERRY_RETURN_IF_ERROR(CheckGrowth(ids[i], tokens[i]));
    const int64_t new_blocks = NewBlocks(sequences_[ids[i]], tokens[i]);
    count += new_blocks;
    // Before the first one grows, so that all do; not for a batch that is too large anyway.
    if (new_blocks > 0 && count <= num_free()) ReserveMore(&sequences_[ids[i]].blocks, new_blocks);
  }
  if (count > num_free()) {
    return Exhausted("the batch needs ", count, " blocks of ", block_size(), " tokens, ",
                     num_free(), " of ", options_.num_blocks, " are free");
  }
  for (size_t i = 0; i < ids.size(); ++i) Extend(&sequences_[ids[i]], tokens[i]);
  return absl::OkStatus();
}

// ---------------------------------------------------------------- going

void BlockTables::End(int64_t id) {
  Sequence& sequence = sequences_[id];
  pages_.FreeEach(sequence.blocks);
  sequence.blocks.clear();  // Keeps its memory for the next sequence of this id.
  sequence.tokens = sequence.num_held = 0;
  sequence.alive = false;
  free_ids_.push_back(id);
}

absl::Status BlockTables::Free(std::span<const int64_t> ids) {
  KVFERRY_RETURN_IF_ERROR(CheckEachOnce(ids));
  for (const int64_t id : ids) End(id);
  return absl::OkStatus();
}

absl::Status BlockTables::FreeBlocks(int64_t id, std::span<const int64_t> places) {
  KVFERRY_RETURN_IF_ERROR(CheckAlive(id));
  std::vector<int32_t>& blocks = sequences_[id].blocks;
  const auto num_entries = static_cast<int64_t>(blocks.size());
  std::vector<int32_t> pages;
  pages.reserve(places.size());
  for (const int64_t place : places) {
    const bool inside = place >= 0 && place < num_entries;
    if (!inside || blocks[place] < 0) {  // Also what this list freed already.
      for (size_t undo = 0; undo < pages.size(); ++undo) {
        blocks[places[undo]] = pages[undo];
      }
      if (inside) return Invalid("block ", place, " of sequence ", id, " is already free");
      return Invalid("block ", place, " of sequence ", id, " is outside [0, ", num_entries, ")");
    }
    pages.push_back(std::exchange(blocks[place], -1));
  }
  sequences_[id].num_held -= static_cast<int64_t>(pages.size());
  pages_.FreeEach(pages);
  return absl::OkStatus();
}

std::vector<int64_t> BlockTables::Victims(std::span<const int64_t> keep) {
  ++num_calls_;
  for (const int64_t id : keep) sequences_[id].named_in_call = num_calls_;
  std::vector<int64_t> victims;
  for (int64_t id = 0; id < max_sequences(); ++id) {
    const Sequence& sequence = sequences_[id];
    if (sequence.num_held > 0 && sequence.named_in_call != num_calls_) victims.push_back(id);
  }
  std::sort(victims.begin(), victims.end(),
            [&](int64_t a, int64_t b) { return sequences_[a].number > sequences_[b].number; });
  return victims;
}

absl::StatusOr<std::vector<BlockTables::Preempted>> BlockTables::Preempt(
    int64_t num_blocks, std::span<const int64_t> keep) {
  if (num_blocks < 0) return Invalid("num_blocks is ", num_blocks, " but must not be negative");
  KVFERRY_RETURN_IF_ERROR(CheckAlive(keep));
  std::vector<Preempted> preempted;
  int64_t num_freed = num_free();
  for (const int64_t id : Victims(keep)) {
    if (num_freed >= num_blocks) break;
    num_freed += sequences_[id].num_held;
    preempted.push_back({id, sequences_[id].tokens});
  }
  if (num_freed < num_blocks) {
    return Exhausted(num_blocks, " blocks asked, ", num_freed, " of ", options_.num_blocks,
                     " would be free after preempting all but ", keep.size(), " kept sequences");
  }
  for (const Preempted& one : preempted) End(one.id);
  return preempted;
}

// ---------------------------------------------------------------- what a batch looks like

absl::StatusOr<int64_t> BlockTables::TableWidth(std::span<const int64_t> ids) const {
  KVFERRY_RETURN_IF_ERROR(CheckAlive(ids));
  size_t width = 0;
  for (const int64_t id : ids) width = std::max(width, sequences_[id].blocks.size());
  return static_cast<int64_t>(width);
}

absl::Status BlockTables::CheckWidth(std::span<const int64_t> ids, int64_t width) const {
  KVFERRY_ASSIGN_OR_RETURN(const int64_t least, TableWidth(ids));
  return CheckRange("block tables", "width", width, least, CeilDiv(kMaxTokens, block_size()));
}

absl::Status BlockTables::CheckTable(std::span<const int64_t> ids, int64_t width,
                                     size_t entries) const {
  KVFERRY_RETURN_IF_ERROR(CheckWidth(ids, width));
  if (width == 0 || ids.size() <= entries / width) return absl::OkStatus();
  return Invalid("table has ", entries, " entries but must have ", ids.size(), " rows of ", width);
}

absl::Status BlockTables::WriteTable(std::span<const int64_t> ids, int64_t width,
                                     std::span<int32_t> table, ThreadPool* threads) const {
  KVFERRY_RETURN_IF_ERROR(CheckTable(ids, width, table.size()));
  const auto num_rows = static_cast<int64_t>(ids.size());
  const auto write_rows = [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const std::vector<int32_t>& blocks = sequences_[ids[row]].blocks;
      int32_t* const start = table.data() + row * width;
      std::fill(std::copy(blocks.begin(), blocks.end(), start), start + width, -1);
    }
  };
  const int64_t part_rows = std::max<int64_t>(1, kEntriesPerPart / std::max<int64_t>(1, width));
  const int64_t num_parts = CeilDiv(num_rows, part_rows);
  if (threads == nullptr || num_parts <= 1) {
    write_rows(0, num_rows);
    return absl::OkStatus();
  }
  threads->ParallelFor(num_parts, [&](int64_t part) {
    write_rows(part * part_rows, std::min(num_rows, (part + 1) * part_rows));
  });
  return absl::OkStatus();
}

template <typename Field>
absl::StatusOr<std::vector<int32_t>> BlockTables::Gather(std::span<const int64_t> ids,
                                                         Field field) const {
  KVFERRY_RETURN_IF_ERROR(CheckAlive(ids));
  std::vector<int32_t> values;
  values.reserve(ids.size());
  for (const int64_t id : ids) values.push_back(static_cast<int32_t>(field(sequences_[id])));
  return values;
}

absl::StatusOr<std::vector<int32_t>> BlockTables::TokenCounts(std::span<const int64_t> ids) const {
  return Gather(ids, [](const Sequence& sequence) { return sequence.tokens; });
}

absl::StatusOr<std::vector<int32_t>> BlockTables::LastPositions(
    std::span<const int64_t> ids) const {
  return Gather(ids, [](const Sequence& sequence) { return sequence.tokens - 1; });
}

absl::StatusOr<std::vector<int32_t>> BlockTables::BlockCounts(std::span<const int64_t> ids) const {
  return Gather(ids, [](const Sequence& sequence) { return sequence.num_held; });
}

int64_t BlockTables::fragmented_bytes() const {
  int64_t places = 0;
  for (const Sequence& sequence : sequences_) {
    if (sequence.blocks.empty() || sequence.blocks.back() < 0) continue;
    places += static_cast<int64_t>(sequence.blocks.size()) * block_size() - sequence.tokens;
  }
  return places * options_.bytes_per_token;
}

}  // namespace kvferry
