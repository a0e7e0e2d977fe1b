#include "pool/cuda/driver.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/cuda/cuda_status.h"

namespace kvferry {
namespace {

// A call that has its present arguments since this version of CUDA.
template <typename Function>
absl::StatusOr<Function> DriverCall(const char* name, [[maybe_unused]] unsigned since) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if defined(CUDART_VERSION) && CUDART_VERSION < 12050
  const cudaError_t asked = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#else
  const cudaError_t asked =
      cudaGetDriverEntryPointByVersion(name, &function, since, cudaEnableDefault, &found);
#endif
  KVFERRY_RETURN_IF_ERROR(CudaStatus(asked, absl::StrCat("cuda memory: looking for ", name)));
  if (function != nullptr && found == cudaDriverEntryPointSuccess) {
    return reinterpret_cast<Function>(function);
  }
  return absl::UnimplementedError(absl::StrCat("cuda memory: the driver has no ", name));
}

}  // namespace

bool HasContext(int device) {
  static const auto state_of =
      DriverCall<PFN_cuDevicePrimaryCtxGetState_v7000>("cuDevicePrimaryCtxGetState", 7000);
  unsigned flags = 0;
  int active = 1;
  // The number of a device is the driver's handle of it, as elsewhere (torch's
  // hasPrimaryContext()).
  const bool told = state_of.ok() && (*state_of)(device, &flags, &active) == CUDA_SUCCESS;
  return !told || active != 0;
}

absl::StatusOr<std::span<const std::byte>> AllocationOf(const std::byte* address) {
  static const auto range_of =
      DriverCall<PFN_cuMemGetAddressRange_v3020>("cuMemGetAddressRange", 3020);
  KVFERRY_RETURN_IF_ERROR(range_of.status());
  CUdeviceptr base = 0;
  size_t bytes = 0;
  const CUresult result = (*range_of)(&base, &bytes, reinterpret_cast<CUdeviceptr>(address));
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(
        absl::StrCat("cuda memory: cuMemGetAddressRange failed with ", static_cast<int>(result)));
  }
  return std::span(reinterpret_cast<const std::byte*>(base), bytes);
}

}  // namespace kvferry
