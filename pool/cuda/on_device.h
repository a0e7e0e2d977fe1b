#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/driver.h"

namespace kvferry {

// UNAVAILABLE when there is no such device.
absl::Status CheckDevice(int device);

// As long as it lives, what another thread captures in a graph (an engine's, with
// cudaStreamCaptureModeGlobal) forbids this thread nothing, and none of its calls breaks the capture:
// it uses nothing that is captured.
class WhateverIsCaptured {
 public:
  WhateverIsCaptured() { Exchange(); }
  ~WhateverIsCaptured() { Exchange(); }
  WhateverIsCaptured(const WhateverIsCaptured&) = delete;
  WhateverIsCaptured& operator=(const WhateverIsCaptured&) = delete;

 private:
  void Exchange() {
    CudaStatus(cudaThreadExchangeStreamCaptureMode(&mode_), "cuda memory: captures").IgnoreError();
  }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// fn() while `device` is the thread's current one. The one before it is current again afterwards,
// unless nothing in this process has used that: CUDA would set up a context there, which takes hundreds
// of megabytes of it, and threads of ours begin with device 0.
template <typename Fn>
auto OnDevice(int device, const Fn& fn) -> decltype(fn()) {
  KVFERRY_RETURN_IF_ERROR(CheckDevice(device));
  int before = 0;
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&before), "cuda memory: current device"));
  if (before != device) {
    KVFERRY_RETURN_IF_ERROR(
        CudaStatus(cudaSetDevice(device), absl::StrCat("cuda memory: device ", device)));
  }
  auto result = [&fn] {
    const WhateverIsCaptured relaxed;
    return fn();
  }();
  if (before != device && HasContext(before)) {
    KVFERRY_RETURN_IF_ERROR(
        CudaStatus(cudaSetDevice(before), absl::StrCat("cuda memory: back to device ", before)));
  }
  return result;
}

}  // namespace kvferry
