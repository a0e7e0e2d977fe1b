#include "python/pool_memory.h"

#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "python/status_error.h"
#ifdef KVFERRY_HAVE_CUDA
#include "pool/cuda/cuda_memory.h"
#endif

namespace nb = nanobind;

namespace kvferry {
namespace {

std::optional<int> CudaDeviceOf(absl::string_view name) {
  int device = 0;
  const bool known = absl::ConsumePrefix(&name, "cuda:") && !name.empty() &&
                     absl::ascii_isdigit(name.front()) && absl::SimpleAtoi(name, &device);
  return known ? std::optional(device) : std::nullopt;
}

}  // namespace

std::shared_ptr<const PoolMemory> MemoryNamed(const std::string& name) {
  if (name == "host") return nullptr;
  const std::optional<int> device = CudaDeviceOf(name);
  if (!device) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("memory is '", name, "' but must be 'host', or 'cuda:' and a device")));
  }
#ifdef KVFERRY_HAVE_CUDA
  return CudaMemory(*device);
#else
  throw StatusError(absl::UnavailableError(absl::StrCat(
      "memory is '", name,
      "' but this kvferry was built without CUDA: install it again where there is a CUDA "
      "toolkit (nvcc on PATH), with KVFERRY_CUDA=ON to be told what is missing")));
#endif
}

std::string NameOf(const PoolMemory& memory) {
  const std::optional<int> device = memory.cuda_device();
  return device ? absl::StrCat("cuda:", *device) : "host";
}

DlpackDevice DeviceOf(const PoolMemory& memory) {
  const std::optional<int> device = memory.cuda_device();
  if (device) return {nb::device::cuda::value, *device};
  return {nb::device::cpu::value, 0};
}

std::shared_ptr<const PoolMemory> MemoryOn(const DlpackDevice& device) {
  if (device.type == nb::device::cpu::value) return HostMemory();
  if (device.type == nb::device::cuda::value) return MemoryNamed(absl::StrCat("cuda:", device.id));
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("tensors lie on a device (DLPack type ", device.type, ", number ", device.id,
                   ") but must lie on the CPU or on a CUDA device")));
}

void CheckLiesIn(const std::string& what, const DlpackDevice& device, const PoolMemory& memory) {
  const DlpackDevice here = DeviceOf(memory);
  // Some number the CPU's as well.
  if (device == here || (device.type == here.type && memory.on_host())) return;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat(what, " lies on another device (DLPack type ", device.type, ", number ",
                   device.id, ") than the first, which is in ", memory.name())));
}

void CheckRowsReach(const DlpackDevice& device, const PoolMemory& memory) {
  if (device.type == nb::device::cpu::value || device == DeviceOf(memory)) return;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("rows lie on a device (DLPack type ", device.type, ", number ", device.id,
                   ") but the pool in ", memory.name(), ": copy them there, or to the host")));
}

}  // namespace kvferry
