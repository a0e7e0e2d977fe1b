// Linked into a binary, it has a device for the paths whose pools lie on one: one that the
// processor plays, or a GPU (KVFERRY_TEST_ON_GPU).

#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "pool/cuda/cuda_memory.h"
#include "tests/support/kv_pattern.h"

namespace kvferry {
namespace {

// Child processes may be given another one.
int DeviceOfThisProcess() {
  const char* device = std::getenv("KVFERRY_TEST_DEVICE");
  int number = 0;
  return device != nullptr && absl::SimpleAtoi(device, &number) ? number : 0;
}

// What is allocated first, a test's pool, has no name for other processes: as memory that an engine
// maps itself, such as PyTorch's expandable segments.
class FirstUnnamed : public PoolMemory {
 public:
  explicit FirstUnnamed(std::shared_ptr<const PoolMemory> memory) : memory_(std::move(memory)) {}

  std::string name() const override { return memory_->name(); }
  bool on_host() const override { return memory_->on_host(); }
  std::optional<int> cuda_device() const override { return memory_->cuda_device(); }
  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes) const override {
    auto memory = memory_->Allocate(bytes);
    if (memory.ok() && first_.empty()) first_ = {memory->get(), static_cast<size_t>(bytes)};
    return memory;
  }
  absl::Status Run(std::span<const TokenCopy> copies, ThreadPool* threads) const override {
    return memory_->Run(copies, threads);
  }
  absl::Status RunQuantized(std::span<const QuantizedCopy> copies,
                            ThreadPool* threads) const override {
    return memory_->RunQuantized(copies, threads);
  }
  absl::Status RunApart(std::span<const TokenCopy> copies) const override {
    return memory_->RunApart(copies);
  }
  absl::Status MoveApart(std::span<const BytesMove> moves) const override {
    return memory_->MoveApart(moves);
  }
  absl::StatusOr<std::shared_ptr<const void>> Pin(
      std::span<const std::span<std::byte>> pieces) const override {
    return memory_->Pin(pieces);
  }
  absl::StatusOr<std::vector<SharedPart>> Share(std::span<const std::byte> bytes) const override {
    const bool in_first =
        bytes.data() >= first_.data() && bytes.data() < first_.data() + first_.size();
    if (in_first) return absl::UnavailableError("no name for what the engine has mapped");
    return memory_->Share(bytes);
  }
  absl::StatusOr<std::shared_ptr<const std::byte>> MapShared(absl::string_view name,
                                                             int64_t bytes) const override {
    return memory_->MapShared(name, bytes);
  }

 private:
  const std::shared_ptr<const PoolMemory> memory_;
  mutable std::span<const std::byte> first_;  // A pool is made on one thread.
};

std::shared_ptr<const PoolMemory> MemoryOfThisProcess() {
  std::shared_ptr<const PoolMemory> memory = CudaMemory(DeviceOfThisProcess());
  if (std::getenv("KVFERRY_TEST_UNNAMED_POOL") == nullptr) return memory;
  return std::make_shared<FirstUnnamed>(std::move(memory));
}

[[maybe_unused]] const bool has_device = (memory_of_device = &MemoryOfThisProcess) != nullptr;

}  // namespace
}  // namespace kvferry
