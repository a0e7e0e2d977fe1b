#include "pool/gdn_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check_range.h"
#include "base/status.h"
#include "pool/rows_aside.h"
#include "pool/token_copy.h"

namespace kvferry {
namespace {

// Copies of slots that may run in any order: none reads what another one writes. A spare slot of
// memory lies beside the pool: from_spare and to_spare say that the only source, or destination, is
// that one, which is its slot 0.
struct Wave {
  std::vector<int32_t> sources, destinations;
  bool from_spare = false, to_spare = false;

  void Add(int64_t source, int64_t destination) {
    sources.push_back(static_cast<int32_t>(source));
    destinations.push_back(static_cast<int32_t>(destination));
  }
};

absl::Status CheckStateBytes(absl::string_view name, int64_t num_layers, int64_t num_slots,
                             int64_t item_bytes) {
  // At most 2^(12 + 32).
  if (num_slots <= GdnPool::kMaxBytes / (num_layers * item_bytes)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "gdn pool: the ", name, " states, ", num_layers, " layers x ", num_slots, " slots x ",
      item_bytes, " bytes, have more than ", GdnPool::kMaxBytes, " bytes"));
}

// An engine's states of a kind.
absl::Status CheckStates(absl::string_view name, std::span<std::byte> states, int64_t bytes,
                         const PoolMemory& memory) {
  const bool is_whole = states.data() != nullptr && static_cast<int64_t>(states.size()) == bytes;
  const absl::Status fits =
      is_whole ? memory.CheckHolds(states)
               : absl::InvalidArgumentError(absl::StrCat("they have to have ", bytes));
  if (fits.ok()) return fits;
  return absl::Status(fits.code(), absl::StrCat("gdn pool: the ", name, " states of ",
                                                states.size(), " bytes: ", fits.message()));
}

// Copies of a list, and which of them wait for which.
class Order {
 public:
  // By destination, of which each stands once, and none is its own source.
  explicit Order(std::span<const GdnPool::SlotCopy> copies)
      : copies_(copies), writer_(copies.size()), readers_(copies.size()) {
    for (size_t i = 0; i < copies.size(); ++i) {
      writer_[i] = Find(copies[i].source);
      if (writer_[i] != kNone) ++readers_[writer_[i]];
    }
  }

  // An order in which no slot is written before all that read it have done so, in as few waves as
  // that allows but for circles.
  std::vector<Wave> Waves() {
    std::vector<Wave> waves;
    std::vector<size_t> ready;  // Copies whose destinations nobody reads any more.
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (readers_[i] == 0) ready.push_back(i);
    }
    while (!ready.empty()) waves.push_back(TakeReady(&ready));
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (readers_[i] > 0) BreakCircle(i, &waves);
    }
    return waves;
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;

  // The copy to that slot.
  size_t Find(int64_t destination) const {
    const auto at =
        std::ranges::lower_bound(copies_, destination, {}, &GdnPool::SlotCopy::destination);
    if (at == copies_.end() || at->destination != destination) return kNone;
    return static_cast<size_t>(at - copies_.begin());
  }

  // Those that are ready then stand in `ready`.
  Wave TakeReady(std::vector<size_t>* ready) {
    Wave wave;
    std::vector<size_t> next;
    for (const size_t i : *ready) {
      wave.Add(copies_[i].source, copies_[i].destination);
      if (writer_[i] != kNone && --readers_[writer_[i]] == 0) next.push_back(writer_[i]);
    }
    *ready = std::move(next);
    return wave;
  }

  // Slots in a circle, each the source of the next: the first is put aside.
  void BreakCircle(size_t first, std::vector<Wave>* waves) {
    waves->push_back({{static_cast<int32_t>(copies_[first].destination)}, {0}, false, true});
    for (size_t i = first;; i = writer_[i]) {
      readers_[i] = 0;
      Wave& wave = waves->emplace_back();
      wave.from_spare = writer_[i] == first;
      wave.Add(wave.from_spare ? 0 : copies_[i].source, copies_[i].destination);
      if (wave.from_spare) return;
    }
  }

  std::span<const GdnPool::SlotCopy> copies_;
  std::vector<size_t> writer_;    // The copy that writes what this one reads.
  std::vector<int64_t> readers_;  // Copies not in a wave yet that read what this one writes.
};

bool NeedsSpare(const std::vector<Wave>& waves) {
  return std::any_of(waves.begin(), waves.end(), [](const Wave& wave) { return wave.to_spare; });
}

