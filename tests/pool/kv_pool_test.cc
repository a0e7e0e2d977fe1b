#include "pool/kv_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/host_memory.h"
#include "pool/block_cache.h"
#include "tests/pool/guarded_memory.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

const KvLayout kLayout{
    3, 4, DType::kFloat16, "NHD", {{"k", 2, 8}, {"v", 2, 4}}};  // 128 and 64 bytes.

TEST(Pools, CreateGivesZeroedPagesOfItsOwn) {
  const auto pool = Must(KvPool::Create(kLayout, 5));
  EXPECT_EQ(pool->num_pages(), 5);
  ASSERT_EQ(pool->buffer_infos().size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    const BufferInfo& info = pool->buffer_infos()[i];
    EXPECT_EQ(info.item_bytes, i < 3 ? 128 : 64) << "K layers, then V layers";
    EXPECT_EQ(info.bytes, 5 * info.item_bytes);
    for (int64_t j = 0; j < info.bytes; ++j) ASSERT_EQ(info.address[j], std::byte{0});
    for (size_t k = 0; k < i; ++k) {  // No two buffers overlap.
      const BufferInfo& other = pool->buffer_infos()[k];
      EXPECT_TRUE(info.address >= other.address + other.bytes ||
                  other.address >= info.address + info.bytes);
    }
  }
}

TEST(Pools, OthersCanMapWhatItCreates) {
  const auto pool = Must(KvPool::Create(kLayout, 5));
  const SharedMemory* shared = pool->shared_memory();
  ASSERT_NE(shared, nullptr);
  pool->page(2, 1, 4)[63] = std::byte{7};
  const auto seen = Must(MapPeersMemory(shared->fd, shared->bytes));
  EXPECT_EQ(seen.get()[pool->page(2, 1, 4).data() + 63 - shared->data.get()], std::byte{7});
  EXPECT_EQ(Must(KvPool::CreateIn(kLayout, 5, HostMemory()))->shared_memory(), nullptr);
}

TEST(Pools, TakeRoomAtOnceOrAsTheyAreTouched) {
  const KvLayout layout =
      KvLayout::Mha(1, 16, 8, 128, DType::kFloat16);  // K and V pages of 32 KiB.
  const auto resident = [&](KvPool::TakesRoom takes_room) {
    const auto pool = Must(KvPool::Create(layout, 1024, takes_room));
    const SharedMemory& memory = *pool->shared_memory();
    struct stat info {};
    EXPECT_EQ(fstat(memory.fd.get(), &info), 0);
    return info.st_blocks * 512;
  };
  EXPECT_EQ(resident(KvPool::TakesRoom::kAsTouched), 0);
  const int64_t at_once = resident(KvPool::TakesRoom::kAtOnce);
  if (at_once == 0) GTEST_SKIP() << "the system gives this process no huge pages";
  // Or as much as there are huge pages left, and the page for which there was none.
  EXPECT_GE(at_once, 2 << 20);
  EXPECT_LE(at_once, 64 << 20);
}

// Of this process's memory from there on, as far as it has room already.
int64_t ResidentBytes(const std::byte* begin, int64_t bytes) {
  constexpr int64_t kPage = 4096;
  std::vector<unsigned char> pages(bytes / kPage);
  EXPECT_EQ(mincore(const_cast<std::byte*>(begin), bytes, pages.data()), 0);
  return kPage * std::count_if(pages.begin(), pages.end(), [](int page) { return page & 1; });
}

TEST(Pools, InTheHostsMemoryTakeRoomAtOnceAndIfThereIsAsMuch) {
  constexpr int64_t kBytes = 16 << 20;
  EXPECT_EQ(ResidentBytes(Must(HostMemory()->AllocateForNow(kBytes)).get(), kBytes), 0);
  const KvLayout layout = KvLayout::Mla(1, 1, 1024, DType::kUint8);
  const auto pool = Must(KvPool::CreateIn(layout, kBytes / 1024, HostMemory()));
  // More than the machine has would be refused by it alone, more than it has left would not.
  const int64_t much = Must(AvailableHostBytes()) + (int64_t{1} << 40);
  constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
  EXPECT_TRUE(Fails(HostMemory()->Allocate(much), kExhausted, "are available"));
  EXPECT_TRUE(Fails(HostMemory()->AllocateForNow(much), kExhausted, "are available"));
  EXPECT_TRUE(
      Fails(KvPool::CreateIn(layout, much / 1024, HostMemory()), kExhausted, "are available"));
  const BlockCacheShape blocks = {
      .num_layers = 1, .block_size = 1, .num_kv_heads = 1, .head_dim = 1024};
  EXPECT_TRUE(
      Fails(BlockCache::Create(blocks, much / blocks.block_bytes()), kExhausted, "are available"));
  const int64_t resident = ResidentBytes(pool->buffer_infos()[0].address, kBytes);
  if (resident == 0) GTEST_SKIP() << "the system gives this process no huge pages";
  EXPECT_GE(resident, kHugePageBytes);  // There may be no more of them left.
}

