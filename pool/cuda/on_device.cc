#include "pool/cuda/on_device.h"

#include <atomic>

#include "base/log.h"
#include "pool/cuda/driver.h"

namespace kvferry {

absl::Status CheckDevice(int device) {
  // It stays what it is while a process runs, and is asked for with each chunk of a transfer.
  static std::atomic<int> known_count = 0;
  int count = known_count;
  if (count == 0) {
    KVFERRY_RETURN_IF_ERROR(
        CudaStatus(cudaGetDeviceCount(&count), absl::StrCat("cuda memory: no device ", device)));
    known_count = count;
  }
  if (device >= 0 && device < count) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cuda memory: no device ", device, ": this machine has ", count));
}

BackToDevice::~BackToDevice() {
  if (!HasContext(device_)) return;
  const cudaError_t answer = cudaSetDevice(device_);
  if (answer == cudaSuccess) return;
  cudaGetLastError();
  Log().error("cuda memory: device {}, which was the thread's current one, cannot be it again: {}",
              device_, cudaGetErrorString(answer));
}

}  // namespace kvferry
