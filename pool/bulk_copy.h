#pragma once

// memcpy for pages: long runs of bytes far apart, which nobody here reads again soon.

#include <cstddef>

namespace kvferry {

// As memcpy, but past the caches where the processor can and it pays: a store of a whole line needs
// not read the line first, and what is in the caches stays there. FinishBulkCopies() makes the
// bytes visible to whoever then sees another store of this thread; so it comes before any word
// that they are there.
void BulkCopy(std::byte* to, const std::byte* from, size_t bytes);
void FinishBulkCopies();

// Fetches the first lines of what is to be copied next: the processor foresees the rest by itself,
// but not where another page begins.
inline void PrefetchStart(const std::byte* from, size_t bytes) {
  constexpr size_t kLine = 64;
  constexpr size_t kLines = 4;
  for (size_t at = 0; at < kLines * kLine && at < bytes; at += kLine) __builtin_prefetch(from + at);
}

}  // namespace kvferry
