#pragma once

// Pools full of bytes that anyone can recompute from a seed: what moved is checked byte by byte,
// and so is what must not have.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "pool/kv_pool.h"

namespace kvferry {

// The bytes of one page of one buffer (KvLayout::buffer_index) under `seed`.
void PatternBytes(uint64_t seed, int64_t buffer, int64_t page, std::span<std::byte> out);
// The bytes of that page of that buffer, wherever the pool lies.
std::vector<std::byte> ReadPage(const KvPool& pool, int64_t buffer, int64_t page);
// Writes what of_pages[i] has under `seed` into pages[i], in some buffers.
void WritePattern(const KvPool& pool, std::span<const int64_t> buffers,
                  std::span<const int64_t> pages, uint64_t seed, std::span<const int64_t> of_pages);
// Writes the pattern into every page, or into those listed.
void FillPattern(const KvPool& pool, uint64_t seed);
void FillPattern(const KvPool& pool, uint64_t seed, std::span<const int64_t> pages);

// In the kind of memory that the path under test is for.
std::shared_ptr<KvPool> MakePatternPool(const KvLayout& layout, int64_t num_pages, uint64_t seed);
// The device's, where a binary has one (device_pools.cc).
extern std::shared_ptr<const PoolMemory> (*memory_of_device)();

// Page pages[i] of `pool` holds what page source_pages[i] holds under source_seed, in layers
// [first_layer, end_layer).
::testing::AssertionResult HoldsPages(const KvPool& pool, std::span<const int64_t> pages,
                                      uint64_t source_seed, std::span<const int64_t> source_pages,
                                      int64_t first_layer, int64_t end_layer);
// HoldsPages in all layers, and every page that is not listed still has the pattern of `own_seed`.
::testing::AssertionResult HoldsExactly(const KvPool& pool, uint64_t own_seed,
                                        std::span<const int64_t> pages, uint64_t source_seed,
                                        std::span<const int64_t> source_pages);
// All pages have the pattern of `seed`.
::testing::AssertionResult IsUntouched(const KvPool& pool, uint64_t seed);

// Page lists over [0, pool_pages): "seq", "runs8" (runs of 8, shuffled) or "rand".
std::vector<int64_t> MakePages(const std::string& shape, int64_t count, int64_t pool_pages,
                               std::mt19937_64* random);

}  // namespace kvferry
