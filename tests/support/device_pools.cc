// Linked into a binary, it has a device for the paths whose pools lie on one: one that the processor
// plays, or a GPU (KVFERRY_TEST_ON_GPU).

#include "pool/cuda/cuda_memory.h"
#include "tests/support/kv_pattern.h"

namespace kvferry {
namespace {

[[maybe_unused]] const bool has_device =
    (memory_of_device = [] { return CudaMemory(0); }) != nullptr;

}  // namespace
}  // namespace kvferry
