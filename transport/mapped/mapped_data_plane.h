#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "transport/arena.h"
#include "transport/data_plane.h"

namespace kvferry {

// Link ids of this plane; those of others are smaller.
inline constexpr LinkId kFirstMappedLink = LinkId{1} << 62;

// A data plane to peers on this host (docs/wire_protocol.md, "Same host"): chunks are read where
// they lie in the sender's arena, or in its pool, and only words about them pass through Unix
// sockets. Payloads must lie in `arena`, which outlives the plane and whose memory is
// shared; `pool` outlives it too, or is null: then nothing is read there. Connect() is UNAVAILABLE
// for a peer that is not on this host, INVALID_ARGUMENT for one of another version of this
// protocol, FAILED_PRECONDITION for one that has dropped a connection before it read anything.
absl::StatusOr<std::unique_ptr<AddressedPlane>> MakeMappedDataPlane(Arena* arena,
                                                                    const SharedMemory* pool);

}  // namespace kvferry
