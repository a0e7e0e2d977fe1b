// Pools on another device than the current one, and in memory that an engine has pinned: what the
// caller is left with.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "pool/block_cache.h"
#include "pool/cuda/block_copy_cuda.h"
#include "pool/cuda/cuda_memory.h"
#include "pool/cuda/on_device.h"
#include "pool/gdn_pool.h"
#include "pool/token_copy.h"
#include "pool/token_kv_pool.h"
#include "tests/support/failing_new.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

// What PoolMemory does on device 1, from threads whose current device is 0, as that of new threads
// is.
class OtherDevice : public testing::Test {
 protected:
  static constexpr int64_t kMoved = 1 << 20;

  void SetUp() override { emulated::ForgetContexts(); }
  void TearDown() override {
    emulated::SetCapturing(false);
    emulated::FailQueries(0, cudaSuccess);
    emulated::LoseDevice(-1);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);  // For the tests that follow.
  }

  // fn() on a new thread, and which device is the current one afterwards.
  template <typename Fn>
  static int OnThread(const Fn& fn) {
    int current = -1;
    std::thread([&] {
      fn();
      EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    }).join();
    return current;
  }
  std::shared_ptr<std::byte> Allocate() const {
    std::shared_ptr<std::byte> device;
    OnThread([&] { device = Must(memory_->Allocate(2 * kMoved)); });
    return device;
  }
  std::shared_ptr<const MovesUnderWay> Begin(const std::shared_ptr<std::byte>& device) const {
    const BytesMove move{device.get(), device.get() + kMoved, kMoved};
    std::shared_ptr<const MovesUnderWay> moves = Must(memory_->BeginMoveApart({&move, 1}));
    EXPECT_NE(moves, nullptr);
    return moves;
  }

  const std::shared_ptr<const PoolMemory> memory_ = CudaMemory(1);
};

TEST_F(OtherDevice, TransfersSetUpNoContextElsewhere) {
  std::shared_ptr<std::byte> device = Allocate();
  std::shared_ptr<const MovesUnderWay> asked, waited;
  OnThread([&] { asked = Begin(device); });
  OnThread([&] { waited = Begin(device); });
  // Each step on a thread of its own: whatever the one before made current is not.
  OnThread([&] {
    while (!asked->done()) {
    }
  });
  OnThread([&] { EXPECT_TRUE(IsOk(waited->Wait())); });
  OnThread([&] { asked.reset(); });
  OnThread([&] { waited.reset(); });
  std::vector<std::byte> host(kMoved, std::byte{3});
  OnThread([&] {  // Through the thread's own pinned memory, which ends with it.
    const BytesMove move{host.data(), device.get(), kMoved};
    EXPECT_TRUE(IsOk(memory_->MoveApart({&move, 1})));
  });
  const std::shared_ptr<std::byte> slab = Must(HostMemory()->Allocate(kMoved));
  std::shared_ptr<const void> pin;
  OnThread([&] { pin = Must(memory_->Pin({slab.get(), kMoved})); });
  OnThread([&] { pin.reset(); });
  EXPECT_EQ(OnThread([&] { device.reset(); }), 1);
  EXPECT_FALSE(emulated::HasContext(0));
  EXPECT_TRUE(emulated::HasContext(1));
}

TEST_F(OtherDevice, WhatAnEngineUsesIsCurrentAgain) {
  EXPECT_EQ(OnThread([&] {
              ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
              Allocate().reset();
              EXPECT_TRUE(IsOk(memory_->Allocate(kMoved)));
            }),
            0);
}

// Such as moves that are under way, which nobody would wait for.
TEST_F(OtherDevice, WhatWasDoneStandsWhereTheOneBeforeCannotBeCurrentAgain) {
  const std::shared_ptr<std::byte> device = Allocate();
  EXPECT_EQ(OnThread([&] {
              ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
              emulated::LoseDevice(0);
              const std::shared_ptr<const MovesUnderWay> moves = Begin(device);
              EXPECT_TRUE(IsOk(moves->Wait()));
              EXPECT_EQ(cudaGetLastError(), cudaSuccess);
            }),
            1);
}

TEST_F(OtherDevice, TheOneBeforeIsCurrentAgainAfterAnException) {
  EXPECT_EQ(OnThread([&] {
              ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
              const auto fail = []() -> absl::Status { throw std::bad_alloc(); };
              EXPECT_THROW(OnDevice(1, fail).IgnoreError(), std::bad_alloc);
              // What others capture concerns this thread again.
              emulated::SetCapturing(true);
              EXPECT_EQ(cudaFree(nullptr), cudaErrorStreamCaptureUnsupported);
            }),
            0);
}

