#include "transport/stream_plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/page_copy.h"
#include "transport/pieces.h"

namespace kvferry {
namespace {

// One tensor of one layer, as far as a window of the stream covers it.
struct Segment {
  int64_t layer, tensor;
  int64_t item_bytes;  // In the stream.
  int64_t offset;      // Into the pages of that tensor laid end to end.
  int64_t bytes;
  int64_t packed;  // Where the segment begins in the window.
};

// Where the pieces of a window lie, and what goes to and from them. A thread keeps its own from
// call to call: of small pages they take megabytes a chunk, and memory that is touched for the
// first time costs more than all the rest that is done for a piece.
struct Lists {
  std::vector<std::span<std::byte>> pieces;
  std::vector<BytesMove> moves;
  std::vector<ItemsMove> items;
  std::vector<PlaceMove> places;
};

Lists& EmptyLists() {
  thread_local Lists lists;
  lists.pieces.clear();
  lists.moves.clear();
  lists.items.clear();
  lists.places.clear();
  return lists;
}

// As many items as each of a run is in parts.
PageRun InParts(PageRun run, int64_t parts) { return {run.first * parts, run.count * parts}; }

// Appends what lies together on both sides, in items that are so many to one of theirs and of ours.
// Both lists have as many of them.
void PairRuns(std::span<const PageRun> from, int64_t from_parts, const PageRuns& to,
              int64_t to_parts, std::vector<ItemsMove>* moves) {
  PageRun target;
  size_t next = 0;
  for (const PageRun& run : from) {
    PageRun source = InParts(run, from_parts);
    while (source.count > 0) {
      if (target.count == 0) target = InParts(to.Run(next++), to_parts);
      const int64_t items = std::min(source.count, target.count);
      moves->push_back({source.first, target.first, items});
      source = {source.first + items, source.count - items};
      target = {target.first + items, target.count - items};
    }
  }
}

absl::Status CheckPages(const KvPool& pool, const PageRuns& pages) {
  KVFERRY_RETURN_IF_ERROR(pages.CheckWithin(pool.num_pages()));
  // Each page once at most, so that the stream is never larger than the pool, or in pages of
  // another form than twice the pool, and sums cannot overflow.
  if (pages.num_pages() > pool.num_pages()) {
    return absl::OutOfRangeError("more pages listed than the pool has");
  }
  return absl::OkStatus();
}

absl::Status CheckTail(const StreamTail& tail) {
  if (tail.bytes >= 0 && tail.bytes <= StreamPlan::kMaxTailBytes) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat("a tail of ", tail.bytes, " bytes, limit ", StreamPlan::kMaxTailBytes));
}

}  // namespace

StreamPlan::StreamPlan(PageCut cut, StreamTail tail, bool pages_are_items,
                       std::shared_ptr<const ValueCasts> casts)
    : pool_(std::move(cut.pool)),
      casts_(std::move(casts)),
      items_(std::move(cut.items)),
      items_a_page_(cut.items_a_page),
      pages_are_items_(pages_are_items),
      tail_(std::move(tail)),
      layer_bytes_(LayerBytes()),
      min_item_bytes_(MinItemBytes()) {}

absl::StatusOr<StreamPlan> StreamPlan::Create(const std::shared_ptr<const KvPool>& pool,
                                              PageRuns pages, StreamTail tail, HeadRange heads) {
  KVFERRY_RETURN_IF_ERROR(CheckPages(*pool, pages));
  KVFERRY_RETURN_IF_ERROR(CheckTail(tail));
  if (AreAllHeads(pool->layout(), heads)) {
    return StreamPlan({pool, std::move(pages), 1}, std::move(tail), /*pages_are_items=*/true);
  }
  KVFERRY_ASSIGN_OR_RETURN(PageCut cut, CutPages(pool, pages, heads));
  StreamPlan plan(std::move(cut), std::move(tail), /*pages_are_items=*/false);
  plan.pages_ = std::move(pages);
  return plan;
}

