#pragma once

// What CUDA's header of this name says of the driver's calls that the emulated devices know
// (cuda_runtime_api.h).

#include <cstddef>

enum CUresult : int {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_NOT_FOUND = 500,
};
using CUdeviceptr = unsigned long long;
using CUdevice = int;
using PFN_cuDevicePrimaryCtxGetState_v7000 = CUresult (*)(CUdevice device, unsigned* flags,
                                                          int* active);
using PFN_cuMemGetAddressRange_v3020 = CUresult (*)(CUdeviceptr* base, size_t* bytes,
                                                    CUdeviceptr pointer);