TEST(Pools, PagesLieWhereTheBuffersSay) {
  const auto pool = Must(KvPool::Create(kLayout, 5));
  for (int64_t layer = 0; layer < 3; ++layer) {
    for (int64_t tensor = 0; tensor < 2; ++tensor) {
      const BufferInfo& info = pool->buffer_infos()[tensor * 3 + layer];
      EXPECT_EQ(&pool->buffer(layer, tensor), &info);
      EXPECT_EQ(pool->page(layer, tensor, 4).data(), info.address + 4 * info.item_bytes);
      EXPECT_EQ(static_cast<int64_t>(pool->page(layer, tensor, 4).size()), info.item_bytes);
    }
  }
}

TEST(Pools, KnowTheirMemory) {
  EXPECT_TRUE(Must(KvPool::Create(kLayout, 5))->memory().on_host());
  const auto memory = std::make_shared<GuardedMemory>();
  const auto pool = Must(KvPool::CreateIn(kLayout, 5, memory));
  EXPECT_EQ(&pool->memory(), memory.get());
  EXPECT_EQ(pool->shared_memory(), nullptr);
  const auto same = Must(KvPool::Adopt(kLayout, pool->buffer_infos(), pool, memory));
  EXPECT_EQ(&same->memory(), memory.get());
  EXPECT_TRUE(Must(KvPool::Adopt(kLayout, pool->buffer_infos(), pool))->memory().on_host());
  EXPECT_TRUE(Must(KvPool::CreateIn(kLayout, 5, nullptr))->memory().on_host());
  EXPECT_TRUE(
      Must(KvPool::Adopt(kLayout, pool->buffer_infos(), pool, nullptr))->memory().on_host());
  memory->failure = absl::ResourceExhaustedError("full");
  EXPECT_TRUE(Fails(KvPool::CreateIn(kLayout, 5, memory), absl::StatusCode::kResourceExhausted));
  EXPECT_TRUE(Fails(KvPool::CreateIn(kLayout, 0, memory), absl::StatusCode::kInvalidArgument));
}

