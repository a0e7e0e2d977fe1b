#include "tests/support/kv_pattern.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <set>

#include "tests/support/status.h"
#include "tests/support/test_config.h"

namespace kvferry {
namespace {

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The bytes of a pool, wherever it lies: at once, as each look at a device takes its time.
class BytesOf {
 public:
  explicit BytesOf(const KvPool& pool) : pool_(pool) {
    if (pool.memory().on_host()) return;
    for (const BufferInfo& buffer : pool.buffer_infos()) {
      std::vector<std::byte>& bytes = copies_.emplace_back(static_cast<size_t>(buffer.bytes));
      const BytesMove all{buffer.address, bytes.data(), buffer.bytes};
      EXPECT_TRUE(IsOk(pool.memory().MoveApart({&all, 1})));
    }
  }

  std::span<const std::byte> Page(int64_t buffer, int64_t page) const {
    const BufferInfo& info = pool_.buffer_infos()[buffer];
    const std::byte* first = copies_.empty() ? info.address : copies_[buffer].data();
    return {first + page * info.item_bytes, static_cast<size_t>(info.item_bytes)};
  }

 private:
  const KvPool& pool_;
  std::vector<std::vector<std::byte>> copies_;  // Of the buffers; none on the host.
};

::testing::AssertionResult PageHolds(const BytesOf& pool, int64_t buffer, int64_t page,
                                     uint64_t seed, int64_t source_page) {
  const std::span<const std::byte> got = pool.Page(buffer, page);
  std::vector<std::byte> want(got.size());
  PatternBytes(seed, buffer, source_page, want);
  const auto [bad, expected] = std::mismatch(got.begin(), got.end(), want.begin());
  if (bad == got.end()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "buffer " << buffer << " page " << page << " (source page " << source_page << ", seed "
         << seed << ") differs at byte " << bad - got.begin() << " of " << got.size();
}

::testing::AssertionResult HoldsLayers(const KvLayout& layout, const BytesOf& bytes,
                                       std::span<const int64_t> pages, uint64_t source_seed,
                                       std::span<const int64_t> source_pages, int64_t first_layer,
                                       int64_t end_layer) {
  for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
    for (int64_t layer = first_layer; layer < end_layer; ++layer) {
      for (size_t i = 0; i < pages.size(); ++i) {
        auto result = PageHolds(bytes, layout.buffer_index(layer, tensor), pages[i], source_seed,
                                source_pages[i]);
        if (!result) return result << "; layer " << layer << " tensor " << tensor;
      }
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace

std::shared_ptr<const PoolMemory> (*memory_of_device)() = nullptr;

std::vector<std::byte> ReadPage(const KvPool& pool, int64_t buffer, int64_t page) {
  const BufferInfo& info = pool.buffer_infos()[buffer];
  std::vector<std::byte> bytes(static_cast<size_t>(info.item_bytes));
  const BytesMove all{info.address + page * info.item_bytes, bytes.data(), info.item_bytes};
  EXPECT_TRUE(IsOk(pool.memory().MoveApart({&all, 1})));
  return bytes;
}

void WritePattern(const KvPool& pool, std::span<const int64_t> buffers,
                  std::span<const int64_t> pages, uint64_t seed,
                  std::span<const int64_t> of_pages) {
  std::deque<std::vector<std::byte>> bytes;
  std::vector<BytesMove> moves;
  for (const int64_t buffer : buffers) {
    const BufferInfo& info = pool.buffer_infos()[buffer];
    for (size_t i = 0; i < pages.size(); ++i) {
      std::vector<std::byte>& page = bytes.emplace_back(static_cast<size_t>(info.item_bytes));
      PatternBytes(seed, buffer, of_pages[i], page);
      moves.push_back({page.data(), info.address + pages[i] * info.item_bytes, info.item_bytes});
    }
  }
  EXPECT_TRUE(IsOk(pool.memory().MoveApart(moves)));
}

void PatternBytes(uint64_t seed, int64_t buffer, int64_t page, std::span<std::byte> out) {
  uint64_t state =
      Mix(seed ^ Mix(static_cast<uint64_t>(buffer) << 32 | static_cast<uint64_t>(page)));
  for (size_t i = 0; i < out.size(); i += sizeof(state)) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const uint64_t word = state ^ (state >> 29);
    std::memcpy(out.data() + i, &word, std::min(sizeof(word), out.size() - i));
  }
}

void FillPattern(const KvPool& pool, uint64_t seed, std::span<const int64_t> pages) {
  std::vector<int64_t> buffers(pool.layout().num_buffers());
  std::iota(buffers.begin(), buffers.end(), 0);
  WritePattern(pool, buffers, pages, seed, pages);
}

void FillPattern(const KvPool& pool, uint64_t seed) {
  std::vector<int64_t> all(pool.num_pages());
  std::iota(all.begin(), all.end(), 0);
  FillPattern(pool, seed, all);
}

namespace {

// As an engine's: each buffer is an allocation of its own.
std::shared_ptr<KvPool> MakeScatteredPool(const KvLayout& layout, int64_t num_pages) {
  auto memory = std::make_shared<std::vector<std::vector<std::byte>>>();
  std::vector<BufferInfo> buffers;
  for (int64_t buffer = 0; buffer < layout.num_buffers(); ++buffer) {
    const int64_t item_bytes = layout.item_bytes(buffer / layout.num_layers);
    memory->emplace_back(num_pages * item_bytes);
    buffers.push_back({memory->back().data(), num_pages * item_bytes, item_bytes});
  }
  return Must(KvPool::Adopt(layout, buffers, memory));
}

std::shared_ptr<KvPool> MakePool(const KvLayout& layout, int64_t num_pages) {
  if (PoolsLieOnADevice()) return Must(KvPool::CreateIn(layout, num_pages, memory_of_device()));
  switch (PathUnderTest()) {
    case TestPath::kArena:
      return Must(KvPool::CreateIn(layout, num_pages, HostMemory()));
    case TestPath::kDirect:
      return MakeScatteredPool(layout, num_pages);
    case TestPath::kInPlace:
    case TestPath::kTcp:
    case TestPath::kUcx:
      break;
  }
  return Must(KvPool::Create(layout, num_pages));
}

}  // namespace

std::shared_ptr<KvPool> MakePatternPool(const KvLayout& layout, int64_t num_pages, uint64_t seed) {
  std::shared_ptr<KvPool> pool = MakePool(layout, num_pages);
  FillPattern(*pool, seed);
  return pool;
}

::testing::AssertionResult HoldsPages(const KvPool& pool, std::span<const int64_t> pages,
                                      uint64_t source_seed, std::span<const int64_t> source_pages,
                                      int64_t first_layer, int64_t end_layer) {
  return HoldsLayers(pool.layout(), BytesOf(pool), pages, source_seed, source_pages, first_layer,
                     end_layer);
}

::testing::AssertionResult HoldsExactly(const KvPool& pool, uint64_t own_seed,
                                        std::span<const int64_t> pages, uint64_t source_seed,
                                        std::span<const int64_t> source_pages) {
  const BytesOf bytes(pool);
  const std::set<int64_t> moved(pages.begin(), pages.end());
  for (int64_t buffer = 0; buffer < pool.layout().num_buffers(); ++buffer) {
    for (int64_t page = 0; page < pool.num_pages(); ++page) {
      if (moved.contains(page)) continue;
      auto result = PageHolds(bytes, buffer, page, own_seed, page);
      if (!result) return result << "; the page was not asked for";
    }
  }
  return HoldsLayers(pool.layout(), bytes, pages, source_seed, source_pages, 0,
                     pool.layout().num_layers);
}

::testing::AssertionResult IsUntouched(const KvPool& pool, uint64_t seed) {
  return HoldsExactly(pool, seed, {}, 0, {});
}

std::vector<int64_t> MakePages(const std::string& shape, int64_t count, int64_t pool_pages,
                               std::mt19937_64* random) {
  std::vector<int64_t> pages(pool_pages);
  std::iota(pages.begin(), pages.end(), 0);
  if (shape == "rand") {
    std::shuffle(pages.begin(), pages.end(), *random);
  } else if (shape == "runs8") {
    std::vector<int64_t> starts;
    for (int64_t page = 0; page + 8 <= pool_pages; page += 8) starts.push_back(page);
    std::shuffle(starts.begin(), starts.end(), *random);
    pages.clear();
    for (const int64_t start : starts) {
      for (int64_t i = 0; i < 8; ++i) pages.push_back(start + i);
    }
  }
  pages.resize(count);
  return pages;
}

}  // namespace kvferry
