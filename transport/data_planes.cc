#include "transport/data_planes.h"

#include <utility>

#include "base/log.h"
#include "base/status.h"
#include "transport/mapped/mapped_data_plane.h"
#include "transport/ucx/ucx_data_plane.h"

namespace kvferry {
namespace {

std::unique_ptr<DataPlane> MappedPlane(const Config& config, Arena* arena,
                                       const SharedMemory* pool) {
  if (!config.mapped_path || arena->fd() < 0) return nullptr;
  absl::StatusOr<std::unique_ptr<DataPlane>> plane = MakeMappedDataPlane(arena, pool);
  if (plane.ok()) return *std::move(plane);
  Log().warn("peers on this host are reached over the network: {}", plane.status().ToString());
  return nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DataPlanes>> DataPlanes::Create(const Config& config, Arena* arena,
                                                               const SharedMemory* pool) {
  KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<DataPlane> ucx, MakeUcxDataPlane(config));
  return std::unique_ptr<DataPlanes>(
      new DataPlanes(std::move(ucx), MappedPlane(config, arena, pool)));
}

DataPlanes::DataPlanes(std::unique_ptr<DataPlane> ucx, std::unique_ptr<DataPlane> mapped)
    : ucx_(std::move(ucx)), mapped_(std::move(mapped)) {}

DataAddresses DataPlanes::addresses() const {
  return {ucx_->address(), mapped_ == nullptr ? "" : mapped_->address()};
}

absl::StatusOr<LinkId> DataPlanes::Connect(const DataAddresses& peer) {
  if (mapped_ != nullptr && !peer.local.empty()) {
    absl::StatusOr<LinkId> link = mapped_->Connect(peer.local);
    if (link.ok()) return link;
    Log().debug("a peer is not reached on this host: {}", link.status().ToString());
  }
  return ucx_->Connect(peer.worker);
}

bool DataPlanes::IsMapped(LinkId link) { return link >= kFirstMappedLink; }

void DataPlanes::Close(LinkId link) { PlaneOf(link).Close(link); }

void DataPlanes::SendChunk(LinkId link, const ChunkHeader& header,
                           std::span<const std::byte> payload, SendDone done) {
  PlaneOf(link).SendChunk(link, header, payload, std::move(done));
}

void DataPlanes::SendCredit(LinkId link, const CreditHeader& header) {
  PlaneOf(link).SendCredit(link, header);
}

bool DataPlanes::Progress(DataEvents* events) {
  const bool busy = ucx_->Progress(events);
  return (mapped_ != nullptr && mapped_->Progress(events)) || busy;
}

bool DataPlanes::Arm() { return ucx_->Arm() && (mapped_ == nullptr || mapped_->Arm()); }

}  // namespace kvferry
