#include "pool/gdn_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/slab.h"
#include "base/status.h"

namespace kvferry {
namespace {

constexpr int64_t kSpare = -1;  // A slot's worth of memory beside the pool.

struct Step {
  int64_t source = 0;
  int64_t destination = 0;
};
using SourceOf = absl::flat_hash_map<int64_t, int64_t>;  // By destination.

absl::Status CheckCount(absl::string_view name, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("gdn pool: ", name, " is ", value, " but must lie in [", min, ", ", max, "]"));
}

absl::StatusOr<std::shared_ptr<std::byte>> MapStates(absl::string_view name, int64_t num_layers,
                                                     int64_t num_slots, int64_t item_bytes) {
  if (num_slots > GdnPool::kMaxBytes / (num_layers * item_bytes)) {  // At most 2^(12 + 32).
    return absl::InvalidArgumentError(absl::StrCat(
        "gdn pool: the ", name, " states, ", num_layers, " layers x ", num_slots, " slots x ",
        item_bytes, " bytes, have more than ", GdnPool::kMaxBytes, " bytes"));
  }
  return MapSlab(num_layers * num_slots * item_bytes);
}

// Slots in a circle, each the source of the next: the first is put aside.
void BreakCircle(int64_t first, SourceOf* source_of, std::vector<Step>* steps) {
  steps->push_back({first, kSpare});
  for (int64_t slot = first; slot != kSpare;) {
    const int64_t source = source_of->extract(slot).mapped();
    const int64_t read_from = source == first ? kSpare : source;
    steps->push_back({read_from, slot});
    slot = read_from;
  }
}

// An order in which no slot is written before all that read it have done so.
std::vector<Step> Order(SourceOf source_of) {
  absl::flat_hash_map<int64_t, int64_t> readers;  // By source: copies not ordered yet.
  for (const auto& [destination, source] : source_of) ++readers[source];
  std::vector<int64_t> ready;  // Destinations that nobody reads any more.
  for (const auto& [destination, source] : source_of) {
    if (!readers.contains(destination)) ready.push_back(destination);
  }
  std::vector<Step> steps;
  while (!ready.empty()) {
    const int64_t destination = ready.back();
    ready.pop_back();
    const int64_t source = source_of.extract(destination).mapped();
    steps.push_back({source, destination});
    if (--readers[source] == 0 && source_of.contains(source)) ready.push_back(source);
  }
  while (!source_of.empty()) BreakCircle(source_of.begin()->first, &source_of, &steps);
  return steps;
}

bool NeedsSpare(const std::vector<Step>& steps) {
  return std::any_of(steps.begin(), steps.end(),
                     [](const Step& step) { return step.destination == kSpare; });
}

void CopyItems(std::byte* layer, int64_t item_bytes, const std::vector<Step>& steps,
               std::byte* spare) {
  const auto item = [&](int64_t slot) {
    return slot == kSpare ? spare : layer + slot * item_bytes;
  };
  for (const Step& step : steps) {
    std::memcpy(item(step.destination), item(step.source), item_bytes);
  }
}

}  // namespace

// ---------------------------------------------------------------- shape

absl::Status GdnShape::Validate() const {
  KVFERRY_RETURN_IF_ERROR(CheckCount("num_layers", num_layers, 1, KvLayout::kMaxLayers));
  KVFERRY_RETURN_IF_ERROR(CheckCount("num_v_heads", num_v_heads, 1, KvLayout::kMaxHeads));
  KVFERRY_RETURN_IF_ERROR(CheckCount("head_k_dim", head_k_dim, 1, KvLayout::kMaxHeadDim));
  KVFERRY_RETURN_IF_ERROR(CheckCount("head_v_dim", head_v_dim, 1, KvLayout::kMaxHeadDim));
  KVFERRY_RETURN_IF_ERROR(CheckCount("conv_dim", conv_dim, 1, kMaxConvDim));
  KVFERRY_RETURN_IF_ERROR(CheckCount("conv_kernel_size", conv_kernel_size, 2, kMaxConvKernelSize));
  if (DTypeBytes(conv_dtype) < 2) {
    return absl::InvalidArgumentError(absl::StrCat("gdn pool: conv_dtype is ",
                                                   DTypeName(conv_dtype),
                                                   " but must be float32, float16 or bfloat16"));
  }
  // Neither product passes 2^58 with the limits above.
  KVFERRY_RETURN_IF_ERROR(
      CheckCount("bytes of a recurrent state", recurrent_item_bytes(), 1, KvLayout::kMaxItemBytes));
  return CheckCount("bytes of a conv state", conv_item_bytes(), 1, KvLayout::kMaxItemBytes);
}

int64_t GdnShape::recurrent_item_bytes() const {
  return num_v_heads * head_k_dim * head_v_dim * static_cast<int64_t>(sizeof(float));
}

int64_t GdnShape::conv_item_bytes() const {
  return conv_dim * (conv_kernel_size - 1) * DTypeBytes(conv_dtype);
}

// ---------------------------------------------------------------- pool

