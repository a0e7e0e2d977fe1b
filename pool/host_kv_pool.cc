#include "pool/host_kv_pool.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/host_memory.h"
#include "base/log.h"
#include "base/status.h"

namespace kvferry {

// One row of the table in the header.
struct HostKvPool::Transition {
  absl::string_view call;
  uint32_t from;  // Bits of HostSlotState.
  HostSlotState to;
};

namespace {

constexpr uint32_t Bit(HostSlotState state) { return 1u << static_cast<uint32_t>(state); }

std::string StateNames(uint32_t bits) {
  std::string names;
  for (const HostSlotState state :
       {HostSlotState::kIdle, HostSlotState::kReserved, HostSlotState::kProtected,
        HostSlotState::kSynced, HostSlotState::kBackup}) {
    if ((bits & Bit(state)) == 0) continue;
    absl::StrAppend(&names, names.empty() ? "" : " or ", HostSlotStateName(state));
  }
  return names;
}

absl::StatusOr<int64_t> TokensOf(const TokenKvPool& device, const HostKvPool::Size& size) {
  const bool by_ratio = size.ratio_to_device != 0;
  if (by_ratio == (size.bytes != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("host pool: ratio_to_device (ratio in Python) is ", size.ratio_to_device,
                     " and bytes ", size.bytes, "; give one of them and leave the other 0"));
  }
  const int64_t page_size = device.layout().page_size;
  const double tokens =
      by_ratio ? static_cast<double>(device.num_tokens()) * size.ratio_to_device
               : static_cast<double>(size.bytes) / static_cast<double>(device.flat_bytes(1));
  if (!(tokens >= static_cast<double>(page_size) && tokens <= static_cast<double>(INT32_MAX))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "host pool: ",
        by_ratio ? absl::StrCat("ratio_to_device (ratio in Python) ", size.ratio_to_device)
                 : absl::StrCat(size.bytes, " bytes"),
        " makes ", tokens, " tokens, but there must be between a page (", page_size, ") and ",
        INT32_MAX));
  }
  return static_cast<int64_t>(tokens) / page_size * page_size;
}

absl::Status CheckMemory(int64_t wanted_bytes, int64_t keep_free_bytes) {
  const absl::StatusOr<int64_t> available = AvailableHostBytes();
  if (!available.ok()) return absl::OkStatus();  // The allocation itself will tell.
  if (wanted_bytes <= *available - keep_free_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "host pool: ", wanted_bytes, " bytes wanted, but ", *available, " are available, of which ",
      keep_free_bytes, " (keep_free_bytes) are left to others; make it smaller, or lower that"));
}

// Null where there is nothing to pin for, or it cannot be done: copies are slower then.
std::shared_ptr<const void> Pinned(const KvPool& host, const PoolMemory& device) {
  std::byte* const begin = host.buffer_infos().front().address;
  const BufferInfo& last = host.buffer_infos().back();
  // One piece, as TokenKvPool::Create() makes it.
  absl::StatusOr<std::shared_ptr<const void>> pin =
      device.Pin({begin, static_cast<size_t>(last.address + last.bytes - begin)});
  if (pin.ok()) return *std::move(pin);
  Log().warn("host pool: copies to and from {} will be slow, as its memory is not pinned: {}",
             device.name(), pin.status().ToString());
  return nullptr;
}

}  // namespace

absl::string_view HostSlotStateName(HostSlotState state) {
  switch (state) {
    case HostSlotState::kIdle:
      return "idle";
    case HostSlotState::kReserved:
      return "reserved";
    case HostSlotState::kProtected:
      return "protected";
    case HostSlotState::kSynced:
      return "synced";
    case HostSlotState::kBackup:
      return "backup";
  }
  return "unknown";
}

absl::StatusOr<std::unique_ptr<HostKvPool>> HostKvPool::Create(std::shared_ptr<TokenKvPool> device,
                                                               const Size& size,
                                                               int64_t keep_free_bytes) {
  if (keep_free_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("host pool: keep_free_bytes is ", keep_free_bytes, " but must be at least 0"));
  }
  KVFERRY_ASSIGN_OR_RETURN(const int64_t num_tokens, TokensOf(*device, size));
  const KvLayout& layout = device->layout();
  KVFERRY_RETURN_IF_ERROR(
      CheckMemory(device->flat_bytes(num_tokens + layout.page_size), keep_free_bytes));
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<TokenKvPool> host,
                           TokenKvPool::Create(layout, num_tokens, device->latent_value_dim()));
  KVFERRY_ASSIGN_OR_RETURN(TokenSlotAllocator allocator,
                           TokenSlotAllocator::Create(num_tokens, layout.page_size));
  std::shared_ptr<const void> pin = Pinned(*host->pages(), device->memory());
  return std::unique_ptr<HostKvPool>(
      new HostKvPool(std::move(device), std::move(host), std::move(pin), std::move(allocator)));
}

