#include "pool/block_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
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

// Two caches of one shape, and what each of their blocks holds: value by value, in an order that no
// memory order can change.
class SwappedCaches {
 public:
  SwappedCaches(const BlockCacheShape& shape, std::mt19937_64* random)
      : random_(random),
        caches_{Must(BlockCache::Create(shape, 7)), Must(BlockCache::Create(shape, 5))} {
    for (size_t c = 0; c < 2; ++c) {
      for (int64_t block = 0; block < caches_[c]->num_blocks(); ++block) {
        std::vector<std::byte*>& places = places_[c].emplace_back();
        ForEachValue(*caches_[c], block, [&](std::byte* at) { places.push_back(at); });
        model_[c].emplace_back(places.size());
        Write(c, block);
      }
    }
  }

  // Swap in, swap out, or copy within one: pairs that may clash.
  void RandomCopy(ThreadPool* threads) {
    const auto from = static_cast<size_t>(Upto(2)), to = static_cast<size_t>(Upto(2));
    std::vector<BlockPair> pairs = Pairs(from, to);
    if (Upto(4) == 0 && !pairs.empty()) {
      BlockPair& pair = pairs[static_cast<size_t>(Upto(static_cast<int64_t>(pairs.size())))];
      (Upto(2) == 0 ? pair.first : pair.second) = Upto(9) - 1;
    }
    const absl::StatusCode expected = Expected(from, to, pairs);
    const absl::Status status =
        CopyBlocks(*caches_[from], *caches_[to], pairs, Upto(100) == 0 ? threads : nullptr);
    ASSERT_EQ(status.code(), expected) << status.ToString();
    if (status.ok()) {
      for (const auto& [source, destination] : pairs)
        model_[to][destination] = model_[from][source];
      copied_blocks_ += static_cast<int64_t>(pairs.size());
    }
    // Also where nothing should have been written.
    for (const auto& [source, destination] : pairs) {
      if (destination >= 0 && destination < caches_[to]->num_blocks()) Expect(to, destination);
    }
  }

  // What an engine computes.
  void RandomWrite() {
    const auto c = static_cast<size_t>(Upto(2));
    Write(c, Upto(caches_[c]->num_blocks()));
  }

  void ExpectAll() const {
    for (size_t c = 0; c < 2; ++c) {
      for (int64_t block = 0; block < caches_[c]->num_blocks(); ++block) Expect(c, block);
    }
  }

  int64_t copied_blocks() const { return copied_blocks_; }

 private:
  int64_t Upto(int64_t n) { return static_cast<int64_t>((*random_)() % static_cast<uint64_t>(n)); }

  // Pairs that are good ones, some of them neighbours: each block once in one cache, written once
  // else.
  std::vector<BlockPair> Pairs(size_t from, size_t to) {
    std::vector<int64_t> targets(static_cast<size_t>(caches_[to]->num_blocks()));
    std::iota(targets.begin(), targets.end(), 0);
    if (Upto(2) == 0) std::shuffle(targets.begin(), targets.end(), *random_);
    std::vector<BlockPair> pairs;
    const size_t half = targets.size() / 2;
    const int64_t first = Upto(caches_[from]->num_blocks());
    for (int64_t n = Upto(static_cast<int64_t>(from == to ? half : targets.size()) + 1); n > 0;
         --n) {
      const auto i = static_cast<size_t>(n - 1);
      pairs.emplace_back(from == to ? targets[half + i] : (first + n) % caches_[from]->num_blocks(),
                         targets[i]);
    }
    return pairs;
  }

  // The header's rules, one pair after the other.
  absl::StatusCode Expected(size_t from, size_t to, const std::vector<BlockPair>& pairs) const {
    std::set<int64_t> written;
    for (const auto& [source, destination] : pairs) {
      if (source < 0 || source >= caches_[from]->num_blocks()) return kRange;
      if (destination < 0 || destination >= caches_[to]->num_blocks()) return kRange;
      if (!written.insert(destination).second) return kInvalid;
    }
    const bool both = std::any_of(pairs.begin(), pairs.end(), [&](const BlockPair& pair) {
      return from == to && written.contains(pair.first);
    });
    return both ? kInvalid : absl::StatusCode::kOk;
  }

  void Write(size_t c, int64_t block) {
    for (size_t i = 0; i < places_[c][block].size(); ++i) {
      uint16_t& value = model_[c][block][i];
      value = static_cast<uint16_t>((*random_)());
      std::memcpy(places_[c][block][i], &value, sizeof value);
    }
  }
  void Expect(size_t c, int64_t block) const {
    bool same = true;
    for (size_t i = 0; i < places_[c][block].size(); ++i) {
      same &= std::memcmp(places_[c][block][i], &model_[c][block][i], sizeof(uint16_t)) == 0;
    }
    ASSERT_TRUE(same) << "cache " << c << ", block " << block;
  }

  std::mt19937_64* const random_;
  const std::array<std::shared_ptr<BlockCache>, 2> caches_;
  std::array<std::vector<std::vector<std::byte*>>, 2> places_;
  std::array<std::vector<Block>, 2> model_;
  int64_t copied_blocks_ = 0;
};

