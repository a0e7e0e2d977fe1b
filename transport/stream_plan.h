#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/kv_pool.h"
#include "pool/page_cut.h"
#include "pool/page_runs.h"
#include "pool/value_format.h"
#include "transport/data_plane.h"

namespace kvferry {

// Bytes that travel behind the pages of a stream: what belongs to the request and lies in no page,
// such as hidden states. The owner keeps them alive.
struct StreamTail {
  std::byte* data = nullptr;
  int64_t bytes = 0;
  std::shared_ptr<const void> owner{};
};

// Whole tensors of a stream, which counts them layer by layer.
struct StreamTensors {
  int64_t first = 0;
  int64_t count = 0;
  int64_t bytes = 0;
};

// Where each byte of a transfer's stream (docs/wire_protocol.md) lies in one side's pool.
// Arithmetic over the layout and the runs of pages: making one costs O(runs), and nothing grows
// with pages x layers. Immutable; the pool is kept alive.
class StreamPlan {
 public:
  static constexpr int64_t kMaxTailBytes = int64_t{1} << 40;
  // The shortest pieces, on average, that the system is given a list of, to send them from where
  // they lie or to put what arrives where it belongs. For shorter ones that takes longer than
  // copying (decision 10).
  static constexpr int64_t kMinSentBytes = 2 << 10;
  static constexpr int64_t kMinPlacedBytes = 8 << 10;

  // `heads` of the pool's: the stream holds of each page what CutPages() says.
  // OUT_OF_RANGE when a page is not in the pool, or the tail is too long; errors of CutPages().
  static absl::StatusOr<StreamPlan> Create(const std::shared_ptr<const KvPool>& pool,
                                           PageRuns pages, StreamTail tail = {},
                                           HeadRange heads = {});
  // The same of `pages` as pages of another form, those at `positions`, with their values as
  // `casts` says (null: as they are), to be read with Gather() alone then. Errors as of Create().
  static absl::StatusOr<StreamPlan> CreateIn(const PageForm& form,
                                             const std::shared_ptr<const KvPool>& pool,
                                             const PageRuns& pages, const PageRuns& positions,
                                             StreamTail tail, HeadRange heads,
                                             std::shared_ptr<const ValueCasts> casts = nullptr);

  int64_t total_bytes() const { return pages_bytes() + tail_.bytes; }
  int64_t tail_bytes() const { return tail_.bytes; }
  int64_t pages_bytes() const { return layer_bytes_ * num_layers(); }
  // The stream holds layer l in [l * layer_bytes(), (l + 1) * layer_bytes()).
  int64_t layer_bytes() const { return layer_bytes_; }
  int64_t num_layers() const { return pool_->layout().num_layers; }
  // As the owner of the pool knows them; none of a plan of CreateIn().
  const PageRuns& pages() const { return pages_are_items_ ? items_ : pages_; }
  // Layers that the first `bytes` of the stream hold whole.
  int64_t LayersIn(int64_t bytes) const;
  // How much of the stream the first `layers` layers are; all of it for all layers.
  int64_t BytesOfLayers(int64_t layers) const;
  // Where the last layer, or the tail, ends of those that end within `most` bytes from `offset` on;
  // of the one that `offset` lies in, if none does.
  int64_t LayersEnd(int64_t offset, int64_t most) const;
  // Where the tensor ends that `offset`, which lies in pages, lies in.
  int64_t TensorEnd(int64_t offset) const;
  // The tensors from `offset` on that the next `bytes` hold whole, `most` of them or fewer; none
  // where no tensor begins.
  StreamTensors TensorsIn(int64_t offset, int64_t bytes, int64_t most) const;
  // The pages of the stream, or what of them is in it, as items, in order; the same of each tensor.
  const PageRuns& items() const { return items_; }
  // Where they lie in this side's memory.
  const BufferInfo& tensor(int64_t index) const {
    const int64_t a_layer = pool_->layout().num_tensors();
    return pool_->buffer(index / a_layer, index % a_layer);
  }

  // Whether the stream has the values otherwise than this side's pages.
  bool casts() const { return casts_ != nullptr; }
  // Whether the processor can touch the pages.
  bool on_host() const { return pool_->memory().on_host(); }

