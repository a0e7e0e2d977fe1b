#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/cuda/cuda_status.h"

namespace kvferry {

// UNAVAILABLE when there is no such device.
absl::Status CheckDevice(int device);

// As long as it lives, what another thread captures in a graph (an engine's, with
// cudaStreamCaptureModeGlobal) forbids this thread nothing, and none of its calls breaks the
// capture: it uses nothing that is captured.
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

// Makes a device the thread's current one again when it goes, however what was done meanwhile
// ended: that stands even where this fails, which the log says. A device that nothing in this
// process has used is left alone: CUDA would set up a context there, which takes hundreds of
// megabytes of it, and threads of ours begin with device 0.
class BackToDevice {
 public:
  explicit BackToDevice(int device) : device_(device) {}
  ~BackToDevice();
  BackToDevice(const BackToDevice&) = delete;
  BackToDevice& operator=(const BackToDevice&) = delete;

 private:
  const int device_;
};

// fn() while `device` is the thread's current one, as it was before afterwards (BackToDevice).
template <typename Fn>
auto OnDevice(int device, const Fn& fn) -> decltype(fn()) {
  KVFERRY_RETURN_IF_ERROR(CheckDevice(device));
  int before = 0;
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&before), "cuda memory: current device"));
  std::optional<BackToDevice> back;
  if (before != device) {
    KVFERRY_RETURN_IF_ERROR(
        CudaStatus(cudaSetDevice(device), absl::StrCat("cuda memory: device ", device)));
    back.emplace(before);
  }
  const WhateverIsCaptured relaxed;
  return fn();
}

}  // namespace kvferry
