#include "pool/page_cut.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/ceil_div.h"
#include "base/status.h"

namespace kvferry {
namespace {

// In a page each head's values lie together. Engines' own arrangements say so by the end of their
// name.
bool HeadsLieApart(const KvLayout& layout) { return absl::EndsWith(layout.page_format, "HND"); }

absl::Status CheckHeads(const KvLayout& layout, HeadRange heads) {
  if (AreAllHeads(layout, heads)) return absl::OkStatus();
  const int64_t num_heads = layout.num_heads();
  if (num_heads == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "some of the heads of pages whose tensors differ in heads: ", layout.ToString()));
  }
  if (heads.first < 0 || heads.count < 1 || heads.count > num_heads - heads.first) {
    return absl::InvalidArgumentError(absl::StrCat("heads [", heads.first, ", ", heads.first, " + ",
                                                   heads.count, ") of pages of ", num_heads));
  }
  if (layout.page_size > 1 && !HeadsLieApart(layout) && OrderOf(layout) == ValueOrder::kOther) {
    return absl::InvalidArgumentError(
        absl::StrCat("some of the heads of pages whose page_format, ", layout.page_format,
                     ", does not say where heads lie: it is neither NHD nor ends with HND"));
  }
  return absl::OkStatus();
}

constexpr absl::string_view kNotConverted =
    ": only pages of NHD and HND are converted to another page size or order";

// `form` says what it leaves to the pool, but for an order that nobody knows.
PageForm Spelled(const KvLayout& layout, PageForm form) {
  if (form.page_size == 0) form.page_size = layout.page_size;
  if (form.order == ValueOrder::kOther) form.order = OrderOf(layout);
  return form;
}

// Of a page that is cut out of others: beyond those that there are it is filled, item by item, with
// the last one, and the list of items for a peer that asks for a single one is made on the progress
// thread.
constexpr int64_t kMostTokensOfAPage = 65536;

absl::Status CheckForm(const KvPool& pool, const PageForm& form) {
  const KvLayout& layout = pool.layout();
  if (form == Spelled(layout, {})) return absl::OkStatus();
  KVFERRY_RETURN_IF_ERROR(CheckOrderIsKnown(layout, kNotConverted));
  const int64_t held = pool.num_pages() * layout.page_size;
  if (form.page_size > std::max(kMostTokensOfAPage, layout.page_size)) {
    return absl::InvalidArgumentError(
        absl::StrCat("pages of ", form.page_size, " tokens; the most is ", kMostTokensOfAPage));
  }
  // Else one page could stand for any number of tokens that are not there.
  if (form.page_size < 1 || (form.page_size > layout.page_size && form.page_size > held)) {
    return absl::InvalidArgumentError(
        absl::StrCat("pages of ", form.page_size, " tokens, of a pool that has room for ", held));
  }
  KvLayout like = layout;
  like.page_size = form.page_size;
  return like.Validate();  // So that no size of the stream is beyond its number.
}

// What lies together both in the pool and in the stream, and how either goes on from there.
struct Grain {
  int64_t tokens = 1;
  int64_t heads = 1;  // 0: all, of tensors that differ in heads.
  bool pool_head_by_head = false;
  bool stream_head_by_head = false;
};

// Heads and form have been checked, each by itself. One token or one head a page can be taken for
// either order.
absl::StatusOr<Grain> GrainOf(const KvLayout& layout, const PageForm& form, HeadRange heads) {
  const int64_t num_heads = layout.num_heads();
  const bool all = AreAllHeads(layout, heads);
  const bool pool_is_either = layout.page_size == 1 || num_heads == 1;
  const bool stream_is_either = form.page_size == 1 || (all ? num_heads : heads.count) == 1;
  bool pool = HeadsLieApart(layout);
  bool stream = form.order == ValueOrder::kOther ? pool : form.order == ValueOrder::kHnd;
  if (pool_is_either) pool = stream && !stream_is_either;
  if (stream_is_either) stream = pool;
  const int64_t tokens = std::gcd(layout.page_size, form.page_size);
  const bool same_size = layout.page_size == form.page_size;
  if (num_heads == 0) {
    if (!pool && !stream) return Grain{tokens, 0};
    if (same_size && pool == stream) return Grain{tokens, 0, pool, stream};
    return absl::InvalidArgumentError(absl::StrCat(
        "pages whose tensors differ in heads are converted only to another size, and only where "
        "values lie token by token (NHD) on both sides: ",
        layout.ToString()));
  }
  const int64_t some = all ? num_heads : std::gcd(std::gcd(heads.first, heads.count), num_heads);
  if (!pool && !stream) return Grain{all ? tokens : 1, some};
  if (pool != stream) return Grain{1, 1, pool, stream};
  return Grain{tokens, same_size ? some : 1, pool, stream};
}

