#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/cuda/cuda_status.h"

namespace kvferry {

// UNAVAILABLE when there is no such device.
absl::Status CheckDevice(int device);

// fn() while `device` is the thread's current one.
template <typename Fn>
auto OnDevice(int device, const Fn& fn) -> decltype(fn()) {
  KVFERRY_RETURN_IF_ERROR(CheckDevice(device));
  int current = 0;
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&current), "cuda memory: current device"));
  if (current == device) return fn();
  KVFERRY_RETURN_IF_ERROR(
      CudaStatus(cudaSetDevice(device), absl::StrCat("cuda memory: device ", device)));
  auto result = fn();
  KVFERRY_RETURN_IF_ERROR(
      CudaStatus(cudaSetDevice(current), absl::StrCat("cuda memory: back to device ", current)));
  return result;
}

}  // namespace kvferry
