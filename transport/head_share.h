#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/kv_layout.h"
#include "pool/page_cut.h"

namespace kvferry {

// Which of a model's KV heads a pool holds, if it is a tensor-parallel rank's: as many as its
// layout says, from `first` on, of `total`. A total of 0: it holds all of them. Peers may hold
// others.
struct HeadShare {
  int64_t first = 0;
  int64_t total = 0;

  bool operator==(const HeadShare&) const = default;
};

// INVALID_ARGUMENT, naming the numbers, when pages of that layout cannot be such a share.
absl::Status CheckHeadShare(const KvLayout& layout, HeadShare share);
// The model's heads that the pool holds, after CheckHeadShare(). A count of 0: all, whatever they
// are, of a layout whose tensors differ in heads.
HeadRange HeadsOf(const KvLayout& layout, HeadShare share);
// Which heads of the pool's own those of the model's are; a range of 0 from 0 on stands for all it
// has. OUT_OF_RANGE, naming both, when it does not hold them all, INVALID_ARGUMENT for none.
absl::StatusOr<HeadRange> LocalHeads(const KvLayout& layout, HeadShare share, HeadRange heads);

// Why two pools cannot exchange pages, of any heads that both hold: the first difference; empty
// when they can. Both shares have been checked.
std::string DifferenceBetween(const KvLayout& layout, HeadShare share, const KvLayout& other,
                              HeadShare others);

}  // namespace kvferry
