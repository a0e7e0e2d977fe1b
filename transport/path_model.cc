#include "transport/path_model.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "absl/status/statusor.h"
#include "base/cpu_seconds.h"
#include "base/slab.h"
#include "pool/bulk_copy.h"

namespace kvferry {
namespace {

constexpr double kWorthASecondCopy = 0.85;
// By copies alone, measured while others may have been at work: half of it can be chance.
constexpr double kWorthBelieving = 0.5;
constexpr double kWorthTrying = 2;
// What is worse is tried so seldom that it costs one part in so many of the time.
constexpr double kPartForTries = 128;
constexpr double kMostWorse = 1 << 13;
// A machine that stopped for a moment says nothing about its copies.
constexpr double kMostAtOnce = 4;
// Of a new transfer against what was expected before it.
constexpr double kWeight = 0.25;
// What copies cost counts as so many transfers: on this host it is most of what they take.
constexpr double kCopiesCount = 3;
constexpr double kCopiesCountAfar = 1;

constexpr int kSmallestPieceLog = 8;
constexpr int64_t kSizes[] = {1 << 20, 32 << 20};

constexpr int64_t kHalfBytes = 4 << 20;
constexpr int64_t kChunkBytes = 256 << 10;

// A pool is larger than any cache, and what a transfer reads has not been looked at for long.
void DropFromCaches([[maybe_unused]] const std::byte* memory, [[maybe_unused]] int64_t bytes) {
#ifdef __SSE2__
  constexpr int64_t kLine = 64;
  for (int64_t at = 0; at < bytes; at += kLine) _mm_clflush(memory + at);
  _mm_mfence();
#endif
}

// Of a processor, that this thread has had: an engine that starts keeps them busy, and what others
// take is no part of a copy.
double SecondsOfThread() { return CpuSeconds(CLOCK_THREAD_CPUTIME_ID); }

// Copies all pieces of one half to the other, and returns the seconds a byte. Pieces come in an
// order in which no processor foresees the next; of a chunk, bytes lie one after another.
template <void (*kCopy)(std::byte*, const std::byte*, size_t)>
double CopyAll(std::byte* to, const std::byte* from, int64_t piece_bytes, bool chunk_to,
               bool chunk_from) {
  const int64_t pieces = kHalfBytes / piece_bytes;
  if (!chunk_from) DropFromCaches(from, kHalfBytes);
  const double begin = SecondsOfThread();
  CopyAhead<kCopy> copies;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t far = (i * 173 + 5) % pieces * piece_bytes;  // 173 is odd, pieces a power of two.
    const int64_t near = i * piece_bytes % kChunkBytes;
    std::byte* const target = to + (chunk_to ? near : kHalfBytes - piece_bytes - far);
    const std::byte* const source = from + (chunk_from ? near : far);
    copies.Add(target, std::span(source, piece_bytes));
  }
  copies.Finish();
  FinishBulkCopies();
  return (SecondsOfThread() - begin) / static_cast<double>(kHalfBytes);
}

CopyCost MeasureCopy(std::byte* memory, bool chunk_to, bool chunk_from) {
  constexpr int64_t kSmall = 1 << 10;
  constexpr int64_t kLarge = 16 << 10;
  const auto copy = [&](int64_t piece_bytes) {
    const auto all = chunk_to ? &CopyAll<PlainCopy> : &CopyAll<BulkCopy>;
    return all(memory, memory + kHalfBytes, piece_bytes, chunk_to, chunk_from);
  };
  const double small = copy(kSmall);
  const double large = copy(kLarge);
  const double piece_seconds = std::max(0.0, small - large) / (1.0 / kSmall - 1.0 / kLarge);
  return {std::max(0.0, large - piece_seconds / kLarge), piece_seconds};
}

int PieceClass(int64_t piece_bytes, int classes) {
  const int log = std::bit_width(static_cast<uint64_t>(piece_bytes)) - 1;
  return std::clamp(log - kSmallestPieceLog, 0, classes - 1);
}

}  // namespace

CopyCosts MeasureCopyCosts() {
  const absl::StatusOr<std::shared_ptr<std::byte>> memory = MapSlab(2 * kHalfBytes);
  if (!memory.ok()) return {};
  std::memset(memory->get(), 1, 2 * kHalfBytes);
  return {MeasureCopy(memory->get(), false, false), MeasureCopy(memory->get(), true, false),
          MeasureCopy(memory->get(), false, true)};
}

const CopyCosts& MeasuredCopyCosts() {
  static const CopyCosts costs = MeasureCopyCosts();
  return costs;
}

