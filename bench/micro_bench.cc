// Plan, gather and scatter against plain loops of memcpy, and what the page allocator costs and
// keeps together. Google Benchmark: kvferry_micro_bench --help.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "bench/churn.h"
#include "pool/kv_pool.h"
#include "pool/page_allocator.h"
#include "pool/page_runs.h"
#include "pool/token_slot_allocator.h"
#include "transport/stream_plan.h"

namespace kvferry {
namespace {

constexpr int64_t kChunkBytes = 256 << 10;  // What the packed path gathers at a time.
constexpr int64_t kMovedBytes = 64 << 20;   // One pass: beyond any cache that pages would stay in.

template <typename T>
T Must(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::cerr << result.status() << std::endl;
  std::abort();
}

std::vector<int64_t> RandomPages(int64_t pool_pages, int64_t count, uint64_t seed) {
  std::vector<int64_t> ids(pool_pages);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(seed));
  ids.resize(count);
  return ids;
}

// One tensor of one layer whose pages are item_bytes long, in a pool twice the size of what is
// moved.
struct Setup {
  explicit Setup(int64_t item_bytes)
      : count(kMovedBytes / item_bytes),
        pool(Must(KvPool::Create(KvLayout::Mla(1, 1, item_bytes, DType::kUint8), 2 * count))),
        pages(RandomPages(2 * count, count, 1)),
        packed(kChunkBytes) {
    const BufferInfo& buffer = pool->buffer(0, 0);
    std::memset(buffer.address, 1, buffer.bytes);
  }
  StreamPlan Plan() const {
    return Must(StreamPlan::Create(pool, Must(PageRuns::FromPages(pages))));
  }