TEST(BlockCaches, AMillionCopiesInEveryOrderAgreeWithAModel) {
  const auto threads = Must(ThreadPool::Create(1));
  std::mt19937_64 random(9);
  const std::vector<Order> orders = AllOrders();
  const auto copies_each = static_cast<int>(1'000'000 / orders.size() + 1);
  int64_t copied_blocks = 0;
  for (const Order& order : orders) {
    BlockCacheShape shape = {.num_layers = 2,
                             .block_size = 2,
                             .num_kv_heads = 2,
                             .head_dim = 2,
                             .dtype = DType::kFloat16,
                             .mla = random() % 2 == 0,
                             .order = order};
    SwappedCaches caches(shape, &random);
    for (int i = 0; i < copies_each; ++i) {
      caches.RandomCopy(threads.get());
      if (i % 8 == 0) caches.RandomWrite();
      if (i % 256 == 0) caches.ExpectAll();
      if (testing::Test::HasFatalFailure()) return;
    }
    caches.ExpectAll();
    copied_blocks += caches.copied_blocks();
  }
  EXPECT_GT(copied_blocks, 1'000'000);
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

// As an engine has them, each somewhere else; the second right behind the first.
TEST(BlockCaches, AnEnginesLayersAreUsedWhereTheyLie) {
  for (const Order& order : AllOrders()) {
    BlockCacheShape shape = Shape();
    shape.num_layers = 3;
    shape.order = order;
    const auto own = Must(BlockCache::Create(shape, 5));
    const auto layer_bytes = static_cast<size_t>(own->bytes() / 3);
    const auto memory = std::make_shared<std::vector<std::byte>>(own->bytes() + 64);
    const std::vector<std::span<std::byte>> layers = {
        {memory->data() + 64 + layer_bytes, layer_bytes},
        {memory->data() + 64 + 2 * layer_bytes, layer_bytes},
        {memory->data(), layer_bytes}};
    const auto cache = Must(BlockCache::Adopt(shape, layers, memory));
    EXPECT_EQ(memory.use_count(), 2);
    EXPECT_EQ(cache->num_blocks(), 5);
    EXPECT_EQ(cache->pieces().size(), 2);
    EXPECT_EQ(own->pieces().size(), 1);
    std::iota(reinterpret_cast<uint8_t*>(own->layer(0)),
              reinterpret_cast<uint8_t*>(own->layer(0)) + own->bytes(), 1);
    const std::vector<BlockPair> all = {{0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 4}};
    ASSERT_TRUE(IsOk(CopyBlocks(*own, *cache, all)));
    for (int64_t layer = 0; layer < 3; ++layer) {
      EXPECT_EQ(cache->layer(layer), layers[layer].data());
      EXPECT_EQ(std::memcmp(cache->layer(layer), own->layer(layer), layer_bytes), 0);
    }
  }
}

TEST(BlockCaches, LayersThatDoNotFitAreNotAdopted) {
  std::vector<std::byte> memory(385);
  const auto adopt = [&](const std::vector<size_t>& bytes) {
    std::vector<std::span<std::byte>> layers;
    for (const size_t size : bytes) layers.push_back({memory.data(), size});
    return BlockCache::Adopt(Shape(), layers, nullptr);
  };
  EXPECT_TRUE(IsOk(adopt({384, 384})));
  EXPECT_TRUE(Fails(adopt({384}), kInvalid, "1 layers given, but num_layers is 2"));
  EXPECT_TRUE(Fails(adopt({384, 288}), kInvalid, "layer 1 of 288 bytes", "4 blocks of 96"));
  EXPECT_TRUE(Fails(adopt({385, 385}), kInvalid, "layer 0 of 385 bytes", "4 blocks of 96"));
  EXPECT_TRUE(Fails(adopt({95, 95}), kInvalid, "num_blocks is 0"));
  const std::vector<std::span<std::byte>> none(2);
  EXPECT_TRUE(Fails(BlockCache::Adopt(Shape(), none, nullptr), kInvalid, "num_blocks is 0"));
  const std::vector<std::span<std::byte>> nowhere = {{memory.data(), 384},
                                                     {static_cast<std::byte*>(nullptr), 384}};
  EXPECT_TRUE(Fails(BlockCache::Adopt(Shape(), nowhere, nullptr), kInvalid, "layer 1 of 384"));
}

TEST(BlockCaches, LayersThatOverlapInPartAreNotAdopted) {
  std::vector<std::byte> memory(3 * 384);
  const auto adopt = [&](size_t first, size_t second) {
    const std::vector<std::span<std::byte>> layers = {{memory.data() + first, 384},
                                                      {memory.data() + second, 384}};
    return BlockCache::Adopt(Shape(), layers, nullptr);
  };
  EXPECT_TRUE(IsOk(adopt(0, 384)));
  EXPECT_TRUE(IsOk(adopt(5, 5)));  // Layers may share a cache.
  EXPECT_TRUE(Fails(adopt(0, 383), kInvalid, "layers 0 and 1 overlap"));
  EXPECT_TRUE(Fails(adopt(96, 0), kInvalid, "layers 0 and 1 overlap"));
}

TEST(BlockCaches, LayersAdoptedTwiceAreOneCache) {
  std::vector<std::byte> memory(2 * 384 + 96);
  const auto adopt = [&](size_t first) {
    const std::vector<std::span<std::byte>> layers = {{memory.data() + first, 384},
                                                      {memory.data() + first + 384, 384}};
    return Must(BlockCache::Adopt(Shape(), layers, nullptr));
  };
  const auto one = adopt(0), same = adopt(0), shifted = adopt(96);
  for (int64_t block = 0; block < 4; ++block) Fill(*one, block, static_cast<uint64_t>(block));
  const std::vector<std::byte> before = memory;
  const std::vector<BlockPair> onwards = {{0, 1}, {1, 2}}, first = {{0, 1}};
  EXPECT_TRUE(
      Fails(CopyBlocks(*one, *same, onwards), kInvalid, "block 1 is both read and written"));
  EXPECT_TRUE(Fails(CopyBlocks(*one, *shifted, first), kInvalid, "share memory"));
  EXPECT_TRUE(Fails(CopyBlocks(*shifted, *one, first), kInvalid, "share memory"));
  EXPECT_EQ(memory, before);
  ASSERT_TRUE(IsOk(CopyBlocks(*one, *same, first)));
  EXPECT_EQ(Read(*one, 1), Read(*one, 0));
}

TEST(BlockCaches, LayersHaveTheEnginesDimensions) {
  BlockCacheShape shape = Shape();
  shape.order = {BlockDim::kBlock, BlockDim::kKv, BlockDim::kHead, BlockDim::kToken,
                 BlockDim::kValue};
  EXPECT_EQ(shape.LayerDims(5), (std::vector<ArrayDim>{{2, 48}, {5, 96}, {3, 8}, {2, 24}, {4, 2}}));
  shape.mla = true;
  EXPECT_EQ(shape.LayerDims(5), (std::vector<ArrayDim>{{5, 48}, {3, 8}, {2, 24}, {4, 2}}));
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
  EXPECT_TRUE(Fails(create([](BlockCacheShape& s) { s.block_size = -1; }), kInvalid,
                    "block cache: block_size is -1"));
  EXPECT_TRUE(
      Fails(create([](BlockCacheShape& s) { s.num_kv_heads = 0; }), kInvalid, "num_kv_heads is 0"));
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

TEST(BlockCaches, ADeviceCopiesItsBlocksItself) {
  const auto memory = std::make_shared<GuardedMemory>();
  const auto device = Must(BlockCache::Create(Shape(), 4, memory));
  const auto from = Must(BlockCache::Create(Shape(), 4)), to = Must(BlockCache::Create(Shape(), 4));
  for (int64_t block = 0; block < 4; ++block) Fill(*from, block, static_cast<uint64_t>(block + 1));
  EXPECT_TRUE(IsOk(CopyBlocks(*from, *device, std::vector<BlockPair>{{0, 1}, {1, 2}, {3, 0}})));
  EXPECT_TRUE(IsOk(CopyBlocks(*device, *device, std::vector<BlockPair>{{2, 3}})));
  EXPECT_TRUE(IsOk(CopyBlocks(*device, *to, std::vector<BlockPair>{{0, 0}, {1, 1}, {3, 2}})));
  EXPECT_EQ(memory->num_runs, 3);
  EXPECT_EQ(Read(*to, 0), Read(*from, 3));
  EXPECT_EQ(Read(*to, 1), Read(*from, 0));
  EXPECT_EQ(Read(*to, 2), Read(*from, 1));
  EXPECT_TRUE(Fails(CopyBlocks(*from, *device, std::vector<BlockPair>{{0, 4}}), kRange,
                    "destination block 4"));
  EXPECT_TRUE(Fails(device->PinFor(*HostMemory()), absl::StatusCode::kFailedPrecondition,
                    "what is to be pinned lies in guarded memory"));
  memory->pin_failure = absl::ResourceExhaustedError("too much is locked");
  EXPECT_TRUE(Fails(to->PinFor(*memory), absl::StatusCode::kResourceExhausted, "locked"));
  memory->failure = absl::ResourceExhaustedError("full");
  constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
  EXPECT_TRUE(Fails(CopyBlocks(*device, *to, std::vector<BlockPair>{{0, 0}}), kExhausted, "full"));
  EXPECT_TRUE(Fails(BlockCache::Create(Shape(), 4, memory), kExhausted));
}

TEST(BlockCaches, RunsAreAsFewAsThereAre) {
  const auto cache = Must(BlockCache::Create(Shape(), 4));
  const std::vector<ItemsMove> runs = {{0, 1, 2}, {3, 0, 1}};
  const std::vector<BlockPair> pairs = {{3, 0}, {0, 1}, {1, 2}};
  EXPECT_EQ(Must(PlanBlockCopy(*cache, *Must(BlockCache::Create(Shape(), 3)), pairs)), runs);
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
