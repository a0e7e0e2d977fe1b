#include "pool/bulk_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// Sanitizers know memcpy and not these stores: there they had better see what is written.
#if defined(__SSE2__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define KVFERRY_STREAMING_STORES
#include <emmintrin.h>
#endif

namespace kvferry {

#ifdef KVFERRY_STREAMING_STORES

namespace {

constexpr size_t kLine = 64;
// Below this a call of memcpy is as good (measured: 256 B is 1.1 to 2 times memcpy, 200 B 0.8).
constexpr size_t kMinBytes = 256;
// How far ahead lines are fetched. Measured with random pieces of 1,152 B to 72 KiB: 1.0 to 1.3
// times as fast as with the first four lines of the next piece; 256 B and 2 KiB less.
constexpr size_t kAhead = 1024;

// SSE2, which every x86-64 has, is as fast here as wider stores: lines are put together in the
// processor's write-combining buffers all the same.
void StreamLine(std::byte* to, const std::byte* from) {
  const auto* in = reinterpret_cast<const __m128i*>(from);
  auto* out = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(in);
  const __m128i b = _mm_loadu_si128(in + 1);
  const __m128i c = _mm_loadu_si128(in + 2);
  const __m128i d = _mm_loadu_si128(in + 3);
  _mm_stream_si128(out, a);
  _mm_stream_si128(out + 1, b);
  _mm_stream_si128(out + 2, c);
  _mm_stream_si128(out + 3, d);
}

// Copies the lines in [begin, end) of a piece; `ahead` is where the line lies, kAhead bytes on, that
// is fetched with the first of them.
void StreamLines(std::byte* to, const std::byte* from, size_t begin, size_t end,
                 const std::byte* ahead) {
  for (size_t at = begin; at < end; at += kLine, ahead += kLine) {
    __builtin_prefetch(ahead);
    StreamLine(to + at, from + at);
  }
}

}  // namespace

void BulkCopy(std::byte* to, const std::byte* from, size_t bytes, std::span<const std::byte> next) {
  if (bytes < kMinBytes) {
    PrefetchStart(next.data(), next.size());
    std::memcpy(to, from, bytes);
    return;
  }
  const size_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
  const size_t lines_end = head + (bytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  // Up to kAhead bytes before its end what is ahead is in this piece, then in the next one.
  const size_t ahead_ends = lines_end - std::min(lines_end - head, kAhead);
  const size_t next_ends = std::min(lines_end, ahead_ends + next.size() / kLine * kLine);
  StreamLines(to, from, head, ahead_ends, from + head + kAhead);
  StreamLines(to, from, ahead_ends, next_ends, next.data());
  for (size_t at = next_ends; at < lines_end; at += kLine) StreamLine(to + at, from + at);
  std::memcpy(to + lines_end, from + lines_end, bytes - lines_end);
}

void FinishBulkCopies() { _mm_sfence(); }

#else

void BulkCopy(std::byte* to, const std::byte* from, size_t bytes, std::span<const std::byte>) {
  std::memcpy(to, from, bytes);
}
void FinishBulkCopies() {}

#endif

}  // namespace kvferry
