#include "pool/block_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "tests/pool/guarded_memory.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kRange = absl::StatusCode::kOutOfRange;
using Order = std::array<BlockDim, 5>;

BlockCacheShape Shape(bool mla = false) {
  return {.num_layers = 2,
          .block_size = 3,
          .num_kv_heads = 2,
          .head_dim = 4,
          .dtype = DType::kFloat16,
          .mla = mla};
}

std::vector<Order> AllOrders() {
  Order order = {BlockDim::kKv, BlockDim::kBlock, BlockDim::kToken, BlockDim::kHead,
                 BlockDim::kValue};
  std::vector<Order> orders;
  do {
    orders.push_back(order);
  } while (std::next_permutation(order.begin(), order.end()));
  return orders;
}

// Every value of one block, in an order that no memory order can change.
using Block = std::vector<uint16_t>;

template <typename Visit>
void ForEachValue(const BlockCache& cache, int64_t block, const Visit& visit) {
  for (int64_t layer = 0; layer < cache.shape().num_layers; ++layer) {
    for (int64_t kv = 0; kv < (cache.shape().mla ? 1 : 2); ++kv) {
      const TokenView view = Must(cache.View(layer, kv));
      for (int64_t token = 0; token < view.page_size; ++token) {
        for (int64_t head = 0; head < view.num_heads; ++head) {
          for (int64_t value = 0; value < view.head_dim; ++value) {
            visit(view.row(block * view.page_size + token) + head * view.head_stride +
                  value * view.value_stride);
          }
        }
      }
    }
  }
}

Block Read(const BlockCache& cache, int64_t block) {
  Block values;
  ForEachValue(cache, block, [&](const std::byte* at) {
    uint16_t value;
    std::memcpy(&value, at, sizeof value);
    values.push_back(value);
  });
  return values;
}

void Fill(const BlockCache& cache, int64_t block, uint64_t seed) {
  std::mt19937_64 random(seed);
  ForEachValue(cache, block, [&](std::byte* at) {
    const auto value = static_cast<uint16_t>(random());
    std::memcpy(at, &value, sizeof value);
  });
}

TEST(BlockCaches, EveryOrderHasEveryValueOnce) {
  for (const bool mla : {false, true}) {
    for (const Order& order : AllOrders()) {
      BlockCacheShape shape = Shape(mla);
      shape.order = order;
      const auto cache = Must(BlockCache::Create(shape, 5));
      std::set<std::byte*> places;
      for (int64_t block = 0; block < 5; ++block) {
        ForEachValue(*cache, block, [&](std::byte* at) { places.insert(at); });
      }
      EXPECT_EQ(static_cast<int64_t>(places.size()) * 2, cache->bytes());
      EXPECT_EQ(*places.rbegin() - *places.begin(), cache->bytes() - 2);
    }
  }
}

