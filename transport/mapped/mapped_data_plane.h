#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "base/shared_memory.h"
#include "pool/pool_memory.h"
#include "transport/arena.h"
#include "transport/data_plane.h"

namespace kvferry {

// Link ids of this plane; those of others are smaller.
inline constexpr LinkId kFirstMappedLink = LinkId{1} << 62;

// What peers may read of a pool where it lies, and how theirs are read. All outlives the plane.
struct MappedPool {
  const SharedMemory* shared = nullptr;  // Null: the pool lies in no memory that can be mapped
  std::vector<PoolMemory::SharedPart> parts{};  // by its fd; then these, if any.
  const PoolMemory* memory = nullptr;           // Maps such parts of peers; null: none are mapped.
};

// A data plane to peers on this host (docs/wire_protocol.md, "Same host"): chunks are read where
// they lie in the sender's arena, or in its pool, and only words about them pass through Unix
// sockets. Payloads must lie in `arena`, which outlives the plane and whose memory is shared.
// Pieces of a pool on a device lie where the receiving pool's memory has mapped them, and the
// processor cannot touch them (PoolMemory::MoveApart). Connect() is UNAVAILABLE for a peer that is
// not on this host, INVALID_ARGUMENT for one of another version of this protocol,
// FAILED_PRECONDITION for one that has said that it cannot map this side's memory. A link is to be
// used once it is open: the peer has mapped the memory then. One that the peer does not take goes
// down with FAILED_PRECONDITION (it cannot) or RESOURCE_EXHAUSTED (not now, or it has not
// answered).
absl::StatusOr<std::unique_ptr<AddressedPlane>> MakeMappedDataPlane(Arena* arena, MappedPool pool,
                                                                    int64_t answer_timeout_ms);

}  // namespace kvferry
