#include "pool/cuda/shared_cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/hash.h"
#include "base/mutex.h"
#include "base/random.h"
#include "base/status.h"
#include "pool/cuda/apart_cuda.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/driver.h"
#include "pool/cuda/on_device.h"

namespace kvferry {
namespace {

constexpr uint64_t kMagic = 0x6b76666375646131;
// CUDA may share what lies beside smaller allocations with them.
constexpr size_t kProbeBytes = 2 << 20;
constexpr size_t kProbedBytes = 512;

// Bytes that do not change as long as their process lives. There are machines on which one GPU
// reads something else out of another's memory than lies there, without an error (of virtual
// machines and their address translation; vLLM and NCCL look for it too): who maps a device's
// memory reads these first.
struct Probe {
  cudaIpcMemHandle_t allocation{};
  uint64_t hash = 0;
};

// What a part's name holds; its bytes go from process to process of one machine.
struct Name {
  uint64_t magic = kMagic;
  uint64_t process = 0;  // Random, of the owner's.
  cudaIpcMemHandle_t allocation{};
  uint64_t offset = 0;  // In the allocation.
  Probe probe;
};
static_assert(sizeof(Name) <= PoolMemory::kMaxSharedName);

uint64_t ThisProcess() {
  static const uint64_t id = RandomId();
  return id;
}

absl::StatusOr<Probe> MakeProbe() {
  void* memory = nullptr;
  KVFERRY_RETURN_IF_ERROR(
      CudaStatus(cudaMalloc(&memory, kProbeBytes), "cuda memory: bytes to be probed"));
  absl::Cleanup give_back = [memory] { cudaFree(memory); };
  std::string bytes;
  while (bytes.size() < kProbedBytes) bytes += RandomBytes16();
  KVFERRY_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpy(memory, bytes.data(), kProbedBytes, cudaMemcpyHostToDevice),
                 "cuda memory: bytes to be probed"));
  // cudaMemcpy may return before what was pageable is there.
  KVFERRY_RETURN_IF_ERROR(
      CudaStatus(cudaStreamSynchronize(nullptr), "cuda memory: bytes to be probed"));
  Probe probe{.hash = Xxh3(std::as_bytes(std::span(bytes)))};
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaIpcGetMemHandle(&probe.allocation, memory),
                                     "cuda memory: sharing it with other processes"));
  std::move(give_back).Cancel();
  return probe;
}

// Of the current device; made once, and kept until the process ends.
absl::StatusOr<Probe> ProbeOfDevice() {
  int device = 0;
  KVFERRY_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), "cuda memory: current device"));
  static auto* const mutex = new Mutex;
  static auto* const probes = new std::map<int, Probe>;
  const MutexLock lock(mutex);
  const auto known = probes->find(device);
  if (known != probes->end()) return known->second;
  KVFERRY_ASSIGN_OR_RETURN(const Probe probe, MakeProbe());
  probes->emplace(device, probe);
  return probe;
}

// An allocation of another process as a device of this one maps it. A new process may have handles
// of the same bytes as one that is gone.
struct Foreign {
  uint64_t process = 0;
  cudaIpcMemHandle_t allocation{};
  int device = 0;

  bool operator<(const Foreign& other) const {
    const auto numbers = std::tie(process, device), others = std::tie(other.process, other.device);
    if (numbers != others) return numbers < others;
    return std::memcmp(&allocation, &other.allocation, sizeof allocation) < 0;
  }
};

// Each mapped once however many parts of it there are: CUDA need not map it again.
class Mappings {
 public:
  absl::StatusOr<const std::byte*> Open(const Foreign& foreign) {
    const MutexLock lock(&mutex_);
    Mapping& mapping = mappings_[foreign];
    if (mapping.users == 0) {
      void* address = nullptr;
      const absl::Status opened = CudaStatus(
          cudaIpcOpenMemHandle(&address, foreign.allocation, cudaIpcMemLazyEnablePeerAccess),
          "cuda memory: mapping another process's");
      if (!opened.ok()) {
        mappings_.erase(foreign);
        return absl::UnavailableError(opened.message());
      }
      mapping.address = static_cast<const std::byte*>(address);
    }
    ++mapping.users;
    return mapping.address;
  }

  void Close(const Foreign& foreign) {
    const MutexLock lock(&mutex_);
    const auto found = mappings_.find(foreign);
    if (--found->second.users > 0) return;
    OnDevice(foreign.device, [&] {
      return CudaStatus(cudaIpcCloseMemHandle(const_cast<std::byte*>(found->second.address)),
                        "cuda memory: unmapping another process's");
    }).IgnoreError();  // Nothing can be done about it.
    mappings_.erase(found);
  }

 private:
  struct Mapping {
    const std::byte* address = nullptr;
    int64_t users = 0;
  };

  Mutex mutex_;
  std::map<Foreign, Mapping> mappings_ ABSL_GUARDED_BY(mutex_);
};

Mappings& TheMappings() {
  static auto* const mappings = new Mappings;  // Outlives whatever static holds a part.
  return *mappings;
}

// Closes what Open() has opened.
std::shared_ptr<const std::byte> Holding(const std::byte* base, const Foreign& foreign) {
  return {base, [foreign](const std::byte*) { TheMappings().Close(foreign); }};
}

