#include "transport/data_planes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/log.h"
#include "base/status.h"
#include "transport/mapped/mapped_data_plane.h"
#include "transport/tcp/tcp_frames.h"
#include "transport/tcp/tcp_socket.h"
#include "transport/ticket.h"
#include "transport/ucx/ucx_data_plane.h"
#include "transport/ucx/ucx_direct_reads.h"

namespace kvferry {
namespace {

std::unique_ptr<AddressedPlane> MappedPlane(const Config& config, Arena* arena,
                                            const MappedPool& pool) {
  if (config.same_host_path == "network" || arena->fd() < 0) return nullptr;
  // Half, so that the other way is still in time.
  absl::StatusOr<std::unique_ptr<AddressedPlane>> plane =
      MakeMappedDataPlane(arena, pool, config.connect_timeout_ms / 2);
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

absl::Status OfLane(int64_t lane, const absl::Status& status) {
  return {status.code(), absl::StrCat("lane ", lane, " (the first is 0): ", status.message())};
}

}  // namespace

absl::StatusOr<std::unique_ptr<DataPlanes>> DataPlanes::Create(const Options& options) {
  std::unique_ptr<DataPlanes> planes(new DataPlanes(options));
  KVFERRY_RETURN_IF_ERROR(planes->MakeNetwork(options));
  KVFERRY_RETURN_IF_ERROR(planes->MakeDirect(options));
  KVFERRY_RETURN_IF_ERROR(planes->MakeLanes(options));
  return planes;
}

DataPlanes::DataPlanes(const Options& options)
    : config_(options.config),
      mapped_(MappedPlane(options.config, options.arena, options.pool)),
      metrics_(options.metrics) {}

absl::Status DataPlanes::MakeNetwork(const Options& options) {
  if (!config_.ucx_tls.empty()) {
    KVFERRY_ASSIGN_OR_RETURN(ucx_, MakeUcxDataPlane(config_));
    network_ = ucx_.get();
    return absl::OkStatus();
  }
  KVFERRY_RETURN_IF_ERROR(CheckCongestionControl(config_.tcp_congestion_control));
  KVFERRY_ASSIGN_OR_RETURN(tcp_, TcpDataPlane::Create(*options.pool.memory));
  network_ = tcp_.get();
  if (!config_.net_device.empty()) {
    KVFERRY_RETURN_IF_ERROR(AddressOfInterface(config_.net_device).status());
  }
  if (options.listen_address.empty()) return absl::OkStatus();
  KVFERRY_ASSIGN_OR_RETURN(const std::string host, HostOfAddress(options.listen_address));
  KVFERRY_ASSIGN_OR_RETURN(door_, TcpDoor::Create(config_, host, metrics_));
  return absl::OkStatus();
}

absl::Status DataPlanes::MakeDirect(const Options& options) {
  const std::string& path = config_.network_path;
  if (path == "packed") return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<DirectReads>> direct =
      MakeUcxDirectReads(config_, options.readable);
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
  for (int64_t i = 1; i < config_.lanes; ++i) {
    LanePlane made{};
    std::unique_ptr<DataPlane> plane;
    if (ucx_ != nullptr) {
      KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<AddressedPlane> ucx, MakeUcxDataPlane(config_));
      made.address = ucx->address();
      made.ucx = ucx.get();
      plane = std::move(ucx);
    } else {
      KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<TcpDataPlane> tcp,
                               TcpDataPlane::Create(*options.pool.memory));
      made.tcp = tcp.get();
      plane = std::move(tcp);
    }
    KVFERRY_ASSIGN_OR_RETURN(
        made.lane, Lane::Create({std::move(plane), options.commands, options.taker_of_lane(),
                                 [this](LinkId link) { OnLaneMade(link); },
                                 [this, i](LinkId link, const absl::Status& status) {
                                   down_.emplace_back(link, OfLane(i, status));
                                 }}));
    lanes_.push_back(std::move(made));
  }
  return absl::OkStatus();
}

DataPlanes::~DataPlanes() {
  for (const LanePlane& each : lanes_) each.lane->Stop();
}

// ---------------------------------------------------------------- links

DataAddresses DataPlanes::addresses() const {
  DataAddresses addresses;
  if (mapped_ != nullptr) addresses.local = mapped_->address();
  if (direct_ != nullptr) addresses.direct = direct_->address();
  if (tcp_ != nullptr) {
    addresses.tcp.lanes = num_lanes();
    return addresses;
  }
  addresses.worker = ucx_->address();
  for (const LanePlane& each : lanes_) addresses.lanes.push_back(each.address);
  return addresses;
}

// Without TCP's the peer is to come through shared memory, as this side does.
DataAddresses DataPlanes::AddressesFor(LinkId link) const {
  DataAddresses own = addresses();
  if (tcp_ == nullptr) return own;
  const auto found = tcp_lanes_.find(link);
  own.tcp = found == tcp_lanes_.end() ? TcpAddress() : found->second.address;
  return own;
}