using Copies = std::vector<TokenCopy>;

absl::StatusOr<Copies> PlanWave(const Wave& wave, std::span<const TokenView> from,
                                std::span<const TokenView> to) {
  Copies copies;
  copies.reserve(from.size());
  for (size_t i = 0; i < from.size(); ++i) {
    KVFERRY_ASSIGN_OR_RETURN(const TokenCopy copy,
                             TokenCopy::Plan(from[i], wave.sources, to[i], wave.destinations));
    copies.push_back(copy);
  }
  return copies;
}

}  // namespace

// ---------------------------------------------------------------- shape

absl::Status GdnShape::Validate() const {
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("gdn pool", "num_layers", num_layers, 1, KvLayout::kMaxLayers));
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("gdn pool", "num_v_heads", num_v_heads, 1, KvLayout::kMaxHeads));
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("gdn pool", "head_k_dim", head_k_dim, 1, KvLayout::kMaxHeadDim));
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("gdn pool", "head_v_dim", head_v_dim, 1, KvLayout::kMaxHeadDim));
  KVFERRY_RETURN_IF_ERROR(CheckRange("gdn pool", "conv_dim", conv_dim, 1, kMaxConvDim));
  KVFERRY_RETURN_IF_ERROR(
      CheckRange("gdn pool", "conv_kernel_size", conv_kernel_size, 2, kMaxConvKernelSize));
  if (DTypeBytes(conv_dtype) < 2) {
    return absl::InvalidArgumentError(absl::StrCat("gdn pool: conv_dtype is ",
                                                   DTypeName(conv_dtype),
                                                   " but must be float32, float16 or bfloat16"));
  }
  // Neither product passes 2^58 with the limits above.
  KVFERRY_RETURN_IF_ERROR(CheckRange("gdn pool", "bytes of a recurrent state",
                                     recurrent_item_bytes(), 1, KvLayout::kMaxItemBytes));
  return CheckRange("gdn pool", "bytes of a conv state", conv_item_bytes(), 1,
                    KvLayout::kMaxItemBytes);
}

int64_t GdnShape::recurrent_item_bytes() const {
  return num_v_heads * head_k_dim * head_v_dim * static_cast<int64_t>(sizeof(float));
}

int64_t GdnShape::conv_item_bytes() const {
  return conv_dim * (conv_kernel_size - 1) * DTypeBytes(conv_dtype);
}

// ---------------------------------------------------------------- pool

absl::Status GdnPool::Check(const GdnShape& shape, int64_t max_requests, int64_t max_track_slots) {
  KVFERRY_RETURN_IF_ERROR(shape.Validate());
  KVFERRY_RETURN_IF_ERROR(CheckRange("gdn pool", "max_requests", max_requests, 1, kMaxSlots));
  KVFERRY_RETURN_IF_ERROR(CheckRange("gdn pool", "max_track_slots", max_track_slots, 0, kMaxSlots));
  const int64_t num_slots = 1 + max_requests + max_track_slots;
  KVFERRY_RETURN_IF_ERROR(
      CheckStateBytes("recurrent", shape.num_layers, num_slots, shape.recurrent_item_bytes()));
  return CheckStateBytes("conv", shape.num_layers, num_slots, shape.conv_item_bytes());
}

absl::StatusOr<GdnPool> GdnPool::Create(const GdnShape& shape, int64_t max_requests,
                                        int64_t max_track_slots,
                                        const std::shared_ptr<const PoolMemory>& memory) {
  if (memory == nullptr) return Create(shape, max_requests, max_track_slots, HostMemory());
  KVFERRY_RETURN_IF_ERROR(Check(shape, max_requests, max_track_slots));
  KVFERRY_ASSIGN_OR_RETURN(States states, Allocate(shape, 1 + max_requests + max_track_slots,
                                                   *memory, &PoolMemory::Allocate));
  return Over(shape, max_requests, std::move(states), memory);
}

absl::StatusOr<GdnPool> GdnPool::Over(const GdnShape& shape, int64_t max_requests, States states,
                                      const std::shared_ptr<const PoolMemory>& memory) {
  KVFERRY_ASSIGN_OR_RETURN(
      std::shared_ptr<std::byte> zeros,
      memory->Allocate(std::max(shape.recurrent_item_bytes(), shape.conv_item_bytes())));
  return GdnPool(shape, max_requests, memory, std::move(states), std::move(zeros));
}

