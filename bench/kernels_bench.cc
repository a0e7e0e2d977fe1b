// Kernels of the token pools against what the machine's memory allows: gather, scatter and
// quantised store of random rows, beside plain memcpy loops over the same lists. Both take turns;
// the table has medians of the rounds, and what ours wrote is compared with what it had to write.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/slab.h"
#include "base/thread_pool.h"
#include "bench/kernel_row.h"
#include "bench/must.h"
#include "bench/on_threads.h"
#include "pool/token_copy.h"

namespace kvferry::bench {
namespace {

constexpr int64_t kMovedBytes = 128 << 20;  // A pass, far beyond the caches.

// Touched memory, so that no page fault is timed.
class Memory {
 public:
  explicit Memory(int64_t bytes) : slab_(Must(MapSlab(bytes))) {
    std::memset(slab_.get(), 1, static_cast<size_t>(bytes));
  }
  std::byte* get() const { return slab_.get(); }

 private:
  std::shared_ptr<std::byte> slab_;
};

// ---------------------------------------------------------------- gather and scatter

// Rows of item_bytes bytes at random slots of a pool twice the size of what is moved.
struct Copies {
  explicit Copies(int64_t item_bytes)
      : item(item_bytes),
        count(kMovedBytes / item_bytes),
        pool(2 * count * item),
        packed(count * item),
        slots(RandomSlots(2 * count, count)) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t tag = i * 7919;
      std::memcpy(pool.get() + slots[i] * item, &tag, sizeof tag);
    }
  }
  TokenView PoolView() const {
    return TokenView::Packed(pool.get(), DType::kUint8, 2 * count, 1, item);
  }
  TokenView PackedView() const {
    return TokenView::Packed(packed.get(), DType::kUint8, count, 1, item);
  }
  void MemcpyLoop(bool gather, int threads) const {
    OnThreads(threads, [&](int thread) {
      for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; ++i) {
        std::byte* const row = pool.get() + slots[i] * item;
        std::byte* const place = packed.get() + i * item;
        std::memcpy(gather ? place : row, gather ? row : place, static_cast<size_t>(item));
      }
    });
  }
  bool Right() const {
    for (int64_t i = 0; i < count; ++i) {
      if (std::memcmp(pool.get() + slots[i] * item, packed.get() + i * item,
                      static_cast<size_t>(item)) != 0) {
        return false;
      }
    }
    return true;
  }

  const int64_t item, count;
  const Memory pool, packed;
  const std::vector<int32_t> slots;
};

bool MeasureCopies(int64_t item, ThreadPool* helper, int rounds) {
  const Copies copies(item);
  const auto gather =
      Must(TokenCopy::PlanGather(copies.PoolView(), copies.slots, copies.PackedView()));
  const auto scatter =
      Must(TokenCopy::PlanScatter(copies.PackedView(), copies.PoolView(), copies.slots));
  bool right = true;
  for (const int threads : {1, 2}) {
    for (const bool is_gather : {true, false}) {
      ThreadPool* const pool = threads == 2 ? helper : nullptr;
      const std::string name = absl::StrCat(is_gather ? "gather " : "scatter ", SizeName(item),
                                            ", ", threads, threads == 1 ? " thread" : " threads");
      right &=
          Measure({name, static_cast<double>(kMovedBytes), threads == 1 ? 0.9 : 1.0,
                   [&] { (is_gather ? gather : scatter).Run(pool); },
                   [&] { copies.MemcpyLoop(is_gather, threads); }, [&] { return copies.Right(); }},
                  rounds);
    }
  }
  return right;
}

// ---------------------------------------------------------------- quantised store

// K of 8 heads x 128 at random slots, divided by a scale and stored as fp8.
bool MeasureStore(DType from, DType to, CpuKernels kernels, int rounds) {
  constexpr int64_t kHeads = 8, kDim = 128, kValues = kHeads * kDim;
  const int64_t row_bytes = kValues * (DTypeBytes(from) + DTypeBytes(to));
  const int64_t count = 2 * kMovedBytes / row_bytes;
  const Memory source(count * kValues * DTypeBytes(from));
  const Memory pool(2 * count * kValues * DTypeBytes(to));
  const std::vector<int32_t> slots = RandomSlots(2 * count, count);
  std::vector<float> values(kValues);
  std::mt19937_64 random(2);
  for (float& value : values) value = static_cast<float>(random() % 2000) - 1000;
  std::vector<std::byte> row(kValues * DTypeBytes(from));
  CastBetween(DType::kFloat32, from)(reinterpret_cast<const std::byte*>(values.data()), row.data(),
                                     kValues, 1, 1);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(source.get() + i * static_cast<int64_t>(row.size()), row.data(), row.size());
  }
  TokenView stored = TokenView::Packed(pool.get(), to, 2 * count, kHeads, kDim);
  stored.scale = 2.5F;
  std::vector<std::byte> want(kValues * DTypeBytes(to));
  CastBetween(from, to, CpuKernels::kPortable)(row.data(), want.data(), kValues, 1, stored.scale);
  const auto store = Must(TokenCopy::PlanScatter(
      TokenView::Packed(source.get(), from, count, kHeads, kDim), stored, slots, kernels));
  // As many bytes read and written in all, half and half, in rows at the same slots.
  const int64_t half = row_bytes / 2;
  const Memory other(count * half), target(2 * count * half);
  return Measure({absl::StrCat("store ", DTypeName(from), " as ", DTypeName(to).substr(0, 11), ", ",
                               CpuKernelsName(kernels)),
                  static_cast<double>(count * half), 0.5, [&] { store.Run(); },
                  [&] {
                    for (int64_t i = 0; i < count; ++i) {
                      std::memcpy(target.get() + slots[i] * half, other.get() + i * half,
                                  static_cast<size_t>(half));
                    }
                  },
                  [&] {
                    return std::all_of(slots.begin(), slots.end(), [&](int32_t slot) {
                      return std::memcmp(stored.row(slot), want.data(), want.size()) == 0;
                    });
                  }},
                 rounds);
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  using namespace kvferry;         // NOLINT(google-build-using-namespace)
  using namespace kvferry::bench;  // NOLINT(google-build-using-namespace)
  CLI::App app("Gather, scatter and store of token rows beside plain memcpy loops.");
  int rounds = 9;
  app.add_option("--reps", rounds, "measured rounds of each row")->check(CLI::Range(1, 1000));
  std::string only;
  app.add_option("--only", only, "rows whose names have this in them");
  CLI11_PARSE(app, argc, argv);
  MeasureOnly(only);
  PrintHead("kernel, random rows", "memcpy");
  const auto helper = Must(ThreadPool::Create(1));
  bool right = true;
  for (const int64_t item : {32768, 2048, 1152}) right &= MeasureCopies(item, helper.get(), rounds);
  for (const DType from : {DType::kBFloat16, DType::kFloat32}) {
    for (const CpuKernels kernels : kAllCpuKernels) {
      if (!CanRun(kernels)) continue;
      right &= MeasureStore(from, DType::kFloat8E4M3, kernels, rounds);
    }
  }
  return right ? 0 : 1;
}
