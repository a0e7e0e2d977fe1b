#pragma once

// Where the bytes of pools lie, and who copies rows there.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/thread_pool.h"

namespace kvferry {

class BlockCache;
class QuantizedCopy;
class TokenCopy;

// Bytes that go from one place to another.
struct BytesMove {
  const std::byte* from;
  std::byte* to;
  int64_t bytes;
};

// Equal items that lie together on both sides, counted from a place on each.
struct ItemsMove {
  int64_t from, to, items;
  bool operator==(const ItemsMove&) const = default;
};
// Where item 0 lies and where it goes, and how long the items are.
struct PlaceMove {
  const std::byte* from;
  std::byte* to;
  int64_t item_bytes;
};
// Each of `items` at each of `places`, one by one.
std::vector<BytesMove> MovesOf(std::span<const ItemsMove> items, std::span<const PlaceMove> places);

// Moves that a device makes by itself. Thread-safe.
class MovesUnderWay {
 public:
  virtual ~MovesUnderWay() = default;
  // Whether Wait() would return at once.
  virtual bool done() const = 0;
  // Returns when all is done, or nothing more of it will be: then as PoolMemory::MoveApart() fails.
  virtual absl::Status Wait() const = 0;
};

// The host's memory, or a device's (cuda/cuda_memory.h). A pool keeps the one that it was made in,
// and everything that touches the pool's bytes either goes through Run() and its like or needs
// on_host().
// Immutable and thread-safe.
class PoolMemory {
 public:
  virtual ~PoolMemory() = default;

  // For messages: "host memory".
  virtual std::string name() const = 0;
  // Whether the processor can read and write it at the addresses that pools give.
  virtual bool on_host() const = 0;
  // The device whose memory it is, for who shares it with CUDA's other users.
  virtual std::optional<int> cuda_device() const { return std::nullopt; }
  // Zeroed bytes, aligned to 256 at least, freed with their last owner. RESOURCE_EXHAUSTED when
  // they cannot be had, UNAVAILABLE when there is no such device. The host's take their room at
  // once where the system has huge pages for them.
  virtual absl::StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes) const = 0;
  // The same for what a call needs until it returns: the host's take room as they are touched, for
  // the system may search long for huge pages.
  virtual absl::StatusOr<std::shared_ptr<std::byte>> AllocateForNow(int64_t bytes) const;
  // Of somebody else's memory, before a pool adopts it: INVALID_ARGUMENT where a device sees that
  // it begins or ends elsewhere, as a kernel that used it there would end all of the process's work
  // on the device. Else OK.
  virtual absl::Status CheckHolds(std::span<const std::byte> /*bytes*/) const {
    return absl::OkStatus();
  }
  // Runs copies, in any order, between rows here and rows here or in host memory; returns when all
  // is done. `threads`, which may be null, help. In host memory it cannot fail; what a device that
  // fails has written is not known.
  virtual absl::Status Run(std::span<const TokenCopy> copies, ThreadPool* threads) const = 0;
  // The same for copies whose codes and scales lie here, and their rows here or in host memory.
  virtual absl::Status RunQuantized(std::span<const QuantizedCopy> copies,
                                    ThreadPool* threads) const = 0;
  // CopyBlocks() of a device: one of the caches lies here, the other here, on another one or in
  // host memory. UNIMPLEMENTED where there is no such thing.
  virtual absl::Status RunBlocks(const BlockCache& from, BlockCache& to,
                                 std::span<const std::pair<int64_t, int64_t>> pairs) const;
  // As Run(), but in no order with anything else that the device does, which does not hold it up:
  // for who has waited for the rows that it reads and keeps others off those that it writes, as
  // transfers do.
  virtual absl::Status RunApart(std::span<const TokenCopy> copies) const = 0;
  // As RunApart(), of bytes. All moves of a call go the same way: between places here, to here from
  // what MapShared() gave, or between here and the host, whose bytes have to be pinned by Pin() as
  // a whole or not at all.
  virtual absl::Status MoveApart(std::span<const BytesMove> moves) const = 0;
  // As MoveApart(), but perhaps it returns before all is done, and then with what is to be waited
  // for before anything of both sides is used or goes away. The list of moves need not live on. An
  // error: no move of it is under way.
  virtual absl::StatusOr<std::shared_ptr<const MovesUnderWay>> BeginMoveApart(
      std::span<const BytesMove> moves) const;
  // As MoveApart() of MovesOf() these, but for the host's bytes, which are none of them. A device
  // makes as many moves of it: nothing is done for each here.
  virtual absl::Status MoveItemsApart(std::span<const ItemsMove> items,
                                      std::span<const PlaceMove> places) const;
  // As long as the result lives, the device reaches these bytes of the host where they lie, so that
  // copies from and to them are faster. The bytes must outlive it; whole pages of the system's are
  // pinned, each once, though pieces of one call may share them: ALREADY_EXISTS, and nothing stays
  // pinned. OK without a result where there is nothing to do.
  virtual absl::StatusOr<std::shared_ptr<const void>> Pin(
      std::span<const std::span<std::byte>> pieces) const = 0;
  absl::StatusOr<std::shared_ptr<const void>> Pin(std::span<std::byte> host) const {
    return Pin(std::span<const std::span<std::byte>>(&host, 1));
  }
  // Whether it does so already, as far as it tells: whoever has pinned them, and for as long as he
  // does.
  virtual bool Reaches(std::span<const std::byte> /*host*/) const { return on_host(); }

  // Memory here as other processes of this machine can name it, part after part.
  struct SharedPart {
    std::string name;  // Opaque, at most kMaxSharedName bytes.
    int64_t bytes;
  };
  static constexpr size_t kMaxSharedName = 256;
  // For MapShared() of another process, as long as the memory lives. UNIMPLEMENTED where this kind
  // of memory has no such names (the host's is shared otherwise: KvPool::shared_memory()), else
  // what the device says of memory that it shares with nobody.
  virtual absl::StatusOr<std::vector<SharedPart>> Share(std::span<const std::byte> bytes) const;
  // Where MoveApart() finds the bytes of such a part, to read them, as long as the result lives:
  // also when their owner has freed them or is dead, and then they are whatever they were last.
  // Nobody else can touch them there. The name may come from anyone. UNAVAILABLE when they cannot
  // be reached from here, INVALID_ARGUMENT for what is no name of so many bytes.
  virtual absl::StatusOr<std::shared_ptr<const std::byte>> MapShared(absl::string_view name,
                                                                     int64_t bytes) const;
};

// MapSlab(), as far as there is room (CheckHostRoom()), and the copies' own Run().
const std::shared_ptr<const PoolMemory>& HostMemory();

// FAILED_PRECONDITION unless the processor can touch it: "<what> lies in <name>, ...".
absl::Status CheckOnHost(absl::string_view what, const PoolMemory& memory);

}  // namespace kvferry
