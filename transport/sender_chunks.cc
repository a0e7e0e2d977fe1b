// The chunks of the transfers that Sender keeps: who may send the next one, and what it is made of.

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/hash.h"
#include "base/status.h"
#include "pool/bulk_copy.h"
#include "transport/direct_reads.h"
#include "transport/fair_share.h"
#include "transport/sender.h"

namespace kvferry {
namespace {

// Of one chunk, whatever its reader asks for: what a header can say, and more than any reader
// needs.
constexpr int64_t kMaxBytesInPlace = 1 << 30;
constexpr size_t kMaxChunksInPlace = 4;
// Of one chunk that is gathered on a device: a list of them takes 40 bytes each on both sides, and
// its time. But so many bytes in any case, as a chunk of the arena may have.
constexpr int64_t kMaxPieces = 64 << 10, kMinBytesOfPieces = 1 << 20;
// Of one transfer, not sent yet: as many as a window of ours has (credits_per_transfer).
constexpr int64_t kMaxLentChunks = 4096;
// With more readers than this machine has room for (ReadersAreBusy()), what one gets before it is
// the next one's turn: half of what it still needs, so that all of them are through at about the
// same time, and no more than keeps those with little to read from waiting long for those with
// much. Each turn costs two wakes: 64 readers of 17 MB move as much as one of all from here on
// (measured; with 2 MiB and a quarter 0.9 of it).
constexpr int64_t kMaxBytesOfATurn = 4 << 20;
// In several chunks, where one is less: over TCP, too, a receiver is woken for each turn, and 64 of
// them got 0.9 of as much when a turn was one chunk of 512 KiB (measured).
constexpr int64_t kMinBytesOfATurn = 1 << 20;

// Layers that go together in one chunk: each would take a device longer to begin with than to move.
// With more of them the two sides would work one after the other (measured: 2 MB in 32 layers out
// of an H200 and into one take 0.7 to 0.8 of the time over TCP, with 1 MiB 0.8 to 0.9; between
// hosts 0.9 to 1.0, and with 1 MiB longer).
constexpr int64_t kMaxBytesOfLayers = 256 << 10;

using Filled = absl::StatusOr<std::span<const std::byte>>;

template <typename Entry>
std::byte* Put(std::byte* out, const Entry& entry) {
  std::memcpy(out, &entry, sizeof(entry));
  return out + sizeof(entry);
}

int64_t BytesOfATurn(int64_t left) {
  return std::clamp(left / 2, kMinBytesOfATurn, kMaxBytesOfATurn);
}

}  // namespace

bool Sender::PumpOne(const TransferPtr& transfer) {
  const int64_t begin = transfer->sent_bytes;
  // What is read in place is a turn as it is (MaxBytesInPlace()).
  const bool in_place = ReadInPlace(*transfer, NextWay(*transfer));
  const int64_t turn_end = begin + (in_place ? 1 : kMinBytesOfATurn);
  while (transfer->sent_bytes < turn_end && SendNext(transfer)) {
  }
  return transfer->sent_bytes > begin;
}

bool Sender::SendNext(const TransferPtr& transfer) {
  const PageWay way = NextWay(*transfer);
  // A chunk of the arena leaves its layer for whole short ones only, so that a layer's end seldom
  // waits for what is behind it. On others this side's processor has nothing to work.
  const int64_t most = std::min(transfer->chunk_bytes, kMaxBytesOfLayers);
  const int64_t layers_end = way == PageWay::kArena
                                 ? transfer->plan.LayersEnd(transfer->sent_bytes, most)
                                 : transfer->plan.pages_bytes();
  const int64_t end = std::min(layers_end, transfer->ready_bytes);
  const int64_t bytes = NextBytes(*transfer, way, end - transfer->sent_bytes);
  if (bytes <= 0 || !Admits(*transfer, way, bytes)) return false;
  if (way == PageWay::kArena && Lends(*transfer)) {
    if (transfer->lent_chunks >= kMaxLentChunks) return false;
    SendLent(transfer, bytes);
    return true;
  }
  if (!HasRoom(*transfer, way)) return false;
  SendChunk(transfer, way, bytes);
  return true;
}

int64_t Sender::NextBytes(const Transfer& transfer, PageWay way, int64_t left) const {
  switch (way) {
    case PageWay::kInPlace:
      return MaxBytesInPlace(transfer, left);
    case PageWay::kDeviceArena: {
      const int64_t of_pieces =
          std::max(kMinBytesOfPieces, kMaxPieces * transfer.plan.min_item_bytes());
      return std::min(
          {left, transfer.fetch.in_place_bytes, of_pieces, on_device_.arena->chunk_bytes()});
    }
    case PageWay::kArena:
      break;
  }
  return std::min(transfer.chunk_bytes, left);
}

// A peer may have another chunk while it holds fewer than are free: of n that are busy each has
// 1/(n + 1) then, and those who hold chunks and do not read, whether their transfers go on or not,
// leave some to whoever comes. The dynamic threshold of Choudhury and Hahne (1998) for packets in a
// switch's memory, with alpha = 1.
bool Sender::HasRoom(const Transfer& transfer, PageWay way) const {
  if (under_way_->of_peers.Of(transfer.peer) >= arena_->num_free()) return false;
  return way != PageWay::kDeviceArena ||
         under_way_->of_peers_on_device.Of(transfer.peer) < DeviceShare(transfer.peer);
}

// Who holds a chunk of it waits for his turn to have another; two each, for one to be gathered
// while the other one is read, if there are as many.
int64_t Sender::DeviceShare(const PeerKey& peer) const {
  if (on_device_.arena->num_free() == 0) return 0;
  const int64_t newcomer = under_way_->of_peers_on_device.Of(peer) == 0 ? 1 : 0;
  const auto peers = static_cast<size_t>(under_way_->of_peers_on_device.num_peers() + newcomer);
  return std::max<int64_t>(2, FairShare(DeviceArena::kNumChunks, peers));
}

// What is read in place takes no room at the receiver: enough is on its way when it has the next
// chunk before it is through with one.
bool Sender::Admits(const Transfer& transfer, PageWay way, int64_t bytes) {
  if (ReadInPlace(transfer, way)) {
    if (transfer.read_in_place.size() >= kMaxChunksInPlace) return false;
    const bool busy = ReadersAreBusy(Clock::now());
    waits_for_readers_ |= busy;
    return !busy;
  }
  const int64_t window_end = transfer.credited_bytes + transfer.fetch.window_bytes;
  return transfer.sent_bytes + bytes <= window_end;
}

bool Sender::ReadersAreBusy(Deadline now) const {
  if (under_way_->read_since.size() < max_read_in_place_) return false;
  const auto fresh =
      std::count_if(under_way_->read_since.begin(), under_way_->read_since.end(),
                    [&](const auto& chunk) { return now - chunk.second < kReaderTurn; });
  return static_cast<size_t>(fresh) >= max_read_in_place_;
}

// Peers that hold all of the device's arena, and do not read, keep nobody waiting who holds none.
PageWay Sender::NextWay(const Transfer& transfer) const {
  if (transfer.sent_bytes >= transfer.plan.pages_bytes()) return PageWay::kArena;
  const bool full = transfer.way == PageWay::kDeviceArena && on_device_.arena->num_free() == 0;
  return full && under_way_->of_peers_on_device.Of(transfer.peer) == 0 ? PageWay::kArena
                                                                       : transfer.way;
}

bool Sender::ReadInPlace(const Transfer& transfer, PageWay way) {
  return way != PageWay::kArena && transfer.guard < 0;
}

int64_t Sender::MaxEntries() const {
  static_assert(sizeof(PoolListHead) == sizeof(GuardHead));
  return arena_->shape().chunk_bytes / static_cast<int64_t>(sizeof(PoolPiece)) - 1;
}

// A pool on the host is read by who wants its pieces one by one, and so is one from afar.
StreamTensors Sender::NextTensors(const Transfer& transfer, int64_t bytes) const {
  if (transfer.plan.on_host() || transfer.guard >= 0) return {};
  const auto runs = static_cast<int64_t>(transfer.plan.items().num_runs());
  return transfer.plan.TensorsIn(transfer.sent_bytes, bytes, MaxEntries() - runs);
}

// Nothing of it lies in the arena but a list, which must fit into one chunk; of its pieces only the
// first and the last can be shorter than an item. From afar it lands in one.
int64_t Sender::MaxBytesInPlace(const Transfer& transfer, int64_t left) const {
  const int64_t turn = turn_.size() > max_read_in_place_
                           ? BytesOfATurn(transfer.plan.pages_bytes() - transfer.sent_bytes)
                           : kMaxBytesInPlace;
  const int64_t wanted =
      transfer.guard < 0 ? std::min(turn, transfer.fetch.in_place_bytes) : transfer.chunk_bytes;
  const int64_t most = std::min(wanted, left);
  if (most <= 0) return 0;
  const StreamTensors tensors = NextTensors(transfer, most);
  if (tensors.count > 0) return tensors.bytes;
  const int64_t of_pieces = std::min(most, (MaxEntries() - 2) * transfer.plan.min_item_bytes());
  if (transfer.plan.on_host()) return of_pieces;
  // The next one begins where a tensor does.
  const int64_t in_tensor = transfer.plan.TensorEnd(transfer.sent_bytes) - transfer.sent_bytes;
  return std::min(of_pieces, in_tensor);
}

FillChunk Sender::Gather(const TransferPtr& transfer, int64_t chunk) const {
  return [transfer, offset = transfer->sent_bytes,
          memory = arena_->Bytes(chunk)](ChunkHeader* header) -> Filled {
    const Gate::Pass pass(transfer->reading.get());
    if (!pass.open()) return absl::CancelledError("the transfer has ended");
    const std::span<std::byte> packed = memory.first(header->bytes);
    KVFERRY_RETURN_IF_ERROR(transfer->plan.Gather(offset, packed));
    if (transfer->fetch.checksum) header->checksum = Xxh3(packed);
    return packed;
  };
}

// Its list is one piece. The pages are their owner's again when this has run; what was gathered
// stays as it is until its reader is through, also when the transfer has ended, or until the link
// is closed: then a reader finds that the slot of the list is another chunk's.
FillChunk Sender::GatherOnDevice(const TransferPtr& transfer, int64_t chunk, int64_t device_chunk) {
  return [this, transfer, chunk, device_chunk,
          offset = transfer->sent_bytes](ChunkHeader* header) -> Filled {
    const Gate::Pass pass(transfer->reading.get());
    if (!pass.open()) return absl::CancelledError("the transfer has ended");
    const DeviceArena& arena = *on_device_.arena;
    const std::span<std::byte> packed = arena.Bytes(device_chunk).first(header->bytes);
    KVFERRY_RETURN_IF_ERROR(transfer->plan.GatherOnDevice(offset, packed));
    std::byte* const begin = arena_->Bytes(chunk).data();
    std::byte* out = Put(begin, PoolListHead());
    const uint64_t at = on_device_.arena_at + static_cast<uint64_t>(arena.OffsetOf(device_chunk));
    out = Put(out, PoolPiece{at, header->bytes});
    return std::span<const std::byte>(begin, out);
  };
}

FillChunk Sender::ListPieces(const TransferPtr& transfer, int64_t chunk) {
  return [this, transfer, chunk, offset = transfer->sent_bytes](ChunkHeader* header) -> Filled {
    // What its guard says by then would be another transfer's; a checksum reads the pages.
    const Gate::Pass pass(transfer->reading.get());
    if (!pass.open()) return absl::CancelledError("the transfer has ended");
    pieces_.clear();
    transfer->plan.AppendPieces(offset, header->bytes, &pieces_);
    std::byte* const begin = arena_->Bytes(chunk).data();
    std::byte* out = begin;
    if (transfer->guard >= 0) {
      out = Put(out, GuardHead{static_cast<uint64_t>(transfer->guard),
                               guards_->Generation(transfer->guard)});
    } else {
      out = Put(out, PoolListHead());
    }
    size_t region = 0;
    for (const std::span<std::byte> bytes : pieces_) {
      out = Put(out, PoolPiece{regions_.OffsetOf(bytes.data(), &region), bytes.size()});
    }
    if (transfer->fetch.checksum) {
      header->checksum =
          Xxh3(std::vector<std::span<const std::byte>>(pieces_.begin(), pieces_.end()));
    }
    if (transfer->guard < 0) transfer->read_in_place.insert(chunk);
    return std::span<const std::byte>(begin, out);
  };
}

FillChunk Sender::ListTensors(const TransferPtr& transfer, int64_t chunk,
                              const StreamTensors& tensors) {
  return [this, transfer, chunk, tensors](ChunkHeader* /*header*/) -> Filled {
    const Gate::Pass pass(transfer->reading.get());
    if (!pass.open()) return absl::CancelledError("the transfer has ended");
    const StreamPlan& plan = transfer->plan;
    std::byte* const begin = arena_->Bytes(chunk).data();
    std::byte* out = Put(begin, PoolListHead{static_cast<uint64_t>(tensors.count)});
    size_t region = 0;
    for (int64_t i = tensors.first; i < tensors.first + tensors.count; ++i) {
      const BufferInfo& buffer = plan.tensor(i);
      out = Put(out, PoolPlace{regions_.OffsetOf(buffer.address, &region),
                               static_cast<uint64_t>(buffer.item_bytes)});
    }
    for (const PageRun& run : plan.items().runs()) {
      out = Put(out, PoolRun{static_cast<uint64_t>(run.first), static_cast<uint64_t>(run.count)});
    }
    transfer->read_in_place.insert(chunk);
    return std::span<const std::byte>(begin, out);
  };
}

FillChunk Sender::List(const TransferPtr& transfer, int64_t chunk, int64_t bytes) {
  const StreamTensors tensors = NextTensors(*transfer, bytes);
  return tensors.bytes == bytes ? ListTensors(transfer, chunk, tensors)
                                : ListPieces(transfer, chunk);
}

ChunkHeader Sender::HeaderOfNext(const Transfer& transfer, int64_t bytes, uint32_t flags) const {
  ChunkHeader header;
  header.transfer_id = transfer.fetch.transfer_id;
  header.offset = transfer.sent_bytes;
  header.bytes = static_cast<uint32_t>(bytes);
  header.flags = (transfer.fetch.checksum ? kChunkHasChecksum : 0) | flags;
  return header;
}

// A checksum comes before the bytes, so it is made of what was gathered.
bool Sender::Lends(const Transfer& transfer) const {
  return !transfer.fetch.checksum && transfer.plan.sent_by_list() &&
         outbox_->data().LendsTo(transfer.link);
}

LendChunk Sender::Lend(const TransferPtr& transfer, int64_t bytes) {
  return [transfer, begin = transfer->sent_bytes, bytes](int64_t from, int64_t most,
                                                         absl::FunctionRef<void(Pieces)> read) {
    thread_local std::vector<std::span<std::byte>> pieces;
    thread_local std::vector<std::span<const std::byte>> read_only;
    const Gate::Pass pass(transfer->reading.get());
    if (!pass.open()) return false;
    pieces.clear();
    transfer->plan.AppendPieces(begin + from, std::min(most, bytes - from), &pieces);
    read_only.assign(pieces.begin(), pieces.end());
    for (const std::span<const std::byte> piece : read_only) FetchAhead(piece);
    read(read_only);
    return true;
  };
}

// Takes nothing of the arena: how much is on its way is bounded by the window, and in how many
// chunks, which are of the peer's choice too, by kMaxLentChunks.
void Sender::SendLent(const TransferPtr& transfer, int64_t bytes) {
  const ChunkHeader header = HeaderOfNext(*transfer, bytes, 0);
  LendChunk lend = Lend(transfer, bytes);
  transfer->sent_bytes += bytes;
  ++transfer->lent_chunks;
  ++metrics_->chunks_sent;
  ++metrics_->chunks_lent;
  metrics_->bytes_sent += bytes;
  auto done = [transfer](const absl::Status& status) {
    --transfer->lent_chunks;
    if (!status.ok() && transfer->failed.ok()) transfer->failed = status;
  };
  outbox_->data().SendChunk(transfer->link, header, std::move(lend), std::move(done));
}

FillChunk Sender::Fill(const TransferPtr& transfer, PageWay way, const ChunksUnderWay::Chunk& taken,
                       int64_t bytes) {
  switch (way) {
    case PageWay::kInPlace:
      return List(transfer, taken.chunk, bytes);
    case PageWay::kDeviceArena:
      return GatherOnDevice(transfer, taken.chunk, taken.device_chunk);
    case PageWay::kArena:
      break;
  }
  return Gather(transfer, taken.chunk);
}

ChunksUnderWay::Chunk ChunksUnderWay::Take(const PeerKey& peer, bool on_device,
                                           bool is_read_in_place) {
  const Chunk taken{arena->Take(), on_device ? device_arena->Take() : -1};
  of_peers.Add(peer);
  if (on_device) of_peers_on_device.Add(peer);
  if (is_read_in_place) read_since.emplace(taken.chunk, Clock::now());
  return taken;
}

void ChunksUnderWay::GiveBack(const Chunk& taken, const PeerKey& peer) {
  read_since.erase(taken.chunk);
  arena->GiveBack(taken.chunk);
  of_peers.Remove(peer);
  if (taken.device_chunk < 0) return;
  device_arena->GiveBack(taken.device_chunk);
  of_peers_on_device.Remove(peer);
}

void Sender::SendChunk(const TransferPtr& transfer, PageWay way, int64_t bytes) {
  const ChunksUnderWay::Chunk taken =
      under_way_->Take(transfer->peer, way == PageWay::kDeviceArena, ReadInPlace(*transfer, way));
  const ChunkHeader header =
      HeaderOfNext(*transfer, bytes, way == PageWay::kArena ? 0 : kChunkInPool);
  FillChunk fill = Fill(transfer, way, taken, bytes);
  transfer->sent_bytes += bytes;
  ++metrics_->chunks_sent;
  if (way == PageWay::kInPlace) ++metrics_->chunks_in_place;
  metrics_->bytes_sent += bytes;
  auto done = [under_way = under_way_, taken, transfer,
               end = transfer->sent_bytes](const absl::Status& status) {
    // Its reader is through with all up to here, for chunks are read in order; credit comes another
    // way and may have come first.
    const bool read_in_place =
        transfer->read_in_place.erase(taken.chunk) > 0 || taken.device_chunk >= 0;
    if (read_in_place && status.ok()) {
      transfer->credited_bytes = std::max(transfer->credited_bytes, end);
    }
    under_way->GiveBack(taken, transfer->peer);
    if (!status.ok() && transfer->failed.ok()) transfer->failed = status;
  };
  outbox_->data().SendChunk(transfer->link, header, std::move(fill), std::move(done));
}

}  // namespace kvferry
