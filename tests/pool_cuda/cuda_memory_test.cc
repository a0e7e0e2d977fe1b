#include "pool/cuda/cuda_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "pool/cuda/host_pin.h"
#include "pool/host_kv_pool.h"
#include "pool/model_pools.h"
#include "pool/page_copy.h"
#include "pool/token_kv_pool.h"
#include "tests/pool/block_quant_suite.h"
#include "tests/pool/gdn_pool_suite.h"
#include "tests/pool/req_to_token_pool_suite.h"
#include "tests/pool/token_kv_pool_suite.h"
#include "tests/pool_cuda/cuda_backend.h"
#include "tests/pool_cuda/device.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnavailable = absl::StatusCode::kUnavailable;

INSTANTIATE_TEST_SUITE_P(Memories, TokenPools,
                         TokenPoolsIn(TokenPoolBackend{CudaBackend(), /*keeps_last=*/false}),
                         TokenPoolName());
INSTANTIATE_TEST_SUITE_P(Memories, BlockQuants, testing::Values(CudaBackend()), BackendName());
INSTANTIATE_TEST_SUITE_P(Memories, GdnPools, testing::Values(CudaBackend()), BackendName());
INSTANTIATE_TEST_SUITE_P(Memories, ReqToTokenPools, testing::Values(CudaBackend()), BackendName());

class CudaMemories : public DeviceTest {
 protected:
  CudaMemories() : DeviceTest(6) {}

  std::vector<int32_t> ShuffledSlots(int64_t num_slots) {
    std::vector<int32_t> slots(static_cast<size_t>(num_slots));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_);
    return slots;
  }

  const std::shared_ptr<const PoolMemory> memory_ = CudaMemory(0);
};

// More than goes through the packed buffer at a time, between every two kinds of memory, with
// another dtype and page format on the device.
TEST_F(CudaMemories, EveryKindOfMemoryIsReached) {
  const KvLayout layout = KvLayout::Mha(2, 4, 4, 256, DType::kFloat32);
  KvLayout on_device = layout;
  on_device.page_format = "HND";
  constexpr int64_t kTokens = 5000;  // 20 MB a tensor.
  const auto plain = Must(TokenKvPool::Create(layout, kTokens, 0, HostMemory()));
  const auto pinned = Must(TokenKvPool::Create(layout, kTokens, 0, HostMemory()));
  const auto pin = Must(PinHostMemory(pinned->pages()->buffer_infos(), pinned));
  const auto device = Must(TokenKvPool::Create(on_device, kTokens, 0, memory_));
  const auto device2 = Must(TokenKvPool::Create(layout, kTokens, 0, memory_));
  std::vector<std::shared_ptr<TokenKvPool>> way = {plain,  device,  plain, device2, device,
                                                   pinned, device2, plain, device,  pinned};
  const int64_t num_slots = plain->num_slots();
  const std::vector<std::byte> bytes = RandomBytes(plain->flat_bytes(num_slots));
  std::vector<int32_t> slots = ShuffledSlots(num_slots);
  ASSERT_TRUE(IsOk(plain->WriteFlat(slots, bytes)));
  for (size_t i = 1; i < way.size(); ++i) {
    const std::vector<int32_t> next = ShuffledSlots(num_slots);
    ASSERT_TRUE(IsOk(way[i]->CopyFrom(*way[i - 1], slots, next)));
    slots = next;
  }
  std::vector<std::byte> got(bytes.size());
  // All of it is there at once, without anything else that would wait for the device.
  ASSERT_TRUE(IsOk(pinned->ReadFlat(slots, got)));
  EXPECT_EQ(got, bytes);
}

