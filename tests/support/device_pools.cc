// Linked into a binary, it has a device for the paths whose pools lie on one: one that the processor
// plays, or a GPU (KVFERRY_TEST_ON_GPU).

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "pool/cuda/cuda_memory.h"
#include "tests/support/kv_pattern.h"

namespace kvferry {
namespace {

// Child processes may be given another one.
int DeviceOfThisProcess() {
  const char* device = std::getenv("KVFERRY_TEST_DEVICE");
  int number = 0;
  return device != nullptr && absl::SimpleAtoi(device, &number) ? number : 0;
}

[[maybe_unused]] const bool has_device =
    (memory_of_device = [] { return CudaMemory(DeviceOfThisProcess()); }) != nullptr;

}  // namespace
}  // namespace kvferry