  int64_t count;
  std::shared_ptr<KvPool> pool;
  std::vector<int64_t> pages;
  std::vector<std::byte> packed;
};

void SetBytes(benchmark::State& state, const Setup& setup) {
  state.SetBytesProcessed(state.iterations() * setup.count * state.range(0));
}

// The page list of a request to runs, and runs to a plan.
void BM_Plan(benchmark::State& state) {
  const Setup setup(state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(setup.Plan());
  state.SetItemsProcessed(state.iterations() * setup.count);
}

// Calls copy(offset, chunk) for each chunk of the plan.
template <typename Copy>
void ByChunks(benchmark::State& state, const Copy& copy) {
  Setup setup(state.range(0));
  const StreamPlan plan = setup.Plan();
  for (auto _ : state) {
    for (int64_t at = 0; at < plan.total_bytes(); at += kChunkBytes) {
      const int64_t bytes = std::min(kChunkBytes, plan.total_bytes() - at);
      copy(plan, at, std::span(setup.packed).first(bytes));
      benchmark::ClobberMemory();
    }
  }
  SetBytes(state, setup);
}

void BM_Gather(benchmark::State& state) {
  ByChunks(state, [](const StreamPlan& plan, int64_t at, std::span<std::byte> chunk) {
    plan.Gather(at, chunk);
  });
}

void BM_Scatter(benchmark::State& state) {
  ByChunks(state, [](const StreamPlan& plan, int64_t at, std::span<std::byte> chunk) {
    plan.Scatter(at, chunk);
  });
}

// Calls copy(place in a chunk, address of a page, bytes) for each page.
template <typename Copy>
void ByPages(benchmark::State& state, const Copy& copy) {
  Setup setup(state.range(0));
  const BufferInfo& buffer = setup.pool->buffer(0, 0);
  const int64_t item = state.range(0);
  const int64_t last = kChunkBytes - item;
  for (auto _ : state) {
    int64_t at = 0;
    for (const int64_t page : setup.pages) {
      copy(setup.packed.data() + at, buffer.address + page * item, item);
      at = at + item > last ? 0 : at + item;
    }
    benchmark::ClobberMemory();
  }
  SetBytes(state, setup);
}

// The same copies with nothing around them: page by page into a buffer of a chunk's size.
void BM_MemcpyGather(benchmark::State& state) {
  ByPages(state, [](std::byte* packed, const std::byte* page, int64_t bytes) {
    std::memcpy(packed, page, bytes);
  });
}

void BM_MemcpyScatter(benchmark::State& state) {
  ByPages(state, [](const std::byte* packed, std::byte* page, int64_t bytes) {
    std::memcpy(page, packed, bytes);
  });
}

// Requests come and go in random order in a pool that is nine tenths full.
void BM_AllocateFree(benchmark::State& state) {
  const int64_t request_pages = state.range(0);
  const int64_t pool_pages = state.range(1);
  PageAllocator allocator = Must(PageAllocator::Create(pool_pages, 1));
  std::mt19937_64 random(1);
  std::vector<PageRuns> live;
  // Halves and whole requests, so that holes of several sizes appear.
  const auto pages_of_next = [&] { return std::max<int64_t>(1, request_pages >> (random() % 2)); };
  while (allocator.num_free() > pool_pages / 10 + request_pages) {
    live.push_back(Must(allocator.Allocate(pages_of_next())));
  }
  for (auto _ : state) {
    PageRuns& victim = live[random() % live.size()];
    if (!allocator.Free(victim).ok()) std::abort();
    victim = Must(allocator.Allocate(std::min(pages_of_next(), allocator.num_free())));
  }
  state.SetItemsProcessed(state.iterations());
  state.counters["free_runs"] = static_cast<double>(allocator.num_free_runs());
}

// 1,024 sequences that have grown from prompts of up to 512 tokens in a pool nine tenths full;
// every 256 steps they are replaced, which is not timed.
class DecodeBatch {
 public:
  static constexpr int64_t kSequences = 1024;
  static constexpr int64_t kSteps = 256;

  explicit DecodeBatch(int64_t page_size)
      : allocator(Must(TokenSlotAllocator::Create(kPoolPages * page_size, page_size))) {
    const int64_t others = kPoolPages / 10 * 9 / kOtherPages;
    for (int64_t i = 0; i < others; ++i) {
      auto slots = Must(allocator.Allocate(kOtherPages * page_size));
      if (i % 2 == 0) holes_.push_back(std::move(slots));
    }
    for (const auto& hole : holes_) Check(allocator.Free(hole));
    Restart();
  }
  void Restart() {
    for (auto& slots : slots_) Check(allocator.Free(slots));
    tokens.clear();
    last.clear();
    slots_.clear();
    for (int64_t i = 0; i < kSequences; ++i) {
      const int64_t prompt = 1 + static_cast<int64_t>(random_() % 512);
      slots_.push_back(Must(allocator.Extend({{0}}, {{prompt}}, {{0}})));
      tokens.push_back(prompt + 1);
      last.push_back(slots_.back().back());
    }
    step = 0;
  }
  // What an engine does between two steps.
  void Advance(const std::vector<int32_t>& got) {
    for (int64_t i = 0; i < kSequences; ++i) {
      slots_[i].push_back(got[i]);
      last[i] = got[i];
      ++tokens[i];
    }
    if (++step == kSteps) Restart();
  }

  TokenSlotAllocator allocator;
  std::vector<int64_t> tokens;
  std::vector<int32_t> last;
  int64_t step = 0;

 private:
  static constexpr int64_t kPoolPages = 2000000;
  static constexpr int64_t kOtherPages = 997;
  static void Check(const absl::Status& status) {
    if (!status.ok()) std::abort();
  }

  std::mt19937_64 random_{1};
  std::vector<std::vector<int32_t>> holes_, slots_;
};

void BM_Decode(benchmark::State& state) {
  DecodeBatch batch(state.range(0));
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    const auto got = batch.allocator.Decode(batch.tokens, batch.last);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    state.SetIterationTime(took.count());
    batch.Advance(Must(got));
  }
}

// Runs of pages after a long time, in counters; the time is that of the whole trace.
void BM_Fragmentation(benchmark::State& state) {
  for (auto _ : state) {
    const bench::ChurnResult runs =
        Must(bench::Churn({.full = static_cast<double>(state.range(0)) / 100}));
    state.counters["prompt_runs"] = runs.runs_of_prompt;
    state.counters["sequence_runs"] = runs.runs_of_sequence;
  }
}

void ItemSizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgName("item")->Arg(32768)->Arg(2048)->Arg(1152)->Unit(benchmark::kMillisecond);
}

BENCHMARK(BM_Plan)->Apply(ItemSizes);
BENCHMARK(BM_Gather)->Apply(ItemSizes);
BENCHMARK(BM_MemcpyGather)->Apply(ItemSizes);
BENCHMARK(BM_Scatter)->Apply(ItemSizes);
BENCHMARK(BM_MemcpyScatter)->Apply(ItemSizes);
BENCHMARK(BM_AllocateFree)
    ->ArgNames({"pages", "pool"})
    ->ArgsProduct({{1, 16, 256}, {10000, 100000, 1000000, 10000000}});
BENCHMARK(BM_Decode)->ArgName("page_size")->Arg(1)->Arg(16)->Arg(64)->UseManualTime();
BENCHMARK(BM_Fragmentation)
    ->ArgName("percent_full")
    ->Arg(70)
    ->Arg(90)
    ->Arg(97)
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kvferry

BENCHMARK_MAIN();
