#pragma once

// The direct path (docs/wire_protocol.md, "Direct"): one-sided reads of a peer's pool over networks
// that have them in hardware. transport/ucx/ implements it.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "transport/data_plane.h"
#include "transport/read_costs.h"

namespace kvferry {

// What a list of pieces over a network begins with: which word of the sender's Guards has which
// value while what is listed may be read.
struct GuardHead {
  uint64_t index = 0;
  uint64_t generation = 0;
};
static_assert(sizeof(GuardHead) == sizeof(PoolPiece));

// Not thread-safe: made on one thread, then used by the progress thread alone. No call blocks,
// except the destructor, which waits for closing links for a bounded time.
class DirectReads {
 public:
  // What peers may read of this process: nothing where `guards` is empty. Outlives the object.
  struct Readable {
    std::span<const std::byte> guards;
    std::vector<std::span<const std::byte>> pool;
  };

  virtual ~DirectReads() = default;

  // Opaque bytes that peers pass to Connect(); empty when they may read nothing.
  virtual const std::string& address() const = 0;
  // Begins to find out whether and how fast the peer's memory can be read. `link` is new, and
  // `address` of a peer whose hello was accepted: it is parsed by code that trusts it.
  virtual absl::Status Connect(LinkId link, const std::string& address) = 0;
  virtual void Close(LinkId link) = 0;
  // Whether that is not known yet. OnProbed(link) follows, once and in a bounded time: it may be
  // found out still later, and then counts from then on.
  virtual bool Probing(LinkId link) const = 0;
  // Not possible() while it is not known, or is known not to work (any more).
  virtual ReadCosts Costs(LinkId link) const = 0;

  // Reads the chunk that `list` (a GuardHead, then PoolPieces) names, into memory of its own. Ends
  // with OnChunk() without kChunkInPool, or with OnReadFailed(): RESOURCE_EXHAUSTED where there is
  // no room for so many, which is said of one chunk of each transfer. Of a link that is closed
  // first, nothing more is heard.
  virtual void Read(LinkId link, const ChunkHeader& header, std::span<const std::byte> list) = 0;

  // Moves everything on; true when something happened.
  virtual bool Progress(DataEvents* events) = 0;
  // Gives up what has taken too long; returns when to be called again at the latest.
  virtual Deadline Tick(Deadline now) = 0;
  virtual int event_fd() const = 0;
  // True when nothing is pending and it is safe to sleep on event_fd().
  virtual bool Arm() = 0;
};

}  // namespace kvferry