// The list of items, page by page of the stream.
class Cutter {
 public:
  Cutter(const KvLayout& layout, const PageRuns& pages, const PageForm& form, HeadRange heads,
         const Grain& grain)
      : pages_(pages),
        grain_(grain),
        page_size_(layout.page_size),
        stream_page_size_(form.page_size),
        // Tensors that differ in heads are cut between tokens alone: as if they had one each.
        item_heads_(std::max<int64_t>(1, grain.heads)),
        num_heads_(std::max<int64_t>(1, layout.num_heads())),
        first_head_(heads.count == 0 ? 0 : heads.first),
        end_head_(heads.count == 0 ? num_heads_ : heads.first + heads.count) {}

  int64_t items_a_page() const {
    return stream_page_size_ / grain_.tokens * ((end_head_ - first_head_) / item_heads_);
  }
  // Appends what the page at that position is made of.
  void Add(int64_t position) {
    FindStretches(position * stream_page_size_);
    grain_.stream_head_by_head ? AddHeadByHead() : AddTokenByToken();
  }
  absl::StatusOr<PageRuns> Take() && { return PageRuns::FromRuns(items_); }

 private:
  // Tokens next to each other in a page of the pool.
  struct Stretch {
    int64_t page;
    int64_t first;
    int64_t count;
  };

  // A page of the stream from that token on; behind the end the last ones again.
  void FindStretches(int64_t begin) {
    const int64_t held = pages_.num_pages() * page_size_;
    stretches_.clear();
    for (int64_t token = begin; token < begin + stream_page_size_;) {
      const int64_t at = std::min(token, held - grain_.tokens);
      const int64_t left = token < held ? begin + stream_page_size_ - token : grain_.tokens;
      const int64_t first = at % page_size_;
      const int64_t count = std::min(page_size_ - first, left);
      stretches_.push_back({pages_.PageAt(at / page_size_), first, count});
      token += count;
    }
  }
  void AddTokenByToken() {
    for (const Stretch& stretch : stretches_) {
      for (int64_t i = 0; i < stretch.count; i += grain_.tokens) {
        if (!grain_.pool_head_by_head) {
          Append({ItemAt(stretch.page, stretch.first + i, first_head_),
                  (end_head_ - first_head_) / item_heads_});
          continue;
        }
        for (int64_t head = first_head_; head < end_head_; head += item_heads_) {
          Append({ItemAt(stretch.page, stretch.first + i, head), 1});
        }
      }
    }
  }
  void AddHeadByHead() {
    for (int64_t head = first_head_; head < end_head_; head += item_heads_) {
      for (const Stretch& stretch : stretches_) {
        for (int64_t i = 0; i < stretch.count; i += grain_.tokens) {
          Append({ItemAt(stretch.page, stretch.first + i, head), 1});
        }
      }
    }
  }
  int64_t ItemAt(int64_t page, int64_t token, int64_t head) const {
    if (grain_.pool_head_by_head) {
      return (page * num_heads_ + head) / item_heads_ * (page_size_ / grain_.tokens) +
             token / grain_.tokens;
    }
    return (page * page_size_ + token) / grain_.tokens * (num_heads_ / item_heads_) +
           head / item_heads_;
  }
  void Append(PageRun run) {
    if (!items_.empty() && items_.back().first + items_.back().count == run.first) {
      items_.back().count += run.count;
    } else {
      items_.push_back(run);
    }
  }

  const PageRuns& pages_;
  const Grain grain_;
  const int64_t page_size_;
  const int64_t stream_page_size_;
  const int64_t item_heads_;
  const int64_t num_heads_;
  const int64_t first_head_;
  const int64_t end_head_;
  std::vector<Stretch> stretches_;
  std::vector<PageRun> items_;
};

absl::Status CheckPositions(const PageRuns& positions, int64_t num_pages, const KvLayout& layout,
                            const PageForm& form) {
  const int64_t there = PagesIn(num_pages, layout, form);
  const absl::Status within = positions.CheckWithin(there);
  if (within.ok() && positions.num_pages() <= there) return absl::OkStatus();
  const std::string are = there == num_pages && form.page_size == layout.page_size
                              ? ""
                              : absl::StrCat(" of ", layout.page_size, " tokens, which are ", there,
                                             " of ", form.page_size);
  return absl::OutOfRangeError(
      absl::StrCat(positions.num_pages(), " positions asked, outside ", num_pages, " pages", are,
                   within.ok() ? "" : absl::StrCat(": ", within.message())));
}