  // Copies the window [offset, offset + packed.size()) of the stream, which must lie inside it.
  // `packed` lies on the host. INTERNAL when a device fails; what it has written by then is not
  // known. Returns when all is done: a device's copies wait for nothing that goes on there
  // (PoolMemory::MoveApart).
  absl::Status Gather(int64_t offset, std::span<std::byte> packed) const;
  absl::Status Scatter(int64_t offset, std::span<const std::byte> packed) const;
  // As Gather(), into memory of the device that the pages lie on; the tail is not in the window.
  absl::Status GatherOnDevice(int64_t offset, std::span<std::byte> packed) const;
  // Of pages on a device: from pieces, one after another, that all lie on the host or all where
  // MoveApart() of the pool's memory finds them; then the tail is not in the window.
  absl::Status ScatterPieces(int64_t offset, Pieces from) const;
  // The same, that may return before all is done (PoolMemory::BeginMoveApart); Settle() says then
  // how it went, and of null that nothing is left to do.
  absl::StatusOr<std::shared_ptr<const MovesUnderWay>> BeginScatterPieces(int64_t offset,
                                                                          Pieces from) const;
  absl::Status Settle(const std::shared_ptr<const MovesUnderWay>& moves) const;
  // The same from whole tensors that lie where MoveItemsApart() finds them. DATA_LOSS if they are
  // not those that begin at `offset`: then nothing has been written.
  absl::Status ScatterRuns(int64_t offset, const PlacedRuns& from) const;

  // Appends where that window lies in this side's memory, piece by piece; adjacent pages are one.
  void AppendPieces(int64_t offset, int64_t bytes, std::vector<std::span<std::byte>>* pieces) const;
  // Bytes of a page, as far as it is in the stream, of the tensor whose pages are smallest. Of the
  // pieces of a window only the first and the last can be smaller.
  int64_t min_item_bytes() const { return min_item_bytes_; }
  // Bytes that lie together in this side's memory, on average over the pages; 1 at least.
  int64_t mean_piece_bytes() const;

  // A tail is one piece, on the host, and as it is.
  bool sent_by_list() const {
    if (pages_bytes() == 0) return tail_.bytes >= kMinSentBytes;
    return on_host() && !casts() && mean_piece_bytes() >= kMinSentBytes;
  }
  bool placed_by_list() const {
    if (pages_bytes() == 0) return tail_.bytes >= kMinPlacedBytes;
    return on_host() && mean_piece_bytes() >= kMinPlacedBytes;
  }

  // The page ids that any of the byte ranges `gaps` touches, in list order.
  std::vector<int64_t> PagesTouchedBy(std::span<const std::pair<int64_t, int64_t>> gaps) const;

 private:
  // pages_ is to be set where the items are not the owner's pages.
  StreamPlan(PageCut cut, StreamTail tail, bool pages_are_items,
             std::shared_ptr<const ValueCasts> casts = nullptr);
  // What the stream has of an item of a buffer.
  int64_t ItemBytes(int64_t layer, int64_t tensor) const;
  int64_t LayerBytes() const;
  int64_t MinItemBytes() const;
  int64_t TensorBytes(int64_t index) const;
  // How many of the bytes from `offset` on are of pages.
  int64_t InPages(int64_t offset, int64_t bytes) const;
  // visit(Segment) for each tensor of each layer that the window, which is of pages alone, touches.
  template <typename Visit>
  void ForEachSegment(int64_t offset, int64_t bytes, const Visit& visit) const;
  // On the host: fn(buffer, pages, offset, part) for each part of the window, which is of pages
  // alone.
  template <typename Byte, typename Fn>
  void ForEachPart(int64_t offset, std::span<Byte> packed, const Fn& fn) const;
  absl::Status GatherFromDevice(int64_t offset, std::span<std::byte> packed) const;
  absl::Status GatherCast(int64_t offset, std::span<std::byte> packed, const PoolMemory& to) const;
  // What a device says that could not copy.
  absl::Status Copied(const absl::Status& status) const;

  // The pool's memory as pages of what is in the stream of each page.
  std::shared_ptr<const KvPool> pool_;
  std::shared_ptr<const ValueCasts> casts_;  // Null: none.
  PageRuns items_;
  int64_t items_a_page_;
  bool pages_are_items_;
  PageRuns pages_;  // As the owner of the pool knows them, where they are not the items.
  StreamTail tail_;
  int64_t layer_bytes_;
  int64_t min_item_bytes_;
};

}  // namespace kvferry
