#pragma once

// Where chunks of KV come from and go to: UCX (ucx/), and shared memory on one host (mapped/). What is
// read from afar: direct_reads.h.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
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

struct CreditHeader {
  uint64_t transfer_id = 0;
  uint64_t bytes_done = 0;  // Scattered so far.
};
static_assert(sizeof(CreditHeader) == 16);

// A connection to one peer's worker. Never reused.
using LinkId = uint64_t;

// The bytes of a chunk, piece after piece.
using Pieces = std::span<const std::span<const std::byte>>;

// Called from inside DataPlane::Progress().
class DataEvents {
 public:
  virtual ~DataEvents() = default;
  // `payload` is valid during the call only. It may lie in memory of the peer's: it may be looked
  // at while intact(), and has header.bytes bytes then; what was copied from it counts only if
  // intact() still says so afterwards. Once false, always false.
  using Intact = absl::FunctionRef<bool()>;
  using TakeChunk = std::function<void(const ChunkHeader&, Pieces, Intact)>;  // As OnChunk().
  virtual void OnChunk(const ChunkHeader& header, Pieces payload, Intact intact) = 0;
  // A chunk came as a list of where its bytes lie in the sender's memory (DirectReads::Read).
  virtual void OnChunkElsewhere(const ChunkHeader& header, std::span<const std::byte> list) = 0;
  virtual void OnReadFailed(const ChunkHeader& header, const absl::Status& status) = 0;
  // DirectReads has found out what reading over this link takes.
  virtual void OnProbed(LinkId link) = 0;
  virtual void OnCredit(const CreditHeader& header) = 0;
  // The peer is gone. Close(link) is still to be called.
  virtual void OnLinkDown(LinkId link, const absl::Status& status) = 0;
};

using SendDone = std::function<void(const absl::Status&)>;

// What is sent over links. Used by the progress thread.
class ChunkLinks {
 public:
  virtual ~ChunkLinks() = default;

  // Makes a chunk's payload, and what of the header follows from it. CANCELLED: it is not wanted
  // any more.
  using Fill = std::function<absl::StatusOr<std::span<const std::byte>>(ChunkHeader* header)>;
  // `fill` is called once at most, by the thread that sends the chunk: perhaps another one, perhaps
  // before this returns. What it returns must stay as it is until `done` ran: exactly once, on the
  // progress thread, perhaps before this returns; with UNAVAILABLE when the link is unknown, or
  // with what `fill` failed with.
  virtual void SendChunk(LinkId link, const ChunkHeader& header, Fill fill, SendDone done) = 0;
  virtual void SendCredit(LinkId link, const CreditHeader& header) = 0;
  // Whether a payload may be a list of PoolPiece, with kChunkInPool in the header's flags from the
  // start. What they name must stay as it is too, or be taken from the reader before it changes. On
  // this host by Arena::TakeFromReaders. From afar a GuardHead comes first, and its word is raised;
  // `done` then says only that the list has gone, and the peer has to say that it can read at all.
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

  // `payload` must stay as it is until `done` ran: exactly once, perhaps before this returns.
  // When the link is unknown, `done` runs with UNAVAILABLE.
  virtual void SendChunk(LinkId link, const ChunkHeader& header, std::span<const std::byte> payload,
                         SendDone done) = 0;
  virtual void SendCredit(LinkId link, const CreditHeader& header) = 0;
  // Whether the peer has mapped this side's pool.
  virtual bool ReadsPool(LinkId link) const = 0;

  // Opaque bytes that peers pass to Connect().
  virtual const std::string& address() const = 0;
  // `address` must come from a peer whose hello was accepted: it is parsed by code that trusts it.
  virtual absl::StatusOr<LinkId> Connect(const std::string& address) = 0;
  // Sends under way complete with an error, some of them after this returns.
  virtual void Close(LinkId link) = 0;

  // Moves everything on; true when something happened.
  virtual bool Progress(DataEvents* events) = 0;
  virtual int event_fd() const = 0;
  // True when nothing is pending and it is safe to sleep on event_fd().
  virtual bool Arm() = 0;
};

}  // namespace kvferry