TEST_F(CudaMemories, RowsToSetMayLieOnTheDevice) {
  const auto device =
      Must(TokenKvPool::Create(KvLayout::Mla(2, 4, 64, DType::kFloat8E4M3), 64, 0, memory_));
  const auto host = Must(TokenKvPool::Create(device->layout(), 64));
  std::vector<std::byte> values = RandomBytes(9 * 64 * 2);
  const DeviceBytes there(values);
  TokenView rows = TokenView::Packed(values.data(), DType::kBFloat16, 9, 1, 64);
  rows.scale = 0.37F;
  TokenView rows_there = rows;
  rows_there.data = there.data();
  std::vector<int32_t> slots = ShuffledSlots(68);
  slots.resize(9);
  // A power of two, so that what is rounded twice on the way shows.
  const std::vector<float> scales = {2};
  ASSERT_TRUE(IsOk(host->Set(1, slots, std::vector<TokenView>{rows}, scales)));
  const auto flat = [&slots](const TokenKvPool& pool) {
    std::vector<std::byte> bytes(static_cast<size_t>(pool.flat_bytes(9)));
    EXPECT_TRUE(IsOk(pool.ReadFlat(slots, bytes)));
    return bytes;
  };
  for (const TokenView& from : {rows, rows_there}) {
    ASSERT_TRUE(IsOk(device->WriteFlat(
        slots, std::vector<std::byte>(static_cast<size_t>(device->flat_bytes(9))))));
    ASSERT_TRUE(IsOk(device->Set(1, slots, std::vector<TokenView>{from}, scales)));
    EXPECT_EQ(flat(*device), flat(*host));
  }
}

// More of them than go through the packed buffer at a time.
TEST_F(CudaMemories, RowsInBlocksGoAndComeInPieces) {
  constexpr int64_t kRows = 5000, kDim = 1024;  // 20 MB.
  const KvLayout layout = {1, 4, DType::kUint8, "NHD",
                           Must(QuantizedTensors(BlockFormat::kMxfp4, "k", 1, kDim))};
  const auto device = Must(TokenKvPool::Create(layout, kRows, 0, memory_));
  const auto host = Must(TokenKvPool::Create(layout, kRows));
  std::vector<int32_t> slots = ShuffledSlots(device->num_slots());
  slots.resize(kRows);
  std::vector<float> values(kRows * kDim);
  for (float& value : values) value = static_cast<float>(random_() % 4000) / 7 - 280;
  std::vector<std::byte> flat[2];
  std::vector<float> loaded[2];
  for (const auto& pool : {device, host}) {
    const auto rows = [](std::vector<float>& data) {
      return TokenView::Packed(reinterpret_cast<std::byte*>(data.data()), DType::kFloat32, kRows, 1,
                               kDim);
    };
    const TokenView codes = pool->view(0, 0), scales = pool->view(0, 1);
    const size_t i = pool == host ? 1 : 0;
    flat[i].resize(static_cast<size_t>(pool->flat_bytes(kRows)));
    loaded[i].resize(values.size());
    ASSERT_TRUE(IsOk(
        StoreQuantized(BlockFormat::kMxfp4, rows(values), codes, scales, slots, pool->memory())));
    ASSERT_TRUE(IsOk(pool->ReadFlat(slots, flat[i])));
    ASSERT_TRUE(IsOk(
        LoadQuantized(BlockFormat::kMxfp4, codes, scales, slots, rows(loaded[i]), pool->memory())));
  }
  EXPECT_EQ(flat[0], flat[1]);
  EXPECT_EQ(loaded[0], loaded[1]);
}

TEST_F(CudaMemories, CodesAndScalesOfTheHostAreRefused) {
  const KvLayout layout = {1, 4, DType::kUint8, "NHD",
                           Must(QuantizedTensors(BlockFormat::kMxfp4, "k", 1, 16))};
  const auto host = Must(TokenKvPool::Create(layout, 4));
  const std::vector<std::byte> row(16 * sizeof(float));
  const TokenView rows =
      TokenView::Packed(const_cast<std::byte*>(row.data()), DType::kFloat32, 1, 1, 16);
  const std::vector<int32_t> slots = {4};
  EXPECT_TRUE(Fails(StoreQuantized(BlockFormat::kMxfp4, rows, host->view(0, 0), host->view(0, 1),
                                   slots, *memory_),
                    kInvalid, "codes and scales must lie where device 0"));
}

