#pragma once

#include <memory>

#include "pool/pool_memory.h"

namespace kvferry {

// Memory of GPU `device`, for pools and block caches: what CreateIn() and Create() take. The CPU
// cannot touch it. What pools adopt has to lie there; nothing else is checked before it is used:
// UNAVAILABLE naming the reason when there is no such device, RESOURCE_EXHAUSTED when it will not
// give the memory.
//
// Run() is CopyTokensCuda(), and RunQuantized() RunQuantizedCuda(), a launch a copy, on the
// device's default stream, and waits for it: it comes after everything in streams that synchronise
// with that one, as an engine's do unless they were made not to. Either side may lie on the device,
// in host memory that is pinned (PinHostMemory), which the device reads and writes where it lies,
// or, but for codes and scales, in any other host memory, which goes through a packed buffer,
// 16 MiB at a time. Slots are checked on the host before, as everywhere; one that is written twice
// gets either row or parts of both. INVALID_ARGUMENT for memory of another device; nothing is
// written then.
//
// `device` is the calling thread's current one meanwhile, and stays it where nothing in this
// process has used the one before. Captures of other threads are not disturbed (on the default
// stream they may be, as always).
std::shared_ptr<const PoolMemory> CudaMemory(int device);

}  // namespace kvferry