absl::StatusOr<StreamPlan> StreamPlan::CreateIn(const PageForm& form,
                                                const std::shared_ptr<const KvPool>& pool,
                                                const PageRuns& pages, const PageRuns& positions,
                                                StreamTail tail, HeadRange heads,
                                                std::shared_ptr<const ValueCasts> casts) {
  KVFERRY_RETURN_IF_ERROR(CheckPages(*pool, pages));
  KVFERRY_RETURN_IF_ERROR(CheckTail(tail));
  KVFERRY_ASSIGN_OR_RETURN(PageCut cut, CutPages(pool, pages, positions, form, heads));
  return StreamPlan(std::move(cut), std::move(tail), /*pages_are_items=*/false, std::move(casts));
}

int64_t StreamPlan::ItemBytes(int64_t layer, int64_t tensor) const {
  const int64_t own = pool_->buffer(layer, tensor).item_bytes;
  return casts_ == nullptr ? own : casts_->Bytes(pool_->layout().buffer_index(layer, tensor), own);
}

// Layers are alike.
int64_t StreamPlan::LayerBytes() const {
  int64_t of_page = 0;
  for (int64_t tensor = 0; tensor < pool_->layout().num_tensors(); ++tensor) {
    of_page += ItemBytes(0, tensor);
  }
  return items_.num_pages() * of_page;
}

int64_t StreamPlan::MinItemBytes() const {
  int64_t bytes = ItemBytes(0, 0);
  for (int64_t tensor = 1; tensor < pool_->layout().num_tensors(); ++tensor) {
    bytes = std::min(bytes, ItemBytes(0, tensor));
  }
  return bytes;
}

template <typename Visit>
void StreamPlan::ForEachSegment(int64_t offset, int64_t bytes, const Visit& visit) const {
  for (int64_t done = 0; done < bytes;) {
    const int64_t layer = (offset + done) / layer_bytes_;
    int64_t into = (offset + done) % layer_bytes_;
    for (int64_t tensor = 0; tensor < pool_->layout().num_tensors() && done < bytes; ++tensor) {
      const int64_t item_bytes = ItemBytes(layer, tensor);
      const int64_t tensor_bytes = items().num_pages() * item_bytes;
      if (into >= tensor_bytes) {
        into -= tensor_bytes;
        continue;
      }
      const int64_t take = std::min(bytes - done, tensor_bytes - into);
      visit(Segment{layer, tensor, item_bytes, into, take, done});
      done += take;
      into = 0;
    }
  }
}

int64_t StreamPlan::LayersIn(int64_t bytes) const {
  return bytes >= pages_bytes() ? num_layers() : bytes / layer_bytes_;
}

int64_t StreamPlan::BytesOfLayers(int64_t layers) const {
  return layers >= num_layers() ? total_bytes() : layers * layer_bytes_;
}

int64_t StreamPlan::mean_piece_bytes() const {
  const auto runs = static_cast<int64_t>(items().num_runs());
  const int64_t pieces = runs * pool_->layout().num_tensors();
  return std::max<int64_t>(1, pieces == 0 ? layer_bytes_ : layer_bytes_ / pieces);
}

int64_t StreamPlan::LayersEnd(int64_t offset, int64_t most) const {
  if (offset >= pages_bytes() || most >= total_bytes() - offset) return total_bytes();
  const int64_t layers = std::min((offset + most) / layer_bytes_, num_layers());
  return std::max(layers, offset / layer_bytes_ + 1) * layer_bytes_;
}

int64_t StreamPlan::TensorBytes(int64_t index) const {
  const int64_t a_layer = pool_->layout().num_tensors();
  return items().num_pages() * ItemBytes(index / a_layer, index % a_layer);
}

int64_t StreamPlan::TensorEnd(int64_t offset) const {
  const int64_t layer = offset / layer_bytes_;
  int64_t end = layer * layer_bytes_;
  int64_t index = layer * pool_->layout().num_tensors();
  while (end <= offset) end += TensorBytes(index++);
  return end;
}

StreamTensors StreamPlan::TensorsIn(int64_t offset, int64_t bytes, int64_t most) const {
  if (offset >= pages_bytes()) return {};
  const int64_t a_layer = pool_->layout().num_tensors();
  StreamTensors found = {.first = offset / layer_bytes_ * a_layer};
  int64_t into = offset % layer_bytes_;
  while (into > 0) into -= TensorBytes(found.first++);
  if (into < 0) return {};
  const int64_t end = std::min(num_layers() * a_layer, found.first + most);
  for (int64_t index = found.first; index < end; ++index) {
    const int64_t with_it = found.bytes + TensorBytes(index);
    if (with_it > bytes) break;
    found.bytes = with_it;
    ++found.count;
  }
  return found;
}

