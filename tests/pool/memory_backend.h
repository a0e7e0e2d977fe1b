#pragma once

// Kinds of memory, as the suites of pools know them: one enrols with what tests need to look at
// bytes that the processor may not touch.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "pool/pool_memory.h"
#include "tests/pool/backend.h"
#include "tests/pool/guarded_memory.h"

namespace kvferry {

struct MemoryBackend : Backend {
  std::shared_ptr<const PoolMemory> memory;
  std::function<std::vector<std::byte>(const std::byte* at, int64_t bytes)> read;
  std::function<void(std::byte* at, std::span<const std::byte> bytes)> write;
  // What a round costs on this memory says how many of them random tests play.
  bool slow = false;
};

inline MemoryBackend HostBackend() {
  return {{"Host", ""},
          HostMemory(),
          [](const std::byte* at, int64_t bytes) { return std::vector<std::byte>(at, at + bytes); },
          [](std::byte* at, std::span<const std::byte> bytes) {
            std::memcpy(at, bytes.data(), bytes.size());
          }};
}

// Shows that a pool's bytes are left to its memory.
inline MemoryBackend GuardedBackend() {
  const auto memory = std::make_shared<GuardedMemory>();
  return {{"Guarded", ""},
          memory,
          [memory](const std::byte* at, int64_t bytes) { return memory->Read(at, bytes); },
          [memory](std::byte* at, std::span<const std::byte> bytes) { memory->Write(at, bytes); },
          /*slow=*/true};
}

}  // namespace kvferry
