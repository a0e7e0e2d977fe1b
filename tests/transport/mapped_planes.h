#pragma once

// Data planes to peers on this host by themselves: two of them in one process, progressed by hand.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/status.h"
#include "tests/support/wait_for.h"
#include "tests/transport/recorder.h"
#include "transport/mapped/mapped_data_plane.h"
#include "transport/messages.h"

namespace kvferry {

inline constexpr int64_t kChunkBytes = 4096;
inline constexpr int64_t kPoolBytes = 64 << 10;

// A list of so many places and what else it has: all entries are two numbers each.
inline std::vector<PoolPiece> ListOf(std::vector<PoolPiece> entries, uint64_t places = 0) {
  entries.insert(entries.begin(), {places, 0});
  return entries;
}

inline constexpr int64_t kAnswerTimeoutMs = 20000;

struct Side {
  explicit Side(int64_t num_chunks = 16)
      : arena(Must(Arena::Create(num_chunks * kChunkBytes, kChunkBytes))),
        plane(Must(MakeMappedDataPlane(arena.get(), {.shared = &pool}, kAnswerTimeoutMs))) {}

  // A chunk full of `fill`; it is given back when its send is done.
  int64_t Send(LinkId link, uint8_t fill, uint32_t bytes = kChunkBytes) {
    const int64_t chunk = arena->Take();
    const auto payload = arena->Bytes(chunk).first(bytes);
    std::fill(payload.begin(), payload.end(), std::byte{fill});
    plane->SendPayload(link, {fill, 0, 0, bytes, 0}, payload,
                       [this, chunk](const absl::Status& status) {
                         arena->GiveBack(chunk);
                         done.push_back(status);
                       });
    return chunk;
  }
  bool Progress() { return plane->Progress(&events); }

  // A chunk that lies in those pieces of the pool.
  int64_t SendInPool(LinkId link, const std::vector<PoolPiece>& pieces, uint32_t bytes) {
    return SendList(link, ListOf(pieces), bytes);
  }
  int64_t SendList(LinkId link, const std::vector<PoolPiece>& entries, uint32_t bytes) {
    const int64_t chunk = arena->Take();
    const auto list = std::as_bytes(std::span(entries));
    std::copy(list.begin(), list.end(), arena->Bytes(chunk).begin());
    plane->SendPayload(link, {1, 0, 0, bytes, kChunkInPool}, arena->Bytes(chunk).first(list.size()),
                       [this, chunk](const absl::Status& status) {
                         arena->GiveBack(chunk);
                         done.push_back(status);
                       });
    return chunk;
  }

  Recorder events;
  std::vector<absl::Status> done;
  SharedMemory pool = Must(SharedMemory::Create("test-pool", kPoolBytes));
  std::unique_ptr<Arena> arena;
  std::unique_ptr<AddressedPlane> plane;  // Goes first, and completes what is under way.
};

template <typename Predicate>
bool ProgressBoth(Side& a, Side& b, const Predicate& holds) {
  return StepUntil([&] { a.Progress(), b.Progress(); }, holds);
}

class MappedPlanes : public testing::Test {
 protected:
  template <typename Predicate>
  bool ProgressUntil(const Predicate& holds) {
    return ProgressBoth(a_, b_, holds);
  }

  Side a_;
  Side b_;
};

// Memory whose parts are named by where they lie in this process: so can strangers name them.
class NamedMemory final : public PoolMemory {
 public:
  std::string name() const override { return "named memory"; }
  bool on_host() const override { return false; }
  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes) const override {
    return HostMemory()->Allocate(bytes);
  }
  absl::Status Run(std::span<const TokenCopy> copies, ThreadPool* threads) const override {
    return HostMemory()->Run(copies, threads);
  }
  absl::Status RunQuantized(std::span<const QuantizedCopy> copies,
                            ThreadPool* threads) const override {
    return HostMemory()->RunQuantized(copies, threads);
  }
  absl::Status RunApart(std::span<const TokenCopy> copies) const override {
    return HostMemory()->RunApart(copies);
  }
  absl::Status MoveApart(std::span<const BytesMove> moves) const override {
    return HostMemory()->MoveApart(moves);
  }
  absl::StatusOr<std::shared_ptr<const void>> Pin(
      std::span<const std::span<std::byte>> /*pieces*/) const override {
    return nullptr;
  }
  absl::StatusOr<std::vector<SharedPart>> Share(std::span<const std::byte> bytes) const override {
    const std::byte* const begin = bytes.data();
    return std::vector<SharedPart>{{std::string(reinterpret_cast<const char*>(&begin), 8),
                                    static_cast<int64_t>(bytes.size())}};
  }
  absl::StatusOr<std::shared_ptr<const std::byte>> MapShared(absl::string_view name,
                                                             int64_t /*bytes*/) const override {
    const std::byte* begin = nullptr;
    if (name.size() != sizeof begin) return absl::UnavailableError("another device's");
    std::memcpy(&begin, name.data(), sizeof begin);
    return std::shared_ptr<const std::byte>(std::shared_ptr<void>(), begin);
  }
};

}  // namespace kvferry
