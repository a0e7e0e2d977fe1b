#include "pool/cuda/on_device.h"

namespace kvferry {

absl::Status CheckDevice(int device) {
  int count = 0;
  KVFERRY_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceCount(&count), absl::StrCat("cuda memory: no device ", device)));
  if (device >= 0 && device < count) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cuda memory: no device ", device, ": this machine has ", count));
}

}  // namespace kvferry
