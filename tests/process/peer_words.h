#pragma once

// The words of the lines that a peer under test is driven by.

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
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

}  // namespace kvferry
