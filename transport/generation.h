#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvferry {

// Words that say whether memory beside them still holds what somebody was told: a seqlock's two
// sides (H.-J. Boehm, "Can seqlocks get along with programming language memory models?", 2012). A
// word changes before what it stands for does, and is read after it.
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

inline std::atomic_ref<uint64_t> GenerationIn(std::byte* words, int64_t index) {
  return std::atomic_ref<uint64_t>(reinterpret_cast<uint64_t*>(words)[index]);
}

inline void RaiseGeneration(std::byte* words, int64_t index) {
  GenerationIn(words, index).fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace kvferry
