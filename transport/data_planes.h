#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/config.h"
#include "transport/arena.h"
#include "transport/data_plane.h"
#include "transport/direct_reads.h"
#include "transport/lane.h"
#include "transport/limited_line.h"
#include "transport/mapped/mapped_data_plane.h"
#include "transport/messages.h"
#include "transport/metrics.h"
#include "transport/tcp/tcp_data_plane.h"
#include "transport/tcp/tcp_door.h"

namespace kvferry {

// The data planes of one node as one: a link is over shared memory where the peer is on this host,
// else over TCP, or over UCX if the configuration names transports of it, in as many lanes as both
// sides have. The first lane is the progress thread's, and so are small transfers; each of the
// others has a thread. Threads as DataPlane.
class DataPlanes final : public ChunkLinks {
 public:
  struct Options {
    Config config;
    Arena* arena;                    // Outlives the planes.
    MappedPool pool;                 // What peers on this host may read; its memory is not null.
    DirectReads::Readable readable;  // What peers may read from afar.
    std::shared_ptr<CommandQueue> commands;  // Run by the progress thread.
    Metrics* metrics;                        // Outlives the planes.
    // Makes what takes chunks on the thread of one lane.
    std::function<std::unique_ptr<LaneTaker>()> taker_of_lane;
    std::string listen_address;  // Of the control plane; empty: nobody connects to this node.
  };
  static absl::StatusOr<std::unique_ptr<DataPlanes>> Create(const Options& options);
  ~DataPlanes() override;

  // What a hello says,
  DataAddresses addresses() const;
  // and the welcome to the peer of a link that was accepted.
  DataAddresses AddressesFor(LinkId link) const;
  // To the sender of a hello.
  absl::StatusOr<LinkId> Accept(const DataAddresses& peer);
  // To the sender of a welcome.
  absl::StatusOr<LinkId> Connect(const DataAddresses& peer);
  void Close(LinkId link);
  // Whether the link is over shared memory.
  static bool IsMapped(LinkId link);
  // As AddressedPlane. Links over a network may be used at once.
  bool IsOpen(LinkId link) const { return !IsMapped(link) || mapped_->IsOpen(link); }
  // False while some of a link's lanes are still to be made; what is sent goes over the first one.
  bool IsWhole(LinkId link) const;
  // For the log: the path, and over how many lanes.
  std::string PathName(LinkId link) const;

  void SendChunk(LinkId link, const ChunkHeader& header, ChunkSource source,
                 SendDone done) override;
  bool LendsTo(LinkId link) const override;
  void SendCredit(LinkId link, const CreditHeader& header) override;
  ReadsPool PoolReads(LinkId link) const override;
  ReadCosts CostsOfReads(LinkId link) const override;
  void Read(LinkId link, const ChunkHeader& header, std::span<const std::byte> list) override;
  // As DataPlane.
  bool CarriesMessages(LinkId link) const { return PlaneOf(link).carries_messages(); }
  absl::Status SendMessage(LinkId link, const MessageHeader& header, std::string_view bytes) {
    return PlaneOf(link).SendMessage(link, header, bytes);
  }
  Backlog BacklogOf(LinkId link) const { return PlaneOf(link).BacklogOf(link); }
  // Whether what CostsOfReads() says is still to be found out; OnProbed() follows.
  bool Probing(LinkId link) const { return direct_ != nullptr && direct_->Probing(link); }

  bool Progress(DataEvents* events);
  // Whether there is a deadline that the last Tick() did not know of.
  bool TakeNewDeadline() {
    const bool at_door = door_ != nullptr && door_->TakeAccepted();
    return (tcp_ != nullptr && tcp_->TakeNewDeadline()) || at_door;
  }
  bool Arm();
  // Ends what is overdue; returns when to be called again at the latest.
  Deadline Tick(Deadline now);
  // The network's fd, and those of the others or -1.
  int network_fd() const { return network_->event_fd(); }
  int local_fd() const { return mapped_ == nullptr ? -1 : mapped_->event_fd(); }
  int direct_fd() const { return direct_ == nullptr ? -1 : direct_->event_fd(); }
  int door_fd() const { return door_ == nullptr ? -1 : door_->event_fd(); }

 private:
  // Chunks of a link that are under way in each lane, the first one's at 0.
  using UnderWay = std::vector<int64_t>;
  // Its plane is of the network's kind; the other is null.
  struct LanePlane {
    AddressedPlane* ucx;
    TcpDataPlane* tcp;
    std::string address;  // Of a UCX plane.
    std::unique_ptr<Lane> lane;
  };
  // The lanes of a link over TCP.
  struct TcpLanes {
    int64_t lanes;
    TcpAddress address{};  // What a peer was told that is to connect.
    int64_t made = 0;
  };

  explicit DataPlanes(const Options& options);
  absl::Status MakeNetwork(const Options& options);
  absl::Status MakeLanes(const Options& options);
  absl::Status MakeDirect(const Options& options);
  DataPlane& PlaneOf(LinkId link) const { return IsMapped(link) ? *mapped_ : *network_; }
  // The same way as the peer, or why there is none.
  absl::Status CheckSameNetwork(const DataAddresses& peer) const;
  absl::StatusOr<LinkId> ConnectMapped(const DataAddresses& peer);
  absl::StatusOr<LinkId> ConnectUcx(const DataAddresses& peer);
  absl::StatusOr<LinkId> AwaitTcp(const DataAddresses& peer);
  absl::StatusOr<LinkId> DialTcpLanes(const TcpAddress& peer);
  TcpConnection ConnectionTo(const TcpAddress& peer, int64_t lane) const;
  void ConnectDirect(LinkId link, const DataAddresses& peer);
  // On the lane's thread.
  void JoinLane(size_t lane, LinkId link, TcpConnection connection);
  void OnLaneMade(LinkId link);
  bool LetArrivalsIn();
  int64_t num_lanes() const { return static_cast<int64_t>(lanes_.size()) + 1; }

  const Config config_;
  std::unique_ptr<AddressedPlane> ucx_;  // Null: the network is TCP's.
  std::unique_ptr<TcpDataPlane> tcp_;    // Null: it is UCX's.
  DataPlane* network_ = nullptr;         // One of the two.
  std::unique_ptr<TcpDoor> door_;        // Null: nobody connects to this node, or by UCX.
  absl::flat_hash_map<LinkId, TcpLanes> tcp_lanes_;
  const std::unique_ptr<AddressedPlane> mapped_;  // Null: not on this host or not wanted.
  std::unique_ptr<DirectReads> direct_;           // Null: not wanted, or no network for it.
  LimitedLine not_direct_{LimitedLine::kSome};
  Metrics* const metrics_;
  std::vector<LanePlane> lanes_;  // But the first.
  // Of links that have more than one lane, and all of them; shared with sends, which may end after
  // their link.
  absl::flat_hash_map<LinkId, std::shared_ptr<UnderWay>> under_way_;
  std::vector<std::pair<LinkId, absl::Status>> down_;  // Reported by the next Progress().
};

}  // namespace kvferry
