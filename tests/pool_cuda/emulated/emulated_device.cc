// The calls of an emulated CUDA runtime, and what tests ask of it.

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "tests/pool_cuda/emulated/machine.h"

namespace kvferry::emulated {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

std::array<std::atomic<bool>, kDevices> has_context;
std::atomic<bool> is_capturing;
std::atomic<int> lost_device = -1;
std::atomic<int> failing_queries;
std::atomic<cudaError_t> query_error;
std::atomic<bool> hides_host_ranges;
std::atomic<int64_t> launches, copies;

cudaError_t Answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

Machine& AnyMachine() {
  static auto* const machine = new Machine;  // Outlives whatever static holds memory of it.
  return *machine;
}

// For calls that need a context.
Machine& TheMachine() {
  has_context[static_cast<size_t>(current_device)] = true;
  return AnyMachine();
}

// What a call gets that may be unsafe while a graph is captured.
bool IsForbidden() { return is_capturing && capture_mode == cudaStreamCaptureModeGlobal; }

// Of a query: an error that keeps it from being answered.
std::optional<cudaError_t> FailureOfQuery() {
  if (IsForbidden()) return cudaErrorStreamCaptureUnsupported;
  if (failing_queries <= 0) return std::nullopt;
  if (failing_queries.fetch_sub(1) <= 0) return std::nullopt;  // Another thread's was the last.
  return query_error;
}

cudaError_t Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, bool waits,
                 cudaStream_t stream) {
  ++copies;
  return Answer(TheMachine().Copy(to, from, bytes, kind, waits, stream));
}

CUresult PrimaryContextState(CUdevice device, unsigned* flags, int* active) {
  if (device < 0 || device >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = HasContext(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult AddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  const auto range =
      AnyMachine().RangeOf(reinterpret_cast<const void*>(pointer), !hides_host_ranges);
  if (range.empty()) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = reinterpret_cast<CUdeviceptr>(range.data());
  if (bytes != nullptr) *bytes = range.size();
  return CUDA_SUCCESS;
}

}  // namespace

bool HasContext(int device) { return has_context[static_cast<size_t>(device)]; }

void ForgetContexts() {
  for (std::atomic<bool>& has : has_context) has = false;
}

void SetCapturing(bool capturing) { is_capturing = capturing; }

void LoseDevice(int device) { lost_device = device; }

void HideHostRanges(bool hide) { hides_host_ranges = hide; }

CallCounts CountedCalls() { return {launches, copies}; }

void FailQueries(int count, cudaError_t error) {
  query_error = error;
  failing_queries = count;
}

void Translate(std::span<std::byte> argument, bool has_padding) {
  TheMachine().Translate(argument, has_padding);
}

cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> thread) {
  ++launches;
  return Answer(TheMachine().Launch(config, std::move(thread)));
}

}  // namespace kvferry::emulated

using kvferry::emulated::AddressRange;
using kvferry::emulated::Answer;
using kvferry::emulated::Copy;
using kvferry::emulated::FailureOfQuery;
using kvferry::emulated::IsForbidden;
using kvferry::emulated::PrimaryContextState;
using kvferry::emulated::TheMachine;

cudaError_t cudaGetLastError() { return std::exchange(kvferry::emulated::last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    default:
      return "an error of the emulated device";
  }
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kvferry::emulated::kDevices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = kvferry::emulated::current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kvferry::emulated::kDevices) return Answer(cudaErrorInvalidDevice);
  if (device == kvferry::emulated::lost_device) return Answer(cudaErrorDevicesUnavailable);
  kvferry::emulated::current_device = device;
  kvferry::emulated::has_context[static_cast<size_t>(device)] = true;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Allocate(pointer, bytes, /*can_be_shared=*/true));
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t /*stream*/) {
  return Answer(TheMachine().Allocate(pointer, bytes, /*can_be_shared=*/false));
}

cudaError_t cudaFree(void* pointer) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Free(pointer));
}

cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned /*flags*/) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().AllocateManaged(pointer, bytes));
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return Answer(TheMachine().FreeInOrder(pointer, stream));
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned /*flags*/) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Pin(pointer, bytes));
}

cudaError_t cudaHostUnregister(void* pointer) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Unpin(pointer));
}

cudaError_t cudaHostGetDevicePointer(void** seen, void* pointer, unsigned /*flags*/) {
  *seen = TheMachine().AttributesOf(pointer).devicePointer;
  return Answer(*seen == nullptr ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = TheMachine().AttributesOf(pointer);
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  const auto shared = TheMachine().Share(pointer);
  if (!shared) return Answer(cudaErrorInvalidValue);
  *handle = {};
  std::memcpy(handle->reserved, &*shared, sizeof *shared);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  if (flags != cudaIpcMemLazyEnablePeerAccess) return Answer(cudaErrorInvalidValue);
  kvferry::emulated::SharedAllocation shared;
  std::memcpy(&shared, handle.reserved, sizeof shared);
  return Answer(TheMachine().Open(pointer, shared));
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) { return Answer(TheMachine().Close(pointer)); }

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  for (const int number : {device, peer}) {
    if (number < 0 || number >= kvferry::emulated::kDevices) return Answer(cudaErrorInvalidDevice);
  }
  *can = device == peer ? 0 : 1;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* status) {
  struct Call {
    const char* name;
    unsigned since;  // What has this name in older versions takes other types.
    void* function;
  };
  const PFN_cuMemGetAddressRange_v3020 address_range = &AddressRange;
  const PFN_cuDevicePrimaryCtxGetState_v7000 context_state = &PrimaryContextState;
  auto found = cudaDriverEntryPointSymbolNotFound;
  *function = nullptr;
  for (const Call& call :
       {Call{"cuMemGetAddressRange", 3020, reinterpret_cast<void*>(address_range)},
        Call{"cuDevicePrimaryCtxGetState", 7000, reinterpret_cast<void*>(context_state)}}) {
    if (symbol != std::string(call.name)) continue;
    const bool known = version >= call.since;
    found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointVersionNotSufficent;
    *function = known ? call.function : nullptr;
  }
  if (status != nullptr) *status = found;
  return cudaSuccess;
}

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Answer(TheMachine().Set(pointer, value, bytes));
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (IsForbidden()) return Answer(cudaErrorStreamCaptureUnsupported);
  return Copy(to, from, bytes, kind, /*waits=*/true, nullptr);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return Copy(to, from, bytes, kind, /*waits=*/false, stream);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int /*priority*/) {
  if (flags != cudaStreamNonBlocking) kvferry::emulated::Fault("such streams wait for others");
  *stream = TheMachine().MakeStream();
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  TheMachine().Destroy(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const auto failure = FailureOfQuery()) return Answer(*failure);
  TheMachine().Synchronize(stream);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (flags != cudaEventDisableTiming) kvferry::emulated::Fault("this device has no clock");
  *event = TheMachine().MakeEvent();
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  TheMachine().Destroy(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  TheMachine().Record(event, stream);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const auto failure = FailureOfQuery()) return Answer(*failure);
  return Answer(TheMachine().IsDone(event) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const auto failure = FailureOfQuery()) return Answer(*failure);
  TheMachine().Synchronize(event);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  (void)TheMachine();
  std::swap(*mode, kvferry::emulated::capture_mode);
  return cudaSuccess;
}
