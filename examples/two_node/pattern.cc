#include "examples/two_node/pattern.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kvferry::examples {
namespace {

// The finalizer of SplitMix64: each bit of the input changes half of the output's.
constexpr uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

constexpr size_t kBlockWords = 512;
using Block = std::array<uint64_t, kBlockWords>;

// Calls visit(offset, expected bytes) block by block, until it returns false.
template <typename Visit>
bool ForEachBlock(uint64_t key, size_t bytes, const Visit& visit) {
  Block block;
  for (size_t offset = 0; offset < bytes; offset += sizeof(block)) {
    const uint64_t first = key + offset / sizeof(uint64_t);
    for (size_t i = 0; i < kBlockWords; ++i) {
      const uint64_t x = (first + i) * 0x9e3779b97f4a7c15;
      block[i] = x ^ (x >> 29);
    }
    const auto expected = std::as_bytes(std::span(block));
    if (!visit(offset, expected.first(std::min(sizeof(block), bytes - offset)))) return false;
  }
  return true;
}

uint64_t KeyOf(uint64_t salt, int64_t layer, int64_t tensor, int64_t page) {
  return Mix(Mix(Mix(salt + layer) + tensor) + page);
}

bool IsZero(std::span<const std::byte> bytes) {
  return bytes.empty() || (bytes[0] == std::byte{0} &&
                           std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

}  // namespace

void Pattern::Fill(std::span<std::byte> bytes, int64_t layer, int64_t tensor, int64_t page) const {
  ForEachBlock(KeyOf(salt_, layer, tensor, page), bytes.size(),
               [&](size_t offset, std::span<const std::byte> expected) {
                 std::memcpy(bytes.data() + offset, expected.data(), expected.size());
                 return true;
               });
}

bool Pattern::Matches(std::span<const std::byte> bytes, int64_t layer, int64_t tensor,
                      int64_t page) const {
  return ForEachBlock(KeyOf(salt_, layer, tensor, page), bytes.size(),
                      [&](size_t offset, std::span<const std::byte> expected) {
                        return std::memcmp(bytes.data() + offset, expected.data(),
                                           expected.size()) == 0;
                      });
}

void Pattern::FillLayer(const KvPool& pool, const PageRuns& pages, int64_t layer) const {
  const std::vector<int64_t> ids = pages.ToPages();
  for (int64_t tensor = 0; tensor < pool.layout().num_tensors(); ++tensor) {
    for (const int64_t page : ids) Fill(pool.page(layer, tensor, page), layer, tensor, page);
  }
}

void Pattern::FillPages(const KvPool& pool, const PageRuns& pages) const {
  for (int64_t layer = 0; layer < pool.layout().num_layers; ++layer) FillLayer(pool, pages, layer);
}

absl::Status Pattern::Verify(const KvPool& pool, const PageRuns& local,
                             const PageRuns& remote) const {
  constexpr int64_t kNotFetched = -1;
  std::vector<int64_t> remote_of(pool.num_pages(), kNotFetched);
  for (int64_t i = 0; i < local.num_pages(); ++i) remote_of[local.PageAt(i)] = remote.PageAt(i);

  int64_t wrong = 0;
  std::string first;
  const KvLayout& layout = pool.layout();
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
      for (int64_t page = 0; page < pool.num_pages(); ++page) {
        const std::span<const std::byte> bytes = pool.page(layer, tensor, page);
        const bool fetched = remote_of[page] != kNotFetched;
        if (fetched ? Matches(bytes, layer, tensor, remote_of[page]) : IsZero(bytes)) continue;
        if (wrong++ == 0) {
          first = absl::StrCat(
              "layer ", layer, ", tensor ", layout.tensors[tensor].name, ", page ", page,
              fetched ? absl::StrCat(" differs from page ", remote_of[page], " of the prefill side")
                      : " was not fetched but has been written");
        }
      }
    }
  }
  if (wrong == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(wrong, " pages are wrong, the first: ", first));
}

void ZeroPages(const KvPool& pool, const PageRuns& pages) {
  for (const BufferInfo& buffer : pool.buffer_infos()) {
    for (const PageRun& run : pages.runs()) {
      std::memset(buffer.address + run.first * buffer.item_bytes, 0, run.count * buffer.item_bytes);
    }
  }
}

}  // namespace kvferry::examples
