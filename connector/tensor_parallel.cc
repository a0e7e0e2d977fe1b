#include "connector/tensor_parallel.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {
namespace {

// Of ranks that hold the same head the decode ranks take different ones in turn.
int64_t RankWith(int64_t head, int64_t total_heads, int64_t prefill_size, int64_t decode_rank) {
  if (prefill_size <= total_heads) return head / (total_heads / prefill_size);
  const int64_t copies = prefill_size / total_heads;
  return head * copies + decode_rank % copies;
}

// By prefill rank.
std::map<int64_t, HeadRange> Wanted(HeadRange heads, int64_t total_heads, int64_t prefill_size,
                                    int64_t decode_rank) {
  std::map<int64_t, HeadRange> wanted;
  for (int64_t head = heads.first; head < heads.first + heads.count; ++head) {
    const int64_t from = RankWith(head, total_heads, prefill_size, decode_rank);
    HeadRange& range = wanted.try_emplace(from, HeadRange{head, 0}).first->second;
    ++range.count;
  }
  return wanted;
}

}  // namespace

absl::StatusOr<HeadRange> HeadsOfRank(int64_t total_heads, int64_t rank, int64_t size) {
  if (total_heads > kMaxTensorParallel || size > kMaxTensorParallel) {
    return absl::InvalidArgumentError(absl::StrCat("tensor-parallel rank ", rank, " of ", size,
                                                   " with ", total_heads, " KV heads: limit ",
                                                   kMaxTensorParallel, " of either"));
  }
  if (total_heads < 1 || size < 1 || rank < 0 || rank >= size ||
      (total_heads % size != 0 && size % total_heads != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor-parallel rank ", rank, " of ", size, " with ", total_heads,
                     " KV heads: one of the numbers of ranks and of heads must be a multiple of "
                     "the other"));
  }
  if (size <= total_heads) return HeadRange{rank * (total_heads / size), total_heads / size};
  return HeadRange{rank / (size / total_heads), 1};
}

absl::StatusOr<std::vector<RankShare>> SharesFor(int64_t total_heads, int64_t rank, int64_t size,
                                                 int64_t prefill_size) {
  KVFERRY_RETURN_IF_ERROR(HeadsOfRank(total_heads, rank, size).status());
  KVFERRY_RETURN_IF_ERROR(HeadsOfRank(total_heads, 0, prefill_size).status());
  std::map<int64_t, HeadRange> own;
  // Of each prefill rank that anybody reads: which one we are, and of how many.
  std::map<int64_t, LeaseReader> readers;
  for (int64_t other = 0; other < size; ++other) {
    const auto wanted =
        Wanted(*HeadsOfRank(total_heads, other, size), total_heads, prefill_size, other);
    for (const auto& [from, heads] : wanted) {
      LeaseReader& reader = readers.try_emplace(from, LeaseReader{0, 0}).first->second;
      if (other == rank) reader.index = reader.of;
      ++reader.of;
    }
    if (other == rank) own = wanted;
  }
  std::vector<RankShare> shares;
  for (int64_t from = 0; from < prefill_size; ++from) {
    const auto heads = own.find(from);
    const auto reader = readers.find(from);
    if (heads != own.end()) {
      shares.push_back({from, heads->second, reader->second});
    } else if (reader == readers.end() && from % size == rank) {
      shares.push_back({from, {}, {}});
    }
  }
  const auto most =
      std::max_element(readers.begin(), readers.end(),
                       [](const auto& a, const auto& b) { return a.second.of < b.second.of; });
  if (most->second.of > LeaseReader::kMax) {
    return absl::InvalidArgumentError(absl::StrCat(most->second.of,
                                                   " decode ranks would read from prefill rank ",
                                                   most->first, ", limit ", LeaseReader::kMax));
  }
  return shares;
}

}  // namespace kvferry