absl::Status DataPlanes::CheckSameNetwork(const DataAddresses& peer) const {
  const bool peer_has_tcp = peer.tcp.lanes > 0;
  if (tcp_ != nullptr ? peer_has_tcp : !peer.worker.empty()) return absl::OkStatus();
  const std::string here = tcp_ != nullptr ? "TCP" : absl::StrCat("UCX (", config_.ucx_tls, ")");
  const std::string there = peer_has_tcp ? "TCP" : peer.worker.empty() ? "shared memory" : "UCX";
  return absl::FailedPreconditionError(absl::StrCat("this side sends chunks over ", here,
                                                    ", the peer over ", there,
                                                    "; set ucx_tls to the same on both"));
}

absl::StatusOr<LinkId> DataPlanes::ConnectMapped(const DataAddresses& peer) {
  if (mapped_ == nullptr || peer.local.empty()) {
    return absl::UnavailableError("one side shares no memory (same_host_path)");
  }
  absl::StatusOr<LinkId> link = mapped_->Connect(peer.local);
  if (!link.ok()) Log().debug("a peer is not reached on this host: {}", link.status().ToString());
  return link;
}

absl::StatusOr<LinkId> DataPlanes::ConnectUcx(const DataAddresses& peer) {
  KVFERRY_ASSIGN_OR_RETURN(const LinkId link, ucx_->Connect(peer.worker));
  const size_t more = std::min(lanes_.size(), peer.lanes.size());
  for (size_t i = 0; i < more; ++i) {
    lanes_[i].lane->Connect(
        link, [plane = lanes_[i].ucx, address = peer.lanes[i]] { return plane->Connect(address); });
  }
  if (more > 0) under_way_.emplace(link, std::make_shared<UnderWay>(1 + more));
  return link;
}

void DataPlanes::ConnectDirect(LinkId link, const DataAddresses& peer) {
  if (direct_ == nullptr || peer.direct.empty()) return;
  const absl::Status reads = direct_->Connect(link, peer.direct);
  if (reads.ok()) return;
  if (const auto more = not_direct_.Next()) {
    Log().warn("a peer's pages are not read from afar: {}{}", reads.ToString(), *more);
  }
}

absl::StatusOr<LinkId> DataPlanes::Accept(const DataAddresses& peer) {
  absl::StatusOr<LinkId> link = ConnectMapped(peer);
  if (link.ok()) return link;
  KVFERRY_RETURN_IF_ERROR(CheckSameNetwork(peer));
  link = tcp_ != nullptr ? AwaitTcp(peer) : ConnectUcx(peer);
  if (link.ok()) ConnectDirect(*link, peer);
  return link;
}

absl::StatusOr<LinkId> DataPlanes::Connect(const DataAddresses& peer) {
  // Over TCP one connection serves both directions: the peer says whether it is to be made.
  absl::StatusOr<LinkId> link = 0;
  if (tcp_ == nullptr || peer.tcp.port == 0) {
    link = ConnectMapped(peer);
    if (link.ok() || tcp_ != nullptr) return link;
  }
  KVFERRY_RETURN_IF_ERROR(CheckSameNetwork(peer));
  link = tcp_ != nullptr ? DialTcpLanes(peer.tcp) : ConnectUcx(peer);
  if (link.ok()) ConnectDirect(*link, peer);
  return link;
}

absl::StatusOr<LinkId> DataPlanes::AwaitTcp(const DataAddresses& peer) {
  if (door_ == nullptr) return absl::FailedPreconditionError("this endpoint does not listen");
  const Deadline ready_by = DeadlineInMs(config_.connect_timeout_ms);
  const LinkId link = tcp_->Await(ready_by);
  const int64_t lanes = std::min(num_lanes(), peer.tcp.lanes);
  tcp_lanes_.emplace(link, TcpLanes{lanes, door_->Expect(link, lanes, ready_by)});
  return link;
}

absl::StatusOr<LinkId> DataPlanes::DialTcpLanes(const TcpAddress& peer) {
  const int64_t lanes = std::min(num_lanes(), peer.lanes);
  const Deadline ready_by = DeadlineInMs(config_.connect_timeout_ms);
  KVFERRY_ASSIGN_OR_RETURN(const LinkId link, tcp_->Open(ConnectionTo(peer, 0), ready_by));
  tcp_lanes_.emplace(link, TcpLanes{lanes});
  OnLaneMade(link);  // Whatever is sent waits for the first one.
  for (int64_t lane = 1; lane < lanes; ++lane) JoinLane(lane - 1, link, ConnectionTo(peer, lane));
  return link;
}

// Only all of them are used: who waited for one that is never made would wait for its end.
void DataPlanes::OnLaneMade(LinkId link) {
  const auto found = tcp_lanes_.find(link);
  if (found == tcp_lanes_.end()) return;  // It was closed meanwhile.
  const int64_t lanes = found->second.lanes;
  if (++found->second.made == lanes && lanes > 1) {
    under_way_.emplace(link, std::make_shared<UnderWay>(lanes));
  }
}

bool DataPlanes::IsWhole(LinkId link) const {
  const auto found = tcp_lanes_.find(link);
  return found == tcp_lanes_.end() || found->second.made == found->second.lanes;
}

