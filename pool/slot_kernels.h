#pragma once

// What TokenSlotAllocator does for each token slot, rather than for each run of pages.

#include <cstdint>

#include "pool/casts.h"

namespace kvferry {

// The pages of a pool of token slots, 1 << page_shift in each.
struct SlotPages {
  const uint64_t* free_bits;  // Bit page % 64 of word page / 64: whether it is free.
  uint32_t end_slot;          // Behind the last page's, at most the largest int32.
  int page_shift;
};

// Sequences that are looked at together: bits of a word.
inline constexpr int64_t kSlotBlock = 64;

// Sequence i of the first `count`, at most kSlotBlock, grows to tokens[i]; its last slot is
// last_slots[i]. Writes last_slots[i] + 1 to slots[i], sets bit i of *opens when that slot is the
// first of a page, and returns whether all is right: tokens lie in [2, 2^31), the last slots hold
// token tokens[i] - 2 of a page other than page 0 that exists and is not free. What was written
// means nothing otherwise.
using SlotsBehindFn = bool (*)(const SlotPages& pages, const int64_t* tokens,
                               const int32_t* last_slots, int64_t count, int32_t* slots,
                               uint64_t* opens);

struct SlotKernels {
  SlotsBehindFn slots_behind;
  // Writes first, first + 1, ... first + count - 1, which are int32.
  void (*count_up)(int32_t first, int64_t count, int32_t* slots);
  // How many of `count` slots, which is 1 at least, are neighbours from the first one on, each one
  // above the one before.
  int64_t (*neighbours)(const int32_t* slots, int64_t count);
};

// CanRun(kernels) must be true.
const SlotKernels& SlotKernelsOf(CpuKernels kernels = BestCpuKernels());

}  // namespace kvferry