// Which blocks hold the bytes of which fill: the whole model of swapping and copying.
TEST(BlockCaches, RandomCopiesInEveryOrderAgreeWithAModel) {
  const auto threads = Must(ThreadPool::Create(1));
  std::mt19937_64 random(9);
  const auto upto = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  int64_t copied_values = 0;
  uint64_t fills = 0;
  for (const Order& order : AllOrders()) {
    BlockCacheShape shape = Shape(upto(2) == 0);
    shape.order = order;
    const std::array<std::shared_ptr<BlockCache>, 2> caches = {Must(BlockCache::Create(shape, 12)),
                                                               Must(BlockCache::Create(shape, 9))};
    std::array<std::map<int64_t, uint64_t>, 2> model;
    for (int64_t c = 0; c < 2; ++c) {
      for (int64_t block = 0; block < caches[c]->num_blocks(); ++block) {
        model[c][block] = ++fills;
        Fill(*caches[c], block, fills);
      }
    }
    for (int i = 0; i < 60; ++i) {
      const int64_t from = upto(2), to = upto(2);
      std::vector<BlockPair> pairs;
      std::set<int64_t> used_from, used_to;
      const int64_t first = upto(6), second = upto(6);
      for (int64_t n = upto(8); n > 0; --n) {
        const bool adjacent = upto(3) > 0;
        const BlockPair pair = {adjacent ? first + n % 3 : upto(caches[from]->num_blocks()),
                                adjacent ? second + n % 3 : upto(caches[to]->num_blocks())};
        const bool clash =
            from == to && (used_to.contains(pair.first) || used_from.contains(pair.second) ||
                           pair.first == pair.second);
        if (clash || used_to.contains(pair.second)) continue;
        pairs.push_back(pair);
        used_from.insert(pair.first);
        used_to.insert(pair.second);
      }
      ASSERT_TRUE(IsOk(
          CopyBlocks(*caches[from], *caches[to], pairs, upto(2) == 0 ? threads.get() : nullptr)));
      const std::map<int64_t, uint64_t> before = model[from];
      for (const auto& [source, destination] : pairs) model[to][destination] = before.at(source);
      copied_values += static_cast<int64_t>(pairs.size()) * shape.block_bytes() / 2;
    }
    for (int64_t c = 0; c < 2; ++c) {
      for (const auto& [block, fill] : model[c]) {
        const Block got = Read(*caches[c], block);
        Fill(*caches[c], block, fill);
        ASSERT_EQ(got, Read(*caches[c], block)) << "block " << block;
      }
    }
  }
  EXPECT_GT(copied_values, 1000000);
}

TEST(BlockCaches, BufferInfosAreWhatLiesOutsideOfTheBlock) {
  const auto flash = Must(BlockCache::Create(Shape(), 5));
  EXPECT_TRUE(Must(BlockCache::Create(Shape(), 5, nullptr))->memory().on_host());
  ASSERT_EQ(flash->buffer_infos().size(), 4);  // K and V of two layers.
  EXPECT_EQ(flash->buffer_infos()[1].item_bytes, 3 * 2 * 4 * 2);
  EXPECT_EQ(flash->buffer_infos()[1].address, Must(flash->View(0, 1)).data);
  EXPECT_EQ(flash->buffer_infos()[2].address, Must(flash->View(1, 0)).data);
  BlockCacheShape shape = Shape();
  shape.order = {BlockDim::kBlock, BlockDim::kKv, BlockDim::kHead, BlockDim::kToken,
                 BlockDim::kValue};
  const auto flashinfer = Must(BlockCache::Create(shape, 5));
  ASSERT_EQ(flashinfer->buffer_infos().size(), 2);  // Both in one block.
  EXPECT_EQ(flashinfer->buffer_infos()[0].item_bytes, 2 * 3 * 2 * 4 * 2);
}

TEST(BlockCaches, BytesOfABlock) {
  EXPECT_EQ(Shape().block_bytes(), 2 * 2 * 3 * 2 * 4 * 2);
  EXPECT_EQ(Shape(true).block_bytes(), 2 * 3 * 2 * 4 * 2);  // No value cache.
}

