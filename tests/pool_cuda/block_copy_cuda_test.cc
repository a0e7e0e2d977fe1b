#include "pool/cuda/block_copy_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "pool/cuda/cuda_memory.h"
#include "pool/cuda/host_pin.h"
#include "tests/pool_cuda/device.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr cudaStream_t kStream = nullptr;

BlockCacheShape Shape() {
  return {
      .num_layers = 3, .block_size = 4, .num_kv_heads = 2, .head_dim = 8, .dtype = DType::kFloat16};
}

// A cache and, on the host, what must be in it.
struct Cache {
  std::shared_ptr<BlockCache> real, model;

  explicit Cache(std::shared_ptr<BlockCache> cache)
      : real(std::move(cache)),
        model(Must(BlockCache::Create(real->shape(), real->num_blocks()))) {}
  Cache(const BlockCacheShape& shape, int64_t num_blocks,
        const std::shared_ptr<const PoolMemory>& memory)
      : Cache(Must(BlockCache::Create(shape, num_blocks, memory))) {}

  std::byte* begin(const BlockCache& cache) const { return cache.buffer_infos()[0].address; }
  void Fill(std::mt19937_64& random) const {
    std::generate_n(begin(*model), model->bytes(),
                    [&] { return static_cast<std::byte>(random()); });
    const auto bytes = static_cast<size_t>(model->bytes());
    if (real->memory().on_host()) {
      std::copy_n(begin(*model), bytes, begin(*real));  // CUDA would not, where a part is pinned.
    } else {
      CopyToDevice(begin(*real), begin(*model), bytes);
    }
  }
  // When nothing is under way.
  bool Agrees() const {
    std::vector<std::byte> bytes(static_cast<size_t>(real->bytes()));
    if (real->memory().on_host()) {
      std::copy_n(begin(*real), bytes.size(), bytes.begin());
    } else {
      EXPECT_EQ(cudaMemcpy(bytes.data(), begin(*real), bytes.size(), cudaMemcpyDefault),
                cudaSuccess);
    }
    return std::equal(bytes.begin(), bytes.end(), begin(*model));
  }
};

// Each behind the one before, as on a heap: where one ends in the middle of a page of the system's
// the next one begins.
std::array<Cache, 3> Neighbours(const BlockCacheShape& shape, int64_t num_blocks) {
  const auto layer_bytes = static_cast<size_t>(num_blocks * shape.block_bytes() / shape.num_layers);
  const int64_t bytes = 3 * num_blocks * shape.block_bytes();
  const std::shared_ptr<std::byte> heap = Must(HostMemory()->Allocate(bytes));
  std::byte* next = heap.get();
  const auto adopt = [&] {
    std::vector<std::span<std::byte>> layers;
    for (int64_t layer = 0; layer < shape.num_layers; ++layer, next += layer_bytes) {
      layers.push_back({next, layer_bytes});
    }
    return Cache(Must(BlockCache::Adopt(shape, layers, heap)));
  };
  return {adopt(), adopt(), adopt()};
}