absl::StatusOr<GdnPool> GdnPool::Create(const GdnShape& shape, int64_t max_requests,
                                        int64_t max_track_slots) {
  KVFERRY_RETURN_IF_ERROR(shape.Validate());
  KVFERRY_RETURN_IF_ERROR(CheckCount("max_requests", max_requests, 1, kMaxSlots));
  KVFERRY_RETURN_IF_ERROR(CheckCount("max_track_slots", max_track_slots, 0, kMaxSlots));
  const int64_t num_slots = 1 + max_requests + max_track_slots;
  KVFERRY_ASSIGN_OR_RETURN(
      std::shared_ptr<std::byte> recurrent,
      MapStates("recurrent", shape.num_layers, num_slots, shape.recurrent_item_bytes()));
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> conv,
                           MapStates("conv", shape.num_layers, num_slots, shape.conv_item_bytes()));
  return GdnPool(shape, max_requests, num_slots, std::move(recurrent), std::move(conv));
}

GdnPool::GdnPool(const GdnShape& shape, int64_t max_requests, int64_t num_slots,
                 std::shared_ptr<std::byte> recurrent, std::shared_ptr<std::byte> conv)
    : shape_(shape),
      max_requests_(max_requests),
      num_slots_(num_slots),
      recurrent_(std::move(recurrent)),
      conv_(std::move(conv)) {
  Clear();
}

int64_t GdnPool::bytes() const {
  return shape_.num_layers * num_slots_ *
         (shape_.recurrent_item_bytes() + shape_.conv_item_bytes());
}

// ---------------------------------------------------------------- track slots

void GdnPool::Clear() {
  free_.clear();
  for (int64_t slot = num_slots_ - 1; slot > max_requests_; --slot) free_.push_back(slot);
  allocated_.assign(num_slots_, false);
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
  if (slot < 0 || slot >= num_slots_) {
    return absl::InvalidArgumentError(
        absl::StrCat("gdn pool: slot ", slot, " is outside [0, ", num_slots_, ")"));
  }
  if (IsTrackSlot(slot) && !allocated_[slot]) {
    return absl::InvalidArgumentError(
        absl::StrCat("gdn pool: track slot ", slot, " is not allocated"));
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- states

absl::Status GdnPool::Reset(std::span<const int64_t> slots) {
  for (const int64_t slot : slots) KVFERRY_RETURN_IF_ERROR(CheckUsable(slot));
  for (const BufferInfo& layer : buffer_infos()) {
    for (const int64_t slot : slots) {
      std::memset(layer.address + slot * layer.item_bytes, 0, layer.item_bytes);
    }
  }
  return absl::OkStatus();
}

absl::Status GdnPool::Copy(std::span<const int64_t> sources,
                           std::span<const int64_t> destinations) {
  KVFERRY_ASSIGN_OR_RETURN(CopyMap source_of, CheckCopy(sources, destinations));
  const std::vector<Step> steps = Order(std::move(source_of));
  std::shared_ptr<std::byte> spare;
  if (NeedsSpare(steps)) {
    KVFERRY_ASSIGN_OR_RETURN(
        spare, MapSlab(std::max(shape_.recurrent_item_bytes(), shape_.conv_item_bytes())));
  }
  for (const BufferInfo& layer : buffer_infos()) {
    CopyItems(layer.address, layer.item_bytes, steps, spare.get());
  }
  return absl::OkStatus();
}

absl::StatusOr<GdnPool::CopyMap> GdnPool::CheckCopy(std::span<const int64_t> sources,
                                                    std::span<const int64_t> destinations) const {
  if (sources.size() != destinations.size()) {
    return absl::InvalidArgumentError(absl::StrCat("gdn pool: ", sources.size(), " sources but ",
                                                   destinations.size(), " destinations"));
  }
  CopyMap source_of;
  for (size_t i = 0; i < sources.size(); ++i) {
    KVFERRY_RETURN_IF_ERROR(CheckUsable(sources[i]));
    KVFERRY_RETURN_IF_ERROR(CheckUsable(destinations[i]));
    if (destinations[i] == 0) continue;
    if (sources[i] == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("gdn pool: copy ", i, " takes padding (slot 0) to slot ", destinations[i]));
    }
    if (!source_of.emplace(destinations[i], sources[i]).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("gdn pool: slot ", destinations[i], " is the destination of two copies"));
    }
  }
  absl::erase_if(source_of, [](const auto& copy) { return copy.first == copy.second; });
  return source_of;
}

std::span<float> GdnPool::recurrent_state(int64_t layer) const {
  const int64_t bytes = num_slots_ * shape_.recurrent_item_bytes();
  return {reinterpret_cast<float*>(recurrent_.get() + layer * bytes), bytes / sizeof(float)};
}

std::span<std::byte> GdnPool::conv_state(int64_t layer) const {
  const int64_t bytes = num_slots_ * shape_.conv_item_bytes();
  return {conv_.get() + layer * bytes, static_cast<size_t>(bytes)};
}

std::vector<BufferInfo> GdnPool::buffer_infos() const {
  std::vector<BufferInfo> infos;
  const auto append = [&](std::byte* memory, int64_t item_bytes) {
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      infos.push_back(
          {memory + layer * num_slots_ * item_bytes, num_slots_ * item_bytes, item_bytes});
    }
  };
  append(recurrent_.get(), shape_.recurrent_item_bytes());
  append(conv_.get(), shape_.conv_item_bytes());
  return infos;
}

}  // namespace kvferry
