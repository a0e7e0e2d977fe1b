#include "transport/head_share.h"

#include "absl/strings/str_cat.h"

namespace kvferry {

absl::Status CheckHeadShare(const KvLayout& layout, HeadShare share) {
  if (share == HeadShare()) return absl::OkStatus();
  const int64_t held = layout.num_heads();
  if (held == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a share of a model's heads in pages whose tensors differ in heads: ", layout.ToString()));
  }
  if (share.total > KvLayout::kMaxHeads || share.first < 0 || share.total < held ||
      share.first > share.total - held) {
    return absl::InvalidArgumentError(absl::StrCat(
        "heads [", share.first, ", ", share.first, " + ", held, ") are not within the model's ",
        share.total, " (limit ", KvLayout::kMaxHeads, ")"));
  }
  return absl::OkStatus();
}

HeadRange HeadsOf(const KvLayout& layout, HeadShare share) {
  return {share.first, layout.num_heads()};
}

absl::StatusOr<HeadRange> LocalHeads(const KvLayout& layout, HeadShare share, HeadRange heads) {
  if (heads == HeadRange()) return HeadRange();
  if (heads.count == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "heads [", heads.first, ", ", heads.first,
        " + 0) asked, which are none: leave them out for all that the pages hold, or ask for no "
        "pages"));
  }
  const HeadRange held = HeadsOf(layout, share);
  if (heads.first < held.first || heads.first - held.first > held.count - heads.count) {
    return absl::OutOfRangeError(absl::StrCat(
        "heads [", heads.first, ", ", heads.first, " + ", heads.count,
        ") asked, of pages that hold [", held.first, ", ", held.first, " + ", held.count, ")"));
  }
  return HeadRange{heads.first - held.first, heads.count};
}

std::string DifferenceBetween(const KvLayout& layout, HeadShare share, const KvLayout& other,
                              HeadShare others) {
  const auto total = [](const KvLayout& of, HeadShare part) {
    return part.total != 0 ? part.total : of.num_heads();
  };
  if (share == HeadShare() && others == HeadShare()) return layout.FirstDifference(other);
  if (total(layout, share) != total(other, others)) {
    return absl::StrCat("heads of the model: ", total(layout, share), " here, ",
                        total(other, others), " there");
  }
  KvLayout same_heads = other;
  for (KvTensor& tensor : same_heads.tensors) tensor.num_heads = layout.num_heads();
  return layout.FirstDifference(same_heads);
}

}  // namespace kvferry
