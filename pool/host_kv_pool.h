#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "pool/token_kv_pool.h"
#include "pool/token_slot_allocator.h"

namespace kvferry {

// What a host slot holds, and who may touch it.
enum class HostSlotState : uint8_t {
  kIdle,       // Nothing; free.
  kReserved,   // Nothing yet; allocated for a write.
  kProtected,  // A transfer is reading or writing it: it can be neither freed nor used otherwise.
  kSynced,     // The same as a slot of the device pool.
  kBackup,     // The only copy: the device slot was given away.
};
absl::string_view HostSlotStateName(HostSlotState state);

// The host tier under a device's TokenKvPool: tokens evicted there wait here, and come back layer
// by layer. What SGLang calls HostKVCache with its MHA and MLA pools: here one type, whose rows are
// the device pool's.
//
// Every call checks the state of every slot it names, against this table:
//   call          from                      to
//   Allocate      idle                      reserved
//   ProtectWrite  reserved                  protected
//   ProtectLoad   backup                    protected
//   CompleteIo    protected                 synced
//   MarkBackup    synced                    backup     (the device slot is about to be freed)
//   MarkSynced    backup                    synced     (the device computed the token again)
//   Free          reserved, synced, backup  idle       (never while a transfer may be under way)
//
// BackUp() and Load() go through their states by themselves, and leave slots as they found them
// also when they throw.
//
// Thread-safe; transfers run outside of the lock, on slots that are protected meanwhile.
class HostKvPool {
 public:
  // Either of the sizes, the other 0; both are rounded down to whole pages.
  struct Size {
    double ratio_to_device = 0;  // Of the device pool's tokens.
    int64_t bytes = 0;
  };

  // What a host pool leaves to others of the memory that is available when it is made.
  static constexpr int64_t kDefaultKeepFreeBytes = int64_t{10} << 30;

  // Memory for the layout of `device`, whose page size it keeps, pinned as long as the result lives
  // where the device copies faster then (PoolMemory::Pin(); when that fails, the log says so).
  // INVALID_ARGUMENT when the size is not one of the two, not positive or less than a page, when
  // more than INT32_MAX slots would be needed, or keep_free_bytes is negative; RESOURCE_EXHAUSTED
  // naming both numbers when less than that would be left of the available memory. One page more
  // than asked for is taken: page 0, as in every pool.
  static absl::StatusOr<std::unique_ptr<HostKvPool>> Create(
      std::shared_ptr<TokenKvPool> device, const Size& size,
      int64_t keep_free_bytes = kDefaultKeepFreeBytes);

  const std::shared_ptr<TokenKvPool>& device() const { return device_; }
  const std::shared_ptr<TokenKvPool>& host() const { return host_; }
  int64_t num_tokens() const { return host_->num_tokens(); }
  // Over all layers and tensors.
  int64_t bytes_per_token() const { return host_->flat_bytes(1); }

  int64_t num_free() const;
  // Errors as for TokenSlotAllocator::Allocate().
  absl::StatusOr<std::vector<int32_t>> Allocate(int64_t num_tokens);
  // Slots in whole pages, each once. INVALID_ARGUMENT when slots of a page are missing or a slot
  // stands twice, and as below for states.
  absl::Status Free(std::span<const int32_t> slots);
  // Every slot is idle. FAILED_PRECONDITION while one is protected.
  absl::Status Clear();

  // FAILED_PRECONDITION naming the slot, its state and the one that the call needs; OUT_OF_RANGE
  // for a slot that does not exist, INVALID_ARGUMENT for one that stands twice. No state changes
  // then.
  absl::Status ProtectWrite(std::span<const int32_t> slots);
  absl::Status ProtectLoad(std::span<const int32_t> slots);
  absl::Status CompleteIo(std::span<const int32_t> slots);
  absl::Status MarkBackup(std::span<const int32_t> slots);
  absl::Status MarkSynced(std::span<const int32_t> slots);
  // The state that all of `slots` are in; INVALID_ARGUMENT when there are none or they differ.
  absl::StatusOr<HostSlotState> StateOf(std::span<const int32_t> slots) const;

  // Device slots to reserved host slots, all layers; these are synced afterwards, and reserved
  // again when it fails.
  absl::Status BackUp(std::span<const int32_t> device_slots, std::span<const int32_t> host_slots);
  // Backup host slots to device slots, layer by layer, counting the device pool's layers() up: an
  // engine's readers of a layer wait for that layer only. Host slots are synced afterwards, and
  // backup again when it fails. Slots that do not fit, and a load that finds another one under way,
  // leave layers() as it is; a copy that fails on its way ends the load for its waiters, too.
  absl::Status Load(std::span<const int32_t> host_slots, std::span<const int32_t> device_slots);

 private:
  struct Transition;

  HostKvPool(std::shared_ptr<TokenKvPool> device, std::shared_ptr<TokenKvPool> host,
             std::shared_ptr<const void> pin, TokenSlotAllocator allocator);

  absl::Status Refusal(const Transition& transition, int32_t slot, bool twice) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Check(const Transition& transition, std::span<const int32_t> slots) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Enter(HostSlotState state, std::span<const int32_t> slots)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Apply(const Transition& transition, std::span<const int32_t> slots);
  void GiveUp(std::span<const int32_t> slots, HostSlotState before);
  absl::Status FinishLoad(int64_t load, std::span<const int32_t> slots);
  absl::Status LoadLayers(std::span<const int32_t> host_slots,
                          std::span<const int32_t> device_slots);

  const std::shared_ptr<TokenKvPool> device_;
  const std::shared_ptr<TokenKvPool> host_;
  const std::shared_ptr<const void> pin_;  // Of host_'s memory, which outlives it.
  mutable Mutex mutex_;
  TokenSlotAllocator allocator_ ABSL_GUARDED_BY(mutex_);
  std::vector<HostSlotState> states_ ABSL_GUARDED_BY(mutex_);
  int64_t num_protected_ ABSL_GUARDED_BY(mutex_) = 0;
  mutable std::vector<bool> seen_ ABSL_GUARDED_BY(mutex_);  // For finding repeats; all false.
};

}  // namespace kvferry
