#pragma once

// A CUDA runtime whose devices are this processor: what pool/cuda and its tests use of CUDA, so
// that they compile as C++ and run where there is no GPU. It shows what kernels and calls do, not
// how fast, and it is stricter than a GPU in what goes unnoticed there:
//
// - Nobody can touch what lies at an address of a device: a kernel is given other pointers for
//   those among its arguments, and so are copies. Its memory begins full of 0xcd, ends at a page
//   that is out of bounds, and what is written beside it is found.
// - What is put into a stream is done when somebody waits for it, and not before; or asks whether
//   it is done a second time.
// - A kernel gets no pointer to memory that its device cannot reach. Its threads run one after the
//   other, from the first to the last and in the next launch from the last to the first.
// - Words that are not aligned trap, as this is compiled with -fsanitize=alignment.
// - Memory that another process shares (cudaIpcOpenMemHandle) is there for the device alone that
//   was current when it was opened, to be read and not to be written, and until it is closed,
//   whatever waits in streams then. A device opens it once: CUDA would count, here the second time
//   is an error.
//
// - Any call that needs a context sets one up on the current device; so does making a device
//   current.
// - While a test says that some thread captures a graph (SetCapturing()), calls that may be unsafe
//   then are refused, but to threads that have said that this is no concern of theirs.
//
// Whoever breaks one of these rules ends with a line on standard error or a signal. What CUDA
// answers with an error gets that error. Kernels that wait for one another (__syncthreads, warps)
// cannot run, and there are no streams but the default one and those that do not wait for it.
// Thread-safe. Names and values are CUDA's: https://docs.nvidia.com/cuda/cuda-runtime-api.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

// ---------------------------------------------------------------- calls

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorCudartUnloading = 4,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidMemcpyDirection = 21,
  cudaErrorStubLibrary = 34,
  cudaErrorInsufficientDriver = 35,
  cudaErrorDevicesUnavailable = 46,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorDeviceUninitialized = 201,
  cudaErrorAlreadyMapped = 208,
  cudaErrorECCUncorrectable = 214,
  cudaErrorNvlinkUncorrectable = 220,
  cudaErrorContained = 226,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchTimeout = 702,
  cudaErrorContextIsDestroyed = 709,
  cudaErrorAssert = 710,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorHardwareStackError = 714,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorInvalidAddressSpace = 717,
  cudaErrorInvalidPc = 718,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotPermitted = 800,
  cudaErrorSystemNotReady = 802,
  cudaErrorSystemDriverMismatch = 803,
  cudaErrorMpsClientTerminated = 810,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureMerge = 902,
  cudaErrorStreamCaptureUnmatched = 903,
  cudaErrorStreamCaptureUnjoined = 904,
  cudaErrorStreamCaptureIsolation = 905,
  cudaErrorStreamCaptureImplicit = 906,
  cudaErrorCapturedEvent = 907,
  cudaErrorStreamCaptureWrongThread = 908,
  cudaErrorUnknown = 999,
};
enum cudaStreamCaptureMode : int {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};
enum cudaMemcpyKind : int {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};
enum cudaMemoryType : int {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3,
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
};
using cudaStream_t = struct CUstream_st*;
constexpr unsigned cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2;

cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);

cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream);
cudaError_t cudaFree(void* pointer);
// The host touches it too, where it lies.
constexpr unsigned cudaMemAttachGlobal = 1;
cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned flags = cudaMemAttachGlobal);
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream);
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* pointer);
cudaError_t cudaHostGetDevicePointer(void** seen, void* pointer, unsigned flags);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer);

// Other processes may map the whole allocation that the pointer lies in, and keep what is in it
// when it is freed here or this process ends. They must be of the same user and see the same /proc.
struct cudaIpcMemHandle_t {
  char reserved[64];
};
constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer);
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* pointer);
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer);

// Knows cuDevicePrimaryCtxGetState and cuMemGetAddressRange, whose types are in cudaTypedefs.h.
enum cudaDriverEntryPointQueryResult : int {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2,  // As CUDA spells it.
};
constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* status = nullptr);

cudaError_t cudaMemset(void* pointer, int value, size_t bytes);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);

constexpr unsigned cudaStreamNonBlocking = 1;
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);

// Stands for what was in a stream when it was recorded.
using cudaEvent_t = struct CUevent_st*;
constexpr unsigned cudaEventDisableTiming = 2;
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

// Swaps the calling thread's mode with this one.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);

// ---------------------------------------------------------------- what tests ask and make happen

namespace kvferry::emulated {

// Whether a device has a context. Forgotten, it has none until it is used again.
bool HasContext(int device);
void ForgetContexts();
// A thread captures a graph with cudaStreamCaptureModeGlobal.
void SetCapturing(bool capturing);
// So many queries of and waits for events and streams of this process fail from here on, and say
// nothing.
void FailQueries(int count, cudaError_t error);
// The device cannot be made current; -1: each can.
void LoseDevice(int device);
// cuMemGetAddressRange knows memory of devices alone, as its documentation has it.
void HideHostRanges(bool hide);
// Of all devices and threads so far.
struct CallCounts {
  int64_t launches, copies;
};
CallCounts CountedCalls();

}  // namespace kvferry::emulated

// ---------------------------------------------------------------- kernels

// As CUDA spells them.
// NOLINTBEGIN(bugprone-reserved-identifier)
#define __global__
#define __device__
// Threads share one argument, as on a GPU: `const Argument __grid_constant__ name` is a reference
// here.
#define __grid_constant__ &
#define __host__
#define __launch_bounds__(threads, blocks)

struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline thread_local dim3 threadIdx, blockIdx, gridDim;

using std::max;
using std::min;
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
inline void* __cvta_global_to_generic(size_t address) { return reinterpret_cast<void*>(address); }
// Atomic, as no two threads of a device run at once.
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  return std::exchange(*to, *to + value);
}
// NOLINTEND(bugprone-reserved-identifier)

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace kvferry::emulated {

// Replaces the addresses of the current device in an argument by those where it has its memory.
// With padding, which may hold anything, nothing is refused.
void Translate(std::span<std::byte> argument, bool has_padding);

template <typename Argument>
void TranslateArgument(Argument& argument) {
  bool has_padding = !std::has_unique_object_representations_v<Argument>;
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
  __builtin_clear_padding(&argument);
  has_padding = false;
#endif
#endif
  Translate(std::as_writable_bytes(std::span(&argument, 1)), has_padding);
}

// Puts a launch into the stream; thread() is what one thread does.
cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> thread);

}  // namespace kvferry::emulated

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  std::tuple<std::remove_cvref_t<Parameters>...> values(std::forward<Arguments>(arguments)...);
  std::apply([](auto&... value) { (kvferry::emulated::TranslateArgument(value), ...); }, values);
  return kvferry::emulated::Launch(*config, [kernel, values] { std::apply(kernel, values); });
}