TEST_F(OtherDevice, CopiesAreWaitedForWhenMemoryRunsOutAmidThem) {
  constexpr int64_t kRows = 64, kMore = 1237, kRowBytes = 4096;
  const std::shared_ptr<std::byte> device = Allocate();
  const std::shared_ptr<std::byte> pinned = Must(HostMemory()->Allocate(kRows * kRowBytes));
  const auto pin = Must(memory_->Pin({pinned.get(), kRows * kRowBytes}));
  const std::vector<std::byte> bytes(kRows * kRowBytes, std::byte{7});
  const BytesMove move{bytes.data(), device.get(), kRows * kRowBytes};
  ASSERT_TRUE(IsOk(memory_->MoveApart({&move, 1})));
  std::vector<std::byte> host(kMore);
  const auto view = [](std::byte* data, int64_t rows, int64_t row_bytes) {
    return TokenView::Packed(data, DType::kUint8, rows, 1, row_bytes);
  };
  const std::vector<int32_t> few(kRows, 1), many(kMore, 2);
  const std::vector<TokenCopy> copies = {
      Must(TokenCopy::PlanGather(view(device.get(), kRows, kRowBytes), few,
                                 view(pinned.get(), kRows, kRowBytes))),
      Must(TokenCopy::PlanGather(view(host.data(), kMore, 1), many,
                                 view(device.get() + kMoved, kMore, 1)))};
  // What the second one makes of its list, when the first has begun.
  const ScarceNew scarce(ScarceNew::Of::kThisThread, kMore * sizeof(int32_t));
  EXPECT_THROW(memory_->RunApart(copies).IgnoreError(), std::bad_alloc);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), pinned.get()));
}

TEST_F(OtherDevice, OnlyItsMemoryIsAdopted) {
  const KvLayout layout = KvLayout::Mla(1, 1, 1 << 12, DType::kUint8);
  const auto adopt = [&](std::byte* begin, int64_t bytes, const auto& owner) {
    const BufferInfo buffer{begin, bytes, 1 << 12};
    return KvPool::Adopt(layout, {&buffer, 1}, owner, memory_);
  };
  const std::shared_ptr<std::byte> here = Allocate();
  EXPECT_TRUE(IsOk(adopt(here.get(), kMoved, here)));
  EXPECT_TRUE(IsOk(adopt(here.get() + kMoved, kMoved, here)));
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_TRUE(Fails(adopt(here.get() + kMoved, 2 * kMoved, here), kInvalid, "buffer 0 of 2097152"));
  const std::shared_ptr<std::byte> there = Must(CudaMemory(0)->Allocate(kMoved));
  EXPECT_TRUE(
      Fails(adopt(there.get(), kMoved, there), kInvalid, "lies on device 0", "on device 1"));
  const std::shared_ptr<std::byte> host = Must(HostMemory()->Allocate(kMoved));
  EXPECT_TRUE(Fails(adopt(host.get(), kMoved, host), kInvalid, "lies in the host's memory"));
  const auto pin = Must(memory_->Pin({host.get(), kMoved}));
  EXPECT_TRUE(Fails(adopt(host.get(), kMoved, host), kInvalid, "lies in the host's memory"));
  // Nor by others: states of two slots, of 4 and 2 bytes each.
  const GdnShape states{.num_layers = 1,
                        .num_v_heads = 1,
                        .head_k_dim = 1,
                        .head_v_dim = 1,
                        .conv_dim = 1,
                        .conv_kernel_size = 2};
  EXPECT_TRUE(Fails(GdnPool::Adopt(states, 1, {here.get(), 8}, {host.get(), 4}, host, memory_),
                    kInvalid, "the conv states of 4 bytes", "lies in the host's memory"));
  EXPECT_TRUE(IsOk(GdnPool::Adopt(states, 1, {here.get(), 8}, {here.get() + 8, 4}, here, memory_)));
}