TEST(CudaBlocks, RandomCopiesAgreeWithCopyBlocks) {
  const std::string missing = MissingDevice();
  if (!missing.empty()) GTEST_SKIP() << missing;
  std::mt19937_64 random(8);
  BlockCacheShape shape = Shape();
  for (int round = 0; round < 40; ++round) {
    shape.mla = round % 4 == 3;
    std::shuffle(shape.order.begin(), shape.order.end(), random);
    // Two on the device, one in pinned and one in plain host memory, and one that is pinned at its
    // ends, or one of them, as its neighbours are.
    const std::array<Cache, 3> neighbours = Neighbours(shape, 20);
    const std::array<Cache, 7> caches = {Cache(shape, 20, CudaMemory(0)),
                                         Cache(shape, 30, CudaMemory(0)),
                                         Cache(shape, 40, HostMemory()),
                                         Cache(shape, 20, HostMemory()),
                                         neighbours[0],
                                         neighbours[1],
                                         neighbours[2]};
    const auto pin = Must(PinHostMemory(caches[2].real->buffer_infos(), caches[2].real));
    for (const size_t which : {4, 6}) {
      if (round % 3 == 1 && which == 6) continue;
      ASSERT_TRUE(IsOk(caches[which].real->PinFor(*CudaMemory(0))));
    }
    for (const Cache& cache : caches) cache.Fill(random);
    for (int copy = 0; copy < 60; ++copy) {
      const Cache& from = caches[random() % caches.size()];
      const Cache& to = caches[random() % caches.size()];
      // Runs and single blocks; within one cache the lower half becomes the upper.
      const int64_t first = from.real == to.real ? to.real->num_blocks() / 2 : 0;
      const int64_t readable = first > 0 ? first : from.real->num_blocks();
      std::vector<int64_t> targets(static_cast<size_t>(to.real->num_blocks() - first));
      std::iota(targets.begin(), targets.end(), first);
      if (random() % 2 == 0) std::shuffle(targets.begin(), targets.end(), random);
      targets.resize(random() % (targets.size() + 1));
      std::vector<BlockPair> pairs;
      for (size_t i = 0; i < targets.size(); ++i) {
        pairs.emplace_back(static_cast<int64_t>(i) % readable, targets[i]);
      }
      ASSERT_TRUE(IsOk(CopyBlocksCuda(*from.real, *to.real, pairs, kStream)));
      ASSERT_TRUE(IsOk(CopyBlocks(*from.model, *to.model, pairs)));
    }
    ASSERT_EQ(cudaStreamSynchronize(kStream), cudaSuccess);
    for (const Cache& cache : caches) ASSERT_TRUE(cache.Agrees()) << round;
  }
}

// And waits for it: nobody else does here.
TEST(CudaBlocks, CopyBlocksLeavesThemToTheDevice) {
  const std::string missing = MissingDevice();
  if (!missing.empty()) GTEST_SKIP() << missing;
  std::mt19937_64 random(3);
  const Cache plain(Shape(), 8, HostMemory()), pinned(Shape(), 8, HostMemory());
  const Cache first(Shape(), 8, CudaMemory(0)), second(Shape(), 6, CudaMemory(0));
  ASSERT_TRUE(IsOk(pinned.real->PinFor(*CudaMemory(0))));
  const auto blocks = std::span(pinned.begin(*pinned.real), pinned.real->bytes());
  EXPECT_TRUE(IsPinned(blocks));
  EXPECT_TRUE(IsOk(pinned.real->PinFor(*CudaMemory(0))));
  EXPECT_TRUE(IsPinned(blocks));
  EXPECT_TRUE(Fails(first.real->PinFor(*HostMemory()), absl::StatusCode::kFailedPrecondition,
                    "block cache", "lies in"));
  for (const Cache* cache : {&plain, &pinned, &first, &second}) cache->Fill(random);
  const auto copy = [](const Cache& from, const Cache& to, const std::vector<BlockPair>& pairs) {
    EXPECT_TRUE(IsOk(CopyBlocks(*from.real, *to.real, pairs)));
    EXPECT_TRUE(IsOk(CopyBlocks(*from.model, *to.model, pairs)));
  };
  for (const Cache* host : {&plain, &pinned}) {
    copy(*host, first, {{0, 5}, {1, 6}, {7, 1}});
    copy(first, second, {{5, 0}, {6, 1}, {1, 5}});
    copy(second, second, {{5, 2}, {0, 3}});
    copy(second, *host, {{2, 3}, {3, 4}, {1, 0}});
    const auto bytes = static_cast<size_t>(host->real->bytes());
    EXPECT_EQ(std::memcmp(host->begin(*host->real), host->begin(*host->model), bytes), 0);
  }
  EXPECT_TRUE(first.Agrees() && second.Agrees());
  const std::vector<BlockPair> bad = {{0, 6}};
  EXPECT_TRUE(Fails(CopyBlocks(*first.real, *second.real, bad), absl::StatusCode::kOutOfRange,
                    "destination block 6"));
}

