// Plan, gather and scatter against plain loops of memcpy, and what the page allocator costs and
// keeps together. Google Benchmark: kvferry_micro_bench --help.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "bench/churn.h"
#include "bench/must.h"
#include "pool/kv_pool.h"
#include "pool/page_allocator.h"
#include "pool/page_runs.h"
#include "pool/req_to_token_pool.h"
#include "pool/token_slot_allocator.h"
#include "transport/stream_plan.h"

namespace kvferry {

using bench::Must;

namespace {

constexpr int64_t kChunkBytes = 256 << 10;  // What the packed path gathers at a time.
constexpr int64_t kMovedBytes = 64 << 20;   // One pass: beyond any cache that pages would stay in.

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

// The same of one request in as many tensors as a model has: what is planned are pages, and the
// items of all tensors follow by arithmetic.
void BM_PlanRequest(benchmark::State& state) {
  const int64_t layers = state.range(0), pages = state.range(1);
  const auto layout = KvLayout::Mha(layers, 1, 8, 128, DType::kBFloat16);
  const auto pool = Must(KvPool::Create(layout, 2 * pages, KvPool::TakesRoom::kAsTouched));
  const std::vector<int64_t> list = RandomPages(2 * pages, pages, 1);
  for (auto _ : state) {
    benchmark::DoNotOptimize(Must(StreamPlan::Create(pool, Must(PageRuns::FromPages(list)))));
  }
  state.counters["items"] = static_cast<double>(2 * layers * pages);
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
    plan.Gather(at, chunk).IgnoreError();  // Cannot fail on the host.
  });
}

void BM_Scatter(benchmark::State& state) {
  ByChunks(state, [](const StreamPlan& plan, int64_t at, std::span<std::byte> chunk) {
    plan.Scatter(at, chunk).IgnoreError();
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

// Requests come and go in random order in a pool that is nine tenths full. `allocate` and `free`
// stand for either allocator, `pages_left` for the pages it has free.
template <typename Request, typename Allocate, typename Free, typename PagesLeft>
void ComeAndGo(benchmark::State& state, const Allocate& allocate, const Free& free,
               const PagesLeft& pages_left) {
  const int64_t request_pages = state.range(0), pool_pages = state.range(1);
  std::mt19937_64 random(1);
  std::vector<Request> live;
  // Halves and whole requests, so that holes of several sizes appear.
  const auto pages_of_next = [&] { return std::max<int64_t>(1, request_pages >> (random() % 2)); };
  while (pages_left() > pool_pages / 10 + request_pages) {
    live.emplace_back();
    Must(allocate(pages_of_next(), &live.back()));
  }
  Request* next = live.data();
  for (auto _ : state) {
    Request& victim = *std::exchange(next, &live[random() % live.size()]);
    // An engine has been using what it gives back: this list of ours is not what is measured.
    __builtin_prefetch(next);
    if (!free(victim).ok()) std::abort();
    Must(allocate(std::min(pages_of_next(), pages_left()), &victim));
  }
}

void BM_AllocateFree(benchmark::State& state) {
  PageAllocator allocator = Must(PageAllocator::Create(state.range(1), 1));
  ComeAndGo<PageRuns>(
      state,
      [&](int64_t count, PageRuns* pages) {
        *pages = Must(allocator.Allocate(count));
        return absl::OkStatus();
      },
      [&](const PageRuns& pages) { return allocator.Free(pages); },
      [&] { return allocator.num_free(); });
  state.counters["free_runs"] = static_cast<double>(allocator.num_free_runs());
}

// Of one page more than any free run has, where every second of these is free: all of them lie in
// its bin.
void BM_AllocateOfNoFit(benchmark::State& state) {
  const int64_t run_pages = state.range(0), pool_pages = state.range(1);
  PageAllocator allocator = Must(PageAllocator::Create(pool_pages, 0));
  std::vector<PageRuns> runs;
  while (allocator.num_free() >= run_pages) runs.push_back(Must(allocator.Allocate(run_pages)));
  for (size_t i = 0; i < runs.size(); i += 2) {
    if (!allocator.Free(runs[i]).ok()) std::abort();
  }
  for (auto _ : state) {
    if (!allocator.Free(Must(allocator.Allocate(run_pages + 1))).ok()) std::abort();
  }
  state.counters["free_runs"] = static_cast<double>(allocator.num_free_runs());
}

void BM_SlotsAllocateFree(benchmark::State& state) {
  const int64_t page_size = state.range(2);
  auto allocator = Must(TokenSlotAllocator::Create(state.range(1) * page_size, page_size));
  // Slots are written to the rows of a table, as engines keep them.
  const int64_t row_tokens = state.range(0) * page_size;
  auto table = Must(ReqToTokenPool::Create(2 * state.range(1) / state.range(0) + 1, row_tokens));
  struct Request {
    int64_t row = -1;
    std::span<int32_t> slots;
  };
  ComeAndGo<Request>(
      state,
      [&](int64_t pages, Request* request) {
        if (request->row < 0) request->row = Must(table.Allocate(1)).front();
        request->slots = table.table().subspan(request->row * row_tokens, pages * page_size);
        return allocator.AllocateInto(request->slots);
      },
      [&](const Request& request) { return allocator.Free(request.slots); },
      [&] { return allocator.pages().num_free(); });
}

// 1,024 sequences that have grown from prompts of up to 512 tokens in a pool nine tenths full;
// every 256 steps they are replaced, which is not timed.
class DecodeBatch {
 public:
  static constexpr int64_t kSequences = 1024;
  static constexpr int64_t kSteps = 256;
  static constexpr int64_t kPoolPages = 2000000;

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
      slots_.back().reserve(prompt + kSteps);
      tokens.push_back(prompt + 1);
      last.push_back(slots_.back().back());
    }
    step_ = 0;
  }
  // What an engine does between two steps, after a decode that may have come from the caller.
  void Advance() {
    if (got.empty()) got = Must(allocator.Decode(tokens, last));
    for (int64_t i = 0; i < kSequences; ++i) {
      slots_[i].push_back(got[i]);
      last[i] = got[i];
      ++tokens[i];
    }
    got.clear();
    if (++step_ == kSteps) Restart();
  }

  TokenSlotAllocator allocator;
  std::vector<int64_t> tokens;
  std::vector<int32_t> last;
  std::vector<int32_t> got;

 private:
  static constexpr int64_t kOtherPages = 997;
  static void Check(const absl::Status& status) {
    if (!status.ok()) std::abort();
  }

  int64_t step_ = 0;
  std::mt19937_64 random_{1};
  std::vector<std::vector<int32_t>> holes_, slots_;
};

// Times step(batch) for one decoded token of each sequence after the other. A step is shorter than
// an interruption: counter median_ns is what one takes.
template <typename Step>
void ByTokens(benchmark::State& state, const Step& step) {
  DecodeBatch batch(state.range(0));
  std::vector<double> seconds;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    step(batch);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    seconds.push_back(took.count());
    state.SetIterationTime(took.count());
    batch.Advance();
  }
  const auto middle = seconds.begin() + seconds.size() / 2;
  std::nth_element(seconds.begin(), middle, seconds.end());
  state.counters["median_ns"] = *middle * 1e9;
}