TEST_F(OtherDevice, ManagedMemoryIsAdoptedToo) {
  std::byte* managed = nullptr;
  ASSERT_EQ(cudaMallocManaged(reinterpret_cast<void**>(&managed), kMoved), cudaSuccess);
  const std::shared_ptr<std::byte> owner(
      managed, [](std::byte* memory) { EXPECT_EQ(cudaFree(memory), cudaSuccess); });
  const BufferInfo buffer{managed, kMoved, 1 << 12};
  const auto pages =
      KvPool::Adopt(KvLayout::Mla(1, 1, 1 << 12, DType::kUint8), {&buffer, 1}, owner, memory_);
  ASSERT_TRUE(IsOk(pages));
  const auto pool = Must(TokenKvPool::Over(*pages));
  const std::vector<int32_t> slots = {7, 3};
  std::vector<std::byte> rows(2 << 12, std::byte{3}), got(2 << 12);
  rows.back() = std::byte{4};
  ASSERT_TRUE(IsOk(pool->WriteFlat(slots, rows)));
  ASSERT_TRUE(IsOk(pool->ReadFlat(slots, got)));
  EXPECT_EQ(got, rows);
  // From and to memory that no device reaches.
  const BytesMove in{rows.data(), managed, 2 << 12}, out{managed, got.data(), 2 << 12};
  got.assign(got.size(), std::byte{0});
  ASSERT_TRUE(IsOk(memory_->MoveApart({&in, 1})));
  ASSERT_TRUE(IsOk(memory_->MoveApart({&out, 1})));
  EXPECT_EQ(got, rows);
}

// Of a cache on the host, with layers of a page each that an engine has pinned itself.
class PinnedByAnEngine : public testing::Test {
 protected:
  static constexpr size_t kLayerBytes = 4096;
  static constexpr int64_t kBlocks = 8;

  void SetUp() override {
    std::mt19937 random(4);
    for (const std::span<std::byte>& layer : layers_) {
      ASSERT_EQ(cudaHostRegister(layer.data(), layer.size(), 0), cudaSuccess);
      for (std::byte& byte : layer) byte = static_cast<std::byte>(random());
    }
  }
  void TearDown() override {
    emulated::HideHostRanges(false);
    for (const std::span<std::byte>& layer : layers_) {
      EXPECT_EQ(cudaHostUnregister(layer.data()), cudaSuccess);
    }
  }
  std::vector<std::byte> Bytes() const {
    std::vector<std::byte> bytes;
    for (const std::span<std::byte>& layer : layers_) {
      bytes.insert(bytes.end(), layer.begin(), layer.end());
    }
    return bytes;
  }
  // All blocks out and in again, in one order and another; what that took.
  emulated::CallCounts SwapOutAndIn() {
    std::vector<BlockPair> in, out;
    for (int64_t block = 0; block < kBlocks; ++block) {
      in.emplace_back(block, (3 * block) % kBlocks);
      out.emplace_back((3 * block) % kBlocks, block);
    }
    const std::vector<std::byte> before = Bytes();
    const auto [launches, copies] = emulated::CountedCalls();
    EXPECT_TRUE(IsOk(CopyBlocksCuda(*cache_, *device_, in, nullptr)));
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    for (const std::span<std::byte>& layer : layers_) {
      std::fill(layer.begin(), layer.end(), std::byte{0});
    }
    EXPECT_TRUE(IsOk(CopyBlocksCuda(*device_, *cache_, out, nullptr)));
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    EXPECT_EQ(Bytes(), before);
    return {emulated::CountedCalls().launches - launches, emulated::CountedCalls().copies - copies};
  }

  const BlockCacheShape shape_{
      .num_layers = 10, .block_size = 4, .num_kv_heads = 2, .head_dim = 16};
  // With a page between any two.
  const std::shared_ptr<std::byte> heap_ = Must(HostMemory()->Allocate(19 * kLayerBytes));
  const std::vector<std::span<std::byte>> layers_ = [this] {
    std::vector<std::span<std::byte>> layers;
    for (int64_t i = 0; i < shape_.num_layers; ++i) {
      layers.push_back({heap_.get() + 2 * i * kLayerBytes, kLayerBytes});
    }
    return layers;
  }();
  const std::shared_ptr<BlockCache> cache_ = Must(BlockCache::Adopt(shape_, layers_, heap_));
  const std::shared_ptr<BlockCache> device_ =
      Must(BlockCache::Create(shape_, kBlocks, CudaMemory(0)));
};

TEST_F(PinnedByAnEngine, ItIsReachedAtOnce) {
  const auto [launches, copies] = SwapOutAndIn();
  EXPECT_EQ(launches, 2);
  EXPECT_EQ(copies, 0);
  EXPECT_TRUE(IsOk(cache_->PinFor(*CudaMemory(0))));
}

// A driver that does not tell how much is pinned: copies as before.
TEST_F(PinnedByAnEngine, ItIsCopiedWhereItMayHaveGaps) {
  emulated::HideHostRanges(true);
  const auto [launches, copies] = SwapOutAndIn();
  EXPECT_EQ(launches, 0);
  EXPECT_EQ(copies, 2 * 10 * 2 * kBlocks);
  EXPECT_TRUE(Fails(cache_->PinFor(*CudaMemory(0)), absl::StatusCode::kAlreadyExists, "pinning"));
}