int64_t StreamPlan::InPages(int64_t offset, int64_t bytes) const {
  return std::clamp<int64_t>(pages_bytes() - offset, 0, bytes);
}

template <typename Byte, typename Fn>
void StreamPlan::ForEachPart(int64_t offset, std::span<Byte> packed, const Fn& fn) const {
  ForEachSegment(offset, static_cast<int64_t>(packed.size()), [&](const Segment& segment) {
    fn(pool_->buffer(segment.layer, segment.tensor), items(), segment.offset,
       packed.subspan(segment.packed, segment.bytes));
  });
}

absl::Status StreamPlan::GatherFromDevice(int64_t offset, std::span<std::byte> packed) const {
  Lists& lists = EmptyLists();
  AppendPieces(offset, static_cast<int64_t>(packed.size()), &lists.pieces);
  std::byte* to = packed.data();
  for (const std::span<std::byte> piece : lists.pieces) {
    lists.moves.push_back({piece.data(), to, static_cast<int64_t>(piece.size())});
    to += piece.size();
  }
  return Copied(pool_->memory().MoveApart(lists.moves));
}

absl::Status StreamPlan::GatherCast(int64_t offset, std::span<std::byte> packed,
                                    const PoolMemory& to) const {
  std::vector<ValueCasts::Window> windows;
  ForEachSegment(offset, static_cast<int64_t>(packed.size()), [&](const Segment& segment) {
    windows.push_back({pool_->layout().buffer_index(segment.layer, segment.tensor),
                       pool_->buffer(segment.layer, segment.tensor), segment.offset,
                       packed.subspan(segment.packed, segment.bytes)});
  });
  return Copied(casts_->Gather(pool_->memory(), items(), windows, to));
}

absl::Status StreamPlan::Gather(int64_t offset, std::span<std::byte> packed) const {
  const int64_t in_pages = InPages(offset, static_cast<int64_t>(packed.size()));
  if (casts()) {
    KVFERRY_RETURN_IF_ERROR(GatherCast(offset, packed.first(in_pages), *HostMemory()));
  } else if (on_host()) {
    ForEachPart(offset, packed.first(in_pages), &GatherPages);
  } else {
    KVFERRY_RETURN_IF_ERROR(GatherFromDevice(offset, packed.first(in_pages)));
  }
  packed = packed.subspan(in_pages);
  if (packed.empty()) return absl::OkStatus();
  std::memcpy(packed.data(), tail_.data + (offset + in_pages - pages_bytes()), packed.size());
  return absl::OkStatus();
}

absl::Status StreamPlan::GatherOnDevice(int64_t offset, std::span<std::byte> packed) const {
  return casts() ? GatherCast(offset, packed, pool_->memory()) : GatherFromDevice(offset, packed);
}

absl::Status StreamPlan::Scatter(int64_t offset, std::span<const std::byte> packed) const {
  if (!on_host()) return ScatterPieces(offset, {&packed, 1});
  const int64_t in_pages = InPages(offset, static_cast<int64_t>(packed.size()));
  ForEachPart(offset, packed.first(in_pages), &ScatterPages);
  packed = packed.subspan(in_pages);
  if (packed.empty()) return absl::OkStatus();
  std::memcpy(tail_.data + (offset + in_pages - pages_bytes()), packed.data(), packed.size());
  return absl::OkStatus();
}

absl::Status StreamPlan::ScatterPieces(int64_t offset, Pieces from) const {
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<const MovesUnderWay> moves,
                           BeginScatterPieces(offset, from));
  return Settle(moves);
}

absl::Status StreamPlan::Settle(const std::shared_ptr<const MovesUnderWay>& moves) const {
  return moves == nullptr ? absl::OkStatus() : Copied(moves->Wait());
}

