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
#include "transport/messages.h"
#include "transport/metrics.h"

namespace kvferry {

// The data planes of one node as one: a link is over shared memory where the peer is on this host,
// else over UCX, in as many lanes as both sides have. The first lane is the progress thread's, and
// so are small transfers; each of the others has a thread. Threads as DataPlane.
class DataPlanes final : public ChunkLinks {
 public:
  struct Options {
    Config config;
    Arena* arena;                            // Outlives the planes.
    const SharedMemory* pool;                // What peers on this host may read; null: nothing.
    DirectReads::Readable readable;          // What peers may read from afar.
    std::shared_ptr<CommandQueue> commands;  // Run by the progress thread.
    Metrics* metrics;                        // Outlives the planes.
    // Makes what is called with chunks on the thread of one lane.
    std::function<DataEvents::TakeChunk()> on_chunk;
  };
  static absl::StatusOr<std::unique_ptr<DataPlanes>> Create(const Options& options);
  ~DataPlanes() override;

  DataAddresses addresses() const;
  absl::StatusOr<LinkId> Connect(const DataAddresses& peer);
  void Close(LinkId link);
  // Whether the link is over shared memory.
  static bool IsMapped(LinkId link);
  // For the log: the path, and over how many lanes.
  std::string PathName(LinkId link) const;

  void SendChunk(LinkId link, const ChunkHeader& header, Fill fill, SendDone done) override;
  void SendCredit(LinkId link, const CreditHeader& header) override;
  ReadsPool PoolReads(LinkId link) const override;
  ReadCosts CostsOfReads(LinkId link) const override;
  void Read(LinkId link, const ChunkHeader& header, std::span<const std::byte> list) override;
  // Whether what CostsOfReads() says is still to be found out; OnProbed() follows.
  bool Probing(LinkId link) const { return direct_ != nullptr && direct_->Probing(link); }

  bool Progress(DataEvents* events);
  bool Arm();
  // UCX's fd, and those of the others or -1.
  int worker_fd() const { return ucx_->event_fd(); }
  int local_fd() const { return mapped_ == nullptr ? -1 : mapped_->event_fd(); }
  int direct_fd() const { return direct_ == nullptr ? -1 : direct_->event_fd(); }

 private:
  // Chunks of a link that are under way in each lane, the first one's at 0.
  using UnderWay = std::vector<int64_t>;

  DataPlanes(std::unique_ptr<DataPlane> ucx, std::unique_ptr<DataPlane> mapped, Metrics* metrics);
  absl::Status MakeLanes(const Options& options);
  absl::Status MakeDirect(const Options& options);
  DataPlane& PlaneOf(LinkId link) { return IsMapped(link) ? *mapped_ : *ucx_; }
  void SendHere(LinkId link, ChunkHeader header, const Fill& fill, SendDone done);

  const std::unique_ptr<DataPlane> ucx_;
  const std::unique_ptr<DataPlane> mapped_;  // Null: not on this host or not wanted.
  std::unique_ptr<DirectReads> direct_;      // Null: not wanted, or no network for it.
  Metrics* const metrics_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // But the first.
  // Of links that have more than one lane; shared with sends, which may end after their link.
  absl::flat_hash_map<LinkId, std::shared_ptr<UnderWay>> under_way_;
  std::vector<std::pair<LinkId, absl::Status>> down_;  // Reported by the next Progress().
};

}  // namespace kvferry
