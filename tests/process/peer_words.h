#pragma once

// The words of the lines that a peer under test is driven by.

#include <cstdlib>
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
#include "tests/process/request_values.h"
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
inline std::optional<std::string> AnswerOfPages(const KvPool& pool, const RequestValues& values,
                                                const Words& words) {
  if (words[0] == "write") {  // SEED FIRST_LAYER END_LAYER PAGES
    values.Write(static_cast<uint64_t>(Number(words[1])), Number(words[2]), Number(words[3]),
                 Numbers(words[4]));
    return "OK";
  }
  if (words[0] == "holds") {  // SEED FIRST_PAGE END_LAYER PAGES TOKENS [HALF], of the heads
    HeadRange heads = {0, pool.layout().num_heads()};
    if (words.size() > 6) heads = {Number(words[6]) * heads.count / 2, heads.count / 2};
    return Answer(values.Holds(static_cast<uint64_t>(Number(words[1])), Number(words[2]),
                               Number(words[3]), Numbers(words[4]), Number(words[5]), heads));
  }
  if (words[0] == "hash") return HashOfPages(pool, Numbers(words[1]));  // PAGES
  if (words[0] == "fill") {                                             // SEED
    FillPattern(pool, static_cast<uint64_t>(Number(words[1])));
    return "OK";
  }
  return std::nullopt;
}

}  // namespace kvferry