absl::StatusOr<std::shared_ptr<const MovesUnderWay>> StreamPlan::BeginScatterPieces(
    int64_t offset, Pieces from) const {
  int64_t bytes = 0;
  for (const std::span<const std::byte> piece : from) bytes += static_cast<int64_t>(piece.size());
  Lists& lists = EmptyLists();
  AppendPieces(offset, bytes, &lists.pieces);
  const int64_t in_pages = InPages(offset, bytes);  // They come before the tail.
  int64_t done = 0;
  size_t of_pages = 0;
  ForEachMove(from, lists.pieces, [&](const std::byte* source, std::byte* target, size_t size) {
    lists.moves.push_back({source, target, static_cast<int64_t>(size)});
    done += static_cast<int64_t>(size);
    if (done <= in_pages) of_pages = lists.moves.size();
  });
  const std::span<const BytesMove> moves = lists.moves;
  // First: behind moves that have begun there must be no error, or nobody would wait for them.
  KVFERRY_RETURN_IF_ERROR(HostMemory()->MoveApart(moves.subspan(of_pages)));
  auto begun = pool_->memory().BeginMoveApart(moves.first(of_pages));
  KVFERRY_RETURN_IF_ERROR(Copied(begun.status()));
  return begun;
}

// The two sides may count in items of other numbers of heads: then in the longest that both can
// count in.
absl::Status StreamPlan::ScatterRuns(int64_t offset, const PlacedRuns& from) const {
  const absl::Status other = absl::DataLossError(
      absl::StrCat("a chunk of other tensors than those at byte ", offset, " of the stream"));
  const auto count = static_cast<int64_t>(from.places.size());
  const StreamTensors tensors = TensorsIn(offset, pages_bytes(), count);
  if (tensors.count != count) return other;
  const int64_t theirs = from.places[0].item_bytes, ours = tensor(tensors.first).item_bytes;
  const int64_t from_parts = theirs / std::gcd(theirs, ours);
  const int64_t to_parts = ours / std::gcd(theirs, ours);
  int64_t items = 0;
  for (const PageRun& run : from.runs) items += run.count;
  if (items * from_parts != this->items().num_pages() * to_parts) return other;
  Lists& lists = EmptyLists();
  for (int64_t i = 0; i < count; ++i) {
    const ItemsPlace& place = from.places[i];
    const BufferInfo& buffer = tensor(tensors.first + i);
    const int64_t part_bytes = place.item_bytes / from_parts;
    if (part_bytes * from_parts != place.item_bytes || part_bytes * to_parts != buffer.item_bytes) {
      return other;
    }
    lists.places.push_back({place.begin, buffer.address, part_bytes});
  }
  PairRuns(from.runs, from_parts, this->items(), to_parts, &lists.items);
  return Copied(pool_->memory().MoveItemsApart(lists.items, lists.places));
}

absl::Status StreamPlan::Copied(const absl::Status& status) const {
  if (status.ok()) return status;
  // Whatever it is, it is none of the peer's, and nothing that waiting or asking again would mend.
  return absl::InternalError(absl::StrCat("pages in ", pool_->memory().name(),
                                          " could not be copied: ", status.message()));
}

void StreamPlan::AppendPieces(int64_t offset, int64_t bytes,
                              std::vector<std::span<std::byte>>* pieces) const {
  const int64_t in_pages = InPages(offset, bytes);
  ForEachSegment(offset, in_pages, [&](const Segment& segment) {
    AppendPagePieces(pool_->buffer(segment.layer, segment.tensor), items(), segment.offset,
                     segment.bytes, pieces);
  });
  if (in_pages == bytes) return;
  pieces->emplace_back(tail_.data + (offset + in_pages - pages_bytes()), bytes - in_pages);
}

std::vector<int64_t> StreamPlan::PagesTouchedBy(
    std::span<const std::pair<int64_t, int64_t>> gaps) const {
  std::vector<bool> touched(items().num_pages(), false);
  bool all = false;
  for (const auto& [begin, end] : gaps) {
    ForEachSegment(begin, InPages(begin, end - begin), [&](const Segment& segment) {
      const int64_t item = segment.item_bytes;
      const int64_t last = (segment.offset + segment.bytes - 1) / item;
      if (all) return;
      for (int64_t i = segment.offset / item; i <= last; ++i) touched[i] = true;
      all = segment.bytes == items().num_pages() * item;
    });
  }
  std::vector<int64_t> pages;
  for (int64_t position = 0; position < this->pages().num_pages(); ++position) {
    const auto first = touched.begin() + position * items_a_page_;
    if (std::find(first, first + items_a_page_, true) != first + items_a_page_) {
      pages.push_back(this->pages().PageAt(position));
    }
  }
  return pages;
}

}  // namespace kvferry