TcpConnection DataPlanes::ConnectionTo(const TcpAddress& peer, int64_t lane) const {
  const auto dial = [host = peer.host, port = peer.port,
                     control = config_.tcp_congestion_control]() -> absl::StatusOr<UniqueFd> {
    KVFERRY_ASSIGN_OR_RETURN(UniqueFd socket, DialTcp(host, port));
    KVFERRY_RETURN_IF_ERROR(ChooseCongestionControl(socket, control));
    return socket;
  };
  return {UniqueFd(),
          TcpHello::With(peer.token, lane).Bytes(),
          TcpHello::With(peer.answer, lane).Bytes(),
          absl::StrCat(peer.host, " port ", peer.port),
          config_.heartbeat_timeout_ms,
          dial};
}

void DataPlanes::JoinLane(size_t lane, LinkId link, TcpConnection connection) {
  // Of a std::function, which wants what it holds to be copied.
  const auto moved = std::make_shared<TcpConnection>(std::move(connection));
  const Deadline ready_by = DeadlineInMs(config_.connect_timeout_ms);
  lanes_[lane].lane->Connect(link, [plane = lanes_[lane].tcp, moved, ready_by] {
    return plane->Open(std::move(*moved), ready_by);
  });
}

bool DataPlanes::LetArrivalsIn() {
  if (door_ == nullptr) return false;
  std::vector<TcpDoor::Arrival> arrivals = door_->Progress();
  for (TcpDoor::Arrival& arrival : arrivals) {
    if (!tcp_lanes_.contains(arrival.link)) continue;
    OnLaneMade(arrival.link);
    if (arrival.lane > 0) {
      JoinLane(arrival.lane - 1, arrival.link, std::move(arrival.connection));
    } else if (const absl::Status joined = tcp_->Join(arrival.link, std::move(arrival.connection));
               !joined.ok()) {
      down_.emplace_back(arrival.link, joined);
    }
  }
  return !arrivals.empty();
}

bool DataPlanes::IsMapped(LinkId link) { return link >= kFirstMappedLink; }

std::string DataPlanes::PathName(LinkId link) const {
  if (IsMapped(link)) return "shared memory";
  const std::string network = tcp_ == nullptr ? absl::StrCat("UCX (", config_.ucx_tls, ")") : "TCP";
  const auto of_tcp = tcp_lanes_.find(link);
  const auto found = under_way_.find(link);
  const int64_t lanes = of_tcp != tcp_lanes_.end()  ? of_tcp->second.lanes
                        : found != under_way_.end() ? static_cast<int64_t>(found->second->size())
                                                    : 1;
  return lanes == 1 ? network : absl::StrCat(network, ", ", lanes, " lanes");
}

void DataPlanes::Close(LinkId link) {
  if (door_ != nullptr) door_->Forget(link);
  const auto found = tcp_lanes_.find(link);
  // Some of them may be made, and not all.
  const bool may_have_lanes = found != tcp_lanes_.end() && found->second.lanes > 1;
  if (found != tcp_lanes_.end()) tcp_lanes_.erase(found);
  if (under_way_.erase(link) > 0 || may_have_lanes) {
    for (const LanePlane& each : lanes_) each.lane->Close(link);
  }
  if (direct_ != nullptr) direct_->Close(link);
  PlaneOf(link).Close(link);
}

// ---------------------------------------------------------------- chunks

bool DataPlanes::LendsTo(LinkId link) const { return tcp_ != nullptr && !IsMapped(link); }

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

void DataPlanes::SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source,
                           SendDone done) {
  const auto found = under_way_.find(link);
  if (found == under_way_.end()) {
    return PlaneOf(link).SendChunk(link, header, std::move(source), std::move(done));
  }
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
  if (lane == 0) return network_->SendChunk(link, header, std::move(source), std::move(counted));
  ++metrics_->chunks_in_lanes;
  lanes_[lane - 1].lane->SendChunk(link, header, std::move(source), std::move(counted));
}

void DataPlanes::SendCredit(LinkId link, const CreditHeader& header) {
  PlaneOf(link).SendCredit(link, header);
}

bool DataPlanes::Progress(DataEvents* events) {
  bool busy = LetArrivalsIn();
  busy |= network_->Progress(events);
  if (direct_ != nullptr) busy |= direct_->Progress(events);
  const std::vector<std::pair<LinkId, absl::Status>> down = std::exchange(down_, {});
  for (const auto& [link, status] : down) events->OnLinkDown(link, status);
  return (mapped_ != nullptr && mapped_->Progress(events)) || busy || !down.empty();
}

bool DataPlanes::Arm() {
  return network_->Arm() && down_.empty() && (mapped_ == nullptr || mapped_->Arm()) &&
         (direct_ == nullptr || direct_->Arm());
}

Deadline DataPlanes::Tick(Deadline now) {
  Deadline next = network_->Tick(now);
  if (mapped_ != nullptr) next = std::min(next, mapped_->Tick(now));
  if (door_ != nullptr) next = std::min(next, door_->Tick(now));
  if (direct_ != nullptr) next = std::min(next, direct_->Tick(now));
  return next;
}

}  // namespace kvferry
