#pragma once

// The words of the lines that a peer under test is driven by.

#include <cstdlib>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/hash.h"
#include "tests/support/kv_pattern.h"

namespace kvferry {

using Words = std::vector<std::string>;

inline int64_t Number(const std::string& text) {
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value)) std::abort();
  return value;
}

template <typename T = int64_t>
std::vector<T> Numbers(const std::string& text) {
  std::vector<T> numbers;
  for (const absl::string_view word : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    numbers.push_back(static_cast<T>(Number(std::string(word))));
  }
  return numbers;
}

inline std::string Answer(const absl::Status& status) {
  return absl::StrReplaceAll(status.ToString(), {{"\n", " "}});
}

inline std::string Answer(const ::testing::AssertionResult& result) {
  return result ? "OK" : absl::StrReplaceAll(result.message(), {{"\n", " "}});
}

// Whether the pool's pages hold what a source's do: verify SEED SOURCE_PAGES PAGES.
inline std::string Verify(const KvPool& pool, uint64_t own_seed, const Words& words) {
  return Answer(HoldsExactly(pool, own_seed, Numbers(words[3]),
                             static_cast<uint64_t>(Number(words[1])), Numbers(words[2])));
}

// --- What a request of a seed says: its page at position i what page i of that seed's pattern does ---

inline std::vector<int64_t> PositionsOf(int64_t first, size_t count) {
  std::vector<int64_t> positions(count);
  std::iota(positions.begin(), positions.end(), first);
  return positions;
}

inline void WriteRequest(const KvPool& pool, uint64_t seed, int64_t first_layer, int64_t end_layer,
                         const std::vector<int64_t>& pages) {
  const KvLayout& layout = pool.layout();
  std::vector<int64_t> buffers;
  for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
    for (int64_t layer = first_layer; layer < end_layer; ++layer) {
      buffers.push_back(layout.buffer_index(layer, tensor));
    }
  }
  WritePattern(pool, buffers, pages, seed, PositionsOf(0, pages.size()));
}

// `pages` hold those from first_position on, in layers [0, end_layer).
inline ::testing::AssertionResult HoldsRequest(const KvPool& pool, uint64_t seed,
                                               int64_t first_position, int64_t end_layer,
                                               const std::vector<int64_t>& pages) {
  return HoldsPages(pool, pages, seed, PositionsOf(first_position, pages.size()), 0, end_layer);
}

// The same of the heads that reader `half` of two gets. Peers' pages are NHD.
inline ::testing::AssertionResult HoldsHalf(const KvPool& pool, uint64_t seed,
                                            int64_t first_position, int64_t end_layer,
                                            const std::vector<int64_t>& pages, int64_t half) {
  const KvLayout& layout = pool.layout();
  for (int64_t buffer = 0; buffer < layout.num_buffers(); ++buffer) {
    if (buffer % layout.num_layers >= end_layer) continue;
    for (size_t i = 0; i < pages.size(); ++i) {
      const std::vector<std::byte> got = ReadPage(pool, buffer, pages[i]);
      std::vector<std::byte> want(got.size());
      PatternBytes(seed, buffer, first_position + static_cast<int64_t>(i), want);
      const int64_t token_bytes = static_cast<int64_t>(got.size()) / layout.page_size;
      for (size_t byte = 0; byte < got.size(); ++byte) {
        const bool its = static_cast<int64_t>(byte) % token_bytes / (token_bytes / 2) == half;
        if (its && got[byte] != want[byte]) {
          return ::testing::AssertionFailure()
                 << "half " << half << " of buffer " << buffer << " page " << pages[i]
                 << " differs at byte " << byte << ", seed " << seed;
        }
      }
    }
  }
  return ::testing::AssertionSuccess();
}

// One a page, of all its bytes.
inline std::string HashOfPages(const KvPool& pool, const std::vector<int64_t>& pages) {
  std::vector<std::string> hashes;
  for (const int64_t page : pages) {
    std::vector<std::byte> bytes;
    for (int64_t buffer = 0; buffer < pool.layout().num_buffers(); ++buffer) {
      const std::vector<std::byte> item = ReadPage(pool, buffer, page);
      bytes.insert(bytes.end(), item.begin(), item.end());
    }
    hashes.push_back(absl::StrCat(absl::Hex(Xxh3(bytes))));
  }
  return absl::StrJoin(hashes, ",");
}

// What every peer does with the pages of its pool.
inline std::optional<std::string> AnswerOfPages(const KvPool& pool, const Words& words) {
  if (words[0] == "write") {  // SEED FIRST_LAYER END_LAYER PAGES
    WriteRequest(pool, static_cast<uint64_t>(Number(words[1])), Number(words[2]), Number(words[3]),
                 Numbers(words[4]));
    return "OK";
  }
  if (words[0] == "holds") {  // SEED FIRST_POSITION END_LAYER PAGES [HALF]
    if (words.size() > 5) {
      return Answer(HoldsHalf(pool, static_cast<uint64_t>(Number(words[1])), Number(words[2]),
                              Number(words[3]), Numbers(words[4]), Number(words[5])));
    }
    return Answer(HoldsRequest(pool, static_cast<uint64_t>(Number(words[1])), Number(words[2]),
                               Number(words[3]), Numbers(words[4])));
  }
  if (words[0] == "hash") return HashOfPages(pool, Numbers(words[1]));  // PAGES
  if (words[0] == "fill") {                                             // SEED
    FillPattern(pool, static_cast<uint64_t>(Number(words[1])));
    return "OK";
  }
  return std::nullopt;
}

}  // namespace kvferry