TEST(Pools, CreateErrors) {
  EXPECT_TRUE(
      Fails(KvPool::Create(kLayout, 0), absl::StatusCode::kInvalidArgument, "num_pages is 0"));
  EXPECT_TRUE(Fails(KvPool::Create(kLayout, -1), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(KvPool::Create(kLayout, INT64_MAX), absl::StatusCode::kInvalidArgument));
  // 16 TiB: refused at once, not when it is touched.
  const int64_t many = (int64_t{1} << 44) / kLayout.page_bytes();
  EXPECT_TRUE(Fails(KvPool::Create(kLayout, many, KvPool::TakesRoom::kAtOnce),
                    absl::StatusCode::kResourceExhausted, "are available", "at_once"));
  // Whoever cannot say when it takes room does not hear of it.
  const absl::Status refused = KvPool::Create(kLayout, many).status();
  EXPECT_TRUE(Fails(refused, absl::StatusCode::kResourceExhausted, "make it smaller"));
  EXPECT_FALSE(absl::StrContains(refused.message(), "at_once"));
  EXPECT_TRUE(Fails(KvPool::Create(kLayout, many, KvPool::TakesRoom::kAsTouched),
                    absl::StatusCode::kResourceExhausted, "bytes of memory"));
  KvLayout bad = kLayout;
  bad.num_layers = 0;
  EXPECT_TRUE(Fails(KvPool::Create(bad, 5), absl::StatusCode::kInvalidArgument, "num_layers"));
}

class Adopting : public testing::Test {
 protected:
  Adopting() {
    for (int64_t i = 0; i < 6; ++i) {
      const int64_t item = kLayout.item_bytes(i / 3);
      memory_.emplace_back(5 * item, std::byte{static_cast<unsigned char>(i + 1)});
      infos_.push_back({memory_.back().data(), 5 * item, item});
    }
  }
  absl::Status Adopt() { return KvPool::Adopt(kLayout, infos_, nullptr).status(); }

  std::vector<std::vector<std::byte>> memory_;
  std::vector<BufferInfo> infos_;
};

TEST_F(Adopting, LooksAtTheMemoryItself) {
  const auto pool = Must(KvPool::Adopt(kLayout, infos_, nullptr));
  EXPECT_EQ(pool->num_pages(), 5);
  EXPECT_EQ(pool->page(1, 1, 2).data(), memory_[4].data() + 128);
  pool->page(1, 1, 2)[0] = std::byte{0xee};
  EXPECT_EQ(memory_[4][128], std::byte{0xee});
}

TEST_F(Adopting, KeepsTheOwnerAlive) {
  auto owner = std::make_shared<int>(1);
  auto pool = Must(KvPool::Adopt(kLayout, infos_, owner));
  EXPECT_EQ(owner.use_count(), 2);
  pool.reset();
  EXPECT_EQ(owner.use_count(), 1);
}

TEST_F(Adopting, InSharedMemoryOthersCanMapIt) {
  const auto shared =
      std::make_shared<SharedMemory>(Must(SharedMemory::Create("test", 3 * 5 * (128 + 64))));
  std::vector<BufferInfo> buffers;
  std::byte* next = shared->data.get();
  for (size_t i = 0; i < 6; ++i) {
    const int64_t item_bytes = i < 3 ? 128 : 64;
    buffers.push_back({next, 5 * item_bytes, item_bytes});
    next += 5 * item_bytes;
  }
  const auto pool = Must(KvPool::AdoptShared(kLayout, buffers, nullptr, shared));
  EXPECT_EQ(pool->shared_memory(), shared.get());
  EXPECT_TRUE(Fails(KvPool::AdoptShared(kLayout, buffers, nullptr, nullptr),
                    absl::StatusCode::kInvalidArgument, "no shared memory"));
  EXPECT_EQ(pool->page(0, 0, 0).data(), shared->data.get());
  // What nobody can map is memory like any other.
  const auto hidden =
      std::make_shared<SharedMemory>(SharedMemory{shared->data, shared->bytes, UniqueFd()});
  EXPECT_EQ(Must(KvPool::AdoptShared(kLayout, buffers, nullptr, hidden))->shared_memory(), nullptr);
  for (const int64_t shift : {-1, 1}) {
    std::vector<BufferInfo> beside = buffers;
    const size_t which = shift < 0 ? 0 : 5;
    beside[which].address += shift;
    EXPECT_TRUE(Fails(KvPool::AdoptShared(kLayout, beside, nullptr, shared),
                      absl::StatusCode::kInvalidArgument, absl::StrCat("buffer ", which),
                      "does not lie in"));
  }
}

TEST_F(Adopting, LayersMayShareACache) {
  infos_[2] = infos_[0];
  EXPECT_TRUE(IsOk(Adopt()));
}

TEST_F(Adopting, ErrorsNameTheBuffer) {
  const std::vector<BufferInfo> good = infos_;
  const auto fails = [&](const auto&... parts) {
    return Fails(Adopt(), absl::StatusCode::kInvalidArgument, parts...);
  };
  infos_[4].address = nullptr;
  EXPECT_TRUE(fails("buffer 4", "null"));
  infos_ = good;
  infos_[2].item_bytes = 64;
  EXPECT_TRUE(fails("buffer 2", "item_bytes 64", "128"));
  infos_ = good;
  infos_[5].bytes += 1;
  EXPECT_TRUE(fails("buffer 5", "321 bytes"));
  infos_ = good;
  infos_[5].bytes = 0;
  EXPECT_TRUE(fails("buffer 5"));
  infos_ = good;
  for (BufferInfo& info : infos_) info.bytes = 0;
  EXPECT_TRUE(fails("buffer 0", "has 0 bytes"));
  infos_ = good;
  infos_[3].bytes = 4 * 64;
  EXPECT_TRUE(fails("buffer 3", "4 pages", "5"));
  infos_ = good;
  // K and V of each page one behind the other, taken for two tensors.
  infos_[3].address = infos_[0].address + 128;
  EXPECT_TRUE(fails("buffers 0 and 3 overlap"));
  infos_ = good;
  infos_[1].address = infos_[2].address - 1;
  EXPECT_TRUE(fails("buffers 1 and 2 overlap"));
  infos_ = good;
  infos_.pop_back();
  EXPECT_TRUE(fails("5 buffers given", "6"));
  infos_.clear();
  EXPECT_TRUE(fails("0 buffers given"));
}

}  // namespace
}  // namespace kvferry