absl::StatusOr<GdnPool> GdnPool::Adopt(const GdnShape& shape, int64_t max_requests,
                                       std::span<std::byte> recurrent, std::span<std::byte> conv,
                                       std::shared_ptr<const void> owner,
                                       const std::shared_ptr<const PoolMemory>& memory) {
  if (memory == nullptr) {
    return Adopt(shape, max_requests, recurrent, conv, std::move(owner), HostMemory());
  }
  KVFERRY_RETURN_IF_ERROR(Check(shape, max_requests, /*max_track_slots=*/0));
  States states;
  states.num_slots =
      static_cast<int64_t>(recurrent.size()) / (shape.num_layers * shape.recurrent_item_bytes());
  if (states.num_slots < 1 + max_requests) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gdn pool: the recurrent states, ", recurrent.size(), " bytes, are ", states.num_slots,
        " slots; padding and max_requests = ", max_requests, " are ", 1 + max_requests));
  }
  KVFERRY_RETURN_IF_ERROR(Check(shape, max_requests, states.num_slots - 1 - max_requests));
  const int64_t items = shape.num_layers * states.num_slots;
  KVFERRY_RETURN_IF_ERROR(
      CheckStates("recurrent", recurrent, items * shape.recurrent_item_bytes(), *memory));
  KVFERRY_RETURN_IF_ERROR(CheckStates("conv", conv, items * shape.conv_item_bytes(), *memory));
  if (Meet(recurrent, conv)) {
    return absl::InvalidArgumentError("gdn pool: the recurrent states and the conv states overlap");
  }
  states.recurrent = {owner, recurrent.data()};
  states.conv = {owner, conv.data()};
  return Over(shape, max_requests, std::move(states), memory);
}

absl::StatusOr<GdnPool::States> GdnPool::Allocate(const GdnShape& shape, int64_t num_slots,
                                                  const PoolMemory& memory, Allocator allocate) {
  const int64_t items = shape.num_layers * num_slots;
  States states;
  states.num_slots = num_slots;
  KVFERRY_ASSIGN_OR_RETURN(states.recurrent,
                           (memory.*allocate)(items * shape.recurrent_item_bytes()));
  KVFERRY_ASSIGN_OR_RETURN(states.conv, (memory.*allocate)(items * shape.conv_item_bytes()));
  return states;
}

GdnPool::GdnPool(const GdnShape& shape, int64_t max_requests,
                 std::shared_ptr<const PoolMemory> memory, States states,
                 std::shared_ptr<std::byte> zeros)
    : shape_(shape),
      max_requests_(max_requests),
      memory_(std::move(memory)),
      states_(std::move(states)),
      zeros_(std::move(zeros)) {
  Clear();
}

int64_t GdnPool::bytes() const {
  return shape_.num_layers * num_slots() *
         (shape_.recurrent_item_bytes() + shape_.conv_item_bytes());
}

// ---------------------------------------------------------------- track slots

void GdnPool::Clear() {
  free_.clear();
  for (int64_t slot = num_slots() - 1; slot > max_requests_; --slot) free_.push_back(slot);
  allocated_.assign(num_slots(), false);
}

absl::StatusOr<int64_t> GdnPool::AllocateTrackSlot() {
  if (free_.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("gdn pool: all ", max_track_slots(), " track slots are allocated"));
  }
  const int64_t slot = free_.back();
  free_.pop_back();
  allocated_[slot] = true;
  return slot;
}

absl::Status GdnPool::FreeTrackSlot(int64_t slot) {
  if (!IsTrackSlot(slot)) {
    return absl::InvalidArgumentError(absl::StrCat("gdn pool: slot ", slot,
                                                   " is no track slot; these are the ",
                                                   max_track_slots(), " from ", max_requests_ + 1));
  }
  KVFERRY_RETURN_IF_ERROR(CheckUsable(slot));
  allocated_[slot] = false;
  free_.push_back(slot);
  return absl::OkStatus();
}

