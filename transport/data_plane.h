#pragma once

// Where chunks of KV come from and go to: plain TCP (tcp/), UCX (ucx/), and shared memory on one
// host (mapped/). What is read from afar: direct_reads.h.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "pool/page_runs.h"
#include "pool/pool_memory.h"
#include "transport/backlog.h"
#include "transport/read_costs.h"

namespace kvferry {

// Data messages of docs/wire_protocol.md; the structs are their bytes.
struct ChunkHeader {
  uint64_t transfer_id = 0;
  uint64_t offset = 0;  // In the transfer's stream.
  uint64_t checksum = 0;
  uint32_t bytes = 0;
  uint32_t flags = 0;
};
inline constexpr uint32_t kChunkHasChecksum = 1;
inline constexpr uint32_t kChunkInPool = 2;  // The payload says where the bytes lie.
static_assert(sizeof(ChunkHeader) == 32);

// Where bytes of a chunk lie in the sender's pool memory.
struct PoolPiece {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};
static_assert(sizeof(PoolPiece) == 16);

// A list of that for a peer on this host begins with it. Without places PoolPieces follow, else so
// many PoolPlaces, and the PoolRuns that lie at each of them.
struct PoolListHead {
  uint64_t places = 0;
  uint64_t zero = 0;
};
struct PoolPlace {
  uint64_t offset = 0;
  uint64_t item_bytes = 0;
};
struct PoolRun {
  uint64_t first = 0;  // Of the place's items.
  uint64_t count = 0;
};
static_assert(sizeof(PoolListHead) == sizeof(PoolPiece));
static_assert(sizeof(PoolPlace) == sizeof(PoolPiece) && sizeof(PoolRun) == sizeof(PoolPiece));

struct CreditHeader {
  uint64_t transfer_id = 0;
  uint64_t bytes_done = 0;  // Scattered so far.
};
static_assert(sizeof(CreditHeader) == 16);

// Of a control message that comes over a link instead of the control plane.
struct MessageHeader {
  uint64_t session = 0;  // As its receiver has named it, to this one peer.
};
static_assert(sizeof(MessageHeader) == 8);

// A connection to one peer's worker. Never reused.
using LinkId = uint64_t;

// The bytes of a chunk, piece after piece.
using Pieces = std::span<const std::span<const std::byte>>;
using MutablePieces = std::span<const std::span<std::byte>>;

// Where the first of equal items lies, which lie one behind the other.
struct ItemsPlace {
  const std::byte* begin;
  int64_t item_bytes;
};
// Whole tensors of a stream, as a peer's device has them: the bytes are, place after place, the
// same runs of items of each. There is a run, and a place, and each has an item. Never of a chunk
// with a checksum.
struct PlacedRuns {
  std::span<const PageRun> runs;
  std::span<const ItemsPlace> places;
};
using Payload = std::variant<Pieces, PlacedRuns>;

// Where the bytes of a chunk go that arrive part by part, in order. Used by one thread.
class ChunkSink {
 public:
  virtual ~ChunkSink() = default;
  // How the parts are better brought: by Fill, else by Copy.
  virtual bool prefers_fill() const = 0;
  // Calls `fill` with where the bytes belong that come next; it returns how many it has put there.
  // False, without a call: they are not wanted any more.
  virtual bool Fill(absl::FunctionRef<int64_t(MutablePieces)> fill) = 0;
  // Takes the bytes that come next. False: they are not wanted any more. Where `*reading` is set
  // they are still being read, and have to stay as they are until it is done.
  virtual bool Copy(std::span<const std::byte> bytes,
                    std::shared_ptr<const MovesUnderWay>* reading) = 0;
  // Whether End() has nothing to wait for.
  virtual bool settled() const = 0;
  // All have come, and were meant. Without it none counts.
  virtual void End() = 0;
};

// What takes chunks on one thread: on which they arrive.
class ChunkTaker {
 public:
  virtual ~ChunkTaker() = default;
  // `payload` is valid during the call only. It may lie in memory of the peer's: it may be looked
  // at while intact(), and has header.bytes bytes then; what was copied from it counts only if
  // intact() still says so afterwards. Once false, always false.
  using Intact = absl::FunctionRef<bool()>;
  virtual void OnChunk(const ChunkHeader& header, const Payload& payload, Intact intact) = 0;
  // The first of the header.bytes bytes of a chunk is about to come. Null: nobody wants them.
  virtual std::unique_ptr<ChunkSink> OnChunkBegins(const ChunkHeader& header) = 0;
};

// Called from inside DataPlane::Progress().
class DataEvents : public ChunkTaker {
 public:
  // A chunk came as a list of where its bytes lie in the sender's memory (DirectReads::Read).
  virtual void OnChunkElsewhere(const ChunkHeader& header, std::span<const std::byte> list) = 0;
  virtual void OnReadFailed(const ChunkHeader& header, const absl::Status& status) = 0;
  // DirectReads has found out what reading over this link takes.
  virtual void OnProbed(LinkId link) = 0;
  virtual void OnCredit(const CreditHeader& header) = 0;
  // Must not close links: one of them is being read.
  virtual void OnLinkMessage(const MessageHeader& header, std::span<const std::byte> bytes) = 0;
  // AddressedPlane::IsOpen holds from now on, or who was dialled over TCP has answered.
  virtual void OnLinkOpen(LinkId link) = 0;
  // The peer is gone, or, DEADLINE_EXCEEDED, nothing comes back from it, or, of a link over shared
  // memory that is not open, it has not taken the memory (MakeMappedDataPlane). Close(link) is
  // still to be called.
  virtual void OnLinkDown(LinkId link, const absl::Status& status) = 0;
};

using SendDone = std::function<void(const absl::Status&)>;

// Makes a chunk's payload, and what of the header follows from it. CANCELLED: it is not wanted any
// more. What it returns must stay as it is until the send has completed.
using FillChunk = std::function<absl::StatusOr<std::span<const std::byte>>(ChunkHeader* header)>;
// Calls `read` with the payload from byte `from` on, `most` bytes of it or what is left, which may
// be read during that call only, and has been fetched from memory for it. False, without a call: it
// may not be read any more.
using LendChunk =
    std::function<bool(int64_t from, int64_t most, absl::FunctionRef<void(Pieces)> read)>;
// Where a chunk's payload comes from: made in one piece, once, or read where it lies, perhaps in
// several steps. Asked by the thread that sends the chunk: perhaps another one, perhaps before
// SendChunk returns.
using ChunkSource = std::variant<FillChunk, LendChunk>;

// What is sent over links. Used by the progress thread.
class ChunkLinks {
 public:
  virtual ~ChunkLinks() = default;