void BM_Decode(benchmark::State& state) {
  ByTokens(state, [](DecodeBatch& batch) {
    batch.got = Must(batch.allocator.Decode(batch.tokens, batch.last));
  });
}

// What no checked decode can be faster than, were there no pages to take: a copy of what it
// returns; that, with all that it is given read; and a look at a bit of each sequence's page
// besides.
void BM_DecodeMemcpy(benchmark::State& state) {
  std::vector<int32_t> out(DecodeBatch::kSequences);
  ByTokens(state, [&](DecodeBatch& batch) {
    std::memcpy(out.data(), batch.last.data(), out.size() * sizeof out[0]);
    benchmark::ClobberMemory();
  });
}

void BM_DecodeReadWrite(benchmark::State& state) {
  std::vector<int32_t> out(DecodeBatch::kSequences);
  ByTokens(state, [&](DecodeBatch& batch) {
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = batch.last[i] + static_cast<int32_t>(batch.tokens[i]);
    }
    benchmark::ClobberMemory();
  });
}

void BM_DecodeReadWriteLook(benchmark::State& state) {
  std::vector<int32_t> out(DecodeBatch::kSequences);
  const int shift = std::countr_zero(static_cast<uint64_t>(state.range(0))) + 6;
  const std::vector<uint64_t> words((DecodeBatch::kPoolPages >> 6) + 2);
  ByTokens(state, [&](DecodeBatch& batch) {
    uint64_t seen = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = batch.last[i] + static_cast<int32_t>(batch.tokens[i]);
    }
    for (const int32_t last : batch.last) seen |= words[last >> shift];
    benchmark::DoNotOptimize(seen);
    benchmark::ClobberMemory();
  });
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

void PageSizes(benchmark::internal::Benchmark* benchmark) {
  // By count, because what is not timed takes longer than what is.
  benchmark->ArgName("page_size")->Arg(1)->Arg(16)->Arg(64)->UseManualTime()->Iterations(4096);
}

BENCHMARK(BM_Plan)->Apply(ItemSizes);
BENCHMARK(BM_PlanRequest)
    ->ArgNames({"layers", "pages"})
    ->Args({32, 4096})
    ->Args({128, 4096})
    ->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Gather)->Apply(ItemSizes);
BENCHMARK(BM_MemcpyGather)->Apply(ItemSizes);
BENCHMARK(BM_Scatter)->Apply(ItemSizes);
BENCHMARK(BM_MemcpyScatter)->Apply(ItemSizes);
BENCHMARK(BM_AllocateFree)
    ->ArgNames({"pages", "pool"})
    ->ArgsProduct({{1, 16, 256}, {10000, 100000, 1000000, 10000000}});
BENCHMARK(BM_AllocateOfNoFit)
    ->ArgNames({"run", "pool"})
    ->ArgsProduct({{64}, {10000, 100000, 1000000, 10000000}});
BENCHMARK(BM_SlotsAllocateFree)
    ->ArgNames({"pages", "pool", "page_size"})
    ->ArgsProduct({{256}, {10000, 100000, 1000000, 10000000}, {1, 16}});
BENCHMARK(BM_Decode)->Apply(PageSizes);
BENCHMARK(BM_DecodeMemcpy)->Apply(PageSizes);
BENCHMARK(BM_DecodeReadWrite)->Apply(PageSizes);
BENCHMARK(BM_DecodeReadWriteLook)->Apply(PageSizes);
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
