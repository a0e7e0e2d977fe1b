#include "pool/cuda/cuda_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "pool/block_cache.h"
#include "pool/cuda/host_pin.h"
#include "pool/cuda/token_copy_cuda.h"
#include "pool/kv_pool.h"
#include "pool/token_view.h"
#include "tests/pool_cuda/device.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

KvLayout SmallLayout() { return KvLayout::Mha(2, 4, 2, 8, DType::kFloat16); }

class CudaKvPools : public DeviceTest {};

std::vector<std::byte> BytesOf(const BufferInfo& buffer) {
  std::vector<std::byte> host(static_cast<size_t>(buffer.bytes));
  EXPECT_EQ(cudaMemcpy(host.data(), buffer.address, host.size(), cudaMemcpyDefault), cudaSuccess);
  return host;
}

TEST_F(CudaKvPools, BeginZeroed) {
  // Twice, so that the second may get the bytes that the first has written.
  for (int i = 0; i < 2; ++i) {
    const auto pool = Must(KvPool::CreateIn(SmallLayout(), 100, CudaMemory(0)));
    EXPECT_EQ(pool->num_pages(), 100);
    for (const BufferInfo& buffer : pool->buffer_infos()) {
      EXPECT_EQ(BytesOf(buffer), std::vector<std::byte>(static_cast<size_t>(buffer.bytes)));
      EXPECT_EQ(cudaMemset(buffer.address, 0x5a, static_cast<size_t>(buffer.bytes)), cudaSuccess);
    }
  }
}

TEST_F(CudaKvPools, MoreThanTheDeviceHasIsRefused) {
  const KvLayout layout = SmallLayout();
  const int64_t pages = (int64_t{1} << 43) / layout.page_bytes();  // 8 TiB.
  EXPECT_TRUE(Fails(KvPool::CreateIn(layout, pages, CudaMemory(0)),
                    absl::StatusCode::kResourceExhausted, "8796093022208 bytes refused"));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_TRUE(IsOk(KvPool::CreateIn(layout, 1, CudaMemory(0))));
}

TEST_F(CudaKvPools, PinnedPoolsAreReadAndWrittenByTheDevice) {
  const KvLayout layout = SmallLayout();
  const auto host = Must(KvPool::Create(layout, 10));
  const auto device = Must(KvPool::CreateIn(layout, 10, CudaMemory(0)));
  auto pin = Must(PinHostMemory(host->buffer_infos(), host));
  for (const BufferInfo& buffer : host->buffer_infos()) {
    std::iota(reinterpret_cast<uint8_t*>(buffer.address),
              reinterpret_cast<uint8_t*>(buffer.address) + buffer.bytes, 1);
  }
  const TokenView from = Must(TokenView::Of(*host, 1, 1));
  const TokenView to = Must(TokenView::Of(*device, 1, 1));
  ASSERT_TRUE(IsOk(CopyTokensCuda(from, nullptr, to, nullptr, 40, nullptr, cudaStream_t{})));
  EXPECT_EQ(BytesOf(device->buffer(1, 1)), BytesOf(host->buffer(1, 1)));
  EXPECT_EQ(BytesOf(device->buffer(0, 1))[0], std::byte{0});
  EXPECT_TRUE(Fails(PinHostMemory(host->buffer_infos(), host), absl::StatusCode::kAlreadyExists,
                    "pinning"));
  pin.reset();
  EXPECT_TRUE(IsOk(PinHostMemory(host->buffer_infos(), host)));
}

TEST_F(CudaKvPools, BuffersInsideOfOthersArePinnedWithThem) {
  constexpr int64_t kPage = 4096;
  const std::shared_ptr<std::byte> memory = Must(HostMemory()->Allocate(4 * kPage));
  const std::vector<BufferInfo> buffers = {{memory.get(), 4 * kPage, kPage},
                                           {memory.get() + kPage, kPage, kPage}};
  const auto pin = Must(PinHostMemory(buffers, memory));
  EXPECT_TRUE(IsPinned({memory.get(), 4 * kPage}));
}

// Swapping blocks in: a launch a buffer, whose rows are blocks.
TEST_F(CudaKvPools, BlocksOfACacheAreRows) {
  BlockCacheShape shape{.num_layers = 2, .block_size = 4, .num_kv_heads = 2, .head_dim = 8};
  const auto cache = Must(BlockCache::Create(shape, 6));
  const auto pin = Must(PinHostMemory(cache->buffer_infos(), cache));
  const DeviceBytes from_blocks(std::vector<int32_t>{1, 3}), to_blocks(std::vector<int32_t>{2, 0});
  for (const BufferInfo& buffer : cache->buffer_infos()) {
    std::iota(reinterpret_cast<uint8_t*>(buffer.address),
              reinterpret_cast<uint8_t*>(buffer.address) + buffer.bytes, 1);
    std::vector<std::byte> want(static_cast<size_t>(buffer.bytes));
    const DeviceBytes device(want);
    const auto rows = [&](std::byte* data) {
      return TokenView::Packed(data, DType::kUint8, 6, 1, buffer.item_bytes);
    };
    ASSERT_TRUE(IsOk(CopyTokensCuda(rows(buffer.address), from_blocks.slots(), rows(device.data()),
                                    to_blocks.slots(), 2, nullptr, cudaStream_t{})));
    std::copy_n(buffer.address + buffer.item_bytes, buffer.item_bytes,
                &want[2 * buffer.item_bytes]);
    std::copy_n(buffer.address + 3 * buffer.item_bytes, buffer.item_bytes, want.data());
    EXPECT_EQ(device.ToHost(), want);
  }
}

// The rest needs no device.

TEST(CudaKvPoolArguments, ADeviceThatIsNotThereIsNamed) {
  for (const int device : {-1, 1000}) {
    EXPECT_TRUE(Fails(KvPool::CreateIn(SmallLayout(), 4, CudaMemory(device)),
                      absl::StatusCode::kUnavailable,
                      "no device " + std::to_string(device) + ": "));
  }
}

TEST(CudaKvPoolArguments, LayoutsAndCountsAreCheckedAsOnTheHost) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_TRUE(Fails(KvPool::CreateIn(SmallLayout(), 0, CudaMemory(0)), kInvalid, "num_pages is 0"));
  KvLayout bad = SmallLayout();
  bad.page_size = 0;
  EXPECT_TRUE(Fails(KvPool::CreateIn(bad, 1, CudaMemory(0)), kInvalid, "page_size"));
}

TEST(CudaKvPoolArguments, OnlyMemoryCanBePinned) {
  std::byte byte{};
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const std::vector<BufferInfo> null = {{&byte, 1, 1}, {nullptr, 1, 1}};
  EXPECT_TRUE(Fails(PinHostMemory(null, nullptr), kInvalid, "buffer 1 has 1 bytes at 0"));
  const std::vector<BufferInfo> empty = {{&byte, 0, 1}};
  EXPECT_TRUE(Fails(PinHostMemory(empty, nullptr), kInvalid, "buffer 0 has 0 bytes"));
}

TEST(CudaKvPoolArguments, WithoutADeviceNothingIsPinned) {
  if (MissingDevice().empty()) GTEST_SKIP() << "this machine has a CUDA device";
  const auto pool = Must(KvPool::Create(SmallLayout(), 4));
  EXPECT_TRUE(
      Fails(PinHostMemory(pool->buffer_infos(), pool), absl::StatusCode::kUnavailable, "pinning"));
}

}  // namespace
}  // namespace kvferry
