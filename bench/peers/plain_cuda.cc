#include "bench/peers/plain_cuda.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <memory>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/slab.h"
#include "base/status.h"
#include "pool/cuda/cuda_memory.h"
#include "pool/cuda/cuda_status.h"

namespace kvferry::bench {
namespace {

absl::StatusOr<double> SecondsOfCopy(std::byte* to, const std::byte* from, int64_t bytes) {
  const Deadline begin = Clock::now();
  KVFERRY_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, nullptr),
                 "plain copy"));
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(nullptr), "plain copy"));
  return SecondsBetween(begin, Clock::now());
}

}  // namespace

absl::StatusOr<PlainCudaCopies> MeasurePlainCuda(int device, int64_t bytes) {
  const std::shared_ptr<const PoolMemory> memory = CudaMemory(device);
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> first, memory->Allocate(bytes));
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> second, memory->Allocate(bytes));
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> host, MapSlab(bytes));
  std::memset(host.get(), 1, static_cast<size_t>(bytes));
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<const void> pin,
                           memory->Pin({host.get(), static_cast<size_t>(bytes)}));
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device), "plain copy"));
  PlainCudaCopies copies = {};
  KVFERRY_ASSIGN_OR_RETURN(copies.device_to_device,
                           SecondsOfCopy(second.get(), first.get(), bytes));
  KVFERRY_ASSIGN_OR_RETURN(copies.to_host, SecondsOfCopy(host.get(), second.get(), bytes));
  KVFERRY_ASSIGN_OR_RETURN(copies.to_device, SecondsOfCopy(first.get(), host.get(), bytes));
  return copies;
}

}  // namespace kvferry::bench