  // `done` runs exactly once, on the progress thread, perhaps before this returns; with UNAVAILABLE
  // when the link is unknown, or with what a FillChunk failed with. LendChunk only if
  // LendsTo(link).
  virtual void SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source,
                         SendDone done) = 0;
  virtual bool LendsTo(LinkId link) const = 0;
  virtual void SendCredit(LinkId link, const CreditHeader& header) = 0;
  // Whether a payload may be a list of where the bytes lie, with kChunkInPool in the header's flags
  // from the start. What it names must stay as it is too, or be taken from the reader before it
  // changes. On this host, where a PoolListHead comes first, by Arena::TakeFromReaders. From afar
  // PoolPieces come behind a GuardHead, and its word is raised; `done` then says only that the list
  // has gone, and the peer has to say that it can read at all.
  enum class ReadsPool { kNo, kOnThisHost, kFromAfar };
  virtual ReadsPool PoolReads(LinkId link) const = 0;
  // What reading the peer's pool from afar takes this side.
  virtual ReadCosts CostsOfReads(LinkId link) const = 0;
  // As DirectReads.
  virtual void Read(LinkId link, const ChunkHeader& header, std::span<const std::byte> list) = 0;
};

// Not thread-safe: made on one thread, then used by one other alone: the progress thread, or a
// lane's. No call blocks, except the destructor, which waits for closing links for a bounded time.
class DataPlane {
 public:
  virtual ~DataPlane() = default;

  // As ChunkLinks, on this thread.
  virtual void SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source,
                         SendDone done) = 0;
  virtual void SendCredit(LinkId link, const CreditHeader& header) = 0;
  // Whether SendMessage() is for it.
  virtual bool carries_messages() const { return false; }
  // Messages of a link, of kMaxMessageBytes at most, arrive in order. RESOURCE_EXHAUSTED when more
  // than kMaxMessagesWaiting wait, UNAVAILABLE when the link is unknown.
  virtual absl::Status SendMessage(LinkId /*link*/, const MessageHeader& /*header*/,
                                   std::string_view /*bytes*/) {
    return absl::UnimplementedError("this plane carries no messages");
  }
  virtual Backlog BacklogOf(LinkId /*link*/) const { return {}; }
  // Sends under way complete with an error, some of them after this returns.
  virtual void Close(LinkId link) = 0;

  // Moves everything on; true when something happened.
  virtual bool Progress(DataEvents* events) = 0;
  virtual int event_fd() const = 0;
  // True when nothing is pending and it is safe to sleep on event_fd().
  virtual bool Arm() = 0;
  // Ends what is overdue (the next Progress() reports it); returns when to be called again at the
  // latest.
  virtual Deadline Tick(Deadline /*now*/) { return Deadline::max(); }
};

// One whose peers are told where to connect to. LendChunk is not for it.
class AddressedPlane : public DataPlane {
 public:
  // Opaque bytes that peers pass to Connect().
  virtual const std::string& address() const = 0;
  // `address` must come from a peer whose hello was accepted: it is parsed by code that trusts it.
  virtual absl::StatusOr<LinkId> Connect(const std::string& address) = 0;
  // Whether the link may be used; else OnLinkOpen() or OnLinkDown() follows, in a bounded time.
  virtual bool IsOpen(LinkId /*link*/) const { return true; }
  // Whether the peer has mapped this side's pool.
  virtual bool ReadsPool(LinkId /*link*/) const { return false; }
  // `payload` must stay as it is until `done` ran: exactly once, perhaps before this returns.
  // When the link is unknown, `done` runs with UNAVAILABLE.
  virtual void SendPayload(LinkId link, const ChunkHeader& header,
                           std::span<const std::byte> payload, SendDone done) = 0;
  void SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source, SendDone done) final {
    const auto* fill = std::get_if<FillChunk>(&source);
    if (fill == nullptr) return done(absl::UnimplementedError("this plane sends from one piece"));
    ChunkHeader filled = header;
    const absl::StatusOr<std::span<const std::byte>> payload = (*fill)(&filled);
    if (!payload.ok()) return done(payload.status());
    SendPayload(link, filled, *payload, std::move(done));
  }
};

}  // namespace kvferry
