#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "pool/page_allocator.h"

namespace kvferry {

// Which blocks of a paged KV cache hold the tokens of each sequence of a running batch: the block
// table of PagedAttention, and the bookkeeping around it. Token t of a sequence lies in block
// t / block_size of its row, place t % block_size.
//
// Blocks are the pages [reserved_blocks, num_blocks) of a PageAllocator of its own: a sequence gets
// few runs, and grows right behind its last block where it can. Sequences are named by ids in
// [0, max_sequences); that of a freed sequence is given to a later one. Every call that fails
// leaves everything as it was.
//
// Not thread-safe; engines drive it from their scheduler thread. WriteTable() alone spreads its
// work over threads, and returns when they are done.
class BlockTables {
 public:
  struct Options {
    int64_t num_blocks = 0;     // [1, 2^30]
    int64_t block_size = 0;     // Tokens a block: [1, 2^31)
    int64_t max_sequences = 0;  // Alive at a time: [1, kMaxSequences]
    int64_t bytes_per_token =
        0;  // Only fragmented_bytes() counts with it; 0 if it does not matter.
    // Blocks [0, reserved_blocks) are in no table: engines keep block 0 for the rows of padded
    // tokens. [0, num_blocks)
    int64_t reserved_blocks = 0;
  };
  // INVALID_ARGUMENT when an option is out of range, or the bytes of all blocks exceed an int64.
  static absl::StatusOr<BlockTables> Create(const Options& options);

  // ------------------------------------------------------------ sequences come, grow and go

  // The id of a new sequence of `tokens` tokens, which may be none. INVALID_ARGUMENT unless tokens
  // lies in [0, kMaxTokens], RESOURCE_EXHAUSTED when ids or blocks run out.
  absl::StatusOr<int64_t> Add(int64_t tokens);
  // Sequence ids[i] gets tokens[i] more: its last block is filled first, then come new ones. The
  // whole batch grows, or nothing: INVALID_ARGUMENT when the lengths differ, an id is not alive or
  // stands twice, or a count is negative or leads beyond kMaxTokens; RESOURCE_EXHAUSTED naming both
  // numbers when the batch needs more blocks than are free.
  absl::Status Grow(std::span<const int64_t> ids, std::span<const int64_t> tokens);
  // These sequences end, and all their blocks are free. INVALID_ARGUMENT when an id is not alive or
  // stands twice.
  absl::Status Free(std::span<const int64_t> ids);
  // Frees the blocks at these places of a sequence's row, such as those that slid out of its
  // window. Their entries become -1, every token keeps its place, and a last block that was freed
  // before it was full is replaced by another when the sequence grows. INVALID_ARGUMENT when the id
  // is not alive, or a place is outside the row, freed already, or twice in the list.
  absl::Status FreeBlocks(int64_t id, std::span<const int64_t> places);
  // No sequence is alive, and every block is free.
  void Clear();

  struct Preempted {
    int64_t id = 0;
    int64_t tokens = 0;

    bool operator==(const Preempted&) const = default;
  };
  // Frees whole sequences, the one added last first, until `num_blocks` blocks are free, and
  // returns them in that order for the caller to queue again: none if enough are free. Sequences in
  // `keep`, and such as hold no block, are passed over. INVALID_ARGUMENT when num_blocks is
  // negative or an id of `keep` is not alive, RESOURCE_EXHAUSTED when all the others together hold
  // too few.
  absl::StatusOr<std::vector<Preempted>> Preempt(int64_t num_blocks, std::span<const int64_t> keep);

  // ------------------------------------------------------------ what a batch looks like
  //
  // One entry for each id, in the caller's order; an id may stand twice here. INVALID_ARGUMENT when
  // one is not alive.

  // Entries of the longest row: what WriteTable() needs at least.
  absl::StatusOr<int64_t> TableWidth(std::span<const int64_t> ids) const;
  // INVALID_ARGUMENT also when a table of that width is too narrow, or of more than any sequence
  // can have: for who has to make it first.
  absl::Status CheckWidth(std::span<const int64_t> ids, int64_t width) const;
  // Fills the first ids.size() * width entries of `table`, int32 [ids, width]: the blocks of each
  // sequence, then -1. A width above TableWidth() is legal, for tables of a constant shape.
  // `threads` may be null. INVALID_ARGUMENT also when table is too small, and for CheckWidth().
  absl::Status WriteTable(std::span<const int64_t> ids, int64_t width, std::span<int32_t> table,
                          ThreadPool* threads) const;
  absl::StatusOr<std::vector<int32_t>> TokenCounts(std::span<const int64_t> ids) const;
  // Positions of the last tokens: their counts less one, so -1 for an empty sequence.
  absl::StatusOr<std::vector<int32_t>> LastPositions(std::span<const int64_t> ids) const;
  // Blocks that a sequence holds, without those that FreeBlocks() took.
  absl::StatusOr<std::vector<int32_t>> BlockCounts(std::span<const int64_t> ids) const;

  int64_t block_size() const { return options_.block_size; }
  int64_t max_sequences() const { return options_.max_sequences; }
  int64_t num_sequences() const { return max_sequences() - static_cast<int64_t>(free_ids_.size()); }
  // Blocks.
  int64_t num_free() const { return pages_.num_free(); }
  const PageAllocator& pages() const { return pages_; }
  // Memory that is taken and unused: the places behind the last token in the last block of each
  // sequence. O(max_sequences).
  int64_t fragmented_bytes() const;

  static constexpr int64_t kMaxSequences = 1 << 20;
  static constexpr int64_t kMaxTokens = (int64_t{1} << 31) - 1;  // Of one sequence.

 private:
  struct Sequence {
    bool alive = false;
    int64_t tokens = 0;
    int64_t num_held = 0;         // Entries of `blocks` that are not -1.
    int64_t number = 0;           // Sequences are counted as they are added.
    int64_t named_in_call = 0;    // The last call that named it: whether an id stands twice.
    std::vector<int32_t> blocks;  // ceil(tokens / block_size) block ids, -1 where freed.
  };

  BlockTables(PageAllocator pages, const Options& options);

  absl::Status CheckAlive(int64_t id) const;
  absl::Status CheckAlive(std::span<const int64_t> ids) const;
  absl::Status CheckEachOnce(std::span<const int64_t> ids);
  absl::Status CheckGrowth(int64_t id, int64_t tokens) const;
  absl::Status CheckTable(std::span<const int64_t> ids, int64_t width, size_t entries) const;
  // Whether the block that the next token belongs into was freed.
  bool LostItsTail(const Sequence& sequence) const;
  int64_t NewBlocks(const Sequence& sequence, int64_t tokens) const;
  // Cannot fail once NewBlocks() are free and there is room for them.
  void Extend(Sequence* sequence, int64_t tokens);
  void End(int64_t id);  // Needs no memory.
  // Sequences that may be preempted, the newest first.
  std::vector<int64_t> Victims(std::span<const int64_t> keep);
  template <typename Field>
  absl::StatusOr<std::vector<int32_t>> Gather(std::span<const int64_t> ids, Field field) const;

  PageAllocator pages_;
  Options options_;
  std::vector<Sequence> sequences_;  // By id.
  std::vector<int64_t> free_ids_;    // The last one is handed out next.
  int64_t num_added_ = 0;
  int64_t num_calls_ = 0;  // That name sequences each once.
};

}  // namespace kvferry
