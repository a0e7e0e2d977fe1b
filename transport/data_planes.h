#pragma once

#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "base/config.h"
#include "transport/arena.h"
#include "transport/data_plane.h"

namespace kvferry {

// Where a peer's data planes are reached, as its hello or welcome says.
struct DataAddresses {
  std::string worker;  // UCX, from anywhere.
  std::string local;   // Shared memory, from this host; empty: not.
};

// The data planes of one node as one: a link is over shared memory where the peer is on this host,
// else over UCX. Threads as DataPlane.
class DataPlanes final : public ChunkLinks {
 public:
  // The arena outlives the planes. `pool` (null: none) is what peers on this host may read.
  static absl::StatusOr<std::unique_ptr<DataPlanes>> Create(const Config& config, Arena* arena,
                                                            const SharedMemory* pool);

  DataAddresses addresses() const;
  absl::StatusOr<LinkId> Connect(const DataAddresses& peer);
  void Close(LinkId link);
  // Whether the link is over shared memory.
  static bool IsMapped(LinkId link);

  void SendChunk(LinkId link, const ChunkHeader& header, std::span<const std::byte> payload,
                 SendDone done) override;
  void SendCredit(LinkId link, const CreditHeader& header) override;
  bool ReadsPool(LinkId link) const override { return IsMapped(link) && mapped_->ReadsPool(link); }

  bool Progress(DataEvents* events);
  bool Arm();
  // UCX's fd, and that of the other plane or -1.
  int worker_fd() const { return ucx_->event_fd(); }
  int local_fd() const { return mapped_ == nullptr ? -1 : mapped_->event_fd(); }

 private:
  DataPlanes(std::unique_ptr<DataPlane> ucx, std::unique_ptr<DataPlane> mapped);
  DataPlane& PlaneOf(LinkId link) { return IsMapped(link) ? *mapped_ : *ucx_; }

  const std::unique_ptr<DataPlane> ucx_;
  const std::unique_ptr<DataPlane> mapped_;  // Null: not on this host or not wanted.
};

}  // namespace kvferry