TEST_F(CudaMemories, PartlyPinnedCodesAreRefused) {
  const KvLayout layout = {1, 4, DType::kUint8, "NHD",
                           Must(QuantizedTensors(BlockFormat::kMxfp4, "k", 1, 4096))};
  const auto host = Must(TokenKvPool::Create(layout, 64));
  const BufferInfo &codes = host->pages()->buffer(0, 0), &scales = host->pages()->buffer(0, 1);
  const int64_t quarter = codes.bytes / 4 / 4096 * 4096;
  std::byte* const last = codes.address + codes.bytes - quarter;
  // One end, or both with a gap between them.
  for (const std::vector<BufferInfo>& pinned :
       {std::vector<BufferInfo>{scales, {codes.address, quarter, 0}},
        std::vector<BufferInfo>{scales, {codes.address, quarter, 0}, {last, quarter, 0}}}) {
    const auto pin = Must(PinHostMemory(pinned, host));
    std::vector<std::byte> row(4096 * sizeof(float));
    const std::vector<int32_t> slots = {4};
    EXPECT_TRUE(Fails(StoreQuantized(BlockFormat::kMxfp4,
                                     TokenView::Packed(row.data(), DType::kFloat32, 1, 1, 4096),
                                     host->view(0, 0), host->view(0, 1), slots, *memory_),
                      kInvalid, "codes and scales must lie where device 0"));
  }
}

TEST_F(CudaMemories, PartlyPinnedMemoryIsAllHostMemory) {
  const auto device =
      Must(TokenKvPool::Create(KvLayout::Mla(1, 1, 4096, DType::kUint8), 64, 0, memory_));
  const auto host = Must(KvPool::Create(device->layout(), 64));
  const BufferInfo& buffer = host->buffer(0, 0);
  const std::vector<BufferInfo> half = {{buffer.address, buffer.bytes / 2, 4096}};
  const auto pin = Must(PinHostMemory(half, host));
  const std::vector<std::byte> bytes = RandomBytes(buffer.bytes);
  std::copy(bytes.begin(), bytes.end(), buffer.address);
  std::vector<int32_t> slots = ShuffledSlots(64);
  ASSERT_TRUE(IsOk(device->WriteFlat(slots, {buffer.address, bytes.size()})));
  std::vector<std::byte> got(bytes.size());
  ASSERT_TRUE(IsOk(device->ReadFlat(slots, got)));
  EXPECT_EQ(got, bytes);
}

// Two ranges are pinned, each at an end of the rows, and not what lies between; or that alone.
TEST_F(CudaMemories, WhatIsPinnedInPiecesIsAllHostMemory) {
  const auto device =
      Must(TokenKvPool::Create(KvLayout::Mla(1, 1, 4096, DType::kUint8), 64, 0, memory_));
  const auto host = Must(KvPool::Create(device->layout(), 64));
  const BufferInfo& buffer = host->buffer(0, 0);
  const std::vector<BufferInfo> ends = {{buffer.address, 4 * 4096, 4096},
                                        {buffer.address + 60 * 4096, 4 * 4096, 4096}};
  const std::vector<BufferInfo> middle = {{buffer.address + 4 * 4096, 4 * 4096, 4096}};
  for (const std::vector<BufferInfo>& pinned : {ends, middle}) {
    const auto pin = Must(PinHostMemory(pinned, host));
    const std::vector<std::byte> bytes = RandomBytes(buffer.bytes);
    std::copy(bytes.begin(), bytes.end(), buffer.address);
    const std::vector<int32_t> slots = ShuffledSlots(64);
    ASSERT_TRUE(IsOk(device->WriteFlat(slots, {buffer.address, bytes.size()})));
    std::fill_n(buffer.address, buffer.bytes, std::byte{0});
    ASSERT_TRUE(IsOk(device->ReadFlat(slots, {buffer.address, bytes.size()})));
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), buffer.address));
  }
}