// The pages at these positions of the list, which have been checked.
absl::StatusOr<PageRuns> At(const PageRuns& pages, const PageRuns& positions) {
  std::vector<PageRun> runs;
  for (const PageRun& run : positions.runs()) {
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns slice, pages.Slice(run.first, run.count));
    runs.insert(runs.end(), slice.runs().begin(), slice.runs().end());
  }
  return PageRuns::FromRuns(runs);
}

}  // namespace

bool AreAllHeads(const KvLayout& layout, HeadRange heads) {
  return heads.count == 0 || heads == HeadRange{0, layout.num_heads()};
}

ValueOrder OrderOf(const KvLayout& layout) {
  if (layout.page_format == "NHD") return ValueOrder::kNhd;
  if (layout.page_format == "HND") return ValueOrder::kHnd;
  return layout.page_format == "ND" && layout.num_heads() == 1 ? ValueOrder::kNhd
                                                               : ValueOrder::kOther;
}

absl::Status CheckOrderIsKnown(const KvLayout& layout, absl::string_view so) {
  if (OrderOf(layout) != ValueOrder::kOther) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("page_format ", layout.page_format,
                                                 " is an arrangement of an engine's own", so));
}

PageForm FormOf(const KvLayout& layout) {
  const ValueOrder order = OrderOf(layout);
  return order == ValueOrder::kOther ? PageForm() : PageForm{layout.page_size, order};
}

absl::Status CheckConvertible(const KvLayout& one, const KvLayout& other) {
  if (one.page_size == other.page_size && one.page_format == other.page_format) {
    return absl::OkStatus();
  }
  KVFERRY_RETURN_IF_ERROR(CheckOrderIsKnown(one, kNotConverted));
  KVFERRY_RETURN_IF_ERROR(CheckOrderIsKnown(other, kNotConverted));
  return GrainOf(one, FormOf(other), {}).status();
}

int64_t PagesIn(int64_t num_pages, const KvLayout& layout, const PageForm& form) {
  const int64_t page_size = Spelled(layout, form).page_size;
  return CeilDiv(num_pages * layout.page_size, page_size);
}

absl::StatusOr<PageCut> CutPages(const std::shared_ptr<const KvPool>& pool, const PageRuns& pages,
                                 const PageRuns& positions, const PageForm& wanted,
                                 HeadRange heads) {
  const KvLayout& layout = pool->layout();
  const PageForm form = Spelled(layout, wanted);
  KVFERRY_RETURN_IF_ERROR(CheckHeads(layout, heads));
  KVFERRY_RETURN_IF_ERROR(CheckForm(*pool, form));
  KVFERRY_RETURN_IF_ERROR(CheckPositions(positions, pages.num_pages(), layout, form));
  KVFERRY_ASSIGN_OR_RETURN(const Grain grain, GrainOf(layout, form, heads));
  PageCut cut{pool, {}, 1};
  if (form.page_size == layout.page_size && grain.tokens == layout.page_size &&
      grain.heads == layout.num_heads()) {
    KVFERRY_ASSIGN_OR_RETURN(cut.items, At(pages, positions));
    return cut;
  }
  Cutter cutter(layout, pages, form, heads, grain);
  cut.items_a_page = cutter.items_a_page();
  if (positions.num_pages() > PageRuns::kMaxPages / cut.items_a_page) {
    return absl::InvalidArgumentError(
        absl::StrCat(positions.num_pages(), " pages of ", form.page_size, " tokens, cut into ",
                     cut.items_a_page, " each: more than a list holds, ", PageRuns::kMaxPages));
  }
  for (const PageRun& run : positions.runs()) {
    for (int64_t i = 0; i < run.count; ++i) cutter.Add(run.first + i);
  }
  KVFERRY_ASSIGN_OR_RETURN(cut.items, std::move(cutter).Take());
  cut.pool = KvPool::InSmallerPages(pool, grain.tokens, grain.heads);
  return cut;
}

absl::StatusOr<PageCut> CutPages(const std::shared_ptr<const KvPool>& pool, const PageRuns& pages,
                                 HeadRange heads) {
  if (pages.num_pages() == 0) return CutPages(pool, pages, pages, {}, heads);
  return CutPages(pool, pages, PageRuns(PageRun{0, pages.num_pages()}), {}, heads);
}

}  // namespace kvferry
