#pragma once

// Who fetches what from whom, where prefill and decode have different numbers of tensor-parallel
// ranks.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "pool/page_cut.h"
#include "transport/fetch_source.h"

namespace kvferry {

// Of ranks of a side, and of heads: SharesFor() goes through all of them.
inline constexpr int64_t kMaxTensorParallel = int64_t{1} << 20;

// The KV heads that a rank holds, as vLLM and SGLang share them out: each rank as many as any
// other, in order; with more ranks than heads, several ranks in a row hold the same one.
// INVALID_ARGUMENT unless 0 <= rank < size, one of size and total_heads is a multiple of the other,
// and neither is above kMaxTensorParallel. One head stands for a latent (MLA), which all ranks
// hold.
absl::StatusOr<HeadRange> HeadsOfRank(int64_t total_heads, int64_t rank, int64_t size);

// What a decode rank has to do with one of the prefill side's ranks.
struct RankShare {
  int64_t rank = 0;  // Of the prefill side.
  // To fetch, of the model's. A count of 0: nothing; the fetch is one of no pages.
  HeadRange heads{};
  LeaseReader reader{};  // For the fetch.
};

// All that decode rank `rank` of `size` has to fetch, of a prefill side of `prefill_size` ranks, by
// their rank. Together, all decode ranks leave no lease of the prefill side's ranks unread: those
// whose heads another rank has too, and that nobody fetches from, are let go. INVALID_ARGUMENT as
// of HeadsOfRank(), and for more than LeaseReader::kMax readers of one lease.
absl::StatusOr<std::vector<RankShare>> SharesFor(int64_t total_heads, int64_t rank, int64_t size,
                                                 int64_t prefill_size);

}  // namespace kvferry