TEST_F(CudaMemories, AHostTierUnderADevice) {
  const auto device =
      Must(TokenKvPool::Create(KvLayout::Mha(3, 4, 2, 8, DType::kBFloat16), 64, 0, memory_));
  auto tier = Must(HostKvPool::Create(device, {.ratio_to_device = 1}, 0));
  // Where the device reaches it, for as long as there is a tier.
  const auto host_memory = tier->host()->pages();
  for (const BufferInfo& buffer : host_memory->buffer_infos()) {
    EXPECT_TRUE(IsPinned({buffer.address, static_cast<size_t>(buffer.bytes)}));
  }
  std::vector<int32_t> away(16), back(16);
  std::iota(away.begin(), away.end(), 4);
  std::iota(back.begin(), back.end(), 40);
  const std::vector<std::byte> bytes = RandomBytes(device->flat_bytes(16));
  ASSERT_TRUE(IsOk(device->WriteFlat(away, bytes)));
  const std::vector<int32_t> host = Must(tier->Allocate(16));
  ASSERT_TRUE(IsOk(tier->BackUp(away, host)));
  ASSERT_TRUE(IsOk(tier->MarkBackup(host)));
  ASSERT_TRUE(IsOk(tier->Load(host, back)));
  std::vector<std::byte> got(bytes.size());
  ASSERT_TRUE(IsOk(device->ReadFlat(back, got)));
  EXPECT_EQ(got, bytes);
  tier.reset();
  EXPECT_FALSE(IsPinned({host_memory->buffer(0, 0).address, 1}));
}

TEST_F(CudaMemories, PoolsOfAModel) {
  const ModelConfig model = Must(ModelConfig::FromJson(R"({"hidden_size": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3,
    "max_position_embeddings": 128, "torch_dtype": "bfloat16"})"));
  const auto pools =
      Must(ModelPools::Create(model, {.page_size = 4, .num_tokens = 64, .memory = memory_}));
  EXPECT_EQ(pools->kv()->memory().name(), "memory of cuda:0");
  const std::vector<int32_t> slots = Must(pools->slots()->Allocate(8));
  const std::vector<std::byte> bytes = RandomBytes(8 * 2 * 8 * 2);
  const TokenView rows =
      TokenView::Packed(const_cast<std::byte*>(bytes.data()), DType::kBFloat16, 8, 2, 8);
  ASSERT_TRUE(IsOk(pools->Set(2, slots, std::vector<TokenView>{rows, rows})));
  std::vector<std::byte> got(2 * bytes.size());
  ASSERT_TRUE(IsOk(pools->kv()->ReadFlatLayer(2, slots, got)));
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), got.begin()));
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), got.begin() + bytes.size()));
}

// As a transfer has them: windows of page lists, to and from host memory of either kind.
TEST_F(CudaMemories, PagesGoAndComeApart) {
  constexpr int64_t kPages = 64;
  alignas(4096) static std::byte arena[256 << 10];
  auto pin = Must(memory_->Pin(arena));
  EXPECT_TRUE(Fails(memory_->Pin(arena), absl::StatusCode::kAlreadyExists, "pinning"));
  for (int round = 0; round < 300; ++round) {
    const int64_t item = 1 + static_cast<int64_t>(random_() % (round % 4 == 0 ? 100'000 : 3'000));
    const KvLayout layout = KvLayout::Mla(1, 1, item, DType::kUint8);
    const auto device = Must(KvPool::CreateIn(layout, kPages, memory_));
    const auto host = Must(KvPool::CreateIn(layout, kPages, HostMemory()));
    const BufferInfo &there = device->buffer(0, 0), &here = host->buffer(0, 0);
    const auto agree = [&] {
      std::vector<std::byte> bytes(static_cast<size_t>(there.bytes));
      EXPECT_EQ(cudaMemcpy(bytes.data(), there.address, bytes.size(), cudaMemcpyDefault),
                cudaSuccess);
      return std::equal(bytes.begin(), bytes.end(), here.address);
    };
    std::vector<int32_t> list = ShuffledSlots(kPages);
    list.resize(1 + random_() % kPages);
    if (round % 3 == 0) std::sort(list.begin(), list.end());
    const PageRuns runs = Must(PageRuns::FromPages(std::vector<int64_t>(list.begin(), list.end())));
    const auto total = static_cast<int64_t>(list.size()) * item;
    const auto offset = static_cast<int64_t>(random_() % static_cast<uint64_t>(total));
    const auto most = std::min<int64_t>(total - offset, sizeof arena);
    std::vector<std::byte> plain = RandomBytes(1 + static_cast<int64_t>(random_() % most));
    std::span<std::byte> packed = plain;
    if (round % 2 == 0) {
      packed = std::span(arena).first(plain.size());
      std::copy(plain.begin(), plain.end(), packed.begin());
    }
    std::vector<std::span<std::byte>> pieces;
    AppendPagePieces(there, runs, offset, static_cast<int64_t>(packed.size()), &pieces);
    std::vector<BytesMove> out, back;
    for (std::byte* at = packed.data(); const std::span<std::byte> piece : pieces) {
      const auto size = static_cast<int64_t>(piece.size());
      out.push_back({at, piece.data(), size});
      back.push_back({piece.data(), at, size});
      at += size;
    }
    ASSERT_TRUE(IsOk(memory_->MoveApart(out)));
    ScatterPages(here, runs, offset, packed);
    ASSERT_TRUE(agree()) << round;
    const std::vector<std::byte> want(packed.begin(), packed.end());
    std::fill(packed.begin(), packed.end(), std::byte{0});
    ASSERT_TRUE(IsOk(memory_->MoveApart(back)));
    ASSERT_TRUE(std::equal(want.begin(), want.end(), packed.begin())) << round;
  }
  pin.reset();
  EXPECT_TRUE(IsOk(memory_->Pin(arena)));
}

