#include "tests/pool/block_quant_suite.h"

namespace kvferry {
namespace {

INSTANTIATE_TEST_SUITE_P(Memories, BlockQuants, testing::Values(HostBackend(), GuardedBackend()),
                         BackendName());

TEST(BlockQuant, ThreadsWriteTheSameBytes) {
  constexpr int64_t kRows = 300, kHeads = 8, kDim = 128;  // Nine parts.
  const auto threads = Must(ThreadPool::Create(2));
  std::mt19937_64 random(5);
  Floats values = RandomRows(kRows * kHeads * kDim, 16, random);
  std::vector<int32_t> slots(kRows);
  for (int32_t i = 0; i < kRows; ++i) slots[i] = (i * 7) % kRows;
  for (const BlockFormat format : {BlockFormat::kMxfp4, BlockFormat::kFp8Block128}) {
    const KvLayout layout{1, 1, DType::kUint8, "NHD",
                          Must(QuantizedTensors(format, "k", kHeads, kDim))};
    const auto alone = Must(TokenKvPool::Create(layout, kRows));
    const auto helped = Must(TokenKvPool::Create(layout, kRows));
    const TokenView rows = ViewOf(values, kRows, kHeads, kDim);
    const auto store = [&](TokenKvPool& pool) {
      return Must(QuantizedCopy::PlanStore(format, rows, pool.view(0, 0), pool.view(0, 1), slots));
    };
    store(*alone).Run();
    store(*helped).Run(threads.get());
    std::vector<std::byte> want(static_cast<size_t>(alone->flat_bytes(kRows))), got(want.size());
    ASSERT_TRUE(IsOk(alone->ReadFlat(slots, want)));
    ASSERT_TRUE(IsOk(helped->ReadFlat(slots, got)));
    EXPECT_EQ(got, want);
    Floats want_loaded(values.size()), loaded(values.size());
    const auto load = [&](Floats& into) {
      return Must(QuantizedCopy::PlanLoad(format, alone->view(0, 0), alone->view(0, 1), slots,
                                          ViewOf(into, kRows, kHeads, kDim)));
    };
    load(want_loaded).Run();
    load(loaded).Run(threads.get());
    EXPECT_EQ(loaded, want_loaded);
  }
}

TEST(BlockQuant, ThreadsAreHandedToTheMemory) {
  const auto threads = Must(ThreadPool::Create(0));
  const auto memory = std::make_shared<GuardedMemory>();
  const KvLayout layout{1, 1, DType::kUint8, "NHD",
                        Must(QuantizedTensors(BlockFormat::kMxfp4, "k", 1, 16))};
  const auto pool = Must(TokenKvPool::Create(layout, 4, 0, memory));
  Floats values(16, 1.5F);
  const TokenView rows = ViewOf(values, 1, 1, 16), codes = pool->view(0, 0), at = pool->view(0, 1);
  const std::vector<int32_t> slots = {2};
  ASSERT_TRUE(
      IsOk(StoreQuantized(BlockFormat::kMxfp4, rows, codes, at, slots, *memory, threads.get())));
  EXPECT_EQ(std::exchange(memory->last_threads, nullptr), threads.get());
  ASSERT_TRUE(
      IsOk(LoadQuantized(BlockFormat::kMxfp4, codes, at, slots, rows, *memory, threads.get())));
  EXPECT_EQ(std::exchange(memory->last_threads, nullptr), threads.get());
  ASSERT_TRUE(IsOk(LoadQuantized(BlockFormat::kMxfp4, codes, at, slots, rows, *memory)));
  EXPECT_EQ(memory->last_threads, nullptr);
}

}  // namespace
}  // namespace kvferry