TEST(BlockCaches, ShapesThatCannotBe) {
  const auto create = [](void (*change)(BlockCacheShape&), int64_t num_blocks = 4) {
    BlockCacheShape shape = Shape();
    change(shape);
    return BlockCache::Create(shape, num_blocks).status();
  };
  EXPECT_TRUE(
      Fails(create([](BlockCacheShape& s) { s.num_layers = 0; }), kInvalid, "num_layers is 0"));
  EXPECT_TRUE(
      Fails(create([](BlockCacheShape& s) { s.block_size = -1; }), kInvalid, "page_size is -1"));
  EXPECT_TRUE(
      Fails(create([](BlockCacheShape& s) { s.num_kv_heads = 0; }), kInvalid, "num_heads is 0"));
  EXPECT_TRUE(
      Fails(create([](BlockCacheShape& s) { s.head_dim = INT64_MAX; }), kInvalid, "head_dim"));
  EXPECT_TRUE(Fails(create([](BlockCacheShape& s) { s.dtype = static_cast<DType>(99); }), kInvalid,
                    "dtype"));
  EXPECT_TRUE(Fails(create([](BlockCacheShape& s) { s.order[0] = BlockDim::kHead; }), kInvalid,
                    "each of the five dimensions once"));
  EXPECT_TRUE(Fails(create([](BlockCacheShape& s) { s.order[0] = static_cast<BlockDim>(77); }),
                    kInvalid, "each of the five dimensions once"));
  const auto same = [](BlockCacheShape&) {};
  EXPECT_TRUE(Fails(create(same, 0), kInvalid, "num_blocks is 0"));
  EXPECT_TRUE(Fails(create(same, INT64_MAX), kInvalid, "num_blocks is 9223372036854775807"));
}

TEST(BlockCaches, TheProcessorCopiesHostMemoryOnly) {
  const auto memory = std::make_shared<GuardedMemory>();
  const auto device = Must(BlockCache::Create(Shape(), 4, memory));
  const auto host = Must(BlockCache::Create(Shape(), 4));
  constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
  const std::vector<BlockPair> pairs = {{0, 1}, {1, 2}, {3, 0}};
  EXPECT_TRUE(
      Fails(CopyBlocks(*device, *host, pairs), kPrecondition, "the source lies in guarded memory"));
  EXPECT_TRUE(Fails(CopyBlocks(*host, *device, pairs), kPrecondition,
                    "the destination lies in guarded memory"));
  const std::vector<BlockRun> runs = {{0, 1, 2}, {3, 0, 1}};
  EXPECT_EQ(Must(PlanBlockCopy(*host, *device, pairs)), runs);
  EXPECT_TRUE(Fails(PlanBlockCopy(*host, *device, std::vector<BlockPair>{{0, 4}}), kRange,
                    "destination block 4"));
  memory->failure = absl::ResourceExhaustedError("full");
  EXPECT_TRUE(Fails(BlockCache::Create(Shape(), 4, memory), absl::StatusCode::kResourceExhausted));
}

TEST(BlockCaches, BadPairsChangeNothing) {
  const auto from = Must(BlockCache::Create(Shape(), 4)), to = Must(BlockCache::Create(Shape(), 3));
  for (int64_t block = 0; block < 4; ++block) Fill(*from, block, 1);
  const auto copy = [&](const BlockCache& source, BlockCache& destination,
                        const std::vector<BlockPair>& pairs) {
    return CopyBlocks(source, destination, pairs);
  };
  EXPECT_TRUE(Fails(copy(*from, *to, {{0, 0}, {4, 1}}), kRange, "source block 4", "[0, 4)"));
  EXPECT_TRUE(Fails(copy(*from, *to, {{0, 0}, {3, 3}}), kRange, "destination block 3", "[0, 3)"));
  EXPECT_TRUE(Fails(copy(*from, *to, {{0, -1}}), kRange, "block -1"));
  EXPECT_TRUE(Fails(copy(*from, *to, {{0, 1}, {2, 1}}), kInvalid, "block 1 is written twice"));
  EXPECT_EQ(Read(*to, 0), Block(96, 0));
  EXPECT_TRUE(Fails(copy(*from, *from, {{0, 1}, {1, 2}}), kInvalid, "block 1 is both"));
  EXPECT_TRUE(IsOk(copy(*from, *to, {{0, 1}, {1, 2}})));
  const auto other = Must(BlockCache::Create(Shape(true), 4));
  EXPECT_TRUE(Fails(copy(*from, *other, {}), kInvalid, "one shape"));
  EXPECT_TRUE(Fails(from->View(2, 0), kRange, "layer 2"));
  EXPECT_TRUE(Fails(other->View(0, 1), kRange, "kv 1"));
}

}  // namespace
}  // namespace kvferry
