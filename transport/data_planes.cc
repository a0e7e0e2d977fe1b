#include "transport/data_planes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "transport/mapped/mapped_data_plane.h"
#include "transport/ucx/ucx_data_plane.h"
#include "transport/ucx/ucx_direct_reads.h"

namespace kvferry {
namespace {

std::unique_ptr<DataPlane> MappedPlane(const Config& config, Arena* arena,
                                       const SharedMemory* pool) {
  if (config.same_host_path == "ucx" || arena->fd() < 0) return nullptr;
  absl::StatusOr<std::unique_ptr<DataPlane>> plane = MakeMappedDataPlane(arena, pool);
  if (plane.ok()) return *std::move(plane);
  Log().warn("peers on this host are reached over the network: {}", plane.status().ToString());
  return nullptr;
}

// The lane of the next chunk. The first lane's thread also runs everything else, and gathers before
// it is back here: the others get one chunk more each, so that they have work meanwhile.
size_t ChooseLane(const std::vector<int64_t>& under_way) {
  size_t best = 0;
  for (size_t lane = 1; lane < under_way.size(); ++lane) {
    const int64_t most = under_way[best] + (best == 0 ? 1 : -1);
    if (under_way[lane] <= most) best = lane;
  }
  return best;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DataPlanes>> DataPlanes::Create(const Options& options) {
  KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<DataPlane> ucx, MakeUcxDataPlane(options.config));
  std::unique_ptr<DataPlanes> planes(new DataPlanes(
      std::move(ucx), MappedPlane(options.config, options.arena, options.pool), options.metrics));
  KVFERRY_RETURN_IF_ERROR(planes->MakeDirect(options));
  KVFERRY_RETURN_IF_ERROR(planes->MakeLanes(options));
  return planes;
}

DataPlanes::DataPlanes(std::unique_ptr<DataPlane> ucx, std::unique_ptr<DataPlane> mapped,
                       Metrics* metrics)
    : ucx_(std::move(ucx)), mapped_(std::move(mapped)), metrics_(metrics) {}

absl::Status DataPlanes::MakeDirect(const Options& options) {
  const std::string& path = options.config.network_path;
  if (path == "packed") return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<DirectReads>> direct =
      MakeUcxDirectReads(options.config, options.readable);
  if (direct.ok()) {
    direct_ = *std::move(direct);
  } else if (path == "direct") {
    return direct.status();
  } else {
    Log().warn("pages are not read from afar: {}", direct.status().ToString());
  }
  return absl::OkStatus();
}

absl::Status DataPlanes::MakeLanes(const Options& options) {
  for (int64_t i = 1; i < options.config.lanes; ++i) {
    KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane,
                             Lane::Create({options.config, options.commands, options.on_chunk(),
                                           [this](LinkId link, const absl::Status& status) {
                                             down_.emplace_back(link, status);
                                           }}));
    lanes_.push_back(std::move(lane));
  }
  return absl::OkStatus();
}

DataPlanes::~DataPlanes() {
  for (const std::unique_ptr<Lane>& lane : lanes_) lane->Stop();
}

DataAddresses DataPlanes::addresses() const {
  DataAddresses addresses{ucx_->address(), mapped_ == nullptr ? "" : mapped_->address()};
  for (const std::unique_ptr<Lane>& lane : lanes_) addresses.lanes.push_back(lane->address());
  if (direct_ != nullptr) addresses.direct = direct_->address();
  return addresses;
}

absl::StatusOr<LinkId> DataPlanes::Connect(const DataAddresses& peer) {
  if (mapped_ != nullptr && !peer.local.empty()) {
    absl::StatusOr<LinkId> link = mapped_->Connect(peer.local);
    if (link.ok()) return link;
    Log().debug("a peer is not reached on this host: {}", link.status().ToString());
  }
  KVFERRY_ASSIGN_OR_RETURN(const LinkId link, ucx_->Connect(peer.worker));
  if (direct_ != nullptr && !peer.direct.empty()) {
    const absl::Status reads = direct_->Connect(link, peer.direct);
    if (!reads.ok()) Log().warn("a peer's pages are not read from afar: {}", reads.ToString());
  }
  const size_t more = std::min(lanes_.size(), peer.lanes.size());
  for (size_t i = 0; i < more; ++i) lanes_[i]->Connect(link, peer.lanes[i]);
  if (more > 0) under_way_.emplace(link, std::make_shared<UnderWay>(1 + more));
  return link;
}

bool DataPlanes::IsMapped(LinkId link) { return link >= kFirstMappedLink; }

std::string DataPlanes::PathName(LinkId link) const {
  if (IsMapped(link)) return "shared memory";
  const auto found = under_way_.find(link);
  if (found == under_way_.end()) return "UCX";
  return absl::StrCat("UCX, ", found->second->size(), " lanes");
}

void DataPlanes::Close(LinkId link) {
  if (under_way_.erase(link) > 0) {
    for (const std::unique_ptr<Lane>& lane : lanes_) lane->Close(link);
  }
  if (direct_ != nullptr) direct_->Close(link);
  PlaneOf(link).Close(link);
}

ChunkLinks::ReadsPool DataPlanes::PoolReads(LinkId link) const {
  if (!IsMapped(link)) return direct_ == nullptr ? ReadsPool::kNo : ReadsPool::kFromAfar;
  return mapped_->ReadsPool(link) ? ReadsPool::kOnThisHost : ReadsPool::kNo;
}

ReadCosts DataPlanes::CostsOfReads(LinkId link) const {
  return direct_ == nullptr ? ReadCosts() : direct_->Costs(link);
}

void DataPlanes::Read(LinkId link, const ChunkHeader& header, std::span<const std::byte> list) {
  if (direct_ != nullptr) direct_->Read(link, header, list);
}

void DataPlanes::SendHere(LinkId link, ChunkHeader header, const Fill& fill, SendDone done) {
  const absl::StatusOr<std::span<const std::byte>> payload = fill(&header);
  if (!payload.ok()) return done(payload.status());
  PlaneOf(link).SendChunk(link, header, *payload, std::move(done));
}

void DataPlanes::SendChunk(LinkId link, const ChunkHeader& header, Fill fill, SendDone done) {
  const auto found = under_way_.find(link);
  if (found == under_way_.end()) return SendHere(link, header, fill, std::move(done));
  const std::shared_ptr<UnderWay> under_way = found->second;
  // The first chunk of a transfer may be all there is, and another thread has to wake up first; a
  // list is made here, and there is not much of it to send.
  const bool here = header.offset == 0 || (header.flags & kChunkInPool) != 0;
  const size_t lane = here ? 0 : ChooseLane(*under_way);
  ++(*under_way)[lane];
  SendDone counted = [under_way, lane, done = std::move(done)](const absl::Status& status) {
    --(*under_way)[lane];
    done(status);
  };
  if (lane == 0) return SendHere(link, header, fill, std::move(counted));
  ++metrics_->chunks_in_lanes;
  lanes_[lane - 1]->SendChunk(link, header, std::move(fill), std::move(counted));
}

void DataPlanes::SendCredit(LinkId link, const CreditHeader& header) {
  PlaneOf(link).SendCredit(link, header);
}

bool DataPlanes::Progress(DataEvents* events) {
  bool busy = ucx_->Progress(events);
  if (direct_ != nullptr) busy |= direct_->Progress(events);
  const std::vector<std::pair<LinkId, absl::Status>> down = std::exchange(down_, {});
  for (const auto& [link, status] : down) events->OnLinkDown(link, status);
  return (mapped_ != nullptr && mapped_->Progress(events)) || busy || !down.empty();
}

bool DataPlanes::Arm() {
  return ucx_->Arm() && (mapped_ == nullptr || mapped_->Arm()) &&
         (direct_ == nullptr || direct_->Arm());
}

}  // namespace kvferry