TEST(PinnedByOthers, WhatLiesBetweenIsNotReached) {
  constexpr size_t kPage = 4096;
  const std::shared_ptr<std::byte> slab = Must(HostMemory()->Allocate(3 * kPage));
  const std::vector<std::byte*> pages = {slab.get(), slab.get() + 2 * kPage};
  for (std::byte* const page : pages) ASSERT_EQ(cudaHostRegister(page, kPage, 0), cudaSuccess);
  const auto memory = CudaMemory(0);
  EXPECT_TRUE(memory->Reaches({slab.get(), kPage}));
  EXPECT_FALSE(memory->Reaches({slab.get(), 3 * kPage}));
  for (std::byte* const page : pages) EXPECT_EQ(cudaHostUnregister(page), cudaSuccess);
}

// What the device says while it is waited for is what has come of the copy.
TEST_F(OtherDevice, ACopyThatFailsOnItsWayIsNoSuccess) {
  const std::shared_ptr<std::byte> device = Allocate();
  const TokenView from = TokenView::Packed(device.get(), DType::kUint8, 64, 1, 1024);
  TokenView to = from;
  to.data += kMoved;
  const std::vector<int32_t> slots = {5, 3, 60};
  const TokenCopy copy = Must(TokenCopy::Plan(from, slots, to, slots));
  emulated::FailQueries(1, cudaErrorIllegalAddress);
  EXPECT_TRUE(Fails(memory_->Run({&copy, 1}, nullptr), absl::StatusCode::kInternal, "copying"));
  emulated::FailQueries(1, cudaErrorIllegalAddress);
  EXPECT_TRUE(Fails(memory_->RunApart({&copy, 1}), absl::StatusCode::kInternal, "copying"));
  // No answer is none yet.
  emulated::FailQueries(3, cudaErrorStreamCaptureUnsupported);
  EXPECT_TRUE(IsOk(memory_->RunApart({&copy, 1})));
}

TEST_F(OtherDevice, WhatIsUnderWayIsAskedAboutThoughItsDeviceCannotBeCurrent) {
  const std::shared_ptr<std::byte> device = Allocate();
  const std::shared_ptr<const MovesUnderWay> moves = Begin(device);
  emulated::LoseDevice(1);
  OnThread([&] {                  // Whose current device is another.
    EXPECT_FALSE(moves->done());  // It is asked for the first time.
    EXPECT_TRUE(moves->done());
  });
  emulated::LoseDevice(-1);
  EXPECT_TRUE(IsOk(moves->Wait()));
}

TEST_F(OtherDevice, CapturesOfOthersForbidNothing) {
  emulated::SetCapturing(true);
  std::shared_ptr<std::byte> device = Allocate();
  const std::shared_ptr<const MovesUnderWay> asked = Begin(device), waited = Begin(device);
  EXPECT_FALSE(asked->done());  // It is under way, as this device has it.
  EXPECT_TRUE(asked->done());
  EXPECT_TRUE(IsOk(waited->Wait()));
  std::vector<std::byte> host(kMoved);
  const BytesMove move{device.get(), host.data(), kMoved};
  EXPECT_TRUE(IsOk(memory_->MoveApart({&move, 1})));
  // The thread itself is as it was.
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureUnsupported);
  device.reset();
}

TEST_F(OtherDevice, WhatCannotBeAskedIsNotDone) {
  const std::shared_ptr<std::byte> device = Allocate();
  for (const auto error : {cudaErrorStreamCaptureUnsupported, cudaErrorCapturedEvent}) {
    const std::shared_ptr<const MovesUnderWay> asked = Begin(device), waited = Begin(device);
    emulated::FailQueries(3, error);
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(asked->done());
    EXPECT_FALSE(asked->done());  // Now it is asked for the first time.
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_TRUE(asked->done());
    emulated::FailQueries(3, error);
    EXPECT_TRUE(IsOk(waited->Wait()));
    emulated::FailQueries(3, error);
    const BytesMove move{device.get(), device.get() + kMoved, kMoved};
    EXPECT_TRUE(IsOk(memory_->MoveApart({&move, 1})));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  // Nothing writes any more once the device has failed for good, whatever it calls that.
  for (const auto error : {cudaErrorIllegalAddress, cudaErrorContained,
                           cudaErrorMpsClientTerminated, static_cast<cudaError_t>(4711)}) {
    const std::shared_ptr<const MovesUnderWay> moves = Begin(device);
    emulated::FailQueries(2, error);
    EXPECT_TRUE(moves->done());
    EXPECT_TRUE(Fails(moves->Wait(), absl::StatusCode::kInternal, "moving bytes"));
  }
}

}  // namespace
}  // namespace kvferry