HostKvPool::HostKvPool(std::shared_ptr<TokenKvPool> device, std::shared_ptr<TokenKvPool> host,
                       std::shared_ptr<const void> pin, TokenSlotAllocator allocator)
    : device_(std::move(device)),
      host_(std::move(host)),
      pin_(std::move(pin)),
      allocator_(std::move(allocator)),
      states_(static_cast<size_t>(host_->num_slots()), HostSlotState::kIdle),
      seen_(static_cast<size_t>(host_->num_slots()), false) {}

// ---------------------------------------------------------------- states

absl::Status HostKvPool::Refusal(const Transition& transition, int32_t slot, bool twice) const {
  const std::string call = absl::StrCat("host pool: ", transition.call, ": slot ", slot);
  if (slot < 0 || static_cast<size_t>(slot) >= states_.size()) {
    return absl::OutOfRangeError(absl::StrCat(call, " is not in [0, ", states_.size(), ")"));
  }
  if (twice) return absl::InvalidArgumentError(absl::StrCat(call, " stands twice"));
  return absl::FailedPreconditionError(absl::StrCat(call, " is ", HostSlotStateName(states_[slot]),
                                                    " but must be ", StateNames(transition.from)));
}

absl::Status HostKvPool::Check(const Transition& transition, std::span<const int32_t> slots) const {
  const auto may_go = [&](int32_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return slot >= 0 && static_cast<size_t>(slot) < states_.size() && !seen_[slot] &&
           (Bit(states_[slot]) & transition.from) != 0;
  };
  size_t good = 0;
  for (; good < slots.size() && may_go(slots[good]); ++good) seen_[slots[good]] = true;
  // Before there is a message, for which there may be no memory.
  for (size_t i = 0; i < good; ++i) seen_[slots[i]] = false;
  if (good == slots.size()) return absl::OkStatus();
  const auto checked = slots.first(good);
  const bool twice = std::find(checked.begin(), checked.end(), slots[good]) != checked.end();
  return Refusal(transition, slots[good], twice);
}

void HostKvPool::Enter(HostSlotState state, std::span<const int32_t> slots) {
  for (const int32_t slot : slots) {
    num_protected_ -= states_[slot] == HostSlotState::kProtected ? 1 : 0;
    states_[slot] = state;
    num_protected_ += state == HostSlotState::kProtected ? 1 : 0;
  }
}

absl::Status HostKvPool::Apply(const Transition& transition, std::span<const int32_t> slots) {
  const MutexLock lock(&mutex_);
  KVFERRY_RETURN_IF_ERROR(Check(transition, slots));
  Enter(transition.to, slots);
  return absl::OkStatus();
}

absl::Status HostKvPool::ProtectWrite(std::span<const int32_t> slots) {
  return Apply({"ProtectWrite", Bit(HostSlotState::kReserved), HostSlotState::kProtected}, slots);
}

absl::Status HostKvPool::ProtectLoad(std::span<const int32_t> slots) {
  return Apply({"ProtectLoad", Bit(HostSlotState::kBackup), HostSlotState::kProtected}, slots);
}

absl::Status HostKvPool::CompleteIo(std::span<const int32_t> slots) {
  return Apply({"CompleteIo", Bit(HostSlotState::kProtected), HostSlotState::kSynced}, slots);
}

absl::Status HostKvPool::MarkBackup(std::span<const int32_t> slots) {
  return Apply({"MarkBackup", Bit(HostSlotState::kSynced), HostSlotState::kBackup}, slots);
}

absl::Status HostKvPool::MarkSynced(std::span<const int32_t> slots) {
  return Apply({"MarkSynced", Bit(HostSlotState::kBackup), HostSlotState::kSynced}, slots);
}

absl::StatusOr<HostSlotState> HostKvPool::StateOf(std::span<const int32_t> slots) const {
  if (slots.empty()) return absl::InvalidArgumentError("host pool: StateOf: no slots given");
  const MutexLock lock(&mutex_);
  for (const int32_t slot : slots) {
    if (slot < 0 || static_cast<size_t>(slot) >= states_.size()) {
      return absl::OutOfRangeError(
          absl::StrCat("host pool: StateOf: slot ", slot, " is not in [0, ", states_.size(), ")"));
    }
    if (states_[slot] == states_[slots[0]]) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "host pool: StateOf: slot ", slots[0], " is ", HostSlotStateName(states_[slots[0]]),
        " but slot ", slot, " is ", HostSlotStateName(states_[slot])));
  }
  return states_[slots[0]];
}

// ---------------------------------------------------------------- allocation

int64_t HostKvPool::num_free() const {
  const MutexLock lock(&mutex_);
  return allocator_.num_free();
}

absl::StatusOr<std::vector<int32_t>> HostKvPool::Allocate(int64_t num_tokens) {
  const MutexLock lock(&mutex_);
  KVFERRY_ASSIGN_OR_RETURN(std::vector<int32_t> slots, allocator_.Allocate(num_tokens));
  Enter(HostSlotState::kReserved, slots);
  return slots;
}

