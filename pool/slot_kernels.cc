#include "pool/slot_kernels.h"

#ifdef KVFERRY_X86_KERNELS
#include <immintrin.h>
#endif

#include <array>
#include <bit>
#include <cstring>

namespace kvferry {
namespace {

// Bit i is flags[i], which is 0 or 1. A multiplication moves eight of them into the top byte.
uint64_t ToBits(const std::array<uint8_t, kSlotBlock>& flags) {
  uint64_t bits = 0;
  for (size_t i = 0; i < flags.size(); i += 8) {
    uint64_t eight;
    std::memcpy(&eight, &flags[i], sizeof eight);
    bits |= eight * 0x0102040810204080 >> 56 << i;
  }
  return bits;
}

// Without branches, so that compilers turn all but the look at the pages into vector instructions.
bool SlotsBehind(const SlotPages& pages, const int64_t* tokens, const int32_t* last_slots,
                 int64_t count, int32_t* slots, uint64_t* opens) {
  const uint32_t page_size = uint32_t{1} << pages.page_shift;
  uint64_t no_count = 0;   // Above bit 30: tokens is below 2 or too large.
  uint32_t outside = 0;    // In bit 31: a slot is below the first page's or above the last one's.
  uint32_t misplaced = 0;  // In the bits of a place in a page.
  std::array<uint8_t, kSlotBlock> opens_page{};
  for (int64_t i = 0; i < count; ++i) {
    const auto last = static_cast<uint32_t>(last_slots[i]);
    const uint64_t last_token = static_cast<uint64_t>(tokens[i]) - 2;
    no_count |= last_token | static_cast<uint64_t>(tokens[i]);
    outside |= last | (last - page_size) | (pages.end_slot - 1 - last);
    misplaced |= last ^ static_cast<uint32_t>(last_token);
    slots[i] = static_cast<int32_t>(last + 1);
    opens_page[i] = ((last + 1) & (page_size - 1)) == 0;
  }
  *opens = ToBits(opens_page);
  if (no_count >> 31 != 0 || outside >> 31 != 0 || (misplaced & (page_size - 1)) != 0) return false;
  uint64_t free = 0;  // In bit 0.
  for (int64_t i = 0; i < count; ++i) {
    const int32_t page = last_slots[i] >> pages.page_shift;
    free |= pages.free_bits[page / 64] >> (page % 64);
  }
  return (free & 1) == 0;
}

void CountUp(int32_t first, int64_t count, int32_t* slots) {
  for (int64_t i = 0; i < count; ++i) {
    slots[i] = static_cast<int32_t>(static_cast<uint32_t>(first) + static_cast<uint32_t>(i));
  }
}

// By the block, which compilers turn into vector instructions: most lists are pages in long runs.
int64_t Neighbours(const int32_t* slots, int64_t count) {
  constexpr int64_t kCompared = 16;
  const auto first = static_cast<uint32_t>(slots[0]);
  int64_t found = 1;
  for (; found + kCompared <= count; found += kCompared) {
    uint32_t differ = 0;
    for (int64_t i = found; i < found + kCompared; ++i) {
      differ |= static_cast<uint32_t>(slots[i]) ^ (first + static_cast<uint32_t>(i));
    }
    if (differ != 0) break;
  }
  while (found < count &&
         static_cast<uint32_t>(slots[found]) == first + static_cast<uint32_t>(found)) {
    ++found;
  }
  return found;
}

#ifdef KVFERRY_X86_KERNELS

__attribute__((target("avx2"))) void CountUpAvx2(int32_t first, int64_t count, int32_t* slots) {
  __m256i next =
      _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(slots + i), next);
    next = _mm256_add_epi32(next, _mm256_set1_epi32(8));
  }
  for (; i < count; ++i) slots[i] = static_cast<int32_t>(first + i);
}

__attribute__((target("avx2"))) int64_t NeighboursAvx2(const int32_t* slots, int64_t count) {
  __m256i next =
      _mm256_add_epi32(_mm256_set1_epi32(slots[0]), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i equal =
        _mm256_cmpeq_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(slots + i)), next);
    const auto bytes = static_cast<uint32_t>(_mm256_movemask_epi8(equal));
    if (bytes != ~uint32_t{0}) return i + std::countr_one(bytes) / 4;
    next = _mm256_add_epi32(next, _mm256_set1_epi32(8));
  }
  return i < count && slots[i] == _mm256_cvtsi256_si32(next) ? i + Neighbours(slots + i, count - i)
                                                             : i;
}