void PathModel::Expect(absl::FunctionRef<std::array<double, 2>(int64_t)> costs) {
  for (int i = 0; i < kPieceClasses * kSizeClasses; ++i) {
    classes_[i].byte_seconds = costs(int64_t{1} << (kSmallestPieceLog + i % kPieceClasses));
  }
}

// A power of two, as a multiple of others.
uint64_t PathModel::TryEvery(double times_worse) {
  return std::bit_ceil(static_cast<uint64_t>(kPartForTries * std::min(times_worse, kMostWorse)));
}

PathModel::PathModel(const CopyCosts& costs) {
  Expect([&](int64_t piece_bytes) -> std::array<double, 2> {
    // Both sides of the arena work at the same time.
    return {costs.page_to_page.PerByte(piece_bytes),
            std::max(costs.gather.PerByte(piece_bytes), costs.scatter.PerByte(piece_bytes))};
  });
}

PathModel::PathModel(const CopyCosts& costs, const ReadCosts& reads) : afar_(true) {
  const CopyCost read{static_cast<double>(reads.mib_ns) * 1e-9 / (1 << 20),
                      static_cast<double>(reads.read_ns) * 1e-9};
  Expect([&](int64_t piece_bytes) -> std::array<double, 2> {
    const double scatter = costs.scatter.PerByte(piece_bytes);
    // A chunk has to cross too, in one piece, and is put together before it is scattered.
    const double packed =
        std::max(costs.gather.PerByte(piece_bytes), scatter + costs.page_to_page.byte_seconds);
    return {read.PerByte(piece_bytes) + scatter, read.byte_seconds + packed};
  });
}

int PathModel::ClassOf(const Work& work) {
  const auto size = std::lower_bound(std::begin(kSizes), std::end(kSizes), work.bytes);
  return static_cast<int>(size - std::begin(kSizes)) * kPieceClasses +
         PieceClass(work.piece_bytes, kPieceClasses);
}

PageWay PathModel::Choose(const Work& work, bool can_tell) {
  Class& its = classes_[ClassOf(work)];
  const auto [in_place, arena] = its.byte_seconds;
  const bool known = its.seen[0] > 0 && its.seen[1] > 0;
  const bool believed = known || afar_;
  const bool arena_pays = arena < (believed ? kWorthASecondCopy : kWorthBelieving) * in_place;
  const auto [best, other] = arena_pays ? std::pair(arena, in_place) : std::pair(in_place, arena);
  const bool unseen = its.seen[arena_pays ? 0 : 1] == 0;
  const bool other_may_do = other < kWorthTrying * best || (unseen && !afar_);
  if (!can_tell) return arena_pays ? PageWay::kArena : PageWay::kInPlace;
  ++its.choices;
  const bool soon = afar_ && unseen && its.choices > 1 && std::has_single_bit(its.choices);
  const uint64_t every = other_may_do ? kTryEvery : TryEvery(best > 0 ? other / best : kMostWorse);
  const bool try_other = (other_may_do && soon) || its.choices % every == 0;
  return arena_pays != try_other ? PageWay::kArena : PageWay::kInPlace;
}

void PathModel::Observe(PageWay way, const Work& work, double seconds) {
  Class& its = classes_[ClassOf(work)];
  const auto index = static_cast<size_t>(way);
  double& expected = its.byte_seconds[index];
  const double seen = seconds / static_cast<double>(work.bytes);
  const double before =
      static_cast<double>(its.seen[index]++) + (afar_ ? kCopiesCountAfar : kCopiesCount);
  const double weight = std::max(kWeight, 1 / (before + 1));
  if (expected <= 0) {
    expected = seen;
    return;
  }
  // It was tried again after long. Chance makes a transfer slow, not quick.
  if (seen < expected && expected >= kWorthTrying * its.byte_seconds[1 - index] &&
      its.seen[1 - index] > 0) {
    expected = seen;
    return;
  }
  const double most = kMostAtOnce * expected;
  const double factor =
      1 + weight * (std::clamp(seen, expected / kMostAtOnce, most) - expected) / expected;
  expected *= factor;
  if (its.seen[1 - index] == 0 && !afar_) its.byte_seconds[1 - index] *= factor;
}

double PathModel::ExpectedSeconds(PageWay way, const Work& work) const {
  const Class& its = classes_[ClassOf(work)];
  return its.byte_seconds[static_cast<size_t>(way)] * static_cast<double>(work.bytes);
}

}  // namespace kvferry