// Layers of an engine's: the second right behind the first, the third before it, in pages that they
// share.
TEST(CudaBlocks, LayersThatSharePagesArePinnedTogether) {
  const std::string missing = MissingDevice();
  if (!missing.empty()) GTEST_SKIP() << missing;
  const auto own = Must(BlockCache::Create(Shape(), 5));
  const auto layer_bytes = static_cast<size_t>(own->bytes() / 3);
  const std::shared_ptr<std::byte> heap = Must(HostMemory()->Allocate(own->bytes() + 64));
  const std::vector<std::span<std::byte>> layers = {
      {heap.get() + 64 + layer_bytes, layer_bytes},
      {heap.get() + 64 + 2 * layer_bytes, layer_bytes},
      {heap.get(), layer_bytes}};
  auto cache = Must(BlockCache::Adopt(Shape(), layers, heap));
  ASSERT_EQ(cache->pieces().size(), 2);
  ASSERT_TRUE(IsOk(cache->PinFor(*CudaMemory(0))));
  for (const std::span<std::byte>& layer : layers) EXPECT_TRUE(IsPinned(layer));
  // Of the same memory: reached as it is, for as long as the first one lives.
  const auto other = Must(BlockCache::Adopt(Shape(), std::vector(3, layers[0]), heap));
  EXPECT_TRUE(IsOk(other->PinFor(*CudaMemory(0))));
  cache.reset();
  EXPECT_FALSE(IsAnyPinned({heap.get(), static_cast<size_t>(own->bytes() + 64)}));
}

TEST(CudaBlocks, WhatSomebodyElseHasPinnedInPartIsNotPinnedAgain) {
  const std::string missing = MissingDevice();
  if (!missing.empty()) GTEST_SKIP() << missing;
  const std::array<Cache, 3> neighbours = Neighbours(Shape(), 20);
  ASSERT_TRUE(IsOk(neighbours[0].real->PinFor(*CudaMemory(0))));
  const std::span<std::byte> all = neighbours[1].real->pieces()[0];
  EXPECT_TRUE(IsAnyPinned(all));
  EXPECT_FALSE(IsPinned(all));
  EXPECT_TRUE(Fails(neighbours[1].real->PinFor(*CudaMemory(0)), absl::StatusCode::kAlreadyExists,
                    "pinning"));
  EXPECT_FALSE(IsAnyPinned({&all.back(), 1}));
}

// The rest needs no device.

TEST(CudaBlockArguments, PairsAreCheckedAsOnTheHost) {
  const auto cache = Must(BlockCache::Create(Shape(), 4));
  const auto copy = [&](const std::vector<BlockPair>& pairs) {
    return CopyBlocksCuda(*cache, *cache, pairs, kStream);
  };
  EXPECT_TRUE(Fails(copy({{0, 1}, {4, 2}}), absl::StatusCode::kOutOfRange, "source block 4"));
  EXPECT_TRUE(Fails(copy({{0, 1}, {2, 1}}), absl::StatusCode::kInvalidArgument, "written twice"));
  EXPECT_TRUE(Fails(copy({{0, 1}, {1, 2}}), absl::StatusCode::kInvalidArgument, "read and writt"));
  EXPECT_TRUE(IsOk(copy({})));
}

TEST(CudaBlockArguments, WithoutADeviceNothingIsCopied) {
  if (MissingDevice().empty()) GTEST_SKIP() << "this machine has a CUDA device";
  const auto cache = Must(BlockCache::Create(Shape(), 4));
  const std::vector<BlockPair> pairs = {{0, 1}};
  EXPECT_TRUE(Fails(CopyBlocksCuda(*cache, *cache, pairs, kStream), absl::StatusCode::kUnavailable,
                    "block copy"));
  EXPECT_TRUE(Fails(BlockCache::Create(Shape(), 4, CudaMemory(0)), absl::StatusCode::kUnavailable,
                    "no device 0"));
}

}  // namespace
}  // namespace kvferry