// What is not pinned goes through what is, part by part.
TEST_F(CudaMemories, MoreThanGoesAtATime) {
  constexpr int64_t kBytes = 5 << 20;
  const std::shared_ptr<std::byte> device = Must(memory_->Allocate(kBytes));
  const std::vector<std::byte> bytes = RandomBytes(kBytes);
  std::vector<BytesMove> out, back;
  std::vector<std::byte> got(kBytes);
  for (int64_t at = 0; at < kBytes;) {
    const int64_t size = std::min<int64_t>(1 + random_() % (3 << 20), kBytes - at);
    std::byte* const there = device.get() + kBytes - at - size;
    out.push_back({bytes.data() + at, there, size});
    back.push_back({there, got.data() + at, size});
    at += size;
  }
  ASSERT_TRUE(IsOk(memory_->MoveApart(out)));
  ASSERT_TRUE(IsOk(memory_->MoveApart(back)));
  EXPECT_EQ(got, bytes);
}

// A list is known by where it begins and how long it is.
TEST_F(CudaMemories, ListsThatBeginAlikeAreNotTheSame) {
  constexpr int64_t kRows = 64, kRowBytes = 16, kBytes = kRows * kRowBytes;
  const std::shared_ptr<std::byte> device = Must(memory_->Allocate(3 * kBytes));
  const auto rows = [&](int64_t which) {
    return TokenView::Packed(device.get() + which * kBytes, DType::kUint8, kRows, 1, kRowBytes);
  };
  const std::vector<std::byte> bytes = RandomBytes(kBytes);
  CopyToDevice(device.get(), bytes.data(), bytes.size());
  const std::vector<int32_t> slots = ShuffledSlots(kRows);
  const std::span<const int32_t> some = std::span(slots).first(2);
  const std::vector<TokenCopy> copies = {Must(TokenCopy::Plan(rows(0), some, rows(1), some)),
                                         Must(TokenCopy::Plan(rows(0), slots, rows(2), slots))};
  ASSERT_TRUE(IsOk(memory_->Run(copies, nullptr)));
  std::vector<std::byte> got(static_cast<size_t>(kBytes));
  ASSERT_EQ(cudaMemcpy(got.data(), rows(2).data, got.size(), cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(got, bytes);
}

// Of more rows than go at a time, where the device has no list of which a piece could have a part.
TEST_F(CudaMemories, RowsThatAreInOrderOnTheDevice) {
  constexpr int64_t kRows = 20000, kRowBytes = 1024;
  std::vector<std::byte> host = RandomBytes(kRows * kRowBytes);
  const std::vector<std::byte> before = host;
  const std::shared_ptr<std::byte> device = Must(memory_->Allocate(kRows * kRowBytes));
  const auto rows = [](std::byte* data) {
    return TokenView::Packed(data, DType::kUint8, kRows, 1, kRowBytes);
  };
  const std::vector<int32_t> slots = ShuffledSlots(kRows);
  const TokenCopy in = Must(TokenCopy::PlanGather(rows(host.data()), slots, rows(device.get())));
  ASSERT_TRUE(IsOk(memory_->Run({&in, 1}, nullptr)));
  std::vector<std::byte> got(host.size());
  ASSERT_EQ(cudaMemcpy(got.data(), device.get(), got.size(), cudaMemcpyDefault), cudaSuccess);
  for (int64_t i = 0; i < kRows; ++i) {
    ASSERT_EQ(std::memcmp(&got[i * kRowBytes], &host[slots[i] * kRowBytes], kRowBytes), 0) << i;
  }
  std::fill(host.begin(), host.end(), std::byte{0});
  const TokenCopy out = Must(TokenCopy::PlanScatter(rows(device.get()), rows(host.data()), slots));
  ASSERT_TRUE(IsOk(memory_->Run({&out, 1}, nullptr)));
  EXPECT_TRUE(host == before);
}

// Moves that are not waited for at once are done in the order in which they were begun. What the
// device does not reach is moved before the call returns.
TEST_F(CudaMemories, WhatIsBegunIsDoneInTheEnd) {
  constexpr int64_t kBytes = 1 << 20;
  // A page of the system's, or what is beside it would be pinned too.
  const std::shared_ptr<std::byte> pinned = Must(HostMemory()->Allocate(kBytes));
  const auto pin = Must(memory_->Pin({pinned.get(), kBytes}));
  const std::shared_ptr<std::byte> device = Must(memory_->Allocate(2 * kBytes));
  std::vector<std::byte> want = RandomBytes(kBytes);
  std::copy(want.begin(), want.end(), pinned.get());
  const BytesMove in = {pinned.get(), device.get(), kBytes};
  const BytesMove on = {device.get(), device.get() + kBytes, kBytes};
  const auto first = Must(memory_->BeginMoveApart({&in, 1}));
  const auto second = Must(memory_->BeginMoveApart({&on, 1}));
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_TRUE(IsOk(second->Wait()));
  EXPECT_TRUE(second->done());
  EXPECT_TRUE(first->done());
  EXPECT_TRUE(IsOk(first->Wait()));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);

  std::vector<std::byte> got(kBytes);
  const BytesMove out = {device.get() + kBytes, got.data(), kBytes};
  EXPECT_EQ(Must(memory_->BeginMoveApart({&out, 1})), nullptr);
  EXPECT_EQ(got, want);
  EXPECT_EQ(Must(memory_->BeginMoveApart({})), nullptr);
}

// Somebody else's thread may ask and wait, and whoever only asks sees it done too.
TEST_F(CudaMemories, WhatIsBegunBelongsToNoThread) {
  constexpr int64_t kBytes = 1 << 20;
  const std::shared_ptr<std::byte> device = Must(memory_->Allocate(2 * kBytes));
  const std::vector<std::byte> want = RandomBytes(kBytes);
  CopyToDevice(device.get(), want.data(), want.size());
  std::shared_ptr<const MovesUnderWay> moves;
  std::thread([&] {
    const BytesMove move = {device.get(), device.get() + kBytes, kBytes};
    moves = Must(memory_->BeginMoveApart({&move, 1}));
  }).join();
  ASSERT_NE(moves, nullptr);
  while (!moves->done()) {
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  std::vector<std::byte> got(kBytes);
  ASSERT_EQ(cudaMemcpy(got.data(), device.get() + kBytes, kBytes, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(got, want);
}

// What a process maps of another one's: tests/process has two. Here is what cannot be mapped.
TEST_F(CudaMemories, OnlyNamesOfOthersAreMapped) {
  const std::shared_ptr<std::byte> first = Must(memory_->Allocate(1 << 20));
  const auto parts = Must(memory_->Share({first.get() + 1000, 5000}));
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].bytes, 5000);
  EXPECT_LE(parts[0].name.size(), PoolMemory::kMaxSharedName);
  EXPECT_TRUE(Fails(memory_->MapShared(parts[0].name, 5000), kUnavailable, "this process's own"));
  for (const std::string name : {"", "x"}) {
    EXPECT_TRUE(Fails(memory_->MapShared(name, 1), kInvalid, std::to_string(name.size())));
  }
  std::string other = parts[0].name;
  other[0] = static_cast<char>(other[0] ^ 1);
  EXPECT_TRUE(Fails(memory_->MapShared(other, 5000), kInvalid, "no name"));
  // Of another process, as far as it says, and of no allocation.
  other = parts[0].name;
  for (size_t i = 8; i < other.size(); ++i) other[i] = static_cast<char>(random_());
  EXPECT_TRUE(Fails(memory_->MapShared(other, 5000), kUnavailable, "mapping"));
  EXPECT_FALSE(IsOk(memory_->Share(std::as_bytes(std::span(other)))));
  EXPECT_TRUE(
      Fails(HostMemory()->Share({first.get(), 1}), absl::StatusCode::kUnimplemented, "host"));
  // Nothing of that has harmed the device.
  EXPECT_TRUE(IsOk(memory_->Allocate(1)));
}

// Launches have room for so many, or fewer.
TEST_F(CudaMemories, ListsOfAnyLengthMoveApart) {
  constexpr int64_t kMost = 4000, kItem = 48;
  const auto pool =
      Must(KvPool::CreateIn(KvLayout::Mla(1, 1, kItem, DType::kUint8), 2 * kMost, memory_));
  std::byte* const there = pool->buffer(0, 0).address;
  for (const int64_t count : {1, 128, 129, 512, 513, 1815, 1816, 1817, 3632, 4000}) {
    std::vector<std::byte> want = RandomBytes(2 * kMost * kItem);
    const auto bytes = want.size();
    CopyToDevice(there, want.data(), bytes);
    std::vector<BytesMove> moves;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = i * kItem, to = (2 * kMost - 1 - i) * kItem;
      moves.push_back({there + from, there + to, kItem});
      std::copy_n(want.begin() + from, kItem, want.begin() + to);
    }
    ASSERT_TRUE(IsOk(memory_->MoveApart(moves)));
    std::vector<std::byte> got(bytes);
    ASSERT_EQ(cudaMemcpy(got.data(), there, bytes, cudaMemcpyDefault), cudaSuccess);
    EXPECT_EQ(got, want) << count;
  }
}

// Units at places against a loop over bytes: more of either than a launch has room for, and fewer;
// places whose items are of other sizes; anything as far from alignment as it likes.
class MovedItems : public CudaMemories {
 protected:
  // Places of items of these sizes, as many of each as `slots`, in memory of their own on both
  // sides.
  void Place(const std::vector<int64_t>& item_bytes, int64_t slots, int64_t gap) {
    slots_ = slots;
    int64_t from = gap, to = 3 * gap;
    places_.clear();
    for (const int64_t item : item_bytes) {
      places_.push_back({from, to, item});
      from += slots * item + gap;
      to += slots * item + 2 * gap;
    }
    source_ = RandomBytes(from);
    target_ = RandomBytes(to);
  }
  // Runs of the slots, in any order on either side.
  std::vector<ItemsMove> RandomItems(int64_t most_runs, int64_t longest) {
    std::vector<ItemsMove> items;
    std::vector<int32_t> order = ShuffledSlots(slots_ / longest);
    for (size_t i = 0; i < order.size() && static_cast<int64_t>(i) < most_runs; ++i) {
      items.push_back({static_cast<int64_t>(order[i]) * longest, static_cast<int64_t>(i) * longest,
                       1 + static_cast<int64_t>(random_() % static_cast<uint64_t>(longest))});
    }
    return items;
  }
  void ExpectMoved(const std::vector<ItemsMove>& items) {
    const DeviceBytes from(source_), to(target_);
    std::vector<PlaceMove> places;
    for (const auto& [begin, end, item_bytes] : places_) {
      places.push_back({from.data() + begin, to.data() + end, item_bytes});
      for (const ItemsMove& move : items) {
        std::copy_n(source_.begin() + begin + move.from * item_bytes, move.items * item_bytes,
                    target_.begin() + end + move.to * item_bytes);
      }
    }
    ASSERT_TRUE(IsOk(memory_->MoveItemsApart(items, places)));
    EXPECT_EQ(to.ToHost(), target_);
  }

 private:
  // As PlaceMove, in bytes of the two memories.
  struct PlaceInside {
    int64_t from, to, item_bytes;
  };

  int64_t slots_ = 0;
  std::vector<PlaceInside> places_;
  std::vector<std::byte> source_, target_;
};

TEST_F(MovedItems, AgainstAByteLoop) {
  for (int round = 0; round < 60; ++round) {
    const int64_t align = std::vector<int64_t>{1, 4, 16, 16}[round % 4];
    const auto upto = [&](int64_t most) {
      return align * (1 + static_cast<int64_t>(random_() % static_cast<uint64_t>(most / align)));
    };
    std::vector<int64_t> sizes(1 + random_() % (round % 5 == 0 ? 4 : 40));
    const int64_t size = upto(round % 5 == 0 ? 40'000 : 1'000);
    for (int64_t& one : sizes) one = round % 3 == 0 ? upto(2 * size) : size;
    Place(sizes, 48, round % 2 == 0 ? align : 16);
    ExpectMoved(RandomItems(48, 1 + static_cast<int64_t>(random_() % 8)));
  }
}

TEST_F(MovedItems, AsManyAsThereAre) {
  for (const int64_t places : {1, 8, 9, 160, 161, 330}) {
    Place(std::vector<int64_t>(places, 16), 400, 16);
    for (const int64_t count : {1, 128, 129}) ExpectMoved(RandomItems(count, 1));
  }
  for (const int64_t places : {1, 3}) {
    Place(std::vector<int64_t>(places, 48), 4096, 16);
    for (const int64_t count : {512, 513, 1603, 1604, 1605, 3208, 4096}) {
      ExpectMoved(RandomItems(count, 1));
    }
  }
  // Several places a warp, seven of 160 and three of 61, so that the last one has fewer.
  Place(std::vector<int64_t>(160, 24), 380, 8);
  ExpectMoved(RandomItems(380, 1));
  Place(std::vector<int64_t>(61, 1024), 500, 16);
  ExpectMoved(RandomItems(500, 1));
}

TEST_F(MovedItems, LongItemsBesideShortOnes) {
  std::vector<int64_t> sizes(20, 32);
  sizes[7] = 40 << 20;
  sizes[11] = (1 << 20) + 16;
  Place(sizes, 1, 16);
  ExpectMoved({{0, 0, 1}});
}

TEST_F(CudaMemories, OfTwoDevicesEachHasItsOwnRows) {
  int devices = 0;
  ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
  if (devices < 2) GTEST_SKIP() << "this machine has one CUDA device";
  const KvLayout layout = KvLayout::Mla(1, 1, 16, DType::kUint8);
  const auto first = Must(TokenKvPool::Create(layout, 8, 0, memory_));
  const auto second = Must(TokenKvPool::Create(layout, 8, 0, CudaMemory(1)));
  int current = -1;
  const std::vector<int32_t> slots = ShuffledSlots(8);
  const std::vector<std::byte> bytes = RandomBytes(8 * 16);
  for (const auto& pool : {first, second}) {
    ASSERT_TRUE(IsOk(pool->WriteFlat(slots, bytes)));
    std::vector<std::byte> got(bytes.size());
    ASSERT_TRUE(IsOk(pool->ReadFlat(slots, got)));
    EXPECT_EQ(got, bytes);
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, 0);
  }
  EXPECT_TRUE(Fails(second->CopyFrom(*first, slots, slots), kInvalid, "rows lie on device 0",
                    "the pool on 1"));
  EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 0);
}

// The rest needs no device.

TEST(CudaMemoryArguments, ADeviceThatIsNotThereIsNamed) {
  for (const int device : {-1, 1000}) {
    const auto memory = CudaMemory(device);
    const std::string message = "no device " + std::to_string(device) + ": ";
    EXPECT_FALSE(memory->on_host());
    EXPECT_TRUE(Fails(memory->Allocate(1 << 20), kUnavailable, message));
    EXPECT_TRUE(Fails(memory->Run({}, nullptr), kUnavailable, message));
    EXPECT_TRUE(Fails(memory->RunQuantized({}, nullptr), kUnavailable, message));
    const KvLayout layout = KvLayout::Mla(1, 4, 8, DType::kUint8);
    EXPECT_TRUE(Fails(TokenKvPool::Create(layout, 16, 0, memory), kUnavailable, message));
    EXPECT_TRUE(Fails(TokenKvPool::Create(layout, 15, 0, memory), kInvalid, "num_tokens is 15"));
  }
}

}  // namespace
}  // namespace kvferry
