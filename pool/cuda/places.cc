#include "pool/cuda/places.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "pool/cuda/cuda_status.h"
#include "pool/cuda/driver.h"
#include "pool/cuda/host_pin.h"

namespace kvferry {
namespace {

absl::StatusOr<Place> PlaceOfByte(const std::byte* address, int device) {
  KVFERRY_ASSIGN_OR_RETURN(const cudaPointerAttributes attributes, AttributesOf(address));
  switch (attributes.type) {
    case cudaMemoryTypeManaged:
      return Place::kPinned;
    case cudaMemoryTypeHost:
      return attributes.devicePointer == address ? Place::kPinned : Place::kHost;
    case cudaMemoryTypeDevice:
      if (attributes.device == device) return Place::kDevice;
      return absl::InvalidArgumentError(absl::StrCat(
          "cuda memory: rows lie on device ", attributes.device, ", but the pool on ", device));
    default:
      return Place::kHost;
  }
}

// Of bytes that somebody else has pinned at both ends: in one piece, or there may be a gap.
Place PlaceBetween(std::span<const std::byte> bytes) {
  const absl::StatusOr<std::span<const std::byte>> all = AllocationOf(bytes.data());
  if (!all.ok()) return Place::kPinnedAtEnds;
  const bool whole =
      all->data() <= bytes.data() && bytes.data() + bytes.size() <= all->data() + all->size();
  return whole ? Place::kPinned : Place::kPartlyPinned;
}

}  // namespace

absl::StatusOr<Place> PlaceOf(std::span<const std::byte> bytes, int device) {
  if (IsAnyPinned(bytes)) return IsPinned(bytes) ? Place::kPinned : Place::kPartlyPinned;
  KVFERRY_ASSIGN_OR_RETURN(const Place begin, PlaceOfByte(&bytes.front(), device));
  KVFERRY_ASSIGN_OR_RETURN(const Place end, PlaceOfByte(&bytes.back(), device));
  if (begin == Place::kPinned && end == Place::kPinned) return PlaceBetween(bytes);
  if (begin == end) return begin;
  if (begin != Place::kDevice && end != Place::kDevice) return Place::kPartlyPinned;
  return absl::InvalidArgumentError(
      "cuda memory: rows begin on the device and end on the host, or the other way round");
}

}  // namespace kvferry
