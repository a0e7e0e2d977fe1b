#include "pool/bulk_copy.h"

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

// Of longer pieces lines are fetched so far ahead into the first cache: with 72 KiB 1.2, with 4 MiB
// 1.3 times as fast as by CopyAhead.
constexpr size_t kAhead = 1024;
constexpr size_t kMinBytesToFetch = 8 * kAhead;

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

}  // namespace

void BulkCopy(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes < kMinBytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  const size_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
  const size_t lines_end = head + (bytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  size_t at = head;
  if (bytes >= kMinBytesToFetch) {
    for (; at < lines_end - kAhead; at += kLine) {
      __builtin_prefetch(from + at + kAhead);
      StreamLine(to + at, from + at);
    }
  }
  for (; at < lines_end; at += kLine) StreamLine(to + at, from + at);
  std::memcpy(to + lines_end, from + lines_end, bytes - lines_end);
}

void FinishBulkCopies() { _mm_sfence(); }

#else

void BulkCopy(std::byte* to, const std::byte* from, size_t bytes) { std::memcpy(to, from, bytes); }
void FinishBulkCopies() {}

#endif

}  // namespace kvferry
