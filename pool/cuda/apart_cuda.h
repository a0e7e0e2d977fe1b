#pragma once

// Work that waits for nothing else that a device does, and is not waited for by it: what
// PoolMemory::RunApart() and MoveApart() are done on.

#include <cuda_runtime_api.h>

#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "pool/pool_memory.h"

namespace kvferry {

// The calling thread's own stream of the device, which must be the current one. It lives as long as
// the thread.
absl::StatusOr<cudaStream_t> StreamApart(int device);

// Returns when nothing of it is under way any more, whatever CUDA answers meanwhile. Only for such
// streams: nobody captures what they do.
absl::Status WaitFor(cudaStream_t stream, absl::string_view what);

// PoolMemory::MoveApart() on the device, which must be the current one: returns when all is done.
absl::Status MoveApartCuda(std::span<const BytesMove> moves, int device);
// PoolMemory::BeginMoveApart(). It returns before all is done where the device reaches both sides.
absl::StatusOr<std::shared_ptr<const MovesUnderWay>> BeginMoveApartCuda(
    std::span<const BytesMove> moves, int device);
// PoolMemory::MoveItemsApart(), as MoveApartCuda().
absl::Status MoveItemsApartCuda(std::span<const ItemsMove> items, std::span<const PlaceMove> places,
                                int device);

}  // namespace kvferry