absl::Status CheckInside(const std::byte* base, uint64_t offset, int64_t bytes) {
  KVFERRY_ASSIGN_OR_RETURN(const std::span<const std::byte> all, AllocationOf(base));
  if (all.data() == base && bytes > 0 && offset <= all.size() &&
      static_cast<uint64_t>(bytes) <= all.size() - offset) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("cuda memory: bytes ", offset, " + ", bytes,
                                                 " of another process's ", all.size()));
}

// Probes that read as they should, as long as they are mapped: an engine's cache may have a part a
// layer.
class KnownProbes {
 public:
  std::shared_ptr<const std::byte> Find(const Foreign& foreign, uint64_t hash) {
    const MutexLock lock(&mutex_);
    const auto found = probes_.find({foreign, hash});
    return found == probes_.end() ? nullptr : found->second.lock();
  }
  void Add(const Foreign& foreign, uint64_t hash, const std::shared_ptr<const std::byte>& mapped) {
    const MutexLock lock(&mutex_);
    std::erase_if(probes_, [](const auto& known) { return known.second.expired(); });
    probes_[{foreign, hash}] = mapped;
  }

 private:
  Mutex mutex_;
  std::map<std::pair<Foreign, uint64_t>, std::weak_ptr<const std::byte>> probes_
      ABSL_GUARDED_BY(mutex_);
};

KnownProbes& TheKnownProbes() {
  static auto* const probes = new KnownProbes;
  return *probes;
}

// The probe, mapped, if it reads as it should.
absl::StatusOr<std::shared_ptr<const std::byte>> Probed(uint64_t process, const Probe& probe,
                                                        int device) {
  const Foreign foreign{process, probe.allocation, device};
  if (auto known = TheKnownProbes().Find(foreign, probe.hash)) return known;
  KVFERRY_ASSIGN_OR_RETURN(const std::byte* const base, TheMappings().Open(foreign));
  std::shared_ptr<const std::byte> mapped = Holding(base, foreign);
  KVFERRY_RETURN_IF_ERROR(CheckInside(base, 0, kProbedBytes));
  std::vector<std::byte> seen(kProbedBytes);
  const BytesMove move{base, seen.data(), kProbedBytes};
  KVFERRY_RETURN_IF_ERROR(MoveApartCuda({&move, 1}, device));
  if (Xxh3(std::span<const std::byte>(seen)) == probe.hash) {
    TheKnownProbes().Add(foreign, probe.hash, mapped);
    return mapped;
  }
  return absl::UnavailableError(absl::StrCat("cuda memory: device ", device,
                                             " reads other bytes out of another process's memory "
                                             "than lie there; pages go through the host"));
}

}  // namespace

absl::StatusOr<std::vector<PoolMemory::SharedPart>> ShareCuda(std::span<const std::byte> bytes) {
  KVFERRY_ASSIGN_OR_RETURN(const Probe probe, ProbeOfDevice());
  std::vector<PoolMemory::SharedPart> parts;
  // Allocations that touch look like one piece of memory, and are not.
  while (!bytes.empty()) {
    KVFERRY_ASSIGN_OR_RETURN(const std::span<const std::byte> all, AllocationOf(bytes.data()));
    Name name;
    name.process = ThisProcess();
    name.probe = probe;
    name.offset = static_cast<uint64_t>(bytes.data() - all.data());
    KVFERRY_RETURN_IF_ERROR(
        CudaStatus(cudaIpcGetMemHandle(&name.allocation, const_cast<std::byte*>(all.data())),
                   "cuda memory: sharing it with other processes"));
    const size_t here = std::min(bytes.size(), all.size() - name.offset);
    parts.push_back({std::string(reinterpret_cast<const char*>(&name), sizeof name),
                     static_cast<int64_t>(here)});
    bytes = bytes.subspan(here);
  }
  return parts;
}

absl::StatusOr<std::shared_ptr<const std::byte>> MapSharedCuda(absl::string_view text,
                                                               int64_t bytes, int device) {
  Name name;
  if (text.size() != sizeof name) {
    return absl::InvalidArgumentError(
        absl::StrCat("cuda memory: a name of ", text.size(), " bytes"));
  }
  std::memcpy(&name, text.data(), sizeof name);
  if (name.magic != kMagic) return absl::InvalidArgumentError("cuda memory: no name of it");
  if (name.process == ThisProcess()) {
    return absl::UnavailableError("cuda memory: it is this process's own, which cannot be mapped");
  }
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<const std::byte> probe,
                           Probed(name.process, name.probe, device));
  const Foreign foreign{name.process, name.allocation, device};
  KVFERRY_ASSIGN_OR_RETURN(const std::byte* const base, TheMappings().Open(foreign));
  // The probe stays mapped as long, for the parts that follow.
  const auto held = std::make_shared<std::pair<std::shared_ptr<const std::byte>, decltype(probe)>>(
      Holding(base, foreign), std::move(probe));
  KVFERRY_RETURN_IF_ERROR(CheckInside(base, name.offset, bytes));
  return std::shared_ptr<const std::byte>(held, base + name.offset);
}

}  // namespace kvferry
