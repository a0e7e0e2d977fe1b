#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace kvferry {

// The pages of a pool that nobody uses.
class FreePages {
 public:
  using Pages = std::vector<int64_t>;

  explicit FreePages(int64_t count = 0) : free_(count) { std::iota(free_.begin(), free_.end(), 0); }
  bool Has(int64_t count) const { return count <= static_cast<int64_t>(free_.size()); }
  // As many as it has, at most.
  Pages Take(int64_t count, std::mt19937_64& random) {
    std::shuffle(free_.begin(), free_.end(), random);
    const Pages taken(free_.end() - count, free_.end());
    free_.resize(free_.size() - count);
    return taken;
  }
  void GiveBack(const Pages& pages) { free_.insert(free_.end(), pages.begin(), pages.end()); }
  const Pages& all() const { return free_; }

 private:
  Pages free_;
};

}  // namespace kvferry