__attribute__((target("avx512f"))) __m512i SixteenFrom(int32_t first) {
  return _mm512_add_epi32(_mm512_set1_epi32(first),
                          _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

__attribute__((target("avx512f"))) void CountUpAvx512(int32_t first, int64_t count,
                                                      int32_t* slots) {
  __m512i next = SixteenFrom(first);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_si512(slots + i, next);
    next = _mm512_add_epi32(next, _mm512_set1_epi32(16));
  }
  _mm512_mask_storeu_epi32(slots + i, static_cast<__mmask16>((1 << (count - i)) - 1), next);
}

__attribute__((target("avx512f"))) int64_t NeighboursAvx512(const int32_t* slots, int64_t count) {
  constexpr int64_t kAtOnce = 64, kAhead = 512;
  const __m512i sixteen = _mm512_set1_epi32(16);
  __m512i next = SixteenFrom(slots[0]);
  int64_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
    // The processor by itself looks no further than to the end of each 4 KiB.
    for (int64_t line = 0; line < kAtOnce && i + kAhead + kAtOnce <= count; line += 16) {
      _mm_prefetch(slots + i + kAhead + line, _MM_HINT_T0);
    }
    __m512i differ{}, expected = next;
    for (int64_t part = 0; part < kAtOnce; part += 16) {
      differ |= _mm512_xor_si512(_mm512_loadu_si512(slots + i + part), expected);
      expected = _mm512_add_epi32(expected, sixteen);
    }
    if (_mm512_test_epi32_mask(differ, differ) != 0) break;
    next = expected;
  }
  for (; i + 16 <= count; i += 16) {
    const uint32_t differ = _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(slots + i), next);
    if (differ != 0) return i + std::countr_zero(differ);
    next = _mm512_add_epi32(next, sixteen);
  }
  const auto left = static_cast<__mmask16>((1 << (count - i)) - 1);
  const uint32_t differ =
      _mm512_mask_cmpneq_epi32_mask(left, _mm512_maskz_loadu_epi32(left, slots + i), next);
  return differ != 0 ? i + std::countr_zero(differ) : count;
}

// SlotsBehind(), 16 sequences at a time: compilers do not come to gathers and masks by themselves.
__attribute__((target("avx512f,avx512dq"))) bool SlotsBehindAvx512(const SlotPages& pages,
                                                                   const int64_t* tokens,
                                                                   const int32_t* last_slots,
                                                                   int64_t count, int32_t* slots,
                                                                   uint64_t* opens) {
  if (count < kSlotBlock) return SlotsBehind(pages, tokens, last_slots, count, slots, opens);
  const __m512i one = _mm512_set1_epi32(1), two = _mm512_set1_epi64(2);
  const __m512i page_size = _mm512_set1_epi32(1 << pages.page_shift);
  const __m512i in_page = _mm512_sub_epi32(page_size, one);
  const __m512i last_slot = _mm512_set1_epi32(static_cast<int>(pages.end_slot - 1));
  __m512i no_count{}, outside{}, misplaced{}, free{};
  *opens = 0;
  for (int64_t i = 0; i < kSlotBlock; i += 16) {
    const __m512i last = _mm512_loadu_si512(last_slots + i);
    const __m512i low = _mm512_loadu_si512(tokens + i), low_last = _mm512_sub_epi64(low, two);
    const __m512i high = _mm512_loadu_si512(tokens + i + 8),
                  high_last = _mm512_sub_epi64(high, two);
    no_count |= low | low_last | high | high_last;
    outside |= last | _mm512_sub_epi32(last, page_size) | _mm512_sub_epi32(last_slot, last);
    const __m512i last_token =
        _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(low_last)),
                           _mm512_cvtepi64_epi32(high_last), 1);
    misplaced |= last ^ last_token;
    const __m512i next = _mm512_add_epi32(last, one);
    _mm512_storeu_si512(slots + i, next);
    *opens |= uint64_t{_mm512_testn_epi32_mask(next, in_page)} << i;
  }
  if (_mm512_test_epi64_mask(no_count, _mm512_set1_epi64(~int64_t{0x7fffffff})) != 0 ||
      _mm512_movepi32_mask(outside) != 0 || _mm512_test_epi32_mask(misplaced, in_page) != 0) {
    return false;
  }
  const __m128i shift = _mm_cvtsi32_si128(pages.page_shift);
  for (int64_t i = 0; i < kSlotBlock; i += 16) {
    const __m512i page = _mm512_srl_epi32(_mm512_loadu_si512(last_slots + i), shift);
    const __m512i words =
        _mm512_i32gather_epi32(_mm512_srli_epi32(page, 5), pages.free_bits, sizeof(uint32_t));
    free |= _mm512_srlv_epi32(words, page & _mm512_set1_epi32(31));
  }
  return _mm512_test_epi32_mask(free, one) == 0;
}

#endif

}  // namespace

const SlotKernels& SlotKernelsOf(CpuKernels kernels) {
  static constexpr SlotKernels kPortable{&SlotsBehind, &CountUp, &Neighbours};
#ifdef KVFERRY_X86_KERNELS
  static constexpr SlotKernels kAvx2{&SlotsBehind, &CountUpAvx2, &NeighboursAvx2};
  static constexpr SlotKernels kAvx512{&SlotsBehindAvx512, &CountUpAvx512, &NeighboursAvx512};
  if (kernels == CpuKernels::kAvx512) return kAvx512;
  if (kernels == CpuKernels::kAvx2) return kAvx2;
#endif
  (void)kernels;
  return kPortable;
}

}  // namespace kvferry