absl::Status GdnPool::CheckUsable(int64_t slot) const {
  if (slot < 0 || slot >= num_slots()) {
    return absl::InvalidArgumentError(
        absl::StrCat("gdn pool: slot ", slot, " is outside [0, ", num_slots(), ")"));
  }
  if (IsTrackSlot(slot) && !allocated_[slot]) {
    return absl::InvalidArgumentError(
        absl::StrCat("gdn pool: track slot ", slot, " is not allocated"));
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- states

std::vector<TokenView> GdnPool::Rows(const States& states) const {
  std::vector<TokenView> rows;
  const auto append = [&](std::byte* memory, DType dtype, int64_t item_bytes) {
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      rows.push_back(TokenView::Packed(memory + layer * states.num_slots * item_bytes, dtype,
                                       states.num_slots, 1, item_bytes / DTypeBytes(dtype)));
    }
  };
  append(states.recurrent.get(), DType::kFloat32, shape_.recurrent_item_bytes());
  append(states.conv.get(), shape_.conv_dtype, shape_.conv_item_bytes());
  return rows;
}

absl::Status GdnPool::Reset(std::span<const int64_t> slots) {
  for (const int64_t slot : slots) KVFERRY_RETURN_IF_ERROR(CheckUsable(slot));
  Wave wave;
  for (const int64_t slot : slots) wave.Add(0, slot);
  const std::vector<TokenView> states = Rows(states_);
  std::vector<TokenView> zeros = states;
  for (TokenView& zero : zeros) {
    zero.data = zeros_.get();
    zero.num_slots = 1;
  }
  KVFERRY_ASSIGN_OR_RETURN(const Copies copies, PlanWave(wave, zeros, states));
  return memory_->Run(copies, nullptr);
}

absl::Status GdnPool::Copy(std::span<const int64_t> sources,
                           std::span<const int64_t> destinations) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<SlotCopy> copies, CheckCopy(sources, destinations));
  const std::vector<Wave> waves = Order(copies).Waves();
  States spare;
  if (NeedsSpare(waves)) {
    KVFERRY_ASSIGN_OR_RETURN(spare, Allocate(shape_, 1, *memory_, &PoolMemory::AllocateForNow));
  }
  const std::vector<TokenView> states = Rows(states_), aside = Rows(spare);
  // All before the first runs: half of a circle would leave a request with another's state.
  std::vector<Copies> plans;
  for (const Wave& wave : waves) {
    KVFERRY_ASSIGN_OR_RETURN(plans.emplace_back(), PlanWave(wave, wave.from_spare ? aside : states,
                                                            wave.to_spare ? aside : states));
  }
  for (const Copies& plan : plans) KVFERRY_RETURN_IF_ERROR(memory_->Run(plan, nullptr));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<GdnPool::SlotCopy>> GdnPool::CheckCopy(
    std::span<const int64_t> sources, std::span<const int64_t> destinations) const {
  if (sources.size() != destinations.size()) {
    return absl::InvalidArgumentError(absl::StrCat("gdn pool: ", sources.size(), " sources but ",
                                                   destinations.size(), " destinations"));
  }
  std::vector<SlotCopy> copies;
  for (size_t i = 0; i < sources.size(); ++i) {
    KVFERRY_RETURN_IF_ERROR(CheckUsable(sources[i]));
    KVFERRY_RETURN_IF_ERROR(CheckUsable(destinations[i]));
    if (destinations[i] == 0) continue;
    if (sources[i] == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("gdn pool: copy ", i, " takes padding (slot 0) to slot ", destinations[i]));
    }
    copies.push_back({destinations[i], sources[i]});
  }
  std::ranges::sort(copies, {}, &SlotCopy::destination);
  const auto twice = std::ranges::adjacent_find(copies, {}, &SlotCopy::destination);
  if (twice != copies.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("gdn pool: slot ", twice->destination, " is the destination of two copies"));
  }
  std::erase_if(copies, [](const SlotCopy& copy) { return copy.destination == copy.source; });
  return copies;
}

std::span<float> GdnPool::recurrent_state(int64_t layer) const {
  const BufferInfo info = buffer_infos()[layer];
  return {reinterpret_cast<float*>(info.address), info.bytes / sizeof(float)};
}

std::span<std::byte> GdnPool::conv_state(int64_t layer) const {
  const BufferInfo info = buffer_infos()[shape_.num_layers + layer];
  return {info.address, static_cast<size_t>(info.bytes)};
}

std::vector<BufferInfo> GdnPool::buffer_infos() const {
  std::vector<BufferInfo> infos;
  for (const TokenView& rows : Rows(states_)) {
    infos.push_back({rows.data, rows.num_slots * rows.row_bytes(), rows.row_bytes()});
  }
  return infos;
}

}  // namespace kvferry
