#pragma once

// A device's memory, as far as the processor is concerned: whatever touches a pool in it other than
// through Run() dies on the spot.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pool/block_cache.h"
#include "pool/block_quant.h"
#include "pool/pool_memory.h"
#include "pool/token_copy.h"

namespace kvferry {

// Not thread-safe; must outlive its pools.
class GuardedMemory : public PoolMemory {
 public:
  std::string name() const override { return "guarded memory"; }
  bool on_host() const override { return false; }

  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes) const override {
    if (!failure.ok()) return failure;
    const auto size = static_cast<size_t>(bytes);
    void* slab = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (slab == MAP_FAILED) return absl::ResourceExhaustedError("mmap");
    slabs_[slab] = size;
    return std::shared_ptr<std::byte>(static_cast<std::byte*>(slab), [this](std::byte* gone) {
      munmap(gone, slabs_[gone]);
      slabs_.erase(gone);
    });
  }

  absl::Status Run(std::span<const TokenCopy> copies, ThreadPool* threads) const override {
    if (!failure.ok()) return failure;
    Protect(PROT_READ | PROT_WRITE);
    // Backwards, and twice: copies that may run in any order do the same again, those of which one
    // reads what another one wrote do not.
    for (int i = 0; i < 2; ++i) {
      for (size_t last = copies.size(); last > 0; --last) copies[last - 1].Run(threads);
    }
    Protect(PROT_NONE);
    ++num_runs;
    return absl::OkStatus();
  }

  absl::Status RunQuantized(std::span<const QuantizedCopy> copies,
                            ThreadPool* threads) const override {
    if (!failure.ok()) return failure;
    Protect(PROT_READ | PROT_WRITE);
    for (const QuantizedCopy& copy : copies) copy.Run(threads);
    last_threads = threads;
    Protect(PROT_NONE);
    ++num_runs;
    return absl::OkStatus();
  }

  absl::Status RunBlocks(const BlockCache& from, BlockCache& to,
                         std::span<const BlockPair> pairs) const override {
    const absl::StatusOr<std::vector<ItemsMove>> runs = PlanBlockCopy(from, to, pairs);
    if (!runs.ok()) return runs.status();
    std::vector<BytesMove> moves;
    for (size_t i = 0; i < from.buffer_infos().size(); ++i) {
      const BufferInfo source = from.buffer_infos()[i], destination = to.buffer_infos()[i];
      for (const ItemsMove& run : *runs) {
        moves.push_back({source.address + run.from * source.item_bytes,
                         destination.address + run.to * source.item_bytes,
                         run.items * source.item_bytes});
      }
    }
    return MoveApart(moves);
  }

  absl::Status RunApart(std::span<const TokenCopy> copies) const override {
    return Run(copies, nullptr);
  }

  absl::Status MoveApart(std::span<const BytesMove> moves) const override {
    if (!failure.ok()) return failure;
    Protect(PROT_READ | PROT_WRITE);
    const absl::Status status = HostMemory()->MoveApart(moves);
    Protect(PROT_NONE);
    ++num_runs;
    return status;
  }

  // What is begun is done when somebody waits for it, and not before.
  absl::StatusOr<std::shared_ptr<const MovesUnderWay>> BeginMoveApart(
      std::span<const BytesMove> moves) const override {
    if (!failure.ok()) return failure;
    return std::make_shared<LateMoves>(this, moves);
  }

  absl::StatusOr<std::shared_ptr<const void>> Pin(
      std::span<const std::span<std::byte>> /*pieces*/) const override {
    if (!pin_failure.ok()) return pin_failure;
    return nullptr;
  }

  std::vector<std::byte> Read(const std::byte* at, int64_t bytes) const {
    Protect(PROT_READ);
    std::vector<std::byte> copy(at, at + bytes);
    Protect(PROT_NONE);
    return copy;
  }

  void Write(std::byte* at, std::span<const std::byte> bytes) const {
    Protect(PROT_READ | PROT_WRITE);
    std::memcpy(at, bytes.data(), bytes.size());
    Protect(PROT_NONE);
  }

  absl::Status failure;      // What calls answer with, when it is one.
  absl::Status pin_failure;  // The same of Pin().
  mutable int64_t num_runs = 0;
  mutable ThreadPool* last_threads = nullptr;  // Of the last RunQuantized().

 private:
  class LateMoves : public MovesUnderWay {
   public:
    LateMoves(const GuardedMemory* memory, std::span<const BytesMove> moves)
        : memory_(memory), moves_(moves.begin(), moves.end()) {}
    bool done() const override { return result_.has_value(); }
    absl::Status Wait() const override {
      if (!result_) result_ = memory_->MoveApart(moves_);
      return *result_;
    }

   private:
    const GuardedMemory* const memory_;
    const std::vector<BytesMove> moves_;
    mutable std::optional<absl::Status> result_;
  };

  void Protect(int protection) const {
    for (const auto& [slab, size] : slabs_) EXPECT_EQ(mprotect(slab, size, protection), 0);
  }

  mutable std::map<void*, size_t> slabs_;
};

}  // namespace kvferry