absl::Status HostKvPool::Free(std::span<const int32_t> slots) {
  const Transition transition = {
      "Free",
      Bit(HostSlotState::kReserved) | Bit(HostSlotState::kSynced) | Bit(HostSlotState::kBackup),
      HostSlotState::kIdle};
  const MutexLock lock(&mutex_);
  KVFERRY_RETURN_IF_ERROR(Check(transition, slots));
  const int64_t page_size = allocator_.page_size();
  std::vector<int64_t> pages;
  for (const int32_t slot : slots) pages.push_back(slot / page_size);
  std::sort(pages.begin(), pages.end());
  const auto num_pages = std::unique(pages.begin(), pages.end()) - pages.begin();
  if (num_pages * page_size != static_cast<int64_t>(slots.size())) {
    return absl::InvalidArgumentError(absl::StrCat("host pool: Free: ", slots.size(), " slots of ",
                                                   num_pages, " pages; pages of ", page_size,
                                                   " are freed whole"));
  }
  KVFERRY_RETURN_IF_ERROR(allocator_.Free(slots));
  Enter(transition.to, slots);
  return absl::OkStatus();
}

absl::Status HostKvPool::Clear() {
  const MutexLock lock(&mutex_);
  if (num_protected_ > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "host pool: Clear: ", num_protected_, " slots are protected; wait for their transfers"));
  }
  allocator_.Clear();
  std::fill(states_.begin(), states_.end(), HostSlotState::kIdle);
  return absl::OkStatus();
}

// ---------------------------------------------------------------- transfers

// Of slots that a transfer protected, whatever became of some since. Nothing here can throw.
void HostKvPool::GiveUp(std::span<const int32_t> slots, HostSlotState before) {
  const MutexLock lock(&mutex_);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (states_[slots[i]] == HostSlotState::kProtected) Enter(before, slots.subspan(i, 1));
  }
}

absl::Status HostKvPool::BackUp(std::span<const int32_t> device_slots,
                                std::span<const int32_t> host_slots) {
  KVFERRY_RETURN_IF_ERROR(ProtectWrite(host_slots));
  absl::Cleanup give_up = [&] { GiveUp(host_slots, HostSlotState::kReserved); };
  KVFERRY_RETURN_IF_ERROR(host_->CopyFrom(*device_, device_slots, host_slots));
  KVFERRY_RETURN_IF_ERROR(CompleteIo(host_slots));
  std::move(give_up).Cancel();
  return absl::OkStatus();
}

// At once: whoever waits for the last layer may use these slots, and those of a load that was given
// up are never synced.
absl::Status HostKvPool::FinishLoad(int64_t load, std::span<const int32_t> slots) {
  LayerCounter& layers = device_->layers();
  const MutexLock lock(&mutex_);
  KVFERRY_RETURN_IF_ERROR(
      Check({"Load", Bit(HostSlotState::kProtected), HostSlotState::kSynced}, slots));
  KVFERRY_RETURN_IF_ERROR(layers.Ready(load, layers.num_layers()));
  Enter(HostSlotState::kSynced, slots);
  return absl::OkStatus();
}

absl::Status HostKvPool::LoadLayers(std::span<const int32_t> host_slots,
                                    std::span<const int32_t> device_slots) {
  LayerCounter& layers = device_->layers();
  // Whoever waits for a layer hears of no load that cannot begin.
  KVFERRY_RETURN_IF_ERROR(device_->CheckCopyFrom(*host_, host_slots, device_slots));
  // Unless a copy says why. Made here, as there may be no memory for it later.
  absl::Status ended = absl::AbortedError("host pool: a load was broken off by an exception");
  KVFERRY_ASSIGN_OR_RETURN(const int64_t load, layers.Begin());
  absl::Cleanup fail = [&] { layers.Fail(load, ended); };
  for (int64_t layer = 0; layer < layers.num_layers(); ++layer) {
    absl::Status done = device_->CopyLayerFrom(*host_, layer, host_slots, device_slots);
    const bool last = layer + 1 == layers.num_layers();
    if (done.ok()) done = last ? FinishLoad(load, host_slots) : layers.Ready(load, layer + 1);
    if (!done.ok()) return ended = done;
  }
  std::move(fail).Cancel();
  return absl::OkStatus();
}

absl::Status HostKvPool::Load(std::span<const int32_t> host_slots,
                              std::span<const int32_t> device_slots) {
  KVFERRY_RETURN_IF_ERROR(ProtectLoad(host_slots));
  absl::Cleanup give_up = [&] { GiveUp(host_slots, HostSlotState::kBackup); };
  KVFERRY_RETURN_IF_ERROR(LoadLayers(host_slots, device_slots));
  std::move(give_up).Cancel();
  return absl::OkStatus();
}

}  // namespace kvferry
