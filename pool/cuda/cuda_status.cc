#include "pool/cuda/cuda_status.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace kvferry {
namespace {

absl::StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::StatusCode::kResourceExhausted;
    case cudaErrorDevicesUnavailable:
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidDevice:
    case cudaErrorNoDevice:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

bool IsOver(cudaError_t answer) {
  switch (answer) {
    case cudaErrorNotReady:
    // Of a graph that is captured meanwhile, on whatever thread.
    case cudaErrorNotPermitted:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorCapturedEvent:
    case cudaErrorStreamCaptureWrongThread:
      return false;
    default:
      return true;
  }
}

absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  return absl::Status(CodeOf(error), absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

absl::StatusOr<cudaPointerAttributes> AttributesOf(const void* address) {
  cudaPointerAttributes attributes = {};
  KVFERRY_RETURN_IF_ERROR(
      CudaStatus(cudaPointerGetAttributes(&attributes, address), "cuda memory: an address"));
  return attributes;
}

}  // namespace kvferry
