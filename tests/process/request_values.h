#pragma once

// What requests say, whatever pages they lie in.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "pool/kv_pool.h"
#include "pool/page_cut.h"

namespace kvferry {

// A request of a seed has in each buffer, for each of its tokens and heads, small whole numbers,
// which every dtype but uint8 holds exactly, as it does when they are scaled by a half or by two.
// This reads and writes them in one pool, whose pages are NHD or HND.
class RequestValues {
 public:
  // A value is what is stored times `scale`.
  RequestValues(std::shared_ptr<KvPool> pool, float scale);

  // The request's first pages, in layers [first_layer, end_layer).
  void Write(uint64_t seed, int64_t first_layer, int64_t end_layer,
             const std::vector<int64_t>& pages) const;
  // `pages` hold what its pages from `first_page` on do, in layers [0, end_layer): those heads of
  // each token below `tokens`.
  testing::AssertionResult Holds(uint64_t seed, int64_t first_page, int64_t end_layer,
                                 const std::vector<int64_t>& pages, int64_t tokens,
                                 HeadRange heads) const;

 private:
  static constexpr int kLargest = 8;

  int ValueAt(std::span<const std::byte> page, int64_t at) const;
  // Calls fn(first value's index in the page, the row's values) for each token and head of a page.
  template <typename Fn>
  void ForEachRow(uint64_t seed, int64_t buffer, int64_t page, const Fn& fn) const;

  const std::shared_ptr<KvPool> pool_;
  std::vector<std::vector<std::byte>> stored_;  // Of the values from -kLargest on.
  std::map<uint32_t, int> values_;              // By what is stored.
};

}  // namespace kvferry
